// Forward passes: checks of a batch, the pass, and the rollback when it fails.
#include "context.hpp"

#include <map>

#include "error.hpp"
#include "log.hpp"

namespace paceline {
namespace {

std::string at(const char * array, size_t index) { return std::string(array) + "[" + str(index) + "]"; }

// Whether positions of a sequence may leave some out: with M-RoPE an image spans positions that have no cells.
bool may_skip_positions(const llama_model * model) {
    const enum llama_rope_type type = llama_model_rope_type(model);
    return type == LLAMA_ROPE_TYPE_MROPE || type == LLAMA_ROPE_TYPE_IMROPE;
}

} // namespace

// What a sequence held before a batch, and what restores it.
struct Context::Snapshot {
    int32_t              seq_id;
    int32_t              next; // the first position of the batch in it
    int32_t              last; // that it held; below next - 1 where the batch leaves positions out
    bool                 shadowed = false;
    std::vector<uint8_t> window; // state of the sliding window and recurrent layers, if the batch can overwrite the window
};

void Context::check_batch(const Batch & batch) const {
    memory();
    if (llama_model_has_encoder(model_->get()) && !encoded_) {
        fail("InvalidParams", "this model has an encoder: call encode() with the input before the decoder runs");
    }
    const size_t size = batch.size();
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

std::vector<Context::Snapshot> Context::take_snapshots(const Batch & batch) const {
    std::map<int32_t, int32_t> first;
    for (size_t i = 0; i < batch.size(); ++i) {
        first.try_emplace(batch.seq_ids[i], batch.positions[i]);
    }
    std::vector<Snapshot> snapshots;
    for (const auto & [seq_id, position] : first) {
        Snapshot snapshot{seq_id, position, positions_locked(seq_id).max, false, {}};
        if (position > 0 && has_window_ && (batch.size() > n_ubatch() || !kv_unified_)) {
            // A later ubatch may reuse the cells that the window of `position` still needs.
            snapshot.window.resize(llama_state_seq_get_size_ext(get(), seq_id, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY));
            snapshot.window.resize(llama_state_seq_get_data_ext(get(), snapshot.window.data(), snapshot.window.size(), seq_id,
                                                                LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY));
            if (snapshot.window.empty()) {
                fail("StateError", "the sliding window of sequence " + str(seq_id) + " cannot be saved before a pass");
            }
        } else if (position > 0 && needs_shadows()) {
            // Beside a window recurrent state alone: cells of two sequences are not reused, not even those that it has left.
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

void Context::drop_snapshots(const std::vector<Snapshot> & snapshots) {
    for (const Snapshot & snapshot : snapshots) {
        if (snapshot.shadowed) {
            llama_memory_seq_rm(memory(), snapshot.seq_id + static_cast<int32_t>(n_seq_max_), -1, -1);
        }
    }
}

std::string Context::roll_back(const std::vector<Snapshot> & snapshots) {
    std::string lost;
    for (const Snapshot & snapshot : snapshots) {
        const int32_t shadow = snapshot.seq_id + static_cast<int32_t>(n_seq_max_);
        if (snapshot.shadowed && !has_window_) {
            llama_memory_seq_rm(memory(), snapshot.seq_id, -1, -1);
            llama_memory_seq_cp(memory(), shadow, snapshot.seq_id, -1, -1);
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

int32_t Context::run_pass(int32_t (*pass)(llama_context *, llama_batch)) {
    std::shared_lock adapters_lock(model_->adapter_mutex(), std::defer_lock);
    if (must_reserve_) {
        adapters_lock.lock();
    }
    pools_.before_pass();
    const int32_t status = pass(get(), batch_.get());
    llama_synchronize(get());
    must_reserve_ = must_reserve_ && status != 0;
    pools_.after_pass(status == 0);
    return status;
}

void Context::decode_locked(const Batch & batch) {
    batch_.clear();
    for (size_t i = 0; i < batch.size(); ++i) {
        batch_.add(batch.tokens[i], batch.positions[i], batch.seq_ids[i], batch.wants_output[i] != 0 || computes_all_outputs_);
    }
    has_output_.assign(batch.size(), false);
    const std::vector<Snapshot> snapshots = take_snapshots(batch);
    pin_before(batch);
    LogCapture                  log;
    const Call                  call(*this);
    const int32_t               status = run_pass(llama_decode);
    const std::string           lost = status == 0 ? "" : roll_back(snapshots);
    drop_snapshots(snapshots);
    if (status == 1 || status == 2) {
        log.demote();
    }
    switch (status) {
        case 0: break;
        case 1:
            fail("NoKvSlot", "no free cells in the KV cache for " + str(batch.size()) +
                                 " tokens (n_ctx " + str(n_ctx()) + "); remove sequences, or use a smaller batch" + lost);
        case 2: fail("Aborted", "the forward pass was aborted" + lost);
        default: fail("DecodeError", "llama.cpp failed on a batch of " + str(batch.size()) + " tokens (status " +
                                         str(status) + "): " + log.words("it gave no reason") + lost);
    }
    for (const Snapshot & snapshot : snapshots) {
        pin_added(snapshot.seq_id);
    }
    for (size_t i = 0; i < batch.size(); ++i) {
        has_output_[i] = batch.wants_output[i] != 0;
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
    const int32_t status = run_pass(llama_encode);
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
