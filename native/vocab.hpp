// The vocabulary of a model: text to tokens, tokens to bytes. Constant once made; any thread may use it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hardening/special_tokens.hpp"
#include "hardening/tokenizer_guard.hpp"
#include "model.hpp"

namespace paceline {

// The bytes of every token in a row: token i ends at ends[i].
struct PieceTable {
    std::string              bytes;
    std::vector<std::size_t> ends;
};

class Vocab {
public:
    explicit Vocab(std::shared_ptr<Model> model);

    int32_t size() const noexcept { return size_; }
    enum llama_vocab_type type() const noexcept { return llama_vocab_type(vocab_); }
    bool add_bos() const noexcept { return llama_vocab_get_add_bos(vocab_); }
    bool add_eos() const noexcept { return llama_vocab_get_add_eos(vocab_); }
    bool add_sep() const noexcept { return llama_vocab_get_add_sep(vocab_); }

    // Tokens of UTF-8 text, which may hold NUL bytes. Fails as TokenizerGuard::run.
    std::vector<llama_token> encode(const std::string & text, bool add_special, bool parse_special) const;

    // Tokens of a prompt that a template rendered, as with add_special and parse_special; but within `inputs`, the parts
    // that came from the conversation, no control token is recognised. Fails as `encode`.
    std::vector<llama_token> encode_prompt(const std::string & text, const SpecialTokens::Spans & inputs) const;

    // `special`: whether control and unknown tokens show their text; else they have no bytes.
    PieceTable  pieces(bool special) const;
    std::string piece(llama_token token, bool special) const;

    std::string      text(llama_token token) const; // as it stands in the vocabulary
    llama_token_attr attributes(llama_token token) const;
    float            score(llama_token token) const;
    bool             is_control(llama_token token) const;

    std::vector<std::string>                         texts() const;
    std::vector<llama_token>                         eog() const; // end of generation, ascending
    std::vector<llama_token>                         suppressed() const;
    std::vector<std::pair<std::string, llama_token>> special_tokens() const; // by name, only existing tokens

private:
    void require_token(llama_token token) const;
    std::vector<llama_token> encode_pieces(const std::string & text, const std::vector<SpecialTokens::Piece> & pieces,
                                           bool add_special) const;
    std::vector<llama_token> tokenize(std::string_view text, bool add_special, bool parse_special) const;

    std::shared_ptr<Model> model_;
    const llama_vocab *    vocab_;
    int32_t                size_;
    TokenizerGuard         guard_;
    SpecialTokens          special_tokens_;
};

} // namespace paceline
