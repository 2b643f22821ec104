// AVX-512 with VNNI: 16 rows in a vector, 64 products in an instruction.
#include "kernel.hpp"

#if defined(__x86_64__)

#include <immintrin.h>

#include "../processor_features.hpp"
#include "kernel_body.hpp"

namespace paceline::matmul {
namespace {

struct Avx512Vnni {
    using F = __m512;
    using I = __m512i;
    static constexpr int lanes = 16, tokens = 8;
    template <int> static constexpr bool reads_in_order = true;
    template <int> static constexpr bool needs_prefetch(Format format) {
        return format != Format::q8_0 && format != Format::q5_0 && !is_float(format);
    }
    static constexpr int vectors(Format, int tokens, int scales) { return tokens * scales > 8 ? 1 : 2; } // the capacity of 32 registers
    static constexpr int next_tokens(int left) { return left; }

    static KERNEL_INLINE I load(const uint8_t * from) { return _mm512_loadu_si512(from); }
    static KERNEL_INLINE I broadcast(const uint8_t * from) { return _mm512_set1_epi32(value_at<int32_t>(from)); }
    static KERNEL_INLINE F broadcast_float(const uint8_t * from) { return _mm512_set1_ps(value_at<float>(from)); }
    static KERNEL_INLINE I masked(I bytes, int mask) { return _mm512_and_si512(bytes, _mm512_set1_epi8(static_cast<char>(mask))); }
    template <int bits> static KERNEL_INLINE I shifted(I bytes) { return _mm512_srli_epi32(bytes, bits); }
    static KERNEL_INLINE I shifted_left(I bytes, int bits) { return _mm512_slli_epi32(bytes, bits); }
    static KERNEL_INLINE I shifted_right(I bytes, int bits) { return _mm512_srli_epi32(bytes, bits); }
    static KERNEL_INLINE I joined(I low, I high, int mask) { // low | (high & mask)
        return _mm512_ternarylogic_epi32(low, high, _mm512_set1_epi8(static_cast<char>(mask)), 0xf8);
    }
    static KERNEL_INLINE I looked_up(const uint8_t (&values)[16], I indices) {
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(sixteen_bytes(values)), indices);
    }
    static KERNEL_INLINE F to_floats(I numbers) { return _mm512_cvtepi32_ps(numbers); }
    static KERNEL_INLINE F from_halves(const uint8_t * from) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from))); }
    static KERNEL_INLINE __m128i sixteen_bytes(const uint8_t * from) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(from)); }
    static KERNEL_INLINE I unsigned_bytes(const uint8_t * from) { return _mm512_cvtepu8_epi32(sixteen_bytes(from)); }
    static KERNEL_INLINE F from_signed_bytes(const uint8_t * from) { return to_floats(_mm512_cvtepi8_epi32(sixteen_bytes(from))); }
    static KERNEL_INLINE F from_exponents(const uint8_t * from) { // 2^(e - 128); 0 if no normal float is that small
        const I exponents = _mm512_cvtepu8_epi32(sixteen_bytes(from));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_sub_epi32(_mm512_max_epi32(exponents, _mm512_set1_epi32(1)), _mm512_set1_epi32(1)), 23));
    }
    static KERNEL_INLINE F from_powers(const uint8_t * from) { // 2^(e - 127); infinity of 255
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(sixteen_bytes(from)), 23));
    }
    static KERNEL_INLINE F multiply_add(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static KERNEL_INLINE F subtract_product(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
    static KERNEL_INLINE void store(float * to, F values, int count) {
        if (count >= lanes) {
            _mm512_storeu_ps(to, values);
        } else if (count > 0) {
            _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << count) - 1), values);
        }
    }

    template <int bits, typename = void> struct Dot { // unsigned times signed bytes, summed in fours into int32
        using Sum     = I;
        using Operand = I;
        static KERNEL_INLINE void begin(Sum & sum, I start) { sum = start; }
        static KERNEL_INLINE Operand operand(I codes) { return codes; }
        static KERNEL_INLINE void add(Sum & sum, Operand weights, I activations) { sum = _mm512_dpbusd_epi32(sum, weights, activations); }
        static KERNEL_INLINE I total(Sum sum) { return sum; }
    };

    template <typename Any> struct Dot<16, Any> { // signed words, summed in pairs
        using Sum     = I;
        using Operand = I;
        static KERNEL_INLINE void begin(Sum & sum, I start) { sum = start; }
        static KERNEL_INLINE Operand operand(I codes) { return codes; }
        static KERNEL_INLINE void add(Sum & sum, Operand weights, I activations) { sum = _mm512_dpwssd_epi32(sum, weights, activations); }
        static KERNEL_INLINE I total(Sum sum) { return sum; }
    };

    static KERNEL_INLINE float quantise_words(const float * from, uint8_t * to) {
        const F one = _mm512_loadu_ps(from), two = _mm512_loadu_ps(from + 16);
        const int bits  = _mm512_reduce_max_epi32(_mm512_max_epi32(_mm512_castps_si512(_mm512_abs_ps(one)), _mm512_castps_si512(_mm512_abs_ps(two))));
        const Unit unit = power_of_two_of(value_at<float>(&bits));
        const F inverse = _mm512_set1_ps(unit.inverse);
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(one, inverse))));
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(to + 32), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(two, inverse))));
        return unit.value;
    }

    static KERNEL_INLINE float quantise_block(const float * from, uint8_t * to, uint32_t * sums) {
        const F one = _mm512_loadu_ps(from), two = _mm512_loadu_ps(from + 16);
        // As integers magnitudes have the same order, with NaN above all.
        const I larger      = _mm512_max_epi32(_mm512_castps_si512(_mm512_abs_ps(one)), _mm512_castps_si512(_mm512_abs_ps(two)));
        const int bits      = _mm512_reduce_max_epi32(larger);
        const Unit unit     = unit_of(value_at<float>(&bits));
        const F inverse     = _mm512_set1_ps(unit.inverse);
        const I least       = _mm512_set1_epi32(-128); // NaN becomes the smallest int, and sums of it would overflow
        const I first       = _mm512_max_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(one, inverse)), least);
        const I second      = _mm512_max_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(two, inverse)), least);
        _mm_storeu_si128(reinterpret_cast<__m128i *>(to), _mm512_cvtsepi32_epi8(first));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(to + 16), _mm512_cvtsepi32_epi8(second));
        sums[0] = static_cast<uint32_t>(_mm512_reduce_add_epi32(first));
        sums[1] = static_cast<uint32_t>(_mm512_reduce_add_epi32(second));
        return unit.value;
    }
};

constexpr Kernel kernel = {"avx512_vnni", quantise<Avx512Vnni>, multiply<Avx512Vnni>, sum_of_bytes<Avx512Vnni>, spin_dots<Avx512Vnni>, spin_float_dots<Avx512Vnni>};

} // namespace

const Kernel * avx512_vnni_kernel() {
    const bool runs = processor_has("avx512vnni") && processor_has("avx512bw") && processor_has("avx512vl") && processor_has("avx512dq");
    return runs ? &kernel : nullptr;
}

} // namespace paceline::matmul

#else

namespace paceline::matmul {
const Kernel * avx512_vnni_kernel() { return nullptr; }
} // namespace paceline::matmul

#endif
