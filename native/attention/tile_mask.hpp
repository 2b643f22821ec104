// Which cells of a tile the rows of a block see, and what the mask adds to their scores.
#pragma once

#include <cstdint>

#include "operation.hpp"
#include "simd_vec.hpp"

namespace paceline::attention {

static_assert(tile_cells == 64, "a bit of a word for each cell");

inline constexpr uint64_t all_cells(int count) { return count < 64 ? (uint64_t{1} << count) - 1 : ~uint64_t{0}; }

struct TileMask {
    uint64_t seen[max_rows / num_lanes];  // by vector: a bit for each cell that any of its rows sees
    bool is_masked[max_rows / num_lanes]; // whether the mask adds to scores, or hides from a row what is computed for it

    // Writes the masks of vectors that are masked to masks[num_cells][width], times the slopes of their rows.
    TileMask(const Operation & operation, const Rows & rows, int64_t first_cell, int num_cells, const float * slopes, float * masks);

    // Whether a vector is multiplied with all cells of the tile, and not only with those that it sees.
    bool takes_tile(int vector, int num_cells) const { return is_most(seen[vector], num_cells); }

  private:
    static bool is_most(uint64_t cells, int num_cells) { return 2 * __builtin_popcountll(cells) > num_cells; }
    void note(int row, int end, const ggml_fp16_t * mask, int num_cells);
    bool has_noted_[max_rows / num_lanes];
};

} // namespace paceline::attention
