// Attention on a CPU in place of llama.cpp's kernel: see docs/adr/0019.
#pragma once

#include <cstddef>

struct ggml_compute_params;
struct ggml_tensor;

namespace paceline::attention {

// Whether this kernel can compute the node; its conditions do not change between planning and computing a graph.
bool handles(const ggml_tensor * node);

// Bytes of memory that all threads together need, whichever kernel computes in the end.
size_t work_size(int num_threads, const ggml_tensor * node);

// Called by each of the threads. Writes node->data and returns true; returns false in all of them if the first passes
// is_wanted = false or has too little memory.
bool compute(ggml_compute_params * params, ggml_tensor * node, bool is_wanted);

} // namespace paceline::attention
