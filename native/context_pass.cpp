// Forward passes: checks of a batch, the pass, and the rollback when it fails.
#include "context.hpp"

#include <algorithm>
#include <map>

#include "context_snapshot.hpp"
#include "draft_heads.hpp"
#include "error.hpp"
#include "log.hpp"

namespace paceline {
namespace {

std::string at(const char * array, size_t index) { return std::string(array) + "[" + str(index) + "]"; }

} // namespace

void Context::check_batch(const Batch & batch) const {
    memory();
    if (llama_model_has_encoder(model_->get()) && !encoded_) {
        fail("InvalidParams", "this model has an encoder: call encode() with the input before the decoder runs");
    }
    const size_t size = batch.tokens.size();
    if (size == 0 || size > n_batch()) {
        fail("InvalidParams", "a batch has 1 to " + str(n_batch()) + " tokens, which is n_batch, not " + str(size));
    }
    if (batch.positions.size() != size || batch.seq_ids.size() != size || batch.wants_output.size() != size) {
        fail("InvalidParams", "token_ids, positions, seq_ids and wants_output must be of one length, not " + str(size) + ", " +
                                  str(batch.positions.size()) + ", " + str(batch.seq_ids.size()) + " and " +
                                  str(batch.wants_output.size()));
    }
    if (!llama_get_causal_attn(get()) && size > n_ubatch()) {
        fail("InvalidParams", "without causal attention a batch has at most n_ubatch = " + str(n_ubatch()) + " tokens, not " + str(size));
    }
    const int32_t        n_vocab     = model_->n_vocab();
    size_t               num_outputs = 0;
    std::vector<int32_t> next(n_seq_max_, -1); // the next position of a sequence
    for (size_t i = 0; i < size; ++i) {
        const int32_t token = batch.tokens[i], position = batch.positions[i], seq_id = batch.seq_ids[i];
        if (token < 0 || token >= n_vocab) {
            fail("InvalidParams", at("token_ids", i) + " must be in [0, " + str(n_vocab) + "), not " + str(token));
        }
        if (seq_id < 0 || static_cast<uint32_t>(seq_id) >= n_seq_max_) {
            check_seq(at("seq_ids", i).c_str(), seq_id);
        }
        if (one_sequence_per_pass_ && seq_id != batch.seq_ids[0]) {
            fail("Unsupported", at("seq_ids", i) + " is " + str(seq_id) + " after " + str(batch.seq_ids[0]) + ": llama.cpp computes " +
                                    model_->architecture() + " right for one sequence a pass only");
        }
        int32_t & expected = next[static_cast<size_t>(seq_id)];
        if (expected < 0) {
            check_has_state("seq_ids: sequence", seq_id);
            expected = positions_locked(seq_id).max + 1;
            if (position > expected && may_skip_positions(model_->get())) {
                expected = position;
            }
        }
        if (position != expected) {
            fail("InvalidParams", at("positions", i) + " must be " + str(expected) + ", where sequence " + str(seq_id) +
                                      " goes on, not " + str(position));
        }
        if (position >= max_positions_) {
            fail("PromptTooLong", at("positions", i) + " must be below " + str(max_positions_) + ", " +
                                      (max_positions_ < n_ctx_seq() ? "the rows of the model's table of positions"
                                                                    : "the size of the context") +
                                      ", not " + str(position));
        }
        ++expected;
        num_outputs += batch.wants_output[i] != 0 || embeddings_; // with embeddings every token is an output
    }
    if (num_outputs > n_outputs_max_) {
        fail("InvalidParams", std::string(embeddings_ ? "with embeddings every token is an output, and there are "
                                                      : "wants_output asks for rows of logits: ") +
                                  str(num_outputs) + ", and n_outputs_max is " + str(n_outputs_max_));
    }
}

void Context::decode(const Batch & batch) {
    std::lock_guard<std::mutex> lock(mutex());
    check_batch(batch);
    decode_locked(batch);
}

std::vector<Context::Snapshot> Context::take_snapshots(const Batch & batch) {
    std::map<int32_t, int32_t> first;
    for (size_t i = 0; i < batch.size(); ++i) {
        first.try_emplace(batch.seq_ids[i], batch.positions[i]);
    }
    std::vector<Snapshot> snapshots;
    for (const auto & [seq_id, position] : first) {
        drop_shadow(seq_id);
        Snapshot snapshot{seq_id, position, positions_locked(seq_id).max, false, {}, -1};
        if (position > 0 && has_window_ && (batch.size() > n_ubatch() || !kv_unified_)) {
            // A later ubatch may reuse the cells that the window of `position` still needs.
            snapshot.window.resize(llama_state_seq_get_size_ext(get(), seq_id, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY));
            snapshot.window.resize(llama_state_seq_get_data_ext(get(), snapshot.window.data(), snapshot.window.size(), seq_id,
                                                                LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY));
            if (snapshot.window.empty()) {
                fail("StateError", "the sliding window of sequence " + str(seq_id) + " cannot be saved before a pass");
            }
        } else if (position > 0 && needs_shadows()) {
            // Beside a window recurrent state alone: cells of two sequences are not reused, not even cells that it has left.
            const int32_t bound = has_window_ ? 0 : -1;
            llama_memory_seq_cp(memory(), seq_id, seq_id + static_cast<int32_t>(n_seq_max_), bound, bound);
            snapshot.shadowed = true;
        }
        snapshots.push_back(std::move(snapshot));
    }
    return snapshots;
}

// Keeps the positions of a sequence from leaving its window while the batch is placed in memory.
void Context::pin_before(const Batch & batch) {
    if (!pins_) {
        return;
    }
    std::map<int32_t, std::pair<int32_t, int32_t>> added; // by sequence: first position, number
    for (size_t i = 0; i < batch.size(); ++i) {
        ++added.try_emplace(batch.seq_ids[i], batch.positions[i], 0).first->second.second;
    }
    for (const auto & [seq_id, range] : added) {
        pins_->before_batch(seq_id, range.first, range.second);
    }
}

void Context::keep_snapshots(const std::vector<Snapshot> & snapshots, std::span<const int32_t> drafting) {
    std::vector<Snapshot> dropped;
    for (const Snapshot & snapshot : snapshots) {
        if (std::find(drafting.begin(), drafting.end(), snapshot.seq_id) == drafting.end()) {
            dropped.push_back(snapshot);
        } else {
            kept_[static_cast<size_t>(snapshot.seq_id)] = {snapshot.last, snapshot.next};
        }
    }
    drop_snapshots(dropped);
}

void Context::drop_shadow(int32_t seq_id) {
    Positions & kept = kept_[static_cast<size_t>(seq_id)];
    if (kept.max >= 0) {
        llama_memory_seq_rm(memory(), seq_id + static_cast<int32_t>(n_seq_max_), -1, -1);
        kept = {};
    }
}

bool Context::restore_shadow(int32_t seq_id) {
    const Positions kept = kept_[static_cast<size_t>(seq_id)];
    llama_memory_seq_rm(memory(), seq_id, -1, -1);
    if (kept.min >= 0) {
        llama_memory_seq_cp(memory(), seq_id + static_cast<int32_t>(n_seq_max_), seq_id, -1, -1);
    }
    drop_shadow(seq_id);
    if (positions_locked(seq_id).max == kept.min) {
        removed_locked(seq_id, kept.max);
        return true;
    }
    remove_locked(seq_id, 0);
    return false;
}

// llama.cpp only notes that a state further back counts from now on. Copies and a second cut would not know of it, and a pass that
// fails could not be rolled back, so that state is put in the place of the newest one at once.
bool Context::cut_state(int32_t seq_id, int32_t first) {
    if (positions_locked(seq_id).max + 1 - first > static_cast<int32_t>(max_rollback()) ||
        !llama_memory_seq_rm(memory(), seq_id, first, -1)) {
        return false;
    }
    const std::vector<uint8_t> state = save_locked(seq_id, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    const bool done = llama_state_seq_set_data_ext(get(), state.data(), state.size(), seq_id, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) != 0;
    if (!done || positions_locked(seq_id).max != first - 1) {
        return false; // its row is taken back, which empties it first
    }
    removed_locked(seq_id, first);
    return true;
}

Context::TakenBack Context::take_back_locked(int32_t seq_id, int32_t first) {
    if (needs_shadows()) {
        if (cut_state(seq_id, first)) {
            return TakenBack::drafts;
        }
        return restore_shadow(seq_id) ? TakenBack::row : TakenBack::sequence;
    }
    if (covers(positions_locked(seq_id), first) && llama_memory_seq_rm(memory(), seq_id, first, -1)) {
        removed_locked(seq_id, first);
        return TakenBack::drafts;
    }
    remove_locked(seq_id, 0);
    return TakenBack::sequence;
}

void Context::drop_snapshots(const std::vector<Snapshot> & snapshots) {
    for (const Snapshot & snapshot : snapshots) {
        if (snapshot.shadowed) {
            llama_memory_seq_rm(memory(), snapshot.seq_id + static_cast<int32_t>(n_seq_max_), -1, -1);
        }
        if (snapshot.copy >= 0) {
            llama_memory_seq_rm(memory(), snapshot.copy, -1, -1);
        }
    }
}

std::string Context::roll_back(const std::vector<Snapshot> & snapshots) {
    std::string lost;
    for (const Snapshot & snapshot : snapshots) {
        const int32_t shadow = snapshot.seq_id + static_cast<int32_t>(n_seq_max_);
        if (snapshot.copy >= 0 || (snapshot.shadowed && !has_window_)) {
            llama_memory_seq_rm(memory(), snapshot.seq_id, -1, -1);
            llama_memory_seq_cp(memory(), snapshot.copy >= 0 ? snapshot.copy : shadow, snapshot.seq_id, -1, -1);
        } else if (snapshot.shadowed) {
            llama_memory_seq_cp(memory(), shadow, snapshot.seq_id, 0, 0);
        } else {
            llama_memory_seq_rm(memory(), snapshot.seq_id, snapshot.next > 0 ? snapshot.next : -1, -1);
        }
        if (!snapshot.window.empty()) {
            llama_state_seq_set_data_ext(get(), snapshot.window.data(), snapshot.window.size(), snapshot.seq_id,
                                         LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
        }
        if (has_window_ && needs_shadows() && snapshot.next > 0) { // recurrent state that has gone on refused it
            llama_memory_seq_rm(memory(), snapshot.seq_id, snapshot.next, -1);
        }
        const Positions held = positions_locked(snapshot.seq_id);
        if (held.max != snapshot.last || !covers(held, snapshot.next)) {
            remove_locked(snapshot.seq_id, 0);
            lost += (lost.empty() ? "; could not be restored and is now empty: sequence " : ", ") + str(snapshot.seq_id);
        }
    }
    return lost;
}

int32_t Context::run_pass(const std::function<int32_t()> & pass) {
    if (heads_) {
        heads_->before_pass();
    }
    std::shared_lock adapters_lock(model_->adapter_mutex(), std::defer_lock);
    if (must_reserve_) {
        adapters_lock.lock();
    }
    pools_.before_pass();
    const int32_t status = pass();
    llama_synchronize(get());
    must_reserve_ = must_reserve_ && status != 0;
    pools_.after_pass(status == 0);
    return status;
}

void Context::decode_locked(const Batch & batch, std::span<const int32_t> drafting) {
    const Call call(*this);
    batch_.clear();
    for (size_t i = 0; i < batch.size(); ++i) {
        batch_.add(batch.tokens[i], batch.positions[i], batch.seq_ids[i], batch.wants_output[i] != 0 || computes_all_outputs_);
    }
    has_output_.assign(batch.size(), false);
    const std::vector<Snapshot> snapshots = take_snapshots(batch);
    pin_before(batch);
    run_decode(batch_.get(), snapshots, drafting);
    for (size_t i = 0; i < batch.size(); ++i) {
        has_output_[i] = batch.wants_output[i] != 0;
    }
    if (heads_) {
        heads_->follow(batch);
    }
}

void Context::run_decode(const llama_batch & batch, const std::vector<Snapshot> & snapshots, std::span<const int32_t> drafting) {
    LogCapture        log;
    const Call        call(*this);
    const int32_t     status = run_pass([&] { return llama_decode(get(), batch); });
    const std::string lost   = status == 0 ? "" : roll_back(snapshots);
    keep_snapshots(snapshots, status == 0 && needs_shadows() ? drafting : std::span<const int32_t>());
    if (status == 1 || status == 2) {
        log.demote();
    }
    switch (status) {
        case 0: break;
        case 1:
            fail("NoKvSlot", "no free cells in the KV cache for " + str(batch.n_tokens) +
                                 " tokens (n_ctx " + str(n_ctx()) + "); remove sequences, or use a smaller batch" + lost);
        case 2: fail("Aborted", "the forward pass was aborted" + lost);
        default: fail("DecodeError", "llama.cpp failed on a batch of " + str(batch.n_tokens) + " tokens (status " +
                                         str(status) + "): " + log.words("it gave no reason") + lost);
    }
    for (const Snapshot & snapshot : snapshots) {
        pin_added(snapshot.seq_id);
    }
}

int32_t Context::process(int32_t type, llama_batch_ext * rows, const Batch & batch) {
    std::lock_guard<std::mutex> lock(mutex());
    const bool                  decodes = type == LLAMA_PROCESS_TYPE_DECODE;
    has_output_.clear();
    if (decodes) {
        pin_before(batch);
    }
    const int32_t status = run_pass([&] { return llama_process(get(), static_cast<llama_process_type>(type), rows); });
    for (size_t i = 0; i < batch.size() && decodes && status == 0; ++i) {
        if (i + 1 == batch.size() || batch.seq_ids[i + 1] != batch.seq_ids[i]) {
            pin_added(batch.seq_ids[i]);
        }
    }
    return status;
}

std::vector<std::vector<int32_t>> Context::draft(std::span<const DraftWish> wishes, float min_probability) {
    std::lock_guard<std::mutex> lock(mutex());
    if (!heads_) {
        fail("Unsupported", "this context was made without draft heads");
    }
    if (!(min_probability >= 0.0f && min_probability <= 1.0f)) {
        fail("InvalidParams", "min_probability must be in [0, 1], not " + str(min_probability));
    }
    std::vector<bool> seen(n_seq_max_, false);
    for (const DraftWish & wish : wishes) {
        check_wish(wish);
        if (seen[static_cast<size_t>(wish.seq_id)]) {
            fail("InvalidParams", "sequence " + str(wish.seq_id) + " wants drafts twice");
        }
        seen[static_cast<size_t>(wish.seq_id)] = true;
    }
    const Call call(*this);
    return heads_->draft(wishes, min_probability);
}

void Context::check_wish(const DraftWish & wish) const {
    check_seq("seq_id", wish.seq_id);
    if (wish.token < 0 || wish.token >= model_->n_vocab()) {
        fail("InvalidParams", "token_id must be in [0, " + str(model_->n_vocab()) + "), not " + str(wish.token));
    }
    if (wish.position < 0 || wish.position >= max_positions_ || wish.depth < 1) {
        fail("InvalidParams", "position must be in [0, " + str(max_positions_) + ") and max_tokens at least 1, not " +
                                  str(wish.position) + " and " + str(wish.depth));
    }
}

void Context::encode(std::span<const int32_t> tokens) {
    std::lock_guard<std::mutex> lock(mutex());
    if (!llama_model_has_encoder(model_->get()) || !llama_model_has_decoder(model_->get())) {
        fail("Unsupported", "encode() is for encoder-decoder models: this one has no encoder beside its decoder");
    }
    if (tokens.empty() || tokens.size() > n_ubatch()) {
        fail("InvalidParams", "an encoder takes 1 to n_ubatch = " + str(n_ubatch()) + " tokens at once, not " + str(tokens.size()));
    }
    batch_.clear();
    for (size_t i = 0; i < tokens.size(); ++i) {
        if (tokens[i] < 0 || tokens[i] >= model_->n_vocab()) {
            fail("InvalidParams", "token_ids[" + str(i) + "] must be in [0, " + str(model_->n_vocab()) + "), not " + str(tokens[i]));
        }
        batch_.add(tokens[i], static_cast<int32_t>(i), 0, true);
    }
    has_output_.clear();
    encoded_ = false;
    LogCapture    log;
    const Call    call(*this);
    const int32_t status = run_pass([&] { return llama_encode(get(), batch_.get()); });
    if (status != 0) {
        fail(status == 2 ? "Aborted" : "DecodeError", "the encoder failed (status " + str(status) + "): " + log.words("it gave no reason"));
    }
    encoded_ = true;
}

void Context::abort() noexcept {
    if (running_) {
        aborted_ = true;
    }
}

Context::Call::Call(Context & context) : context_(context), is_outer_(!context.running_) {
    if (is_outer_) {
        context.aborted_ = false;
        context.running_ = true;
    }
}

Context::Call::~Call() {
    if (is_outer_) {
        context_.running_ = false;
    }
}

} // namespace paceline
