#include "install.hpp"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "traits.h"

#include "../process.hpp"
#include "kernel.hpp"
#include "large_pages.hpp"
#include "mapped_pages.hpp"
#include "parallel.hpp"
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
constexpr bool kernels_share_layouts = true, kernels_multiply_floats = true;
std::atomic<bool> ours{true};
#else
constexpr bool kernels_share_layouts = false, kernels_multiply_floats = false;
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
    if (is_float(format) && !kernels_multiply_floats) {
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

} // namespace

// The buffer of a model's packed weights: allocated, or the data of a file. Each buffer owns a share, and so does the thread
// that writes the file.
struct PackedMemory {
    std::unique_ptr<ggml_backend_buffer, decltype(&ggml_backend_buffer_free)> allocated{nullptr, &ggml_backend_buffer_free};
    std::unique_ptr<PackedFile> file; // if it is mapped
    uint8_t * data = nullptr;
    size_t size    = 0;
    std::vector<PackedTensor> tensors;
    size_t num_packed = 0; // tensors that the file did not have
};

namespace {

thread_local PackedLoad * running_load = nullptr;

PackedMemory & memory_of(ggml_backend_buffer_t buffer) { return **static_cast<std::shared_ptr<PackedMemory> *>(buffer->context); }

void set_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    GGML_ASSERT(offset == 0 && size == ggml_nbytes(tensor)); // as llama.cpp loads tensors with buffers outside of the host
    Format format;
    GGML_ASSERT(has_format(tensor->type, format));
    const size_t group_bytes = packed_bytes(format, group_rows, tensor->ne[0]);
    const int64_t num_groups = (tensor->ne[1] + group_rows - 1) / group_rows;
    PackedMemory & memory    = memory_of(buffer);
    auto * packed            = static_cast<uint8_t *>(tensor->data);
    const PackedTensor place(tensor, packed - memory.data);
    memory.tensors.push_back(place);
    if (!memory.file || !memory.file->has(place)) {
        ++memory.num_packed;
        if (memory.file && !memory.file->make_writable(place.offset, num_groups * tensor->ne[2] * group_bytes)) {
            throw std::bad_alloc();
        }
        in_parallel(num_groups * tensor->ne[2], size, [&](int64_t index) {
            const int64_t matrix = index / num_groups, group = index % num_groups;
            const auto * rows    = static_cast<const uint8_t *>(data) + matrix * tensor->nb[2];
            pack_group(format, rows, group * group_rows, tensor->ne[1], tensor->ne[0], packed + static_cast<size_t>(index) * group_bytes);
        });
    }
    release_mapped_pages(data, size); // else a process has its weights twice
}

void free_buffer(ggml_backend_buffer_t buffer) { delete static_cast<std::shared_ptr<PackedMemory> *>(buffer->context); }
void * base_of(ggml_backend_buffer_t buffer) { return memory_of(buffer).data; }
void clear(ggml_backend_buffer_t, uint8_t) {} // packed weights are constant, and a mapped file cannot be written

const char * name_of(ggml_backend_buffer_type_t) { return "CPU_PACELINE"; }
size_t alignment_of(ggml_backend_buffer_type_t) { return 64; }

ggml_backend_buffer_t new_buffer(ggml_backend_buffer_type_t type, size_t size) {
    auto memory  = std::make_shared<PackedMemory>();
    memory->size = size;
    if (running_load) {
        memory->file = running_load->take_file(size);
    }
    if (memory->file) {
        memory->data = memory->file->data();
    } else {
        memory->allocated.reset(ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size));
        if (!memory->allocated) {
            return nullptr;
        }
        memory->data = static_cast<uint8_t *>(ggml_backend_buffer_get_base(memory->allocated.get()));
        ask_for_large_pages(memory->data, size);
    }
    if (running_load) {
        running_load->set_memory(memory);
    }
    constexpr ggml_backend_buffer_i interface = {free_buffer, base_of, nullptr, nullptr, set_tensor, nullptr, nullptr, nullptr, nullptr,
                                                 clear,       nullptr};
    return ggml_backend_buffer_init(type, interface, new std::shared_ptr<PackedMemory>(std::move(memory)), size);
}

ggml_backend_buffer_type_t our_type() {
    static PackedType packed;
    static ggml_backend_buffer_type type = {
        {name_of, new_buffer, alignment_of, nullptr, bytes_of, nullptr}, nullptr, static_cast<ggml::cpu::extra_buffer_type *>(&packed)};
    return &type;
}

} // namespace

struct PackedLoad::Writing {
    Home process; // a fork has no thread that writes
    std::mutex mutex;
    std::condition_variable has_ended;
    bool is_running = false;
    std::string problem;
};

PackedLoad::PackedLoad(std::string path, const FileKey & key)
    : path_(std::move(path)), key_(key), file_(PackedFile::open(path_, key_, problem_)), writing_(std::make_shared<Writing>()) {}

PackedLoad::~PackedLoad() { end(); }

void PackedLoad::begin() noexcept { running_load = this; }

void PackedLoad::end() noexcept {
    if (running_load == this) {
        running_load = nullptr;
    }
    file_.reset();
}

std::unique_ptr<PackedFile> PackedLoad::take_file(size_t size) {
    if (file_ && (file_->size() != size || !file_->is_intact())) {
        problem_ = file_->size() == size ? "it is damaged" : "it has other tensors";
        file_.reset();
    }
    return std::move(file_);
}

void PackedLoad::set_memory(const std::shared_ptr<PackedMemory> & memory) { memory_ = memory; }

bool PackedLoad::has_packed() const {
    const std::shared_ptr<PackedMemory> memory = memory_.lock();
    return memory && memory->num_packed > 0;
}

size_t PackedLoad::mapped_bytes() const {
    const std::shared_ptr<PackedMemory> memory = memory_.lock();
    return memory && memory->file ? memory->size : 0;
}

void PackedLoad::start_writing() {
    std::shared_ptr<PackedMemory> memory = memory_.lock();
    if (!memory) {
        return;
    }
    writing_->is_running = true;
    try {
        std::thread([path = path_, key = key_, writing = writing_, memory = std::move(memory)]() mutable {
            std::string problem = write_packed_file(path, key, memory->data, memory->size, memory->tensors);
            memory.reset();
            const std::lock_guard lock(writing->mutex);
            writing->problem    = std::move(problem);
            writing->is_running = false;
            writing->has_ended.notify_all();
        }).detach();
    } catch (const std::exception &) {
        writing_->is_running = false;
        writing_->problem    = "there is no thread to write it";
    }
}

std::string PackedLoad::wait_until_written() const {
    if (!writing_->process.here()) {
        return "";
    }
    std::unique_lock lock(writing_->mutex);
    writing_->has_ended.wait(lock, [&] { return !writing_->is_running; });
    return writing_->problem;
}

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
