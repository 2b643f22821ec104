// The tokens that are cut out of a text before anything else is looked at, and where a text may be cut because of them.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "llama.h"

namespace paceline {

// llama.cpp's own search for special tokens takes time with the square of how many a text holds: a megabyte of line
// breaks, where the line break is such a token, takes hours. A text cut into pieces with few of them each does not.
class Specials {
public:
    explicit Specials(const llama_vocab * vocab);

    // Ends of the pieces that may be encoded one by one with the same result as all at once, the last one the length of
    // the text. Every cut is right behind a special token. `parse_special`: whether control tokens count.
    std::vector<std::size_t> cuts(std::string_view text, bool parse_special) const;

private:
    struct Token {
        std::string text;
        bool        is_control;   // control and unknown tokens are cut out only when asked for
        bool        eats_before;  // blanks
        bool        eats_behind;
    };
    struct Fragment {
        std::size_t   begin;
        std::size_t   end;
        const Token * token; // null: text
    };

    static std::vector<Fragment> split(std::string_view text, const std::vector<Fragment> & fragments, const Token & token);

    std::vector<Token> tokens_; // longest first
};

} // namespace paceline
