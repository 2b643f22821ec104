#include "grammar.hpp"

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>
#include <regex>

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

Grammar::Grammar(const llama_vocab * vocab, const GrammarOptions & options) {
    if (llama_vocab_type(vocab) == LLAMA_VOCAB_TYPE_NONE) {
        fail("Unsupported", "grammar: this model has no vocabulary of text");
    }
    check_triggers(vocab, options);
    check_grammar(vocab, options.text, options.root);
    sampler_.reset(compile(vocab, options));
    if (!sampler_) {
        fail("GrammarError", "grammar: llama.cpp refuses it: a rule leads to itself before any character (left recursion)");
    }
}

Grammar Grammar::clone() const { return Grammar(llama_sampler_clone(sampler_.get())); }

void Grammar::filter(Candidates & list) const {
    llama_token_data_array array = {list.items.data(), list.size(), -1, false};
    llama_sampler_apply(sampler_.get(), &array);
    const size_t kept = static_cast<size_t>(
        std::count_if(list.items.begin(), list.items.begin() + static_cast<ptrdiff_t>(list.sorted()),
                      [](const llama_token_data & item) { return !std::isinf(item.logit); }));
    std::erase_if(list.items, [](const llama_token_data & item) { return std::isinf(item.logit); });
    list.set_sorted(kept);
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

bool Grammar::accept(int32_t token) {
    if (!allows(token)) {
        return false;
    }
    try {
        llama_sampler_accept(sampler_.get(), token);
    } catch (const std::exception &) { // a trigger whose text the grammar does not go on with
        return false;
    }
    return true;
}

} // namespace paceline
