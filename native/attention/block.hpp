// Attention of a block of query rows to a run of cells, one tile of cells after the other.
#pragma once

#include <cstdint>

struct ggml_tensor;

namespace paceline::attention {

inline constexpr int tile_cells = 64;
inline constexpr int max_rows   = 128; // of a block; more do not fit a core's second cache

// The tensors of one operation, and what follows from them.
struct Operation {
    explicit Operation(const ggml_tensor * node);

    const ggml_tensor *node, *q, *k, *v, *mask, *sinks;
    float scale, max_bias, softcap;
    int64_t dim_k, dim_v;      // of a head
    int64_t num_tokens, num_heads, num_kv_heads, num_streams, num_cells;
    int64_t group;             // query heads that share a head of keys and values
    int64_t num_rows() const { return num_tokens * group; } // of one head of keys and values: tokens first, then heads
};

// Which rows: `first` of num_rows(), and how many (at most max_rows).
struct Rows {
    int64_t stream, kv_head, first;
    int count;
    int num_vectors() const;
};

// The room that one thread works in, cut from one piece of memory.
struct Room {
    static int64_t num_floats(const Operation & operation);
    Room(const Operation & operation, float * memory);

    float *queries;  // [dim_k][width], scaled
    float *scores;   // [tile_cells][width], then probabilities
    float *masks;    // [tile_cells][width]
    float *keys;     // [tile_cells][dim_k]
    float *values;   // [tile_cells][dim_v]
    float *slopes;   // [width]: what the mask counts for a row
    bool has_queries[max_rows]; // by vectors of rows: most streams see few cells of a chunk
};

// Sums of a run of cells: weights to the base 2 below their largest score, and the values by these weights.
struct Sums {
    static int64_t num_floats(int64_t dim_v, int64_t width) { return (dim_v + 2) * width; }
    Sums(float * memory, int64_t dim_v, int64_t width) : largest(memory), total(memory + width), outputs(memory + 2 * width), dim_v(dim_v), width(width) {}

    float *largest; // [width]: minus infinity where a row sees no cell
    float *total;   // [width]
    float *outputs; // [dim_v][width]
    int64_t dim_v, width;

    void clear(int num_vectors);
    // Takes up what another run of cells summed up to.
    void merge(const Sums & other, int num_vectors);
};

// Before the first cells of a block.
void begin(const Operation & operation, const Rows & rows, Room & room);
void attend(const Operation & operation, const Rows & rows, int64_t first_cell, int64_t end_cell, Room & room, Sums & sums);
void write_outputs(const Operation & operation, const Rows & rows, Sums & sums);

} // namespace paceline::attention
