#include "context.hpp"

#include <algorithm>
#include <cstring>

#include "error.hpp"
#include "log.hpp"

namespace paceline {
namespace {

std::string str(int64_t value) { return std::to_string(value); }

} // namespace

size_t Context::embedding_dimension() const noexcept {
    const llama_model * model = model_->get();
    return pooling_type() == LLAMA_POOLING_TYPE_RANK ? llama_model_n_cls_out(model)
                                                     : static_cast<size_t>(llama_model_n_embd_out(model));
}

std::vector<float> Context::embed(std::span<const int32_t> tokens, std::span<const int32_t> lengths) {
    std::lock_guard<std::mutex> lock(mutex());
    check_texts(tokens, lengths);
    const bool         per_token = pooling_type() == LLAMA_POOLING_TYPE_NONE;
    std::vector<float> vectors((per_token ? tokens.size() : lengths.size()) * embedding_dimension());
    float *            out = vectors.data();
    while (!lengths.empty()) {
        size_t num_texts = 0, num_tokens = 0;
        while (num_texts < lengths.size() && num_texts < n_seq_max_ &&
               num_tokens + static_cast<size_t>(lengths[num_texts]) <= n_ubatch()) {
            num_tokens += static_cast<size_t>(lengths[num_texts++]);
        }
        embed_pack(tokens.first(num_tokens), lengths.first(num_texts), out);
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
    int64_t total = 0;
    for (size_t i = 0; i < lengths.size(); ++i) {
        const int64_t most = std::min<int64_t>(n_ubatch(), max_positions_);
        if (lengths[i] < 1 || lengths[i] > most) {
            fail(lengths[i] < 1 ? "InvalidParams" : "PromptTooLong",
                 "text " + str(static_cast<int64_t>(i)) + " has " + str(lengths[i]) + " tokens; 1 to " + str(most) +
                     " are possible, since a text is embedded in one piece");
        }
        total += lengths[i];
    }
    if (total != static_cast<int64_t>(tokens.size())) {
        fail("InvalidParams", "lengths add up to " + str(total) + ", and there are " + str(static_cast<int64_t>(tokens.size())) + " token_ids");
    }
    for (size_t i = 0; i < tokens.size(); ++i) {
        if (tokens[i] < 0 || tokens[i] >= model_->n_vocab()) {
            fail("InvalidParams", "token_ids[" + str(static_cast<int64_t>(i)) + "] must be in [0, " + str(model_->n_vocab()) + "), not " + str(tokens[i]));
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
    has_output_.clear();
    llama_memory_t of = llama_get_memory(get()); // null for encoders
    if (of) {
        llama_memory_clear(of, false);
    }
    LogCapture    log;
    const Call    call(*this);
    const int32_t status = run_pass(of ? llama_decode : llama_encode);
    if (status != 0) {
        fail(status == 2 ? "Aborted" : "DecodeError", "embedding failed (status " + str(status) + "): " + log.words("llama.cpp gave no reason"));
    }
    const size_t dimension = embedding_dimension();
    const bool   per_token = pooling_type() == LLAMA_POOLING_TYPE_NONE;
    const size_t num_rows  = per_token ? tokens.size() : lengths.size();
    for (size_t i = 0; i < num_rows; ++i) {
        const int32_t index = static_cast<int32_t>(i);
        const float * row   = per_token ? llama_get_embeddings_ith(get(), index) : llama_get_embeddings_seq(get(), index);
        if (!row) {
            fail("Unsupported", "this model has no embeddings of the pooling that was asked for");
        }
        std::memcpy(out + i * dimension, row, dimension * sizeof(float));
    }
}

} // namespace paceline
