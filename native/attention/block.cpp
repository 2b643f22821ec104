#include "block.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "tile_mask.hpp"

namespace paceline::attention {
namespace {

constexpr float infinity    = std::numeric_limits<float>::infinity();
constexpr size_t line_bytes = 64; // of a cache

// Rows of A that `multiply` computes in whole blocks, with the same instructions for each.
int filled(int num_cells) { return (num_cells + 7) / 8 * 8; }

void cap(float softcap, float * scores) { // to the base 2 before and after
    for (int i = 0; i < num_lanes; ++i) {
        scores[i] = softcap * log2_e * std::tanh(scores[i] / (softcap * log2_e));
    }
}

} // namespace

int64_t Block::num_floats(const Operation & op) {
    return max_rows * (op.dim_k + 2 * tile_cells + 1) + tile_cells * (op.dim_k + op.dim_v);
}

Block::Block(const Operation & operation, float * memory) : op_(operation) {
    queries_ = memory;
    scores_  = queries_ + max_rows * op_.dim_k;
    masks_   = scores_ + max_rows * tile_cells;
    slopes_  = masks_ + max_rows * tile_cells;
    keys_    = slopes_ + max_rows;
    values_  = keys_ + tile_cells * op_.dim_k;
}

void Block::begin(const Rows & rows) {
    rows_ = rows;
    std::fill_n(has_queries_, rows.num_vectors(), false);
    for (int row = 0; row < rows.count; ++row) {
        slopes_[row] = op_.slope_of(rows.head_of(op_, row)) * log2_e;
    }
}

// A weight of zero times an infinity is NaN, so a masked cell of another sequence that holds infinities or NaN would reach
// rows that do not see it. That is rare: it shows in the state, and then the cells are computed again without those values.
void Block::attend(int64_t first_cell, int64_t end_cell, SoftmaxState & state) {
    attend_tiles(first_cell, end_cell, state);
    if (!state.is_finite()) {
        skips_nonfinite_ = true;
        attend_tiles(first_cell, end_cell, state);
        skips_nonfinite_ = false;
    }
}

void Block::attend_tiles(int64_t first_cell, int64_t end_cell, SoftmaxState & state) {
    state.clear();
    for (int64_t cell = first_cell; cell < end_cell; cell += tile_cells) {
        attend_tile(cell, static_cast<int>(std::min<int64_t>(tile_cells, end_cell - cell)), state);
    }
}

// Vectors that see most of a tile are multiplied with all of it, several at a time. Streams that decode beside each other have
// every so manyth cell: such vectors read theirs alone. Cells that a row does not see leave no trace in its sums, so that
// its bits are the same either way.
void Block::attend_tile(int64_t first_cell, int num_cells, SoftmaxState & state) {
    const TileMask mask(op_, rows_, first_cell, num_cells, slopes_, masks_);
    bool is_read = false;
    for (int first = 0; first < rows_.num_vectors();) {
        int end = first;
        while (end < rows_.num_vectors() && mask.takes_tile(end, num_cells)) {
            read_queries(end++);
        }
        if (end > first) {
            if (!is_read) {
                read_cells(first_cell, all_cells(num_cells));
                is_read = true;
            }
            attend_vectors(first, end - first, mask.is_masked, state);
        }
        first = end + 1;
    }
    for (int vector = 0; vector < rows_.num_vectors(); ++vector) {
        if (mask.seen[vector] != 0 && !mask.takes_tile(vector, num_cells)) {
            read_queries(vector);
            read_cells(first_cell, mask.seen[vector]);
            attend_vectors(vector, 1, mask.is_masked, state);
        }
    }
}

void Block::read_queries(int vector) {
    if (has_queries_[vector]) {
        return;
    }
    const int width    = rows_.width();
    const float factor = op_.scale * log2_e;
    for (int row = vector * num_lanes; row < (vector + 1) * num_lanes; ++row) {
        const char * query = row < rows_.count ? at(op_.q, rows_.token_of(op_, row), rows_.head_of(op_, row), rows_.stream) : nullptr;
        for (int64_t i = 0; i < op_.dim_k; ++i) {
            queries_[i * width + row] = query ? reinterpret_cast<const float *>(query)[i] * factor : 0.0f;
        }
    }
    has_queries_[vector] = true;
}

// Into the caches, while a tile is computed, what is likely to be the next one.
void Block::prefetch(const ggml_tensor * cells, int64_t cell) const {
    if (cell >= op_.num_cells) {
        return;
    }
    const char * row = at(cells, cell, rows_.kv_head, rows_.stream);
    for (size_t byte = 0; byte < ggml_row_size(cells->type, cells->ne[0]); byte += line_bytes) {
        __builtin_prefetch(row + byte);
    }
}

// Keys of zeros fill up the last block of a product, whose scores nobody reads.
void Block::read_cells(int64_t first_cell, uint64_t cells) {
    num_read_ = 0;
    for (; cells != 0; cells &= cells - 1) {
        const int place    = num_read_++, cell = __builtin_ctzll(cells);
        read_[place]       = static_cast<uint8_t>(cell);
        const int64_t each = first_cell + cell;
        prefetch(op_.k, each + tile_cells);
        prefetch(op_.v, each + tile_cells);
        to_floats(keys_ + place * op_.dim_k, at(op_.k, each, rows_.kv_head, rows_.stream), op_.k->type, op_.dim_k);
        to_floats(values_ + place * op_.dim_v, at(op_.v, each, rows_.kv_head, rows_.stream), op_.v->type, op_.dim_v);
    }
    std::fill(keys_ + num_read_ * op_.dim_k, keys_ + filled(num_read_) * op_.dim_k, 0.0f);
    if (skips_nonfinite_) {
        clear_nonfinite();
    }
}

void Block::clear_nonfinite() {
    for (int cell = 0; cell < num_read_; ++cell) {
        float * values    = values_ + cell * op_.dim_v;
        has_nonfinite_[cell] = !std::all_of(values, values + op_.dim_v, [](float value) { return std::isfinite(value); });
        if (has_nonfinite_[cell]) {
            std::fill_n(values, op_.dim_v, 0.0f);
        }
    }
}

void Block::attend_vectors(int first, int count, const bool * is_masked, SoftmaxState & state) {
    const int width = rows_.width(), dim_k = static_cast<int>(op_.dim_k), dim_v = static_cast<int>(op_.dim_v);
    multiply({keys_, dim_k, 1, queries_, scores_, width, dim_k, false}, filled(num_read_), first, count);
    for (int vector = first; vector < first + count; ++vector) {
        for (int cell = 0; cell < num_read_ && (op_.softcap != 0 || is_masked[vector]); ++cell) {
            float * scores = scores_ + cell * width + vector * num_lanes;
            if (op_.softcap != 0) {
                cap(op_.softcap, scores);
            }
            if (is_masked[vector]) { // selected, not added: a masked cell may hold anything
                const SimdVec mask = load(masks_ + read_[cell] * width + vector * num_lanes);
                store(scores, mask == broadcast(-infinity) ? mask : load(scores) + mask);
            }
        }
        state.softmax_tile(scores_, num_read_, vector);
        for (int cell = 0; cell < num_read_ && skips_nonfinite_; ++cell) {
            if (has_nonfinite_[cell]) {
                state.set_nan(vector * num_lanes, load(scores_ + cell * width + vector * num_lanes) != SimdVec{});
            }
        }
    }
    multiply({values_, 1, dim_v, scores_, state.outputs, width, num_read_, true}, dim_v, first, count);
}

void Block::write_outputs(const SoftmaxState & state) const {
    for (int row = 0; row < rows_.count; ++row) {
        if (rows_.is_filling(op_, row)) {
            continue;
        }
        const int64_t token = rows_.token_of(op_, row), head = rows_.head_of(op_, row);
        float * output = static_cast<float *>(op_.node->data) + ((rows_.stream * op_.num_tokens + token) * op_.num_heads + head) * op_.dim_v;
        const float row_max = state.row_max[row];
        if (row_max == -infinity) {
            std::fill_n(output, op_.dim_v, 0.0f);
            continue;
        }
        float weight = 1.0f, row_sum = state.row_sum[row];
        if (op_.sinks) { // a score without a value
            const float sink = static_cast<const float *>(op_.sinks->data)[head] * log2_e;
            const float both = std::max(sink, row_max);
            weight           = std::exp2(row_max - both);
            row_sum          = row_sum * weight + std::exp2(sink - both);
        }
        const float factor = weight / row_sum;
        for (int64_t i = 0; i < op_.dim_v; ++i) {
            output[i] = state.outputs[i * state.width + row] * factor;
        }
    }
}

} // namespace paceline::attention
