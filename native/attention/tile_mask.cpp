#include "tile_mask.hpp"

#include <algorithm>

namespace paceline::attention {
namespace {

enum class Visibility : uint8_t { all, nothing, some };

Visibility visibility_of(const ggml_fp16_t * mask, int num_cells) {
    constexpr ggml_fp16_t hidden = 0xFC00; // minus infinity
    ggml_fp16_t any = 0, differs = 0;
    for (int cell = 0; cell < num_cells; ++cell) {
        any |= mask[cell];
        differs |= mask[cell] ^ hidden;
    }
    return any == 0 ? Visibility::all : differs == 0 ? Visibility::nothing : Visibility::some;
}

// The rows of one token have one mask, unless each head has its own.
template <typename Visit> void for_each_mask(const Operation & op, const Rows & rows, int64_t first_cell, Visit && visit) {
    const bool by_head = op.mask->ne[2] > 1;
    for (int row = 0; row < rows.count;) {
        const int64_t token = rows.token_of(op, row), head = rows.head_of(op, row);
        const int end    = by_head ? row + 1 : static_cast<int>(std::min<int64_t>(rows.count, row + op.rows_per_token - rows.place_of(op, row)));
        const char * all = at(op.mask, token, head % op.mask->ne[2], rows.stream % op.mask->ne[3]);
        visit(row, end, reinterpret_cast<const ggml_fp16_t *>(all) + first_cell);
        row = end;
    }
}

} // namespace

TileMask::TileMask(const Operation & op, const Rows & rows, int64_t first_cell, int num_cells, const float * slopes, float * masks)
    : is_seen{}, is_masked{} {
    if (!op.mask) {
        std::fill_n(is_seen, rows.num_vectors(), true);
        return;
    }
    Visibility visibilities[max_rows];
    for_each_mask(op, rows, first_cell, [&](int row, int end, const ggml_fp16_t * mask) {
        const Visibility visibility = visibility_of(mask, num_cells);
        std::fill(visibilities + row, visibilities + end, visibility);
        for (int vector = row / num_lanes; vector <= (end - 1) / num_lanes; ++vector) {
            is_seen[vector] |= visibility != Visibility::nothing;
            is_masked[vector] |= visibility != Visibility::all;
        }
    });
    const int width = rows.width();
    for (int vector = 0; vector < rows.num_vectors(); ++vector) {
        for (int cell = 0; cell < num_cells && is_seen[vector] && is_masked[vector]; ++cell) {
            store(masks + cell * width + vector * num_lanes, SimdVec{});
        }
    }
    float floats[tile_cells];
    for_each_mask(op, rows, first_cell, [&](int row, int end, const ggml_fp16_t * mask) {
        if (visibilities[row] == Visibility::all) {
            return;
        }
        to_floats(floats, reinterpret_cast<const char *>(mask), GGML_TYPE_F16, num_cells);
        for (int one = row; one < end; ++one) {
            for (int cell = 0; cell < num_cells && is_seen[one / num_lanes]; ++cell) {
                masks[cell * width + one] = floats[cell] * slopes[one];
            }
        }
    });
}

} // namespace paceline::attention
