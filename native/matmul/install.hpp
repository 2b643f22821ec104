// Installs our products in front of llama.cpp's, for weights that are loaded from then on.
#pragma once

#include <string>
#include <vector>

#include "kernel.hpp"

namespace paceline::matmul {

// Call once, before llama.cpp's list of buffer types is read (attention::install and any load do so).
void install();

// Names of the kernels that this processor can run, the fastest first; empty if there is none.
std::vector<std::string> kernel_names();

// Selects a kernel by its name from the next operation on; false if this processor cannot run it.
bool use_kernel(const std::string & name);

// Whether weights that are loaded from now on are packed for our kernels. Weights that are packed stay so.
void use_ours(bool wanted) noexcept;
bool uses_ours() noexcept; // false as well if there is no kernel

std::string kernel_name(); // of the kernel in use; empty if there is none
const Kernel * kernel_in_use();

} // namespace paceline::matmul
