// DFlash and DSpark: drafts of a block at once, by a file over hidden states of several layers of the model.
#include <algorithm>
#include <array>
#include <cstring>

#include "draft_heads.hpp"
#include "error.hpp"
#include "llama-ext.h"

namespace paceline {
namespace {

constexpr int32_t MOST_BLOCK  = 64;
constexpr auto    USUAL_BLOCK = "16"; // of files that do not say it, as in llama.cpp

// Of llama.cpp's graph for a block, at most, counted in the pinned source.
constexpr int64_t FIXED_NODES = 64, LAYER_NODES = 60, LAYER_TENSORS = 11, OPTIONAL_NODES = 2;

std::string value_of(const Model & heads, const char * key, const char * otherwise) {
    std::array<char, 64> text{};
    return llama_model_meta_val_str(heads.get(), key, text.data(), text.size()) < 0 ? otherwise : text.data();
}

// Drafts that a Markov head has room for: each adds nodes to a graph whose size llama.cpp takes from the number of tensors alone,
// and asserts. Weights count too, if a scheduler sees them.
int64_t drafts_in_graph(const Model & heads) {
    const auto    num_tensors = static_cast<int64_t>(heads.num_tensors());
    const int64_t num_layers  = llama_model_n_layer(heads.get());
    const int64_t room = std::max<int64_t>(1024, 8 * num_tensors) - num_tensors - FIXED_NODES - LAYER_NODES * num_layers -
                         OPTIONAL_NODES * std::max<int64_t>(0, num_tensors - LAYER_TENSORS * num_layers);
    const int64_t nodes = 6 + (heads.has_tensor("markov_w2.scale") ? 1 : 0) + (heads.has_tensor("conf_proj.weight") ? 7 : 0) +
                          (heads.has_tensor("d2t") ? 6 : 0);
    return std::max<int64_t>(0, room) / nodes;
}

} // namespace

BlockShape block_shape(const Model & heads) {
    const bool        is_dspark = heads.has_tensor("markov_w1.weight");
    const std::string text      = value_of(heads, "dflash.block_size", is_dspark ? "" : USUAL_BLOCK);
    const int32_t     size      = text.empty() || text.size() > 3 || text.find_first_not_of("0123456789") != std::string::npos ? 0 : std::stoi(text);
    const int32_t     mask      = llama_vocab_mask(heads.vocab());
    if (size < 2 || size > MOST_BLOCK) {
        fail("InvalidParams", "dflash.block_size of the DFlash file must be from 2 to " + str(MOST_BLOCK) + ", not " + (text.empty() ? "missing" : text));
    }
    if (mask < 0 || mask >= heads.n_vocab()) {
        fail("InvalidParams", "the DFlash file has no mask token (tokenizer.ggml.mask_token_id)");
    }
    const bool with_anchor = is_dspark && value_of(heads, "dflash.sample_from_anchor", "true") == "true";
    const int32_t most = is_dspark ? static_cast<int32_t>(std::min<int64_t>(size, drafts_in_graph(heads))) : size;
    if (most < 2) {
        fail("Unsupported", "llama.cpp's graph has no room for the Markov head of a DSpark file of " + str(llama_model_n_layer(heads.get())) + " layers");
    }
    return {most, size, mask, with_anchor, is_dspark, value_of(heads, "dflash.attention.causal", "false") == "true"};
}

// Every token's features become a cell of the file's layers. Attention that is not causal takes a pass of one ubatch at most.
void DraftHeads::follow_features(const Batch & batch) {
    gather_features(batch.size());
    std::fill(last_passes_.begin(), last_passes_.end(), LastPass{});
    std::vector<bool> seen(last_passes_.size(), false);
    clear();
    for (size_t i = 0; i < batch.size(); ++i) {
        const size_t seq_id = static_cast<size_t>(batch.seq_ids[i]);
        if (!seen[seq_id]) {
            seen[seq_id] = true;
            if (held(batch.seq_ids[i]) != batch.positions[i]) {
                drop(batch.seq_ids[i]); // after positions that were not followed: cells begin here
            }
        }
        if (!is_lost_[seq_id]) {
            add_features(i, batch.positions[i], batch.seq_ids[i], false);
            tokens_.push_back(batch.tokens[i]);
            positions_.push_back(batch.positions[i]);
            seq_ids_.push_back(batch.seq_ids[i]);
        }
        if (!tokens_.empty() && (i + 1 == batch.size() || tokens_.size() == static_cast<size_t>(context_->n_ubatch()))) {
            run(LLAMA_PROCESS_TYPE_DECODE, "the pass of draft heads");
            clear();
        }
    }
}

// Blocks that have to be even are as deep as the deepest, as far as all of them end within the context.
int32_t DraftHeads::even_depth(std::span<const Drafting> group) const {
    int32_t most = 0, room = block_.max_drafts();
    for (const Drafting & one : group) {
        most = std::max(most, one.wish.depth);
        room = block_.is_even ? std::min(room, depth_in_context(one.wish.position)) : room;
    }
    return std::min(most, room);
}

// The newest token and mask tokens in one pass; the model's predictions at these are the drafts.
void DraftHeads::draft_blocks(std::span<Drafting> group, float min_probability) {
    const int32_t most = even_depth(group);
    clear();
    for (Drafting & one : group) {
        one.index           = static_cast<int32_t>(tokens_.size());
        one.wish.depth      = std::min(one.wish.depth, most);
        const int32_t depth = block_.is_even ? most : one.wish.depth;
        for (int32_t t = 0; t < depth + block_.rows_before(); ++t) {
            const int32_t token = t == 0 ? one.wish.token : block_.mask, position = one.wish.position + t;
            const int32_t added = llama_batch_ext_add_token(batch_.get(), one.wish.seq_id, token);
            if (added < 0 || !llama_batch_ext_set_pos(batch_.get(), added, &position) ||
                !llama_batch_ext_set_output_logits(batch_.get(), added, true)) {
                fail("DecodeError", "llama.cpp takes no block of sequence " + str(one.wish.seq_id) + " for draft heads");
            }
            tokens_.push_back(token);
            positions_.push_back(position);
            seq_ids_.push_back(one.wish.seq_id);
        }
    }
    run(LLAMA_PROCESS_TYPE_DECODE, "drafting");
    for (Drafting & one : group) {
        for (int32_t draft = 0; draft < one.wish.depth; ++draft) {
            const float * logits = llama_get_logits_ith(context_->get(), one.index + draft + block_.rows_before());
            if (!logits) {
                fail("DecodeError", "draft heads left no logits");
            }
            const DraftChoice choice = most_probable(logits, context_->model()->n_vocab());
            if (!(choice.probability >= min_probability)) { // nor if it is NaN
                break;
            }
            one.tokens.push_back(choice.token);
        }
    }
}

} // namespace paceline
