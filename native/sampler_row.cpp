// Edits of a whole row of logits before candidates are selected: biases, bans, masks, leading penalties.
#include "sampler.hpp"

#include <algorithm>
#include <array>
#include <cfloat>
#include <limits>
#include <set>

namespace paceline {

namespace {

constexpr float impossible = -std::numeric_limits<float>::infinity();

// A possible token stays possible, and a logit finite, however far a sum or a product goes; NaN stays NaN.
float moved(float before, float after) {
    return before == impossible ? impossible : std::clamp(after, -FLT_MAX, FLT_MAX);
}

constexpr std::array<uint32_t, 32> bits = [] {
    std::array<uint32_t, 32> found{};
    for (size_t j = 0; j < found.size(); ++j) {
        found[j] = 1u << j;
    }
    return found;
}();

void forbid_unset(float * row, size_t n, const uint32_t * mask) {
    const size_t whole = n / 32 * 32;
    for (size_t i = 0; i < whole; i += 32) {
        const uint32_t word = mask[i / 32];
        if (word == ~0u) {
            continue;
        }
        for (size_t j = 0; j < 32; ++j) { // without branches and shifts, so that it is vectorised
            row[i + j] = (word & bits[j]) != 0 ? row[i + j] : impossible;
        }
    }
    for (size_t i = whole; i < n; ++i) {
        row[i] = (mask[i / 32] & bits[i % 32]) != 0 ? row[i] : impossible;
    }
}

} // namespace

// The row with biases, bans and leading penalties in it: `given_` itself, or a copy if the original is needed.
const float * Sampler::edit(const uint32_t * mask, bool keeps_given) {
    const SamplerOptions & o = options_;
    const bool ends = progress_.k < static_cast<uint32_t>(o.min_tokens);
    const bool few  = leading_ > 0 && !progress_.history.empty();
    const bool whole_grammar = grammar_ && !grammar_on_list();
    if (!mask && !ends && !few && !whole_grammar && o.logit_bias.empty() && banned_.empty() && allowed_.empty() &&
        bad_sequences_.empty()) {
        return given_.data();
    }
    if (keeps_given) {
        row_ = given_;
    }
    float * row = keeps_given ? row_.data() : given_.data();
    const size_t n = given_.size();
    for (const auto & [token, bias] : o.logit_bias) {
        row[token] = moved(row[token], row[token] + bias);
    }
    ban(row);
    if (mask) {
        forbid_unset(row, n, mask);
    }
    if (whole_grammar) {
        grammar_->filter(row, n);
    }
    for (size_t i = 0; few && i < leading_; ++i) {
        chain_[i] == SamplerKind::dry ? edit_dry(row) : edit_penalties(row);
    }
    return row;
}

// Sets banned tokens to -inf, except bans by the grammar and the call's mask.
void Sampler::ban(float * row) const {
    for (const int32_t token : banned_) {
        row[token] = impossible;
    }
    if (progress_.k < static_cast<uint32_t>(options_.min_tokens)) {
        for (const int32_t token : ends_) {
            row[token] = impossible;
        }
    }
    if (!allowed_.empty()) {
        forbid_unset(row, static_cast<size_t>(n_vocab_), allowed_.data());
    }
    const std::vector<int32_t> & history = progress_.history;
    for (const std::vector<int32_t> & tokens : bad_sequences_) {
        if (history.size() >= tokens.size() - 1 &&
            std::equal(tokens.begin(), tokens.end() - 1, history.end() - static_cast<ptrdiff_t>(tokens.size() - 1))) {
            row[tokens.back()] = impossible;
        }
    }
}

// The formula of llama.cpp: CTRL's repetition penalty (Keskar et al. 2019), multiplied if the logit is negative, then
// OpenAI's frequency and presence penalties.
float Sampler::penalized(float logit, int32_t count) const {
    const float scaled = logit <= 0 ? logit * options_.repeat_penalty : logit / options_.repeat_penalty;
    return moved(logit, scaled - (static_cast<float>(count) * options_.frequency_penalty + options_.presence_penalty));
}

void Sampler::edit_penalties(float * row) const {
    for (const auto & [token, count] : counts_) {
        row[token] = penalized(row[token], count);
    }
}

// DRY only ever changes tokens that occurred before, so it is given these alone.
void Sampler::edit_dry(float * row) {
    std::set<int32_t> seen(progress_.history.begin(), progress_.history.end());
    list_.clear();
    for (const int32_t token : seen) {
        list_.items.push_back({token, row[token], 0});
    }
    apply_dry();
    for (const llama_token_data & item : list_.items) {
        row[item.id] = item.logit;
    }
}

void Sampler::apply_dry() {
    std::vector<float> before;
    for (const llama_token_data & item : list_.items) {
        before.push_back(item.logit);
    }
    llama_token_data_array array = {list_.items.data(), list_.size(), -1, false};
    llama_sampler_apply(dry_.get(), &array);
    for (size_t i = 0; i < list_.size(); ++i) { // DRY keeps their order
        list_.items[i].logit = moved(before[i], list_.items[i].logit);
    }
    list_.set_sorted(0);
}

std::vector<uint32_t> Sampler::allowed_mask() {
    const std::lock_guard lock(mutex_);
    row_.assign(static_cast<size_t>(n_vocab_), 0);
    ban(row_.data());
    if (grammar_) {
        grammar_->filter(row_.data(), row_.size());
    }
    std::vector<uint32_t> mask(mask_words(), 0);
    for (size_t i = 0; i < row_.size(); ++i) {
        mask[i / 32] |= static_cast<uint32_t>(row_[i] == 0) << (i % 32);
    }
    return mask;
}

} // namespace paceline
