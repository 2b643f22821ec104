// How a kernel reads each format of packed_weights.hpp: codes and scales as vectors of `Isa` (see kernel_body.hpp, which includes
// this for one instruction set).
#pragma once

#include "kernel.hpp"

#define KERNEL_INLINE inline __attribute__((always_inline))

namespace paceline::matmul {
namespace {

// The codes of a format's blocks: pair p of a vector of rows gives chunks first(p) and second(p). tokens: rows of
// activations that they are multiplied with.
template <typename Isa, int tokens> struct Bytes {
    static constexpr int bits = 8, scales = 1, bytes = 32 * group_rows;
    static constexpr bool is_in_order = Isa::template reads_in_order<tokens>;
    static constexpr int first(int pair) { return is_in_order ? 2 * pair : pair; }
    static constexpr int second(int pair) { return is_in_order ? 2 * pair + 1 : pair + 4; }
    template <typename Vec = typename Isa::I>
    static KERNEL_INLINE void pair(const uint8_t * block, int pair, int row, Vec & one, Vec & two) {
        one = Isa::load(block + (first(pair) * group_rows + row) * 4);
        two = Isa::load(block + (second(pair) * group_rows + row) * 4);
    }
};

template <typename Isa, int tokens> struct Words { // two columns to a chunk
    static constexpr int bits = 16, scales = 1, bytes = 64 * group_rows;
    static constexpr int first(int pair) { return 2 * pair; }
    static constexpr int second(int pair) { return 2 * pair + 1; }
    template <typename Vec = typename Isa::I>
    static KERNEL_INLINE void pair(const uint8_t * block, int pair, int row, Vec & one, Vec & two) {
        block += 4 * row; // once, before constants
        one = Isa::load(block + first(pair) * 4 * group_rows);
        two = Isa::load(block + second(pair) * 4 * group_rows);
    }
};

template <typename Isa, int tokens> struct Nibbles {
    static constexpr int bits = 4, scales = 1, bytes = 16 * group_rows;
    static constexpr int first(int pair) { return pair; }
    static constexpr int second(int pair) { return pair + 4; }
    template <typename Vec = typename Isa::I>
    static KERNEL_INLINE void pair(const uint8_t * block, int pair, int row, Vec & one, Vec & two) {
        const Vec both = Isa::load(block + (pair * group_rows + row) * 4);
        one = Isa::masked(both, 0x0f);
        two = Isa::masked(Isa::template shifted<4>(both), 0x0f);
    }
};

// Packed codes are indices of these values, which include the format's code_offset.
alignas(16) constexpr uint8_t iq4_values[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
alignas(16) constexpr uint8_t iq3_xxs_values[16] = {34, 38, 42, 46, 50, 54, 58, 63, 30, 26, 22, 18, 14, 10, 6, 1};
alignas(16) constexpr uint8_t iq3_s_values[16] = {16, 18, 20, 22, 24, 26, 28, 30, 14, 12, 10, 8, 6, 4, 2, 0};
alignas(16) constexpr uint8_t fp4_values[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

constexpr bool fit(const uint8_t (&values)[16], int bits) {
    int all = 0;
    for (const uint8_t value : values) {
        all |= value;
    }
    return all >> bits == 0;
}

template <typename Isa, int tokens, template <typename, int> typename CodesOf, int num_bits, const uint8_t (&values)[16]>
struct Indices : CodesOf<Isa, tokens> {
    static constexpr int bits = num_bits;
    static_assert(fit(values, bits)); // sums of products would overflow
    template <typename Vec = typename Isa::I>
    static KERNEL_INLINE void pair(const uint8_t * block, int pair, int row, Vec & one, Vec & two) {
        CodesOf<Isa, tokens>::pair(block, pair, row, one, two);
        one = Isa::looked_up(values, one);
        two = Isa::looked_up(values, two);
    }
};
template <typename Isa, int tokens> using Iq4 = Indices<Isa, tokens, Nibbles, 8, iq4_values>;
template <typename Isa, int tokens> using Iq3Xxs = Indices<Isa, tokens, Nibbles, 6, iq3_xxs_values>;
template <typename Isa, int tokens> using Iq3S = Indices<Isa, tokens, Nibbles, 5, iq3_s_values>;
template <typename Isa, int tokens> using Fp4 = Indices<Isa, tokens, Nibbles, 5, fp4_values>;

template <typename Isa, int tokens> struct FiveBits : Nibbles<Isa, tokens> {
    static constexpr int bits = 5, bytes = 20 * group_rows;
    template <typename Vec = typename Isa::I>
    static KERNEL_INLINE void pair(const uint8_t * block, int pair, int row, Vec & one, Vec & two) {
        Nibbles<Isa, tokens>::pair(block + 4 * group_rows, pair, row, one, two);
        const Vec high = Isa::load(block + row * 4);
        one = Isa::joined(one, Isa::shifted_left(high, 4 - pair), 0x10);
        two = Isa::joined(two, Isa::shifted_right(high, pair), 0x10);
    }
};

// The chunks of each pair. If a block has two scales, each scale is of one half, and so both chunks of a pair are in the same half.
template <int num_scales> struct Order {
    static constexpr int scales = num_scales;
    static constexpr int first(int pair) { return scales == 2 ? pair / 2 * 4 + pair % 2 : pair; }
    static constexpr int second(int pair) { return first(pair) + (scales == 2 ? 2 : 4); }
};

template <typename Isa, int num_scales> struct TwoBits : Order<num_scales> {
    static constexpr int bits = 4, bytes = 8 * group_rows; // summed as 4 bits are
    template <typename Vec = typename Isa::I> static KERNEL_INLINE Vec chunk(const uint8_t * block, int chunk, int row) {
        return Isa::masked(Isa::shifted_right(Isa::load(block + (chunk / 4 * group_rows + row) * 4), chunk % 4 * 2), 0x03);
    }
    template <typename Vec = typename Isa::I>
    static KERNEL_INLINE void pair(const uint8_t * block, int pair, int row, Vec & one, Vec & two) {
        one = chunk(block, TwoBits::first(pair), row);
        two = chunk(block, TwoBits::second(pair), row);
    }
};
template <typename Isa, int tokens> using TwoBitsOfBlock = TwoBits<Isa, 1>;
template <typename Isa, int tokens> using TwoBitsOfHalves = TwoBits<Isa, 2>;

template <typename Isa, int num_scales> struct ThreeBits : Order<num_scales> {
    static constexpr int bits = 4, bytes = 12 * group_rows;
    template <typename Vec = typename Isa::I> static KERNEL_INLINE Vec chunk(const uint8_t * block, int chunk, int row) {
        const Vec high = Isa::load(block + row * 4);
        return Isa::joined(TwoBits<Isa, num_scales>::chunk(block + 4 * group_rows, chunk, row),
                           chunk < 2 ? Isa::shifted_left(high, 2 - chunk) : Isa::shifted_right(high, chunk - 2), 0x04);
    }
    template <typename Vec = typename Isa::I>
    static KERNEL_INLINE void pair(const uint8_t * block, int pair, int row, Vec & one, Vec & two) {
        one = chunk(block, ThreeBits::first(pair), row);
        two = chunk(block, ThreeBits::second(pair), row);
    }
};
template <typename Isa, int tokens> using ThreeBitsOfBlock = ThreeBits<Isa, 1>;
template <typename Isa, int tokens> using ThreeBitsOfHalves = ThreeBits<Isa, 2>;

alignas(16) constexpr uint8_t iq2_values[16] = {51, 68, 86, 0, 35, 18, 0, 0};
alignas(16) constexpr uint8_t iq1_values[16] = {10, 18, 0, 2, 8, 16, 0, 0};
template <typename Isa, int tokens> using Iq2OfBlock = Indices<Isa, tokens, ThreeBitsOfBlock, 7, iq2_values>;
template <typename Isa, int tokens> using Iq2OfHalves = Indices<Isa, tokens, ThreeBitsOfHalves, 7, iq2_values>;
template <typename Isa, int tokens> using Iq1 = Indices<Isa, tokens, ThreeBitsOfHalves, 5, iq1_values>;

template <typename Isa, int tokens> struct SixBits : Order<2> {
    static constexpr int bits = 6, bytes = 24 * group_rows;
    template <typename Vec = typename Isa::I>
    static KERNEL_INLINE void pair(const uint8_t * block, int pair, int row, Vec & one, Vec & two) {
        Nibbles<Isa, tokens>::pair(block + 8 * group_rows, pair, row, one, two);
        const Vec high = Isa::load(block + (pair / 2 * group_rows + row) * 4);
        one = Isa::joined(one, Isa::shifted_left(high, 4 - 2 * (pair % 2)), 0x30);
        two = Isa::joined(two, Isa::shifted_right(high, 2 * (pair % 2)), 0x30);
    }
};

// A format's scales and minima: `part` is a block of a superblock, or half of a block if blocks have two scales.
template <typename Isa> struct OneScale {
    using F = typename Isa::F;
    static constexpr int bytes = 2 * group_rows;
    static constexpr bool has_minimum = false;
    static KERNEL_INLINE F scale(const uint8_t * from, int, int row) { return Isa::from_halves(from + 2 * row); }
    static KERNEL_INLINE F minimum(const uint8_t *, int, int) { return F{}; }
};

template <typename Isa> struct OneScaleAndMinimum : OneScale<Isa> {
    static constexpr int bytes = 4 * group_rows;
    static constexpr bool has_minimum = true;
    static KERNEL_INLINE typename Isa::F minimum(const uint8_t * from, int, int row) { return Isa::from_halves(from + 2 * (group_rows + row)); }
};

template <typename Isa> struct ScaleAndMinimum {
    using F = typename Isa::F;
    static constexpr int bytes = 20 * group_rows;
    static constexpr bool has_minimum = true;
    static KERNEL_INLINE F scale(const uint8_t * from, int part, int row) {
        return Isa::from_halves(from + 2 * row) * Isa::to_floats(Isa::unsigned_bytes(from + (4 + part) * group_rows + row));
    }
    static KERNEL_INLINE F minimum(const uint8_t * from, int part, int row) {
        return Isa::from_halves(from + 2 * (group_rows + row)) * Isa::to_floats(Isa::unsigned_bytes(from + (12 + part) * group_rows + row));
    }
};

template <typename Isa> struct NibblesOfScales {
    using F = typename Isa::F;
    static constexpr int bytes = 20 * group_rows;
    static constexpr bool has_minimum = true;
    static KERNEL_INLINE F scale(const uint8_t * from, int part, int row) {
        return Isa::from_halves(from + 2 * row) * Isa::to_floats(Isa::masked(Isa::unsigned_bytes(from + (4 + part) * group_rows + row), 0x0f));
    }
    static KERNEL_INLINE F minimum(const uint8_t * from, int part, int row) {
        return Isa::from_halves(from + 2 * (group_rows + row)) *
               Isa::to_floats(Isa::shifted_right(Isa::unsigned_bytes(from + (4 + part) * group_rows + row), 4));
    }
};

template <typename Isa> struct Powers { // of two
    using F = typename Isa::F;
    static constexpr int bytes = group_rows;
    static constexpr bool has_minimum = false;
    static KERNEL_INLINE F scale(const uint8_t * from, int, int row) { return Isa::from_powers(from + row); }
    static KERNEL_INLINE F minimum(const uint8_t *, int, int) { return F{}; }
};

template <typename Isa> struct ScaleAndEighths {
    using F = typename Isa::F;
    static constexpr int bytes = 10 * group_rows;
    static constexpr bool has_minimum = true;
    static KERNEL_INLINE F scale(const uint8_t * from, int part, int row) {
        return Isa::from_halves(from + 2 * row) * Isa::to_floats(Isa::masked(Isa::unsigned_bytes(from + (2 + part) * group_rows + row), 0x0f));
    }
    static KERNEL_INLINE F minimum(const uint8_t * from, int part, int row) {
        return scale(from, part, row) * 0.125f * Isa::to_floats(Isa::shifted_right(Isa::unsigned_bytes(from + (2 + part) * group_rows + row), 4));
    }
};

template <typename Isa> struct Exponents {
    using F = typename Isa::F;
    static constexpr int bytes = group_rows;
    static constexpr bool has_minimum = false;
    static KERNEL_INLINE F scale(const uint8_t * from, int, int row) { return Isa::from_exponents(from + row); }
    static KERNEL_INLINE F minimum(const uint8_t *, int, int) { return F{}; }
};

template <typename Isa, int num_scales> struct SignedScales {
    using F = typename Isa::F;
    static constexpr int bytes = (2 + num_scales) * group_rows;
    static constexpr bool has_minimum = false;
    static KERNEL_INLINE F scale(const uint8_t * from, int part, int row) {
        return Isa::from_halves(from + 2 * row) * Isa::from_signed_bytes(from + (2 + part) * group_rows + row);
    }
    static KERNEL_INLINE F minimum(const uint8_t *, int, int) { return F{}; }
};

template <typename Isa> using Signed8  = SignedScales<Isa, 8>;
template <typename Isa> using Signed16 = SignedScales<Isa, 16>;

template <typename Isa, Format format> struct Layout;
template <typename Isa, template <typename, int> typename CodesOf, template <typename> typename ScalesOf, int num> struct LayoutOf {
    template <int tokens> using Codes = CodesOf<Isa, tokens>;
    using Scales                      = ScalesOf<Isa>;
    static constexpr int blocks = num, bytes = Scales::bytes + num * Codes<1>::bytes;
};
template <typename Isa> struct Layout<Isa, Format::q8_0> : LayoutOf<Isa, Bytes, OneScale, 1> {};
template <typename Isa> struct Layout<Isa, Format::q4_0> : LayoutOf<Isa, Nibbles, OneScale, 1> {};
template <typename Isa> struct Layout<Isa, Format::q5_0> : LayoutOf<Isa, FiveBits, OneScale, 1> {};
template <typename Isa> struct Layout<Isa, Format::q4_1> : LayoutOf<Isa, Nibbles, OneScaleAndMinimum, 1> {};
template <typename Isa> struct Layout<Isa, Format::q5_1> : LayoutOf<Isa, FiveBits, OneScaleAndMinimum, 1> {};
template <typename Isa> struct Layout<Isa, Format::iq4_nl> : LayoutOf<Isa, Iq4, OneScale, 1> {};
template <typename Isa> struct Layout<Isa, Format::iq4_xs> : LayoutOf<Isa, Iq4, Signed8, 8> {};
template <typename Isa> struct Layout<Isa, Format::iq3_xxs> : LayoutOf<Isa, Iq3Xxs, Signed8, 8> {};
template <typename Isa> struct Layout<Isa, Format::iq3_s> : LayoutOf<Isa, Iq3S, Signed8, 8> {};
template <typename Isa> struct Layout<Isa, Format::mxfp4> : LayoutOf<Isa, Fp4, Exponents, 1> {};
template <typename Isa> struct Layout<Isa, Format::q4_k> : LayoutOf<Isa, Nibbles, ScaleAndMinimum, 8> {};
template <typename Isa> struct Layout<Isa, Format::q5_k> : LayoutOf<Isa, FiveBits, ScaleAndMinimum, 8> {};
template <typename Isa> struct Layout<Isa, Format::q6_k> : LayoutOf<Isa, SixBits, Signed16, 8> {};
template <typename Isa> struct Layout<Isa, Format::q2_k> : LayoutOf<Isa, TwoBitsOfHalves, NibblesOfScales, 8> {};
template <typename Isa> struct Layout<Isa, Format::q3_k> : LayoutOf<Isa, ThreeBitsOfHalves, Signed16, 8> {};
template <typename Isa> struct Layout<Isa, Format::iq2_xxs> : LayoutOf<Isa, Iq2OfBlock, Signed8, 8> {};
template <typename Isa> struct Layout<Isa, Format::iq2_xs> : LayoutOf<Isa, Iq2OfHalves, Signed16, 8> {};
template <typename Isa> struct Layout<Isa, Format::iq2_s> : LayoutOf<Isa, Iq2OfHalves, Signed16, 8> {};
template <typename Isa> struct Layout<Isa, Format::iq1_s> : LayoutOf<Isa, TwoBitsOfBlock, ScaleAndEighths, 8> {};
template <typename Isa> struct Layout<Isa, Format::iq1_m> : LayoutOf<Isa, Iq1, Signed16, 8> {};
template <typename Isa> struct Layout<Isa, Format::f16> : LayoutOf<Isa, Words, Powers, 1> {};

} // namespace
} // namespace paceline::matmul
