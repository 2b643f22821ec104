// Memory in large pages, where the system gives them to those who ask.
#pragma once

#include <cstddef>

namespace paceline::matmul {

// Asks for large pages for the whole ones in [data, data + size), which nothing was written to yet: fewer of them are looked up,
// and a processor that reads ahead stops at their ends. Linux only; where they are refused, memory stays as it is.
void ask_for_large_pages(void * data, size_t size) noexcept;

} // namespace paceline::matmul
