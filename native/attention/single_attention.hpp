// A single attention operation, computed by a graph of llama.cpp: for tests and measurements.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace paceline::attention {

// Arrays are in C order. Cells may be 16 or 32 bit floats; masks and sinks may be absent (nullptr).
struct SingleAttention {
    const float * queries;   // [num_streams][num_tokens][num_heads][dim_k]
    const void *keys, *values; // [num_streams][num_cells][num_kv_heads][dim_k or dim_v]
    bool half_cells;
    const uint16_t * mask;   // [num_streams][num_tokens][num_cells], bits of 16 bit floats
    const float * sinks;     // [num_heads]
    int64_t num_streams, num_tokens, num_heads, num_kv_heads, num_cells, dim_k, dim_v;
    float scale, max_bias, softcap;
    int num_threads, num_times; // num_times: repetitions, each of which is measured

    struct Result {
        std::vector<float> outputs;  // [num_streams][num_tokens][num_heads][dim_v]
        std::vector<double> seconds; // of each time
    };
    Result run() const;
};

} // namespace paceline::attention
