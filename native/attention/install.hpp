// Puts our attention in front of llama.cpp's own, for contexts on a CPU.
#pragma once

namespace paceline::attention {

// Once, before anything computes.
void install();

// Which of the two computes, from the next operation on; at any time.
void use_ours(bool ours) noexcept;
bool uses_ours() noexcept;

} // namespace paceline::attention
