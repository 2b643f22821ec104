// Keys and values of some cells as floats, in memory of one thread.
#pragma once

#include <algorithm>
#include <cstdint>

#include "operation.hpp"
#include "simd_vec.hpp"

namespace paceline::attention {

// So many that there are whole vectors, and whole blocks of products.
inline int filled_cells(int count) { return static_cast<int>(rounded_up(count, std::max(8, num_lanes))); }

class Cells {
  public:
    static int64_t num_floats(const Operation & operation);
    Cells(const Operation & operation, float * memory);

    void begin(const Rows & rows);
    // Reads cells first_cell + offsets[0..count), at most a tile's worth. Keys of zeros follow them, up to `filled_cells(count)`.
    void read_keys(int64_t first_cell, const uint8_t * offsets, int count);
    // `skips_nonfinite`: values with infinities or NaN become zeros, and are noted.
    void read_values(int64_t first_cell, const uint8_t * offsets, int count, bool skips_nonfinite);

    float * keys;   // [filled_cells(count)][key_stride]
    float * values; // [count][value_stride]
    int key_stride, value_stride; // whole vectors
    bool has_nonfinite[tile_cells];

  private:
    // The addresses of a head's cells.
    struct Source {
        Source(const ggml_tensor * tensor, const Rows & rows);
        const char * first;
        int64_t stride, num_bytes; // from cell to cell, and of one
        ggml_type type;
        int64_t count, end; // numbers of a cell, and cells

        void read(float * to, int64_t cell) const;
    };

    const Operation & op_;
    Source key_source_, value_source_;
};

} // namespace paceline::attention
