#include "mapped_pages.hpp"

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#endif

namespace paceline::matmul {

#ifdef __linux__

namespace {

constexpr size_t least_size = 64 * 1024; // less is not worth reading the list of mappings

// The end of the mapping that holds an address, if it maps a file for reading alone; else 0.
uintptr_t end_of_file_mapping(uintptr_t address) {
    std::FILE * maps = std::fopen("/proc/self/maps", "re");
    if (!maps) {
        return 0;
    }
    uintptr_t found = 0;
    char      line[8192];
    while (std::fgets(line, sizeof(line), maps)) {
        uintptr_t     start = 0, end = 0;
        char          rights[8] = {};
        unsigned long inode     = 0;
        // start-end rights offset device inode path, see proc_pid_maps(5)
        if (std::sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %7s %*s %*s %lu", &start, &end, rights, &inode) == 4 && start <= address && address < end) {
            found = rights[0] == 'r' && rights[1] == '-' && inode != 0 ? end : 0;
            break;
        }
    }
    std::fclose(maps);
    return found;
}

} // namespace

void release_mapped_pages(const void * data, size_t size) noexcept {
    const auto      page  = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
    uintptr_t       end   = (reinterpret_cast<uintptr_t>(data) + size) / page * page;
    if (size < least_size || begin >= end) {
        return;
    }
    end = std::min(end, end_of_file_mapping(begin));
    if (begin < end) {
        madvise(reinterpret_cast<void *>(begin), end - begin, MADV_DONTNEED); // locked pages stay: then this fails
    }
}

#else

void release_mapped_pages(const void *, size_t) noexcept {}

#endif

} // namespace paceline::matmul
