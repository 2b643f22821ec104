#include "token_rows.hpp"

#include <algorithm>
#include <limits>

namespace paceline::attention {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

float highest_of(const float * scores, int count) {
    float highest = -infinity;
    int done      = 0;
    if (count >= num_lanes) {
        SimdVec lanes = load(scores);
        for (done = num_lanes; done + num_lanes <= count; done += num_lanes) {
            lanes = max_of(lanes, load(scores + done));
        }
        highest = highest_lane(lanes);
    }
    for (; done < count; ++done) {
        highest = highest > scores[done] ? highest : scores[done];
    }
    return highest;
}

float base_of(float highest) { return highest == -infinity ? 0.0f : highest; }

} // namespace

int64_t TokenRows::num_floats(const Operation & op) {
    return rounded_up(op.dim_k, num_lanes) * tile_cells + num_lanes * chunk_cells + max_rows * rounded_up(op.dim_v, num_lanes);
}

TokenRows::TokenRows(const Operation & operation, Cells & cells, float * memory) : op_(operation), cells_(cells) {
    keys_    = memory;
    scores_  = keys_ + cells_.key_stride * tile_cells;
    outputs_ = scores_ + num_lanes * chunk_cells;
}

TokenRows::Seen TokenRows::list(const MaskedRows & masked) {
    Seen seen;
    int count = 0;
    for (int tile = 0; tile < tiles_per_chunk; ++tile) {
        seen.begins[tile] = count;
        for (int cell = 0; masked.seen[tile] == ~uint64_t{0} && cell < tile_cells; ++cell) {
            seen.offsets[count++] = static_cast<uint8_t>(tile * tile_cells + cell);
        }
        for (uint64_t cells = masked.seen[tile]; cells != 0 && cells != ~uint64_t{0}; cells &= cells - 1) {
            seen.offsets[count++] = static_cast<uint8_t>(tile * tile_cells + __builtin_ctzll(cells));
        }
    }
    seen.begins[tiles_per_chunk] = count;
    return seen;
}

void TokenRows::attend(const Part & part, int64_t first_cell, const float * queries, bool skips_nonfinite,
                       SoftmaxState & state) {
    const Seen seen    = list(*part.masked);
    const int num_rows = part.end - part.first;
    if (seen.begins[tiles_per_chunk] == 0) {
        return;
    }
    score(part, first_cell, queries, static_cast<int>(state.width), seen);
    Rescaling rescaling{};
    for (int i = 0; i < num_rows; ++i) {
        weigh(part, i, seen, rescaling, state);
    }
    std::fill_n(output_of(part.first), num_rows * cells_.value_stride, 0.0f);
    int begin = 0;
    for (int tile = 1; tile < tiles_per_chunk; ++tile) {
        if (!rescaling.is_any[tile]) {
            continue;
        }
        add_values(part, first_cell, seen, begin, seen.begins[tile], skips_nonfinite, state);
        begin = seen.begins[tile];
        for (int i = 0; i < num_rows; ++i) {
            float * output = output_of(part.first + i);
            for (int number = 0; number < cells_.value_stride; number += num_lanes) {
                store(output + number, load(output + number) * rescaling.factors[i][tile]);
            }
        }
    }
    add_values(part, first_cell, seen, begin, seen.begins[tiles_per_chunk], skips_nonfinite, state);
}

void TokenRows::score(const Part & part, int64_t first_cell, const float * queries, int width, const Seen & seen) {
    const int all = seen.begins[tiles_per_chunk], dim_k = static_cast<int>(op_.dim_k);
    for (int first = 0; first < all; first += tile_cells) {
        const int count = std::min(tile_cells, all - first);
        cells_.read_keys(first_cell, seen.offsets + first, count);
        transpose_keys(count);
        multiply({queries + part.first, 1, width, keys_, tile_cells, scores_ + first, chunk_cells, dim_k, false},
                 part.end - part.first, 0, (count + num_lanes - 1) / num_lanes);
    }
}

void TokenRows::transpose_keys(int num_cells) {
    for (int cell = 0; cell < num_cells; cell += num_lanes) {
        for (int number = 0; number < cells_.key_stride; number += num_lanes) {
            SimdVec square[num_lanes];
            for (int i = 0; i < num_lanes; ++i) {
                square[i] = load(cells_.keys + (cell + i) * cells_.key_stride + number);
            }
            transpose(square);
            for (int i = 0; i < num_lanes; ++i) {
                store(keys_ + (number + i) * tile_cells + cell, square[i]);
            }
        }
    }
}

// The same as SoftmaxState::softmax_tile, for one row, tile by tile.
void TokenRows::weigh(const Part & part, int index, const Seen & seen, Rescaling & rescaling, SoftmaxState & state) {
    float highest[tiles_per_chunk + 1], all_weights = 0.0f;
    weigh_cells(scores_ + index * chunk_cells, seen, highest);
    for (int tile = 0; tile < tiles_per_chunk; ++tile) {
        float & factor = rescaling.factors[index][tile] = 1.0f;
        if (highest[tile] != -infinity && highest[tile + 1] != highest[tile]) {
            factor = exp2_of_negative(broadcast(highest[tile] - base_of(highest[tile + 1])))[0];
            rescaling.is_any[tile] = true;
        }
        float weights = 0.0f;
        for (int cell = seen.begins[tile]; cell < seen.begins[tile + 1]; ++cell) {
            weights += scores_[index * chunk_cells + cell];
        }
        all_weights = all_weights * factor + weights;
    }
    const int row      = part.first + index;
    state.row_sum[row] = all_weights;
    state.row_max[row] = all_weights == all_weights ? highest[tiles_per_chunk] : all_weights;
}

// Turns scores into weights; highest[i]: the highest score before tile i.
void TokenRows::weigh_cells(float * scores, const Seen & seen, float * highest) const {
    const int all = seen.begins[tiles_per_chunk], filled = static_cast<int>(rounded_up(all, num_lanes));
    for (int cell = 0; cell < all && op_.softcap != 0; cell += num_lanes) {
        op_.cap(scores + cell);
    }
    float bases[chunk_cells];
    std::fill(bases + all, bases + filled, 0.0f);
    highest[0] = -infinity;
    for (int tile = 0; tile < tiles_per_chunk; ++tile) {
        const int begin   = seen.begins[tile], count = seen.begins[tile + 1] - begin;
        const float found = highest_of(scores + begin, count);
        highest[tile + 1] = highest[tile] > found ? highest[tile] : found;
        std::fill_n(bases + begin, count, base_of(highest[tile + 1]));
    }
    for (int cell = 0; cell < all; cell += num_lanes) {
        store(scores + cell, exp2_of_negative(load(scores + cell) - load(bases + cell)));
    }
}

void TokenRows::add_values(const Part & part, int64_t first_cell, const Seen & seen, int begin, int end, bool skips_nonfinite,
                           SoftmaxState & state) {
    const int num_rows = part.end - part.first, stride = cells_.value_stride;
    for (int first = begin; first < end; first += tile_cells) {
        const int count = std::min(tile_cells, end - first);
        cells_.read_values(first_cell, seen.offsets + first, count, skips_nonfinite);
        for (int cell = 0; cell < count && skips_nonfinite; ++cell) {
            for (int i = 0; i < num_rows && cells_.has_nonfinite[cell]; ++i) {
                if (scores_[i * chunk_cells + first + cell] != 0) {
                    state.row_max[part.first + i] = state.row_sum[part.first + i] = std::numeric_limits<float>::quiet_NaN();
                }
            }
        }
        multiply({scores_ + first, chunk_cells, 1, cells_.values, stride, output_of(part.first), stride, count, true}, num_rows, 0,
                 stride / num_lanes);
    }
}

void TokenRows::write(int vector, SoftmaxState & state) {
    const int first = vector * num_lanes;
    if (!any(load(state.row_max + first) != broadcast(-infinity))) {
        return;
    }
    for (int number = 0; number < cells_.value_stride; number += num_lanes) {
        SimdVec square[num_lanes];
        for (int i = 0; i < num_lanes; ++i) {
            square[i] = state.row_max[first + i] == -infinity ? SimdVec{} : load(output_of(first + i) + number);
        }
        transpose(square);
        for (int i = 0; i < num_lanes && number + i < op_.dim_v; ++i) {
            store(state.outputs + (number + i) * state.width + first, square[i]);
        }
    }
}

} // namespace paceline::attention
