// Parses GBNF as llama.cpp does, for grammar_guard.hpp: reports the place of an error, and returns which rules refer
// to which.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "model.hpp"

namespace paceline {

// The outline of a grammar: which rules each rule refers to, and which rules can be empty.
struct GrammarItem {
    int64_t rule      = -1;    // index, or -1: characters or a token
    bool    optional  = false; // {0,...}, *, ?
    bool    repeats   = false; // more than once
    uint64_t counted = 0;      // how often, if that is counted,
    bool     hollow  = false;  // and whether the repeated part is itself optional
};
using GrammarAlternative = std::vector<GrammarItem>;
struct GrammarRule {
    std::string                     name;
    bool                            defined = false;
    std::vector<GrammarAlternative> alternatives;
};

// GrammarError, with line and column, if the text is not valid GBNF or exceeds GrammarLimits.
std::vector<GrammarRule> outline_grammar(const std::shared_ptr<Model> & model, const std::string & text);

} // namespace paceline
