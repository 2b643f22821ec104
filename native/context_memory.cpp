#include "context.hpp"

#include <algorithm>

#include "error.hpp"
#include "log.hpp"

namespace paceline {
namespace {

std::string str(int64_t value) { return std::to_string(value); }

} // namespace

Positions Context::positions_locked(int32_t seq_id) const {
    llama_memory_t of = memory();
    return {llama_memory_seq_pos_min(of, seq_id), llama_memory_seq_pos_max(of, seq_id)};
}

Positions Context::positions(int32_t seq_id) const {
    std::lock_guard<std::mutex> lock(mutex_);
    check_seq("seq_id", seq_id);
    return positions_locked(seq_id);
}

void Context::truncate_locked(int32_t seq_id, int32_t first) { llama_memory_seq_rm(memory(), seq_id, first, -1); }

void Context::remove(int32_t seq_id, int32_t first, int32_t end) {
    std::lock_guard<std::mutex> lock(mutex_);
    check_seq("seq_id", seq_id);
    const Positions held = positions_locked(seq_id);
    if (first <= held.min && (end < 0 || end > held.max)) {
        llama_memory_seq_rm(memory(), seq_id, -1, -1);
        return;
    }
    if (first > held.max || (end >= 0 && end <= first)) {
        return; // nothing lies there
    }
    if (end >= 0 && end <= held.max) {
        fail("Unsupported", "positions " + str(first) + " to " + str(end) + " lie in the middle of sequence " + str(seq_id) + " (" +
                                str(held.min) + " to " + str(held.max) + "): only its end can be removed, since what follows depends on it");
    }
    if (needs_shadows()) {
        fail("Unsupported", "a model with recurrent state cannot go back to position " + str(first) + " of sequence " + str(seq_id) +
                                ": remove it whole, or restore a saved state");
    }
    if (!llama_memory_seq_rm(memory(), seq_id, first, -1)) {
        fail("Unsupported", "this model's memory cannot go back to position " + str(first) + " of sequence " + str(seq_id));
    }
}

void Context::copy(int32_t from, int32_t to, int32_t first, int32_t end) {
    std::lock_guard<std::mutex> lock(mutex_);
    check_seq("from_seq_id", from);
    check_seq("to_seq_id", to);
    if (from == to) {
        fail("InvalidParams", "from_seq_id and to_seq_id are both " + str(from));
    }
    const Positions source = positions_locked(from);
    const Positions target = positions_locked(to);
    first                  = std::max(first, 0);
    end                    = end < 0 ? source.max + 1 : std::min(end, source.max + 1);
    const bool whole       = first <= std::max(source.min, 0) && end == source.max + 1;
    if (target.max >= 0 && (first != target.max + 1 || needs_shadows() || !kv_unified_)) {
        fail("InvalidParams", "to_seq_id " + str(to) + " holds positions up to " + str(target.max) + ": remove it first");
    }
    if (!whole && needs_shadows()) {
        fail("Unsupported", "a model with recurrent state can only copy a whole sequence, not positions " + str(first) + " to " + str(end));
    }
    if (!whole && !kv_unified_) {
        fail("Unsupported", "without kv_unified only a whole sequence can be copied, not positions " + str(first) + " to " + str(end));
    }
    if (first < end) {
        llama_memory_seq_cp(memory(), from, to, whole ? -1 : first, whole ? -1 : end);
    }
}

void Context::keep(int32_t seq_id) {
    std::lock_guard<std::mutex> lock(mutex_);
    check_seq("seq_id", seq_id);
    llama_memory_seq_keep(memory(), seq_id);
}

void Context::clear(bool data) {
    std::lock_guard<std::mutex> lock(mutex_);
    llama_memory_clear(memory(), data);
}

// ---- state

std::vector<uint8_t> Context::save(int32_t seq_id, bool partial) const {
    std::lock_guard<std::mutex> lock(mutex_);
    check_seq("seq_id", seq_id);
    memory();
    const llama_state_seq_flags flags = partial ? LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY : LLAMA_STATE_SEQ_FLAGS_NONE;
    std::vector<uint8_t>        state(llama_state_seq_get_size_ext(get(), seq_id, flags));
    LogCapture                  log;
    const size_t                size = llama_state_seq_get_data_ext(get(), state.data(), state.size(), seq_id, flags);
    if (size == 0 || size > state.size()) {
        fail("StateError", "the state of sequence " + str(seq_id) + " cannot be saved: " + log.words("llama.cpp gave no reason"));
    }
    state.resize(size);
    return state;
}

void Context::restore(int32_t seq_id, std::span<const uint8_t> state, bool partial) {
    std::lock_guard<std::mutex> lock(mutex_);
    check_seq("seq_id", seq_id);
    memory();
    LogCapture                  log;
    const llama_state_seq_flags flags = partial ? LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY : LLAMA_STATE_SEQ_FLAGS_NONE;
    if (llama_state_seq_set_data_ext(get(), state.data(), state.size(), seq_id, flags) == 0) {
        llama_memory_seq_rm(memory(), seq_id, -1, -1);
        fail("StateError", "the state does not fit into sequence " + str(seq_id) + ", which is now empty: " +
                               log.words("llama.cpp gave no reason"));
    }
}

} // namespace paceline
