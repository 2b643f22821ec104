// Runs of characters in UTF-8 text: they decide how long, and how deep, a tokenizer works on it.
#pragma once

#include <cstddef>
#include <string_view>
#include <utility>

namespace paceline {

// The character that well-formed text begins with, and how many bytes it has. The text must not be empty.
std::pair<char32_t, std::size_t> first_character(std::string_view utf8) noexcept;

// The number of bytes of the class's character that the text begins with; 0 if it begins with another.
using LengthAtStart = std::size_t (*)(std::string_view);
std::size_t blank_length(std::string_view text) noexcept; // no line breaks
std::size_t digit_length(std::string_view text) noexcept; // ASCII

// Sum of the squares of the lengths, in characters, of all runs of a class.
double squared_runs(std::string_view text, LengthAtStart length_of) noexcept;

// Length in characters of the longest stretch that a pre-tokenizer may have to match in one piece.
std::size_t longest_run(std::string_view utf8) noexcept;

} // namespace paceline
