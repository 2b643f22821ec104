// Attention of a block of query rows to a run of cells, one tile of cells after the other.
#pragma once

#include <cstdint>

#include "operation.hpp"
#include "sums.hpp"

namespace paceline::attention {

// One thread's work on one block after the other, in a piece of memory of its own.
class Block {
  public:
    static int64_t num_floats(const Operation & operation);
    Block(const Operation & operation, float * memory);

    void begin(const Rows & rows);
    // Sums of the cells [first_cell, end_cell), alone.
    void attend(int64_t first_cell, int64_t end_cell, Sums & sums);
    void write_outputs(const Sums & sums) const;

  private:
    void attend_tiles(int64_t first_cell, int64_t end_cell, Sums & sums);
    void attend_tile(int64_t first_cell, int num_cells, Sums & sums);
    void attend_vectors(int num_cells, int first, int count, const bool * is_masked, Sums & sums);
    void read_queries(int vector);
    void read_tile(int64_t first_cell, int num_cells);
    void take_out_spoiled(int num_cells);

    const Operation & op_;
    Rows rows_{};
    float *queries_; // [dim_k][width], scaled
    float *scores_;  // [tile_cells][width], then weights
    float *masks_;   // [tile_cells][width]
    float *keys_;    // [tile_cells][dim_k]
    float *values_;  // [tile_cells][dim_v]
    float *slopes_;  // [width]: what the mask counts for a row, to the base 2
    bool has_queries_[max_rows / num_lanes]; // most streams see few cells: their queries are read when they do

    // Infinities and NaN in the values of cells reach only who sees them: see attend().
    bool is_careful_ = false;
    bool is_spoiled_[tile_cells];
};

} // namespace paceline::attention
