#include "image_file.hpp"

#include <climits>
#include <cstdlib>
#include <memory>

#include "error.hpp"

#define STB_IMAGE_IMPLEMENTATION
#define STB_IMAGE_STATIC
#define STBI_NO_STDIO
#define STBI_NO_HDR
#define STBI_NO_LINEAR
#define STBI_ONLY_PNG
#define STBI_ONLY_JPEG
#define STBI_ONLY_GIF
#define STBI_ONLY_BMP
#define STBI_MAX_DIMENSIONS 16384
#include "stb/stb_image.h"

namespace paceline {

DecodedImage decode_image(std::span<const uint8_t> file, int32_t width, int32_t height) {
    if (file.empty() || file.size() > INT_MAX) {
        fail("InvalidParams", "an image file must have 1 to " + str(INT_MAX) + " bytes, not " + str(file.size()));
    }
    const int size = static_cast<int>(file.size());
    int       x = 0, y = 0, channels = 0;
    if (!stbi_info_from_memory(file.data(), size, &x, &y, &channels)) {
        fail("InvalidParams", std::string("no image can be read from the file: ") + stbi_failure_reason());
    }
    if (x != width || std::abs(y) != height) { // of a BMP from top to bottom it is negative
        fail("InvalidParams", "the image file is damaged: it is " + str(width) + " x " + str(height) + " pixels by its header, and " +
                                  str(x) + " x " + str(y) + " by what follows");
    }
    const std::unique_ptr<stbi_uc, decltype(&stbi_image_free)> pixels(stbi_load_from_memory(file.data(), size, &x, &y, &channels, 3),
                                                                     &stbi_image_free);
    if (!pixels) {
        fail("InvalidParams", std::string("the image file is damaged: ") + stbi_failure_reason());
    }
    if (x != width || y != height) {
        fail("InvalidParams", "the image file is damaged: its image is " + str(x) + " x " + str(y) + " pixels");
    }
    return {x, y, {pixels.get(), pixels.get() + static_cast<size_t>(x) * static_cast<size_t>(y) * 3}};
}

} // namespace paceline
