// The rules of a grammar, as llama.cpp reads them from GBNF: a list of elements for the matcher (grammar_matcher.hpp).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "llama.h"

namespace paceline {

struct GrammarRules {
    // The numbers are llama.cpp's.
    enum class Kind : uint32_t {
        end         = 0, // of a rule
        alternative = 1, // of an alternative, with another behind it
        rule        = 2,
        character   = 3, // this one, or the first of several
        excluded    = 4, // the first of characters that may not be
        upto        = 5, // makes a range of the element before
        also        = 6, // one more character
        any         = 7,
        token       = 8,
        not_token   = 9,
    };
    struct Element {
        Kind     kind;
        uint32_t value;
    };

    bool ends(uint32_t at) const { return elements[at].kind <= Kind::alternative; }

    std::vector<Element>  elements; // the first is an end
    std::vector<uint32_t> starts;   // the start of each rule; the text begins with rule 0
};

// GrammarError if llama.cpp refuses a text that check_grammar accepted.
std::shared_ptr<const GrammarRules> read_grammar(const llama_vocab * vocab, const std::string & text,
                                                 const std::string & root);

} // namespace paceline
