// Second owners of cells, which keep a full-size sliding window cache (swa_full) complete.
//
// llama.cpp gives a cell that one sequence alone owns, and that its window has left, to the next computed token, even if
// the cache has free cells, and drops all earlier positions of that sequence with it. It never takes a cell of two sequences.
// So every sequence is shared with another id, n_seq_max above its own, before the window leaves a position. Needs the
// context's mutex held.
#pragma once

#include <cstdint>
#include <vector>

#include "llama.h"

namespace paceline {

class WindowPins {
public:
    WindowPins(llama_memory_t memory, uint32_t n_seq_max, int32_t n_swa);

    // Before a batch computes positions [next, next + count) of a sequence.
    void before_batch(int32_t seq_id, int32_t next, int32_t count);
    // After positions were added to a sequence: positions that its window has left already are pinned.
    void added(int32_t seq_id);
    // After positions from `first` on were removed from a sequence.
    void removed(int32_t seq_id, int32_t first);
    // After every sequence but `seq_id` was emptied, with its pins; -1: `seq_id` as well.
    void kept_only(int32_t seq_id);

private:
    void pin(int32_t seq_id, int32_t next);
    bool has_left(int32_t seq_id, int32_t next) const;

    llama_memory_t       memory_;
    int32_t              n_swa_;
    std::vector<int32_t> ends_; // by sequence: positions below are pinned
};

} // namespace paceline
