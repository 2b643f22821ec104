// AVX2: 8 rows in a vector. Products of bytes are summed in pairs into int16, which must not overflow.
#include "kernel.hpp"

#if defined(__x86_64__)

#include <immintrin.h>

#include "../processor_features.hpp"
#include "kernel_body.hpp"

namespace paceline::matmul {
namespace {

struct Avx2 {
    using F = __m256;
    using I = __m256i;
    static constexpr int lanes = 8, tokens = 4;
    template <int num_tokens> static constexpr bool reads_in_order = num_tokens == 1; // 8 streams took 1.08 times as long in order
    template <int num_tokens> static constexpr bool needs_prefetch(Format format) { return num_tokens > 1 || format != Format::q8_0; }
    static constexpr int vectors(Format format, int tokens, int) { // the capacity of 16 registers
        return tokens == 1 || (tokens == 2 && is_float(format)) ? 4 : 2;
    }
    static constexpr int next_tokens(int left) { return left == 5 || left == 6 ? 3 : left < 4 ? left : 4; }

    static KERNEL_INLINE I load(const uint8_t * from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)); }
    static KERNEL_INLINE I broadcast(const uint8_t * from) { return _mm256_set1_epi32(value_at<int32_t>(from)); }
    static KERNEL_INLINE F broadcast_float(const uint8_t * from) { return _mm256_set1_ps(value_at<float>(from)); }
    static KERNEL_INLINE I all(int byte) { return _mm256_set1_epi8(static_cast<char>(byte)); }
    static KERNEL_INLINE I masked(I bytes, int mask) { return _mm256_and_si256(bytes, all(mask)); }
    template <int bits> static KERNEL_INLINE I shifted(I bytes) { return _mm256_srli_epi32(bytes, bits); }
    static KERNEL_INLINE I shifted_left(I bytes, int bits) { return _mm256_slli_epi32(bytes, bits); }
    static KERNEL_INLINE I shifted_right(I bytes, int bits) { return _mm256_srli_epi32(bytes, bits); }
    static KERNEL_INLINE I joined(I low, I high, int mask) { return _mm256_or_si256(low, masked(high, mask)); }
    static KERNEL_INLINE I looked_up(const uint8_t (&values)[16], I indices) {
        const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i *>(values));
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), indices);
    }
    static KERNEL_INLINE F to_floats(I numbers) { return _mm256_cvtepi32_ps(numbers); }
    static KERNEL_INLINE F from_halves(const uint8_t * from) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from))); }
    static KERNEL_INLINE __m128i eight_bytes(const uint8_t * from) { return _mm_loadl_epi64(reinterpret_cast<const __m128i *>(from)); }
    static KERNEL_INLINE I unsigned_bytes(const uint8_t * from) { return _mm256_cvtepu8_epi32(eight_bytes(from)); }
    static KERNEL_INLINE F from_signed_bytes(const uint8_t * from) { return to_floats(_mm256_cvtepi8_epi32(eight_bytes(from))); }
    static KERNEL_INLINE F from_exponents(const uint8_t * from) { // 2^(e - 128); 0 if no normal float is that small
        const I one = _mm256_set1_epi32(1), exponents = _mm256_cvtepu8_epi32(eight_bytes(from));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_sub_epi32(_mm256_max_epi32(exponents, one), one), 23));
    }
    static KERNEL_INLINE F from_powers(const uint8_t * from) { // 2^(e - 127); infinity of 255
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(eight_bytes(from)), 23));
    }
    static KERNEL_INLINE F multiply_add(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    static KERNEL_INLINE F subtract_product(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
    static KERNEL_INLINE void store(float * to, F values, int count) {
        if (count >= lanes) {
            _mm256_storeu_ps(to, values);
        } else if (count > 0) {
            const I places = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            _mm256_maskstore_ps(to, _mm256_cmpgt_epi32(_mm256_set1_epi32(count), places), values);
        }
    }

    // For codes of 5 and 6 bits, int16 hold the four products of a pair of chunks: at most 4 * 63 * 128.
    template <int bits, typename = void> struct Dot {
        using Sum     = I;
        using Operand = I;
        static KERNEL_INLINE void begin(Sum & sum, I start) { sum = start; }
        static KERNEL_INLINE void add_both(Sum & sum, I one, I two, I activations_one, I activations_two) {
            const I pairs = _mm256_add_epi16(_mm256_maddubs_epi16(one, activations_one), _mm256_maddubs_epi16(two, activations_two));
            sum           = kept(_mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
        }
        static KERNEL_INLINE I total(Sum sum) { return sum; }
    };

    // For codes of 4 bits, int16 hold the 16 products of a whole block: at most 16 * 15 * 128.
    template <typename Any> struct Dot<4, Any> {
        struct Sum {
            I wide, narrow;
        };
        using Operand = I;
        static KERNEL_INLINE void begin(Sum & sum, I start) {
            sum.wide   = start;
            sum.narrow = I{};
        }
        static KERNEL_INLINE Operand operand(I codes) { return codes; }
        static KERNEL_INLINE void add(Sum & sum, Operand weights, I activations) {
            sum.narrow = kept(_mm256_add_epi16(sum.narrow, _mm256_maddubs_epi16(weights, activations)));
        }
        static KERNEL_INLINE I total(const Sum & sum) {
            return _mm256_add_epi32(sum.wide, _mm256_madd_epi16(sum.narrow, _mm256_set1_epi16(1)));
        }
    };

    // For codes of 7 bits, int16 hold the two products of one instruction: at most 2 * 127 * 128.
    template <typename Any> struct Dot<7, Any> {
        using Sum     = I;
        using Operand = I;
        static KERNEL_INLINE void begin(Sum & sum, I start) { sum = start; }
        static KERNEL_INLINE Operand operand(I codes) { return codes; }
        static KERNEL_INLINE void add(Sum & sum, Operand weights, I activations) {
            sum = kept(_mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(weights, activations), _mm256_set1_epi16(1))));
        }
        static KERNEL_INLINE I total(Sum sum) { return sum; }
    };

    template <typename Any> struct Dot<16, Any> { // signed words, summed in pairs
        using Sum     = I;
        using Operand = I;
        static KERNEL_INLINE void begin(Sum & sum, I start) { sum = start; }
        static KERNEL_INLINE Operand operand(I codes) { return codes; }
        static KERNEL_INLINE void add(Sum & sum, Operand weights, I activations) { sum = kept(_mm256_add_epi32(sum, _mm256_madd_epi16(weights, activations))); }
        static KERNEL_INLINE I total(Sum sum) { return sum; }
    };

    // Codes of 8 bits would overflow: their values without 128 are taken by magnitude, and the sign goes to the activation.
    template <typename Any> struct Dot<8, Any> {
        using Sum = I;
        struct Operand {
            I magnitude, value;
        };
        static KERNEL_INLINE void begin(Sum & sum, I) { sum = I{}; }
        static KERNEL_INLINE Operand operand(I codes) {
            const I value = _mm256_xor_si256(codes, all(0x80));
            return {_mm256_abs_epi8(value), value};
        }
        static KERNEL_INLINE void add(Sum & sum, const Operand & weights, I activations) {
            const I pairs = _mm256_maddubs_epi16(weights.magnitude, _mm256_sign_epi8(activations, weights.value));
            sum           = kept(_mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
        }
        static KERNEL_INLINE I total(Sum sum) { return sum; }
    };

    // Else the compiler adds in another order, for which it keeps all products on the stack.
    static KERNEL_INLINE I kept(I sum) {
        hide(sum);
        return sum;
    }

    static KERNEL_INLINE float largest_of(I magnitudes) { // floats without sign, as integers
        const __m128i halves = _mm_max_epi32(_mm256_castsi256_si128(magnitudes), _mm256_extracti128_si256(magnitudes, 1));
        const __m128i pairs  = _mm_max_epi32(halves, _mm_shuffle_epi32(halves, 0x4e));
        return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epi32(pairs, _mm_shuffle_epi32(pairs, 0xb1))));
    }

    static KERNEL_INLINE uint32_t sum_of(I numbers) {
        const __m128i halves = _mm_add_epi32(_mm256_castsi256_si128(numbers), _mm256_extracti128_si256(numbers, 1));
        const __m128i pairs  = _mm_add_epi32(halves, _mm_shuffle_epi32(halves, 0x4e));
        return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_add_epi32(pairs, _mm_shuffle_epi32(pairs, 0xb1))));
    }

    static KERNEL_INLINE float quantise_words(const float * from, uint8_t * to) {
        const F sign = _mm256_set1_ps(-0.0f);
        I largest    = I{};
        for (int i = 0; i < 4; ++i) {
            largest = _mm256_max_epi32(largest, _mm256_castps_si256(_mm256_andnot_ps(sign, _mm256_loadu_ps(from + 8 * i))));
        }
        const Unit unit = power_of_two_of(largest_of(largest));
        const F inverse = _mm256_set1_ps(unit.inverse);
        for (int i = 0; i < 2; ++i) {
            const I low  = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(from + 16 * i), inverse));
            const I high = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(from + 16 * i + 8), inverse));
            // Packing works on halves of registers.
            _mm256_storeu_si256(reinterpret_cast<__m256i *>(to + 32 * i), _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8));
        }
        return unit.value;
    }

    static KERNEL_INLINE float quantise_block(const float * from, uint8_t * to, uint32_t * sums) {
        const F sign = _mm256_set1_ps(-0.0f);
        I largest    = I{}; // as integers magnitudes have the same order, with NaN above all
        for (int i = 0; i < 4; ++i) {
            largest = _mm256_max_epi32(largest, _mm256_castps_si256(_mm256_andnot_ps(sign, _mm256_loadu_ps(from + 8 * i))));
        }
        const Unit unit = unit_of(largest_of(largest));
        const F inverse = _mm256_set1_ps(unit.inverse);
        I codes[4];
        for (int i = 0; i < 4; ++i) {
            codes[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(from + 8 * i), inverse));
        }
        // Packing works on halves of registers: the order is put right at the end.
        const I bytes = _mm256_packs_epi16(_mm256_packs_epi32(codes[0], codes[1]), _mm256_packs_epi32(codes[2], codes[3]));
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
        sums[0] = sum_of(_mm256_add_epi32(codes[0], codes[1]));
        sums[1] = sum_of(_mm256_add_epi32(codes[2], codes[3]));
        return unit.value;
    }
};

constexpr Kernel kernel = {"avx2", quantise<Avx2>, multiply<Avx2>, sum_of_bytes<Avx2>, spin_dots<Avx2>, spin_float_dots<Avx2>};

} // namespace

const Kernel * avx2_kernel() {
    return processor_has("avx2") && processor_has("fma") && processor_has("f16c") ? &kernel : nullptr;
}

} // namespace paceline::matmul

#else

namespace paceline::matmul {
const Kernel * avx2_kernel() { return nullptr; }
} // namespace paceline::matmul

#endif
