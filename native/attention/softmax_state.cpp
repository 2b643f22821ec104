#include "softmax_state.hpp"

#include <algorithm>
#include <limits>

namespace paceline::attention {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

bool has_seen(SimdVec highest) { return any(highest != broadcast(-infinity)); } // NaN is a score, too

// The number subtracted from scores: 0 for rows that have seen no cell, since the difference of infinities would be NaN.
SimdVec base_of(SimdVec highest) { return highest == broadcast(-infinity) ? SimdVec{} : highest; }

} // namespace

SoftmaxState::SoftmaxState(float * memory, int64_t dim_v, int64_t width)
    : row_max(memory), row_sum(memory + width), outputs(memory + 2 * width), dim_v(dim_v), width(width) {}

void SoftmaxState::clear() {
    std::fill_n(row_max, width, -infinity);
    std::fill_n(row_sum, width, 0.0f);
}

// The comparison in max_of loses NaN, a sum keeps it.
void SoftmaxState::set(int64_t column, SimdVec highest, SimdVec sum) {
    store(row_sum + column, sum);
    store(row_max + column, sum == sum ? highest : sum);
}

void SoftmaxState::set_nan(int64_t column, SimdIntVec rows) {
    const SimdVec nan = broadcast(std::numeric_limits<float>::quiet_NaN());
    store(row_sum + column, rows ? nan : load(row_sum + column));
    store(row_max + column, rows ? nan : load(row_max + column));
}

void SoftmaxState::clear_outputs(int64_t column) {
    for (int64_t i = 0; i < dim_v; ++i) {
        store(outputs + i * width + column, SimdVec{});
    }
}

void SoftmaxState::softmax_tile(float * scores, int num_cells, int vector) {
    const int64_t column = vector * num_lanes;
    const SimdVec before = load(row_max + column);
    SimdVec highest      = before;
    for (int cell = 0; cell < num_cells; ++cell) {
        highest = max_of(highest, load(scores + cell * width + column));
    }
    const SimdVec base = base_of(highest);
    SimdVec sum{};
    for (int cell = 0; cell < num_cells; ++cell) {
        const SimdVec weight = exp2_of_negative(load(scores + cell * width + column) - base);
        sum += weight;
        store(scores + cell * width + column, weight);
    }
    if (!has_seen(before)) {
        clear_outputs(column);
    } else if (any(highest != before)) {
        const SimdVec factor = exp2_of_negative(before - base);
        store(row_sum + column, load(row_sum + column) * factor);
        for (int64_t i = 0; i < dim_v; ++i) {
            store(outputs + i * width + column, load(outputs + i * width + column) * factor);
        }
    }
    set(column, highest, load(row_sum + column) + sum);
}

void SoftmaxState::merge(const SoftmaxState & other) {
    for (int64_t column = 0; column < width; column += num_lanes) {
        const SimdVec mine = load(row_max + column), theirs = load(other.row_max + column);
        if (!has_seen(theirs)) {
            continue;
        }
        if (!has_seen(mine)) {
            clear_outputs(column);
        }
        const SimdVec highest = max_of(mine, theirs), base = base_of(highest);
        const SimdVec my_factor = exp2_of_negative(mine - base), their_factor = exp2_of_negative(theirs - base);
        set(column, highest, load(row_sum + column) * my_factor + load(other.row_sum + column) * their_factor);
        for (int64_t i = 0; i < dim_v; ++i) {
            const int64_t place = i * width + column;
            store(outputs + place, with_product(load(outputs + place) * my_factor, load(other.outputs + place), their_factor));
        }
    }
}

bool SoftmaxState::is_finite() const {
    constexpr int num_sums = 4;  // beside each other, so that none waits for the one before
    SimdVec zeros[num_sums] = {}; // become NaN with the first infinity or NaN
    for (int64_t column = 0; column < width; column += num_lanes) {
        if (!has_seen(load(row_max + column))) {
            continue;
        }
        zeros[0] += load(row_sum + column) * 0.0f;
        int64_t i = 0;
        for (; i + num_sums <= dim_v; i += num_sums) {
            for (int j = 0; j < num_sums; ++j) {
                zeros[j] += load(outputs + (i + j) * width + column) * 0.0f;
            }
        }
        for (; i < dim_v; ++i) {
            zeros[0] += load(outputs + i * width + column) * 0.0f;
        }
    }
    return !any(zeros[0] + zeros[1] + zeros[2] + zeros[3] != SimdVec{});
}

} // namespace paceline::attention
