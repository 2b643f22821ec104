// A GBNF grammar at its place in the text: which tokens may follow, and going on by one.
// llama.cpp's grammar does the work; the text is checked before (grammar_guard.hpp), as llama.cpp would crash on some.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "draw.hpp"
#include "llama.h"

namespace paceline {

struct GrammarOptions {
    std::string              text;
    std::string              root = "root";
    bool                     lazy = false;     // free text until a trigger
    std::vector<std::string> trigger_patterns; // ECMAScript; the grammar takes over where the first group matched
    std::vector<int32_t>     trigger_tokens;
};

class Grammar {
public:
    // GrammarError where the text is no grammar, or not one that llama.cpp can run.
    Grammar(const llama_vocab * vocab, const GrammarOptions & options);
    Grammar clone() const;

    void filter(Candidates & list) const;     // drops what may not come next, keeping the order
    void filter(float * row, size_t n) const; // the same for a whole row: -inf
    bool allows(int32_t token) const;
    // False where the grammar does not go on with this token; it then has to be built again.
    bool accept(int32_t token);

private:
    struct Free {
        void operator()(llama_sampler * sampler) const { llama_sampler_free(sampler); }
    };

    explicit Grammar(llama_sampler * sampler) : sampler_(sampler) {}

    std::unique_ptr<llama_sampler, Free> sampler_;
};

} // namespace paceline
