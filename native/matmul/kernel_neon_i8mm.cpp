// NEON with i8mm: 32 products in an instruction, of 8 columns of two rows of weights and of two rows of activations.
#include "kernel.hpp"

#if defined(__aarch64__)

#include "kernel_neon.hpp"

namespace paceline::matmul {
namespace {

struct NeonI8mm : Neon {
    // Both chunks of a pair are multiplied at once, so quantise puts theirs of a row of activations side by side.
    static KERNEL_INLINE void order_codes(uint8_t * codes, bool has_halves) {
        const uint32x4_t low = vreinterpretq_u32_u8(vld1q_u8(codes)), high = vreinterpretq_u32_u8(vld1q_u8(codes + 16));
        const uint64x2_t one = vreinterpretq_u64_u32(low), two = vreinterpretq_u64_u32(high);
        const uint32x4_t first  = has_halves ? vreinterpretq_u32_u64(vdupq_laneq_u64(one, 0)) : low;
        const uint32x4_t second = has_halves ? vreinterpretq_u32_u64(vdupq_laneq_u64(one, 1)) : high;
        const uint32x4_t third  = has_halves ? vreinterpretq_u32_u64(vdupq_laneq_u64(two, 0)) : low;
        const uint32x4_t fourth = has_halves ? vreinterpretq_u32_u64(vdupq_laneq_u64(two, 1)) : high;
        vst1q_u8(codes, vreinterpretq_u8_u32(vzip1q_u32(first, second)));
        vst1q_u8(codes + 16, vreinterpretq_u8_u32(has_halves ? vzip1q_u32(third, fourth) : vzip2q_u32(third, fourth)));
    }

    // Of two rows of activations (an even row and the next) the sums of rows 0 and 1 of a vector are together, and those of 2 and 3.
    // An odd last row of activations is summed as Neon does. Sums of integers are the same either way.
    template <int bits> struct Dot : Neon::Dot<bits> {
        using Sum = I;

        template <int vectors, int tokens> static KERNEL_INLINE void join(Sum (&sums)[vectors][tokens]) {
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v) {
#pragma GCC unroll 8
                for (int t = 0; t + 1 < tokens; t += 2) { // each start is the same for all rows
                    sums[v][t] = sums[v][t + 1] = vzip1q_s32(sums[v][t], sums[v][t + 1]);
                }
            }
        }

        // 8 columns of two rows of weights times 8 columns of two rows of activations.
        static KERNEL_INLINE void add_four(Sum & sum, I weights, I activations) { sum = vmmlaq_s32(sum, bytes(weights), bytes(activations)); }

        template <int vectors, int tokens>
        static KERNEL_INLINE void add_pair(Sum (&sums)[vectors][tokens], const I (&one)[vectors], const I (&two)[vectors], const uint8_t * codes) {
            I first[vectors], second[vectors], low[vectors], high[vectors];
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v) {
                first[v]  = Neon::Dot<bits>::operand(one[v]);
                second[v] = Neon::Dot<bits>::operand(two[v]);
                low[v]    = vzip1q_s32(first[v], second[v]);
                high[v]   = vzip2q_s32(first[v], second[v]);
            }
#pragma GCC unroll 8
            for (int t = 0; t + 1 < tokens; t += 2) {
                const uint8_t * from = codes + t * block_columns;
                const I activations  = numbers(vcombine_u8(vld1_u8(from), vld1_u8(from + block_columns)));
#pragma GCC unroll 4
                for (int v = 0; v < vectors; ++v) {
                    add_four(sums[v][t], low[v], activations);
                    add_four(sums[v][t + 1], high[v], activations);
                }
            }
            if constexpr (tokens % 2 == 1) {
                const uint8_t * from = codes + (tokens - 1) * block_columns;
#pragma GCC unroll 4
                for (int v = 0; v < vectors; ++v) {
                    Dot::add(sums[v][tokens - 1], first[v], broadcast(from));
                    Dot::add(sums[v][tokens - 1], second[v], broadcast(from + 4));
                }
            }
        }

        template <int vectors, int tokens> static KERNEL_INLINE void separate(Sum (&sums)[vectors][tokens]) {
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v) {
#pragma GCC unroll 8
                for (int t = 0; t + 1 < tokens; t += 2) {
                    const I low = sums[v][t], high = sums[v][t + 1];
                    sums[v][t]     = vuzp1q_s32(low, high);
                    sums[v][t + 1] = vuzp2q_s32(low, high);
                }
            }
        }
    };
};

constexpr Kernel kernel = {"neon_i8mm",        quantise<NeonI8mm>, multiply<NeonI8mm>, sum_of_bytes<NeonI8mm>,
                           spin_dots<NeonI8mm>, spin_float_dots<NeonI8mm>};

} // namespace

const Kernel * neon_i8mm_kernel() { return has_dotprod() && has_i8mm() ? &kernel : nullptr; }

} // namespace paceline::matmul

#else

namespace paceline::matmul {
const Kernel * neon_i8mm_kernel() { return nullptr; }
} // namespace paceline::matmul

#endif
