// The running state of an online softmax (Milakov and Gimelshein 2018; FlashAttention) over a run of cells, for the rows
// of a block.
#pragma once

#include <cstdint>

#include "simd_vec.hpp"

namespace paceline::attention {

struct SoftmaxState {
    static int64_t num_floats(int64_t dim_v, int64_t width) { return (dim_v + 2) * width; }
    SoftmaxState(float * memory, int64_t dim_v, int64_t width);

    float * row_max; // [width]: the highest score, to the base 2; minus infinity if a row has seen no cell
    float * row_sum; // [width]: of the weights, 2^(score - row_max)
    float * outputs; // [dim_v][width]: sum of weighted values. Undefined if no row of a vector has seen a cell
    int64_t dim_v, width;

    void clear();
    // Adds a tile: turns its scores [num_cells][width] into weights in place, and rescales the outputs so far. The caller
    // adds the weighted values to them.
    void softmax_tile(float * scores, int num_cells, int vector);
    // Adds the state of another run of cells.
    void merge(const SoftmaxState & other);
    // Whether all numbers of rows that have seen cells are finite.
    bool is_finite() const;

    // Makes the result NaN for the rows of a vector with a set lane in `rows`.
    void set_nan(int64_t column, SimdIntVec rows);

  private:
    void set(int64_t column, SimdVec highest, SimdVec sum);
    void clear_outputs(int64_t column);
};

} // namespace paceline::attention
