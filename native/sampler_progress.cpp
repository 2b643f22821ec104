// The progress of a sampler (history, counts, grammar, k): advancing, resetting, saving and restoring it.
#include "sampler.hpp"

#include <algorithm>
#include <cmath>

#include "error.hpp"
#include "sampler_state.hpp"

namespace paceline {

Sampler::Progress Sampler::initial(uint64_t seed, uint32_t choice) const {
    Progress progress;
    progress.seed            = seed;
    progress.choice          = choice;
    progress.mu              = 2.0 * options_.mirostat_tau;
    progress.adaptive_weight = 1 / (1.0 - options_.adaptive_decay);
    progress.adaptive_sum    = options_.adaptive_target * progress.adaptive_weight;
    return progress;
}

void Sampler::accept(int32_t token) {
    const std::lock_guard lock(mutex_);
    check_token("token_id", token);
    if (grammar_ && !grammar_->accept(token)) {
        fail("InvalidParams", "token_id: the grammar does not allow token " + str(token) + " here");
    }
    if (pending_.token == token && options_.mirostat != 0) {
        progress_.mu -= options_.mirostat_eta * (pending_.value - options_.mirostat_tau);
    } else if (pending_.token == token && adaptive()) {
        progress_.adaptive_sum    = pending_.value + options_.adaptive_decay * progress_.adaptive_sum;
        progress_.adaptive_weight = 1 + options_.adaptive_decay * progress_.adaptive_weight;
    }
    pending_ = {};
    ++progress_.k;
    if (grammar_ && !grammar_->asleep()) {
        progress_.generated.push_back(token);
    }
    remember(token);
}

void Sampler::accept_prompt(const int32_t * tokens, size_t n) {
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < n; ++i) {
        check_token("token_ids", tokens[i]);
    }
    pending_ = {};
    for (size_t i = window_ < n ? n - window_ : 0; i < n; ++i) {
        remember(tokens[i]);
    }
}

// Adds to the history, which is kept as far back as any sampler needs.
void Sampler::remember(int32_t token) {
    if (window_ == 0) {
        return;
    }
    std::vector<int32_t> & history = progress_.history;
    history.push_back(token);
    count(history.size() - 1);
    if (dry_) {
        llama_sampler_accept(dry_.get(), token);
    }
    if (window_ != everything && history.size() >= 2 * window_ + 64) {
        history.erase(history.begin(), history.end() - static_cast<ptrdiff_t>(window_));
    }
}

// Takes the token at `i`, the newest so far, into the counts of the penalties, and removes the token that it pushes out.
void Sampler::count(size_t i) {
    if (!uses(SamplerKind::penalties)) {
        return;
    }
    const std::vector<int32_t> & history = progress_.history;
    ++counts_[history[i]];
    const size_t last_n = static_cast<size_t>(options_.penalty_last_n);
    if (options_.penalty_last_n > 0 && i >= last_n) {
        const auto oldest = counts_.find(history[i - last_n]);
        if (--oldest->second == 0) {
            counts_.erase(oldest);
        }
    }
}

std::optional<Grammar> Sampler::grammar_after(const std::vector<int32_t> & generated) const {
    std::optional<Grammar> grammar;
    if (options_.grammar) {
        grammar.emplace(model_, *options_.grammar);
        for (const int32_t token : generated) {
            if (!grammar->accept(token)) {
                fail("StateError", "the saved tokens do not follow the grammar of this sampler");
            }
        }
    }
    return grammar;
}

void Sampler::go_to(Progress progress, Pending pending) {
    std::optional<Grammar> grammar = grammar_after(progress.generated);
    grammar_                       = std::move(grammar);
    progress_                      = std::move(progress);
    pending_                       = pending;
    counts_.clear();
    if (dry_) {
        llama_sampler_reset(dry_.get());
    }
    for (size_t i = 0; i < progress_.history.size(); ++i) {
        count(i);
        if (dry_) {
            llama_sampler_accept(dry_.get(), progress_.history[i]);
        }
    }
}

void Sampler::reset() {
    const std::lock_guard lock(mutex_);
    go_to(initial(progress_.seed, progress_.choice), {});
}

uint64_t Sampler::seed() const {
    const std::lock_guard lock(mutex_);
    return progress_.seed;
}

uint32_t Sampler::choice() const {
    const std::lock_guard lock(mutex_);
    return progress_.choice;
}

uint32_t Sampler::num_generated() const {
    const std::lock_guard lock(mutex_);
    return progress_.k;
}

void Sampler::set_grammar_asleep(bool asleep) {
    const std::lock_guard lock(mutex_);
    if (grammar_) {
        grammar_->set_asleep(asleep);
    }
}

bool Sampler::may_end() const {
    const std::lock_guard lock(mutex_);
    return !grammar_ || grammar_->may_end();
}

bool Sampler::is_complete() const {
    const std::lock_guard lock(mutex_);
    return grammar_ && grammar_->is_complete();
}

std::string Sampler::state() const {
    const std::lock_guard lock(mutex_);
    StateWriter           out(fingerprint());
    out.put(progress_.seed), out.put(progress_.choice), out.put(progress_.k);
    out.put(progress_.mu), out.put(progress_.adaptive_sum), out.put(progress_.adaptive_weight);
    out.put(pending_.token), out.put(pending_.value);
    out.put(progress_.history), out.put(progress_.generated);
    return out.finish();
}

void Sampler::restore(const std::string & state) {
    const std::lock_guard lock(mutex_);
    StateReader           in(state, fingerprint());
    Progress              progress;
    Pending               pending;
    in.get(progress.seed), in.get(progress.choice), in.get(progress.k);
    in.get(progress.mu), in.get(progress.adaptive_sum), in.get(progress.adaptive_weight);
    in.get(pending.token), in.get(pending.value);
    in.get(progress.history), in.get(progress.generated);
    in.finish();
    for (const auto * tokens : {&progress.history, &progress.generated}) {
        for (const int32_t token : *tokens) {
            if (token < 0 || token >= n_vocab_) {
                fail("StateError", "the saved state holds the token " + str(token) +
                                       ", which this model has not");
            }
        }
    }
    for (const double value : {progress.mu, progress.adaptive_sum, progress.adaptive_weight, pending.value}) {
        if (!std::isfinite(value)) {
            fail("StateError", "the saved state holds a number that is not finite");
        }
    }
    go_to(std::move(progress), pending);
}

// A hash of everything but seed and choice that makes two samplers behave differently.
uint64_t Sampler::fingerprint() const {
    const SamplerOptions & o = options_;
    Fingerprint            f;
    f.add(n_vocab_), f.add(static_cast<int32_t>(llama_vocab_type(model_->vocab())));
    for (const SamplerKind kind : o.samplers) {
        f.add(static_cast<int32_t>(kind));
    }
    for (const float value :
         {o.temperature, o.dynatemp_range, o.dynatemp_exponent, o.top_p, o.min_p, o.typical_p, o.top_n_sigma,
          o.xtc_probability, o.xtc_threshold, o.mirostat_tau, o.mirostat_eta, o.adaptive_target, o.adaptive_decay,
          o.repeat_penalty, o.frequency_penalty, o.presence_penalty, o.dry_multiplier, o.dry_base}) {
        f.add(value);
    }
    for (const int32_t value : {o.top_k, o.mirostat, o.penalty_last_n, o.dry_allowed_length, o.dry_penalty_last_n,
                                static_cast<int32_t>(o.ignore_eos), o.min_tokens}) {
        f.add(value);
    }
    for (const auto & [token, bias] : o.logit_bias) {
        f.add(token), f.add(bias);
    }
    f.add(o.dry_sequence_breakers), f.add(o.bad_words), f.add(o.stop_token_ids);
    f.add(o.allowed_token_ids.value_or(std::vector<int32_t>{-1}));
    if (o.grammar) {
        f.add(std::vector<std::string>{o.grammar->text, o.grammar->root, o.grammar->prefix});
        f.add(o.grammar->trigger_words), f.add(o.grammar->trigger_tokens);
        for (const PatternTrigger & trigger : o.grammar->trigger_patterns) {
            f.add(std::vector<std::string>{trigger.pattern, trigger.full ? "full" : ""});
        }
        f.add(static_cast<int32_t>(o.grammar->lazy));
    }
    return f.value();
}

} // namespace paceline
