// Image files: PNG, JPEG, GIF (its first frame) and BMP, decoded by stb_image.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace paceline {

struct DecodedImage {
    int32_t              width  = 0;
    int32_t              height = 0;
    std::vector<uint8_t> pixels; // RGB, row by row
};

// InvalidParams for what is no such file, is damaged, or has other sides than its header was found to have: the caller has
// checked those, and how much memory the file makes of its bytes.
DecodedImage decode_image(std::span<const uint8_t> file, int32_t width, int32_t height);

} // namespace paceline
