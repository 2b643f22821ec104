#include "operation.hpp"

#include <cmath>

namespace paceline::attention {
namespace {

float param(const ggml_tensor * node, int index) {
    float value;
    std::memcpy(&value, node->op_params + index, sizeof value);
    return value;
}

} // namespace

Operation::Operation(const ggml_tensor * node)
    : node(node), q(node->src[0]), k(node->src[1]), v(node->src[2]), mask(node->src[3]), sinks(node->src[4]),
      scale(param(node, 0)), max_bias(param(node, 1)), softcap(param(node, 2)), dim_k(q->ne[0]), dim_v(v->ne[0]),
      num_tokens(q->ne[1]), num_heads(q->ne[2]), num_kv_heads(k->ne[2]), num_streams(q->ne[3]), num_cells(k->ne[1]),
      group(num_heads / num_kv_heads) {}

// ALiBi (Press et al. 2022): a power of 1/2 that falls with the head; 1 without it.
float Operation::slope_of(int64_t head) const {
    if (max_bias <= 0) {
        return 1.0f;
    }
    const int64_t power = int64_t{1} << static_cast<int>(std::floor(std::log2(num_heads)));
    const float base    = std::exp2(-(head < power ? max_bias : max_bias / 2) / power);
    return std::pow(base, static_cast<float>(head < power ? head + 1 : 2 * (head - power) + 1));
}

void Operation::cap(float * scores) const {
    for (int i = 0; i < num_lanes; ++i) {
        scores[i] = softcap * log2_e * std::tanh(scores[i] / (softcap * log2_e));
    }
}

int Rows::num_vectors() const { return (count + num_lanes - 1) / num_lanes; }
int Rows::width() const { return num_vectors() * num_lanes; }

} // namespace paceline::attention
