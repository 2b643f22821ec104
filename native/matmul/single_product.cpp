#include "single_product.hpp"

#include <cstring>
#include <memory>
#include <new>

#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"

#include "../timed_graph.hpp"

namespace paceline::matmul {
namespace {

using Tensors = std::unique_ptr<ggml_context, decltype(&ggml_free)>;
using Buffer  = std::unique_ptr<ggml_backend_buffer, decltype(&ggml_backend_buffer_free)>;
using Threads = std::unique_ptr<ggml_threadpool, decltype(&ggml_threadpool_free)>;

Tensors new_tensors(size_t size, bool without_data) {
    Tensors tensors(ggml_init({size, nullptr, without_data}), &ggml_free);
    return tensors ? std::move(tensors) : throw std::bad_alloc();
}

ggml_tensor * product_of(ggml_context * tensors, ggml_tensor * weights, ggml_tensor * x, ggml_tensor * experts) {
    return experts ? ggml_mul_mat_id(tensors, weights, x, experts) : ggml_mul_mat(tensors, weights, x);
}

// As llama.cpp chooses it for a model's weights: the first of the processor's types that supports the product.
ggml_backend_buffer_type_t buffer_type_of(ggml_tensor * weights, const ggml_tensor * product) {
    ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    const auto list           = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
        ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), "ggml_backend_dev_get_extra_bufts"));
    for (ggml_backend_buffer_type_t * type = list(device); *type; ++type) {
        const Buffer probe(ggml_backend_buft_alloc_buffer(*type, 0), &ggml_backend_buffer_free);
        weights->buffer      = probe.get();
        const bool supported = ggml_backend_dev_supports_op(device, product);
        weights->buffer      = nullptr;
        if (supported) {
            return *type;
        }
    }
    return ggml_backend_cpu_buffer_type();
}

} // namespace

SingleProduct::Result SingleProduct::run() const {
    const int64_t num_rows_x = experts ? num_tokens * num_used : num_tokens;
    const Tensors weight_tensors = new_tensors(16 * ggml_tensor_overhead(), true);
    const Tensors tensors        = new_tensors(static_cast<size_t>(4 * num_rows_x * (num_columns + num_rows + 1)) + (1 << 20), false);
    ggml_tensor * w = ggml_new_tensor_3d(weight_tensors.get(), type, num_columns, num_rows, num_matrices);
    ggml_tensor * x = experts ? ggml_new_tensor_3d(tensors.get(), GGML_TYPE_F32, num_columns, num_used, num_tokens)
                              : ggml_new_tensor_2d(tensors.get(), GGML_TYPE_F32, num_columns, num_tokens);
    std::memcpy(x->data, activations, ggml_nbytes(x));
    ggml_tensor * chosen = nullptr;
    if (experts) {
        chosen = ggml_new_tensor_2d(tensors.get(), GGML_TYPE_I32, num_used, num_tokens);
        std::memcpy(chosen->data, experts, ggml_nbytes(chosen));
    }
    ggml_tensor * out = product_of(tensors.get(), w, x, chosen);
    Result result;
    const ggml_backend_buffer_type_t buffer_type = buffer_type_of(w, out);
    result.buffer = ggml_backend_buft_name(buffer_type);
    const Buffer buffer(ggml_backend_alloc_ctx_tensors_from_buft(weight_tensors.get(), buffer_type), &ggml_backend_buffer_free);
    const Threads threads([&] {
        ggml_threadpool_params options = ggml_threadpool_params_default(num_threads);
        return ggml_threadpool_new(&options);
    }(), &ggml_threadpool_free);
    if (!buffer || !threads) {
        throw std::bad_alloc();
    }
    ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    ggml_backend_tensor_set(w, weights, 0, ggml_nbytes(w));
    ggml_cgraph * graph = ggml_new_graph(tensors.get());
    ggml_build_forward_expand(graph, out);
    std::memset(out->data, 0xff, ggml_nbytes(out)); // NaN: missing outputs show
    result.seconds = compute_timed(graph, num_threads, threads.get(), num_times);
    const float * outputs = static_cast<const float *>(out->data);
    result.outputs.assign(outputs, outputs + num_rows_x * num_rows);
    return result;
}

std::vector<uint8_t> quantised(ggml_type type, const float * values, int64_t num_rows, int64_t num_columns) {
    std::vector<uint8_t> weights(num_rows * ggml_row_size(type, num_columns));
    const std::vector<float> importance(num_columns, 1.0f);
    ggml_quantize_chunk(type, values, weights.data(), 0, num_rows, num_columns, importance.data());
    return weights;
}

std::vector<float> dequantised(ggml_type type, const void * weights, int64_t num_values) {
    std::vector<float> values(num_values);
    if (type == GGML_TYPE_F32) { // for which ggml has no function
        std::memcpy(values.data(), weights, num_values * sizeof(float));
    } else {
        ggml_get_type_traits(type)->to_float(weights, values.data(), num_values);
    }
    return values;
}

} // namespace paceline::matmul
