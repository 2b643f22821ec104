// The cells of a chunk that the rows of a block see, and the mask's addends to their scores.
#pragma once

#include <cstdint>

#include "operation.hpp"
#include "simd_vec.hpp"

namespace paceline::attention {

static_assert(tile_cells == 64, "a bit of a word for each cell");

inline constexpr uint64_t all_cells(int count) { return count < 64 ? (uint64_t{1} << count) - 1 : ~uint64_t{0}; }
inline bool is_most(uint64_t cells, int num_cells) { return 2 * __builtin_popcountll(cells) > num_cells; }

// Rows with one mask: a token's, or all without a mask.
struct MaskedRows {
    int first, end;
    const ggml_fp16_t * mask;       // of the chunk's cells
    uint64_t seen[tiles_per_chunk]; // a bit for each cell of a tile
    bool adds;                      // whether it adds to scores of cells that are seen

    int num_seen() const;
    bool lies_in(int vector) const { return first / num_lanes <= vector && vector <= (end - 1) / num_lanes; }
};

class ChunkMask {
  public:
    void read(const Operation & operation, const Rows & rows, int64_t first_cell, int num_cells);

    const MaskedRows * begin() const { return all_; }
    const MaskedRows * end() const { return all_ + count_; }

  private:
    MaskedRows all_[max_rows];
    int count_ = 0;
};

// One tile of it, by vectors of rows.
struct TileMask {
    uint64_t seen[max_rows / num_lanes];  // a bit for each cell that any of the vector's rows sees
    bool is_masked[max_rows / num_lanes]; // whether the mask adds to scores, or hides computed cells from a row

    // Writes the masks of vectors that are masked to masks[num_cells][width], times the slopes of their rows.
    // `wanted`: of which vectors masks are needed.
    TileMask(const ChunkMask & chunk, int tile, int num_cells, const Rows & rows, const bool * wanted, const float * slopes,
             float * masks);

    // Whether a vector is multiplied with all cells of the tile, and not only with the visible cells.
    bool takes_tile(int vector, int num_cells) const { return is_most(seen[vector], num_cells); }

  private:
    void note(const ChunkMask & chunk, int tile, int num_cells, const bool * wanted);
};

} // namespace paceline::attention
