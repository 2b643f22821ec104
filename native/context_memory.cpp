#include "context.hpp"

#include <algorithm>
#include <cstring>

#include "draft_heads.hpp"
#include "error.hpp"
#include "log.hpp"

namespace paceline {
namespace {

// Empties a sequence at the end of a scope.
struct EmptiedAfter {
    llama_memory_t memory;
    int32_t        seq_id;
    ~EmptiedAfter() { llama_memory_seq_rm(memory, seq_id, -1, -1); }
};

// llama.cpp writes a magic number and the sequence id in front of every state.
constexpr size_t HEADER_SIZE = sizeof(uint32_t) + sizeof(llama_seq_id);

const std::string WRONG_POSITIONS = "the saved range holds other positions than it was saved with";

// Of a range in pieces: each with its size in front.
void append_piece(std::vector<uint8_t> & state, const std::vector<uint8_t> & piece) {
    const uint64_t size  = piece.size();
    const auto *   bytes = reinterpret_cast<const uint8_t *>(&size);
    state.insert(state.end(), bytes, bytes + sizeof(size));
    state.insert(state.end(), piece.begin(), piece.end());
}

} // namespace

Positions Context::positions_locked(int32_t seq_id) const {
    llama_memory_t of = memory();
    return {llama_memory_seq_pos_min(of, seq_id), llama_memory_seq_pos_max(of, seq_id)};
}

Positions Context::positions(int32_t seq_id) const {
    std::lock_guard<std::mutex> lock(mutex());
    check_seq("seq_id", seq_id);
    return positions_locked(seq_id);
}

void Context::remove_locked(int32_t seq_id, int32_t first) {
    if (first <= 0) {
        num_bare_[static_cast<size_t>(seq_id)] = 0;
        drop_shadow(seq_id);
    }
    llama_memory_seq_rm(memory(), seq_id, first > 0 ? first : -1, -1);
    removed_locked(seq_id, first);
}

void Context::removed_locked(int32_t seq_id, int32_t first) {
    if (pins_) {
        pins_->removed(seq_id, first);
    }
    if (heads_) {
        heads_->removed(seq_id, first);
    }
}

void Context::pin_added(int32_t seq_id) {
    if (pins_) {
        pins_->added(seq_id);
    }
}

// Whether a sequence that holds `held` could continue at position `next`: its window must still cover the attended cells. Draft
// heads keep whole sequences, and begin a sequence after tokens that they cannot read.
bool Context::covers(const Positions & held, int32_t next) const {
    return n_swa_ == 0 || follows_ || held.min <= (is_chunked_ ? next / n_swa_ * n_swa_ : std::max(0, next - n_swa_ + 1));
}

void Context::remove(int32_t seq_id, int32_t first) {
    std::lock_guard<std::mutex> lock(mutex());
    check_seq("seq_id", seq_id);
    if (first <= 0) {
        remove_locked(seq_id, 0);
        return;
    }
    check_has_state("seq_id", seq_id);
    const Positions held = positions_locked(seq_id);
    if (first > held.max) {
        return; // holds no position from there on
    }
    if (kept_[static_cast<size_t>(seq_id)].max == first) {
        if (!restore_shadow(seq_id)) {
            fail("DecodeError", "sequence " + str(seq_id) + " could not be taken back to position " + str(first) + " and is now empty");
        }
        return;
    }
    const std::string where = " cannot go back to position " + str(first) + " of sequence " + str(seq_id);
    if (needs_shadows()) {
        fail("Unsupported", "a model with recurrent state" + where + ": remove it whole, or restore a saved state");
    }
    if (!covers(held, first)) {
        fail("Unsupported", "the sliding window, which begins at position " + str(held.min) + "," + where +
                                ": remove it whole, or restore a saved state");
    }
    if (!llama_memory_seq_rm(memory(), seq_id, first, -1)) {
        fail("Unsupported", "this model's memory" + where);
    }
    removed_locked(seq_id, first);
}

void Context::copy(int32_t from, int32_t to, int32_t first, int32_t end) {
    std::lock_guard<std::mutex> lock(mutex());
    check_seq("from_seq_id", from);
    check_seq("to_seq_id", to);
    if (from == to) {
        fail("InvalidParams", "from_seq_id and to_seq_id are both " + str(from));
    }
    check_has_state("from_seq_id", from);
    check_has_state("to_seq_id", to);
    const Positions source = positions_locked(from);
    const Positions target = positions_locked(to);
    const int32_t   size   = source.max + 1;
    first                  = std::max(first, 0);
    end                    = end < 0 || (end > size && may_skip_positions(model_->get())) ? size : end; // an item has fewer cells
    if (first > size || end > size || end < first) {
        fail("InvalidParams", "start and end must be in order and at most " + str(size) + ", what sequence " + str(from) +
                                  " holds, not " + str(first) + " and " + str(end));
    }
    if (!kv_unified_ && memory_class_ != MemoryClass::recurrent) {
        fail("Unsupported", "sequences have buffers of their own without kv_unified, and share nothing");
    }
    const bool        whole = first == 0 && end == size;
    const std::string part  = "positions " + str(first) + " to " + str(end);
    if (target.max >= 0 && (first != target.max + 1 || needs_shadows())) {
        fail("InvalidParams", "to_seq_id " + str(to) + " holds positions up to " + str(target.max) + ": remove it first");
    }
    if (target.max < 0 && first > 0) {
        fail("InvalidParams", "start must be 0 where to_seq_id " + str(to) + " is empty, not " + str(first));
    }
    if (!whole && needs_shadows()) {
        fail("Unsupported", "a model with recurrent state can only copy a whole sequence, not " + part);
    }
    if (!covers(source, end)) {
        fail("Unsupported", "the sliding window of sequence " + str(from) + " begins at position " + str(source.min) +
                                " and no longer covers " + part);
    }
    if (first < end) {
        llama_memory_seq_cp(memory(), from, to, whole ? -1 : first, whole ? -1 : end);
        pin_added(to);
        if (heads_) {
            heads_->copied(from, to, first, end);
        }
    }
}

void Context::copy_cells(int32_t from, int32_t to, int32_t end) {
    std::lock_guard<std::mutex> lock(mutex());
    check_seq("from_seq_id", from);
    check_seq("to_seq_id", to);
    if (!has_state_apart_) {
        fail("Unsupported", "this memory does not keep cells apart from a state");
    }
    if (from == to || num_held(to) > 0) {
        fail("InvalidParams", "to_seq_id " + str(to) + " must be empty and not from_seq_id itself");
    }
    check_has_state("from_seq_id", from);
    if (end < 1 || end > num_held(from)) {
        fail("InvalidParams", "end must be 1 to " + str(num_held(from)) + ", what sequence " + str(from) + " holds, not " + str(end));
    }
    llama_memory_seq_cp(memory(), from, to, 0, end);
    drop_state(to);
    num_bare_[static_cast<size_t>(to)] = end;
    if (heads_) {
        heads_->copied(from, to, 0, end);
    }
}

int32_t Context::num_held(int32_t seq_id) const {
    return std::max(num_bare_[static_cast<size_t>(seq_id)], positions_locked(seq_id).max + 1);
}

void Context::check_has_state(const char * name, int32_t seq_id) const {
    if (num_bare_[static_cast<size_t>(seq_id)] > 0) {
        fail("InvalidParams", std::string(name) + " " + str(seq_id) + " has cells without their state: restore it, or remove them");
    }
}

// Recurrent state is let go by sharing that of an empty sequence, its shadow; a window stays until a state is restored.
void Context::drop_state(int32_t seq_id) {
    if (needs_shadows()) {
        drop_shadow(seq_id);
        llama_memory_seq_cp(memory(), seq_id + static_cast<int32_t>(n_seq_max_), seq_id, 0, 0);
    }
}

void Context::keep(int32_t seq_id) {
    std::lock_guard<std::mutex> lock(mutex());
    check_seq("seq_id", seq_id);
    llama_memory_seq_keep(memory(), seq_id);
    for (size_t other = 0; other < num_bare_.size(); ++other) {
        num_bare_[other] = other == static_cast<size_t>(seq_id) ? num_bare_[other] : 0;
    }
    std::fill(kept_.begin(), kept_.end(), Positions{});
    if (pins_) {
        pins_->kept_only(seq_id);
    }
    if (heads_) {
        heads_->kept(seq_id);
    }
}

void Context::clear(bool data) {
    std::lock_guard<std::mutex> lock(mutex());
    llama_memory_clear(memory(), data);
    std::fill(num_bare_.begin(), num_bare_.end(), 0);
    std::fill(kept_.begin(), kept_.end(), Positions{});
    if (pins_) {
        pins_->kept_only(-1);
    }
    if (heads_) {
        heads_->cleared(data);
    }
}

// ---- state

std::pair<std::vector<uint8_t>, int32_t> Context::save(int32_t seq_id, bool partial) const {
    std::lock_guard<std::mutex> lock(mutex());
    check_seq("seq_id", seq_id);
    check_has_state("seq_id", seq_id);
    const Positions             held  = positions_locked(seq_id);
    const llama_state_seq_flags flags = partial ? LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY : LLAMA_STATE_SEQ_FLAGS_NONE;
    std::vector<uint8_t>        state = save_locked(seq_id, flags);
    return {heads_ ? heads_->save(std::move(state), seq_id, partial) : std::move(state), held.max};
}

std::vector<uint8_t> Context::save_locked(int32_t seq_id, llama_state_seq_flags flags) const {
    std::vector<uint8_t>        state(llama_state_seq_get_size_ext(get(), seq_id, flags));
    LogCapture                  log;
    const size_t                size = llama_state_seq_get_data_ext(get(), state.data(), state.size(), seq_id, flags);
    if (size == 0 || size > state.size()) {
        fail("StateError", "the state of sequence " + str(seq_id) + " cannot be saved: " + log.words("llama.cpp gave no reason"));
    }
    state.resize(size);
    return state;
}

void Context::restore(int32_t seq_id, std::span<const uint8_t> saved, bool partial, int32_t last) {
    std::lock_guard<std::mutex> lock(mutex());
    check_seq("seq_id", seq_id);
    const StateParts               parts = heads_ ? read_state(saved) : StateParts{saved, {}, -1, {}};
    const std::span<const uint8_t> state = parts.model;
    if (partial && num_held(seq_id) <= last) {
        fail("StateError", "a partial state that ends at position " + str(last) + " belongs onto a sequence that holds it, and " +
                               str(seq_id) + " holds positions up to " + str(num_held(seq_id) - 1));
    }
    LogCapture                  log;
    const llama_state_seq_flags flags = partial ? LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY : LLAMA_STATE_SEQ_FLAGS_NONE;
    if (!partial) {
        llama_memory_seq_rm(memory(), seq_id, -1, -1); // restoring the state of an empty sequence changes nothing
    }
    num_bare_[static_cast<size_t>(seq_id)] = 0;
    drop_shadow(seq_id);
    if (pins_) {
        pins_->removed(seq_id, 0); // a state contains its window, which gets other cells
    }
    bool done = llama_state_seq_set_data_ext(get(), state.data(), state.size(), seq_id, flags) != 0;
    if (done && partial && last >= 0) {
        done = llama_memory_seq_rm(memory(), seq_id, last + 1, -1); // the second part may have advanced meanwhile
    }
    if (!done || (partial && positions_locked(seq_id).max != last)) {
        remove_locked(seq_id, 0);
        fail("StateError", "the state does not fit into sequence " + str(seq_id) + ", which is now empty: " +
                               log.words("llama.cpp gave no reason"));
    }
    pin_added(seq_id);
    if (heads_) {
        heads_->restored(seq_id, parts, partial, positions_locked(seq_id).max);
    }
}

void Context::check_range(int32_t seq_id, int32_t first, int32_t end, int32_t scratch) const {
    check_seq("seq_id", seq_id);
    check_scratch(first, end, scratch);
    if (seq_id == scratch) {
        fail("InvalidParams", "seq_id and scratch_seq_id are both " + str(scratch));
    }
}

void Context::check_scratch(int32_t first, int32_t end, int32_t scratch) const {
    check_seq("scratch_seq_id", scratch);
    if ((memory_class_ != MemoryClass::attention && !has_state_apart_) || !kv_unified_) {
        fail("Unsupported", "only attention memory in one pool (kv_unified) can be saved in ranges; save the whole sequence");
    }
    if (num_held(scratch) > 0) {
        fail("InvalidParams", "scratch_seq_id " + str(scratch) + " must be empty");
    }
    if (first < 0 || end <= first) {
        fail("InvalidParams", "start and end must be in order, not " + str(first) + " and " + str(end));
    }
}

int32_t Context::piece_end(int32_t first, int32_t end) const {
    return n_swa_ == 0 ? end : std::min(end, (first / n_swa_ + 1) * n_swa_);
}

std::vector<uint8_t> Context::save_range(int32_t seq_id, int32_t first, int32_t end, int32_t scratch) {
    std::lock_guard<std::mutex> lock(mutex());
    check_range(seq_id, first, end, scratch);
    const Positions held = positions_locked(seq_id);
    const int32_t   size = num_held(seq_id);
    if (end > size) {
        fail("InvalidParams", "end must be at most " + str(size) + ", what sequence " + str(seq_id) + " holds, not " + str(end));
    }
    if (first < held.min && !has_state_apart_) {
        fail("Unsupported", "the sliding window of sequence " + str(seq_id) + " begins at position " + str(held.min) +
                                " and no longer covers positions " + str(first) + " to " + str(end));
    }
    std::vector<uint8_t> state = save_cells(seq_id, first, end, scratch);
    return heads_ ? heads_->save_range(std::move(state), seq_id, first, end, scratch) : state;
}

std::vector<uint8_t> Context::save_cells(int32_t seq_id, int32_t first, int32_t end, int32_t scratch) {
    if (has_state_apart_) {
        return save_bare(seq_id, first, end, scratch);
    }
    if (n_swa_ == 0) {
        return save_piece(seq_id, first, end, scratch);
    }
    std::vector<uint8_t> state;
    for (int32_t next = first; next < end; next = piece_end(next, end)) {
        append_piece(state, save_piece(seq_id, next, piece_end(next, end), scratch));
    }
    return state;
}

std::vector<uint8_t> Context::cut_range(std::span<const uint8_t> state, Positions saved, int32_t first, int32_t end,
                                        int32_t scratch) {
    std::lock_guard<std::mutex> lock(mutex());
    check_scratch(first, end, scratch);
    if (first < saved.min || end > saved.max + 1) {
        fail("InvalidParams", "start and end must lie within the saved " + str(saved.min) + " to " + str(saved.max + 1) + ", not " +
                                  str(first) + " and " + str(end));
    }
    if (!heads_) {
        return cut_cells(state, saved, first, end, scratch);
    }
    const StateParts parts = read_state(state);
    return heads_->cut_range(cut_cells(parts.model, saved, first, end, scratch), parts, saved, first, end, scratch);
}

std::vector<uint8_t> Context::cut_cells(std::span<const uint8_t> state, Positions saved, int32_t first, int32_t end,
                                        int32_t scratch) {
    if (has_state_apart_ || n_swa_ == 0) {
        return cut_piece(state, saved, first, end, scratch);
    }
    std::vector<uint8_t> cut;
    for_each_piece(state, saved, [&](std::span<const uint8_t> piece, Positions held) {
        const int32_t from = std::max(first, held.min);
        const int32_t to   = std::min(end, held.max + 1);
        if (from < to) {
            append_piece(cut, cut_piece(piece, held, from, to, scratch));
        }
    });
    return cut;
}

std::vector<uint8_t> Context::cut_piece(std::span<const uint8_t> state, Positions saved, int32_t first, int32_t end,
                                        int32_t scratch) {
    const EmptiedAfter scratch_is_empty_again{memory(), scratch};
    has_state_apart_ ? place_bare(state, scratch) : place_piece(state, saved, scratch);
    llama_memory_seq_rm(memory(), scratch, end, -1);
    llama_memory_seq_rm(memory(), scratch, 0, first);
    if (!has_state_apart_) {
        return save_locked(scratch, LLAMA_STATE_SEQ_FLAGS_NONE);
    }
    std::vector<uint8_t> cells = bare_cells(scratch);
    if (!is_bare(scratch, {first, end - 1})) {
        fail("StateError", WRONG_POSITIONS);
    }
    return cells;
}

std::vector<uint8_t> Context::save_piece(int32_t seq_id, int32_t first, int32_t end, int32_t scratch) {
    if (first == 0 && end == positions_locked(seq_id).max + 1) {
        return save_locked(seq_id, LLAMA_STATE_SEQ_FLAGS_NONE);
    }
    llama_memory_seq_cp(memory(), seq_id, scratch, first, end);
    const EmptiedAfter scratch_is_empty_again{memory(), scratch};
    return save_locked(scratch, LLAMA_STATE_SEQ_FLAGS_NONE);
}

// A state is [header][cells][partial state]. The cells are saved; they are loaded with the header and the end of an
// empty sequence's partial state.
std::vector<uint8_t> Context::save_bare(int32_t seq_id, int32_t first, int32_t end, int32_t scratch) {
    llama_memory_seq_cp(memory(), seq_id, scratch, first, end);
    const EmptiedAfter scratch_is_empty_again{memory(), scratch};
    drop_state(scratch);
    return bare_cells(scratch);
}

std::vector<uint8_t> Context::bare_cells(int32_t scratch) {
    std::vector<uint8_t> state = save_locked(scratch, LLAMA_STATE_SEQ_FLAGS_NONE);
    const size_t         rest  = llama_state_seq_get_size_ext(get(), scratch, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) - HEADER_SIZE;
    if (!is_layout_checked_) {
        const std::vector<uint8_t> partial = save_locked(scratch, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
        if (partial.size() != rest + HEADER_SIZE || state.size() < rest + HEADER_SIZE ||
            !std::equal(partial.begin() + HEADER_SIZE, partial.end(), state.end() - static_cast<std::ptrdiff_t>(rest))) {
            fail("Unsupported", "llama.cpp keeps states of the architecture " + model_->architecture() + " in another order");
        }
        is_layout_checked_ = true;
    }
    state.resize(state.size() - rest);
    state.erase(state.begin(), state.begin() + HEADER_SIZE); // some bytes are not worth a copy into memory of their own
    return state;
}

void Context::place_bare(std::span<const uint8_t> cells, int32_t scratch) {
    std::vector<uint8_t> state = save_locked(scratch, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    state.insert(state.begin() + HEADER_SIZE, cells.begin(), cells.end());
    LogCapture log;
    if (llama_state_seq_set_data_ext(get(), state.data(), state.size(), scratch, LLAMA_STATE_SEQ_FLAGS_NONE) == 0) {
        fail("StateError", "the saved range does not fit into memory: " + log.words("llama.cpp gave no reason"));
    }
}

// llama.cpp does not report the positions of cells without a state. The size of their saved state shows them: it changes with
// the first and with the last, and without all of them is that of an empty sequence. Empties the sequence.
bool Context::is_bare(int32_t seq_id, Positions expected) {
    const auto size_without = [&](int32_t first, int32_t end) {
        llama_memory_seq_rm(memory(), seq_id, first, end);
        return llama_state_seq_get_size_ext(get(), seq_id, LLAMA_STATE_SEQ_FLAGS_NONE);
    };
    const size_t all          = size_without(0, 0);
    if (all == llama_state_seq_get_size_ext(get(), seq_id, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)) {
        llama_memory_seq_rm(memory(), seq_id, -1, -1);
        return true; // all is in the state, and ranges are empty: llama.cpp uses no window although the file has one
    }
    const size_t but_first    = size_without(expected.min, expected.min + 1);
    const size_t but_ends     = size_without(expected.max, expected.max + 1);
    const size_t but_expected = size_without(expected.min, expected.max + 1);
    const bool   has_ends     = but_first < all && (expected.min == expected.max || but_ends < but_first);
    return has_ends && but_expected == size_without(-1, -1);
}

void Context::load_bare(int32_t seq_id, std::span<const uint8_t> cells, Positions saved, int32_t first, int32_t end,
                        int32_t scratch) {
    const EmptiedAfter scratch_is_empty_again{memory(), scratch};
    place_bare(cells, scratch);
    llama_memory_seq_cp(memory(), scratch, seq_id, first, end);
    if (!is_bare(scratch, saved)) {
        llama_memory_seq_rm(memory(), seq_id, first, -1);
        fail("StateError", WRONG_POSITIONS);
    }
    num_bare_[static_cast<size_t>(seq_id)] = end;
}

void Context::load_range(int32_t seq_id, std::span<const uint8_t> state, Positions saved, int32_t first, int32_t end,
                         int32_t scratch) {
    std::lock_guard<std::mutex> lock(mutex());
    check_range(seq_id, first, end, scratch);
    const int32_t size = num_held(seq_id);
    if (has_state_apart_ && size > 0 && num_bare_[static_cast<size_t>(seq_id)] == 0) {
        fail("InvalidParams", "seq_id " + str(seq_id) + " has a state already: cells can only be added to others");
    }
    if (first != size || first < saved.min || end > saved.max + 1) {
        fail("InvalidParams", "start and end must go on from " + str(size) + " within the saved " + str(saved.min) + " to " +
                                  str(saved.max + 1) + ", not " + str(first) + " and " + str(end));
    }
    if (!heads_) {
        load_cells(seq_id, state, saved, first, end, scratch);
        return;
    }
    const StateParts parts = read_state(state);
    load_cells(seq_id, parts.model, saved, first, end, scratch);
    heads_->loaded_range(seq_id, parts, saved, first, end, scratch);
}

void Context::load_cells(int32_t seq_id, std::span<const uint8_t> state, Positions saved, int32_t first, int32_t end,
                         int32_t scratch) {
    if (has_state_apart_) {
        load_bare(seq_id, state, saved, first, end, scratch);
        return;
    }
    if (n_swa_ == 0) {
        load_piece(seq_id, state, saved, first, end, scratch);
        return;
    }
    try {
        for_each_piece(state, saved, [&](std::span<const uint8_t> piece, Positions held) {
            if (held.max + 1 > first && held.min < end) {
                load_piece(seq_id, piece, held, std::max(first, held.min), std::min(end, held.max + 1), scratch);
                pin_added(seq_id);
            }
        });
    } catch (...) {
        remove_locked(seq_id, first);
        throw;
    }
}

void Context::for_each_piece(std::span<const uint8_t> state, Positions saved,
                             const std::function<void(std::span<const uint8_t>, Positions)> & use) const {
    for (int32_t next = saved.min; next <= saved.max;) {
        uint64_t      length = 0;
        const int32_t stop   = piece_end(next, saved.max + 1);
        if (state.size() >= sizeof(length)) {
            std::memcpy(&length, state.data(), sizeof(length));
            state = state.subspan(sizeof(length));
        }
        if (length == 0 || length > state.size()) {
            fail("StateError", "the saved range is damaged: it ends at position " + str(next));
        }
        use(state.first(length), {next, stop - 1});
        state = state.subspan(length);
        next  = stop;
    }
}

void Context::place_piece(std::span<const uint8_t> state, Positions saved, int32_t scratch) {
    LogCapture      log;
    const bool      done  = llama_state_seq_set_data_ext(get(), state.data(), state.size(), scratch, LLAMA_STATE_SEQ_FLAGS_NONE) != 0;
    const Positions there = positions_locked(scratch);
    if (!done || there.min != saved.min || there.max != saved.max) {
        fail("StateError", "the saved range does not fit into memory: " + log.words("llama.cpp gave no reason"));
    }
}

void Context::load_piece(int32_t seq_id, std::span<const uint8_t> state, Positions saved, int32_t first, int32_t end,
                         int32_t scratch) {
    const EmptiedAfter scratch_is_empty_again{memory(), scratch};
    place_piece(state, saved, scratch);
    llama_memory_seq_cp(memory(), scratch, seq_id, first, end);
}

} // namespace paceline
