#include "sampler.hpp"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>

#include "error.hpp"
#include "vocab.hpp"

namespace paceline {

namespace {

constexpr float    impossible   = -std::numeric_limits<float>::infinity();
constexpr size_t   infill_limit = 1000; // llama.cpp's infill compares every candidate with every other
constexpr int      lucky_tries  = 2;    // draws that are checked against the grammar before all tokens are
constexpr int      redraws      = 16;   // of tokens that a lazy grammar refuses to begin with, before all tokens are checked
constexpr uint32_t xtc_stream   = 0;

void check_row(const float * logits, size_t n) {
    int bad = 0;
    for (size_t i = 0; i < n; ++i) {
        bad |= !(logits[i] <= FLT_MAX);
    }
    for (size_t i = 0; bad && i < n; ++i) {
        if (!(logits[i] <= FLT_MAX)) {
            fail("SamplingError", "the logit of token " + str(i) + " is " + str(logits[i]) +
                                      ": the model's output is not usable");
        }
    }
}

} // namespace

Draw Sampler::sample(const float * given, const uint32_t * mask, int32_t num_logprobs) {
    const std::lock_guard lock(mutex_);
    given_.assign(given, given + n_vocab_);
    check_row(given_.data(), given_.size());
    // logprobs_mode "sampled" needs all candidates, which rules out the shortcuts around the grammar.
    const bool      from_list = num_logprobs >= 0 && options_.sampled_logprobs;
    const float *   row       = edit(mask, num_logprobs >= 0 && !from_list);
    Pending         pending;
    Draw            result;
    result.token = choose(row, from_list, pending);
    uint64_t work_left = TriggerSearch::max_tried_work;
    for (int i = 0; grammar_ && !grammar_->may_begin_with(result.token, work_left); ++i) {
        row          = without_false_begin(row, result.token, i == redraws, work_left);
        pending      = {};
        result.token = choose(row, from_list, pending);
    }
    if (num_logprobs >= 0) {
        result.logprobs = from_list ? list_logprobs(result.token, num_logprobs)
                                    : row_logprobs(given_.data(), given_.size(), result.token, num_logprobs);
    }
    pending_ = pending;
    return result;
}

// The row without a token that completes the trigger of a lazy grammar with a text that the grammar does not allow: the call
// has to begin otherwise, or not at all. any: without all such tokens.
const float * Sampler::without_false_begin(const float * row, int32_t token, bool any, uint64_t & work_left) {
    if (row != row_.data()) {
        row_.assign(row, row + n_vocab_);
    }
    row_[static_cast<size_t>(token)] = impossible;
    for (int32_t other = 0; any && other < n_vocab_; ++other) {
        float & logit = row_[static_cast<size_t>(other)];
        if (logit != impossible && !grammar_->may_begin_with(other, work_left)) {
            logit = impossible;
        }
    }
    return row_.data();
}

// Whether the grammar can filter candidates instead of the whole row: if the chain begins with top_k, or if nothing
// truncates, so that a winner among all that is allowed also wins among the allowed.
bool Sampler::grammar_on_list() const {
    return (greedy_ && !infill_) || starts_with_top_k() || !truncates();
}

bool Sampler::starts_with_top_k() const { return leading_ < chain_.size() && chain_[leading_] == SamplerKind::top_k; }

bool Sampler::truncates() const {
    if (options_.mirostat != 0 || adaptive() || options_.dynatemp_range > 0) {
        return true;
    }
    return std::any_of(chain_.begin(), chain_.end(), [](SamplerKind kind) {
        return kind != SamplerKind::penalties && kind != SamplerKind::dry && kind != SamplerKind::temperature;
    });
}

bool Sampler::adaptive() const {
    return !greedy_ && options_.mirostat == 0 && options_.adaptive_target >= 0 &&
           std::find(options_.samplers.begin(), options_.samplers.end(), SamplerKind::adaptive_p) !=
               options_.samplers.end();
}

int32_t Sampler::choose(const float * row, bool want_list, Pending & pending) {
    const size_t n = static_cast<size_t>(n_vocab_);
    if (greedy_ && !infill_) {
        return choose_greedy(row);
    }
    if (grammar_ && starts_with_top_k()) {
        select_allowed(row, static_cast<size_t>(options_.top_k));
    } else {
        select_highest(row, n, starts_with_top_k() ? static_cast<size_t>(options_.top_k) : n, list_);
    }
    require_some();
    for (size_t i = leading_; i < chain_.size(); ++i) {
        run(chain_[i], row);
    }
    require_some();
    if (grammar_ && !truncates()) {
        return draw_allowed(want_list);
    }
    if (greedy_) {
        return list_.items[highest(list_)].id;
    }
    return draw_by_strategy(pending);
}

int32_t Sampler::choose_greedy(const float * row) {
    const int32_t token = argmax(row, static_cast<size_t>(n_vocab_));
    list_.clear();
    if (token >= 0 && grammar_ && !grammar_->allows(token)) {
        select_allowed(row, 1);
    } else if (token >= 0) {
        list_.items.push_back({token, row[token], 1});
    }
    require_some();
    return list_.items[0].id;
}

// The `count` highest that the grammar allows, checking more and more of the row until there are enough.
void Sampler::select_allowed(const float * row, size_t count) {
    const size_t n = static_cast<size_t>(n_vocab_);
    for (const size_t width : {std::max<size_t>(64, 2 * count), std::max<size_t>(1024, 16 * count), n}) {
        select_highest(row, n, width, list_);
        grammar_->filter(list_);
        if (list_.size() >= count) {
            break;
        }
    }
    list_.keep_first(count);
}

int32_t Sampler::draw_allowed(bool want_list) {
    for (int i = 0; !want_list && i < lucky_tries && list_.size() > 0; ++i) {
        const size_t  winner = draw(list_, noise());
        const int32_t token  = list_.items[winner].id;
        if (grammar_->allows(token)) {
            return token;
        }
        list_.items.erase(list_.items.begin() + static_cast<ptrdiff_t>(winner));
        list_.set_sorted(0);
    }
    grammar_->filter(list_);
    require_some();
    return list_.items[draw(list_, noise())].id;
}

int32_t Sampler::draw_by_strategy(Pending & pending) {
    if (options_.mirostat == 1) {
        mirostat_1(list_, progress_.mu, n_vocab_);
    } else if (options_.mirostat == 2) {
        mirostat_2(list_, progress_.mu);
    } else if (adaptive()) {
        const double average = progress_.adaptive_weight == 0 ? options_.adaptive_target
                                                              : progress_.adaptive_sum / progress_.adaptive_weight;
        adaptive_p(list_, static_cast<float>(std::clamp(2.0 * options_.adaptive_target - average, 0.0, 1.0)));
    }
    const size_t winner = draw(list_, noise());
    pending.token       = list_.items[winner].id;
    if (options_.mirostat != 0) {
        list_.softmax();
        pending.value = -std::log2(std::max(static_cast<double>(list_.items[winner].p), DBL_MIN));
    } else {
        pending.value = list_.items[winner].p;
    }
    return pending.token;
}

void Sampler::require_some() const {
    if (list_.size() == 0) {
        fail("NoTokenAllowed", "no token is allowed here: masks, bans and grammar together leave none");
    }
}

void Sampler::run(SamplerKind kind, const float * row) {
    const SamplerOptions & o = options_;
    switch (kind) {
        case SamplerKind::penalties: penalize(); break;
        case SamplerKind::dry: apply_dry(), list_.drop_impossible(); break;
        case SamplerKind::top_n_sigma: top_n_sigma(list_, o.top_n_sigma); break;
        case SamplerKind::top_k: top_k(list_, o.top_k); break;
        case SamplerKind::typ_p: typical_p(list_, o.typical_p); break;
        case SamplerKind::top_p: top_p(list_, o.top_p); break;
        case SamplerKind::min_p: min_p(list_, o.min_p); break;
        case SamplerKind::xtc:
            xtc(list_, o.xtc_probability, o.xtc_threshold, noise().uniform(xtc_stream));
            break;
        case SamplerKind::temperature: temperature(list_, o.temperature, o.dynatemp_range, o.dynatemp_exponent); break;
        case SamplerKind::infill: infill(row); break;
        case SamplerKind::adaptive_p: break;
    }
    require_some();
}

void Sampler::penalize() {
    for (llama_token_data & item : list_.items) {
        if (const auto found = counts_.find(item.id); found != counts_.end()) {
            item.logit = penalized(item.logit, found->second);
        }
    }
    list_.set_sorted(0);
    list_.drop_impossible();
}

void Sampler::infill(const float * row) {
    if (list_.size() > infill_limit) {
        fail("SamplingError", "samplers: infill was given " + str(list_.size()) + " candidates and takes " +
                                  str(infill_limit) + " at most: put top_k before it");
    }
    list_.sort_first(list_.size());
    llama_token_data_array array = {list_.items.data(), list_.size(), -1, true};
    try {
        llama_sampler_apply(infill_.get(), &array);
    } catch (const std::exception & error) {
        fail("SamplingError", std::string("samplers: infill failed: ") + error.what());
    }
    list_.items.resize(array.size);
    list_.set_sorted(0);
    // It may have added an end token that was no candidate.
    std::erase_if(list_.items, [&](const llama_token_data & item) {
        return row[item.id] == impossible || (grammar_ && !grammar_->allows(item.id));
    });
}

Logprobs Sampler::list_logprobs(int32_t token, int32_t k) {
    Logprobs result;
    if (greedy_) {
        result.chosen = 0;
        if (k > 0) {
            result.ids    = {token};
            result.values = {0};
        }
        return result;
    }
    list_.softmax();
    list_.sort_first(static_cast<size_t>(std::max(k, 1)));
    for (const llama_token_data & item : list_.items) {
        if (item.id == token) {
            result.chosen = std::log(item.p);
        }
    }
    for (size_t i = 0; i < std::min(list_.size(), static_cast<size_t>(k)); ++i) {
        result.ids.push_back(list_.items[i].id);
        result.values.push_back(std::log(list_.items[i].p));
    }
    return result;
}

Logprobs Sampler::logprobs(const float * logits, int32_t chosen, int32_t k) const {
    const std::vector<float> row(logits, logits + n_vocab_);
    check_row(row.data(), row.size());
    check_token("token_id", chosen);
    return row_logprobs(row.data(), row.size(), chosen, k);
}

bool Sampler::is_eog(int32_t token) const {
    check_token("token_id", token);
    return llama_vocab_is_eog(model_->vocab(), token);
}

std::string Sampler::token_bytes(int32_t token) const {
    check_token("token_id", token);
    const llama_vocab * vocab = model_->vocab();
    return llama_vocab_type(vocab) == LLAMA_VOCAB_TYPE_NONE ? "" : token_piece(vocab, token, true);
}

} // namespace paceline
