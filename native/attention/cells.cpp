#include "cells.hpp"

#include <algorithm>
#include <cmath>

namespace paceline::attention {
namespace {

constexpr int64_t line_bytes = 64; // of a cache
constexpr int64_t ahead      = 32; // cells

} // namespace

int64_t Cells::num_floats(const Operation & op) {
    return tile_cells * (rounded_up(op.dim_k, num_lanes) + rounded_up(op.dim_v, num_lanes));
}

Cells::Cells(const Operation & operation, float * memory)
    : keys(memory), key_stride(static_cast<int>(rounded_up(operation.dim_k, num_lanes))),
      value_stride(static_cast<int>(rounded_up(operation.dim_v, num_lanes))), op_(operation), key_source_(operation.k, {}),
      value_source_(operation.v, {}) {
    values = keys + tile_cells * key_stride;
    if (key_stride != op_.dim_k || value_stride != op_.dim_v) { // the padding of vectors is computed with, and never used
        std::fill_n(keys, num_floats(op_), 0.0f);
    }
}

void Cells::begin(const Rows & rows) {
    key_source_   = Source(op_.k, rows);
    value_source_ = Source(op_.v, rows);
}

Cells::Source::Source(const ggml_tensor * tensor, const Rows & rows)
    : first(at(tensor, 0, rows.kv_head, rows.stream)), stride(tensor->nb[1]), num_bytes(ggml_row_size(tensor->type, tensor->ne[0])),
      type(tensor->type), count(tensor->ne[0]), end(tensor->ne[1]) {}

// Prefetches cells that are likely to be read soon.
inline void Cells::Source::read(float * to, int64_t cell) const {
    const char * from = first + cell * stride;
    if (cell + ahead < end) {
        for (int64_t byte = 0; byte < num_bytes; byte += line_bytes) {
            __builtin_prefetch(from + ahead * stride + byte);
        }
    }
    to_floats(to, from, type, count);
}

void Cells::read_keys(int64_t first_cell, const uint8_t * offsets, int count) {
    for (int place = 0; place < count; ++place) {
        key_source_.read(keys + place * key_stride, first_cell + offsets[place]);
    }
    std::fill(keys + count * key_stride, keys + filled_cells(count) * key_stride, 0.0f);
}

void Cells::read_values(int64_t first_cell, const uint8_t * offsets, int count, bool skips_nonfinite) {
    for (int place = 0; place < count; ++place) {
        float * row = values + place * value_stride;
        value_source_.read(row, first_cell + offsets[place]);
        if (skips_nonfinite) {
            has_nonfinite[place] = !std::all_of(row, row + op_.dim_v, [](float value) { return std::isfinite(value); });
            if (has_nonfinite[place]) {
                std::fill_n(row, op_.dim_v, 0.0f);
            }
        }
    }
}

} // namespace paceline::attention
