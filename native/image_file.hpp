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

// InvalidParams for a file of another kind, a damaged file, or other sides than in its header: the caller has
// checked the sides, and the memory that the file's bytes expand to.
DecodedImage decode_image(std::span<const uint8_t> file, int32_t width, int32_t height);

} // namespace paceline
