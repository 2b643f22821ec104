#include "grammar.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <exception>
#include <limits>
#include <mutex>
#include <regex>
#include <utility>

#include "error.hpp"
#include "grammar_guard.hpp"

namespace paceline {

namespace {

void check_triggers(const llama_vocab * vocab, const GrammarOptions & options) {
    for (const std::string & pattern : options.trigger_patterns) {
        try {
            std::regex compiled(pattern);
        } catch (const std::regex_error & error) {
            fail("GrammarError", "grammar_triggers: the pattern '" + pattern + "' does not compile: " + error.what());
        }
    }
    for (const int32_t token : options.trigger_tokens) {
        if (token < 0 || token >= llama_vocab_n_tokens(vocab)) {
            fail("InvalidParams", "grammar_triggers: " + std::to_string(token) + " is no token of this model (0 to " +
                                      std::to_string(llama_vocab_n_tokens(vocab) - 1) + ")");
        }
    }
    if (options.lazy && options.trigger_patterns.empty() && options.trigger_tokens.empty()) {
        fail("GrammarError", "grammar_lazy needs grammar_triggers: without one the grammar would never begin");
    }
}

llama_sampler * compile(const llama_vocab * vocab, const GrammarOptions & options) {
    if (!options.lazy) {
        return llama_sampler_init_grammar(vocab, options.text.c_str(), options.root.c_str());
    }
    std::vector<const char *> patterns;
    for (const std::string & pattern : options.trigger_patterns) {
        patterns.push_back(pattern.c_str());
    }
    return llama_sampler_init_grammar_lazy_patterns(vocab, options.text.c_str(), options.root.c_str(), patterns.data(),
                                                    patterns.size(), options.trigger_tokens.data(),
                                                    options.trigger_tokens.size());
}

} // namespace

std::string token_piece(const llama_vocab * vocab, int32_t token) {
    std::string   piece(256, '\0');
    const int32_t size = llama_token_to_piece(vocab, token, piece.data(), 256, 0, true);
    piece.resize(static_cast<size_t>(std::abs(size)));
    if (size < 0) {
        llama_token_to_piece(vocab, token, piece.data(), -size, 0, true);
    }
    return piece;
}

FirstBytes::FirstBytes(const llama_vocab * vocab) : of_token(static_cast<size_t>(llama_vocab_n_tokens(vocab)), none) {
    token.fill(-1);
    for (int32_t id = 0; id < llama_vocab_n_tokens(vocab); ++id) {
        const std::string piece = token_piece(vocab, id);
        if (piece.empty() || llama_vocab_is_eog(vocab, id)) {
            continue;
        }
        const auto first                  = static_cast<unsigned char>(piece[0]);
        of_token[static_cast<size_t>(id)] = first;
        if (piece.size() == 1) {
            token[first] = id;
        }
    }
}

std::shared_ptr<const FirstBytes> FirstBytes::of(const std::shared_ptr<Model> & model) {
    static std::mutex                                                                        mutex;
    static std::vector<std::pair<std::weak_ptr<Model>, std::shared_ptr<const FirstBytes>>> known;
    const std::lock_guard lock(mutex);
    std::erase_if(known, [](const auto & entry) { return entry.first.expired(); });
    for (const auto & [owner, bytes] : known) {
        if (owner.lock() == model) {
            return bytes;
        }
    }
    known.emplace_back(model, std::make_shared<const FirstBytes>(model->vocab()));
    return known.back().second;
}

Grammar::Grammar(const std::shared_ptr<Model> & model, const GrammarOptions & options) {
    const llama_vocab * vocab = model->vocab();
    if (llama_vocab_type(vocab) == LLAMA_VOCAB_TYPE_NONE) {
        fail("Unsupported", "grammar: this model has no vocabulary of text");
    }
    check_triggers(vocab, options);
    const GrammarFacts facts = check_grammar(model, options.text, options.root);
    sampler_.reset(compile(vocab, options));
    if (!sampler_) {
        fail("GrammarError", "grammar: llama.cpp refuses it: a rule leads to itself before any character (left recursion)");
    }
    model_         = model;
    prefix_closed_ = facts.prefix_closed;
    names_tokens_  = facts.names_tokens;
    if (options.lazy) {
        waiting_.emplace();
        waiting_->triggers = options.trigger_tokens;
        for (const std::string & pattern : options.trigger_patterns) {
            waiting_->patterns.emplace_back(pattern);
            waiting_->anchored |= pattern.find('^') == 0;
        }
    }
}

Grammar Grammar::clone() const {
    Grammar copy;
    copy.sampler_.reset(llama_sampler_clone(sampler_.get()));
    copy.first_bytes_   = first_bytes_;
    copy.model_         = model_;
    copy.prefix_closed_ = prefix_closed_;
    copy.names_tokens_  = names_tokens_;
    copy.waiting_       = waiting_;
    return copy;
}

void Grammar::filter(Candidates & list) const {
    constexpr size_t worth_it = 1024;
    if (prefix_closed_ && !waiting_ && list.size() > worth_it) {
        drop_by_first_byte(list);
    }
    llama_token_data_array array = {list.items.data(), list.size(), -1, false};
    llama_sampler_apply(sampler_.get(), &array);
    list.drop_impossible();
}

// Asks about 256 tokens of one byte, and with most grammars is rid of most others.
void Grammar::drop_by_first_byte(Candidates & list) const {
    if (!first_bytes_) {
        first_bytes_ = FirstBytes::of(model_);
    }
    std::array<bool, 257> possible;
    possible[FirstBytes::none] = true;
    for (size_t byte = 0; byte < 256; ++byte) {
        possible[byte] = first_bytes_->token[byte] < 0 || allows(first_bytes_->token[byte]);
    }
    for (llama_token_data & item : list.items) {
        if (!possible[first_bytes_->of_token[static_cast<size_t>(item.id)]]) {
            item.logit = -std::numeric_limits<float>::infinity();
        }
    }
    list.drop_impossible();
}

void Grammar::filter(float * row, size_t n) const {
    Candidates list;
    select_highest(row, n, n, list);
    filter(list);
    size_t next = 0;
    for (const llama_token_data & item : list.items) { // by id
        std::fill(row + next, row + item.id, -std::numeric_limits<float>::infinity());
        next = static_cast<size_t>(item.id) + 1;
    }
    std::fill(row + next, row + n, -std::numeric_limits<float>::infinity());
}

bool Grammar::allows(int32_t token) const {
    llama_token_data       item  = {token, 0.0f, 0.0f};
    llama_token_data_array array = {&item, 1, -1, false};
    llama_sampler_apply(sampler_.get(), &array);
    return !std::isinf(item.logit);
}

bool Grammar::takes(int32_t token) const { return !names_tokens_ || clone().accept(token); }

bool Grammar::accept(int32_t token) {
    if (!allows(token)) {
        return false;
    }
    try {
        llama_sampler_accept(sampler_.get(), token);
    } catch (const std::exception &) { // a trigger whose text the grammar does not go on with
        return false;
    }
    if (waiting_ && waiting_->ends_with(model_->vocab(), token)) {
        waiting_.reset();
    } else if (waiting_ && waiting_->text.size() > Waiting::max_bytes) {
        forget_old_text();
    }
    return true;
}

bool Grammar::Waiting::ends_with(const llama_vocab * vocab, int32_t token) {
    if (std::find(triggers.begin(), triggers.end(), token) != triggers.end()) {
        return true;
    }
    tokens.push_back(token);
    text += token_piece(vocab, token);
    return std::any_of(patterns.begin(), patterns.end(),
                       [this](const std::regex & pattern) { return std::regex_search(text, pattern); });
}

// Starts the grammar again with the newer half of the text.
void Grammar::forget_old_text() {
    if (waiting_->anchored) {
        fail("SamplingError", "grammar_triggers: a pattern that begins with ^ has not matched within " +
                                  std::to_string(Waiting::max_bytes) + " bytes, which is as far as it is looked for");
    }
    Waiting & w    = *waiting_;
    size_t    kept = 0, first = w.tokens.size();
    while (first > 0 && kept < Waiting::max_bytes / 2) {
        kept += token_piece(model_->vocab(), w.tokens[--first]).size();
    }
    w.tokens.erase(w.tokens.begin(), w.tokens.begin() + static_cast<ptrdiff_t>(first));
    w.text.clear();
    llama_sampler_reset(sampler_.get());
    for (const int32_t token : w.tokens) {
        llama_sampler_accept(sampler_.get(), token);
        w.text += token_piece(model_->vocab(), token);
    }
}

} // namespace paceline
