#include "context.hpp"

#include <algorithm>
#include <cstring>

#include "error.hpp"
#include "log.hpp"

namespace paceline {
namespace {

// Tokens of several texts in one pass: more gain nothing, and each costs a row of the vocabulary's size.
constexpr size_t max_packed = 2048;

} // namespace

size_t Context::embedding_dimension() const noexcept {
    const llama_model * model = model_->get();
    return pooling_type() == LLAMA_POOLING_TYPE_RANK ? llama_model_n_cls_out(model)
                                                     : static_cast<size_t>(llama_model_n_embd_out(model));
}

// Causal attention needs no later tokens, so the memory can carry a text from piece to piece.
bool Context::embeds_in_pieces() const noexcept { return llama_get_memory(get()) && llama_get_causal_attn(get()); }

std::vector<float> Context::embed(std::span<const int32_t> tokens, std::span<const int32_t> lengths) {
    std::lock_guard<std::mutex> lock(mutex());
    check_texts(tokens, lengths);
    const Call         call(*this);
    const bool         per_token = pooling_type() == LLAMA_POOLING_TYPE_NONE;
    std::vector<float> vectors((per_token ? tokens.size() : lengths.size()) * embedding_dimension());
    float *            out = vectors.data();
    while (!lengths.empty()) {
        size_t num_texts = 1, num_tokens = static_cast<size_t>(lengths[0]);
        while (num_texts < lengths.size() && num_texts < n_seq_max_ &&
               num_tokens + static_cast<size_t>(lengths[num_texts]) <= std::min<size_t>(n_ubatch(), max_packed)) {
            num_tokens += static_cast<size_t>(lengths[num_texts++]);
        }
        if (llama_memory_t of = llama_get_memory(get())) { // null for encoders
            llama_memory_clear(of, false);
        }
        if (num_tokens > n_ubatch()) {
            embed_in_pieces(tokens.first(num_tokens), out);
        } else {
            embed_pack(tokens.first(num_tokens), lengths.first(num_texts), out);
        }
        out += (per_token ? num_tokens : num_texts) * embedding_dimension();
        tokens  = tokens.subspan(num_tokens);
        lengths = lengths.subspan(num_texts);
    }
    return vectors;
}

void Context::check_texts(std::span<const int32_t> tokens, std::span<const int32_t> lengths) const {
    if (!embeddings_) {
        fail("Unsupported", "embeddings are computed only by a context made with embeddings=True");
    }
    int64_t       total = 0;
    const int64_t most  = std::min<int64_t>(embeds_in_pieces() ? n_ctx() : n_ubatch(), max_positions_);
    for (size_t i = 0; i < lengths.size(); ++i) {
        if (lengths[i] < 1 || lengths[i] > most) {
            fail(lengths[i] < 1 ? "InvalidParams" : "PromptTooLong",
                 "text " + str(i) + " has " + str(lengths[i]) + " tokens; 1 to " + str(most) +
                     " fit into this context");
        }
        total += lengths[i];
    }
    if (total != static_cast<int64_t>(tokens.size())) {
        fail("InvalidParams", "lengths add up to " + str(total) + ", and there are " + str(tokens.size()) + " token_ids");
    }
    for (size_t i = 0; i < tokens.size(); ++i) {
        if (tokens[i] < 0 || tokens[i] >= model_->n_vocab()) {
            fail("InvalidParams", "token_ids[" + str(i) + "] must be in [0, " + str(model_->n_vocab()) + "), not " + str(tokens[i]));
        }
    }
}

void Context::embed_pack(std::span<const int32_t> tokens, std::span<const int32_t> lengths, float * out) {
    batch_.clear();
    size_t next = 0;
    for (size_t text = 0; text < lengths.size(); ++text) {
        for (int32_t position = 0; position < lengths[text]; ++position) {
            batch_.add(tokens[next++], position, static_cast<int32_t>(text), true);
        }
    }
    run_embedding();
    copy_vectors(pooling_type() == LLAMA_POOLING_TYPE_NONE ? tokens.size() : lengths.size(), out);
}

// llama.cpp pools each piece by itself: the mean is put together from theirs, the first or the last token is in one of them.
void Context::embed_in_pieces(std::span<const int32_t> tokens, float * out) {
    const auto          pooling   = pooling_type();
    const size_t        dimension = embedding_dimension();
    std::vector<float>  row(dimension);
    std::vector<double> sum(dimension, 0.0);
    for (size_t start = 0; start < tokens.size(); start += n_ubatch()) {
        const size_t size = std::min<size_t>(n_ubatch(), tokens.size() - start);
        batch_.clear();
        for (size_t i = start; i < start + size; ++i) {
            batch_.add(tokens[i], static_cast<int32_t>(i), 0, true);
        }
        run_embedding();
        if (pooling == LLAMA_POOLING_TYPE_NONE) {
            copy_vectors(size, out + start * dimension);
        } else if (pooling == LLAMA_POOLING_TYPE_MEAN) {
            copy_vectors(1, row.data());
            for (size_t i = 0; i < dimension; ++i) {
                sum[i] += static_cast<double>(row[i]) * static_cast<double>(size);
            }
        } else if (pooling != LLAMA_POOLING_TYPE_CLS || start == 0) {
            copy_vectors(1, out);
        }
    }
    if (pooling == LLAMA_POOLING_TYPE_MEAN) {
        std::transform(sum.begin(), sum.end(), out,
                       [&](double value) { return static_cast<float>(value / static_cast<double>(tokens.size())); });
    }
}

void Context::run_embedding() {
    has_output_.clear();
    LogCapture    log;
    const int32_t status = run_pass([&] {
        return llama_get_memory(get()) ? llama_decode(get(), batch_.get()) : llama_encode(get(), batch_.get());
    });
    if (status != 0) {
        fail(status == 2 ? "Aborted" : "DecodeError", "embedding failed (status " + str(status) + "): " + log.words("llama.cpp gave no reason"));
    }
}

void Context::copy_vectors(size_t num_rows, float * out) const {
    const size_t dimension = embedding_dimension();
    const bool   per_token = pooling_type() == LLAMA_POOLING_TYPE_NONE;
    for (size_t i = 0; i < num_rows; ++i) {
        const int32_t index = static_cast<int32_t>(i);
        const float * row   = per_token ? llama_get_embeddings_ith(get(), index) : llama_get_embeddings_seq(get(), index);
        if (!row) {
            fail("Unsupported", "this model has no embeddings with the requested pooling");
        }
        std::memcpy(out + i * dimension, row, dimension * sizeof(float));
    }
}

} // namespace paceline
