// The tensors of one attention operation, and the rows of queries that are computed together.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ggml.h"

namespace paceline::attention {

inline constexpr int tile_cells = 64;
inline constexpr int max_rows   = 128; // of a block; more do not fit a core's second cache

inline constexpr float log2_e = 1.44269504f; // scores are to the base 2, since a power of two is cheaper than one of e

// How rows of queries lie in the lanes of vectors: one behind the other, or each token's from the begin of a vector on.
enum class Layout { dense, by_token };

struct Operation {
    Operation(const ggml_tensor * node, Layout layout);

    const ggml_tensor *node, *q, *k, *v, *mask, *sinks;
    float scale, max_bias, softcap;
    int64_t dim_k, dim_v; // of a head
    int64_t num_tokens, num_heads, num_kv_heads, num_streams, num_cells;
    int64_t group;          // query heads that share a head of keys and values
    int64_t rows_per_token; // as many, or more so that they fill vectors

    int64_t num_rows() const { return num_tokens * rows_per_token; } // of one head of keys and values: tokens first, then heads
    float slope_of(int64_t head) const;                     // factor of the mask for a head
};

// A block: `count` rows (at most max_rows) of num_rows(), from `first` on.
struct Rows {
    int64_t stream, kv_head, first;
    int count;

    int num_vectors() const;
    int width() const; // whole vectors
    int64_t token_of(const Operation & operation, int row) const { return (first + row) / operation.rows_per_token; }
    int64_t place_of(const Operation & operation, int row) const { return (first + row) % operation.rows_per_token; }
    // Of a row that only fills a vector: the last of its token's, whose results it has too.
    int64_t head_of(const Operation & operation, int row) const {
        return kv_head * operation.group + std::min(place_of(operation, row), operation.group - 1);
    }
    bool is_filling(const Operation & operation, int row) const { return place_of(operation, row) >= operation.group; }
};

// How rows share cells. Reads the mask, once, where something depends on it.
struct Sharing {
    explicit Sharing(const ggml_tensor * node);

    double mean_rows; // that see a cell together, on average: the heads of a group, for as many tokens one after the other
    Layout layout;    // in which fewer vectors see cells: tokens that see cells of their own do not share a vector
};

const char * at(const ggml_tensor * tensor, int64_t i1, int64_t i2, int64_t i3);
void to_floats(float * to, const char * from, ggml_type type, int64_t count);

} // namespace paceline::attention
