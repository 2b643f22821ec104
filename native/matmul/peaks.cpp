#include "peaks.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "large_pages.hpp"

namespace paceline::matmul {
namespace {

constexpr int num_rounds       = 5;
constexpr int64_t num_words    = 1 << 24; // of 8 bytes, a thread: more than any cache has
constexpr int64_t num_products = 1 << 29; // so many take far longer than to begin a thread

// Joined also if a thread cannot be started. (std::jthread is not everywhere.)
struct Threads {
    std::vector<std::thread> running;

    ~Threads() { join(); }

    void join() {
        for (std::thread & thread : running) {
            if (thread.joinable()) {
                thread.join();
            }
        }
    }
};

// The best of some rounds in which all threads work at the same time. Work returns its units.
template <typename Work> double best_rate(int num_threads, const Work & work) {
    double best = 0;
    for (int round = 0; round < num_rounds; ++round) {
        std::atomic<int64_t> units{0};
        Threads threads;
        const auto start = std::chrono::steady_clock::now();
        for (int i = 0; i < num_threads; ++i) {
            threads.running.emplace_back([&, i] { units += work(i); });
        }
        threads.join();
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        best                 = std::max(best, static_cast<double>(units) / seconds);
    }
    return best;
}

} // namespace

Peaks measure_peaks(const Kernel & kernel, int num_threads) {
    const std::unique_ptr<uint64_t[]> memory(new uint64_t[num_words * num_threads]); // as weights are: in large pages
    ask_for_large_pages(memory.get(), num_words * num_threads * sizeof(uint64_t));
    std::fill_n(memory.get(), num_words * num_threads, 1);
    std::atomic<uint64_t> kept{0}; // so that nothing is left out as unused
    const double bytes = best_rate(num_threads, [&](int i) {
        kept += kernel.sum_of_bytes(reinterpret_cast<const uint8_t *>(memory.get() + num_words * i), num_words * 8);
        return num_words * 8;
    });
    const double dots       = best_rate(num_threads, [&](int) { return kernel.spin_dots(num_products); });
    const double float_dots = best_rate(num_threads, [&](int) { return kernel.spin_float_dots(num_products); });
    return {bytes, dots, float_dots};
}

} // namespace paceline::matmul
