// The bytes of tokens, and the tokens of a vocabulary in the order of their bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "model.hpp"

namespace paceline {

// The bytes of a token; `special`: whether control and unknown tokens have their text, else they have none. The vocabulary
// must have texts, and the token must be in it.
std::string token_piece(const llama_vocab * vocab, llama_token token, bool special);

class TokenTexts {
public:
    explicit TokenTexts(const Model & model);
    static std::shared_ptr<const TokenTexts> of(const std::shared_ptr<Model> & model); // shared by all callers

    // With the texts of control tokens. Empty if the vocabulary has no texts.
    std::string_view of_token(int32_t token) const {
        const size_t begin = ends_[static_cast<size_t>(token)];
        return std::string_view(bytes_).substr(begin, ends_[static_cast<size_t>(token) + 1] - begin);
    }
    const std::vector<int32_t> & sorted() const { return sorted_; } // tokens
    uint32_t rank(int32_t token) const { return ranks_[static_cast<size_t>(token)]; } // in the order

private:
    std::string           bytes_;
    std::vector<size_t>   ends_; // of the token before
    std::vector<int32_t>  sorted_;
    std::vector<uint32_t> ranks_;
};

} // namespace paceline
