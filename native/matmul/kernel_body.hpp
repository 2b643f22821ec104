// The kernel for any instruction set that `Isa` describes. Included once by each kernel_*.cpp, which is compiled for its
// instruction set: everything is in an anonymous namespace and nothing of the standard library is used, so that no function
// compiled here is linked into code that runs on other processors.
//
// Isa has:  lanes, F (floats), I (int32 lanes or bytes), tokens (of a register tile)
//           vectors(format, num_tokens, scales): of rows in a register tile; a block with two scales needs half as many registers again
//           reads_in_order<num_tokens>: whether the chunks of codes of 8 bits are read in the order of memory, or two apart
//           needs_prefetch<tokens>(format): whether so many rows of activations need more than the processor's own prefetch
//           load, store, broadcast ..., and Dot<bits>: sums of products of codes of that many bits. If Isa has order_codes,
//           both chunks of a pair are multiplied at once: Dot has join, add_pair, separate and add_four.
// Every output is one sum over blocks in their order, with the same operations for any other outputs.

#include <cstring>

#include "kernel_formats.hpp"

namespace paceline::matmul {
namespace {

// Keeps a value in a register, unknown to the optimiser.
#if defined(__aarch64__)
template <typename Vec> KERNEL_INLINE void hide(Vec & value) { asm volatile("" : "+w"(value)); }
#else
template <typename Vec> KERNEL_INLINE void hide(Vec & value) { asm volatile("" : "+v"(value)); }
#endif

template <typename T> KERNEL_INLINE T value_at(const void * from) {
    T value;
    memcpy(&value, from, sizeof value);
    return value;
}

// The unit of 32 activations' codes, from their largest magnitude, and its inverse. Rounded to 11 bits, so that activations
// may differ in its last bits, as sums in another order do, and yet give the same codes and units: products hand no noise on.
struct Unit {
    float value, inverse;
};

KERNEL_INLINE Unit unit_of(float largest) {
    if (!(largest > 1e-35f)) { // zeros, and numbers without an inverse
        return {largest * 0, 0};
    }
    const float exact   = largest / 127;
    const uint32_t bits = (value_at<uint32_t>(&exact) + 0x1000) & ~uint32_t{0x1fff};
    const float value   = value_at<float>(&bits);
    return {value, 1 / value};
}

// The unit of 32 activations' words: a power of two, of which the largest magnitude is 2^13 to 2^14.
KERNEL_INLINE Unit power_of_two_of(float largest) {
    if (!(largest > 1e-30f && largest < 1e38f)) { // zeros, numbers without an inverse, infinity and NaN
        return {largest * (largest > 1 ? 1e38f : 0), 0};
    }
    const uint32_t exponent = value_at<uint32_t>(&largest) >> 23, unit = (exponent - 13) << 23, inverse = (254 + 13 - exponent) << 23;
    return {value_at<float>(&unit), value_at<float>(&inverse)};
}

template <typename Isa> constexpr bool takes_pairs = requires(uint8_t * codes) { Isa::order_codes(codes, true); };

// NEON is left to llama.cpp, which multiplies floats of 16 bits there as fast as words are.
template <typename Isa> constexpr bool multiplies_floats = requires(const uint8_t * from) { Isa::from_powers(from); };

// A chunk of each row of weights times the same chunk of each row of activations.
template <typename Isa, typename Dot, int stride, int vectors, int tokens>
KERNEL_INLINE void add_products(typename Dot::Sum (&sums)[vectors][tokens], const typename Isa::I (&weights)[vectors], const uint8_t * codes) {
    typename Dot::Operand operands[vectors];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
        operands[v] = Dot::operand(weights[v]);
    }
#pragma GCC unroll 8
    for (int t = 0; t < tokens; ++t) {
        const typename Isa::I activations = Isa::broadcast(codes + t * stride);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) {
            Dot::add(sums[v][t], operands[v], activations);
        }
    }
}

// The same for both chunks of a pair, if their products can be added before they are widened.
template <typename Isa, typename Dot>
constexpr bool adds_both = requires(typename Dot::Sum sum, typename Isa::I codes) { Dot::add_both(sum, codes, codes, codes, codes); };

template <typename Isa, typename Dot, int stride, int vectors, int tokens>
KERNEL_INLINE void add_both(typename Dot::Sum (&sums)[vectors][tokens], const typename Isa::I (&one)[vectors],
                            const typename Isa::I (&two)[vectors], const uint8_t * codes_one, const uint8_t * codes_two) {
#pragma GCC unroll 8
    for (int t = 0; t < tokens; ++t) {
        const typename Isa::I activations_one = Isa::broadcast(codes_one + t * stride);
        const typename Isa::I activations_two = Isa::broadcast(codes_two + t * stride);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) {
            Dot::add_both(sums[v][t], one[v], two[v], activations_one, activations_two);
        }
    }
}

// The first rows of activations that a group is multiplied with wait for memory. Every line is prefetched, lines with scales too: a few
// with each pair, since many at once are more misses than a core has open. Which formats are better left to the processor's own
// prefetch was measured (ADR 0056).
constexpr int prefetched_bytes = 6144;

template <typename L, int pairs> KERNEL_INLINE void prefetch(const uint8_t * superblock, int block, int pair) {
    static_assert(L::bytes % L::blocks == 0);
    constexpr int share = L::bytes / L::blocks, lines = (share + 63) / 64;
    const uint8_t * ahead = superblock + prefetched_bytes + block * share;
#pragma GCC unroll 8
    for (int line = pair * lines / pairs; line < (pair + 1) * lines / pairs; ++line) {
        __builtin_prefetch(ahead + 64 * line);
    }
}

// Sums of `tokens` rows of a tile, for `vectors` vectors of rows of the group from row `first_row` on.
template <typename Isa, Format format, int vectors, int tokens>
void multiply_part(const uint8_t * group, int64_t num_blocks, bool is_cached, const uint8_t * tile, int num_tokens, int place,
                   float * const * outs, int first_row, int num_rows) {
    using L      = Layout<Isa, format>;
    using Codes  = typename L::template Codes<tokens>;
    using Scales = typename L::Scales;
    using F      = typename Isa::F;
    using I      = typename Isa::I;
    using Dot    = typename Isa::template Dot<Codes::bits>;
    constexpr int pairs = codes_bytes(format) / 8, half_pairs = pairs / Codes::scales, stride = codes_bytes(format);
    static_assert(!takes_pairs<Isa> || !Isa::template reads_in_order<tokens>); // add_pair takes chunks that are apart
    F sums[vectors][tokens] = {};
    const uint8_t * codes      = tile + place * stride;
    const uint8_t * scalars    = tile + num_tokens * stride + 4 * place;
    const ptrdiff_t next_array = 4 * num_tokens, next_block = tile_block_bytes(format, num_tokens);
    for (int64_t super = 0; super < num_blocks; ++super, group += L::bytes) {
        const uint8_t * block = group + Scales::bytes;
        for (int b = 0; b < L::blocks; ++b, block += Codes::bytes, codes += next_block, scalars += next_block) {
            [[maybe_unused]] F firsts[vectors][tokens]; // of two halves
#pragma GCC unroll 2
            for (int half = 0; half < Codes::scales; ++half) {
                typename Dot::Sum dots[vectors][tokens];
#pragma GCC unroll 8
                for (int t = 0; t < tokens; ++t) {
                    const I start = Scales::has_minimum || is_float(format) ? I{} : Isa::broadcast(scalars + (1 + half) * next_array + 4 * t);
#pragma GCC unroll 4
                    for (int v = 0; v < vectors; ++v) {
                        Dot::begin(dots[v][t], start);
                    }
                }
                if constexpr (takes_pairs<Isa>) {
                    Dot::join(dots);
                }
#pragma GCC unroll 8
                for (int pair = half * half_pairs; pair < (half + 1) * half_pairs; ++pair) {
                    if constexpr (Isa::template needs_prefetch<tokens>(format)) {
                        if (!is_cached) {
                            prefetch<L, pairs>(group, b, pair);
                        }
                    }
                    I one[vectors], two[vectors];
#pragma GCC unroll 4
                    for (int v = 0; v < vectors; ++v) {
                        Codes::pair(block, pair, first_row + v * Isa::lanes, one[v], two[v]);
                    }
                    if constexpr (takes_pairs<Isa>) {
                        Dot::add_pair(dots, one, two, codes + 8 * pair);
                    } else if constexpr (adds_both<Isa, Dot>) {
                        add_both<Isa, Dot, stride, vectors, tokens>(dots, one, two, codes + 4 * Codes::first(pair), codes + 4 * Codes::second(pair));
                    } else {
                        add_products<Isa, Dot, stride, vectors, tokens>(dots, one, codes + 4 * Codes::first(pair));
                        add_products<Isa, Dot, stride, vectors, tokens>(dots, two, codes + 4 * Codes::second(pair));
                    }
                }
                if constexpr (takes_pairs<Isa>) {
                    Dot::separate(dots);
                }
                F scale[vectors], minimum[vectors];
#pragma GCC unroll 4
                for (int v = 0; v < vectors; ++v) {
                    const int row = first_row + v * Isa::lanes;
                    scale[v]      = Scales::scale(group, Codes::scales * b + half, row);
                    minimum[v]    = Scales::minimum(group, Codes::scales * b + half, row);
                }
#pragma GCC unroll 8
                for (int t = 0; t < tokens; ++t) {
                    const F unit = Isa::broadcast_float(scalars + 4 * t);
#pragma GCC unroll 4
                    for (int v = 0; v < vectors; ++v) {
                        const F dot = Isa::to_floats(Dot::total(dots[v][t]));
                        if constexpr (Codes::scales == 1) {
                            sums[v][t] = Isa::multiply_add(dot, scale[v] * unit, sums[v][t]);
                        } else if (half == 0) {
                            firsts[v][t] = dot * scale[v];
                        } else {
                            sums[v][t] = Isa::multiply_add(Isa::multiply_add(dot, scale[v], firsts[v][t]), unit, sums[v][t]);
                        }
                        if constexpr (Scales::has_minimum) {
                            sums[v][t] = Isa::subtract_product(minimum[v], Isa::broadcast_float(scalars + (1 + half) * next_array + 4 * t), sums[v][t]);
                        }
                    }
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < tokens; ++t) {
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) {
            const int row = first_row + v * Isa::lanes;
            Isa::store(outs[place + t] + row, sums[v][t], num_rows - row);
        }
    }
}

template <typename Isa, Format format, int tokens>
void multiply_rows(const uint8_t * group, int64_t num_blocks, bool is_cached, const uint8_t * tile, int num_tokens, int place,
                   float * const * outs, int num_rows) {
    constexpr int vectors = Isa::vectors(format, tokens, Layout<Isa, format>::template Codes<tokens>::scales);
    for (int row = 0; row < num_rows; row += vectors * Isa::lanes) {
        multiply_part<Isa, format, vectors, tokens>(group, num_blocks, is_cached || row > 0, tile, num_tokens, place, outs, row, num_rows);
    }
}

template <typename Isa, Format format>
void multiply_tile(const uint8_t * group, int64_t num_columns, bool is_cached, const uint8_t * tile, int num_tokens,
                   float * const * outs, int num_rows) {
    const int64_t num_blocks = num_columns / (Layout<Isa, format>::blocks * block_columns);
    for (int place = 0; place < num_tokens;) {
        const int count = Isa::next_tokens(num_tokens - place);
        switch (count) {
#define KERNEL_CASE(n) \
    case n: \
        if constexpr (n <= Isa::tokens) { \
            multiply_rows<Isa, format, n>(group, num_blocks, is_cached || place > 0, tile, num_tokens, place, outs, num_rows); \
        } \
        break;
            KERNEL_CASE(1)
            KERNEL_CASE(2)
            KERNEL_CASE(3)
            KERNEL_CASE(4)
            KERNEL_CASE(5)
            KERNEL_CASE(6)
            KERNEL_CASE(7)
            KERNEL_CASE(8)
#undef KERNEL_CASE
        }
        place += count;
    }
}

template <typename Isa>
void multiply(Format format, const uint8_t * group, int64_t num_columns, bool is_cached, const uint8_t * tile, int num_tokens,
              float * const * outs, int num_rows) {
    switch (format) {
#define KERNEL_CASE(f) \
    case Format::f: return multiply_tile<Isa, Format::f>(group, num_columns, is_cached, tile, num_tokens, outs, num_rows);
        KERNEL_CASE(q8_0)
        KERNEL_CASE(q4_0)
        KERNEL_CASE(q5_0)
        KERNEL_CASE(q4_1)
        KERNEL_CASE(q5_1)
        KERNEL_CASE(iq4_nl)
        KERNEL_CASE(iq4_xs)
        KERNEL_CASE(iq3_xxs)
        KERNEL_CASE(iq3_s)
        KERNEL_CASE(mxfp4)
        KERNEL_CASE(q4_k)
        KERNEL_CASE(q5_k)
        KERNEL_CASE(q6_k)
        KERNEL_CASE(q2_k)
        KERNEL_CASE(q3_k)
        KERNEL_CASE(iq2_xxs)
        KERNEL_CASE(iq2_xs)
        KERNEL_CASE(iq2_s)
        KERNEL_CASE(iq1_s)
        KERNEL_CASE(iq1_m)
#undef KERNEL_CASE
        case Format::f16:
        case Format::bf16:
            if constexpr (multiplies_floats<Isa>) {
                multiply_tile<Isa, Format::f16>(group, num_columns, is_cached, tile, num_tokens, outs, num_rows);
            }
            break;
        case Format::count: break;
    }
}

template <typename Isa> void quantise_words(const float * row, int64_t first, int64_t end, uint8_t * tile, int num_tokens, int place) {
    const int block_bytes = tile_block_bytes(Format::f16, num_tokens);
    uint8_t * block       = tile + first / block_columns * block_bytes;
    for (int64_t column = first; column < end; column += block_columns, block += block_bytes) {
        const float unit = Isa::quantise_words(row + column, block + place * codes_bytes(Format::f16));
        memcpy(block + num_tokens * codes_bytes(Format::f16) + 4 * place, &unit, 4);
    }
}

// Codes of 32 activations: value / (largest / 127), rounded to the nearest.
template <typename Isa>
void quantise(const float * row, int64_t first, int64_t end, Format format, uint8_t * tile, int num_tokens, int place) {
    if (is_float(format)) {
        if constexpr (multiplies_floats<Isa>) {
            quantise_words<Isa>(row, first, end, tile, num_tokens, place);
        }
        return;
    }
    const FormatInfo & info = info_of(format);
    const bool has_halves   = info.scales == 2;
    uint8_t * block         = tile + first / block_columns * tile_block_bytes(format, num_tokens);
    for (int64_t column = first; column < end; column += block_columns, block += tile_block_bytes(format, num_tokens)) {
        uint32_t sums[2];
        const float unit = info.factor * Isa::quantise_block(row + column, block + place * block_columns, sums);
        if constexpr (takes_pairs<Isa>) {
            Isa::order_codes(block + place * block_columns, has_halves);
        }
        uint8_t * scalars = block + num_tokens * block_columns + 4 * place;
        memcpy(scalars, &unit, 4);
        sums[0] += has_halves ? 0 : sums[1];
        for (int i = 0; i < 2; ++i) {
            const float total  = unit * static_cast<float>(static_cast<int32_t>(sums[i]));
            const uint32_t one = sums[i] * static_cast<uint32_t>(-info.code_offset);
            memcpy(scalars + 4 * (1 + i) * num_tokens, info.has_minimum ? static_cast<const void *>(&total) : &one, 4);
        }
    }
}

template <typename Isa> uint64_t sum_of_bytes(const uint8_t * from, int64_t count) {
    constexpr int width = sizeof(typename Isa::I);
    typename Isa::I sums[4] = {};
    for (int64_t i = 0; i < count; i += 4 * width) {
        for (int j = 0; j < 4; ++j) {
            sums[j] += Isa::load(from + i + j * width);
        }
    }
    const typename Isa::I all = sums[0] + sums[1] + sums[2] + sums[3];
    return value_at<uint64_t>(&all);
}

constexpr int spins = 12; // independent sums: more than the latency of an instruction needs

// Each step hides an operand: else sums would be known to be equal, and one of them computed.
template <typename Isa> int64_t spin_dots(int64_t count) {
    using Dot = typename Isa::template Dot<4>;
    constexpr int num_sums = sizeof(typename Dot::Sum) > sizeof(typename Isa::I) ? spins / 2 : spins; // the capacity of the registers
    typename Isa::I codes = Isa::masked(~typename Isa::I{}, 0x0f), activations = Isa::masked(codes, 0x01);
    typename Dot::Sum sums[1][num_sums];
    for (auto & sum : sums[0]) {
        Dot::begin(sum, typename Isa::I{});
    }
    constexpr int64_t in_round = num_sums * (takes_pairs<Isa> ? 8 : 4) * Isa::lanes;
    int64_t done               = 0;
    for (; done < count; done += in_round) {
        hide(codes);
#pragma GCC unroll 12
        for (auto & sum : sums[0]) {
            hide(activations);
            if constexpr (takes_pairs<Isa>) {
                Dot::add_four(sum, codes, activations);
            } else {
                Dot::add(sum, Dot::operand(codes), activations);
            }
        }
    }
    for (auto & sum : sums[0]) {
        typename Isa::I total = Dot::total(sum);
        hide(total);
    }
    return done;
}

template <typename Isa> int64_t spin_float_dots(int64_t count) {
    typename Isa::F one = Isa::to_floats(typename Isa::I{}), sums[spins] = {};
    const int64_t in_round = spins * Isa::lanes;
    int64_t done           = 0;
    for (; done < count; done += in_round) {
#pragma GCC unroll 12
        for (auto & sum : sums) {
            hide(one);
            sum = Isa::multiply_add(one, one, sum);
        }
    }
    for (auto & sum : sums) {
        hide(sum);
    }
    return done;
}

} // namespace
} // namespace paceline::matmul
