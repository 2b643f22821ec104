// Which cells of a tile the rows of a block see.
#pragma once

#include <cstdint>

#include "simd_vec.hpp"
#include "operation.hpp"

namespace paceline::attention {

struct TileMask {
    bool is_seen[max_rows / num_lanes];   // by vector of rows: whether one of them sees a cell
    bool is_masked[max_rows / num_lanes]; // whether the mask hides a cell from one of them, or adds to its score

    // Writes the masks of vectors that are both to masks[num_cells][width], times the slopes of their rows.
    TileMask(const Operation & operation, const Rows & rows, int64_t first_cell, int num_cells, const float * slopes, float * masks);
};

} // namespace paceline::attention
