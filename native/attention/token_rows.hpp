// Attention of rows with one mask that share their cells with few others, as a stream's newest token does: cells are in the lanes
// for scores, and the numbers of a value for outputs. A row's bits are the same as in a block with rows in the lanes.
#pragma once

#include <cstdint>

#include "cells.hpp"
#include "chunk_mask.hpp"
#include "operation.hpp"
#include "softmax_state.hpp"

namespace paceline::attention {

// Used by one thread for chunk after chunk, with memory of its own.
class TokenRows {
  public:
    static int64_t num_floats(const Operation & operation);
    TokenRows(const Operation & operation, Cells & cells, float * memory);

    // Rows [first, end) of a block, at most `num_lanes`, to the cells of a chunk that all of them see. `queries`: [dim_k][width].
    // Maxima and sums go into the cleared `state`, outputs stay here.
    struct Part {
        int first, end;
        const MaskedRows * masked;
    };
    void attend(const Part & part, int64_t first_cell, const float * queries, bool skips_nonfinite,
                SoftmaxState & state);

    // Moves the outputs of a vector of rows into the state. Rows that have seen no cell have zeros.
    void write(int vector, SoftmaxState & state);

  private:
    struct Seen { // offsets of cells in the chunk, tile by tile
        uint8_t offsets[chunk_cells];
        int begins[tiles_per_chunk + 1];
    };
    // The factor of outputs so far before a tile is added, since a higher score has been seen.
    struct Rescaling {
        float factors[num_lanes][tiles_per_chunk];
        bool is_any[tiles_per_chunk]; // of a tile: whether a factor is not 1
    };
    static Seen list(const MaskedRows & masked);
    void score(const Part & part, int64_t first_cell, const float * queries, int width, const Seen & seen);
    void transpose_keys(int num_cells);
    void weigh_cells(float * scores, const Seen & seen, float * highest) const;
    void weigh(const Part & part, int index, const Seen & seen, Rescaling & rescaling, SoftmaxState & state);
    void add_values(const Part & part, int64_t first_cell, const Seen & seen, int begin, int end, bool skips_nonfinite,
                    SoftmaxState & state);

    float * output_of(int row) const { return outputs_ + row * cells_.value_stride; }

    const Operation & op_;
    Cells & cells_;
    float * keys_;    // [dim_k, filled up][tile_cells]
    float * scores_;  // [num_lanes][chunk_cells], then weights
    float * outputs_; // [max_rows][value_stride]
};

} // namespace paceline::attention
