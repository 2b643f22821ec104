#include "context.hpp"

#include <algorithm>
#include <map>

#include "error.hpp"
#include "log.hpp"

namespace paceline {
namespace {

std::string str(int64_t value) { return std::to_string(value); }

std::string at(const char * array, size_t index) { return std::string(array) + "[" + std::to_string(index) + "]"; }

// Whether positions may be rows of a learned table, which llama.cpp would read beyond its end.
bool has_position_table(const Model & model) {
    const bool is_recurrent = llama_model_is_recurrent(model.get()) || llama_model_is_hybrid(model.get());
    return llama_model_rope_type(model.get()) == LLAMA_ROPE_TYPE_NONE && !is_recurrent;
}

bool on_abort(void * flag) {
    return static_cast<std::atomic<bool> *>(flag)->load(std::memory_order_relaxed) || process_is_ending();
}

} // namespace

// Where a sequence was before a batch, and what it takes to bring it back there.
struct Context::Snapshot {
    int32_t              seq_id;
    int32_t              next; // the first position of the batch in it
    bool                 shadowed = false;
    std::vector<uint8_t> window; // state of the sliding window, where the batch can push it out
};

bool Context::needs_shadows() const noexcept {
    return memory_class_ == MemoryClass::recurrent || memory_class_ == MemoryClass::hybrid;
}

Context::Context(std::shared_ptr<Model> model, const ContextOptions & options)
    : model_(std::move(model)),
      memory_class_(model_->memory_class()),
      n_seq_max_(options.params.n_seq_max),
      kv_unified_(options.params.kv_unified),
      embeddings_(options.params.embeddings) {
    if (model_->vocab_only()) {
        fail("Unsupported", "this model was loaded with vocab_only=True and has no weights to compute with");
    }
    llama_context_params params = options.params;
    if (llama_model_has_encoder(model_->get()) && n_seq_max_ > 1) {
        fail("Unsupported", "an encoder-decoder model works on one sequence at a time: n_seq_max must be 1, not " + str(n_seq_max_));
    }
    if (memory_class_ == MemoryClass::hybrid && !kv_unified_) {
        // Copies between its separate buffers happen at the next pass only, too late for a snapshot of this one.
        fail("Unsupported", "a hybrid model needs kv_unified=True");
    }
    if (needs_shadows()) {
        params.n_seq_max *= 2;
        if (params.n_seq_max > llama_max_parallel_sequences()) {
            fail("InvalidParams", "n_seq_max must be at most " + str(llama_max_parallel_sequences() / 2) +
                                      " for a model with recurrent state, not " + str(n_seq_max_));
        }
    }
    // llama.cpp asserts that every sequence may have an output.
    params.n_outputs_max       = std::max(params.n_outputs_max, params.n_seq_max);
    if (params.embeddings && params.pooling_type != LLAMA_POOLING_TYPE_NONE &&
        (params.n_ubatch % params.n_seq_max != 0 || params.n_outputs_max < params.n_ubatch)) {
        fail("InvalidParams", "a context that pools embeddings needs n_ubatch to be a multiple of " + str(params.n_seq_max) +
                                  " (n_seq_max, twice that with recurrent state) and n_outputs_max to be at least n_ubatch, not n_ubatch " +
                                  str(params.n_ubatch) + " and n_outputs_max " + str(params.n_outputs_max) + "; an Embedder sees to it");
    }
    params.abort_callback      = on_abort;
    params.abort_callback_data = &aborted_;
    if (options.max_host_bytes) {
        const uint64_t bytes = measure_memory(*model_, params);
        if (bytes > *options.max_host_bytes) {
            fail("NotEnoughMemory", "a context with n_ctx " + str(params.n_ctx) + ", n_ubatch " + str(params.n_ubatch) +
                                        " and n_seq_max " + str(n_seq_max_) + " takes " + str(bytes >> 20) +
                                        " MiB, and " + str(*options.max_host_bytes >> 20) +
                                        " MiB are free; lower n_ctx, or use a smaller type_k and type_v");
        }
    }
    LogCapture log;
    context_.reset(llama_init_from_model(model_->get(), params));
    if (!get()) {
        fail("InvalidParams", "llama.cpp cannot make a context with these options: " + log.words("it gave no reason"));
    }
    max_positions_ = n_ctx_seq();
    if (has_position_table(*model_)) {
        max_positions_ = std::min<int64_t>(max_positions_, llama_model_n_ctx_train(model_->get()));
    }
    n_outputs_max_ = llama_model_has_encoder(model_->get()) ? n_batch() : params.n_outputs_max;
    batch_         = OwnedBatch(static_cast<int32_t>(n_batch()));
    pools_.attach(get(), params.n_threads, params.n_threads_batch);
}

std::mutex & Context::mutex() const {
    home_.check("the context");
    return mutex_;
}

llama_memory_t Context::memory() const {
    llama_memory_t memory = llama_get_memory(get());
    if (!memory) {
        fail("Unsupported", "this model keeps no memory of a sequence (it is an encoder): use an Embedder");
    }
    return memory;
}

void Context::check_seq(const char * name, int32_t seq_id) const {
    if (seq_id < 0 || static_cast<uint32_t>(seq_id) >= n_seq_max_) {
        fail("InvalidParams", std::string(name) + " must be in [0, " + str(n_seq_max_) + "), which is n_seq_max, not " + str(seq_id));
    }
}

// ---- forward passes

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
    std::vector<int32_t> next(n_seq_max_, -1); // position that a sequence goes on at
    for (size_t i = 0; i < size; ++i) {
        const int32_t token = batch.tokens[i], position = batch.positions[i], seq_id = batch.seq_ids[i];
        if (token < 0 || token >= n_vocab) {
            fail("InvalidParams", at("token_ids", i) + " must be in [0, " + str(n_vocab) + "), not " + str(token));
        }
        if (seq_id < 0 || static_cast<uint32_t>(seq_id) >= n_seq_max_) {
            check_seq(at("seq_ids", i).c_str(), seq_id);
        }
        int32_t & expected = next[static_cast<size_t>(seq_id)];
        if (expected < 0) {
            expected = positions_locked(seq_id).max + 1;
        }
        if (position != expected) {
            fail("InvalidParams", at("positions", i) + " must be " + str(expected) + ", where sequence " + str(seq_id) +
                                      " goes on, not " + str(position));
        }
        if (position >= max_positions_) {
            fail("PromptTooLong", at("positions", i) + " must be below " + str(max_positions_) + ", the size of the context" +
                                      (max_positions_ < n_ctx_seq() ? " that the model was trained with" : "") + ", not " + str(position));
        }
        ++expected;
        num_outputs += batch.wants_output[i] != 0 || embeddings_; // with embeddings every token is an output
    }
    if (num_outputs > n_outputs_max_) {
        fail("InvalidParams", std::string(embeddings_ ? "with embeddings every token is an output, and there are "
                                                      : "wants_output asks for rows of logits: ") +
                                  str(static_cast<int64_t>(num_outputs)) + ", and n_outputs_max is " + str(n_outputs_max_));
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
        Snapshot snapshot{seq_id, position, false, {}};
        if (position > 0 && needs_shadows()) {
            llama_memory_seq_cp(memory(), seq_id, seq_id + static_cast<int32_t>(n_seq_max_), -1, -1);
            snapshot.shadowed = true;
        } else if (position > 0 && memory_class_ == MemoryClass::sliding_window &&
                   (batch.size() > n_ubatch() || !kv_unified_)) {
            // A later ubatch may reuse the cells that the window of `position` still needs.
            snapshot.window.resize(llama_state_seq_get_size_ext(get(), seq_id, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY));
            snapshot.window.resize(llama_state_seq_get_data_ext(get(), snapshot.window.data(), snapshot.window.size(), seq_id,
                                                                LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY));
            if (snapshot.window.empty()) {
                fail("StateError", "the sliding window of sequence " + str(seq_id) + " cannot be saved before a pass");
            }
        }
        snapshots.push_back(std::move(snapshot));
    }
    return snapshots;
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
        if (snapshot.shadowed) {
            llama_memory_seq_rm(memory(), snapshot.seq_id, -1, -1);
            llama_memory_seq_cp(memory(), snapshot.seq_id + static_cast<int32_t>(n_seq_max_), snapshot.seq_id, -1, -1);
        } else {
            llama_memory_seq_rm(memory(), snapshot.seq_id, snapshot.next > 0 ? snapshot.next : -1, -1);
        }
        if (!snapshot.window.empty()) {
            llama_state_seq_set_data_ext(get(), snapshot.window.data(), snapshot.window.size(), snapshot.seq_id,
                                         LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
        }
        const Positions held = positions_locked(snapshot.seq_id);
        if (held.max != snapshot.next - 1 || !covers(held, snapshot.next)) {
            llama_memory_seq_rm(memory(), snapshot.seq_id, -1, -1);
            lost += (lost.empty() ? "; could not be brought back and is now empty: sequence " : ", ") + str(snapshot.seq_id);
        }
    }
    return lost;
}

int32_t Context::run_pass(int32_t (*pass)(llama_context *, llama_batch)) {
    pools_.before_pass();
    const int32_t status = pass(get(), batch_.get());
    llama_synchronize(get());
    pools_.after_pass(status == 0);
    return status;
}

void Context::decode_locked(const Batch & batch) {
    batch_.clear();
    for (size_t i = 0; i < batch.size(); ++i) {
        batch_.add(batch.tokens[i], batch.positions[i], batch.seq_ids[i], batch.wants_output[i] != 0);
    }
    has_output_.assign(batch.size(), false);
    const std::vector<Snapshot> snapshots = take_snapshots(batch);
    LogCapture                  log;
    const Call                  call(*this);
    const int32_t               status = run_pass(llama_decode);
    const std::string           lost = status == 0 ? "" : roll_back(snapshots);
    drop_snapshots(snapshots);
    if (status == 1 || status == 2) {
        log.play_down();
    }
    switch (status) {
        case 0: break;
        case 1:
            fail("NoKvSlot", "no free cells in the KV cache for " + str(static_cast<int64_t>(batch.size())) +
                                 " tokens (n_ctx " + str(n_ctx()) + "); remove sequences, or use a smaller batch" + lost);
        case 2: fail("Aborted", "the forward pass was aborted" + lost);
        default: fail("DecodeError", "llama.cpp failed on a batch of " + str(static_cast<int64_t>(batch.size())) + " tokens (status " +
                                         str(status) + "): " + log.words("it gave no reason") + lost);
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
        fail("InvalidParams", "an encoder takes 1 to n_ubatch = " + str(n_ubatch()) + " tokens at once, not " + str(static_cast<int64_t>(tokens.size())));
    }
    batch_.clear();
    for (size_t i = 0; i < tokens.size(); ++i) {
        if (tokens[i] < 0 || tokens[i] >= model_->n_vocab()) {
            fail("InvalidParams", "token_ids[" + str(static_cast<int64_t>(i)) + "] must be in [0, " + str(model_->n_vocab()) + "), not " + str(tokens[i]));
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

// ---- what a forward pass left

const float * Context::logits_row(int32_t index) const {
    if (index < 0 || static_cast<size_t>(index) >= has_output_.size() || !has_output_[static_cast<size_t>(index)]) {
        fail("InvalidParams", "token " + str(index) + " of the last batch has no output: it was of " +
                                  str(static_cast<int64_t>(has_output_.size())) + " tokens, and wants_output must be set for this one");
    }
    const float * row = llama_get_logits_ith(get(), index);
    if (!row) {
        fail("Unsupported", "this context computes no logits");
    }
    return row;
}

std::vector<float> Context::logits(int32_t index) const {
    std::lock_guard<std::mutex> lock(mutex());
    const float *               row = logits_row(index);
    return {row, row + model_->n_vocab()};
}

std::vector<float> Context::embeddings(int32_t index) const {
    std::lock_guard<std::mutex> lock(mutex());
    if (!embeddings_) {
        fail("Unsupported", "embeddings are computed only by a context made with embeddings=True");
    }
    if (pooling_type() != LLAMA_POOLING_TYPE_NONE) {
        fail("Unsupported", "this context pools: it has one embedding a sequence and none a token; make it with pooling=\"none\"");
    }
    if (index < 0 || static_cast<size_t>(index) >= has_output_.size() || !has_output_[static_cast<size_t>(index)]) {
        fail("InvalidParams", "token " + str(index) + " of the last batch has no output");
    }
    const float * row = llama_get_embeddings_ith(get(), index);
    if (!row) {
        fail("Unsupported", "this model computes no embeddings");
    }
    return {row, row + llama_model_n_embd_out(model_->get())};
}

// ---- threads and adapters

void Context::set_threads(int32_t n_threads, int32_t n_threads_batch) {
    std::lock_guard<std::mutex> lock(mutex());
    for (int32_t count : {n_threads, n_threads_batch}) {
        if (count < 1 || count > GGML_MAX_N_THREADS) {
            fail("InvalidParams", "n_threads and n_threads_batch must be in [1, " + str(GGML_MAX_N_THREADS) + "], not " + str(count));
        }
    }
    pools_.attach(get(), n_threads, n_threads_batch);
    workers_.reset();
}

WorkerPool & Context::workers() {
    if (!workers_) {
        workers_.reset(new WorkerPool(static_cast<size_t>(llama_n_threads_batch(get())) - 1));
    }
    return *workers_;
}

std::pair<int32_t, int32_t> Context::threads() const {
    return {llama_n_threads(get()), llama_n_threads_batch(get())};
}

void Context::set_adapters(std::vector<std::pair<std::shared_ptr<Adapter>, float>> adapters) {
    std::lock_guard<std::mutex>           lock(mutex());
    std::vector<std::shared_ptr<Adapter>> kept;
    std::vector<llama_adapter_lora *>     raw;
    std::vector<float>                    scales;
    for (auto & [adapter, scale] : adapters) {
        if (&adapter->model() != model_.get()) {
            fail("AdapterError", "the adapter was loaded for another model than the one of this context");
        }
        raw.push_back(adapter->get());
        scales.push_back(scale);
        kept.push_back(std::move(adapter));
    }
    if (llama_set_adapters_lora(get(), raw.data(), raw.size(), scales.data()) != 0) {
        fail("AdapterError", "llama.cpp refused the adapters");
    }
    adapters_ = std::move(kept);
}

} // namespace paceline
