// llama.cpp's attention on a CPU, computed by us where we are faster: see docs/adr/0019.
#pragma once

#include <cstddef>

struct ggml_compute_params;
struct ggml_tensor;

namespace paceline::attention {

// Whether the node is one that we compute; nothing in it changes between planning a graph and computing it.
bool handles(const ggml_tensor * node);

// Bytes of memory that all threads together need.
size_t work_size(int num_threads, const ggml_tensor * node);

// Called by each of the threads. Writes node->data.
void compute(ggml_compute_params * params, ggml_tensor * node);

} // namespace paceline::attention
