// The innermost part of a product, for one instruction set: a group of rows of weights times a tile of rows of activations.
#pragma once

#include <cstddef>
#include <cstdint>

#include "packed_weights.hpp"

namespace paceline::matmul {

inline constexpr int tile_tokens = 8; // rows of activations in a tile, at most

// Activations are quantised to 8 bits, 32 columns at a time. A tile of n rows is, for each block of 32 columns:
// n x 32 codes, n scales (float), and twice n sums of codes: of the first and of the second 16 columns times minus the
// weights' code_offset (int32), or if weights have a minimum times the scale (float).
// If a block of weights has one scale, the first sum is of all 32 columns.
// For weights in floats, activations are words, codes of 16 bits, and a block has no sums.
inline constexpr int codes_bytes(Format format) { return is_float(format) ? 2 * block_columns : block_columns; }
inline constexpr int tile_block_bytes(Format format, int num_tokens) { return num_tokens * (codes_bytes(format) + (is_float(format) ? 4 : 12)); }

struct Kernel {
    const char * name;

    // Quantises columns [first, end) (multiples of 32) of a row into its place in a tile of so many rows.
    void (*quantise)(const float * row, int64_t first, int64_t end, Format format, uint8_t * tile, int num_tokens, int place);

    // outs[place][i] = product of row i of the group (i < num_rows) and the row of a tile at that place. is_cached: whether this
    // thread multiplied with the group just before; else the group, and memory after it, is prefetched.
    void (*multiply)(Format format, const uint8_t * group, int64_t num_columns, bool is_cached, const uint8_t * tile, int num_tokens,
                     float * const * outs, int num_rows);

    // For measurements of the machine: reads memory, and does at least so many multiplications in registers, returning the number.
    uint64_t (*sum_of_bytes)(const uint8_t * from, int64_t count); // count: a multiple of 256
    int64_t (*spin_dots)(int64_t count);
    int64_t (*spin_float_dots)(int64_t count);
};

// nullptr if this build or this processor lacks the instructions.
const Kernel * avx512_vnni_kernel();
const Kernel * avx2_kernel();
const Kernel * neon_i8mm_kernel();
const Kernel * neon_dotprod_kernel();

} // namespace paceline::matmul
