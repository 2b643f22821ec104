// A saved state of a context with draft heads: the model's own part, the heads' part, and the hidden row after which the
// heads go on.
//
// offset  size  field
// 0       8     magic
// 8       8     m, bytes of the model's part
// 16      8     h, bytes of the heads' part; 0 if there is none
// 24      8     position of the hidden row, -1 if it is not known
// 32      m, h  the parts
// ...           the hidden row, float32
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "error.hpp"

namespace paceline {

struct StateParts {
    std::span<const uint8_t> model;
    std::span<const uint8_t> heads;
    int64_t                  row_position = -1;
    std::span<const uint8_t> row; // of floats
};

inline constexpr char STATE_MAGIC[8] = {'P', 'L', 'H', 'E', 'A', 'D', 'S', '1'};

inline std::vector<uint8_t> frame_state(const StateParts & parts) {
    std::vector<uint8_t> framed(32 + parts.model.size() + parts.heads.size() + parts.row.size());
    const uint64_t       sizes[2] = {parts.model.size(), parts.heads.size()};
    std::memcpy(framed.data(), STATE_MAGIC, 8);
    std::memcpy(framed.data() + 8, sizes, 16);
    std::memcpy(framed.data() + 24, &parts.row_position, 8);
    uint8_t * to = framed.data() + 32;
    for (std::span<const uint8_t> part : {parts.model, parts.heads, parts.row}) {
        to = std::copy(part.begin(), part.end(), to);
    }
    return framed;
}

inline StateParts read_state(std::span<const uint8_t> framed) {
    uint64_t   sizes[2];
    StateParts parts;
    if (framed.size() < 32 || std::memcmp(framed.data(), STATE_MAGIC, 8) != 0) {
        fail("StateError", "this state was saved without draft heads");
    }
    std::memcpy(sizes, framed.data() + 8, 16);
    std::memcpy(&parts.row_position, framed.data() + 24, 8);
    const size_t left = framed.size() - 32;
    if (sizes[0] > left || sizes[1] > left - sizes[0]) {
        fail("StateError", "the saved state is damaged: its parts are larger than all of it");
    }
    parts.model = framed.subspan(32, sizes[0]);
    parts.heads = framed.subspan(32 + sizes[0], sizes[1]);
    parts.row   = framed.subspan(32 + sizes[0] + sizes[1]);
    return parts;
}

} // namespace paceline
