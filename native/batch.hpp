// The tokens of one forward pass, as parallel arrays that the caller owns.
#pragma once

#include <cstdint>
#include <span>
#include <utility>

#include "llama.h"

namespace paceline {

struct Batch {
    std::span<const int32_t> tokens;
    std::span<const int32_t> positions;
    std::span<const int32_t> seq_ids;
    std::span<const uint8_t> wants_output; // 1: logits (or the embedding) of this token are wanted

    size_t size() const noexcept { return seq_ids.size(); }
};

// Cells of one sequence that are computed from embeddings: a media item, or a part of one.
struct EmbeddingRow {
    int32_t                  seq_id;
    int32_t                  position;   // start of the item, or with consecutive cells the position of the first of these
    std::span<const float>   embeddings; // [n, n_embd]
    std::span<const int32_t> places;     // [n, 3]: t, y and x from `position` on (M-RoPE); empty: one position after another
    bool                     is_causal = true;
    int32_t                  scratch   = -1; // an empty sequence, for a pass that goes on within an item
};

// llama.cpp's own batch with room for `capacity` tokens of one sequence id each.
class OwnedBatch {
public:
    explicit OwnedBatch(int32_t capacity = 1) : batch_(llama_batch_init(capacity, 0, 1)) {}
    ~OwnedBatch() { llama_batch_free(batch_); }
    OwnedBatch(const OwnedBatch &)             = delete;
    OwnedBatch & operator=(const OwnedBatch &) = delete;
    OwnedBatch & operator=(OwnedBatch && other) noexcept {
        std::swap(batch_, other.batch_);
        return *this;
    }

    void clear() noexcept { batch_.n_tokens = 0; }

    void add(int32_t token, int32_t position, int32_t seq_id, bool wants_output) noexcept {
        const int32_t i     = batch_.n_tokens++;
        batch_.token[i]     = token;
        batch_.pos[i]       = position;
        batch_.n_seq_id[i]  = 1;
        batch_.seq_id[i][0] = seq_id;
        batch_.logits[i]    = wants_output;
    }

    const llama_batch & get() const noexcept { return batch_; }

private:
    llama_batch batch_;
};

} // namespace paceline
