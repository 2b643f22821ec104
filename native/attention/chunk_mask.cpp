#include "chunk_mask.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

namespace paceline::attention {
namespace {

constexpr ggml_fp16_t hidden = 0xFC00; // minus infinity
constexpr int at_once        = 8;      // cells, a byte of a word for each

typedef uint16_t MaskVec __attribute__((vector_size(at_once * sizeof(uint16_t))));
typedef int8_t ByteVec __attribute__((vector_size(at_once)));

// A bit for each byte, the lowest for the first: bytes are zero or all ones.
uint64_t bits_of(ByteVec bytes) {
    uint64_t word;
    std::memcpy(&word, &bytes, sizeof word);
    if constexpr (std::endian::native == std::endian::big) {
        word = __builtin_bswap64(word);
    }
    return (word & 0x8040201008040201u) * 0x0101010101010101u >> 56;
}

// Adds the cells that the mask does not hide; returns whether it adds to scores of any.
bool note(const ggml_fp16_t * mask, int num_cells, uint64_t & seen) {
    MaskVec adds{};
    int cell = 0;
    for (; cell + at_once <= num_cells; cell += at_once) {
        MaskVec values;
        std::memcpy(&values, mask + cell, sizeof values);
        const auto is_seen = values != MaskVec{} + hidden;
        adds |= reinterpret_cast<MaskVec>(is_seen) & values;
        seen |= bits_of(__builtin_convertvector(is_seen, ByteVec)) << cell;
    }
    bool does = false;
    for (int i = 0; i < at_once; ++i) {
        does |= adds[i] != 0;
    }
    for (; cell < num_cells; ++cell) {
        seen |= static_cast<uint64_t>(mask[cell] != hidden) << cell;
        does |= mask[cell] != hidden && mask[cell] != 0;
    }
    return does;
}

} // namespace

int MaskedRows::num_seen() const {
    int count = 0;
    for (const uint64_t cells : seen) {
        count += __builtin_popcountll(cells);
    }
    return count;
}

void ChunkMask::read(const Operation & op, const Rows & rows, int64_t first_cell, int num_cells) {
    count_ = 0;
    for (int row = 0; row < rows.count;) {
        MaskedRows & one = all_[count_++] = {row, rows.count, nullptr, {}, false};
        if (op.mask) {
            const int64_t rest = op.group - (rows.first + row) % op.group;
            const char * mask  = at(op.mask, rows.token_of(op, row), 0, rows.stream % op.mask->ne[3]);
            one.end  = static_cast<int>(std::min<int64_t>(rows.count, row + rest));
            one.mask = reinterpret_cast<const ggml_fp16_t *>(mask) + first_cell;
        }
        for (int cell = 0; cell < num_cells; cell += tile_cells) {
            const int count = std::min(tile_cells, num_cells - cell);
            uint64_t & seen = one.seen[cell / tile_cells];
            if (one.mask) {
                one.adds |= note(one.mask + cell, count, seen);
            } else {
                seen = all_cells(count);
            }
        }
        row = one.end;
    }
}

void TileMask::note(const ChunkMask & chunk, int tile, int num_cells, const bool * wanted) {
    bool has_noted[max_rows / num_lanes] = {};
    for (const MaskedRows & one : chunk) {
        const uint64_t cells = one.seen[tile];
        const bool hides     = is_most(cells, num_cells) && cells != all_cells(num_cells);
        for (int vector = one.first / num_lanes; vector <= (one.end - 1) / num_lanes; ++vector) {
            is_masked[vector] |= wanted[vector] && (one.adds || hides || (has_noted[vector] && seen[vector] != cells));
            seen[vector] |= cells;
            has_noted[vector] = true;
        }
    }
}

TileMask::TileMask(const ChunkMask & chunk, int tile, int num_cells, const Rows & rows, const bool * wanted, const float * slopes,
                   float * masks)
    : seen{}, is_masked{} {
    note(chunk, tile, num_cells, wanted);
    const int width = rows.width();
    for (int vector = 0; vector < rows.num_vectors(); ++vector) {
        for (int cell = 0; cell < num_cells && is_masked[vector]; ++cell) {
            store(masks + cell * width + vector * num_lanes, SimdVec{});
        }
    }
    float floats[tile_cells];
    for (const MaskedRows & one : chunk) {
        const bool *first = is_masked + one.first / num_lanes, *last = is_masked + (one.end - 1) / num_lanes;
        if (!one.mask || std::none_of(first, last + 1, [](bool any) { return any; })) {
            continue;
        }
        to_floats(floats, reinterpret_cast<const char *>(one.mask + tile * tile_cells), GGML_TYPE_F16, num_cells);
        for (int row = one.first; row < one.end; ++row) {
            for (int cell = 0; cell < num_cells && is_masked[row / num_lanes]; ++cell) {
                masks[cell * width + row] = floats[cell] * slopes[row];
            }
        }
    }
}

} // namespace paceline::attention
