// Vectors of floats as wide as the processor's registers, and the few functions of them that attention needs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <utility>

#if defined(__FMA__) || defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace paceline::attention {

#if defined(__AVX512F__)
inline constexpr int num_lanes = 16;
#elif defined(__AVX__)
inline constexpr int num_lanes = 8;
#else
inline constexpr int num_lanes = 4;
#endif

typedef float SimdVec __attribute__((vector_size(num_lanes * sizeof(float))));
typedef int32_t SimdIntVec __attribute__((vector_size(num_lanes * sizeof(int32_t))));

inline SimdVec load(const float * from) {
    SimdVec lanes;
    std::memcpy(&lanes, from, sizeof lanes);
    return lanes;
}

inline void store(float * to, SimdVec lanes) { std::memcpy(to, &lanes, sizeof lanes); }

inline SimdVec broadcast(float value) { return value - SimdVec{}; } // not a sum: that would turn -0 into 0, and so be computed

// Of numbers in half precision.
#if defined(__F16C__) || defined(__aarch64__)
inline constexpr bool converts_halves = true;
inline SimdVec load_halves(const char * from) {
#if defined(__AVX512F__) // with a mask, as GCC 12 warns of its header's other form
    return static_cast<SimdVec>(_mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from))));
#elif defined(__F16C__)
    return static_cast<SimdVec>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from))));
#else
    return static_cast<SimdVec>(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t *>(from)))));
#endif
}
#else
inline constexpr bool converts_halves = false;
inline SimdVec load_halves(const char *) { return SimdVec{}; }
#endif

inline SimdVec max_of(SimdVec one, SimdVec other) { return one > other ? one : other; }

// If there is an instruction that rounds a product and a sum once, always use it: a compiler's own choice
// depends on neighbouring code, and bits must not.
inline SimdVec with_product(SimdVec sum, SimdVec a, SimdVec b) {
#if defined(__FMA__) && defined(__AVX512F__)
    return static_cast<SimdVec>(_mm512_fmadd_ps(static_cast<__m512>(a), static_cast<__m512>(b), static_cast<__m512>(sum)));
#elif defined(__FMA__)
    return static_cast<SimdVec>(_mm256_fmadd_ps(static_cast<__m256>(a), static_cast<__m256>(b), static_cast<__m256>(sum)));
#elif defined(__aarch64__)
    return static_cast<SimdVec>(vfmaq_f32(static_cast<float32x4_t>(sum), static_cast<float32x4_t>(a), static_cast<float32x4_t>(b)));
#else
    return sum + a * b; // no fused instruction
#endif
}

inline bool any(SimdIntVec condition) {
    int32_t bits = 0;
    for (int lane = 0; lane < num_lanes; ++lane) {
        bits |= condition[lane];
    }
    return bits != 0;
}

// 2^x for x <= 0, to 2e-7 of the value; 0 below -126 (a float has fewer digits there) and for minus infinity. NaN stays NaN.
inline SimdVec exp2_of_negative(SimdVec x) {
    const SimdVec bounded = max_of(x, broadcast(-126.0f));
    const SimdVec shifter = broadcast(12582912.0f); // 1.5 * 2^23: a number added to it is rounded to a whole number
    const SimdVec whole   = (bounded + shifter) - shifter;
    const SimdVec rest    = bounded - whole; // within a half
    SimdVec power         = broadcast(1.5403530e-4f); // Taylor: ln(2)^k / k!
    for (const float factor : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f}) {
        power = with_product(broadcast(factor), power, rest);
    }
    const SimdIntVec exponent = (__builtin_convertvector(whole, SimdIntVec) + 127) << 23;
    SimdVec scale;
    std::memcpy(&scale, &exponent, sizeof scale);
    return x < broadcast(-126.0f) ? SimdVec{} : x == x ? power * scale : x;
}

// C[m][r] = (or +=) the sum over k of A[m][k] * B[k][r], for num_m rows of A and num_vectors vectors of columns r.
struct Product {
    const float * a; // A[m][k] at a[m * a_row + k * a_step]
    ptrdiff_t a_row, a_step;
    const float * b; // B[k][r] at b[k * b_row + r]
    ptrdiff_t b_row;
    float * c;       // C[m][r] at c[m * c_row + r]
    ptrdiff_t c_row;
    int depth;       // of the sum
    bool adds;       // to the size of C
};

template <int num_m, int num_vectors> inline void multiply_block(const Product & product, int m, int column) {
    const float * a = product.a + m * product.a_row;
    const float * b = product.b + column;
    float * c       = product.c + m * product.c_row + column;
    SimdVec sums[num_m][num_vectors];
    for (int i = 0; i < num_m; ++i) {
        for (int j = 0; j < num_vectors; ++j) {
            sums[i][j] = product.adds ? load(c + i * product.c_row + j * num_lanes) : SimdVec{};
        }
    }
    for (int k = 0; k < product.depth; ++k) {
        SimdVec columns[num_vectors];
        for (int j = 0; j < num_vectors; ++j) {
            columns[j] = load(b + k * product.b_row + j * num_lanes);
        }
        for (int i = 0; i < num_m; ++i) {
            const SimdVec factor = broadcast(a[i * product.a_row + k * product.a_step]);
            for (int j = 0; j < num_vectors; ++j) {
                sums[i][j] = with_product(sums[i][j], factor, columns[j]);
            }
        }
    }
    for (int i = 0; i < num_m; ++i) {
        for (int j = 0; j < num_vectors; ++j) {
            store(c + i * product.c_row + j * num_lanes, sums[i][j]);
        }
    }
}

template <int num_vectors> inline void multiply_columns(const Product & product, int num_m, int column) {
    constexpr int block = num_vectors > 1 ? 4 : 8; // sums that are enough to keep the units busy, and fit the registers
    int m = 0;
    for (; m + block <= num_m; m += block) {
        multiply_block<block, num_vectors>(product, m, column);
    }
    for (; m + 2 <= num_m; m += 2) {
        multiply_block<2, num_vectors>(product, m, column);
    }
    if (m < num_m) {
        multiply_block<1, num_vectors>(product, m, column);
    }
}

// Each element is computed by the same operations in the same order, whatever is computed beside it.
inline void multiply(const Product & product, int num_m, int first_vector, int num_vectors) {
    constexpr int widest = num_lanes == 8 ? 3 : 4; // AVX has half as many registers
    const int end = first_vector + num_vectors;
    int vector = first_vector;
    for (; vector + widest <= end; vector += widest) {
        multiply_columns<widest>(product, num_m, vector * num_lanes);
    }
    for (; vector + 2 <= end; vector += 2) {
        multiply_columns<2>(product, num_m, vector * num_lanes);
    }
    if (vector < end) {
        multiply_columns<1>(product, num_m, vector * num_lanes);
    }
}

// Lanes of the first vector by their numbers, and from num_lanes on of the second.
template <size_t... from> inline SimdVec shuffled(SimdVec one, SimdVec other) {
#if defined(__clang__) || __GNUC__ >= 12
    return __builtin_shufflevector(one, other, from...);
#else
    return __builtin_shuffle(one, other, SimdIntVec{static_cast<int32_t>(from)...});
#endif
}

// Swaps the upper half of each 2 * step lanes of the first with the lower half of the second.
template <int step, size_t... lane> inline void exchange(SimdVec & one, SimdVec & other, std::index_sequence<lane...>) {
    const SimdVec before = one;
    one   = shuffled<(lane & step ? lane - step + num_lanes : lane)...>(before, other);
    other = shuffled<(lane & step ? lane + num_lanes : lane + step)...>(before, other);
}

template <int step, size_t... lane> inline SimdVec rotated(SimdVec lanes, std::index_sequence<lane...>) {
    return shuffled<((lane + step) % num_lanes)...>(lanes, lanes);
}

template <int step = num_lanes / 2> inline float highest_lane(SimdVec lanes) {
    const SimdVec highest = max_of(lanes, rotated<step>(lanes, std::make_index_sequence<num_lanes>()));
    if constexpr (step > 1) {
        return highest_lane<step / 2>(highest);
    } else {
        return highest[0];
    }
}

// Turns a square of numbers: lane j of vector i is lane i of vector j afterwards.
template <int step = num_lanes / 2> inline void transpose(SimdVec (&vectors)[num_lanes]) {
    for (int i = 0; i < num_lanes; ++i) {
        if ((i & step) == 0) {
            exchange<step>(vectors[i], vectors[i + step], std::make_index_sequence<num_lanes>());
        }
    }
    if constexpr (step > 1) {
        transpose<step / 2>(vectors);
    }
}

} // namespace paceline::attention
