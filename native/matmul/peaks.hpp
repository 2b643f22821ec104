// What the machine can do at most, measured: the lines that a product's speed is compared with.
#pragma once

#include "kernel.hpp"

namespace paceline::matmul {

struct Peaks {
    double bytes;       // read from memory a second
    double dots;        // products of 8 bit codes, summed, a second
    double float_dots;  // likewise of floats
};

// With so many threads; takes about a second. kernel: whose instructions are measured.
Peaks measure_peaks(const Kernel & kernel, int num_threads);

} // namespace paceline::matmul
