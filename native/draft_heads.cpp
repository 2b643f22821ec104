#include "draft_heads.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

#include "error.hpp"
#include "llama-ext.h"
#include "log.hpp"

namespace paceline {
namespace {

constexpr int32_t  ENCODED_AT_ONCE = 64; // features: llama.cpp reserves a row of logits for each
constexpr uint32_t BLOCK_ROWS      = 128; // of a pass that drafts blocks, each with a row of logits

std::span<const uint8_t> bytes_of(const float * row, size_t width) {
    return {reinterpret_cast<const uint8_t *>(row), width * sizeof(float)};
}

void warn(const std::string & words) {
    LogCapture log;
    log.add({GGML_LOG_LEVEL_WARN, "draft heads: " + words + "\n"});
}

void warn_of_loss(const std::string & reason) { warn("sequences go on without drafts: " + reason); }

} // namespace

DraftChoice most_probable(const float * logits, int32_t n_vocab) {
    const auto  best = std::max_element(logits, logits + n_vocab);
    double      sum  = 0;
    for (int32_t i = 0; i < n_vocab; ++i) {
        sum += std::exp(static_cast<double>(logits[i]) - *best);
    }
    return {static_cast<int32_t>(best - logits), static_cast<float>(1.0 / sum)};
}

void DraftHeads::FreeBatch::operator()(llama_batch_ext * batch) const noexcept { llama_batch_ext_free(batch); }

DraftHeads::DraftHeads(Context & target, const ContextOptions & given, const ThreadPools & pools)
    : target_(target), kind_(kind_of(*given.heads)), n_heads_(1), width_(0) {
    const Model & model = *given.heads;
    if (kind_ != Kind::mtp) {
        const int32_t * layers = llama_model_target_layer_ids(model.get());
        layers_.assign(layers, layers + llama_model_target_layer_ids_n(model.get()));
        shift_ = kind_ == Kind::eagle3;
        width_ = static_cast<size_t>(llama_model_n_embd(model.get()));
    } else {
        n_heads_ = llama_model_n_layer_nextn(model.get());
        width_   = static_cast<size_t>(llama_model_n_embd_out(model.get()));
    }
    ContextOptions own  = options(*target.model(), given);
    own.params.ctx_other = target.get();
    own.abort_flag       = &target.aborted();
    own.pools            = &pools;
    context_             = std::make_unique<Context>(given.heads, own);
    batch_.reset(llama_batch_ext_init(context_->get()));
    const size_t n_seq_max = target.n_seq_max();
    rows_.assign(n_seq_max * width_, 0.0f);
    no_row_.assign(width_, 0.0f);
    row_positions_.assign(n_seq_max, -1);
    earlier_rows_.assign(n_seq_max * width_, 0.0f);
    earlier_positions_.assign(n_seq_max, -1);
    last_passes_.assign(n_seq_max, {});
    is_lost_.assign(n_seq_max, false);
    const int32_t n_layer = llama_model_n_layer(target.model()->get());
    bool          wants_last = kind_ == Kind::mtp;
    for (const int32_t layer : layers_) {
        wants_last |= layer == n_layer;
        llama_set_embeddings_layer_inp(target.get(), static_cast<uint32_t>(layer), layer < n_layer);
    }
    llama_set_embeddings_nextn(target.get(), wants_last, false);
    if (drafts_blocks()) {
        block_ = block_shape(model);
        if (block_.size < block_.trained) {
            warn("of blocks of " + str(block_.trained) + " tokens " + str(block_.size) + " are drafted: llama.cpp's graph has no room for more");
        }
        llama_set_causal_attn(context_->get(), block_.is_causal);
    }
    llama_set_embeddings_nextn(context_->get(), !drafts_blocks(), true);
    // Both reserve their graphs anew: setting a layer makes them, whatever it is set to.
    llama_set_embeddings_layer_inp(target.get(), 0, std::count(layers_.begin(), layers_.end(), 0) > 0);
    llama_set_embeddings_layer_inp(context_->get(), 0, false);
}

ContextOptions DraftHeads::options(const Model & model, ContextOptions target) {
    const Model &    heads    = *target.heads;
    const Kind       kind     = kind_of(heads);
    ContextOptions   own      = std::move(target);
    own.params.ctx_type       = kind == Kind::mtp ? LLAMA_CONTEXT_TYPE_MTP : LLAMA_CONTEXT_TYPE_DEFAULT;
    own.params.embeddings     = false;
    own.params.pooling_type   = LLAMA_POOLING_TYPE_NONE;
    own.params.n_rs_seq       = 0;
    own.times_operations      = false;
    own.params.swa_full       = true; // few layers: cut, copied and saved as all others
    uint32_t n_rows           = kind == Kind::mtp ? static_cast<uint32_t>(llama_model_n_layer_nextn(heads.get())) : 1;
    if (kind == Kind::dflash) {
        const BlockShape block = block_shape(heads);
        n_rows                 = static_cast<uint32_t>(block.size);
        if (block.size < block.trained) { // llama.cpp plans with a ubatch of even blocks, one a sequence, of any size of the file's
            own.params.n_ubatch = std::min(own.params.n_ubatch, n_rows * own.params.n_seq_max);
        }
    }
    const uint32_t most       = kind == Kind::dflash ? std::min({BLOCK_ROWS, own.params.n_batch, own.params.n_ubatch}) : own.params.n_batch;
    own.params.n_outputs_max  = std::max(kind == Kind::dflash ? n_rows : own.params.n_seq_max, std::min(own.params.n_seq_max * n_rows, most));
    if (&heads != &model) { // trained with a RoPE of its own
        own.params.rope_scaling_type = LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED;
        own.params.rope_freq_base = own.params.rope_freq_scale = 0.0f;
    }
    own.heads          = nullptr;
    own.follows        = true;
    own.max_host_bytes = std::nullopt;
    return own;
}

int32_t DraftHeads::max_depth() const noexcept {
    if (drafts_blocks()) {
        return block_.max_drafts();
    }
    return n_heads_ > 1 ? n_heads_ : std::numeric_limits<int32_t>::max();
}

size_t DraftHeads::rows_of_drafting() const noexcept { return static_cast<size_t>(drafts_blocks() ? block_.size : n_heads_); }

DraftHeads::Kind DraftHeads::kind_of(const Model & heads) {
    const std::string architecture = heads.architecture();
    return architecture == "eagle3" ? Kind::eagle3 : architecture == "dflash" ? Kind::dflash : Kind::mtp;
}

// ---- passes

void DraftHeads::clear() {
    llama_batch_ext_clear(batch_.get());
    tokens_.clear();
    positions_.clear();
    seq_ids_.clear();
}

void DraftHeads::add(int32_t token, int32_t position, int32_t seq_id, const float * row, bool wants_output) {
    const int32_t index = llama_batch_ext_add_token(batch_.get(), seq_id, token);
    if (index < 0 || !llama_batch_ext_set_embd_token(batch_.get(), index, {row, 1, width_}) ||
        !llama_batch_ext_set_pos(batch_.get(), index, &position) ||
        !llama_batch_ext_set_output_logits(batch_.get(), index, wants_output)) {
        fail("DecodeError", "llama.cpp takes no token " + str(token) + " of sequence " + str(seq_id) + " for draft heads");
    }
    tokens_.push_back(token);
    positions_.push_back(position);
    seq_ids_.push_back(seq_id);
}

void DraftHeads::run(int32_t type, const char * what) {
    LogCapture    log;
    const int32_t status = context_->process(type, batch_.get(), {tokens_, positions_, seq_ids_, {}});
    if (status != 0) {
        log.demote();
        fail(status == 1 ? "NoKvSlot" : status == 2 ? "Aborted" : "DecodeError", std::string(what) + " failed (status " + str(status) + "): " + log.words("llama.cpp gave no reason"));
    }
}

void DraftHeads::select_head(int32_t index) { llama_set_nextn_layer_offset(context_->get(), index); }

const float * DraftHeads::hidden_rows(size_t num_tokens) {
    const float * rows = kind_ == Kind::eagle3 ? encode_features(num_tokens) : llama_get_embeddings_nextn(target_.get());
    if (!rows) {
        fail("DecodeError", "the model's pass left no hidden rows");
    }
    return rows;
}

void DraftHeads::gather_features(size_t num_tokens) {
    const size_t  width   = static_cast<size_t>(llama_model_n_embd(target_.model()->get()));
    const int32_t n_layer = llama_model_n_layer(target_.model()->get());
    features_.resize(num_tokens * width * layers_.size());
    for (size_t k = 0; k < layers_.size(); ++k) {
        const float * rows = layers_[k] < n_layer
                                 ? llama_get_embeddings_layer_inp(target_.get(), static_cast<uint32_t>(layers_[k]))
                                 : llama_get_embeddings_nextn(target_.get());
        if (!rows) {
            fail("DecodeError", "the model's pass left no hidden rows of layer " + str(layers_[k]));
        }
        for (size_t i = 0; i < num_tokens; ++i) {
            std::copy_n(rows + i * width, width, features_.data() + (i * layers_.size() + k) * width);
        }
    }
}

// Positions of the index-th token of the model's pass. M-RoPE files read four coordinates of a place.
void DraftHeads::add_features(size_t index, int32_t position, int32_t seq_id, bool wants_output) {
    const size_t  row_width = static_cast<size_t>(llama_model_n_embd(target_.model()->get())) * layers_.size();
    const int32_t places[4] = {position, position, position, 0};
    const int32_t added     = llama_batch_ext_add_embd(batch_.get(), seq_id, {features_.data() + index * row_width, 1, row_width});
    if (added < 0 || !llama_batch_ext_set_pos(batch_.get(), added, places) ||
        !llama_batch_ext_set_output_embd(batch_.get(), added, wants_output)) {
        fail("DecodeError", "llama.cpp takes no hidden rows of " + str(row_width) + " values for draft heads");
    }
}

const float * DraftHeads::encode_features(size_t num_tokens) {
    gather_features(num_tokens);
    encoded_.resize(num_tokens * width_);
    const size_t most = std::min<size_t>(ENCODED_AT_ONCE, context_->n_ubatch());
    for (size_t begin = 0; begin < num_tokens; begin += most) {
        const size_t count = std::min(most, num_tokens - begin);
        clear();
        for (size_t i = 0; i < count; ++i) {
            add_features(begin + i, held(0) + static_cast<int32_t>(i), 0, true); // the position is read by llama.cpp's check alone
        }
        run(LLAMA_PROCESS_TYPE_ENCODE, "encoding hidden rows");
        const float * rows = llama_get_embeddings_nextn(context_->get());
        if (!rows) {
            fail("DecodeError", "the encoder of EAGLE-3 left no rows");
        }
        std::copy_n(rows, count * width_, encoded_.data() + begin * width_);
    }
    return encoded_.data();
}

void DraftHeads::follow(const Batch & batch) {
    try {
        if (drafts_blocks()) {
            follow_features(batch);
        } else {
            pass_rows_ = hidden_rows(batch.size());
            follow_rows(batch);
        }
    } catch (const std::exception & error) {
        for (const int32_t seq_id : batch.seq_ids) {
            drop(seq_id);
            is_lost_[static_cast<size_t>(seq_id)] = true;
        }
        warn_of_loss(error.what());
    }
}

void DraftHeads::follow_rows(const Batch & batch) {
    std::vector<int32_t> seq_ids; // sequences that follow
    add_rows(batch, seq_ids);
    if (!seq_ids.empty()) {
        run_heads(seq_ids);
    }
    for (size_t seq_id = 0; seq_id < last_passes_.size(); ++seq_id) {
        const LastPass & pass = last_passes_[seq_id];
        if (pass.count > 0) {
            const size_t last = pass.index + static_cast<size_t>(pass.count) - 1;
            keep_row(static_cast<int32_t>(seq_id));
            set_row(static_cast<int32_t>(seq_id), pass.first + pass.count - 1, pass_rows_ + last * width_);
        }
    }
}

void DraftHeads::add_rows(const Batch & batch, std::vector<int32_t> & seq_ids) {
    clear();
    std::fill(last_passes_.begin(), last_passes_.end(), LastPass{});
    std::vector<bool> follows(last_passes_.size(), false);
    for (size_t i = 0; i < batch.size(); ++i) {
        const int32_t seq_id = batch.seq_ids[i], position = batch.positions[i];
        LastPass &    pass   = last_passes_[static_cast<size_t>(seq_id)];
        const float * row    = nullptr;
        if (pass.count == 0) {
            if (held(seq_id) != at(position)) {
                drop(seq_id); // after an image, or an unloaded part: the heads begin here, without earlier tokens
            }
            follows[static_cast<size_t>(seq_id)] = !is_lost_[static_cast<size_t>(seq_id)];
            row                                  = row_of(seq_id, position - 1);
        } else {
            row = pass_rows_ + (pass.index + static_cast<size_t>(pass.count) - 1) * width_;
        }
        if (pass.count == 0 || i != pass.index + static_cast<size_t>(pass.count)) {
            pass = {position, 0, i}; // of a sequence that is scattered over the pass only the end
        }
        ++pass.count;
        if (follows[static_cast<size_t>(seq_id)] && position >= shift_) {
            add(batch.tokens[i], at(position), seq_id, row, false);
            if (std::find(seq_ids.begin(), seq_ids.end(), seq_id) == seq_ids.end()) {
                seq_ids.push_back(seq_id);
            }
        }
    }
}

// Each of several chained heads has a layer of its own, filled only by its own pass: so one pass a head over the same
// positions.
void DraftHeads::run_heads(const std::vector<int32_t> & seq_ids) {
    std::vector<int32_t> begins;
    for (const int32_t seq_id : seq_ids) {
        begins.push_back(held(seq_id));
    }
    for (int32_t head = 0; head < n_heads_; ++head) {
        for (size_t i = 0; i < seq_ids.size() && head > 0; ++i) {
            context_->remove(seq_ids[i], begins[i]);
        }
        select_head(head);
        run(LLAMA_PROCESS_TYPE_DECODE, "the pass of draft heads");
    }
    select_head(0);
}

// ---- drafts

std::vector<std::vector<int32_t>> DraftHeads::draft(std::span<const DraftWish> wishes, float min_probability) {
    std::vector<std::vector<int32_t>> drafts(wishes.size());
    std::vector<Drafting>             drafting;
    for (size_t i = 0; i < wishes.size(); ++i) {
        DraftWish wish = wishes[i];
        wish.depth     = std::min(wish.depth, max_depth());
        wish.depth     = std::min(wish.depth, depth_in_context(wish.position));
        const bool knows_row = drafts_blocks() || (wish.position > 0 && row_positions_[static_cast<size_t>(wish.seq_id)] == wish.position - 1);
        if (wish.depth > 0 && knows_row && held(wish.seq_id) == at(wish.position)) {
            const float * row = row_of(wish.seq_id, wish.position - 1);
            drafting.push_back({wish, drafts[i], {row, row + width_}});
        }
    }
    const size_t most = std::max<size_t>(1, context_->n_outputs_max() / rows_of_drafting());
    for (size_t begin = 0; begin < drafting.size(); begin += most) {
        const std::span<Drafting> group = std::span(drafting).subspan(begin, std::min(most, drafting.size() - begin));
        try {
            drafts_blocks() ? draft_blocks(group, min_probability) : draft_group(group, min_probability);
        } catch (...) {
            cut_drafts(group);
            throw;
        }
        cut_drafts(group);
    }
    return drafts;
}

int32_t DraftHeads::depth_in_context(int32_t position) const noexcept {
    return static_cast<int32_t>(context_->max_positions()) - position - (drafts_blocks() ? block_.rows_before() : 0);
}

void DraftHeads::cut_drafts(std::span<const Drafting> group) noexcept {
    select_head(0);
    for (const Drafting & one : group) {
        try {
            context_->remove(one.wish.seq_id, at(one.wish.position));
        } catch (const std::exception &) {
            drop(one.wish.seq_id);
        }
    }
}

void DraftHeads::draft_group(std::span<Drafting> group, float min_probability) {
    const int32_t n_vocab = context_->model()->n_vocab();
    for (int32_t depth = 0;; ++depth) {
        clear();
        int32_t num_added = 0;
        for (Drafting & one : group) {
            if (!one.is_active) {
                continue;
            }
            const int32_t begin = at(one.wish.position);
            if (n_heads_ > 1 && depth > 0) {
                context_->remove(one.wish.seq_id, begin); // another head's cells
            }
            // A single head goes on behind its own cells; a chained one has none of the drafts yet.
            for (int32_t t = n_heads_ > 1 ? 0 : depth; t <= depth; ++t) {
                const size_t row = n_heads_ > 1 ? static_cast<size_t>(t) : 0;
                add(t == 0 ? one.wish.token : one.tokens[static_cast<size_t>(t) - 1], begin + t, one.wish.seq_id,
                    one.rows.data() + row * width_, true);
                one.index = num_added++;
            }
        }
        if (num_added == 0) {
            return;
        }
        if (n_heads_ > 1) {
            select_head(depth);
        }
        run(LLAMA_PROCESS_TYPE_DECODE, "drafting");
        for (Drafting & one : group) {
            if (!one.is_active) {
                continue;
            }
            const float * logits = llama_get_logits_ith(context_->get(), one.index);
            const float * row    = llama_get_embeddings_nextn_ith(context_->get(), one.index);
            if (!logits || !row) {
                fail("DecodeError", "draft heads left no logits");
            }
            const DraftChoice choice = most_probable(logits, n_vocab);
            if (!(choice.probability >= min_probability)) { // nor if it is NaN
                one.is_active = false;
                continue;
            }
            one.tokens.push_back(choice.token);
            one.is_active = static_cast<int32_t>(one.tokens.size()) < one.wish.depth;
            one.rows.resize(n_heads_ > 1 ? one.rows.size() : 0);
            one.rows.insert(one.rows.end(), row, row + width_);
        }
    }
}

// ---- operations of the target

void DraftHeads::drop(int32_t seq_id) noexcept {
    try {
        context_->remove(seq_id, 0);
    } catch (const std::exception &) { // after a fork: nothing computes any more
    }
    row_positions_[static_cast<size_t>(seq_id)] = earlier_positions_[static_cast<size_t>(seq_id)] = -1;
}

const float * DraftHeads::row_of(int32_t seq_id, int32_t position) const {
    const size_t index = static_cast<size_t>(seq_id);
    return position >= 0 && row_positions_[index] == position ? rows_.data() + index * width_ : no_row_.data();
}

void DraftHeads::set_row(int32_t seq_id, int32_t position, const float * row) {
    const size_t index = static_cast<size_t>(seq_id);
    std::copy_n(row, width_, rows_.data() + index * width_);
    row_positions_[index] = position;
}

void DraftHeads::keep_row(int32_t seq_id) {
    const size_t index        = static_cast<size_t>(seq_id);
    earlier_positions_[index] = row_positions_[index];
    std::copy_n(rows_.data() + index * width_, width_, earlier_rows_.data() + index * width_);
}

void DraftHeads::find_row(int32_t seq_id, int32_t position) {
    const size_t     index = static_cast<size_t>(seq_id);
    const LastPass & pass  = last_passes_[index];
    if (row_positions_[index] == position) {
        return;
    }
    row_positions_[index] = -1;
    if (pass_rows_ && position >= pass.first && position < pass.first + pass.count) {
        set_row(seq_id, position, pass_rows_ + (pass.index + static_cast<size_t>(position - pass.first)) * width_);
    } else if (position >= 0 && earlier_positions_[index] == position) {
        set_row(seq_id, position, earlier_rows_.data() + index * width_);
    }
}

void DraftHeads::removed(int32_t seq_id, int32_t first) {
    if (first <= 0) {
        drop(seq_id);
        last_passes_[static_cast<size_t>(seq_id)] = {};
        is_lost_[static_cast<size_t>(seq_id)]     = false;
        return;
    }
    int32_t & earlier = earlier_positions_[static_cast<size_t>(seq_id)];
    earlier           = earlier < first ? earlier : -1;
    try {
        if (held(seq_id) > at(first)) {
            context_->remove(seq_id, at(first));
        }
        find_row(seq_id, first - 1);
    } catch (const Error &) {
        drop(seq_id);
    }
}

void DraftHeads::copied(int32_t from, int32_t to, int32_t first, int32_t end) {
    last_passes_[static_cast<size_t>(to)] = {};
    earlier_positions_[static_cast<size_t>(to)] = -1;
    if (held(from) < at(end) || held(to) != at(first)) {
        drop(to);
        return;
    }
    try {
        if (at(first) < at(end)) {
            context_->copy(from, to, at(first), at(end));
        }
        row_positions_[static_cast<size_t>(to)] = -1;
        if (row_positions_[static_cast<size_t>(from)] == end - 1) {
            set_row(to, end - 1, row_of(from, end - 1));
        }
    } catch (const Error &) {
        drop(to);
    }
}

void DraftHeads::kept(int32_t seq_id) {
    context_->keep(seq_id);
    for (size_t other = 0; other < row_positions_.size(); ++other) {
        row_positions_[other] = other == static_cast<size_t>(seq_id) ? row_positions_[other] : -1;
    }
}

void DraftHeads::cleared(bool data) {
    context_->clear(data);
    std::fill(row_positions_.begin(), row_positions_.end(), -1);
    std::fill(earlier_positions_.begin(), earlier_positions_.end(), -1);
    std::fill(last_passes_.begin(), last_passes_.end(), LastPass{});
    std::fill(is_lost_.begin(), is_lost_.end(), false);
}

// ---- states

std::vector<uint8_t> DraftHeads::save(std::vector<uint8_t> model, int32_t seq_id, bool partial) {
    StateParts           parts;
    std::vector<uint8_t> heads;
    parts.model        = model;
    parts.row_position = row_positions_[static_cast<size_t>(seq_id)];
    if (!partial && held(seq_id) > 0) {
        heads       = context_->save(seq_id, false).first;
        parts.heads = heads;
    }
    if (parts.row_position >= 0) {
        parts.row = bytes_of(row_of(seq_id, static_cast<int32_t>(parts.row_position)), width_);
    }
    return frame_state(parts);
}

std::vector<uint8_t> DraftHeads::save_range(std::vector<uint8_t> model, int32_t seq_id, int32_t first, int32_t end,
                                            int32_t scratch) {
    StateParts           parts;
    std::vector<uint8_t> heads;
    parts.model = model;
    if (at(first) < at(end) && positions(seq_id).min <= at(first) && held(seq_id) >= at(end)) {
        heads       = context_->save_range(seq_id, at(first), at(end), scratch);
        parts.heads = heads;
    }
    if (row_positions_[static_cast<size_t>(seq_id)] == end - 1) {
        parts.row_position = end - 1;
        parts.row          = bytes_of(row_of(seq_id, end - 1), width_);
    }
    return frame_state(parts);
}

std::vector<uint8_t> DraftHeads::cut_range(std::vector<uint8_t> model, const StateParts & whole, Positions saved, int32_t first,
                                           int32_t end, int32_t scratch) {
    StateParts           parts;
    std::vector<uint8_t> heads;
    parts.model = model;
    if (!whole.heads.empty() && at(first) < at(end)) {
        heads       = context_->cut_range(whole.heads, {at(saved.min), at(saved.max + 1) - 1}, at(first), at(end), scratch);
        parts.heads = heads;
    }
    if (whole.row_position == end - 1) {
        parts.row_position = end - 1;
        parts.row          = whole.row;
    }
    return frame_state(parts);
}

void DraftHeads::restored(int32_t seq_id, const StateParts & parts, bool partial, int32_t last) {
    last_passes_[static_cast<size_t>(seq_id)] = {};
    if (partial) {
        removed(seq_id, last + 1);
    } else {
        drop(seq_id);
        try {
            if (!parts.heads.empty()) {
                context_->restore(seq_id, parts.heads, false, at(last + 1) - 1);
            }
        } catch (const Error & error) {
            drop(seq_id);
            warn_of_loss(error.what());
        }
    }
    row_positions_[static_cast<size_t>(seq_id)] = earlier_positions_[static_cast<size_t>(seq_id)] = -1;
    if (parts.row_position == last && last >= 0 && parts.row.size() == width_ * sizeof(float)) {
        std::memcpy(rows_.data() + static_cast<size_t>(seq_id) * width_, parts.row.data(), parts.row.size());
        row_positions_[static_cast<size_t>(seq_id)] = last;
    }
}

void DraftHeads::loaded_range(int32_t seq_id, const StateParts & parts, Positions saved, int32_t first, int32_t end,
                              int32_t scratch) {
    last_passes_[static_cast<size_t>(seq_id)] = {};
    earlier_positions_[static_cast<size_t>(seq_id)] = -1;
    try {
        if (at(first) < at(end) && !parts.heads.empty() && held(seq_id) == at(first)) {
            context_->load_range(seq_id, parts.heads, {at(saved.min), at(saved.max + 1) - 1}, at(first), at(end), scratch);
        }
    } catch (const Error & error) {
        drop(seq_id);
        warn_of_loss(error.what());
    }
    row_positions_[static_cast<size_t>(seq_id)] = -1;
    if (parts.row_position == end - 1 && parts.row.size() == width_ * sizeof(float)) {
        std::memcpy(rows_.data() + static_cast<size_t>(seq_id) * width_, parts.row.data(), parts.row.size());
        row_positions_[static_cast<size_t>(seq_id)] = end - 1;
    }
}

// An adapter may have parts for heads in the model's own file; it does not fit other heads.
void DraftHeads::set_adapters(const std::vector<std::pair<std::shared_ptr<Adapter>, float>> & adapters) {
    if (context_->model() == target_.model()) {
        context_->set_adapters(adapters);
    }
}

} // namespace paceline
