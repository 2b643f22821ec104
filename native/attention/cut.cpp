#include "cut.hpp"

#include <algorithm>
#include <utility>

#include "block.hpp"

namespace paceline::attention {
namespace {

constexpr int64_t max_kept_floats   = int64_t{8} << 20;
constexpr int64_t items_per_thread = 4; // so that threads that are held up leave work to others
constexpr int sums_per_thread      = 3; // of a block, a span and a chunk

int64_t num_parts(int64_t value, int64_t unit) { return (value + unit - 1) / unit; }

} // namespace

Cut::Cut(const Operation & op, int num_threads) {
    num_chunks     = num_parts(op.num_cells, chunk_cells);
    num_spans      = num_parts(op.num_cells, span_cells);
    rows_per_block = rounded_up(num_parts(op.num_rows(), num_parts(op.num_rows(), max_rows)), num_lanes);
    num_blocks     = num_parts(op.num_rows(), rows_per_block);
    num_items      = num_blocks * op.num_kv_heads * op.num_streams;
    sums_floats    = rounded_up(Sums::num_floats(op.dim_v, rows_per_block), line_floats);
    thread_floats  = rounded_up(Block::num_floats(op), line_floats) + sums_per_thread * sums_floats;
    unit           = Unit::block;
    for (const auto & [finer, number] : {std::pair(Unit::span, num_spans), std::pair(Unit::chunk, num_chunks)}) {
        const bool is_enough = num_items * units_per_item() >= items_per_thread * num_threads;
        if (!is_enough && num_items * number * sums_floats <= max_kept_floats) {
            unit = finer;
        }
    }
    kept_floats  = unit == Unit::block ? 0 : num_items * units_per_item() * sums_floats;
    total_floats = 2 * line_floats + kept_floats + num_threads * thread_floats;
}

Rows Cut::rows_of(const Operation & op, int64_t item) const {
    const int64_t first = item % num_blocks * rows_per_block, head = item / num_blocks;
    return {head / op.num_kv_heads, head % op.num_kv_heads, first,
            static_cast<int>(std::min(rows_per_block, op.num_rows() - first))};
}

} // namespace paceline::attention
