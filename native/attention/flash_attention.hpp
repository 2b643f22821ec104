// llama.cpp's attention on a CPU, computed by us where we are faster: see docs/adr/0019.
#pragma once

#include <cstddef>

struct ggml_compute_params;
struct ggml_tensor;

namespace paceline::attention {

// Whether the node is one that we compute; nothing in it changes between planning a graph and computing it.
bool handles(const ggml_tensor * node);

// Bytes of memory that all threads together need, whether we compute in the end or llama.cpp does.
size_t work_size(int num_threads, const ggml_tensor * node);

// Called by each of the threads. Writes node->data, unless the first of them does not want that (or was given too little
// memory): then it answers false to all.
bool compute(ggml_compute_params * params, ggml_tensor * node, bool is_wanted);

} // namespace paceline::attention
