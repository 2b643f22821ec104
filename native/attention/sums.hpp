// What attention to a run of cells sums up to, for the rows of a block.
#pragma once

#include <cstdint>

#include "lanes.hpp"

namespace paceline::attention {

struct Sums {
    static int64_t num_floats(int64_t dim_v, int64_t width) { return (dim_v + 2) * width; }
    Sums(float * memory, int64_t dim_v, int64_t width);

    float * largest; // [width]: the highest score, to the base 2; minus infinity where a row has seen no cell
    float * total;   // [width]: of the weights, which are powers of 2 of the scores less the highest
    float * outputs; // [dim_v][width]: values by their weights. Anything where no row of a vector has seen a cell
    int64_t dim_v, width;

    void clear();
    // Takes up a tile: its scores [num_cells][width] become weights in place. The values are the caller's to add.
    void weigh(float * scores, int num_cells, int vector);
    // Takes up what another run of cells summed up to.
    void merge(const Sums & other);
    // Whether every number is one, where rows have seen cells.
    bool are_finite() const;

    // Makes NaN of what a vector's rows come to, where the lanes of `rows` are set.
    void spoil(int64_t column, IntLanes rows);

  private:
    void set(int64_t column, Lanes highest, Lanes sum);
    void clear_outputs(int64_t column);
};

} // namespace paceline::attention
