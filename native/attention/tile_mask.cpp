#include "tile_mask.hpp"

#include <algorithm>

namespace paceline::attention {
namespace {

constexpr ggml_fp16_t hidden = 0xFC00; // minus infinity

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

// Most masks of a tile are zeros or hidden throughout, which is seen many cells at a time.
void TileMask::note(int row, int end, const ggml_fp16_t * mask, int num_cells) {
    ggml_fp16_t any = 0, differs = 0;
    for (int cell = 0; cell < num_cells; ++cell) {
        any |= mask[cell];
        differs |= mask[cell] ^ hidden;
    }
    uint64_t cells = any == 0 ? all_cells(num_cells) : 0;
    bool adds      = false;
    for (int cell = 0; cell < num_cells && any != 0 && differs != 0; ++cell) {
        cells |= static_cast<uint64_t>(mask[cell] != hidden) << cell;
        adds |= mask[cell] != hidden && mask[cell] != 0;
    }
    const bool hides = is_most(cells, num_cells) && cells != all_cells(num_cells);
    for (int vector = row / num_lanes; vector <= (end - 1) / num_lanes; ++vector) {
        is_masked[vector] |= adds || hides || (has_noted_[vector] && seen[vector] != cells);
        seen[vector] |= cells;
        has_noted_[vector] = true;
    }
}

TileMask::TileMask(const Operation & op, const Rows & rows, int64_t first_cell, int num_cells, const float * slopes, float * masks)
    : seen{}, is_masked{}, has_noted_{} {
    if (!op.mask) {
        std::fill_n(seen, rows.num_vectors(), all_cells(num_cells));
        return;
    }
    for_each_mask(op, rows, first_cell,
                  [&](int row, int end, const ggml_fp16_t * mask) { note(row, end, mask, num_cells); });
    const int width = rows.width();
    for (int vector = 0; vector < rows.num_vectors(); ++vector) {
        for (int cell = 0; cell < num_cells && is_masked[vector]; ++cell) {
            store(masks + cell * width + vector * num_lanes, SimdVec{});
        }
    }
    float floats[tile_cells];
    for_each_mask(op, rows, first_cell, [&](int row, int end, const ggml_fp16_t * mask) {
        if (std::none_of(is_masked + row / num_lanes, is_masked + (end - 1) / num_lanes + 1, [](bool one) { return one; })) {
            return;
        }
        to_floats(floats, reinterpret_cast<const char *>(mask), GGML_TYPE_F16, num_cells);
        for (int one = row; one < end; ++one) {
            for (int cell = 0; cell < num_cells && is_masked[one / num_lanes]; ++cell) {
                masks[cell * width + one] = floats[cell] * slopes[one];
            }
        }
    });
}

} // namespace paceline::attention
