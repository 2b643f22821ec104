// Installs this kernel in front of llama.cpp's, for contexts on a CPU.
#pragma once

namespace paceline::attention {

// Call once, before anything computes.
void install();

// Selects the kernel from the next operation on; may be called at any time.
void use_ours(bool ours) noexcept;
bool uses_ours() noexcept;

} // namespace paceline::attention
