#include "token_texts.hpp"

#include <algorithm>
#include <mutex>
#include <numeric>
#include <utility>

namespace paceline {

std::string token_piece(const llama_vocab * vocab, llama_token token, bool special) {
    std::string   bytes(32, '\0');
    const int32_t length = llama_token_to_piece(vocab, token, bytes.data(), 32, 0, special);
    if (length < 0) {
        bytes.resize(-static_cast<std::size_t>(length));
        llama_token_to_piece(vocab, token, bytes.data(), -length, 0, special);
    } else {
        bytes.resize(length);
    }
    return bytes;
}

TokenTexts::TokenTexts(const Model & model) : ends_(1), sorted_(static_cast<size_t>(model.n_vocab())) {
    const bool has_texts = llama_vocab_type(model.vocab()) != LLAMA_VOCAB_TYPE_NONE;
    for (int32_t token = 0; token < model.n_vocab(); ++token) {
        bytes_ += has_texts ? token_piece(model.vocab(), token, true) : "";
        ends_.push_back(bytes_.size());
    }
    std::iota(sorted_.begin(), sorted_.end(), 0);
    std::sort(sorted_.begin(), sorted_.end(), [this](int32_t a, int32_t b) { return of_token(a) < of_token(b); });
    ranks_.resize(sorted_.size());
    for (size_t i = 0; i < sorted_.size(); ++i) {
        ranks_[static_cast<size_t>(sorted_[i])] = static_cast<uint32_t>(i);
    }
}

std::shared_ptr<const TokenTexts> TokenTexts::of(const std::shared_ptr<Model> & model) {
    static std::mutex                                                                       mutex;
    static std::vector<std::pair<std::weak_ptr<Model>, std::shared_ptr<const TokenTexts>>> known;
    const std::lock_guard lock(mutex);
    std::erase_if(known, [](const auto & entry) { return entry.first.expired(); });
    for (const auto & [owner, texts] : known) {
        if (owner.lock() == model) {
            return texts;
        }
    }
    known.emplace_back(model, std::make_shared<const TokenTexts>(*model));
    return known.back().second;
}

} // namespace paceline
