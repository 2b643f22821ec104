// Text from llama.cpp's functions that fill a buffer and return the full length.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

namespace paceline {

template <typename Read> std::string read_text(Read && read) {
    std::string text(255, '\0');
    int32_t     length = read(text.data(), text.size() + 1);
    if (length > static_cast<int32_t>(text.size())) {
        text.resize(static_cast<size_t>(length));
        length = read(text.data(), text.size() + 1);
    }
    text.resize(static_cast<size_t>(std::max(length, 0)));
    return text;
}

} // namespace paceline
