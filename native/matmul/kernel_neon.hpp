// NEON: 4 rows in a vector. Included by each kernel_neon_*.cpp, like kernel_body.hpp.
//
// Codes are unsigned and activations signed, which only i8mm multiplies as they are. Both are taken as signed here: codes of up to
// 7 bits keep their values, and codes of 8 bits become the weights' values by one exclusive or.
#pragma once

#include <arm_neon.h>

#if defined(__APPLE__)
#include <sys/sysctl.h>
#else
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "kernel_body.hpp"

namespace paceline::matmul {
namespace {

#if defined(__APPLE__)
bool has_feature(const char * name) {
    int value   = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}
bool has_dotprod() { return has_feature("hw.optional.arm.FEAT_DotProd"); }
[[maybe_unused]] bool has_i8mm() { return has_feature("hw.optional.arm.FEAT_I8MM"); }
#else
bool has_dotprod() { return getauxval(AT_HWCAP) & HWCAP_ASIMDDP; }
[[maybe_unused]] bool has_i8mm() { return getauxval(AT_HWCAP2) & HWCAP2_I8MM; }
#endif

struct Neon {
    using F = float32x4_t;
    using I = int32x4_t;
    static constexpr int lanes = 4, tokens = 8;
    template <int> static constexpr bool reads_in_order = false; // i8mm takes chunks apart, and nothing of this was timed
    template <int> static constexpr bool needs_prefetch(Format) { return true; }
    static constexpr int vectors(Format, int tokens, int scales) { return (tokens <= 4 ? 4 : 2) / scales; } // the capacity of 32 registers
    static constexpr int next_tokens(int left) { return left; }

    static KERNEL_INLINE int8x16_t bytes(I numbers) { return vreinterpretq_s8_s32(numbers); }
    static KERNEL_INLINE I numbers(uint8x16_t bytes) { return vreinterpretq_s32_u8(bytes); }
    static KERNEL_INLINE I load(const uint8_t * from) { return numbers(vld1q_u8(from)); }
    static KERNEL_INLINE I broadcast(const uint8_t * from) { return vdupq_n_s32(value_at<int32_t>(from)); }
    static KERNEL_INLINE F broadcast_float(const uint8_t * from) { return vdupq_n_f32(value_at<float>(from)); }
    static KERNEL_INLINE I masked(I codes, int mask) {
        return vandq_s32(codes, numbers(vdupq_n_u8(static_cast<uint8_t>(mask))));
    }
    template <int bits> static KERNEL_INLINE I shifted(I codes) { return shifted_right(codes, bits); }
    static KERNEL_INLINE I shifted_left(I codes, int bits) { return vshlq_s32(codes, vdupq_n_s32(bits)); }
    static KERNEL_INLINE I shifted_right(I codes, int bits) {
        return vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(codes), vdupq_n_s32(-bits)));
    }
    static KERNEL_INLINE I joined(I low, I high, int mask) { return vorrq_s32(low, masked(high, mask)); }
    static KERNEL_INLINE I looked_up(const uint8_t (&values)[16], I indices) {
        return numbers(vqtbl1q_u8(vld1q_u8(values), vreinterpretq_u8_s32(indices)));
    }
    static KERNEL_INLINE F to_floats(I values) { return vcvtq_f32_s32(values); }
    static KERNEL_INLINE F from_halves(const uint8_t * from) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from))); }
    static KERNEL_INLINE uint8x8_t four_bytes(const uint8_t * from) { return vreinterpret_u8_u32(vdup_n_u32(value_at<uint32_t>(from))); }
    static KERNEL_INLINE uint32x4_t from_four_bytes(const uint8_t * from) { return vmovl_u16(vget_low_u16(vmovl_u8(four_bytes(from)))); }
    static KERNEL_INLINE I unsigned_bytes(const uint8_t * from) { return vreinterpretq_s32_u32(from_four_bytes(from)); }
    static KERNEL_INLINE F from_signed_bytes(const uint8_t * from) {
        return to_floats(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(four_bytes(from))))));
    }
    static KERNEL_INLINE F from_exponents(const uint8_t * from) { // 2^(e - 128); 0 if no normal float is that small
        return vreinterpretq_f32_u32(vshlq_n_u32(vqsubq_u32(from_four_bytes(from), vdupq_n_u32(1)), 23));
    }
    static KERNEL_INLINE F multiply_add(F a, F b, F c) { return vfmaq_f32(c, a, b); }
    static KERNEL_INLINE F subtract_product(F a, F b, F c) { return vfmsq_f32(c, a, b); }
    static KERNEL_INLINE void store(float * to, F values, int count) {
        if (count >= lanes) {
            vst1q_f32(to, values);
        } else if (count > 0) {
            memcpy(to, &values, static_cast<size_t>(count) * sizeof(float));
        }
    }

    template <int bits> struct Dot { // signed bytes, summed in fours into int32
        using Sum     = I;
        using Operand = I;
        // Codes of 8 bits lose their offset of 128 in `operand`, so the sum does not start with it.
        static KERNEL_INLINE void begin(Sum & sum, I start) { sum = bits == 8 ? I{} : start; }
        static KERNEL_INLINE Operand operand(I codes) { return bits == 8 ? veorq_s32(codes, numbers(vdupq_n_u8(0x80))) : codes; }
        static KERNEL_INLINE void add(Sum & sum, Operand weights, I activations) { sum = vdotq_s32(sum, bytes(weights), bytes(activations)); }
        static KERNEL_INLINE I total(Sum sum) { return sum; }
    };

    static KERNEL_INLINE float quantise_block(const float * from, uint8_t * to, uint32_t * sums) {
        F largest = F{};
        for (int i = 0; i < 8; ++i) {
            largest = vmaxq_f32(largest, vabsq_f32(vld1q_f32(from + 4 * i)));
        }
        const Unit unit = unit_of(vmaxvq_f32(largest));
        for (int half = 0; half < 2; ++half) {
            I codes[4];
            for (int i = 0; i < 4; ++i) {
                codes[i] = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(from + 16 * half + 4 * i), unit.inverse));
            }
            const int16x8_t low = vcombine_s16(vqmovn_s32(codes[0]), vqmovn_s32(codes[1]));
            const int16x8_t top = vcombine_s16(vqmovn_s32(codes[2]), vqmovn_s32(codes[3]));
            vst1q_u8(to + 16 * half, vreinterpretq_u8_s8(vcombine_s8(vqmovn_s16(low), vqmovn_s16(top))));
            sums[half] = static_cast<uint32_t>(vaddvq_s32(vaddq_s32(vaddq_s32(codes[0], codes[1]), vaddq_s32(codes[2], codes[3]))));
        }
        return unit.value;
    }
};

} // namespace
} // namespace paceline::matmul
