// Clears large buffers in host memory, KV caches above all, without writing to them.
#pragma once

namespace paceline::attention {

// Makes ggml's CPU buffers clear by giving whole pages back to the kernel (Linux), which maps zeros when a page is next used. A
// KV cache is then there at once, and takes memory as its cells are used. Elsewhere nothing changes. Call once, before any load.
void install_lazy_zeros();

} // namespace paceline::attention
