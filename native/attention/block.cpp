#include "block.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace paceline::attention {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

// So that no block of a product is left to the slower rest. No more than filled_cells(), which are zeros behind the cells.
int whole_blocks(int num_cells) { return static_cast<int>(rounded_up(num_cells, 8)); }

} // namespace

int64_t Block::num_floats(const Operation & op) {
    return Cells::num_floats(op) + TokenRows::num_floats(op) + max_rows * (op.dim_k + 2 * tile_cells + 1);
}

Block::Block(const Operation & operation, float * memory)
    : op_(operation), costs_(operation), cells_(operation, memory),
      token_rows_(operation, cells_, memory + Cells::num_floats(operation)) {
    queries_ = memory + Cells::num_floats(op_) + TokenRows::num_floats(op_);
    scores_  = queries_ + max_rows * op_.dim_k;
    masks_   = scores_ + max_rows * tile_cells;
    slopes_  = masks_ + max_rows * tile_cells;
}

void Block::begin(const Rows & rows) {
    rows_ = rows;
    cells_.begin(rows);
    std::fill_n(has_queries_, rows.num_vectors(), false);
    for (int row = 0; row < rows.count; ++row) {
        slopes_[row] = op_.slope_of(rows.head_of(op_, row)) * log2_e;
    }
}

// A weight of zero times an infinity is NaN, so a masked cell of another sequence that holds infinities or NaN would reach
// rows that do not see it. That is rare: it shows in the state, and then the cells are computed again without these values.
void Block::attend(int64_t first_cell, int64_t end_cell, SoftmaxState & state) {
    const int num_cells = static_cast<int>(end_cell - first_cell);
    mask_.read(op_, rows_, first_cell, num_cells);
    choose_lanes(num_cells);
    attend_chunk(first_cell, num_cells, state);
    if (!state.is_finite()) {
        skips_nonfinite_ = true;
        attend_chunk(first_cell, num_cells, state);
        skips_nonfinite_ = false;
    }
}

// If rows of a vector see cells of their own, as streams' tokens do, a vector of rows would be multiplied with each cell for few
// of its lanes. Either way the bits are the same, but for the sign of a zero.
void Block::choose_lanes(int num_cells) {
    for (int vector = 0; vector < rows_.num_vectors(); ++vector) {
        uint64_t seen[tiles_per_chunk] = {};
        float with_cells = 0, with_rows = 0;
        for (const MaskedRows & one : mask_) {
            if (one.lies_in(vector)) {
                with_cells += costs_.of_cells(one, vector);
                for (int tile = 0; tile < tiles_per_chunk; ++tile) {
                    seen[tile] |= one.seen[tile];
                }
            }
        }
        for (int tile = 0; tile * tile_cells < num_cells; ++tile) {
            with_rows += costs_.of_rows(seen[tile], std::min(tile_cells, num_cells - tile * tile_cells), rows_.num_vectors());
        }
        takes_cells_[vector] = with_cells < with_rows;
        takes_rows_[vector]  = with_rows > 0 && !takes_cells_[vector];
    }
}

// Rows in cells' lanes are computed at most a vector's worth at a time, each with the cells read and turned anew.
float Block::Costs::of_cells(const MaskedRows & rows, int vector) const {
    const int in_vector = std::min(rows.end, (vector + 1) * num_lanes) - std::max(rows.first, vector * num_lanes);
    const float share   = in_vector / static_cast<float>(std::min(rows.end - rows.first, num_lanes));
    return rows.adds ? infinity : rows.num_seen() * (share * (read + transposed) + in_vector * row);
}

float Block::Costs::of_rows(uint64_t seen, int num_cells, int num_vectors) const {
    const bool is_whole = is_most(seen, num_cells);
    const int num_read  = is_whole ? num_cells : __builtin_popcountll(seen);
    return whole_blocks(num_read) * scored + num_read * (weighed + read / (is_whole ? num_vectors : 1));
}

Block::Costs::Costs(const Operation & op)
    : read((op.dim_k + op.dim_v) * 3.0f / num_lanes), scored(1.1f * op.dim_k), weighed(1.1f * (op.dim_v + 24.0f)),
      transposed(op.dim_k * 6.0f / num_lanes), row((op.dim_k + op.dim_v + 24.0f) / num_lanes + 2.0f) {}

void Block::attend_chunk(int64_t first_cell, int num_cells, SoftmaxState & state) {
    state.clear();
    attend_token_rows(first_cell, state);
    if (std::none_of(takes_rows_, takes_rows_ + rows_.num_vectors(), [](bool takes) { return takes; })) {
        return;
    }
    for (int tile = 0; tile * tile_cells < num_cells; ++tile) {
        attend_tile(first_cell + tile * tile_cells, tile, std::min(tile_cells, num_cells - tile * tile_cells), state);
    }
}

void Block::attend_token_rows(int64_t first_cell, SoftmaxState & state) {
    for (const MaskedRows & one : mask_) {
        for (int first = one.first; first < one.end;) {
            const int vector = first / num_lanes, end = std::min(one.end, first + num_lanes);
            int upto = (vector + 1) * num_lanes;
            if (takes_cells_[vector]) {
                read_queries(vector);
                if (upto < end && takes_cells_[vector + 1]) {
                    read_queries(vector + 1);
                    upto = end;
                }
                token_rows_.attend({first, std::min(upto, end), &one}, first_cell, queries_, skips_nonfinite_, state);
            }
            first = upto;
        }
    }
    for (int vector = 0; vector < rows_.num_vectors(); ++vector) {
        if (takes_cells_[vector]) {
            token_rows_.write(vector, state);
        }
    }
}

// Vectors that see most of a tile are multiplied with all of it, several at a time, others with the cells that they see. Cells that a
// row does not see leave no trace in its sums, so that its bits are the same either way.
void Block::attend_tile(int64_t first_cell, int tile, int num_cells, SoftmaxState & state) {
    const TileMask mask(mask_, tile, num_cells, rows_, takes_rows_, slopes_, masks_);
    const auto is_whole = [&](int vector) { return takes_rows_[vector] && mask.takes_tile(vector, num_cells); };
    bool is_read = false;
    for (int first = 0; first < rows_.num_vectors();) {
        int end = first;
        while (end < rows_.num_vectors() && is_whole(end)) {
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
        if (takes_rows_[vector] && mask.seen[vector] != 0 && !is_whole(vector)) {
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
    const int width = rows_.width(), first = vector * num_lanes;
    const float factor = op_.scale * log2_e;
    const float * queries[num_lanes] = {};
    for (int i = 0; i < num_lanes && first + i < rows_.count; ++i) {
        const int64_t token = rows_.token_of(op_, first + i), head = rows_.head_of(op_, first + i);
        queries[i]          = reinterpret_cast<const float *>(at(op_.q, token, head, rows_.stream));
    }
    int64_t number = 0;
    for (; number + num_lanes <= op_.dim_k; number += num_lanes) {
        SimdVec square[num_lanes];
        for (int i = 0; i < num_lanes; ++i) {
            square[i] = queries[i] ? load(queries[i] + number) * factor : SimdVec{};
        }
        transpose(square);
        for (int i = 0; i < num_lanes; ++i) {
            store(queries_ + (number + i) * width + first, square[i]);
        }
    }
    for (; number < op_.dim_k; ++number) {
        for (int i = 0; i < num_lanes; ++i) {
            queries_[number * width + first + i] = queries[i] ? queries[i][number] * factor : 0.0f;
        }
    }
    has_queries_[vector] = true;
}

void Block::read_cells(int64_t first_cell, uint64_t cells) {
    num_read_ = 0;
    for (; cells != 0; cells &= cells - 1) {
        read_[num_read_++] = static_cast<uint8_t>(__builtin_ctzll(cells));
    }
    cells_.read_keys(first_cell, read_, num_read_);
    cells_.read_values(first_cell, read_, num_read_, skips_nonfinite_);
}

void Block::attend_vectors(int first, int count, const bool * is_masked, SoftmaxState & state) {
    const int width = rows_.width(), dim_k = static_cast<int>(op_.dim_k), dim_v = static_cast<int>(op_.dim_v);
    multiply({cells_.keys, cells_.key_stride, 1, queries_, width, scores_, width, dim_k, false}, whole_blocks(num_read_), first,
             count);
    for (int vector = first; vector < first + count; ++vector) {
        for (int cell = 0; cell < num_read_ && (op_.softcap != 0 || is_masked[vector]); ++cell) {
            float * scores = scores_ + cell * width + vector * num_lanes;
            if (op_.softcap != 0) {
                op_.cap(scores);
            }
            if (is_masked[vector]) { // selected, not added: a masked cell may hold anything
                const SimdVec mask = load(masks_ + read_[cell] * width + vector * num_lanes);
                store(scores, mask == broadcast(-infinity) ? mask : load(scores) + mask);
            }
        }
        state.softmax_tile(scores_, num_read_, vector);
        for (int cell = 0; cell < num_read_ && skips_nonfinite_; ++cell) {
            if (cells_.has_nonfinite[cell]) {
                state.set_nan(vector * num_lanes, load(scores_ + cell * width + vector * num_lanes) != SimdVec{});
            }
        }
    }
    multiply({cells_.values, 1, cells_.value_stride, scores_, width, state.outputs, width, num_read_, true}, dim_v, first,
             count);
}

void Block::write_outputs(const SoftmaxState & state) const {
    for (int row = 0; row < rows_.count; ++row) {
        const int64_t token = rows_.token_of(op_, row), head = rows_.head_of(op_, row);
        const int64_t place = (rows_.stream * op_.num_tokens + token) * op_.num_heads + head;
        float * output      = static_cast<float *>(op_.node->data) + place * op_.dim_v;
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
