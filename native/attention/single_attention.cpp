#include "single_attention.hpp"

#include <cstring>
#include <memory>
#include <new>

#include "ggml-cpu.h"
#include "ggml.h"

#include "../timed_graph.hpp"

namespace paceline::attention {
namespace {

using Tensors = std::unique_ptr<ggml_context, decltype(&ggml_free)>;
using Threads = std::unique_ptr<ggml_threadpool, decltype(&ggml_threadpool_free)>;

ggml_tensor * filled(ggml_context * tensors, ggml_type type, std::initializer_list<int64_t> shape, const void * data) {
    ggml_tensor * tensor = ggml_new_tensor(tensors, type, static_cast<int>(shape.size()), shape.begin());
    std::memcpy(tensor->data, data, ggml_nbytes(tensor));
    return tensor;
}

// A view as in a context: stored with heads within a token, used with tokens within a head.
ggml_tensor * by_heads(ggml_context * tensors, ggml_tensor * tensor) { return ggml_permute(tensors, tensor, 0, 2, 1, 3); }

} // namespace

SingleAttention::Result SingleAttention::run() const {
    const int64_t num_rows = num_streams * num_tokens * num_heads, num_kv_rows = num_streams * num_cells * num_kv_heads;
    const int64_t num_bytes = 4 * (num_rows * (dim_k + dim_v) + num_kv_rows * (dim_k + dim_v) + num_streams * num_tokens * num_cells + num_heads);
    ggml_init_params params{static_cast<size_t>(num_bytes) + (1 << 20), nullptr, false};
    const Tensors kept(ggml_init(params), &ggml_free);
    const Threads threads([&] {
        ggml_threadpool_params options = ggml_threadpool_params_default(num_threads);
        return ggml_threadpool_new(&options);
    }(), &ggml_threadpool_free);
    if (!kept || !threads) {
        throw std::bad_alloc();
    }
    ggml_context * tensors = kept.get();
    const ggml_type type   = half_cells ? GGML_TYPE_F16 : GGML_TYPE_F32;
    ggml_tensor * q   = by_heads(tensors, filled(tensors, GGML_TYPE_F32, {dim_k, num_heads, num_tokens, num_streams}, queries));
    ggml_tensor * k   = by_heads(tensors, filled(tensors, type, {dim_k, num_kv_heads, num_cells, num_streams}, keys));
    ggml_tensor * v   = by_heads(tensors, filled(tensors, type, {dim_v, num_kv_heads, num_cells, num_streams}, values));
    ggml_tensor * m   = mask ? filled(tensors, GGML_TYPE_F16, {num_cells, num_tokens, 1, num_streams}, mask) : nullptr;
    ggml_tensor * out = ggml_flash_attn_ext(tensors, q, k, v, m, scale, max_bias, softcap);
    if (sinks) {
        ggml_flash_attn_ext_add_sinks(out, filled(tensors, GGML_TYPE_F32, {num_heads}, sinks));
    }
    ggml_cgraph * graph = ggml_new_graph(tensors);
    ggml_build_forward_expand(graph, out);
    Result result;
    result.seconds = compute_timed(graph, num_threads, threads.get(), num_times);
    const float * outputs = static_cast<const float *>(out->data);
    result.outputs.assign(outputs, outputs + num_rows * dim_v);
    return result;
}

} // namespace paceline::attention
