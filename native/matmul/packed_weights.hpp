// Weights as the kernels read them: groups of 32 rows, with codes of the same columns side by side.
//
// A group is a sequence of blocks (32 columns) or superblocks (256 columns), each of them, for its 32 rows:
//
//   Q8_0           d     codes                        d: 16 bit float of each row
//   Q4_0, IQ4_NL   d     nibbles
//   MXFP4          e     nibbles                      e: 8 bit exponent of each row
//   Q5_0           d     fifth bits, nibbles
//   Q4_1           d -m  nibbles                      m: 16 bit float of each row
//   Q5_1           d -m  fifth bits, nibbles
//   IQ4_XS         d     8 scales              8 x nibbles
//   IQ3_XXS, IQ3_S d     8 scales              8 x nibbles (an index of eight magnitudes, and the sign)
//   Q4_K           d dmin  8 scales, 8 minima   8 x nibbles
//   Q5_K           likewise                     8 x (fifth bits, nibbles)
//   Q6_K           d       16 scales            8 x (bits 5 and 6, nibbles)
//   Q2_K           d dmin  16 x (scale, minimum)  8 x pairs of bits
//   Q3_K           d       16 scales            8 x (third bits, pairs of bits)
//   IQ2_XXS        d       8 scales            8 x (third bits, pairs of bits)   the sign, and an index of three magnitudes
//   IQ2_XS, IQ2_S  d       16 scales            likewise
//   IQ1_S          d       8 x (scale, eighths)  8 x pairs of bits               eighths of the scale are the minimum
//   IQ1_M          d       16 scales            8 x (third bits, pairs of bits)   an index of six values
//   F16, BF16      e     words                        e: 8 bit exponent of each row
//
// Codes are unsigned: a format's `code_offset` is subtracted from each. Four columns of a row are a chunk: 4 bytes of codes.
// `codes` are 8 chunks of 32 rows; `nibbles` are 4 times 32 rows with two chunks in the halves of each byte,
// `pairs of bits` twice 32 rows with the four chunks of 16 columns. Q2_K has a scale and a minimum in the halves of a byte.
// `words` are signed codes of 16 bits: a chunk is two columns, and there are 16 chunks of 32 rows. Their unit is 2^(e - 127), so
// weights near the largest of their block keep all of their bits.
// All of it takes the bytes of llama.cpp's blocks (of Q3_K, Q4_K, Q5_K and IQ4_XS 1 to 4 % more, since scales are whole bytes; of floats
// 2 % more; of IQ3 25 to 41 %, of IQ2 39 to 61 % and of IQ1 48 to 104 % more, since an entry of a code book takes fewer bits than its four
// or eight indices), apart from rows that fill the last group.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ggml.h"

namespace paceline::matmul {

inline constexpr int group_rows    = 32;
inline constexpr int block_columns = 32;

enum class Format { q8_0, q4_0, q5_0, q4_1, q5_1, iq4_nl, iq4_xs, iq3_xxs, iq3_s, mxfp4, q4_k, q5_k, q6_k, q2_k, q3_k, iq2_xxs, iq2_xs, iq2_s, iq1_s, iq1_m, f16, bf16, count };

inline constexpr bool is_float(Format format) { return format == Format::f16 || format == Format::bf16; }

// The layout of a format's weights, and the facts that a product needs.
struct FormatInfo {
    ggml_type type;
    int columns;      // of a block or superblock
    int bytes;        // of one, of a whole group
    int code_offset;  // subtracted from codes
    bool has_minimum; // a minimum of each block, or half of it, is subtracted from weights
    int scales;       // of a block: 2 are of the first and of the second 16 columns
    float factor = 1; // of all scales and minima
};

const FormatInfo & info_of(Format format);

// Whether weights of a type can be packed, and the format.
bool has_format(ggml_type type, Format & format);

// Bytes of so many packed rows.
size_t packed_bytes(Format format, int64_t num_rows, int64_t num_columns);

// Packs the rows first_row to first_row + group_rows of a matrix; rows from num_rows on are zero.
void pack_group(Format format, const void * rows, int64_t first_row, int64_t num_rows, int64_t num_columns, uint8_t * group);

} // namespace paceline::matmul
