// How an operation is divided among threads.
#pragma once

#include <cstdint>

#include "operation.hpp"

namespace paceline::attention {

inline constexpr int64_t line_floats = 16; // of a cache line: threads do not share one

// By blocks of rows; with too few of them for the threads, by spans or chunks of a block's cells as well; their states are
// merged afterwards (split-KV).
struct WorkPartition {
    enum class Unit { block, span, chunk };

    WorkPartition(const Operation & operation, int num_threads);

    int64_t num_chunks, num_spans, num_blocks, rows_per_block, num_items; // items: blocks of all heads and streams
    int64_t state_floats, thread_floats, partial_floats, total_floats;
    Unit unit;

    int64_t units_per_item() const { return unit == Unit::block ? 1 : unit == Unit::span ? num_spans : num_chunks; }
    Rows rows_of(const Operation & operation, int64_t item) const;
};

} // namespace paceline::attention
