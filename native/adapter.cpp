#include "adapter.hpp"

#include <mutex>

#include "error.hpp"
#include "log.hpp"
#include "meta_text.hpp"

namespace paceline {

std::shared_ptr<Adapter> Adapter::load(std::shared_ptr<Model> model, const std::string & path) {
    if (model->vocab_only()) {
        fail("Unsupported", "an adapter needs a model with weights, and this one was loaded with vocab_only=True");
    }
    LogCapture           log;
    llama_adapter_lora * adapter;
    {
        std::unique_lock lock(model->adapter_mutex());
        adapter = llama_adapter_lora_init(model->get(), path.c_str());
    }
    if (!adapter) {
        fail("AdapterError", "llama.cpp cannot load " + path + " for this model: " + log.words("it gave no reason"));
    }
    auto loaded = std::shared_ptr<Adapter>(new Adapter(std::move(model), adapter));
    if (llama_adapter_get_alora_n_invocation_tokens(adapter) > 0) {
        fail("Unsupported", path + " is an activated LoRA (aLoRA), which applies from an invocation token on; only plain LoRA works");
    }
    return loaded;
}

Adapter::~Adapter() {
    std::unique_lock lock(model_->adapter_mutex());
    llama_adapter_lora_free(adapter_);
}

std::vector<std::pair<std::string, std::string>> Adapter::metadata() const {
    std::vector<std::pair<std::string, std::string>> entries;
    for (int32_t i = 0; i < llama_adapter_meta_count(adapter_); ++i) {
        entries.emplace_back(
            read_text([&](char * out, size_t size) { return llama_adapter_meta_key_by_index(adapter_, i, out, size); }),
            read_text([&](char * out, size_t size) { return llama_adapter_meta_val_str_by_index(adapter_, i, out, size); }));
    }
    return entries;
}

} // namespace paceline
