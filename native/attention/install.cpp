#include "install.hpp"

#include <algorithm>
#include <atomic>
#include <vector>

#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "traits.h"

#include "flash_attention.hpp"
#include "lazy_zeros.hpp"

namespace paceline::attention {
namespace {

std::atomic<bool> ours{true};

class Traits : public ggml::cpu::tensor_traits {
  public:
    bool work_size(int num_threads, const ggml_tensor * node, size_t & size) override {
        size = attention::work_size(num_threads, node);
        return true;
    }

    bool compute_forward(ggml_compute_params * params, ggml_tensor * node) override {
        return compute(params, node, ours);
    }
};

// ggml asks its extra buffer types about each node; ours never holds a buffer.
class NodeSeeker : public ggml::cpu::extra_buffer_type {
  public:
    bool supports_op(ggml_backend_dev_t, const ggml_tensor *) override { return false; }

    ggml::cpu::tensor_traits * get_tensor_traits(const ggml_tensor * node) override {
        return node->op == GGML_OP_FLASH_ATTN_EXT && handles(node) ? &traits_ : nullptr;
    }

  private:
    Traits traits_;
};

const char * name_of(ggml_backend_buffer_type_t) { return "paceline attention"; }
ggml_backend_buffer_t no_buffer(ggml_backend_buffer_type_t, size_t) { return nullptr; }
size_t alignment_of(ggml_backend_buffer_type_t) { return 64; }

} // namespace

void install() {
    install_lazy_zeros();
    ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (!device) {
        return;
    }
    // llama.cpp makes this list at the first call: making it now keeps our type out of the choice of buffers for weights.
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(device);
    if (void * list = ggml_backend_reg_get_proc_address(reg, "ggml_backend_dev_get_extra_bufts")) {
        reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(list)(device);
    }
    static NodeSeeker seeker;
    static ggml_backend_buffer_type type = {
        {name_of, no_buffer, alignment_of, nullptr, nullptr, nullptr}, device, static_cast<ggml::cpu::extra_buffer_type *>(&seeker)};
    std::vector<ggml_backend_buffer_type_t> & types = ggml_backend_cpu_get_extra_buffer_types();
    if (std::find(types.begin(), types.end(), &type) == types.end()) {
        types.push_back(&type);
    }
}

void use_ours(bool wanted) noexcept { ours = wanted; }
bool uses_ours() noexcept { return ours; }

} // namespace paceline::attention
