// Log-probabilities of a row of logits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace paceline {

struct Logprobs {
    float                chosen;
    std::vector<int32_t> ids;    // most likely first
    std::vector<float>   values; // natural logarithms, aligned with ids
};

// log-softmax of a row of n logits: the chosen token's value and the k highest. SamplingError if every logit is -inf
// or one is NaN.
Logprobs row_logprobs(const float * logits, size_t n, int32_t chosen, int32_t k);

} // namespace paceline
