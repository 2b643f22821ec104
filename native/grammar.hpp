// A GBNF grammar at its place in the text: which tokens may follow, and going on by one.
// llama.cpp's grammar does the work; the text is checked before (grammar_guard.hpp), as llama.cpp would crash on some.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <regex>
#include <string>
#include <vector>

#include "draw.hpp"
#include "llama.h"
#include "model.hpp"

namespace paceline {

struct GrammarOptions {
    std::string              text;
    std::string              root = "root";
    bool                     lazy = false;     // free text until a trigger
    std::vector<std::string> trigger_patterns; // ECMAScript; the grammar takes over where the first group matched
    std::vector<int32_t>     trigger_tokens;
};

// The bytes that a token stands for, those of control tokens included.
std::string token_piece(const llama_vocab * vocab, int32_t token);

// The first byte of every token's text, and for every byte the token that is this byte alone.
struct FirstBytes {
    static constexpr uint16_t none = 256; // a token without text, or one that ends the text

    explicit FirstBytes(const llama_vocab * vocab);
    static std::shared_ptr<const FirstBytes> of(const std::shared_ptr<Model> & model); // shared between grammars

    std::vector<uint16_t>    of_token;
    std::array<int32_t, 256> token; // -1: there is none
};

// Not safe to call from several threads at once, not even what is const.
class Grammar {
public:
    // GrammarError where the text is no grammar, or not one that llama.cpp can run.
    Grammar(const std::shared_ptr<Model> & model, const GrammarOptions & options);
    Grammar clone() const;

    void filter(Candidates & list) const;     // drops what may not come next, keeping the order
    void filter(float * row, size_t n) const; // the same for a whole row: -inf
    bool allows(int32_t token) const;
    // Whether accept would take a token that `allows` and `filter` let through. Not always where the grammar names
    // tokens: llama.cpp lets pass what reaches a named token in its middle, and then fails to go on.
    bool takes(int32_t token) const;
    // False where the grammar does not go on with this token; it then has to be built again.
    bool accept(int32_t token);

private:
    struct Free {
        void operator()(llama_sampler * sampler) const { llama_sampler_free(sampler); }
    };

    // A lazy grammar before its trigger. llama.cpp keeps all text since the beginning and searches it again with every
    // token, by a std::regex that recurses along it; here the text is kept short.
    struct Waiting {
        static constexpr size_t max_bytes = 8192;

        std::vector<std::regex> patterns;
        std::vector<int32_t>    triggers;
        bool                    anchored = false; // a pattern wants the text from its beginning
        std::string             text;
        std::vector<int32_t>    tokens;

        bool ends_with(const llama_vocab * vocab, int32_t token); // whether this token brings the trigger
    };

    Grammar() = default;
    void drop_by_first_byte(Candidates & list) const;
    void forget_old_text();

    std::unique_ptr<llama_sampler, Free> sampler_;
    std::shared_ptr<Model>               model_;
    bool                                 prefix_closed_ = false; // GrammarFacts
    bool                                 names_tokens_  = false;
    std::optional<Waiting>               waiting_;

    mutable std::shared_ptr<const FirstBytes> first_bytes_; // made when first needed
};

} // namespace paceline
