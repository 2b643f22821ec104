// Refuses grammars on which llama.cpp would crash, hang or run out of memory, and texts that are not valid GBNF.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "model.hpp"

namespace paceline {

// Limits of a grammar; beyond them is a GrammarError.
struct GrammarLimits {
    static constexpr size_t   max_bytes       = 1 << 20;
    static constexpr size_t   max_nesting     = 200;       // of parentheses
    static constexpr uint64_t max_elements    = 1'000'000; // after repetitions are written out
    static constexpr uint64_t max_repetitions = 2000;      // llama.cpp's own limit
    static constexpr uint64_t max_hollow      = 10;        // of something that can be empty
    static constexpr uint64_t max_chain       = 1000;      // of rules that begin with the next
    static constexpr uint64_t max_paths       = 20'000;    // alternatives along these chains; time grows with the square
};

void check_grammar(const std::shared_ptr<Model> & model, const std::string & text, const std::string & root);

} // namespace paceline
