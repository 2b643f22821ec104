// Special tokens, which llama.cpp searches for in a text first, and the places at which a text may be split because of them.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "llama.h"

namespace paceline {

// llama.cpp's own search takes time with the square of how many special tokens a text holds: a megabyte of line breaks,
// with the line break as a special token, takes hours. A text split into pieces with few of them each does not.
class SpecialTokens {
public:
    // A part of a text, up to `end`; `parse_special`: whether control tokens are recognised in it.
    struct Piece {
        std::size_t end;
        bool        parse_special;
    };
    using Spans = std::vector<std::pair<std::size_t, std::size_t>>;

    explicit SpecialTokens(const llama_vocab * vocab);

    // Ends of the pieces that may be encoded one by one with the same result as all at once, the last one the length of
    // the text. Every cut is right behind a special token. `parse_special`: whether control tokens count.
    std::vector<std::size_t> cuts(std::string_view text, bool parse_special) const;

    // Splits a text so that no control token is recognised that begins, ends or lies in a span. Mostly there is
    // none, and the text stays in one piece. `spans`: ascending, begin and end.
    std::vector<Piece> pieces_around(std::string_view text, const Spans & spans) const;

private:
    struct Token {
        std::string text;
        bool        is_control;   // control and unknown tokens are recognised only with parse_special
        bool        eats_before;  // blanks
        bool        eats_behind;
    };
    struct Fragment {
        std::size_t   begin;
        std::size_t   end;
        const Token * token; // null: text
    };

    bool is_touched(std::string_view text, std::size_t begin, std::size_t end) const;

    static std::vector<Fragment> split(std::string_view text, const std::vector<Fragment> & fragments, const Token & token);

    std::vector<Token> tokens_; // longest first
};

} // namespace paceline
