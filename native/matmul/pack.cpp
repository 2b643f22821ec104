#include "packed_weights.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#define GGML_COMMON_DECL_C // names members of unions without a prefix
#define GGML_COMMON_IMPL_C // has the code books
#include "ggml-common.h"

namespace paceline::matmul {
namespace {

constexpr int num_chunks = block_columns / 4;

// The codes of 32 columns of a row, four in each word: byte j of word c is column 4c + j.
struct Codes {
    uint32_t chunks[num_chunks];
};

uint32_t word_at(const void * from, int index) {
    uint32_t word;
    std::memcpy(&word, static_cast<const uint8_t *>(from) + 4 * index, sizeof word);
    return word;
}

void put_word(uint8_t * to, int index, uint32_t word) { std::memcpy(to + 4 * index, &word, sizeof word); }
void put_half(uint8_t * to, int index, uint16_t half) { std::memcpy(to + 2 * index, &half, sizeof half); }

constexpr uint32_t every_byte(uint32_t byte) { return byte * 0x01010101u; }

// Nibbles of 16 bytes: low nibbles are columns 0 to 15, high nibbles 16 to 31.
Codes split_nibbles(const uint8_t * from) {
    Codes codes;
    for (int c = 0; c < 4; ++c) {
        codes.chunks[c]     = word_at(from, c) & every_byte(15);
        codes.chunks[c + 4] = (word_at(from, c) >> 4) & every_byte(15);
    }
    return codes;
}

// The nibbles of one block of a k-quant: 64 columns share 32 bytes, low nibbles first.
Codes shared_nibbles(const uint8_t * from, int block) {
    Codes codes;
    for (int c = 0; c < num_chunks; ++c) {
        codes.chunks[c] = (word_at(from + block / 2 * 32, c) >> (block % 2 * 4)) & every_byte(15);
    }
    return codes;
}

// Two chunks to each word, `distance` chunks apart.
void put_nibbles(uint8_t * to, int row, const Codes & codes, int distance = 4) {
    for (int pair = 0; pair < 4; ++pair) {
        const int c = pair / distance * 2 * distance + pair % distance;
        put_word(to + pair * 4 * group_rows, row, (codes.chunks[c] & every_byte(15)) | (codes.chunks[c + distance] & every_byte(15)) << 4);
    }
}

// Bit c of byte j: bit `bit` of column 4c + j.
void put_bits(uint8_t * to, int row, const Codes & codes, int bit) {
    uint32_t word = 0;
    for (int c = 0; c < num_chunks; ++c) {
        word |= ((codes.chunks[c] >> bit) & every_byte(1)) << c;
    }
    put_word(to, row, word);
}

// Bits 2i and 2i + 1 of byte j in word g: the bits `bit` and `bit` + 1 of column 4(4g + i) + j.
void put_bit_pairs(uint8_t * to, int row, const Codes & codes, int bit) {
    for (int g = 0; g < 2; ++g) {
        uint32_t word = 0;
        for (int i = 0; i < 4; ++i) {
            word |= ((codes.chunks[4 * g + i] >> bit) & every_byte(3)) << (2 * i);
        }
        put_word(to + g * 4 * group_rows, row, word);
    }
}

void put_three_bits(uint8_t * to, int row, const Codes & codes) {
    put_bits(to, row, codes, 2);
    put_bit_pairs(to + 4 * group_rows, row, codes, 0);
}

void pack(const block_q8_0 & block, uint8_t * to, int row) {
    put_half(to, row, block.d);
    for (int c = 0; c < num_chunks; ++c) {
        put_word(to + 2 * group_rows + c * 4 * group_rows, row, word_at(block.qs, c) ^ every_byte(0x80));
    }
}

void pack(const block_q4_0 & block, uint8_t * to, int row) {
    put_half(to, row, block.d);
    put_nibbles(to + 2 * group_rows, row, split_nibbles(block.qs));
}

void pack(const block_iq4_nl & block, uint8_t * to, int row) {
    put_half(to, row, block.d);
    put_nibbles(to + 2 * group_rows, row, split_nibbles(block.qs));
}

void pack(const block_mxfp4 & block, uint8_t * to, int row) {
    to[row] = block.e;
    put_nibbles(to + group_rows, row, split_nibbles(block.qs));
}

void pack(const block_iq4_xs & block, uint8_t * to, int row) {
    put_half(to, row, block.d);
    to += 2 * group_rows;
    for (int i = 0; i < 8; ++i) {
        const int low = block.scales_l[i / 2] >> (4 * (i % 2)) & 15, high = block.scales_h >> (2 * i) & 3;
        to[i * group_rows + row] = static_cast<uint8_t>((low | high << 4) - 32);
        put_nibbles(to + 8 * group_rows + i * 16 * group_rows, row, split_nibbles(block.qs + 16 * i));
    }
}

// Indices of magnitudes, with bit j of `signs` as bit `bit` of byte j.
uint32_t with_signs(uint32_t magnitudes, uint32_t signs, int bit) {
    return magnitudes | ((signs & 15) * 0x00204081u & every_byte(1)) << bit;
}

uint8_t odd(int index) { return static_cast<uint8_t>(2 * index + 1); }

void pack(const block_iq3_xxs & block, uint8_t * to, int row) {
    put_half(to, row, block.d);
    to += 2 * group_rows;
    for (int i = 0; i < 8; ++i) {
        const uint32_t scale_and_signs = word_at(block.qs + QK_K / 4, i);
        Codes codes;
        for (int c = 0; c < num_chunks; ++c) {
            const int signs = ksigns_iq2xs[scale_and_signs >> (c / 2 * 7) & 127] >> (c % 2 * 4);
            codes.chunks[c] = with_signs(iq3xxs_grid[block.qs[num_chunks * i + c]] >> 3 & every_byte(7), signs, 3); // 4, 12 ... 52, 62
        }
        to[i * group_rows + row] = odd(scale_and_signs >> 28);
        put_nibbles(to + 8 * group_rows + i * 16 * group_rows, row, codes);
    }
}

void pack(const block_iq3_s & block, uint8_t * to, int row) {
    put_half(to, row, block.d);
    to += 2 * group_rows;
    for (int i = 0; i < 8; ++i) {
        Codes codes;
        for (int c = 0; c < num_chunks; ++c) {
            const int entry = block.qs[num_chunks * i + c] | (block.qh[i] >> c & 1) << 8;
            codes.chunks[c] = with_signs(iq3s_grid[entry] >> 1 & every_byte(7), block.signs[4 * i + c / 2] >> (c % 2 * 4), 3); // 1, 3 ... 15
        }
        to[i * group_rows + row] = odd(block.scales[i / 2] >> (i % 2 * 4) & 15);
        put_nibbles(to + 8 * group_rows + i * 16 * group_rows, row, codes);
    }
}

// Fifth bits and nibbles; bit i of the word `high` is the fifth bit of column i.
void put_five_bits(uint8_t * to, int row, const uint8_t * nibbles, const uint8_t * high) {
    Codes codes         = split_nibbles(nibbles);
    const uint32_t bits = word_at(high, 0);
    for (int column = 0; column < block_columns; ++column) {
        codes.chunks[column / 4] |= ((bits >> column) & 1) << (8 * (column % 4) + 4);
    }
    put_bits(to, row, codes, 4);
    put_nibbles(to + 4 * group_rows, row, codes);
}

void pack(const block_q5_0 & block, uint8_t * to, int row) {
    put_half(to, row, block.d);
    put_five_bits(to + 2 * group_rows, row, block.qs, block.qh);
}

constexpr uint16_t sign_of_half = 0x8000;

void pack(const block_q4_1 & block, uint8_t * to, int row) {
    put_half(to, row, block.d);
    put_half(to + 2 * group_rows, row, block.m ^ sign_of_half);
    put_nibbles(to + 4 * group_rows, row, split_nibbles(block.qs));
}

void pack(const block_q5_1 & block, uint8_t * to, int row) {
    put_half(to, row, block.d);
    put_half(to + 2 * group_rows, row, block.m ^ sign_of_half);
    put_five_bits(to + 4 * group_rows, row, block.qs, block.qh);
}

// The 6 bit scale and minimum of a block, as ggml packs eight of each into 12 bytes.
void scale_of(const uint8_t * scales, int block, int & scale, int & minimum) {
    if (block < 4) {
        scale   = scales[block] & 63;
        minimum = scales[block + 4] & 63;
    } else {
        scale   = (scales[block + 4] & 15) | (scales[block - 4] >> 6) << 4;
        minimum = (scales[block + 4] >> 4) | (scales[block] >> 6) << 4;
    }
}

// d, dmin, and a byte a block for each of scale and minimum.
uint8_t * put_scales(uint16_t d, uint16_t dmin, const uint8_t * scales, uint8_t * to, int row) {
    put_half(to, row, d);
    put_half(to + 2 * group_rows, row, dmin);
    for (int block = 0; block < 8; ++block) {
        int scale, minimum;
        scale_of(scales, block, scale, minimum);
        to[(4 + block) * group_rows + row]  = static_cast<uint8_t>(scale);
        to[(12 + block) * group_rows + row] = static_cast<uint8_t>(minimum);
    }
    return to + 20 * group_rows;
}

void pack(const block_q4_K & block, uint8_t * to, int row) {
    to = put_scales(block.d, block.dmin, block.scales, to, row);
    for (int i = 0; i < 8; ++i) {
        put_nibbles(to + i * 16 * group_rows, row, shared_nibbles(block.qs, i));
    }
}

void pack(const block_q5_K & block, uint8_t * to, int row) {
    to = put_scales(block.d, block.dmin, block.scales, to, row);
    for (int i = 0; i < 8; ++i, to += 20 * group_rows) {
        Codes codes = shared_nibbles(block.qs, i);
        for (int c = 0; c < num_chunks; ++c) {
            codes.chunks[c] |= ((word_at(block.qh, c) >> i) & every_byte(1)) << 4;
        }
        put_bits(to, row, codes, 4);
        put_nibbles(to + 4 * group_rows, row, codes);
    }
}

// Of 128 columns the low nibbles are in 64 bytes (columns 0 to 63 low, 64 to 127 high), the bits above in 32.
Codes codes_of(const block_q6_K & block, int index) {
    const int half = index / 4, quarter = index % 4;
    Codes codes;
    for (int c = 0; c < num_chunks; ++c) {
        const uint32_t low  = word_at(block.ql + 64 * half + 32 * (quarter % 2), c) >> (quarter / 2 * 4);
        const uint32_t high = word_at(block.qh + 32 * half, c) >> (2 * quarter);
        codes.chunks[c]     = (low & every_byte(15)) | (high & every_byte(3)) << 4;
    }
    return codes;
}

void pack(const block_q6_K & block, uint8_t * to, int row) {
    put_half(to, row, block.d);
    to += 2 * group_rows;
    for (int i = 0; i < 16; ++i) {
        to[i * group_rows + row] = static_cast<uint8_t>(block.scales[i]);
    }
    to += 16 * group_rows;
    for (int i = 0; i < 8; ++i, to += 24 * group_rows) {
        const Codes codes = codes_of(block, i);
        put_bit_pairs(to, row, codes, 4);
        put_nibbles(to + 8 * group_rows, row, codes, 2);
    }
}

// Of 128 columns the pairs of bits are in 32 bytes, the columns 0 to 31 lowest.
Codes shared_bit_pairs(const uint8_t * from, int block) {
    Codes codes;
    for (int c = 0; c < num_chunks; ++c) {
        codes.chunks[c] = (word_at(from + block / 4 * 32, c) >> (block % 4 * 2)) & every_byte(3);
    }
    return codes;
}

void pack(const block_q2_K & block, uint8_t * to, int row) {
    put_half(to, row, block.d);
    put_half(to + 2 * group_rows, row, block.dmin);
    to += 4 * group_rows;
    for (int i = 0; i < 16; ++i) {
        to[i * group_rows + row] = block.scales[i];
    }
    to += 16 * group_rows;
    for (int i = 0; i < 8; ++i) {
        put_bit_pairs(to + i * 8 * group_rows, row, shared_bit_pairs(block.qs, i), 0);
    }
}

void pack(const block_q3_K & block, uint8_t * to, int row) {
    put_half(to, row, block.d);
    to += 2 * group_rows;
    for (int i = 0; i < 16; ++i) { // nibbles of 8 bytes, and pairs of bits of 4 bytes above them
        const int low = block.scales[i % 8] >> (i / 8 * 4) & 15, high = block.scales[8 + i % 4] >> (i / 4 * 2) & 3;
        to[i * group_rows + row] = static_cast<uint8_t>((low | high << 4) - 32);
    }
    to += 16 * group_rows;
    for (int i = 0; i < 8; ++i, to += 12 * group_rows) {
        Codes codes = shared_bit_pairs(block.qs, i);
        for (int c = 0; c < num_chunks; ++c) {
            codes.chunks[c] |= ((word_at(block.hmask, c) >> i) & every_byte(1)) << 2;
        }
        put_three_bits(to, row, codes);
    }
}

// Four entries of a code book, of 8 columns each.
Codes codes_of(const uint64_t * book, const int (&entries)[4]) {
    Codes codes;
    for (int c = 0; c < num_chunks; ++c) {
        codes.chunks[c] = word_at(&book[entries[c / 2]], c % 2);
    }
    return codes;
}

// Indices 0 to 2 of the magnitudes 8, 25 and 43 in a code book, with 8 signs for each entry as third bits.
Codes signed_codes_of(const uint64_t * book, const int (&entries)[4], const int (&signs)[4]) {
    Codes codes = codes_of(book, entries);
    for (int c = 0; c < num_chunks; ++c) {
        codes.chunks[c] = with_signs(codes.chunks[c] >> 4 & every_byte(3), signs[c / 2] >> (c % 2 * 4), 2);
    }
    return codes;
}

void pack(const block_iq2_xxs & block, uint8_t * to, int row) {
    put_half(to, row, block.d);
    to += 2 * group_rows;
    for (int i = 0; i < 8; ++i) {
        const uint32_t scale_and_signs = word_at(block.qs, 2 * i + 1);
        int entries[4], signs[4];
        for (int l = 0; l < 4; ++l) {
            entries[l] = word_at(block.qs, 2 * i) >> (8 * l) & 255;
            signs[l]   = ksigns_iq2xs[scale_and_signs >> (7 * l) & 127];
        }
        to[i * group_rows + row] = odd(scale_and_signs >> 28);
        put_three_bits(to + (8 + 12 * i) * group_rows, row, signed_codes_of(iq2xxs_grid, entries, signs));
    }
}

void put_two_scales(uint8_t * to, int row, int block, int nibbles) {
    to[2 * block * group_rows + row]       = odd(nibbles & 15);
    to[(2 * block + 1) * group_rows + row] = odd(nibbles >> 4);
}

void pack(const block_iq2_xs & block, uint8_t * to, int row) {
    put_half(to, row, block.d);
    to += 2 * group_rows;
    for (int i = 0; i < 8; ++i) {
        int entries[4], signs[4];
        for (int l = 0; l < 4; ++l) {
            entries[l] = block.qs[4 * i + l] & 511;
            signs[l]   = ksigns_iq2xs[block.qs[4 * i + l] >> 9];
        }
        put_two_scales(to, row, i, block.scales[i]);
        put_three_bits(to + (16 + 12 * i) * group_rows, row, signed_codes_of(iq2xs_grid, entries, signs));
    }
}

void pack(const block_iq2_s & block, uint8_t * to, int row) {
    put_half(to, row, block.d);
    to += 2 * group_rows;
    for (int i = 0; i < 8; ++i) {
        int entries[4], signs[4];
        for (int l = 0; l < 4; ++l) {
            entries[l] = block.qs[4 * i + l] | (block.qh[i] >> (2 * l) & 3) << 8;
            signs[l]   = block.qs[QK_K / 8 + 4 * i + l];
        }
        put_two_scales(to, row, i, block.scales[i]);
        put_three_bits(to + (16 + 12 * i) * group_rows, row, signed_codes_of(iq2s_grid, entries, signs));
    }
}

// The code book has -1, 0 and 1; an eighth of the scale is added to them, or subtracted.
void pack(const block_iq1_s & block, uint8_t * to, int row) {
    put_half(to, row, block.d);
    to += 2 * group_rows;
    for (int i = 0; i < 8; ++i) {
        int entries[4];
        for (int l = 0; l < 4; ++l) {
            entries[l] = block.qs[4 * i + l] | (block.qh[i] >> (3 * l) & 7) << 8;
        }
        Codes codes = codes_of(iq1s_grid, entries);
        for (uint32_t & chunk : codes.chunks) {
            chunk = ((chunk & every_byte(3)) + every_byte(1)) & every_byte(3);
        }
        to[i * group_rows + row] = static_cast<uint8_t>(odd(block.qh[i] >> 12 & 7) | (block.qh[i] & 0x8000 ? 9 : 7) << 4);
        put_bit_pairs(to + (8 + 8 * i) * group_rows, row, codes, 0);
    }
}

void pack(const block_iq1_m & block, uint8_t * to, int row) {
    uint16_t scales[4], d = 0;
    std::memcpy(scales, block.scales, sizeof scales);
    for (int i = 0; i < 4; ++i) {
        d |= scales[i] >> 12 << (4 * i);
    }
    put_half(to, row, d);
    to += 2 * group_rows;
    for (int i = 0; i < 8; ++i) {
        int entries[4], high[4];
        for (int l = 0; l < 4; ++l) {
            high[l]    = block.qh[2 * i + l / 2] >> (l % 2 * 4);
            entries[l] = block.qs[4 * i + l] | (high[l] & 7) << 8;
        }
        Codes codes = codes_of(iq1s_grid, entries);
        for (int c = 0; c < num_chunks; ++c) {
            codes.chunks[c] = (codes.chunks[c] & every_byte(3)) | every_byte(high[c / 2] >> 1 & 4);
        }
        for (int half = 0; half < 2; ++half) {
            to[(2 * i + half) * group_rows + row] = odd(scales[i / 2] >> (i % 2 * 6 + half * 3) & 7);
        }
        put_three_bits(to + (16 + 12 * i) * group_rows, row, codes);
    }
}

template <typename Block> void pack_rows(const FormatInfo & info, const void * rows, int64_t num_rows, int64_t num_columns, uint8_t * group) {
    const int64_t num_blocks = num_columns / info.columns;
    const auto * blocks      = static_cast<const Block *>(rows);
    for (int64_t i = 0; i < num_blocks; ++i) {
        for (int row = 0; row < num_rows; ++row) {
            pack(blocks[row * num_blocks + i], group + i * info.bytes, row);
        }
    }
}

// The sum of 32 products of words must fit in 31 bits. Activations are at most 2^14, so the magnitudes of a block's words sum to
// less than 2^17; rounding adds up to half of each.
constexpr float largest_word = 32767, largest_sum = 131071 - block_columns / 2 - 1;

// Words of 32 weights of a row. Weights that are infinite or NaN give an infinite unit, and so no finite output.
void pack_words(const float (&values)[block_columns], uint8_t * to, int row) {
    float largest = 0, mean = 0;
    for (const float value : values) {
        largest = std::max(largest, std::fabs(value));
        mean += std::fabs(value) / block_columns;
    }
    int exponent = 255 - 127, exponent_of_sum;
    float inverse = 0;
    if (std::isfinite(mean)) {
        std::frexp(largest / largest_word, &exponent);
        std::frexp(mean / (largest_sum / block_columns), &exponent_of_sum);
        exponent = std::max({exponent, exponent_of_sum, -126});
        inverse  = std::ldexp(1.0f, -exponent);
    }
    to[row] = static_cast<uint8_t>(exponent + 127);
    int16_t words[block_columns] = {};
    if (inverse > 0) {
        constexpr float shift = 0x1.8p23f; // the last bit of such a sum is 1: rounds faster than std::lrint
        for (int column = 0; column < block_columns; ++column) {
            words[column] = static_cast<int16_t>(std::bit_cast<int32_t>(values[column] * inverse + shift) - std::bit_cast<int32_t>(shift));
        }
    }
    for (int c = 0; c < block_columns / 2; ++c) {
        put_word(to + group_rows + c * 4 * group_rows, row, word_at(words, c));
    }
}

void pack_floats(const FormatInfo & info, const void * rows, int64_t num_rows, int64_t num_columns, uint8_t * group) {
    const ggml_type_traits & traits = *ggml_get_type_traits(info.type);
    const auto * from               = static_cast<const uint8_t *>(rows);
    for (int row = 0; row < num_rows; ++row) {
        for (int64_t block = 0; block < num_columns / block_columns; ++block, from += block_columns * traits.type_size) {
            float values[block_columns];
            traits.to_float(from, values, block_columns);
            pack_words(values, group + block * info.bytes, row);
        }
    }
}

constexpr FormatInfo formats[] = {
    {GGML_TYPE_Q8_0, 32, 34 * group_rows, 128, false, 1},
    {GGML_TYPE_Q4_0, 32, 18 * group_rows, 8, false, 1},
    {GGML_TYPE_Q5_0, 32, 22 * group_rows, 16, false, 1},
    {GGML_TYPE_Q4_1, 32, 20 * group_rows, 0, true, 1},
    {GGML_TYPE_Q5_1, 32, 24 * group_rows, 0, true, 1},
    {GGML_TYPE_IQ4_NL, 32, 18 * group_rows, 128, false, 1},
    {GGML_TYPE_IQ4_XS, 256, 138 * group_rows, 128, false, 1},
    {GGML_TYPE_IQ3_XXS, 256, 138 * group_rows, 32, false, 1, 0.5f}, // codes are half of the code book's magnitudes, scales d * s / 4
    {GGML_TYPE_IQ3_S, 256, 138 * group_rows, 15, false, 1},
    {GGML_TYPE_MXFP4, 32, 17 * group_rows, 12, false, 1},
    {GGML_TYPE_Q4_K, 256, 148 * group_rows, 0, true, 1},
    {GGML_TYPE_Q5_K, 256, 180 * group_rows, 0, true, 1},
    {GGML_TYPE_Q6_K, 256, 210 * group_rows, 32, false, 2},
    {GGML_TYPE_Q2_K, 256, 84 * group_rows, 0, true, 2},
    {GGML_TYPE_Q3_K, 256, 114 * group_rows, 4, false, 2},
    {GGML_TYPE_IQ2_XXS, 256, 106 * group_rows, 43, false, 1, 0.125f},
    {GGML_TYPE_IQ2_XS, 256, 114 * group_rows, 43, false, 2, 0.125f},
    {GGML_TYPE_IQ2_S, 256, 114 * group_rows, 43, false, 2, 0.125f},
    {GGML_TYPE_IQ1_S, 256, 74 * group_rows, 0, true, 1},
    {GGML_TYPE_IQ1_M, 256, 114 * group_rows, 9, false, 2, 0.125f},
    {GGML_TYPE_F16, 32, 65 * group_rows, 0, false, 1},
    {GGML_TYPE_BF16, 32, 65 * group_rows, 0, false, 1},
};
static_assert(sizeof formats / sizeof *formats == static_cast<size_t>(Format::count));

} // namespace

const FormatInfo & info_of(Format format) { return formats[static_cast<int>(format)]; }

bool has_format(ggml_type type, Format & format) {
    for (int i = 0; i < static_cast<int>(Format::count); ++i) {
        if (formats[i].type == type) {
            format = static_cast<Format>(i);
            return true;
        }
    }
    return false;
}

size_t packed_bytes(Format format, int64_t num_rows, int64_t num_columns) {
    const FormatInfo & info = info_of(format);
    return static_cast<size_t>((num_rows + group_rows - 1) / group_rows * (num_columns / info.columns) * info.bytes);
}

void pack_group(Format format, const void * rows, int64_t first_row, int64_t num_rows, int64_t num_columns, uint8_t * group) {
    const FormatInfo & info = info_of(format);
    const void * first      = static_cast<const uint8_t *>(rows) + first_row * ggml_row_size(info.type, num_columns);
    const int64_t count     = std::min<int64_t>(group_rows, num_rows - first_row);
    if (count < group_rows) {
        std::memset(group, 0, packed_bytes(format, group_rows, num_columns));
    }
    switch (format) {
        case Format::q8_0: return pack_rows<block_q8_0>(info, first, count, num_columns, group);
        case Format::q4_0: return pack_rows<block_q4_0>(info, first, count, num_columns, group);
        case Format::q5_0: return pack_rows<block_q5_0>(info, first, count, num_columns, group);
        case Format::q4_1: return pack_rows<block_q4_1>(info, first, count, num_columns, group);
        case Format::q5_1: return pack_rows<block_q5_1>(info, first, count, num_columns, group);
        case Format::iq4_nl: return pack_rows<block_iq4_nl>(info, first, count, num_columns, group);
        case Format::iq4_xs: return pack_rows<block_iq4_xs>(info, first, count, num_columns, group);
        case Format::iq3_xxs: return pack_rows<block_iq3_xxs>(info, first, count, num_columns, group);
        case Format::iq3_s: return pack_rows<block_iq3_s>(info, first, count, num_columns, group);
        case Format::mxfp4: return pack_rows<block_mxfp4>(info, first, count, num_columns, group);
        case Format::q4_k: return pack_rows<block_q4_K>(info, first, count, num_columns, group);
        case Format::q5_k: return pack_rows<block_q5_K>(info, first, count, num_columns, group);
        case Format::q6_k: return pack_rows<block_q6_K>(info, first, count, num_columns, group);
        case Format::q2_k: return pack_rows<block_q2_K>(info, first, count, num_columns, group);
        case Format::q3_k: return pack_rows<block_q3_K>(info, first, count, num_columns, group);
        case Format::iq2_xxs: return pack_rows<block_iq2_xxs>(info, first, count, num_columns, group);
        case Format::iq2_xs: return pack_rows<block_iq2_xs>(info, first, count, num_columns, group);
        case Format::iq2_s: return pack_rows<block_iq2_s>(info, first, count, num_columns, group);
        case Format::iq1_s: return pack_rows<block_iq1_s>(info, first, count, num_columns, group);
        case Format::iq1_m: return pack_rows<block_iq1_m>(info, first, count, num_columns, group);
        case Format::f16:
        case Format::bf16: return pack_floats(info, first, count, num_columns, group);
        case Format::count: break;
    }
}

} // namespace paceline::matmul
