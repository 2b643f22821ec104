#include "context.hpp"

#include <algorithm>
#include <set>

#include "draft_heads.hpp"
#include "error.hpp"
#include "log.hpp"

namespace paceline {
namespace {

MemoryClass class_with(const Model & model, const ContextOptions & options) {
    if (options.follows) { // heads are layers with attention over everything, or with a window that is kept
        return MemoryClass::attention;
    }
    const llama_context_params & params = options.params;
    const MemoryClass            own    = model.memory_class();
    const bool keeps_all  = params.swa_full && params.kv_unified && !params.embeddings;
    return own == MemoryClass::sliding_window && keeps_all ? MemoryClass::attention : own;
}

// Architectures with states that do not end with the partial state, or with cells of several positions.
const std::set<std::string> WITH_STATES_OF_THEIR_OWN = {"deepseek4", "dots3note", "glm5-next", "qwen4exp"};

bool keeps_window(const Model & model, MemoryClass memory_class) {
    return memory_class == MemoryClass::sliding_window ||
           (memory_class == MemoryClass::hybrid && llama_model_n_swa(model.get()) > 0 &&
            !WITH_STATES_OF_THEIR_OWN.contains(model.architecture()));
}

bool separates_state(const Model & model, MemoryClass memory_class, const llama_context_params & params) {
    return params.kv_unified && (memory_class == MemoryClass::sliding_window || memory_class == MemoryClass::hybrid) &&
           !WITH_STATES_OF_THEIR_OWN.contains(model.architecture()) && !model.one_sequence_per_pass();
}

} // namespace

std::string draft_refusal(const Model & model, const ContextOptions & options) {
    const MemoryClass memory_class = class_with(model, options);
    if (memory_class == MemoryClass::none) {
        return "it generates no text";
    }
    if (memory_class != MemoryClass::attention && WITH_STATES_OF_THEIR_OWN.contains(model.architecture())) {
        return "llama.cpp keeps the memory of the architecture " + model.architecture() + " in a form of its own, in which wrong tokens "
               "cannot be taken back";
    }
    if (memory_class == MemoryClass::hybrid && llama_model_n_swa(model.get()) > 0) {
        return "it has a sliding window beside recurrent layers, and wrong tokens cannot be taken back in both";
    }
    return "";
}

namespace {

bool on_abort(void * flag) {
    return static_cast<std::atomic<bool> *>(flag)->load(std::memory_order_relaxed) || process_is_ending();
}

} // namespace

bool Context::needs_shadows() const noexcept {
    return memory_class_ == MemoryClass::recurrent || memory_class_ == MemoryClass::hybrid;
}

Context::Context(Draft, std::shared_ptr<Model> model, const ContextOptions & options)
    : model_(std::move(model)),
      memory_class_(class_with(*model_, options)),
      n_swa_(model_->memory_class() == MemoryClass::sliding_window ? llama_model_n_swa(model_->get()) : 0),
      has_window_(keeps_window(*model_, memory_class_)),
      follows_(options.follows),
      is_chunked_(model_->architecture() == "llama4"),
      n_seq_max_(options.params.n_seq_max),
      kv_unified_(options.params.kv_unified),
      has_state_apart_(separates_state(*model_, memory_class_, options.params)),
      num_bare_(options.params.n_seq_max, 0),
      kept_(options.params.n_seq_max),
      draft_refusal_(paceline::draft_refusal(*model_, options)),
      embeddings_(options.params.embeddings),
      one_sequence_per_pass_(model_->one_sequence_per_pass()),
      computes_all_outputs_(model_->computes_all_outputs()) {
    if (model_->vocab_only()) {
        fail("Unsupported", "this model was loaded with vocab_only=True and has no weights to compute with");
    }
    if (options.heads) {
        if (!kv_unified_ || embeddings_) {
            fail("InvalidParams", "draft heads need kv_unified=True and embeddings=False");
        }
        DraftHeads::check(*model_, *options.heads, options.params);
    }
    if (embeddings_ && model_->embeddings_are_too_narrow()) {
        fail("Unsupported", "llama.cpp cannot read embeddings of the architecture " + model_->architecture() +
                                ": it takes them to be wider than its graph makes them");
    }
}

Context::Context(std::shared_ptr<Model> model, const ContextOptions & options)
    : Context(Draft{}, std::move(model), options) {
    if (model_->no_alloc()) {
        fail("Unsupported", "this model was loaded with no_alloc=True, to plan its memory, and has no weights to compute with");
    }
    llama_context_params params = prepared(options);
    if (options.max_host_bytes) {
        check_memory(options, params);
    }
    if (options.times_operations) {
        operation_times_         = std::make_unique<OperationTimes>();
        params.cb_eval           = &OperationTimes::on_node;
        params.cb_eval_user_data = operation_times_.get();
    }
    LogCapture log;
    {
        std::shared_lock lock(model_->adapter_mutex());
        context_.reset(llama_init_from_model(model_->get(), params));
    }
    if (!get()) {
        fail("InvalidParams", "llama.cpp cannot make a context with these options: " + log.words("it gave no reason"));
    }
    if (needs_pins()) {
        pins_.emplace(memory(), n_seq_max_, n_swa_);
    }
    max_positions_ = n_ctx_seq();
    if (const int64_t rows = model_->position_rows(); rows > 0) {
        max_positions_ = std::min(max_positions_, rows);
    }
    batch_         = OwnedBatch(static_cast<int32_t>(n_batch()));
    if (options.pools) {
        pools_.share(get(), *options.pools);
    } else {
        pools_.attach(get(), params.n_threads, params.n_threads_batch);
    }
    if (options.heads) {
        heads_        = std::make_unique<DraftHeads>(*this, options, pools_);
        must_reserve_ = true;
    }
}

Context::~Context() = default;

bool Context::needs_pins() const noexcept { return n_swa_ > 0 && memory_class_ == MemoryClass::attention; }

llama_context_params Context::prepared(const ContextOptions & options) {
    llama_context_params params = options.params;
    if (llama_model_has_encoder(model_->get()) && n_seq_max_ > 1 && !options.follows) {
        fail("Unsupported", "an encoder-decoder model works on one sequence at a time: n_seq_max must be 1, not " + str(n_seq_max_));
    }
    if (memory_class_ == MemoryClass::hybrid && !kv_unified_) {
        // Copies between its separate buffers happen at the next pass only, too late for a snapshot of this one.
        fail("Unsupported", "a hybrid model needs kv_unified=True");
    }
    if (!needs_shadows() || !draft_refusal_.empty()) {
        params.n_rs_seq = 0;
    } else if (params.n_rs_seq > 0 && params.n_rs_seq + 2 > params.n_ubatch) { // it asserts that these tokens fit
        fail("InvalidParams", "max_rollback must be at most n_ubatch - 2 = " + str(static_cast<int64_t>(params.n_ubatch) - 2) + ", not " +
                                  str(params.n_rs_seq));
    }
    if (needs_shadows() || needs_pins()) {
        params.n_seq_max *= 2;
        if (params.n_seq_max > llama_max_parallel_sequences()) {
            fail("InvalidParams", "n_seq_max must be at most " + str(llama_max_parallel_sequences() / 2) + " for a " +
                                      (needs_pins() ? "sliding window with swa_full" : "model with recurrent state") + ", not " +
                                      str(n_seq_max_));
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
    n_outputs_max_ = llama_model_has_encoder(model_->get()) && !options.follows ? params.n_batch : params.n_outputs_max;
    if (computes_all_outputs_) {
        params.n_outputs_max = std::max(params.n_outputs_max, params.n_batch);
    }
    params.abort_callback      = on_abort;
    params.abort_callback_data = const_cast<std::atomic<bool> *>(options.abort_flag ? options.abort_flag : &aborted_);
    return params;
}

std::vector<BufferUse> Context::plan(std::shared_ptr<Model> model, const ContextOptions & options) {
    Context draft(Draft{}, std::move(model), options);
    return draft.measure(options, draft.prepared(options));
}

std::vector<BufferUse> Context::measure(const ContextOptions & options, const llama_context_params & params) {
    if (!options.heads) {
        return measure_memory(*model_, params);
    }
    const ContextOptions own = DraftHeads::options(*model_, options);
    Context              heads(Draft{}, options.heads, own);
    return measure_memory(*model_, params, options.heads.get(), heads.prepared(own));
}

std::vector<BufferUse> Context::memory_use() const {
    std::vector<BufferUse> uses = paceline::memory_use(get());
    if (heads_) {
        add_uses(uses, heads_->memory_use(), &heads_->model() == model_.get());
    }
    return uses;
}

std::vector<OperationTime> Context::operation_times() {
    if (!operation_times_) {
        fail("Unsupported", "this context was made without times_operations=True");
    }
    const std::lock_guard lock(mutex());
    return operation_times_->take();
}

void Context::check_memory(const ContextOptions & options, const llama_context_params & params) {
    const uint64_t max_host_bytes = *options.max_host_bytes;
    uint64_t       bytes          = 0;
    for (const BufferUse & use : measure(options, params)) {
        bytes += use.is_host ? use.cache + use.compute : 0;
    }
    if (bytes > max_host_bytes) {
        fail("NotEnoughMemory", "a context with n_ctx " + str(params.n_ctx) + ", n_ubatch " + str(params.n_ubatch) +
                                    " and n_seq_max " + str(n_seq_max_) + " takes " + str(bytes >> 20) + " MiB, and " +
                                    str(max_host_bytes >> 20) + " MiB are free; lower n_ctx, or use a smaller type_k and type_v");
    }
}

std::mutex & Context::mutex() const {
    home_.check("the context");
    return mutex_;
}

llama_memory_t Context::memory() const {
    llama_memory_t memory = llama_get_memory(get());
    if (!memory) {
        fail("Unsupported", llama_model_is_diffusion(model_->get())
                                ? "the architecture " + model_->architecture() + " is a diffusion model, which writes no token after "
                                  "the other and keeps no memory of a sequence: it cannot decode"
                                : "this model keeps no memory of a sequence (it is an encoder): use an Embedder");
    }
    return memory;
}

void Context::check_seq(const char * name, int32_t seq_id) const {
    if (seq_id < 0 || static_cast<uint32_t>(seq_id) >= n_seq_max_) {
        fail("InvalidParams", std::string(name) + " must be in [0, " + str(n_seq_max_) + "), which is n_seq_max, not " + str(seq_id));
    }
}

// ---- results of a forward pass

const float * Context::logits_row(int32_t index) const {
    if (index < 0 || static_cast<size_t>(index) >= has_output_.size() || !has_output_[static_cast<size_t>(index)]) {
        fail("InvalidParams", "token " + str(index) + " of the last batch has no output: it was of " +
                                  str(has_output_.size()) + " tokens, and wants_output must be set for this one");
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

std::vector<float> Context::pooled(int32_t seq_id) const {
    std::lock_guard<std::mutex> lock(mutex());
    check_seq("seq_id", seq_id);
    if (!embeddings_ || pooling_type() == LLAMA_POOLING_TYPE_NONE) {
        fail("Unsupported", "only a context with embeddings=True and a pooling pools");
    }
    const float * row = llama_get_embeddings_seq(get(), seq_id);
    if (!row) {
        fail("InvalidParams", "the last pass had nothing of sequence " + str(seq_id));
    }
    return {row, row + embedding_dimension()};
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
    if (heads_) {
        heads_->share_threads(pools_);
    }
}

void Context::share_threads(const ThreadPools & pools) {
    std::lock_guard<std::mutex> lock(mutex());
    pools_.share(get(), pools);
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
    for (const auto & [adapter, scale] : adapters) {
        if (&adapter->model() != model_.get()) {
            fail("AdapterError", "the adapter was loaded for another model than the one of this context");
        }
        raw.push_back(adapter->get());
        scales.push_back(scale);
        kept.push_back(adapter);
    }
    if (llama_set_adapters_lora(get(), raw.data(), raw.size(), scales.data()) != 0) {
        fail("AdapterError", "llama.cpp refused the adapters");
    }
    if (heads_) {
        heads_->set_adapters(adapters);
    }
    must_reserve_ = true;
    adapters_ = std::move(kept);
}

} // namespace paceline
