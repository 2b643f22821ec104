// A single matrix product, computed by a graph of llama.cpp: for tests and measurements.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ggml.h"

namespace paceline::matmul {

// Weights lie in the buffer that a load would choose for them now (see use_ours). Arrays are in C order.
struct SingleProduct {
    ggml_type type;
    const void * weights;          // [num_matrices][num_rows][bytes of num_columns weights of that type]
    int64_t num_matrices, num_rows, num_columns;
    const float * activations;     // [num_tokens][num_columns]; with experts [num_tokens][num_used][num_columns]
    int64_t num_tokens;
    const int32_t * experts;       // [num_tokens][num_used], or nullptr for one matrix
    int64_t num_used;
    int num_threads, num_times;    // num_times: repetitions, each of which is measured

    struct Result {
        std::vector<float> outputs;  // [num_tokens][num_rows]; with experts [num_tokens][num_used][num_rows]
        std::vector<double> seconds; // of each time
        std::string buffer;          // type of the weights' buffer
    };
    Result run() const;
};

// Weights as llama.cpp's files have them, from floats in rows.
std::vector<uint8_t> quantised(ggml_type type, const float * values, int64_t num_rows, int64_t num_columns);
std::vector<float> dequantised(ggml_type type, const void * weights, int64_t num_values);

} // namespace paceline::matmul
