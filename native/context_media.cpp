// Forward passes over embeddings, for example of images: checks of a row, and the pass.
#include <algorithm>

#include "context.hpp"
#include "context_snapshot.hpp"
#include "error.hpp"

namespace paceline {
namespace {

// Attention of another kind, for one pass.
class AttentionKind {
public:
    AttentionKind(llama_context * context, bool is_causal) : context_(context), before_(llama_get_causal_attn(context)) {
        llama_set_causal_attn(context_, is_causal);
    }
    ~AttentionKind() { llama_set_causal_attn(context_, before_); }
    AttentionKind(const AttentionKind &)             = delete;
    AttentionKind & operator=(const AttentionKind &) = delete;

private:
    llama_context * context_;
    bool            before_;
};

} // namespace

bool Context::check_row(const EmbeddingRow & row) const {
    memory();
    const size_t width = static_cast<size_t>(llama_model_n_embd_inp(model_->get())), size = row.embeddings.size() / width;
    if (size == 0 || row.embeddings.size() % width != 0) {
        fail("InvalidParams", "embeddings must be rows of " + str(width) + " values, not " + str(row.embeddings.size()) + " values");
    }
    const size_t most = row.is_causal ? n_batch() : std::min(n_batch(), n_ubatch());
    if (size > most) {
        fail("InvalidParams", "a pass has at most " + str(most) + " embeddings, which is " +
                                  (row.is_causal ? "n_batch" : "n_ubatch, as their attention is not causal") + ", not " + str(size));
    }
    check_seq("seq_id", row.seq_id);
    check_has_state("seq_id: sequence", row.seq_id);
    const bool has_places = !row.places.empty();
    if (has_places && (row.places.size() != 3 * size || !may_skip_positions(model_->get()))) {
        fail("InvalidParams", "places are t, y and x of each of " + str(size) + " embeddings, for a model with M-RoPE");
    }
    const int32_t last = positions_locked(row.seq_id).max;
    const bool    goes_on = has_places && row.position >= 0 && row.position == last;
    const bool    leaves_out = may_skip_positions(model_->get()) && row.position > last;
    if (!goes_on && !leaves_out && row.position != last + 1) {
        fail("InvalidParams", "position must be " + str(last + 1) + ", where sequence " + str(row.seq_id) + " goes on, not " +
                                  str(row.position));
    }
    int64_t end = static_cast<int64_t>(row.position) + (has_places ? 1 : static_cast<int64_t>(size));
    for (size_t i = 0; i < row.places.size(); ++i) {
        if (row.places[i] < 0 || (i % 3 == 0 && row.places[i] != 0)) {
            fail("InvalidParams", "places[" + str(i / 3) + "] must be at the time of the item, 0, and not before it");
        }
        end = std::max(end, static_cast<int64_t>(row.position) + row.places[i] + 1);
    }
    if (end > max_positions_) {
        fail("PromptTooLong", "embeddings up to position " + str(end - 1) + " do not fit; positions must be below " + str(max_positions_));
    }
    if (goes_on && !needs_shadows()) { // positions cannot tell the cells of this pass from earlier cells
        if (!kv_unified_) {
            fail("Unsupported", "without kv_unified an item of M-RoPE is computed at once");
        }
        check_seq("scratch_seq_id", row.scratch);
        if (row.scratch == row.seq_id || num_held(row.scratch) > 0) {
            fail("InvalidParams", "scratch_seq_id " + str(row.scratch) + " must be empty");
        }
    }
    return goes_on;
}

void Context::decode(const EmbeddingRow & row) {
    std::lock_guard<std::mutex> lock(mutex());
    const bool                  goes_on = check_row(row);
    const size_t                size    = row.embeddings.size() / static_cast<size_t>(llama_model_n_embd_inp(model_->get()));
    const bool                  is_mrope = may_skip_positions(model_->get());
    std::vector<int32_t>        positions(size * (is_mrope ? 4 : 1)), seq_ids(size, row.seq_id), counts(size, 1);
    std::vector<int32_t *>      owners(size + 1, nullptr);
    std::vector<int8_t>         outputs(size, computes_all_outputs_ || embeddings_);
    for (size_t i = 0; i < size; ++i) {
        owners[i] = &seq_ids[i];
        for (size_t section = 0; section < positions.size() / size; ++section) {
            // The fourth section is of no use to images, as mtmd.cpp fills it.
            const int32_t place = row.places.empty() ? static_cast<int32_t>(i) : section < 3 ? row.places[3 * i + section] : -row.position;
            positions[section * size + i] = row.position + place;
        }
    }
    const Batch batch{{}, {positions.data(), size}, seq_ids, {}};
    has_output_.assign(size, false);
    std::vector<Snapshot> snapshots = take_snapshots(batch);
    if (goes_on && !snapshots[0].shadowed) {
        llama_memory_seq_cp(memory(), row.seq_id, row.scratch, -1, -1);
        snapshots[0].copy = row.scratch;
    }
    pin_before(batch);
    const AttentionKind kind(get(), row.is_causal);
    run_decode({.n_tokens = static_cast<int32_t>(size),
                .token    = nullptr,
                .embd     = const_cast<float *>(row.embeddings.data()), // read only
                .pos      = positions.data(),
                .n_seq_id = counts.data(),
                .seq_id   = owners.data(),
                .logits   = outputs.data()},
               snapshots);
}

} // namespace paceline
