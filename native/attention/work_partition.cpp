#include "work_partition.hpp"

#include <algorithm>
#include <utility>

#include "block.hpp"

namespace paceline::attention {
namespace {

constexpr int64_t max_partial_floats = int64_t{8} << 20;
constexpr int64_t items_per_thread   = 4; // so that work is left for others while one thread is held up
constexpr int states_per_thread      = 3; // of a block, a span and a chunk

int64_t num_parts(int64_t value, int64_t unit) { return (value + unit - 1) / unit; }

} // namespace

WorkPartition::WorkPartition(const Operation & op, int num_threads) {
    num_chunks     = num_parts(op.num_cells, chunk_cells);
    num_spans      = num_parts(op.num_cells, span_cells);
    rows_per_block = rounded_up(num_parts(op.num_rows(), num_parts(op.num_rows(), max_rows)), num_lanes);
    num_blocks     = num_parts(op.num_rows(), rows_per_block);
    num_items      = num_blocks * op.num_kv_heads * op.num_streams;
    state_floats   = rounded_up(SoftmaxState::num_floats(op.dim_v, rows_per_block), line_floats);
    thread_floats  = rounded_up(Block::num_floats(op), line_floats) + states_per_thread * state_floats;
    unit           = Unit::block;
    for (const auto & [finer, number] : {std::pair(Unit::span, num_spans), std::pair(Unit::chunk, num_chunks)}) {
        const bool is_enough = num_items * units_per_item() >= items_per_thread * num_threads;
        if (!is_enough && num_items * number * state_floats <= max_partial_floats) {
            unit = finer;
        }
    }
    partial_floats = unit == Unit::block ? 0 : num_items * units_per_item() * state_floats;
    total_floats   = 2 * line_floats + partial_floats + num_threads * thread_floats;
}

Rows WorkPartition::rows_of(const Operation & op, int64_t item) const {
    const int64_t first = item % num_blocks * rows_per_block, head = item / num_blocks;
    return {head / op.num_kv_heads, head % op.num_kv_heads, first,
            static_cast<int>(std::min(rows_per_block, op.num_rows() - first))};
}

} // namespace paceline::attention
