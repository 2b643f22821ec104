// The machine's measured limits, with which a product's speed is compared.
#pragma once

#include "kernel.hpp"

namespace paceline::matmul {

struct Peaks {
    double bytes;       // read from memory a second
    double dots;        // products of 8 bit codes, summed, a second
    double float_dots;  // likewise of floats
};

// With this many threads; takes about a second. kernel: the kernel with the measured instructions.
Peaks measure_peaks(const Kernel & kernel, int num_threads);

} // namespace paceline::matmul
