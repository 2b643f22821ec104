#include "sums.hpp"

#include <algorithm>
#include <limits>

namespace paceline::attention {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

bool has_seen(Lanes largest) { return any(largest != all(-infinity)); } // NaN is a score, too

// A row that has seen nothing is as far below zero as it was before.
Lanes base_of(Lanes largest) { return largest == all(-infinity) ? Lanes{} : largest; }

} // namespace

Sums::Sums(float * memory, int64_t dim_v, int64_t width)
    : largest(memory), total(memory + width), outputs(memory + 2 * width), dim_v(dim_v), width(width) {}

void Sums::clear() {
    std::fill_n(largest, width, -infinity);
    std::fill_n(total, width, 0.0f);
}

// A comparison loses NaN, a sum does not.
void Sums::set(int64_t column, Lanes highest, Lanes sum) {
    store(total + column, sum);
    store(largest + column, sum == sum ? highest : sum);
}

void Sums::spoil(int64_t column, IntLanes rows) {
    const Lanes nan = all(std::numeric_limits<float>::quiet_NaN());
    store(total + column, rows ? nan : load(total + column));
    store(largest + column, rows ? nan : load(largest + column));
}

void Sums::clear_outputs(int64_t column) {
    for (int64_t i = 0; i < dim_v; ++i) {
        store(outputs + i * width + column, Lanes{});
    }
}

void Sums::weigh(float * scores, int num_cells, int vector) {
    const int64_t column = vector * num_lanes;
    const Lanes before   = load(largest + column);
    Lanes highest        = before;
    for (int cell = 0; cell < num_cells; ++cell) {
        highest = larger(highest, load(scores + cell * width + column));
    }
    const Lanes base = base_of(highest);
    Lanes sum{};
    for (int cell = 0; cell < num_cells; ++cell) {
        const Lanes weight = exp2_of_negative(load(scores + cell * width + column) - base);
        sum += weight;
        store(scores + cell * width + column, weight);
    }
    if (!has_seen(before)) {
        clear_outputs(column);
    } else if (any(highest != before)) {
        const Lanes factor = exp2_of_negative(before - base);
        store(total + column, load(total + column) * factor);
        for (int64_t i = 0; i < dim_v; ++i) {
            store(outputs + i * width + column, load(outputs + i * width + column) * factor);
        }
    }
    set(column, highest, load(total + column) + sum);
}

void Sums::merge(const Sums & other) {
    for (int64_t column = 0; column < width; column += num_lanes) {
        const Lanes mine = load(largest + column), theirs = load(other.largest + column);
        if (!has_seen(theirs)) {
            continue;
        }
        if (!has_seen(mine)) {
            clear_outputs(column);
        }
        const Lanes highest = larger(mine, theirs), base = base_of(highest);
        const Lanes my_factor = exp2_of_negative(mine - base), their_factor = exp2_of_negative(theirs - base);
        set(column, highest, load(total + column) * my_factor + load(other.total + column) * their_factor);
        for (int64_t i = 0; i < dim_v; ++i) {
            const int64_t place = i * width + column;
            store(outputs + place, load(outputs + place) * my_factor + load(other.outputs + place) * their_factor);
        }
    }
}

bool Sums::are_finite() const {
    Lanes zero{}; // becomes NaN with the first number that is none
    for (int64_t column = 0; column < width; column += num_lanes) {
        if (has_seen(load(largest + column))) {
            zero += load(total + column) * 0.0f;
            for (int64_t i = 0; i < dim_v; ++i) {
                zero += load(outputs + i * width + column) * 0.0f;
            }
        }
    }
    return !any(zero != Lanes{});
}

} // namespace paceline::attention
