// Multiplies with each kernel that this processor runs, and compares with sums in double precision. Prints the kernels' names.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "ggml.h"

#include "kernel.hpp"

using namespace paceline::matmul;

namespace {

std::mt19937 random_numbers(1);

int up_to(int largest) { return std::uniform_int_distribution<int>(1, largest)(random_numbers); }

// A product of weights [num_rows][num_columns] and activations [num_tokens][num_columns].
struct Case {
    Format format;
    int64_t num_rows, num_columns, num_tokens;
    std::vector<uint8_t> weights; // as ggml has them
    std::vector<float> activations;
};

// Any bits, with scales that are ordinary numbers: quantising to these code books takes minutes in an emulator.
bool has_random_bits(Format format) { return format >= Format::iq2_xxs && format <= Format::iq1_m; }

void fill_with_random_bits(const FormatInfo & info, std::vector<uint8_t> & weights) {
    std::generate(weights.begin(), weights.end(), [] { return static_cast<uint8_t>(random_numbers()); });
    // The sign and the exponent of a block's scale are in its last byte in IQ1_M, and in its second byte in the other formats.
    const size_t bytes = ggml_type_size(info.type), place = info.type == GGML_TYPE_IQ1_M ? bytes - 1 : 1;
    for (size_t block = 0; block < weights.size(); block += bytes) {
        weights[block + place] = weights[block + place] % 16 + 32;
    }
}

Case make_case(Format format, int64_t num_tokens, bool whole_numbers) {
    const FormatInfo & info = info_of(format);
    Case one{format, up_to(70), info.columns * up_to(info.columns == 256 ? 3 : 9), num_tokens, {}, {}};
    std::normal_distribution<float> normal;
    one.weights.resize(one.num_rows * ggml_row_size(info.type, one.num_columns));
    if (has_random_bits(format)) {
        fill_with_random_bits(info, one.weights);
    } else {
        std::vector<float> values(one.num_rows * one.num_columns);
        std::generate(values.begin(), values.end(), [&] { return normal(random_numbers); });
        const std::vector<float> importance(one.num_columns, 1.0f);
        ggml_quantize_chunk(info.type, values.data(), one.weights.data(), 0, one.num_rows, one.num_columns, importance.data());
    }
    std::uniform_int_distribution<int> whole(-127, 127);
    for (int64_t i = 0; i < num_tokens * one.num_columns; ++i) { // 8 bits hold whole ones exactly
        const float number = static_cast<float>(i % 32 ? whole(random_numbers) : i % 64 ? 127 : -127);
        one.activations.push_back(whole_numbers ? number : normal(random_numbers));
    }
    return one;
}

// Rows [first, first + count) of activations, in tiles as product.cpp makes them.
std::vector<float> product(const Kernel & kernel, const Case & one, int64_t first, int64_t count) {
    const size_t group_bytes = packed_bytes(one.format, group_rows, one.num_columns);
    std::vector<uint8_t> packed(packed_bytes(one.format, one.num_rows, one.num_columns));
    for (int64_t row = 0; row < one.num_rows; row += group_rows) {
        pack_group(one.format, one.weights.data(), row, one.num_rows, one.num_columns, packed.data() + row / group_rows * group_bytes);
    }
    std::vector<float> outputs(count * one.num_rows, NAN);
    for (int64_t begin = 0; begin < count; begin += tile_tokens) {
        const int num_tokens = static_cast<int>(std::min<int64_t>(tile_tokens, count - begin));
        std::vector<uint8_t> tile(one.num_columns / block_columns * tile_block_bytes(one.format, num_tokens), 0xff);
        for (int place = 0; place < num_tokens; ++place) {
            const float * row = one.activations.data() + (first + begin + place) * one.num_columns;
            kernel.quantise(row, 0, one.num_columns, one.format, tile.data(), num_tokens, place);
        }
        for (int64_t row = 0; row < one.num_rows; row += group_rows) {
            float * outs[tile_tokens];
            for (int place = 0; place < num_tokens; ++place) {
                outs[place] = outputs.data() + (begin + place) * one.num_rows + row;
            }
            kernel.multiply(one.format, packed.data() + row / group_rows * group_bytes, one.num_columns, false, tile.data(), num_tokens, outs,
                            static_cast<int>(std::min<int64_t>(group_rows, one.num_rows - row)));
        }
    }
    return outputs;
}

[[noreturn]] void fail(const Kernel & kernel, const Case & one, const char * what) {
    std::printf("%s, %s, %d rows, %d columns, %d tokens: %s\n", kernel.name, ggml_type_name(info_of(one.format).type),
                static_cast<int>(one.num_rows), static_cast<int>(one.num_columns), static_cast<int>(one.num_tokens), what);
    std::exit(1);
}

void check_sums(const Kernel & kernel, const Case & one) {
    std::vector<float> weights(one.num_rows * one.num_columns);
    ggml_get_type_traits(info_of(one.format).type)->to_float(one.weights.data(), weights.data(), one.num_rows * one.num_columns);
    const std::vector<float> outputs = product(kernel, one, 0, one.num_tokens);
    for (int64_t token = 0; token < one.num_tokens; ++token) {
        for (int64_t row = 0; row < one.num_rows; ++row) {
            double sum = 0, magnitude = 0;
            for (int64_t i = 0; i < one.num_columns; ++i) {
                const double term = static_cast<double>(weights[row * one.num_columns + i]) * one.activations[token * one.num_columns + i];
                sum += term;
                magnitude += std::fabs(term);
            }
            if (!(std::fabs(outputs[token * one.num_rows + row] - sum) <= 3e-6 * magnitude)) {
                fail(kernel, one, "not the sum in double precision");
            }
        }
    }
}

void check_bits(const Kernel & kernel, const Case & one) {
    const std::vector<float> outputs = product(kernel, one, 0, one.num_tokens);
    for (int64_t token = 0; token < one.num_tokens; ++token) {
        const std::vector<float> alone = product(kernel, one, token, 1);
        if (std::memcmp(alone.data(), outputs.data() + token * one.num_rows, alone.size() * sizeof(float)) != 0) {
            fail(kernel, one, "a row has other bits alone than in a batch");
        }
    }
}

// Rows with an infinity give no finite number, and rows that have no unit give zero; with NaN, NEON gives NaN and x86 anything.
void check_extremes(const Kernel & kernel) {
    const bool keeps_nan = std::strncmp(kernel.name, "neon", 4) == 0;
    Case one = make_case(Format::q8_0, 3, true);
    one.activations[5]                       = INFINITY;
    one.activations[one.num_columns + 7]     = NAN;
    std::fill(one.activations.begin() + 2 * one.num_columns, one.activations.end(), 1e-42f);
    const std::vector<float> outputs = product(kernel, one, 0, 3);
    for (int64_t row = 0; row < one.num_rows; ++row) {
        if (std::isfinite(outputs[row]) || (keeps_nan && !std::isnan(outputs[one.num_rows + row])) || std::fabs(outputs[2 * one.num_rows + row]) > 1e-35f) {
            fail(kernel, one, "not what infinities, NaN and the tiniest numbers give");
        }
    }
}

} // namespace

int main() {
    ggml_free(ggml_init({1024, nullptr, true})); // fills ggml's tables
    for (const Kernel * kernel : {avx512_vnni_kernel(), avx2_kernel(), neon_i8mm_kernel(), neon_dotprod_kernel()}) {
        if (!kernel) {
            continue;
        }
        for (int i = 0; i < static_cast<int>(Format::count); ++i) {
            if (is_float(static_cast<Format>(i))) { // not by NEON
                continue;
            }
            for (int num_tokens = 1; num_tokens <= 9; ++num_tokens) {
                check_sums(*kernel, make_case(static_cast<Format>(i), num_tokens, true));
                check_bits(*kernel, make_case(static_cast<Format>(i), num_tokens, false));
            }
        }
        check_extremes(*kernel);
        if (kernel->spin_dots(1000) < 1000 || kernel->spin_float_dots(1000) < 1000) {
            fail(*kernel, make_case(Format::q8_0, 1, true), "fewer products than asked for");
        }
        std::puts(kernel->name);
    }
}
