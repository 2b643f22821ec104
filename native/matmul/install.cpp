#include "install.hpp"

#include <algorithm>
#include <atomic>
#include <exception>
#include <thread>
#include <vector>

#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "traits.h"

#include "kernel.hpp"
#include "large_pages.hpp"
#include "mapped_pages.hpp"
#include "product.hpp"

namespace paceline::matmul {
namespace {

std::vector<const Kernel *> usable_kernels() {
    std::vector<const Kernel *> found;
    for (const Kernel * kernel : {avx512_vnni_kernel(), avx2_kernel(), neon_i8mm_kernel(), neon_dotprod_kernel()}) {
        if (kernel) {
            found.push_back(kernel);
        }
    }
    return found;
}

const std::vector<const Kernel *> & kernels() {
    static const std::vector<const Kernel *> found = usable_kernels();
    return found;
}

std::atomic<const Kernel *> current{nullptr};
#if defined(__x86_64__)
constexpr bool kernels_share_layouts = true;
std::atomic<bool> ours{true};
#else
constexpr bool kernels_share_layouts = false;
std::atomic<bool> ours{false}; // exact on ARM as well, but not timed there: llama.cpp's are taken unless ours are asked for
#endif

ggml_backend_buffer_type_t our_type();

bool is_packed(const ggml_tensor * weights) { return weights && weights->buffer && weights->buffer->buft == our_type(); }

bool is_product(const ggml_tensor * node) { return node->op == GGML_OP_MUL_MAT || node->op == GGML_OP_MUL_MAT_ID; }

// Matrices, and for experts stacks of them, with activations that are rows of floats.
bool can_multiply(const ggml_tensor * node) {
    Format format;
    const ggml_tensor *weights = node->src[0], *x = node->src[1];
    if (weights->view_src || !has_format(weights->type, format) || weights->ne[0] % info_of(format).columns != 0 || weights->ne[3] != 1) {
        return false;
    }
    if (weights->ne[2] != 1 && node->op != GGML_OP_MUL_MAT_ID) {
        return false;
    }
    return x->type == GGML_TYPE_F32 && x->nb[0] == sizeof(float) && node->type == GGML_TYPE_F32 &&
           (!x->buffer || ggml_backend_buft_is_host(x->buffer->buft));
}

class Traits : public ggml::cpu::tensor_traits {
  public:
    bool work_size(int, const ggml_tensor * node, size_t & size) override {
        size = matmul::work_size(node) + agreed_bytes;
        return true;
    }

    // The kernel may change at any time: if activations are laid out for a kernel, all threads of an operation
    // must have the same.
    bool compute_forward(ggml_compute_params * params, ggml_tensor * node) override {
        if (kernels_share_layouts || params->nth == 1) {
            compute(*current.load(), params, node);
            return true;
        }
        auto ** agreed = static_cast<const Kernel **>(params->wdata);
        if (params->ith == 0) {
            *agreed = current;
        }
        ggml_barrier(params->threadpool);
        ggml_compute_params rest = *params;
        rest.wdata               = static_cast<uint8_t *>(params->wdata) + agreed_bytes;
        rest.wsize -= agreed_bytes;
        compute(**agreed, &rest, node);
        return true;
    }

  private:
    static constexpr size_t agreed_bytes = 64; // a pointer, in a line of the cache of its own
};

class PackedType : public ggml::cpu::extra_buffer_type {
  public:
    bool supports_op(ggml_backend_dev_t, const ggml_tensor * node) override {
        if (!is_product(node) || !is_packed(node->src[0])) {
            return false;
        }
        // A load asks before the buffer of the weights exists. Afterwards the answer stays, whatever was switched since.
        const bool is_loaded = node->src[0]->buffer->usage == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
        return (is_loaded || ours) && can_multiply(node);
    }

    ggml::cpu::tensor_traits * get_tensor_traits(const ggml_tensor * node) override {
        return is_product(node) && is_packed(node->src[0]) ? &traits_ : nullptr;
    }

  private:
    Traits traits_;
};

size_t bytes_of(ggml_backend_buffer_type_t, const ggml_tensor * tensor) {
    Format format;
    const bool is_matrix = has_format(tensor->type, format) && tensor->ne[0] % info_of(format).columns == 0;
    return is_matrix ? packed_bytes(format, tensor->ne[1], tensor->ne[0]) * tensor->ne[2] * tensor->ne[3] : ggml_nbytes(tensor);
}

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

void set_tensor(ggml_backend_buffer_t, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    GGML_ASSERT(offset == 0 && size == ggml_nbytes(tensor)); // as llama.cpp loads tensors with buffers outside of the host
    Format format;
    GGML_ASSERT(has_format(tensor->type, format));
    const size_t group_bytes = packed_bytes(format, group_rows, tensor->ne[0]);
    const int64_t num_groups = (tensor->ne[1] + group_rows - 1) / group_rows;
    in_parallel(num_groups * tensor->ne[2], size, [&](int64_t index) {
        const int64_t matrix = index / num_groups, group = index % num_groups;
        const auto * rows    = static_cast<const uint8_t *>(data) + matrix * tensor->nb[2];
        pack_group(format, rows, group * group_rows, tensor->ne[1], tensor->ne[0],
                   static_cast<uint8_t *>(tensor->data) + static_cast<size_t>(index) * group_bytes);
    });
    release_mapped_pages(data, size); // else a process has its weights twice
}

const char * name_of(ggml_backend_buffer_type_t) { return "CPU_PACELINE"; }
size_t alignment_of(ggml_backend_buffer_type_t) { return 64; }

ggml_backend_buffer_t allocated(ggml_backend_buffer_type_t type, size_t size) {
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
    if (buffer) {
        ask_for_large_pages(ggml_backend_buffer_get_base(buffer), size);
        buffer->buft             = type;
        buffer->iface.set_tensor = set_tensor;
        buffer->iface.get_tensor = nullptr;
        buffer->iface.cpy_tensor = nullptr;
    }
    return buffer;
}

ggml_backend_buffer_type_t our_type() {
    static PackedType packed;
    static ggml_backend_buffer_type type = {
        {name_of, allocated, alignment_of, nullptr, bytes_of, nullptr}, nullptr, static_cast<ggml::cpu::extra_buffer_type *>(&packed)};
    return &type;
}

} // namespace

void install() {
    ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (!device || kernels().empty()) {
        return;
    }
    current = kernels().front();
    our_type()->device = device;
    std::vector<ggml_backend_buffer_type_t> & types = ggml_backend_cpu_get_extra_buffer_types();
    if (std::find(types.begin(), types.end(), our_type()) == types.end()) {
        types.insert(types.begin(), our_type()); // before llama.cpp's own, which take the rest
    }
}

std::vector<std::string> kernel_names() {
    std::vector<std::string> names;
    for (const Kernel * kernel : kernels()) {
        names.push_back(kernel->name);
    }
    return names;
}

bool use_kernel(const std::string & name) {
    for (const Kernel * kernel : kernels()) {
        if (name == kernel->name) {
            current = kernel;
            return true;
        }
    }
    return false;
}

void use_ours(bool wanted) noexcept { ours = wanted; }
bool uses_ours() noexcept { return ours && !kernels().empty(); }

const Kernel * kernel_in_use() { return current; }

std::string kernel_name() {
    const Kernel * kernel = current;
    return kernel ? kernel->name : "";
}

} // namespace paceline::matmul
