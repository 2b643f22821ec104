#include "text_runs.hpp"

#include <algorithm>
#include <array>

namespace paceline {

namespace {

bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

bool is_break(char c) { return c == '\n' || c == '\r'; }

} // namespace

std::pair<char32_t, std::size_t> first_character(std::string_view utf8) noexcept {
    const auto        byte   = static_cast<unsigned char>(utf8[0]);
    const std::size_t length = std::min<std::size_t>(byte < 0xC0 ? 1 : byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4, utf8.size());
    char32_t          value  = length == 1 ? byte : byte & (0x7F >> length);
    for (std::size_t i = 1; i < length; ++i) {
        value = (value << 6) | (static_cast<unsigned char>(utf8[i]) & 0x3F);
    }
    return {std::min<char32_t>(value, 0x10FFFF), length};
}

std::size_t blank_length(std::string_view text) noexcept {
    constexpr std::array<std::string_view, 8> wide = {"\u0085", "\u00A0", "\u1680", "\u2028",
                                                      "\u2029", "\u202F", "\u205F", "\u3000"};
    if (is_space(text[0])) {
        return is_break(text[0]) ? 0 : 1;
    }
    if (text.size() > 2 && text.starts_with("\xE2\x80") && static_cast<unsigned char>(text[2]) <= 0x8A) {
        return 3; // U+2000 to U+200A
    }
    const auto found = std::find_if(wide.begin(), wide.end(), [&](auto blank) { return text.starts_with(blank); });
    return found == wide.end() ? 0 : found->size();
}

std::size_t digit_length(std::string_view text) noexcept { return text[0] >= '0' && text[0] <= '9'; }

double squared_runs(std::string_view text, LengthAtStart length_of) noexcept {
    double      sum = 0;
    std::size_t run = 0;
    for (std::size_t i = 0; i < text.size();) {
        const std::size_t length = length_of(text.substr(i));
        run                      = length ? run + 1 : 0;
        sum += run ? 2.0 * run - 1 : 0; // the difference of two squares
        i += std::max<std::size_t>(length, 1);
    }
    return sum;
}

// No pattern matches past two blanks, or past a line break, into the next text, but for a slash, which some take together
// with line breaks. So the text between two of these places bounds the depth of the recursion.
std::size_t longest_run(std::string_view utf8) noexcept {
    std::size_t longest = 0;
    std::size_t run     = 0;
    std::size_t gap     = 0; // blanks that came last; a line break counts for two
    for (std::size_t i = 0; i < utf8.size();) {
        const std::string_view rest  = utf8.substr(i);
        const std::size_t      blank = blank_length(rest);
        const std::size_t      step  = is_break(rest[0]) ? 2 : blank ? 1 : 0;
        if (gap >= 2 && !step && rest[0] != '/') {
            run = 1; // the last blank may belong to the next text
        }
        gap     = step ? gap + step : 0;
        longest = std::max(longest, ++run);
        i += blank ? blank : first_character(rest).second;
    }
    return longest;
}

} // namespace paceline
