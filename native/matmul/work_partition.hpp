// How the threads of a product divide it.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

namespace paceline::matmul {

constexpr int64_t num_parts(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

inline constexpr int64_t many_tiles = 8; // from here on it costs little to read a group again
inline constexpr int64_t items_per_thread = 8, items_per_thread_of_many_tiles = 32; // at least, if tiles allow

// The products of one matrix, in items: a group of its weights times a range of tiles. A group is divided if there are few
// of them for the threads, and sooner with many tiles.
struct MatrixItems {
    int64_t num_tiles, range = 0, num_ranges = 0, count = 0; // range: tiles of an item

    constexpr MatrixItems(int64_t num_groups, int64_t tiles, int num_threads) : num_tiles(tiles) {
        if (num_tiles > 0) {
            const int64_t least = (num_tiles < many_tiles ? items_per_thread : items_per_thread_of_many_tiles) * num_threads;
            range      = num_parts(num_tiles, std::min(num_tiles, num_parts(least, num_groups)));
            num_ranges = num_parts(num_tiles, range);
            count      = num_groups * num_ranges;
        }
    }
};

// Guided self-scheduling, as OpenMP's schedule(guided): a run of items is a part of all that are left, at least one. So threads
// begin with long pieces of memory and end within an item of each other.
class GuidedRuns {
  public:
    // With two threads a run is a fourth of the rest; with n threads 1 / 2n, by a power of two.
    constexpr GuidedRuns(int64_t num_items, int num_threads)
        : num_items_(num_items), shift_(std::bit_width(static_cast<unsigned>(2 * num_threads - 1))) {}

    // Goes on to the next run. False if there is none.
    constexpr bool advance_to(int64_t run) {
        for (; run_ < run && end_ < num_items_; ++run_) {
            begin_ = end_;
            end_ += std::max<int64_t>(1, (num_items_ - end_) >> shift_);
        }
        return run_ == run;
    }
    constexpr int64_t begin() const { return begin_; }
    constexpr int64_t end() const { return end_; }

  private:
    int64_t num_items_;
    int shift_;
    int64_t run_ = -1, begin_ = 0, end_ = 0;
};

} // namespace paceline::matmul
