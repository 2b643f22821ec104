// The vocabulary of a model: text to tokens, tokens to bytes. Constant once made; any thread may use it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "model.hpp"
#include "specials.hpp"

namespace paceline {

// The bytes of every token, one after the other: token i ends at ends[i].
struct PieceTable {
    std::string              bytes;
    std::vector<std::size_t> ends;
};

// The bytes that a token stands for; `special` as below. The vocabulary must have texts, and the token be one of it.
std::string token_piece(const llama_vocab * vocab, llama_token token, bool special);

class Vocab {
public:
    explicit Vocab(std::shared_ptr<Model> model);

    int32_t size() const noexcept { return size_; }
    enum llama_vocab_type type() const noexcept { return llama_vocab_type(vocab_); }
    bool add_bos() const noexcept { return llama_vocab_get_add_bos(vocab_); }
    bool add_eos() const noexcept { return llama_vocab_get_add_eos(vocab_); }
    bool add_sep() const noexcept { return llama_vocab_get_add_sep(vocab_); }

    // Tokens of UTF-8 text, which may hold NUL bytes. Fails with TextTooLong where encoding might take more memory
    // than `max_encode_bytes`, with Unsupported where the vocabulary cannot encode.
    std::vector<llama_token> encode(const std::string & text, bool add_special, bool parse_special) const;

    // Tokens of a prompt that a template made, as with add_special and parse_special; but within `inputs`, stretches of the
    // text that came from outside, nothing is taken for a control token. Fails as `encode`.
    std::vector<llama_token> encode_prompt(const std::string & text, const Specials::Spans & inputs) const;

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
    std::vector<std::pair<std::string, llama_token>> special_tokens() const; // by name, only those there are

    // What encoding may take at most: half of the machine's memory, but no more than 8 GiB.
    static std::size_t max_encode_bytes();

private:
    void require_token(llama_token token) const;
    void require_encodable(bool add_special) const;
    void require_room(std::size_t text_bytes, std::size_t run) const;
    void require_patience(const std::string & text) const;
    bool lacks_single_bytes() const;

    std::size_t num_spelt(std::string_view text) const;

    template <typename Work> void on_fitting_stack(std::size_t run, Work work) const;

    std::vector<llama_token> encode_here(const std::string & text, bool add_special, bool parse_special) const;
    std::vector<llama_token> encode_pieces(const std::string & text, const std::vector<Specials::Piece> & pieces,
                                           bool add_special) const;
    std::vector<llama_token> tokenize(std::string_view text, bool add_special, bool parse_special) const;

    std::shared_ptr<Model> model_;
    const llama_vocab *    vocab_;
    int32_t                size_;
    Specials               specials_;
    std::string            pre_tokenizer_; // of BPE vocabularies
    std::string            flaw_;          // why this vocabulary cannot encode, if it cannot
    std::vector<bool>      single_characters_; // of SentencePiece vocabularies: those that are tokens, by code point
};

} // namespace paceline
