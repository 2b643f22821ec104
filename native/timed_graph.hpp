// Computes a graph of ggml's CPU backend several times.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "ggml-cpu.h"
#include "ggml.h"

namespace paceline {

// Returns the seconds of each time. The work buffer holds NaN at first, so that reading before writing shows.
inline std::vector<double> compute_timed(ggml_cgraph * graph, int num_threads, ggml_threadpool * threads, int num_times) {
    std::vector<double> seconds;
    for (int time = 0; time < num_times; ++time) {
        ggml_cplan plan = ggml_graph_plan(graph, num_threads, threads);
        std::vector<uint8_t> work(plan.work_size, 0xff);
        plan.work_data   = work.data();
        const auto start = std::chrono::steady_clock::now();
        ggml_graph_compute(graph, &plan);
        seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return seconds;
}

} // namespace paceline
