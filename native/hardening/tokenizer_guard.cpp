#include "tokenizer_guard.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

#include <unistd.h>

#include "error.hpp"
#include "stack.hpp"
#include "text_runs.hpp"
#include "token_texts.hpp"

namespace paceline {

namespace {

// Measured with gcc 12 at -O3 over all pre-tokenizers: pre-tokenizers that fall back on std::regex recurse once a character
// and take 320 bytes of stack each time, for any characters, and 12 KiB in addition. Other builds need more.
#if defined(__SANITIZE_ADDRESS__) || !defined(NDEBUG)
constexpr std::size_t stack_per_character = 8192;
#else
constexpr std::size_t stack_per_character = 1024;
#endif
constexpr std::size_t stack_base = 256 * 1024;
constexpr std::size_t inline_run = 256 * 1024 / stack_per_character; // fits a caller's stack of 512 KiB

// Measured over all kinds of vocabulary: at most 130 bytes of heap a byte of text.
constexpr std::size_t heap_per_byte = 256;

std::string metadata(const Model & model, const char * key) {
    std::array<char, 64> value{};
    llama_model_meta_val_str(model.get(), key, value.data(), value.size());
    return value.data();
}

// llama.cpp loops forever on a byte that begins longer tokens of an RWKV vocabulary but is no token itself.
bool lacks_single_bytes(const Model & model) {
    std::array<bool, 256> begins{}, is_token{};
    for (llama_token token = 0; token < model.n_vocab(); ++token) {
        const std::string bytes = token_piece(model.vocab(), token, true);
        if (!bytes.empty()) {
            (bytes.size() == 1 ? is_token : begins)[static_cast<unsigned char>(bytes[0])] = true;
        }
    }
    return !std::equal(begins.begin(), begins.end(), is_token.begin(), [](bool a, bool b) { return !a || b; });
}

// The reason why llama.cpp would abort or hang while encoding with this vocabulary; empty if there is none.
std::string find_flaw(const Model & model) {
    const auto type = llama_vocab_type(model.vocab());
    if (type == LLAMA_VOCAB_TYPE_NONE) {
        return "this model has no vocabulary and cannot encode text; pass token ids instead";
    }
    const std::string kind = metadata(model, "tokenizer.ggml.model");
    if (type == LLAMA_VOCAB_TYPE_BPE && metadata(model, "tokenizer.ggml.pre") == "whitespace" && kind != "whitespace") {
        return "the pre-tokenizer 'whitespace' works only with the tokenizer model 'whitespace', not with '" + kind + "'";
    }
    if (type == LLAMA_VOCAB_TYPE_RWKV && lacks_single_bytes(model)) {
        return "this vocabulary has longer tokens that begin with a byte that is no token itself";
    }
    return "";
}

std::vector<bool> find_single_characters(const Model & model) {
    std::vector<bool> found;
    if (llama_vocab_type(model.vocab()) == LLAMA_VOCAB_TYPE_SPM) {
        found.resize(0x110000);
        found[' '] = true; // in the vocabulary as U+2581
        for (llama_token token = 0; token < model.n_vocab(); ++token) {
            const std::string_view text = llama_vocab_get_text(model.vocab(), token);
            if (!text.empty() && first_character(text).second == text.size()) {
                found[first_character(text).first] = true;
            }
        }
    }
    return found;
}

} // namespace

TokenizerGuard::TokenizerGuard(const Model & model)
    : vocab_(model.vocab()), type_(llama_vocab_type(vocab_)),
      pre_tokenizer_(type_ == LLAMA_VOCAB_TYPE_BPE ? metadata(model, "tokenizer.ggml.pre") : ""), flaw_(find_flaw(model)),
      single_characters_(find_single_characters(model)) {}

std::size_t TokenizerGuard::max_encode_bytes() {
    constexpr std::size_t cap   = std::size_t{8} << 30;
    const long            pages = sysconf(_SC_PHYS_PAGES);
    const long            page  = sysconf(_SC_PAGESIZE);
    return pages > 0 && page > 0 ? std::min(cap, static_cast<std::size_t>(pages) / 2 * page) : cap;
}

void TokenizerGuard::run(const std::string & text, bool add_special, const std::function<void()> & encode) const {
    require_encodable(add_special);
    const std::size_t run = longest_run(text);
    require_memory(text.size(), run);
    require_time(text);
    if (type_ != LLAMA_VOCAB_TYPE_BPE || run <= inline_run) {
        encode();
    } else {
        run_on_stack(stack_base + run * stack_per_character, encode);
    }
}

// llama.cpp asserts all of this.
void TokenizerGuard::require_encodable(bool add_special) const {
    if (!flaw_.empty()) {
        fail("Unsupported", flaw_);
    }
    const bool is_wpm       = type_ == LLAMA_VOCAB_TYPE_WPM;
    const bool lacks_prefix = (is_wpm || llama_vocab_get_add_bos(vocab_)) && llama_vocab_bos(vocab_) == LLAMA_TOKEN_NULL;
    const bool lacks_suffix = is_wpm ? llama_vocab_sep(vocab_) == LLAMA_TOKEN_NULL
                                     : llama_vocab_get_add_eos(vocab_) && llama_vocab_eos(vocab_) == LLAMA_TOKEN_NULL;
    if (add_special && (lacks_prefix || lacks_suffix)) {
        fail("Unsupported", "the vocabulary requires special tokens around a text but lacks them; use add_special=False");
    }
}

void TokenizerGuard::require_memory(std::size_t text_bytes, std::size_t run) const {
    const std::size_t limit     = max_encode_bytes();
    const std::size_t run_limit = limit / stack_per_character;
    const std::size_t int_limit = std::numeric_limits<int32_t>::max() / 4; // room for escaped blanks
    const std::size_t max_bytes = std::min(limit / heap_per_byte, int_limit);
    if (text_bytes > max_bytes) {
        fail("TextTooLong", "text has " + str(text_bytes) + " bytes, and at most " + str(max_bytes) +
                                " can be encoded at once here; encode it in parts");
    }
    if (type_ == LLAMA_VOCAB_TYPE_BPE && run > run_limit) {
        fail("TextTooLong", "text has " + str(run) + " characters without a line break or a wider gap, and at most " +
                                str(run_limit) + " can be encoded here; encode it in parts");
    }
}

// Three pre-tokenizers match a whole run again from each of its characters, and SentencePiece vocabularies copy all
// tokens for each character that falls back to bytes. Measured, in the order below: 8,000 blanks before a digit 3.2 s,
// 8,000 digits 3.1 s, 200,000 blanks 12.7 s, 1,000,000 line breaks 70 s. The bounds are about 10 s, and 40 s for the last.
void TokenizerGuard::require_time(const std::string & text) const {
    constexpr double bound = 1 << 27;
    const bool       slow  = (pre_tokenizer_ == "deepseek-llm" && squared_runs(text, blank_length) > bound) ||
                      (pre_tokenizer_ == "superbpe" && squared_runs(text, digit_length) > bound) ||
                      (pre_tokenizer_ == "jais-2" && squared_runs(text, blank_length) > 256 * bound);
    if (slow) {
        fail("TextTooLong", "text has runs of blanks or digits that the pre-tokenizer '" + pre_tokenizer_ +
                                "' would take minutes for; shorten them or encode it in parts");
    }
    const std::size_t fallbacks = num_byte_fallbacks(text);
    if (static_cast<double>(fallbacks) * static_cast<double>(text.size()) > 4096 * bound) {
        fail("TextTooLong", "text has " + str(text.size()) + " bytes with " + str(fallbacks) +
                                " characters that are no tokens, which would take minutes; encode it in parts");
    }
}

// Number of characters that a SentencePiece vocabulary has to encode as bytes.
std::size_t TokenizerGuard::num_byte_fallbacks(std::string_view text) const {
    std::size_t count = 0;
    for (std::size_t i = 0; i < text.size() && !single_characters_.empty();) {
        const auto [character, length] = first_character(text.substr(i));
        count += !single_characters_[character];
        i += length;
    }
    return count;
}

} // namespace paceline
