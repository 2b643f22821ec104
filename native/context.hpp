// A context: the KV memory of one model and the forward passes over it.
//
// One call at a time: a mutex makes a second caller wait. abort() is the exception, it may come from any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "adapter.hpp"
#include "batch.hpp"
#include "model.hpp"
#include "operation_times.hpp"
#include "process.hpp"
#include "thread_pools.hpp"
#include "window_pins.hpp"
#include "worker_pool.hpp"

struct llama_batch_ext;

namespace paceline {

class DraftHeads;
struct DraftWish;

struct ContextOptions {
    llama_context_params params = llama_context_default_params();
    // Refuse when llama.cpp's plan takes more host memory than this; unset: no check.
    std::optional<uint64_t> max_host_bytes;
    // A model of draft heads that follow every pass, for example the context's own.
    std::shared_ptr<Model> heads;
    // For the context of draft heads: it follows the model's context, which has its flag.
    bool                      follows    = false;
    const std::atomic<bool> * abort_flag = nullptr;
    const ThreadPools *       pools      = nullptr; // to share; unset: its own
    bool                      times_operations = false; // for operation_times()
};

// The positions that a sequence holds; {-1, -1} when empty. Sliding windows drop the first positions.
struct Positions {
    int32_t min = -1;
    int32_t max = -1;
};

// Frees an object that has threads, only in the process that made it: a fork has none of them to join.
struct FreeAtHome {
    Home home;
    void operator()(llama_context * context) const noexcept { home.here() ? llama_free(context) : void(); }
    void operator()(WorkerPool * pool) const noexcept { home.here() ? delete pool : void(); }
};

// The reason why wrong drafts could not be taken out of the context's memory again; empty if they can.
std::string draft_refusal(const Model & model, const ContextOptions & options);

class Context {
public:
    Context(std::shared_ptr<Model> model, const ContextOptions & options);
    // The memory of the model and this context, without making it. The model may have been loaded with no_alloc.
    static std::vector<BufferUse> plan(std::shared_ptr<Model> model, const ContextOptions & options);
    ~Context();
    Context(const Context &)             = delete;
    Context & operator=(const Context &) = delete;

    const std::shared_ptr<Model> & model() const noexcept { return model_; }
    // The model's, or attention if a sliding window model keeps whole sequences in one pool (swa_full).
    MemoryClass                    memory_class() const noexcept { return memory_class_; }
    llama_context *                get() const noexcept { return context_.get(); }
    std::mutex &                   mutex() const; // held by everything that computes or touches memory; Closed after a fork
    uint32_t                       n_ctx() const noexcept { return llama_n_ctx(get()); }
    uint32_t                       n_ctx_seq() const noexcept { return llama_n_ctx_seq(get()); }
    int64_t                        max_positions() const noexcept { return max_positions_; } // that a sequence may have
    uint32_t                       n_batch() const noexcept { return llama_n_batch(get()); }
    uint32_t                       max_rollback() const noexcept { return llama_n_rs_seq(get()); } // states back, if recurrent
    uint32_t                       n_ubatch() const noexcept { return llama_n_ubatch(get()); }
    uint32_t                       n_seq_max() const noexcept { return n_seq_max_; }
    uint32_t                       n_outputs_max() const noexcept { return n_outputs_max_; }
    bool                           kv_unified() const noexcept { return kv_unified_; }
    enum llama_pooling_type        pooling_type() const noexcept { return llama_pooling_type(get()); }
    std::vector<BufferUse>         memory_use() const;
    // Times of the operations of the passes since the last call. Unsupported without times_operations.
    std::vector<OperationTime>     operation_times();
    bool                           has_embeddings() const noexcept { return embeddings_; }
    // Whether a sequence is cells, which can be shared and saved in any part, and beside them a state (a window, recurrent
    // layers), which can only be saved as it is now.
    bool                           has_state_apart() const noexcept { return has_state_apart_; }
    const std::string &            draft_refusal() const noexcept { return draft_refusal_; }

    // Forward pass. Afterwards logits(i) and embeddings(i) belong to token i. After an error (NoKvSlot, Aborted,
    // DecodeError, or InvalidParams if the batch is refused before it runs) every sequence is unchanged.
    void decode(const Batch & batch);
    // As decode(), over embeddings. Cells at the position that the sequence ended with go on within an item.
    void decode(const EmbeddingRow & row);
    // The encoder of an encoder-decoder model; decode() then attends to it.
    void encode(std::span<const int32_t> tokens);
    // One vector per text, rows of `dimension()` floats: texts are packed into as few batches as fit. A text longer
    // than n_ubatch is computed in pieces if embeds_in_pieces().
    std::vector<float> embed(std::span<const int32_t> tokens, std::span<const int32_t> lengths);
    size_t             embedding_dimension() const noexcept;
    bool               embeds_in_pieces() const noexcept;

    // Row of token i of the last batch, n_vocab floats, valid until the next call that computes. Needs mutex() held.
    const float *      logits_row(int32_t index) const;
    std::vector<float> logits(int32_t index) const;
    std::vector<float> embeddings(int32_t index) const;
    // The last pass's vector of a sequence's tokens or embeddings, by the pooling of a context with embeddings.
    std::vector<float> pooled(int32_t seq_id) const;

    // Ends the forward pass that is running, if there is one. Only the CPU backend can stop in the middle of a pass.
    void abort() noexcept;

    Positions positions(int32_t seq_id) const;
    // All from `first` on; earlier positions stay. Recurrent state only goes back to the start of a row with drafts, as
    // long as nothing else was computed for the sequence.
    void      remove(int32_t seq_id, int32_t first);
    void      copy(int32_t from, int32_t to, int32_t first, int32_t end);
    // If has_state_apart(): shares the cells of positions [0, end) with an empty sequence, which cannot compute until
    // load_range has added the cells up to a partial state, and restore() that state.
    void      copy_cells(int32_t from, int32_t to, int32_t end);
    void      keep(int32_t seq_id);
    void      clear(bool data);

    // The state, and the last position it holds. A partial state is restored onto a sequence that still holds that position
    // and gives up later positions.
    std::pair<std::vector<uint8_t>, int32_t> save(int32_t seq_id, bool partial) const;
    void restore(int32_t seq_id, std::span<const uint8_t> state, bool partial, int32_t last);

    // Positions [first, end) of a sequence as a state of their own, by way of an empty sequence `scratch`; only if any
    // part of a memory can be shared. A state saved as [state_first, state_end) is added after position first - 1.
    // If has_state_apart() these are cells without the state, as copy_cells() shares them.
    std::vector<uint8_t> save_range(int32_t seq_id, int32_t first, int32_t end, int32_t scratch);
    void load_range(int32_t seq_id, std::span<const uint8_t> state, Positions saved, int32_t first, int32_t end,
                    int32_t scratch);
    // Positions [first, end) of a saved range, as save_range() would have saved them.
    std::vector<uint8_t> cut_range(std::span<const uint8_t> state, Positions saved, int32_t first, int32_t end, int32_t scratch);

    void                    set_threads(int32_t n_threads, int32_t n_threads_batch);
    std::pair<int32_t, int32_t> threads() const;
    void                    share_threads(const ThreadPools & pools); // of a context that never computes at the same time
    void                    set_adapters(std::vector<std::pair<std::shared_ptr<Adapter>, float>> adapters);

    // As decode(). Needs mutex() held, as reading the logits afterwards does. The sequences in `drafting` can be taken back.
    void decode_locked(const Batch & batch, std::span<const int32_t> drafting = {});
    void check_batch(const Batch & batch) const;
    // Threads for work on rows after a pass, made at the first call. Needs mutex() held.
    WorkerPool & workers();
    // Greedy drafts of its heads, none for sequences that they could not follow. Unsupported without heads; NoKvSlot, Aborted and
    // DecodeError if a pass of them fails, which changes nothing.
    std::vector<std::vector<int32_t>> draft(std::span<const DraftWish> wishes, float min_probability);
    const DraftHeads *                draft_heads() const noexcept { return heads_.get(); }
    // A pass over rows of tokens and embeddings, as draft heads have; `batch` has their tokens. Returns llama.cpp's
    // status; after a failure the contents of the sequences are unknown.
    int32_t process(int32_t type, llama_batch_ext * rows, const Batch & batch);
    // Removes the positions of a drafting sequence from `first` on, right after its pass: only these, or if its memory
    // cannot be cut there all positions of its row. If it could not continue then, empties it.
    enum class TakenBack { drafts, row, sequence };
    TakenBack take_back_locked(int32_t seq_id, int32_t first);

    // While one lives, abort() has an effect; the inner one of two does nothing. Needs mutex() held.
    class Call {
    public:
        explicit Call(Context & context);
        ~Call();
        Call(const Call &)             = delete;
        Call & operator=(const Call &) = delete;

    private:
        Context & context_;
        bool      is_outer_;
    };
    const std::atomic<bool> & aborted() const noexcept { return aborted_; }

private:
    struct Snapshot;
    struct Draft {};

    Context(Draft, std::shared_ptr<Model> model, const ContextOptions & options); // checked, and without a llama_context
    llama_context_params  prepared(const ContextOptions & options); // as llama.cpp takes them
    std::vector<BufferUse> measure(const ContextOptions & options, const llama_context_params & params);
    void                  check_memory(const ContextOptions & options, const llama_context_params & params);

    llama_memory_t        memory() const; // raises Unsupported if there is none
    bool                  covers(const Positions & held, int32_t next) const;
    void                  remove_locked(int32_t seq_id, int32_t first); // and its pins
    void                  removed_locked(int32_t seq_id, int32_t first); // from the memory of the model; now from the rest
    void                  pin_added(int32_t seq_id);
    void                  check_seq(const char * name, int32_t seq_id) const;
    Positions             positions_locked(int32_t seq_id) const;
    std::vector<uint8_t>  save_locked(int32_t seq_id, llama_state_seq_flags flags) const;
    // A state leaves out what the window of its last position no longer covers, so ranges are saved in shorter pieces.
    int32_t               piece_end(int32_t first, int32_t end) const;
    std::vector<uint8_t>  save_cells(int32_t seq_id, int32_t first, int32_t end, int32_t scratch);
    std::vector<uint8_t>  cut_cells(std::span<const uint8_t> state, Positions saved, int32_t first, int32_t end, int32_t scratch);
    void                  load_cells(int32_t seq_id, std::span<const uint8_t> state, Positions saved, int32_t first, int32_t end,
                                     int32_t scratch);
    std::vector<uint8_t>  save_piece(int32_t seq_id, int32_t first, int32_t end, int32_t scratch);
    std::vector<uint8_t>  save_bare(int32_t seq_id, int32_t first, int32_t end, int32_t scratch);
    void                  load_bare(int32_t seq_id, std::span<const uint8_t> cells, Positions saved, int32_t first, int32_t end,
                                    int32_t scratch);
    void                  place_bare(std::span<const uint8_t> cells, int32_t scratch);
    std::vector<uint8_t>  bare_cells(int32_t scratch); // as save_bare() returns them
    bool                  is_bare(int32_t seq_id, Positions expected);
    void                  drop_state(int32_t seq_id); // that was shared with cells, as far as llama.cpp can
    void                  check_range(int32_t seq_id, int32_t first, int32_t end, int32_t scratch) const;
    void                  check_scratch(int32_t first, int32_t end, int32_t scratch) const; // and the range
    void                  check_has_state(const char * name, int32_t seq_id) const;
    int32_t               num_held(int32_t seq_id) const; // positions, with a state or without
    void load_piece(int32_t seq_id, std::span<const uint8_t> state, Positions saved, int32_t first, int32_t end, int32_t scratch);
    void place_piece(std::span<const uint8_t> state, Positions saved, int32_t scratch);
    std::vector<uint8_t>  cut_piece(std::span<const uint8_t> state, Positions saved, int32_t first, int32_t end, int32_t scratch);
    void for_each_piece(std::span<const uint8_t> state, Positions saved,
                        const std::function<void(std::span<const uint8_t>, Positions)> & use) const;
    // Recurrent state cannot be cut back, so before a batch it is shared with a second sequence id per sequence, which
    // costs no copy; a rollback takes it from there.
    bool                  needs_shadows() const noexcept;
    bool                  needs_pins() const noexcept; // of the positions before a full-size window
    std::vector<Snapshot> take_snapshots(const Batch & batch); // earlier snapshots of the sequences are dropped
    void                  pin_before(const Batch & batch);
    void                  drop_snapshots(const std::vector<Snapshot> & snapshots);
    void                  keep_snapshots(const std::vector<Snapshot> & snapshots, std::span<const int32_t> drafting);
    bool                  cut_state(int32_t seq_id, int32_t first); // by states of the last pass, of which it has some
    bool                  restore_shadow(int32_t seq_id); // kept for a drafting sequence; empties it if that fails
    void                  drop_shadow(int32_t seq_id);
    std::string           roll_back(const std::vector<Snapshot> & snapshots); // returns the failures as text
    int32_t               run_pass(const std::function<int32_t()> & pass); // returns llama.cpp's status
    void                  check_wish(const DraftWish & wish) const;
    // A decoding pass after take_snapshots(), with any outcome.
    void run_decode(const llama_batch & batch, const std::vector<Snapshot> & snapshots, std::span<const int32_t> drafting = {});
    bool                  check_row(const EmbeddingRow & row) const; // returns whether it goes on within an item
    void                  check_texts(std::span<const int32_t> tokens, std::span<const int32_t> lengths) const;
    void                  embed_pack(std::span<const int32_t> tokens, std::span<const int32_t> lengths, float * out);
    void                  embed_in_pieces(std::span<const int32_t> tokens, float * out);
    void                  run_embedding(); // over batch_
    void                  copy_vectors(size_t num_rows, float * out) const;

    Home                                  home_;
    std::shared_ptr<Model>                model_;
    MemoryClass                           memory_class_;
    int32_t                               n_swa_; // 0 without a sliding window
    bool                                  has_window_; // of its own size, perhaps beside recurrent layers
    bool                                  follows_; // of draft heads
    bool                                  is_chunked_; // whether it slides by chunks of n_swa instead of by positions
    uint32_t                              n_seq_max_;
    uint32_t                              n_outputs_max_;
    int64_t                               max_positions_;
    bool                                  kv_unified_;
    bool                                  has_state_apart_;
    mutable bool                          is_layout_checked_ = false; // of a state behind its cells
    std::vector<int32_t>                  num_bare_; // by sequence: cells that it holds without a state
    std::vector<Positions>                kept_; // by sequence: the use of its shadow, {last held, begin of its row}; -1
    std::string                           draft_refusal_;
    bool                                  embeddings_;
    bool                                  one_sequence_per_pass_;
    bool                                  computes_all_outputs_;
    bool                                  encoded_ = false;
    bool                                  must_reserve_ = false; // by the next pass, since the adapters have changed
    std::vector<std::shared_ptr<Adapter>> adapters_; // these and the pools outlive the context that uses them
    ThreadPools                           pools_;
    std::unique_ptr<OperationTimes>       operation_times_; // unset: they are not taken
    std::unique_ptr<llama_context, FreeAtHome> context_;
    std::optional<WindowPins>             pins_; // of a full-size window cache
    OwnedBatch                            batch_; // reused by every decode
    std::vector<bool>                     has_output_;
    std::unique_ptr<WorkerPool, FreeAtHome> workers_;
    std::unique_ptr<DraftHeads>           heads_; // goes before the context that they read
    std::atomic<bool>                     running_{false};
    std::atomic<bool>                     aborted_{false};
    mutable std::mutex                    mutex_;
};

} // namespace paceline
