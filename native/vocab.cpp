#include "vocab.hpp"

#include <algorithm>
#include <array>
#include <new>

#include "error.hpp"
#include "token_texts.hpp"

namespace paceline {

namespace {

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

} // namespace

Vocab::Vocab(std::shared_ptr<Model> model)
    : model_(std::move(model)), vocab_(model_->vocab()), size_(llama_vocab_n_tokens(vocab_)), guard_(*model_),
      special_tokens_(vocab_) {}

void Vocab::require_token(llama_token token) const {
    if (token < 0 || token >= size_) {
        fail("InvalidParams", "token must be an integer >= 0 and <= " + str(size_ - 1) + ", not " +
                                  str(token) + "; the vocabulary has " + str(size_) + " tokens");
    }
    if (type() == LLAMA_VOCAB_TYPE_NONE) {
        fail("Unsupported", "this model has no vocabulary: its tokens have ids and no texts");
    }
}

std::vector<llama_token> Vocab::encode(const std::string & text, bool add_special, bool parse_special) const {
    std::vector<llama_token> tokens;
    guard_.run(text, add_special, [&] {
        std::vector<SpecialTokens::Piece> pieces;
        for (const std::size_t end : special_tokens_.cuts(text, parse_special)) {
            pieces.push_back({end, parse_special});
        }
        tokens = encode_pieces(text, pieces, add_special);
    });
    return tokens;
}

std::vector<llama_token> Vocab::encode_prompt(const std::string & text, const SpecialTokens::Spans & inputs) const {
    std::vector<llama_token> tokens;
    guard_.run(text, true, [&] {
        std::vector<SpecialTokens::Piece> pieces;
        std::size_t                       begin = 0;
        for (const auto & [end, parse_special] : special_tokens_.pieces_around(text, inputs)) {
            for (const std::size_t cut : special_tokens_.cuts(std::string_view(text).substr(begin, end - begin), parse_special)) {
                pieces.push_back({begin + cut, parse_special});
            }
            begin = end;
        }
        tokens = encode_pieces(text, pieces, true);
    });
    return tokens;
}

std::vector<llama_token> Vocab::encode_pieces(const std::string & text, const std::vector<SpecialTokens::Piece> & pieces,
                                              bool add_special) const {
    if (pieces.size() == 1) {
        return tokenize(text, add_special, pieces.front().parse_special);
    }
    std::vector<llama_token> around = add_special ? tokenize("", true, false) : std::vector<llama_token>();
    const bool               has_prefix = !around.empty() && (add_bos() || type() == LLAMA_VOCAB_TYPE_WPM);
    const auto               suffix     = around.begin() + (has_prefix ? 1 : 0);
    std::vector<llama_token> tokens(around.begin(), suffix);
    std::size_t              begin = 0;
    for (const SpecialTokens::Piece & piece : pieces) {
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
        fail("NotEnoughMemory", "no memory to encode a text of " + str(n_text) + " bytes; encode it in parts");
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
