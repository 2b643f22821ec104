// Memory of saved states.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace paceline {

// Gives large blocks huge pages where the system has them on request, and does not fill them with zeros. A state is written
// once into fresh memory: in pages of 4 KiB one of 11 MiB takes 33 ms on a virtual machine, of which its bytes take one.
template <typename T> struct StateAllocator {
    using value_type = T;

    StateAllocator() = default;
    template <typename U> StateAllocator(const StateAllocator<U> & /*other*/) noexcept {} // NOLINT: allocators convert

    T * allocate(size_t count) {
        const size_t bytes = count * sizeof(T);
#ifdef __linux__
        if (bytes >= HUGE_PAGE) {
            return static_cast<T *>(map_aligned(bytes));
        }
#endif
        return static_cast<T *>(::operator new(bytes));
    }

    void deallocate(T * block, size_t count) noexcept {
#ifdef __linux__
        if (count * sizeof(T) >= HUGE_PAGE) {
            munmap(block, count * sizeof(T));
            return;
        }
#endif
        ::operator delete(block);
    }

    template <typename U> void construct(U * place) noexcept { ::new (static_cast<void *>(place)) U; }
    template <typename U, typename... Args> void construct(U * place, Args &&... args) {
        ::new (static_cast<void *>(place)) U(std::forward<Args>(args)...);
    }

    template <typename U> bool operator==(const StateAllocator<U> & /*other*/) const noexcept { return true; }

private:
    static constexpr size_t HUGE_PAGE = size_t{2} << 20;

#ifdef __linux__
    // Maps more than is needed, and unmaps what lies before the first boundary of huge pages and behind the block.
    static void * map_aligned(size_t bytes) {
        const auto   page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
        const size_t kept = (bytes + page - 1) / page * page; // what munmap() of the block gives back
        auto * const mapped =
            static_cast<char *>(mmap(nullptr, kept + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        if (mapped == MAP_FAILED) {
            throw std::bad_alloc();
        }
        const size_t before = (HUGE_PAGE - reinterpret_cast<uintptr_t>(mapped) % HUGE_PAGE) % HUGE_PAGE;
        char * const block  = mapped + before;
        if (before > 0) {
            munmap(mapped, before);
        }
        munmap(block + kept, HUGE_PAGE - before);
        madvise(block, bytes / HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE); // a wish: without it all works the same
        return block;
    }
#endif
};

using StateBytes = std::vector<uint8_t, StateAllocator<uint8_t>>;

} // namespace paceline
