#include "operation.hpp"

#include <cmath>
#include <cstring>
#include <numeric>

#include "ggml-cpu.h"

#include "simd_vec.hpp"

namespace paceline::attention {
namespace {

float param(const ggml_tensor * node, int index) {
    float value;
    std::memcpy(&value, node->op_params + index, sizeof value);
    return value;
}

constexpr int64_t max_compared = 64; // tokens, whose masks one thread reads while the others wait

// The cells that tokens see, and those of them that the next token sees as well.
struct SeenCells {
    int64_t all = 0, shared = 0;
};

SeenCells seen_cells(const Operation & op) {
    constexpr ggml_fp16_t hidden = 0xFC00; // minus infinity
    SeenCells seen;
    for (int64_t token = 0; token < op.num_tokens; ++token) {
        const bool is_last = token + 1 == op.num_tokens;
        const auto * mask  = reinterpret_cast<const ggml_fp16_t *>(at(op.mask, token, 0, 0));
        const auto * next  = reinterpret_cast<const ggml_fp16_t *>(at(op.mask, is_last ? token : token + 1, 0, 0));
        int32_t all = 0, shared = 0;
        for (int64_t cell = 0; cell < op.num_cells; ++cell) {
            all += mask[cell] != hidden;
            shared += (mask[cell] != hidden) & (next[cell] != hidden);
        }
        seen.all += all;
        seen.shared += is_last ? 0 : shared;
    }
    return seen;
}

} // namespace

Sharing::Sharing(const ggml_tensor * node) : layout(Layout::dense) {
    const Operation op(node, Layout::dense);
    mean_rows = static_cast<double>(op.mask ? op.group : op.num_rows());
    if (!op.mask || op.num_streams > 1 || op.num_tokens < 2 || op.num_tokens > max_compared || op.group % num_lanes == 0) {
        return;
    }
    const SeenCells seen = seen_cells(op);
    if (seen.all == 0) {
        return;
    }
    mean_rows = static_cast<double>(op.group * seen.all) / static_cast<double>(seen.all - seen.shared);
    // Lanes of the vectors that see a cell: of a dense layout, tokens that share it share vectors, too, and each of the others
    // reaches into so many.
    const int64_t reached  = op.group + num_lanes - std::gcd(op.group, static_cast<int64_t>(num_lanes));
    const int64_t dense    = op.group * seen.shared + reached * (seen.all - seen.shared);
    const int64_t by_token = Operation(node, Layout::by_token).rows_per_token * seen.all;
    layout                 = by_token <= dense ? Layout::by_token : Layout::dense;
}

Operation::Operation(const ggml_tensor * node, Layout layout)
    : node(node), q(node->src[0]), k(node->src[1]), v(node->src[2]), mask(node->src[3]), sinks(node->src[4]),
      scale(param(node, 0)), max_bias(param(node, 1)), softcap(param(node, 2)), dim_k(q->ne[0]), dim_v(v->ne[0]),
      num_tokens(q->ne[1]), num_heads(q->ne[2]), num_kv_heads(k->ne[2]), num_streams(q->ne[3]), num_cells(k->ne[1]),
      group(num_heads / num_kv_heads),
      rows_per_token(layout == Layout::dense ? group : (group + num_lanes - 1) / num_lanes * num_lanes) {}

// ALiBi (Press et al. 2022): a power of 1/2 that falls with the head; 1 without it.
float Operation::slope_of(int64_t head) const {
    if (max_bias <= 0) {
        return 1.0f;
    }
    const int64_t power = int64_t{1} << static_cast<int>(std::floor(std::log2(num_heads)));
    const float base    = std::exp2(-(head < power ? max_bias : max_bias / 2) / power);
    return std::pow(base, static_cast<float>(head < power ? head + 1 : 2 * (head - power) + 1));
}

int Rows::num_vectors() const { return (count + num_lanes - 1) / num_lanes; }
int Rows::width() const { return num_vectors() * num_lanes; }

const char * at(const ggml_tensor * tensor, int64_t i1, int64_t i2, int64_t i3) {
    return static_cast<const char *>(tensor->data) + i1 * tensor->nb[1] + i2 * tensor->nb[2] + i3 * tensor->nb[3];
}

void to_floats(float * to, const char * from, ggml_type type, int64_t count) {
    if (type == GGML_TYPE_F32) {
        std::memcpy(to, from, count * sizeof(float));
    } else {
        ggml_cpu_fp16_to_fp32(reinterpret_cast<const ggml_fp16_t *>(from), to, count);
    }
}

} // namespace paceline::attention
