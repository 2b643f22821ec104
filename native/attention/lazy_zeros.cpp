#include "lazy_zeros.hpp"

#if defined(__linux__)
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <sys/mman.h>
#include <unistd.h>

#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#endif

namespace paceline::attention {

#if defined(__linux__)

namespace {

constexpr size_t least_bytes = size_t(1) << 20; // smaller buffers are cleared in less time than a call of the kernel is worth

ggml_backend_buffer_t (*ggml_alloc)(ggml_backend_buffer_type_t, size_t) = nullptr;

void clear(ggml_backend_buffer_t buffer, uint8_t value) {
    static const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t begin = reinterpret_cast<uintptr_t>(ggml_backend_buffer_get_base(buffer));
    const size_t    size  = ggml_backend_buffer_get_size(buffer);
    const uintptr_t end   = begin + size;
    const uintptr_t first = (begin + page - 1) / page * page, last = end / page * page;
    // The memory is malloc's: private and of no file, so that the kernel's pages are zeros. Locked pages are refused.
    if (value != 0 || madvise(reinterpret_cast<void *>(first), last - first, MADV_DONTNEED) != 0) {
        std::memset(reinterpret_cast<void *>(begin), value, size);
        return;
    }
    std::memset(reinterpret_cast<void *>(begin), 0, first - begin);
    std::memset(reinterpret_cast<void *>(last), 0, end - last);
}

ggml_backend_buffer_t alloc(ggml_backend_buffer_type_t type, size_t size) {
    ggml_backend_buffer_t buffer = ggml_alloc(type, size);
    if (buffer && size >= least_bytes) {
        buffer->iface.clear = clear;
    }
    return buffer;
}

} // namespace

void install_lazy_zeros() {
    ggml_backend_buffer_type_t type = ggml_backend_cpu_buffer_type();
    if (type->iface.alloc_buffer != alloc) {
        ggml_alloc = type->iface.alloc_buffer;
        type->iface.alloc_buffer = alloc;
    }
}

#else

void install_lazy_zeros() {}

#endif

} // namespace paceline::attention
