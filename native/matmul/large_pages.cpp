#include "large_pages.hpp"

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#endif

namespace paceline::matmul {

#ifdef __linux__

void ask_for_large_pages(void * data, size_t size) noexcept {
    const auto      page  = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
    const uintptr_t end   = (reinterpret_cast<uintptr_t>(data) + size) / page * page;
    if (begin < end) {
        madvise(reinterpret_cast<void *>(begin), end - begin, MADV_HUGEPAGE); // see transparent huge pages in Linux's documentation
    }
}

#else

void ask_for_large_pages(void *, size_t) noexcept {}

#endif

} // namespace paceline::matmul
