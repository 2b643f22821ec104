// Matrix products of packed weights and float activations, as ggml's nodes describe them.
#pragma once

#include <cstddef>

#include "ggml.h"

#include "kernel.hpp"

struct ggml_compute_params;

namespace paceline::matmul {

// Bytes of the work buffer that `compute` needs for a MUL_MAT or MUL_MAT_ID of packed weights.
size_t work_size(const ggml_tensor * node);

// Computes this thread's share; all threads call it.
void compute(const Kernel & kernel, const ggml_compute_params * params, ggml_tensor * node);

} // namespace paceline::matmul
