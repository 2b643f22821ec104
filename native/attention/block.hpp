// Attention of a block of query rows to a run of cells, tile by tile.
#pragma once

#include <cstdint>

#include "operation.hpp"
#include "softmax_state.hpp"

namespace paceline::attention {

// Used by one thread for block after block, with memory of its own.
class Block {
  public:
    static int64_t num_floats(const Operation & operation);
    Block(const Operation & operation, float * memory);

    void begin(const Rows & rows);
    // Sets `state` to that of the cells [first_cell, end_cell).
    void attend(int64_t first_cell, int64_t end_cell, SoftmaxState & state);
    void write_outputs(const SoftmaxState & state) const;

  private:
    void attend_tiles(int64_t first_cell, int64_t end_cell, SoftmaxState & state);
    void attend_tile(int64_t first_cell, int num_cells, SoftmaxState & state);
    void attend_vectors(int first, int count, const bool * is_masked, SoftmaxState & state);
    void read_queries(int vector);
    void prefetch(const ggml_tensor * cells, int64_t cell) const;
    void read_cells(int64_t first_cell, uint64_t cells);
    void clear_nonfinite();

    const Operation & op_;
    Rows rows_{};
    float *queries_; // [dim_k][width], scaled
    float *scores_;  // [num_read_][width], then weights
    float *masks_;   // [tile_cells][width]
    float *keys_;    // [num_read_][dim_k]
    float *values_;  // [num_read_][dim_v]
    float *slopes_;  // [width]: factor of the mask for a row, to the base 2
    uint8_t read_[tile_cells]; // the cells of the tile that were read last
    int num_read_ = 0;
    bool has_queries_[max_rows / num_lanes]; // most rows see few of the cells: their queries are read when needed

    // Infinities and NaN in the values of cells reach only rows that see them: see attend().
    bool skips_nonfinite_ = false;
    bool has_nonfinite_[tile_cells];
};

} // namespace paceline::attention
