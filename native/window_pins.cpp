#include "window_pins.hpp"

#include <algorithm>

namespace paceline {

WindowPins::WindowPins(llama_memory_t memory, uint32_t n_seq_max, int32_t n_swa)
    : memory_(memory), n_swa_(n_swa), ends_(n_seq_max, 0) {}

// Whether the window of a sequence that continues at `next` may have left a position that is not pinned. Windows slide by
// position or by chunks of n_swa; within one chunk neither leaves anything.
bool WindowPins::has_left(int32_t seq_id, int32_t next) const {
    return ends_[static_cast<size_t>(seq_id)] / n_swa_ != next / n_swa_;
}

void WindowPins::pin(int32_t seq_id, int32_t next) {
    int32_t & end = ends_[static_cast<size_t>(seq_id)];
    if (end < next) {
        llama_memory_seq_cp(memory_, seq_id, seq_id + static_cast<int32_t>(ends_.size()), end, -1);
        end = next;
    }
}

void WindowPins::before_batch(int32_t seq_id, int32_t next, int32_t count) {
    if (has_left(seq_id, next + count)) {
        pin(seq_id, next);
    }
}

void WindowPins::added(int32_t seq_id) {
    const int32_t next = llama_memory_seq_pos_max(memory_, seq_id) + 1;
    if (has_left(seq_id, next)) {
        pin(seq_id, next);
    }
}

void WindowPins::removed(int32_t seq_id, int32_t first) {
    llama_memory_seq_rm(memory_, seq_id + static_cast<int32_t>(ends_.size()), first > 0 ? first : -1, -1);
    int32_t & end = ends_[static_cast<size_t>(seq_id)];
    end           = std::min(end, std::max(first, 0));
}

void WindowPins::kept_only(int32_t seq_id) {
    std::fill(ends_.begin(), ends_.end(), 0);
    if (seq_id >= 0) {
        added(seq_id);
    }
}

} // namespace paceline
