// Draft heads: layers that predict tokens after the next token from a model's hidden states, in a context of their own.
//
// That context mirrors the model's: the same sequence ids and cells, and every operation on them is carried out on both. After
// each pass of the model it computes the same tokens, each with the hidden row of the token before:
//
//   model:       t0  t1  t2  t3          rows h0 h1 h2 h3
//   MTP heads:   0,t0  h0,t1  h1,t2  h2,t3          at positions 0 to 3
//   EAGLE-3:           g0,t1  g1,t2  g2,t3          at positions 0 to 2; g: three layers' hidden states, encoded
//
// DFlash is a file with layers that attend to hidden states of several layers of the model, which its context has as cells. It
// drafts a block of tokens in one pass (draft_blocks.cpp). It keeps no row, and its positions are the model's.
//
// So a sequence can have drafts while both contexts hold the same of it; nothing else is remembered but the last hidden row.
// If the heads hold something else, as after an image, they begin anew with the next tokens, and draft from these alone.
// A pass of the heads that fails empties its sequences here: they have no more drafts, and nothing else changes for them.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "batch.hpp"
#include "context.hpp"
#include "state_frame.hpp"

struct llama_batch_ext;

namespace paceline {

// A request for drafts of a sequence: at most `depth` tokens after `token`, its newest, which is at `position`.
struct DraftWish {
    int32_t seq_id;
    int32_t position;
    int32_t token;
    int32_t depth;
};

// A block that a DFlash file drafts: the newest token and mask tokens behind it, `size` at most.
struct BlockShape {
    int32_t size;        // that llama.cpp's graph has room for
    int32_t trained;     // that the file is made for
    int32_t mask;        // token
    bool    with_anchor; // the newest token's own row has the first draft (DSpark), else the first mask token's
    bool    is_even;     // all blocks of a pass have to be of one size (DSpark)
    bool    is_causal;   // within a block

    int32_t rows_before() const noexcept { return with_anchor ? 0 : 1; } // of the first draft
    int32_t max_drafts() const noexcept { return size - rows_before(); }
};

// Reads it from the file's metadata. Raises InvalidParams and Unsupported if a block cannot be drafted.
// Files with layers of DeepSeek 4 do not come here: they are refused before they are loaded.
BlockShape block_shape(const Model & heads);

struct DraftingSequence { // while drafts are made
    DraftWish              wish;
    std::vector<int32_t> & tokens;  // drafted so far
    std::vector<float>     rows;    // one for the newest token, and for each draft that is in the next pass
    int32_t                index = 0; // of its last token in the pass
    bool                   is_active = true;
};

// A token, and how probable logits make it.
struct DraftChoice {
    int32_t token       = -1;
    float   probability = 0;
};

DraftChoice most_probable(const float * logits, int32_t n_vocab);

class DraftHeads {
public:
    // heads: the target's own model, or a file of heads alone. Raises Unsupported, and InvalidParams if they do not fit.
    DraftHeads(Context & target, const ContextOptions & options, const ThreadPools & pools);
    // Raises the error of heads for this model, before anything is allocated.
    static void check(const Model & model, const Model & heads, const llama_context_params & params);
    // The options of their context.
    static ContextOptions options(const Model & model, ContextOptions target);

    // As llama.cpp's greedy sampler would draw, while a token is at least so probable. Raises NoKvSlot, Aborted and DecodeError;
    // the sequences are then unchanged, and can have drafts. Needs the target's mutex held.
    std::vector<std::vector<int32_t>> draft(std::span<const DraftWish> wishes, float min_probability);
    int32_t                           max_depth() const noexcept; // that the heads are made for
    const Model &                     model() const noexcept { return *context_->model(); }
    Positions                         positions(int32_t seq_id) const { return context_->positions(seq_id); }

    // Follow the target's operations; its mutex is held. None of them throws for failures here.
    void before_pass() noexcept { pass_rows_ = nullptr; }
    void follow(const Batch & batch);
    void removed(int32_t seq_id, int32_t first);
    void copied(int32_t from, int32_t to, int32_t first, int32_t end);
    void kept(int32_t seq_id);
    void cleared(bool data);

    // States as a frame of both parts. `read` raises StateError, the others nothing but for memory.
    std::vector<uint8_t> save(std::vector<uint8_t> model, int32_t seq_id, bool partial);
    std::vector<uint8_t> save_range(std::vector<uint8_t> model, int32_t seq_id, int32_t first, int32_t end, int32_t scratch);
    std::vector<uint8_t> cut_range(std::vector<uint8_t> model, const StateParts & parts, Positions saved, int32_t first,
                                   int32_t end, int32_t scratch);
    void                 restored(int32_t seq_id, const StateParts & parts, bool partial, int32_t last);
    void                 loaded_range(int32_t seq_id, const StateParts & parts, Positions saved, int32_t first, int32_t end,
                                      int32_t scratch);

    void                   share_threads(const ThreadPools & pools) { context_->share_threads(pools); }
    void                   set_adapters(const std::vector<std::pair<std::shared_ptr<Adapter>, float>> & adapters);
    std::vector<BufferUse> memory_use() const { return context_->memory_use(); }

private:
    using Drafting = DraftingSequence;
    struct FreeBatch {
        void operator()(llama_batch_ext * batch) const noexcept;
    };
    struct LastPass { // the rows of one sequence in the newest pass
        int32_t first = -1;
        int32_t count = 0;
        size_t  index = 0;
    };

    enum class Kind { mtp, eagle3, dflash };

    static Kind   kind_of(const Model & heads);
    bool          drafts_blocks() const noexcept { return kind_ == Kind::dflash; }
    int32_t       at(int32_t position) const noexcept { return std::max(position - shift_, 0); }
    int32_t       held(int32_t seq_id) const { return context_->positions(seq_id).max + 1; }
    void          drop(int32_t seq_id) noexcept;
    void          clear();
    void          add(int32_t token, int32_t position, int32_t seq_id, const float * row, bool wants_output);
    void          run(int32_t type, const char * what);
    const float * hidden_rows(size_t num_tokens);
    void          gather_features(size_t num_tokens);
    void          add_features(size_t index, int32_t position, int32_t seq_id, bool wants_output);
    const float * encode_features(size_t num_tokens);
    void          follow_features(const Batch & batch);
    void          follow_rows(const Batch & batch);
    void          add_rows(const Batch & batch, std::vector<int32_t> & seq_ids);
    void          run_heads(const std::vector<int32_t> & seq_ids);
    const float * row_of(int32_t seq_id, int32_t position) const; // zeros if it is not known
    void          set_row(int32_t seq_id, int32_t position, const float * row);
    void          keep_row(int32_t seq_id); // as the earlier one
    void          find_row(int32_t seq_id, int32_t position); // among the rows of the newest pass, and the row before it
    void          draft_group(std::span<Drafting> group, float min_probability);
    void          draft_blocks(std::span<Drafting> group, float min_probability);
    int32_t       even_depth(std::span<const Drafting> group) const;
    int32_t       depth_in_context(int32_t position) const noexcept; // that ends within it
    size_t        rows_of_drafting() const noexcept; // that the pass of one sequence takes at most
    void          cut_drafts(std::span<const Drafting> group) noexcept; // rows that drafting has computed of these
    void          select_head(int32_t index);

    Context &                 target_;
    Kind                      kind_;
    int32_t                   n_heads_; // chained heads; 1 if a single head drafts all tokens
    BlockShape                block_{}; // of DFlash
    int32_t                   shift_ = 0;
    std::vector<int32_t>      layers_; // of the target that EAGLE-3 and DFlash read
    size_t                    width_;  // of a hidden row
    std::unique_ptr<Context>  context_;
    std::unique_ptr<llama_batch_ext, FreeBatch> batch_;
    std::vector<int32_t>      tokens_, positions_, seq_ids_; // of the batch
    std::vector<float>        rows_; // the last row of each sequence
    std::vector<int32_t>      row_positions_;
    std::vector<float>        earlier_rows_; // that the newest pass of a sequence began behind: it may be taken back
    std::vector<int32_t>      earlier_positions_;
    std::vector<LastPass>     last_passes_;
    std::vector<bool>         is_lost_; // a pass of theirs has failed: they are not followed until they begin anew
    std::vector<float>        features_, encoded_;
    std::vector<float>        no_row_;
    const float *             pass_rows_ = nullptr; // of the newest pass, while they are there
};

} // namespace paceline
