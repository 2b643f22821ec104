#include "sampler.hpp"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>
#include <set>

#include "error.hpp"
#include "vocab.hpp"

namespace paceline {

namespace {

constexpr float    impossible     = -std::numeric_limits<float>::infinity();
constexpr size_t   infill_limit   = 1000; // llama.cpp's infill compares every candidate with every other
constexpr int      lucky_tries    = 2; // draws that are checked against the grammar before all tokens are
constexpr uint32_t xtc_stream     = 0;

void forbid_unset(float * row, size_t n, const uint32_t * mask) {
    for (size_t i = 0; i < n; i += 32) {
        const uint32_t word = mask[i / 32];
        for (size_t j = i; word != ~0u && j < std::min(n, i + 32); ++j) {
            if (!(word >> (j - i) & 1)) {
                row[j] = impossible;
            }
        }
    }
}

void check_row(const float * logits, size_t n) {
    int bad = 0;
    for (size_t i = 0; i < n; ++i) {
        bad |= !(logits[i] <= FLT_MAX);
    }
    for (size_t i = 0; bad && i < n; ++i) {
        if (!(logits[i] <= FLT_MAX)) {
            fail("SamplingError", "the logit of token " + std::to_string(i) + " is " + std::to_string(logits[i]) +
                                      ": the model's output is not usable");
        }
    }
}

// llama.cpp reads so many bytes of a breaker and encodes what is left of it behind any of its bytes: what this
// vocabulary cannot encode, or not without an end, is found here.
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
        fail("InvalidParams", "repeat_penalty must be above 0, not " + std::to_string(options_.repeat_penalty));
    }
    for (const auto & [token, bias] : options_.logit_bias) {
        check_token("logit_bias", token);
        if (!std::isfinite(bias)) {
            fail("InvalidParams", "logit_bias: the bias of token " + std::to_string(token) + " must be finite");
        }
    }
    for (const int32_t token : options_.stop_token_ids) {
        check_token("stop_token_ids", token);
    }
}

void Sampler::check_token(const char * field, int32_t token) const {
    if (token < 0 || token >= n_vocab_) {
        fail("InvalidParams", std::string(field) + ": " + std::to_string(token) + " is no token of this model (0 to " +
                                  std::to_string(n_vocab_ - 1) + ")");
    }
}

// Leaves out what these options turn off, so that it costs nothing.
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

Draw Sampler::sample(const float * given, const uint32_t * mask, int32_t num_logprobs) {
    const std::lock_guard lock(mutex_);
    given_.assign(given, given + n_vocab_);
    check_row(given_.data(), given_.size());
    const float * logits = given_.data();
    // Candidates that only logprobs_mode "sampled" looks at make the shortcuts around the grammar impossible.
    const bool      from_list = num_logprobs >= 0 && options_.sampled_logprobs;
    const float *   row       = edit(logits, mask);
    Pending         pending;
    Draw            result;
    result.token = choose(row, from_list, pending);
    if (num_logprobs >= 0) {
        result.logprobs = from_list ? list_logprobs(result.token, num_logprobs)
                                    : row_logprobs(logits, given_.size(), result.token, num_logprobs);
    }
    pending_ = pending;
    return result;
}

// The row with biases, bans and leading penalties in it: a copy of our own only where there are any.
const float * Sampler::edit(const float * logits, const uint32_t * mask) {
    const SamplerOptions & o = options_;
    const bool ends = progress_.k < static_cast<uint32_t>(o.min_tokens);
    const bool few  = leading_ > 0 && !progress_.history.empty();
    const bool whole_grammar = grammar_ && !grammar_on_list();
    if (!mask && !ends && !few && !whole_grammar && o.logit_bias.empty() && banned_.empty() && allowed_.empty() &&
        bad_sequences_.empty()) {
        return logits;
    }
    row_.assign(logits, logits + n_vocab_);
    float * row = row_.data();
    for (const auto & [token, bias] : o.logit_bias) {
        row[token] = std::min(row[token] + bias, FLT_MAX);
    }
    ban(row);
    if (mask) {
        forbid_unset(row, row_.size(), mask);
    }
    if (whole_grammar) {
        grammar_->filter(row, row_.size());
    }
    for (size_t i = 0; few && i < leading_; ++i) {
        chain_[i] == SamplerKind::dry ? edit_dry(row) : edit_penalties(row);
    }
    return row;
}

// Everything that makes tokens impossible but the grammar and the mask of the call.
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

// The formula of llama.cpp: CTRL's repetition penalty (Keskar et al. 2019), multiplied where the logit is negative, then
// OpenAI's frequency and presence penalties.
float Sampler::penalized(float logit, int32_t count) const {
    const float scaled = logit <= 0 ? logit * options_.repeat_penalty : logit / options_.repeat_penalty;
    return std::min(scaled - (static_cast<float>(count) * options_.frequency_penalty + options_.presence_penalty),
                    FLT_MAX);
}

void Sampler::edit_penalties(float * row) const {
    for (const auto & [token, count] : counts_) {
        row[token] = penalized(row[token], count);
    }
}

// DRY only ever changes tokens that occurred before, so it is shown these alone.
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
    llama_token_data_array array = {list_.items.data(), list_.size(), -1, false};
    llama_sampler_apply(dry_.get(), &array);
    for (llama_token_data & item : list_.items) {
        item.logit = std::min(item.logit, FLT_MAX);
    }
    list_.set_sorted(0);
}

// Whether the grammar can be asked about candidates instead of the whole row: where the chain begins with the highest k,
// or where nothing truncates, so that whoever wins among all and is allowed wins among the allowed.
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

// The `count` highest that the grammar allows, asking about ever more of the row until there are so many.
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
        fail("SamplingError", "no token is allowed here: masks, bans and grammar together leave none");
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
        fail("SamplingError", "samplers: infill was given " + std::to_string(list_.size()) + " candidates and takes " +
                                  std::to_string(infill_limit) + " at most: put top_k before it");
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
    // It may have put an end token there that was no candidate.
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

std::shared_ptr<Sampler> Sampler::clone(std::optional<uint32_t> choice) const {
    return std::shared_ptr<Sampler>(new Sampler(*this, choice));
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
