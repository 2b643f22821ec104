// The tensors of one attention operation, and the rows of queries that are computed together.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "ggml-cpu.h"
#include "ggml.h"

#include "simd_vec.hpp"

namespace paceline::attention {

// A row's sums are over tiles of cells, which are added up in chunks; chunks are merged into spans in order, and spans in order. So
// its result does not depend on the number of cells that it does not see, on other rows, or on threads.
inline constexpr int tile_cells      = 64;
inline constexpr int tiles_per_chunk = 4;
inline constexpr int chunk_cells     = tiles_per_chunk * tile_cells;
inline constexpr int span_cells      = 4 * chunk_cells;

inline constexpr int max_rows = 128; // of a block; more do not fit a core's second cache

inline int64_t rounded_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

inline constexpr float log2_e = 1.44269504f; // scores are to the base 2, since a power of two is cheaper than one of e

struct Operation {
    explicit Operation(const ggml_tensor * node);

    const ggml_tensor *node, *q, *k, *v, *mask, *sinks;
    float scale, max_bias, softcap;
    int64_t dim_k, dim_v; // of a head
    int64_t num_tokens, num_heads, num_kv_heads, num_streams, num_cells;
    int64_t group; // query heads that share a head of keys and values

    int64_t num_rows() const { return num_tokens * group; } // of one head of keys and values: tokens first, then heads
    float slope_of(int64_t head) const; // factor of the mask for a head
    void cap(float * scores) const;     // `num_lanes` of them, to the base 2, if there is a softcap
};

// A block: `count` rows (at most max_rows) of num_rows(), from `first` on.
struct Rows {
    int64_t stream, kv_head, first;
    int count;

    int num_vectors() const;
    int width() const; // whole vectors
    int64_t token_of(const Operation & operation, int row) const { return (first + row) / operation.group; }
    int64_t head_of(const Operation & operation, int row) const { return kv_head * operation.group + (first + row) % operation.group; }
};

inline const char * at(const ggml_tensor * tensor, int64_t i1, int64_t i2, int64_t i3) {
    return static_cast<const char *>(tensor->data) + i1 * tensor->nb[1] + i2 * tensor->nb[2] + i3 * tensor->nb[3];
}

inline void to_floats(float * to, const char * from, ggml_type type, int64_t count) {
    if (type == GGML_TYPE_F32) {
        std::memcpy(to, from, count * sizeof(float));
        return;
    }
    int64_t done = 0;
    for (; converts_halves && done + num_lanes <= count; done += num_lanes) {
        store(to + done, load_halves(from + done * sizeof(ggml_fp16_t)));
    }
    if (done < count) {
        ggml_cpu_fp16_to_fp32(reinterpret_cast<const ggml_fp16_t *>(from) + done, to + done, count - done);
    }
}

} // namespace paceline::attention
