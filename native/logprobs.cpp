#include "logprobs.hpp"

#include <cmath>

#include "draw.hpp"
#include "error.hpp"

namespace paceline {

Logprobs row_logprobs(const float * logits, size_t n, int32_t chosen, int32_t k) {
    const int32_t top = argmax(logits, n);
    if (top < 0) {
        fail("SamplingError", "every logit is -inf: the model's output is not usable");
    }
    double sum = 0;
    for (size_t i = 0; i < n; ++i) {
        sum += std::exp(logits[i] - logits[top]);
    }
    if (std::isnan(sum)) {
        fail("SamplingError", "a logit is NaN: the model's output is not usable");
    }
    const double total = logits[top] + std::log(sum);
    Logprobs     result;
    result.chosen = static_cast<float>(logits[chosen] - total);
    if (k > 0) {
        Candidates list;
        select_highest(logits, n, static_cast<size_t>(k), list);
        list.sort_first(list.size());
        for (const llama_token_data & item : list.items) {
            result.ids.push_back(item.id);
            result.values.push_back(static_cast<float>(item.logit - total));
        }
    }
    return result;
}

} // namespace paceline
