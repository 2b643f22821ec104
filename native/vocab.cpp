#include "vocab.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <new>

#include <unistd.h>

#include "error.hpp"
#include "runs.hpp"
#include "stack.hpp"

namespace paceline {

namespace {

// Measured with gcc 12 at -O3 over all pre-tokenizers: those that fall back on std::regex recurse once a character
// and take 320 bytes of stack each time, whatever the characters; beside that 12 KiB. Other builds need more.
#if defined(__SANITIZE_ADDRESS__) || !defined(NDEBUG)
constexpr std::size_t stack_per_character = 8192;
#else
constexpr std::size_t stack_per_character = 1024;
#endif
constexpr std::size_t stack_base = 256 * 1024;
constexpr std::size_t inline_run = 256 * 1024 / stack_per_character; // fits a caller's stack of 512 KiB

// Measured over all kinds of vocabulary: at most 130 bytes of heap a byte of text.
constexpr std::size_t heap_per_byte = 256;

using SpecialGetter = llama_token (*)(const llama_vocab *);
constexpr std::array<std::pair<const char *, SpecialGetter>, 13> special_getters = {{
    {"bos", llama_vocab_bos},
    {"eos", llama_vocab_eos},
    {"eot", llama_vocab_eot},
    {"sep", llama_vocab_sep},
    {"nl", llama_vocab_nl},
    {"pad", llama_vocab_pad},
    {"mask", llama_vocab_mask},
    {"fim_pre", llama_vocab_fim_pre},
    {"fim_suf", llama_vocab_fim_suf},
    {"fim_mid", llama_vocab_fim_mid},
    {"fim_pad", llama_vocab_fim_pad},
    {"fim_rep", llama_vocab_fim_rep},
    {"fim_sep", llama_vocab_fim_sep},
}};

std::string metadata(const Model & model, const char * key) {
    std::array<char, 64> value{};
    llama_model_meta_val_str(model.get(), key, value.data(), value.size());
    return value.data();
}

// A vocabulary that llama.cpp would not survive encoding with: the reason, or nothing.
std::string find_flaw(const Model & model) {
    const llama_vocab * vocab = model.vocab();
    const auto          type  = llama_vocab_type(vocab);
    if (type == LLAMA_VOCAB_TYPE_NONE) {
        return "this model has no vocabulary and cannot encode text; hand in token ids";
    }
    const std::string kind = metadata(model, "tokenizer.ggml.model");
    if (type == LLAMA_VOCAB_TYPE_BPE && metadata(model, "tokenizer.ggml.pre") == "whitespace" && kind != "whitespace") {
        return "the pre-tokenizer 'whitespace' works only with the tokenizer model 'whitespace', not with '" + kind + "'";
    }
    return "";
}

} // namespace

Vocab::Vocab(std::shared_ptr<Model> model)
    : model_(std::move(model)), vocab_(model_->vocab()), size_(llama_vocab_n_tokens(vocab_)), specials_(vocab_),
      pre_tokenizer_(type() == LLAMA_VOCAB_TYPE_BPE ? metadata(*model_, "tokenizer.ggml.pre") : ""),
      flaw_(find_flaw(*model_)) {
    if (type() == LLAMA_VOCAB_TYPE_SPM) {
        single_characters_.resize(0x110000);
        single_characters_[' '] = true; // in the vocabulary as U+2581
        for (const std::string & text : texts()) {
            if (!text.empty() && first_character(text).second == text.size()) {
                single_characters_[first_character(text).first] = true;
            }
        }
    }
    if (type() == LLAMA_VOCAB_TYPE_RWKV && lacks_single_bytes()) {
        flaw_ = "this vocabulary has longer tokens that begin with a byte that is no token itself";
    }
}

std::size_t Vocab::max_encode_bytes() {
    constexpr std::size_t cap   = std::size_t{8} << 30;
    const long            pages = sysconf(_SC_PHYS_PAGES);
    const long            page  = sysconf(_SC_PAGESIZE);
    return pages > 0 && page > 0 ? std::min(cap, static_cast<std::size_t>(pages) / 2 * page) : cap;
}

void Vocab::require_token(llama_token token) const {
    if (token < 0 || token >= size_) {
        fail("InvalidParams", "token must be an integer >= 0 and <= " + std::to_string(size_ - 1) + ", not " +
                                  std::to_string(token) + "; the vocabulary has " + std::to_string(size_) + " tokens");
    }
    if (type() == LLAMA_VOCAB_TYPE_NONE) {
        fail("Unsupported", "this model has no vocabulary, only numbers of tokens");
    }
}

// llama.cpp asserts all of this.
void Vocab::require_encodable(bool add_special) const {
    if (!flaw_.empty()) {
        fail("Unsupported", flaw_);
    }
    const bool is_wpm       = type() == LLAMA_VOCAB_TYPE_WPM;
    const bool lacks_prefix = (is_wpm || add_bos()) && llama_vocab_bos(vocab_) == LLAMA_TOKEN_NULL;
    const bool lacks_suffix = is_wpm ? llama_vocab_sep(vocab_) == LLAMA_TOKEN_NULL
                                     : add_eos() && llama_vocab_eos(vocab_) == LLAMA_TOKEN_NULL;
    if (add_special && (lacks_prefix || lacks_suffix)) {
        fail("Unsupported", "the vocabulary wants special tokens around a text but lacks them; use add_special=False");
    }
}

void Vocab::require_room(std::size_t text_bytes, std::size_t run) const {
    const std::size_t limit     = max_encode_bytes();
    const std::size_t run_limit = limit / stack_per_character;
    const std::size_t int_limit = std::numeric_limits<int32_t>::max() / 4; // room for escaped blanks
    const std::size_t max_bytes = std::min(limit / heap_per_byte, int_limit);
    if (text_bytes > max_bytes) {
        fail("TextTooLong", "text has " + std::to_string(text_bytes) + " bytes, and at most " +
                                std::to_string(max_bytes) + " can be encoded at once here; encode it in parts");
    }
    if (type() == LLAMA_VOCAB_TYPE_BPE && run > run_limit) {
        fail("TextTooLong", "text has " + std::to_string(run) + " characters without a line break or a wider gap, and " +
                                "at most " + std::to_string(run_limit) + " can be encoded here; encode it in parts");
    }
}

// Three pre-tokenizers look at a whole run again from each of its characters, and SentencePiece vocabularies copy all
// tokens for each character they have to spell in bytes. Measured, in the order below: 8,000 blanks before a digit 3.2 s,
// 8,000 digits 3.1 s, 200,000 blanks 12.7 s, 1,000,000 line breaks 70 s. The bounds are about 10 s, and 40 s for the last.
void Vocab::require_patience(const std::string & text) const {
    constexpr double bound = 1 << 27;
    const bool       slow  = (pre_tokenizer_ == "deepseek-llm" && squared_runs(text, blank_length) > bound) ||
                      (pre_tokenizer_ == "superbpe" && squared_runs(text, digit_length) > bound) ||
                      (pre_tokenizer_ == "jais-2" && squared_runs(text, blank_length) > 256 * bound);
    if (slow) {
        fail("TextTooLong", "text has runs of blanks or digits that the pre-tokenizer '" + pre_tokenizer_ +
                                "' would take minutes for; shorten them or encode it in parts");
    }
    const auto spelt = static_cast<double>(num_spelt(text));
    if (spelt * static_cast<double>(text.size()) > 4096 * bound) {
        fail("TextTooLong", "text has " + std::to_string(text.size()) + " bytes with " + std::to_string(num_spelt(text)) +
                                " characters that are no tokens, which would take minutes; encode it in parts");
    }
}

// How many characters a SentencePiece vocabulary has to spell in bytes.
std::size_t Vocab::num_spelt(std::string_view text) const {
    std::size_t count = 0;
    for (std::size_t i = 0; i < text.size() && !single_characters_.empty();) {
        const auto [character, length] = first_character(text.substr(i));
        count += !single_characters_[character];
        i += length;
    }
    return count;
}

template <typename Work> void Vocab::on_fitting_stack(std::size_t run, Work work) const {
    if (type() != LLAMA_VOCAB_TYPE_BPE || run <= inline_run) {
        work();
    } else {
        run_on_stack(stack_base + run * stack_per_character, work);
    }
}

std::vector<llama_token> Vocab::encode(const std::string & text, bool add_special, bool parse_special) const {
    require_encodable(add_special);
    const std::size_t run = longest_run(text);
    require_room(text.size(), run);
    require_patience(text);
    std::vector<llama_token> tokens;
    on_fitting_stack(run, [&] { tokens = encode_here(text, add_special, parse_special); });
    return tokens;
}

std::vector<llama_token> Vocab::encode_prompt(const std::string & text, const Specials::Spans & inputs) const {
    require_encodable(true);
    const std::size_t run = longest_run(text);
    require_room(text.size(), run);
    require_patience(text);
    std::vector<llama_token> tokens;
    on_fitting_stack(run, [&] {
        std::vector<Specials::Piece> pieces;
        std::size_t                  begin = 0;
        for (const auto & [end, parse_special] : specials_.guarded(text, inputs)) {
            for (const std::size_t cut : specials_.cuts(std::string_view(text).substr(begin, end - begin), parse_special)) {
                pieces.push_back({begin + cut, parse_special});
            }
            begin = end;
        }
        tokens = pieces.size() == 1 ? tokenize(text, true, pieces.front().parse_special) : encode_pieces(text, pieces, true);
    });
    return tokens;
}

std::vector<llama_token> Vocab::encode_here(const std::string & text, bool add_special, bool parse_special) const {
    std::vector<Specials::Piece> pieces;
    for (const std::size_t end : specials_.cuts(text, parse_special)) {
        pieces.push_back({end, parse_special});
    }
    return pieces.size() == 1 ? tokenize(text, add_special, parse_special) : encode_pieces(text, pieces, add_special);
}

std::vector<llama_token> Vocab::encode_pieces(const std::string & text, const std::vector<Specials::Piece> & pieces,
                                              bool add_special) const {
    std::vector<llama_token> around = add_special ? tokenize("", true, false) : std::vector<llama_token>();
    const bool               has_prefix = !around.empty() && (add_bos() || type() == LLAMA_VOCAB_TYPE_WPM);
    const auto               suffix     = around.begin() + (has_prefix ? 1 : 0);
    std::vector<llama_token> tokens(around.begin(), suffix);
    std::size_t              begin = 0;
    for (const Specials::Piece & piece : pieces) {
        const auto part = tokenize(std::string_view(text).substr(begin, piece.end - begin), false, piece.parse_special);
        tokens.insert(tokens.end(), part.begin(), part.end());
        begin = piece.end;
    }
    tokens.insert(tokens.end(), suffix, around.end());
    return tokens;
}

std::vector<llama_token> Vocab::tokenize(std::string_view text, bool add_special, bool parse_special) const {
    const auto               n_text = static_cast<int32_t>(text.size());
    std::vector<llama_token> tokens(text.size() + 16);
    auto                     encode_into = [&] {
        return llama_tokenize(vocab_, text.data(), n_text, tokens.data(), static_cast<int32_t>(tokens.size()), add_special,
                              parse_special);
    };
    int32_t count = 0;
    try {
        count = encode_into();
        if (count < 0) { // normalisation and byte tokens can make more tokens than bytes
            tokens.resize(-static_cast<std::size_t>(count));
            count = encode_into();
        }
    } catch (const std::bad_alloc &) {
        fail("NotEnoughMemory", "no memory to encode a text of " + std::to_string(n_text) + " bytes; encode it in parts");
    } catch (const std::exception & error) { // a byte without a token, or a broken table in the file
        fail("Unsupported", std::string("the vocabulary cannot encode this text: ") + error.what());
    }
    tokens.resize(std::max(count, 0));
    const auto outside = [this](llama_token token) { return token < 0 || token >= size_; };
    if (count < 0 || std::any_of(tokens.begin(), tokens.end(), outside)) {
        fail("Unsupported", "the vocabulary has no token for a part of this text, nor one for what is unknown");
    }
    return tokens;
}

std::string token_piece(const llama_vocab * vocab, llama_token token, bool special) {
    std::string   bytes(32, '\0');
    const int32_t length = llama_token_to_piece(vocab, token, bytes.data(), 32, 0, special);
    if (length < 0) {
        bytes.resize(-static_cast<std::size_t>(length));
        llama_token_to_piece(vocab, token, bytes.data(), -length, 0, special);
    } else {
        bytes.resize(length);
    }
    return bytes;
}

std::string Vocab::piece(llama_token token, bool special) const {
    require_token(token);
    return token_piece(vocab_, token, special);
}

PieceTable Vocab::pieces(bool special) const {
    PieceTable table;
    table.ends.reserve(size_);
    for (llama_token token = 0; token < size_; ++token) {
        table.bytes += piece(token, special);
        table.ends.push_back(table.bytes.size());
    }
    return table;
}

std::string Vocab::text(llama_token token) const {
    require_token(token);
    return llama_vocab_get_text(vocab_, token);
}

llama_token_attr Vocab::attributes(llama_token token) const {
    require_token(token);
    return llama_vocab_get_attr(vocab_, token);
}

float Vocab::score(llama_token token) const {
    require_token(token);
    return llama_vocab_get_score(vocab_, token);
}

bool Vocab::is_control(llama_token token) const {
    require_token(token);
    return llama_vocab_is_control(vocab_, token);
}

// Where the longest match of an RWKV vocabulary fails after its first byte, llama.cpp begins the text anew, for ever.
bool Vocab::lacks_single_bytes() const {
    std::array<bool, 256> begins{}, is_token{};
    for (llama_token token = 0; token < size_; ++token) {
        const std::string bytes = piece(token, true);
        if (!bytes.empty()) {
            (bytes.size() == 1 ? is_token : begins)[static_cast<unsigned char>(bytes[0])] = true;
        }
    }
    return !std::equal(begins.begin(), begins.end(), is_token.begin(), [](bool a, bool b) { return !a || b; });
}

std::vector<std::string> Vocab::texts() const {
    std::vector<std::string> texts;
    texts.reserve(size_);
    for (llama_token token = 0; token < size_; ++token) {
        texts.push_back(text(token));
    }
    return texts;
}

std::vector<llama_token> Vocab::eog() const {
    std::vector<llama_token> tokens;
    for (llama_token token = 0; token < size_; ++token) {
        if (llama_vocab_is_eog(vocab_, token)) {
            tokens.push_back(token);
        }
    }
    return tokens;
}

std::vector<llama_token> Vocab::suppressed() const {
    int32_t             count = 0;
    const llama_token * first = llama_vocab_get_suppress_tokens(vocab_, &count);
    return first ? std::vector<llama_token>(first, first + count) : std::vector<llama_token>();
}

std::vector<std::pair<std::string, llama_token>> Vocab::special_tokens() const {
    std::vector<std::pair<std::string, llama_token>> tokens;
    for (const auto & [name, getter] : special_getters) {
        const llama_token token = getter(vocab_);
        if (token >= 0 && token < size_) {
            tokens.emplace_back(name, token);
        }
    }
    return tokens;
}

} // namespace paceline
