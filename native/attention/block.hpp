// Attention of a block of query rows to a run of cells, chunk by chunk.
#pragma once

#include <cstdint>

#include "cells.hpp"
#include "chunk_mask.hpp"
#include "operation.hpp"
#include "softmax_state.hpp"
#include "token_rows.hpp"

namespace paceline::attention {

// Used by one thread for block after block, with memory of its own.
class Block {
  public:
    static int64_t num_floats(const Operation & operation);
    Block(const Operation & operation, float * memory);

    void begin(const Rows & rows);
    // Sets `state` to that of the cells [first_cell, end_cell), at most a chunk.
    void attend(int64_t first_cell, int64_t end_cell, SoftmaxState & state);
    void write_outputs(const SoftmaxState & state) const;

  private:
    // About how many products of vectors a cell takes, as measured.
    struct Costs {
        explicit Costs(const Operation & operation);
        float of_cells(const MaskedRows & rows, int vector) const;             // of those of the rows that lie in a vector
        float of_rows(uint64_t seen, int num_cells, int num_vectors) const; // of a vector, for a tile

        float read;            // into memory
        float scored, weighed; // key and value with a vector of rows
        float transposed, row; // turned so that cells are in lanes; key and value with one row then
    };

    void choose_lanes(int num_cells);
    void attend_chunk(int64_t first_cell, int num_cells, SoftmaxState & state);
    void attend_token_rows(int64_t first_cell, SoftmaxState & state);
    void attend_tile(int64_t first_cell, int tile, int num_cells, SoftmaxState & state);
    void attend_vectors(int first, int count, const bool * is_masked, SoftmaxState & state);
    void read_queries(int vector);
    void read_cells(int64_t first_cell, uint64_t cells);

    const Operation & op_;
    const Costs costs_;
    Rows rows_{};
    Cells cells_;
    TokenRows token_rows_;
    float *queries_; // [dim_k][width], scaled
    float *scores_;  // [whole blocks of num_read_][width], then weights
    float *masks_;   // [tile_cells][width]
    float *slopes_;  // [width]: factor of the mask for a row, to the base 2
    ChunkMask mask_;
    uint8_t read_[tile_cells]; // the cells of the tile that were read last
    int num_read_ = 0;
    bool has_queries_[max_rows / num_lanes]; // most rows see few of the cells: their queries are read when needed
    bool takes_cells_[max_rows / num_lanes]; // whether cells are in the lanes for this vector of rows, in this chunk;
    bool takes_rows_[max_rows / num_lanes];  // or rows: neither if it sees no cell

    // Infinities and NaN in the values of cells reach only rows that see them: see attend().
    bool skips_nonfinite_ = false;
};

} // namespace paceline::attention
