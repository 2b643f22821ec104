// A GBNF grammar and the position in the text: which tokens are allowed next, and accepting one.
// llama.cpp parses the grammar after grammar_guard.hpp has checked it, since it would crash on some; grammar_matcher.hpp
// matches the text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "draw.hpp"
#include "grammar_matcher.hpp"
#include "model.hpp"
#include "token_texts.hpp"
#include "trigger_pattern.hpp"

namespace paceline {

// A regular expression; full: the whole text has to match it.
struct PatternTrigger {
    std::string pattern;
    bool        full = false;
};

struct GrammarOptions {
    std::string              text;
    std::string              root = "root";
    std::string              prefix;        // text of the prompt's end that the grammar begins with; not with lazy
    bool                     lazy = false;  // free text until a trigger, with which the grammar starts
    std::vector<std::string> trigger_words; // literal; with a ^ before: only at the beginning of the text
    std::vector<int32_t>     trigger_tokens;
    std::vector<PatternTrigger> trigger_patterns;
};

// Not safe to call from several threads at once, not even const functions. A copy continues independently.
class Grammar {
public:
    // GrammarError if the text is not valid GBNF or llama.cpp cannot read it.
    Grammar(const std::shared_ptr<Model> & model, const GrammarOptions & options);

    // Each raises SamplingError if the grammar is too ambiguous to match the text; nothing changed.
    void filter(Candidates & list) const;     // drops tokens that are not allowed next, keeping the order
    void filter(float * row, size_t n) const; // the same for a whole row: -inf
    bool allows(int32_t token) const;
    bool may_end() const { return waiting_ || matcher_.complete(); } // text before a trigger is free
    bool is_complete() const { return !waiting_ && matcher_.exhausted(); }
    // Whether this is no token with which the grammar would begin, at a text that it does not allow. SamplingError if
    // `work_left` is used up.
    bool may_begin_with(int32_t token, uint64_t & work_left) const;
    // Whether the text is thinking, in which no trigger is looked for; without an effect once the grammar has begun.
    void set_asleep(bool asleep) { asleep_ = asleep; }
    bool asleep() const { return asleep_ && waiting_.has_value(); }
    bool accept(int32_t token); // false if the token is not allowed next; nothing changed

private:
    // A lazy grammar before its trigger: the end of the text, in which a trigger may have begun.
    struct Waiting {
        static constexpr size_t max_text = 1 << 18; // bytes; a match of a pattern that is longer is not found

        std::vector<std::string>                words, first_words; // anywhere, or at the beginning of the text
        std::vector<int32_t>                    triggers;
        size_t                                  longest = 0;
        std::string                             text;
        size_t                                  dropped = 0; // bytes from the beginning
        std::vector<TriggerSearch>              searches;
        std::vector<std::pair<int32_t, size_t>> tokens;       // and their ends in it

        struct Next { // after another token
            std::vector<TriggerSearch> searches;
            std::optional<size_t>      start; // start of the first trigger
        };

        Next next(std::string_view bytes, uint64_t & work_left) const;
        void add(int32_t token, std::string_view bytes, Next && next);
        void shorten();
    };

    bool matches(int32_t token) const;
    bool is_trigger(int32_t token) const;
    bool accept_waiting(int32_t token);
    bool begin_with(GrammarMatcher & begun, int32_t token, std::string_view bytes, size_t start, uint64_t & work_left) const;

    std::shared_ptr<Model>            model_;
    std::shared_ptr<const TokenTexts> texts_;
    mutable GrammarMatcher            matcher_;
    std::optional<Waiting>            waiting_;
    bool                              asleep_ = false;
};

} // namespace paceline
