// Work on several threads while a model is loaded.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

namespace paceline::matmul {

// Calls work(0) to work(count - 1), on several threads if there is much to do. If the system has no more threads, on fewer.
template <typename Work> void in_parallel(int64_t count, size_t bytes, const Work & work) {
    constexpr size_t bytes_per_thread = 2 << 20, most_threads = 16;
    const size_t wanted = std::min({bytes / bytes_per_thread, most_threads, static_cast<size_t>(std::thread::hardware_concurrency())});
    std::atomic<int64_t> next{0};
    const auto take = [&] {
        for (int64_t index = next++; index < count; index = next++) {
            work(index);
        }
    };
    std::vector<std::thread> threads;
    try {
        threads.reserve(wanted);
        while (threads.size() + 1 < wanted) {
            threads.emplace_back(take);
        }
    } catch (const std::exception &) { // of no threads or no memory for another thread: the running threads do the work
    }
    take();
    for (std::thread & thread : threads) {
        thread.join();
    }
}

} // namespace paceline::matmul
