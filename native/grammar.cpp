#include "grammar.hpp"

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>
#include <mutex>
#include <regex>
#include <utility>

#include "error.hpp"
#include "grammar_guard.hpp"
#include "json-schema-to-grammar.h"

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

FirstBytes::FirstBytes(const llama_vocab * vocab) : of_token(static_cast<size_t>(llama_vocab_n_tokens(vocab)), none) {
    token.fill(-1);
    std::vector<char> piece(4096);
    for (int32_t id = 0; id < llama_vocab_n_tokens(vocab); ++id) {
        const int32_t size = llama_token_to_piece(vocab, id, piece.data(), static_cast<int32_t>(piece.size()), 0, true);
        if (size <= 0 || llama_vocab_is_eog(vocab, id)) {
            continue;
        }
        const auto first                  = static_cast<unsigned char>(piece[0]);
        of_token[static_cast<size_t>(id)] = first;
        if (size == 1) {
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
    const GrammarFacts facts = check_grammar(vocab, options.text, options.root);
    sampler_.reset(compile(vocab, options));
    if (!sampler_) {
        fail("GrammarError", "grammar: llama.cpp refuses it: a rule leads to itself before any character (left recursion)");
    }
    names_tokens_ = facts.names_tokens;
    // A lazy grammar that still waits allows everything, which every byte's token says as well.
    if (facts.prefix_closed) {
        first_bytes_ = FirstBytes::of(model);
    }
}

Grammar Grammar::clone() const {
    Grammar copy;
    copy.sampler_.reset(llama_sampler_clone(sampler_.get()));
    copy.first_bytes_  = first_bytes_;
    copy.names_tokens_ = names_tokens_;
    return copy;
}

void Grammar::filter(Candidates & list) const {
    constexpr size_t worth_it = 1024;
    if (first_bytes_ && list.size() > worth_it) {
        drop_by_first_byte(list);
    }
    llama_token_data_array array = {list.items.data(), list.size(), -1, false};
    llama_sampler_apply(sampler_.get(), &array);
    list.drop_impossible();
}

// Asks about 256 tokens of one byte, and with most grammars is rid of most others.
void Grammar::drop_by_first_byte(Candidates & list) const {
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
    return true;
}

std::string grammar_of_json_schema(const std::string & schema) {
    try {
        return json_schema_to_grammar(common_json::parse(schema), true);
    } catch (const std::exception & error) {
        fail("GrammarError", std::string("json_schema: ") + error.what());
    }
}

} // namespace paceline
