// Memory of a file that is mapped for reading, once it has been read for good.
#pragma once

#include <cstddef>

namespace paceline::matmul {

// Takes the whole pages of [data, data + size) out of the process's memory if they map a file for reading alone; they are
// read from it again at the next access. Memory of any other kind is unchanged. Linux only.
void release_mapped_pages(const void * data, size_t size) noexcept;

} // namespace paceline::matmul
