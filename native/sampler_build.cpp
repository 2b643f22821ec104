// Construction of a sampler: checks its options and leaves out the samplers that they turn off.
#include "sampler.hpp"

#include <algorithm>
#include <cmath>

#include "error.hpp"
#include "vocab.hpp"

namespace paceline {

namespace {

// llama.cpp reads this many bytes of a breaker and encodes the rest of it after any of its bytes: texts that this
// vocabulary cannot encode, or not without an end, are found here.
void check_breakers(const std::shared_ptr<Model> & model, const std::vector<std::string> & breakers) {
    constexpr size_t max_bytes = 40;
    const Vocab      vocab(model);
    for (const std::string & breaker : breakers) {
        for (size_t i = 1; i < std::min(breaker.size(), max_bytes); ++i) {
            vocab.encode(breaker.substr(i, max_bytes - i), false, false);
        }
    }
}

} // namespace

Sampler::Sampler(std::shared_ptr<Model> model, const SamplerOptions & options)
    : model_(std::move(model)), options_(options), n_vocab_(model_->n_vocab()) {
    check_options();
    build_chain();
    build_bans();
    build_dry();
    if (std::find(chain_.begin(), chain_.end(), SamplerKind::infill) != chain_.end()) {
        infill_.reset(llama_sampler_init_infill(model_->vocab()));
    }
    if (options_.grammar) {
        grammar_.emplace(model_, *options_.grammar);
    }
    progress_ = initial(options_.seed, options_.choice);
}

Sampler::Sampler(const Sampler & other, std::optional<uint32_t> choice)
    : model_(other.model_), options_(other.options_), n_vocab_(other.n_vocab_), greedy_(other.greedy_),
      window_(other.window_), chain_(other.chain_), leading_(other.leading_), banned_(other.banned_),
      ends_(other.ends_), allowed_(other.allowed_), bad_sequences_(other.bad_sequences_) {
    const std::lock_guard lock(other.mutex_);
    progress_        = other.progress_;
    progress_.choice = choice.value_or(other.progress_.choice);
    pending_         = other.pending_;
    counts_          = other.counts_;
    if (other.grammar_) {
        grammar_.emplace(*other.grammar_);
    }
    dry_.reset(llama_sampler_clone(other.dry_.get()));
    infill_.reset(llama_sampler_clone(other.infill_.get()));
}

void Sampler::check_options() const {
    for (const float value :
         {options_.temperature, options_.dynatemp_range, options_.dynatemp_exponent, options_.top_p, options_.min_p,
          options_.typical_p, options_.top_n_sigma, options_.xtc_probability, options_.xtc_threshold,
          options_.mirostat_tau, options_.mirostat_eta, options_.adaptive_target, options_.adaptive_decay,
          options_.frequency_penalty, options_.presence_penalty, options_.dry_multiplier, options_.dry_base}) {
        if (!std::isfinite(value)) {
            fail("InvalidParams", "sampling: every number must be finite");
        }
    }
    if (!(options_.repeat_penalty > 0) || !std::isfinite(1 / options_.repeat_penalty) ||
        !std::isfinite(options_.repeat_penalty)) {
        fail("InvalidParams", "repeat_penalty must be above 0, not " + str(options_.repeat_penalty));
    }
    for (const auto & [token, bias] : options_.logit_bias) {
        check_token("logit_bias", token);
        if (!std::isfinite(bias)) {
            fail("InvalidParams", "logit_bias: the bias of token " + str(token) + " must be finite");
        }
    }
    for (const int32_t token : options_.stop_token_ids) {
        check_token("stop_token_ids", token);
    }
}

void Sampler::check_token(const char * field, int32_t token) const {
    if (token < 0 || token >= n_vocab_) {
        fail("InvalidParams", std::string(field) + ": " + str(token) + " is no token of this model (0 to " +
                                  str(n_vocab_ - 1) + ")");
    }
}

// Leaves out samplers that these options turn off, so that they cost nothing.
void Sampler::build_chain() {
    const SamplerOptions & o = options_;
    greedy_                  = o.temperature == 0;
    const bool with_infill =
        o.mirostat == 0 && std::find(o.samplers.begin(), o.samplers.end(), SamplerKind::infill) != o.samplers.end();
    const auto wanted = [&](SamplerKind kind) {
        switch (kind) {
            case SamplerKind::penalties:
                return o.penalty_last_n != 0 &&
                       (o.repeat_penalty != 1 || o.frequency_penalty != 0 || o.presence_penalty != 0);
            case SamplerKind::dry: return o.dry_multiplier != 0 && o.dry_base >= 1 && o.dry_penalty_last_n != 0;
            case SamplerKind::infill: return true;
            default: break;
        }
        if (greedy_ && (!with_infill || kind == SamplerKind::temperature || kind == SamplerKind::xtc)) {
            return false;
        }
        switch (kind) {
            case SamplerKind::top_n_sigma: return o.top_n_sigma > 0;
            case SamplerKind::top_k: return o.top_k > 0 && o.top_k < n_vocab_;
            case SamplerKind::typ_p: return o.typical_p < 1;
            case SamplerKind::top_p: return o.top_p < 1;
            case SamplerKind::min_p: return o.min_p > 0;
            case SamplerKind::xtc: return o.xtc_probability > 0 && o.xtc_threshold <= 0.5f;
            case SamplerKind::temperature: return o.temperature != 1 || o.dynatemp_range > 0;
            default: return false; // adaptive-p takes the place of the draw
        }
    };
    const std::vector<SamplerKind> order =
        o.mirostat == 0 ? o.samplers : std::vector<SamplerKind>{SamplerKind::temperature};
    std::copy_if(order.begin(), order.end(), std::back_inserter(chain_), wanted);
    const auto edits_few = [](SamplerKind kind) { return kind == SamplerKind::penalties || kind == SamplerKind::dry; };
    leading_ = static_cast<size_t>(std::find_if_not(chain_.begin(), chain_.end(), edits_few) - chain_.begin());
    if (with_infill && llama_vocab_eot(model_->vocab()) < 0 && llama_vocab_eos(model_->vocab()) < 0) {
        fail("Unsupported", "samplers: infill needs a model with an end token, which this one has not");
    }
}

void Sampler::build_bans() {
    const llama_vocab * vocab = model_->vocab();
    if (options_.ignore_eos || options_.min_tokens > 0) {
        for (int32_t token = 0; token < n_vocab_; ++token) {
            if (llama_vocab_is_eog(vocab, token)) {
                (options_.ignore_eos ? banned_ : ends_).push_back(token);
            }
        }
    }
    if (options_.min_tokens > 0) {
        ends_.insert(ends_.end(), options_.stop_token_ids.begin(), options_.stop_token_ids.end());
    }
    int32_t             num_suppressed = 0;
    const llama_token * suppressed     = llama_vocab_get_suppress_tokens(vocab, &num_suppressed);
    for (int32_t i = 0; i < num_suppressed; ++i) {
        if (suppressed[i] >= 0 && suppressed[i] < n_vocab_) {
            banned_.push_back(suppressed[i]);
        }
    }
    if (options_.allowed_token_ids) {
        allowed_.assign(mask_words(), 0);
        for (const int32_t token : *options_.allowed_token_ids) {
            check_token("allowed_token_ids", token);
            allowed_[static_cast<size_t>(token) / 32] |= 1u << (token % 32);
        }
    }
    if (!options_.bad_words.empty() && llama_vocab_type(vocab) == LLAMA_VOCAB_TYPE_NONE) {
        fail("Unsupported", "bad_words: this model has no vocabulary of text");
    }
    if (!options_.bad_words.empty()) {
        ban_words();
    }
}

void Sampler::ban_words() {
    const Vocab vocab(model_);
    for (const std::string & word : options_.bad_words) {
        for (const std::string & form : {word, " " + word}) {
            const std::vector<int32_t> tokens = vocab.encode(form, false, false);
            if (tokens.size() == 1) {
                banned_.push_back(tokens[0]);
            } else if (!tokens.empty()) {
                bad_sequences_.push_back(tokens);
            }
        }
    }
}

void Sampler::build_dry() {
    window_ = 0;
    for (const std::vector<int32_t> & tokens : bad_sequences_) {
        window_ = std::max(window_, tokens.size() - 1);
    }
    const auto extend = [this](int32_t last_n) {
        window_ = last_n < 0 ? everything : std::max(window_, static_cast<size_t>(last_n));
    };
    if (uses(SamplerKind::penalties)) {
        extend(options_.penalty_last_n);
    }
    if (!uses(SamplerKind::dry)) {
        return;
    }
    if (llama_vocab_type(model_->vocab()) == LLAMA_VOCAB_TYPE_NONE) {
        fail("Unsupported", "dry_multiplier: this model has no vocabulary of text");
    }
    const int32_t last_n =
        options_.dry_penalty_last_n < 0 ? std::max(4096, llama_model_n_ctx_train(model_->get())) : options_.dry_penalty_last_n;
    extend(last_n);
    check_breakers(model_, options_.dry_sequence_breakers);
    std::vector<const char *> breakers;
    for (const std::string & breaker : options_.dry_sequence_breakers) {
        breakers.push_back(breaker.c_str());
    }
    dry_.reset(llama_sampler_init_dry(model_->vocab(), options_.dry_multiplier, options_.dry_base,
                                      options_.dry_allowed_length, last_n, breakers.data(), breakers.size()));
}

bool Sampler::uses(SamplerKind kind) const { return std::find(chain_.begin(), chain_.end(), kind) != chain_.end(); }

std::shared_ptr<Sampler> Sampler::clone(std::optional<uint32_t> choice) const {
    return std::shared_ptr<Sampler>(new Sampler(*this, choice));
}

} // namespace paceline
