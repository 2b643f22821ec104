#include "special_tokens.hpp"

#include <algorithm>
#include <cctype>

namespace paceline {

namespace {

constexpr std::size_t tokens_per_piece = 512;

bool is_blank(char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; }

} // namespace

SpecialTokens::SpecialTokens(const llama_vocab * vocab) {
    constexpr int hidden  = LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_UNKNOWN;
    const int32_t n_vocab = llama_vocab_type(vocab) == LLAMA_VOCAB_TYPE_NONE ? 0 : llama_vocab_n_tokens(vocab);
    for (llama_token id = 0; id < n_vocab; ++id) {
        const int   attributes = llama_vocab_get_attr(vocab, id);
        std::string text       = llama_vocab_get_text(vocab, id);
        if ((attributes & (hidden | LLAMA_TOKEN_ATTR_USER_DEFINED)) && !text.empty()) {
            tokens_.push_back({std::move(text), (attributes & hidden) != 0, (attributes & LLAMA_TOKEN_ATTR_LSTRIP) != 0,
                               (attributes & LLAMA_TOKEN_ATTR_RSTRIP) != 0});
        }
    }
    std::stable_sort(tokens_.begin(), tokens_.end(),
                     [](const Token & a, const Token & b) { return a.text.size() > b.text.size(); });
}

std::vector<SpecialTokens::Fragment> SpecialTokens::split(std::string_view text, const std::vector<Fragment> & fragments,
                                                const Token & token) {
    std::vector<Fragment> result;
    const auto            add_text = [&](std::size_t begin, std::size_t end) {
        if (begin < end) {
            result.push_back({begin, end, nullptr});
        }
    };
    for (const Fragment & fragment : fragments) {
        if (fragment.token) {
            result.push_back(fragment);
            continue;
        }
        std::size_t       begin = fragment.begin;
        const std::size_t end   = fragment.end;
        for (std::size_t match; (match = text.substr(0, end).find(token.text, begin)) != text.npos;) {
            std::size_t text_end = match;
            while (token.eats_before && text_end > begin && is_blank(text[text_end - 1])) {
                --text_end;
            }
            add_text(begin, text_end);
            begin = match + token.text.size();
            result.push_back({match, begin, &token});
            while (token.eats_behind && begin < end && is_blank(text[begin])) {
                ++begin;
            }
        }
        add_text(begin, end);
    }
    return result;
}

std::vector<std::size_t> SpecialTokens::cuts(std::string_view text, bool parse_special) const {
    std::vector<Fragment> fragments;
    if (text.size() > tokens_per_piece) {
        fragments.push_back({0, text.size(), nullptr});
        for (const Token & token : tokens_) {
            if ((parse_special || !token.is_control) && text.find(token.text) != text.npos) {
                fragments = split(text, fragments, token);
            }
        }
    }
    std::vector<std::size_t> ends;
    std::size_t              count = 0;
    for (const Fragment & fragment : fragments) {
        count += fragment.token != nullptr;
        const bool at_end = fragment.end == text.size();
        if (fragment.token && count >= tokens_per_piece && !at_end &&
            !(fragment.token->eats_behind && is_blank(text[fragment.end]))) {
            ends.push_back(fragment.end);
            count = 0;
        }
    }
    ends.push_back(text.size());
    return ends;
}

// Whether a control token lies in text[begin:end], or overlaps it on either side.
bool SpecialTokens::is_touched(std::string_view text, std::size_t begin, std::size_t end) const {
    return std::any_of(tokens_.begin(), tokens_.end(), [&](const Token & token) {
        const std::size_t reach = token.text.size() - 1;
        const std::size_t from = begin > reach ? begin - reach : 0, to = std::min(end + reach, text.size());
        return token.is_control && text.substr(from, to - from).find(token.text) != text.npos;
    });
}

std::vector<SpecialTokens::Piece> SpecialTokens::pieces_around(std::string_view text, const Spans & spans) const {
    std::vector<Piece> pieces;
    for (const auto & [begin, end] : spans) {
        if (begin < end && is_touched(text, begin, end)) {
            if (begin > (pieces.empty() ? 0 : pieces.back().end)) {
                pieces.push_back({begin, true});
            }
            pieces.push_back({end, false});
        }
    }
    if (pieces.empty() || pieces.back().end < text.size()) {
        pieces.push_back({text.size(), true});
    }
    return pieces;
}

} // namespace paceline
