// Refuses texts and vocabularies on which llama.cpp's tokenizer would abort, overflow the stack, exhaust memory or take
// minutes, and encodes the others on a stack that is large enough.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "model.hpp"

namespace paceline {

// Of one vocabulary. Constant once made; any thread may use it.
class TokenizerGuard {
public:
    explicit TokenizerGuard(const Model & model);

    // Calls `encode`, which encodes `text`; `add_special`: with the special tokens around it. Fails before that with
    // Unsupported if the vocabulary cannot encode, with TextTooLong if it might take more than max_encode_bytes() of
    // memory, or minutes.
    void run(const std::string & text, bool add_special, const std::function<void()> & encode) const;

    // Memory that one call may take: half of the machine's, at most 8 GiB.
    static std::size_t max_encode_bytes();

private:
    void        require_encodable(bool add_special) const;
    void        require_memory(std::size_t text_bytes, std::size_t run) const;
    void        require_time(const std::string & text) const;
    std::size_t num_byte_fallbacks(std::string_view text) const;

    const llama_vocab *   vocab_;
    enum llama_vocab_type type_;
    std::string           pre_tokenizer_;     // of BPE vocabularies
    std::string           flaw_;              // why this vocabulary cannot encode; empty if it can
    std::vector<bool>     single_characters_; // of SentencePiece vocabularies: which code points are tokens
};

} // namespace paceline
