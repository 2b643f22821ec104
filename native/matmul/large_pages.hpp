// Memory in large pages, if the system gives them on request.
#pragma once

#include <cstddef>

namespace paceline::matmul {

// Asks for large pages for the whole pages in [data, data + size), before anything is written: fewer pages are looked up,
// and a processor that reads ahead stops at their ends. Linux only; if they are refused, memory is unchanged.
void ask_for_large_pages(void * data, size_t size) noexcept;

} // namespace paceline::matmul
