// A LoRA adapter, loaded for one model.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "model.hpp"

namespace paceline {

class Adapter {
public:
    static std::shared_ptr<Adapter> load(std::shared_ptr<Model> model, const std::string & path);
    ~Adapter();
    Adapter(const Adapter &)             = delete;
    Adapter & operator=(const Adapter &) = delete;

    llama_adapter_lora *   get() const noexcept { return adapter_; }
    const Model &          model() const noexcept { return *model_; }
    std::vector<std::pair<std::string, std::string>> metadata() const;

private:
    Adapter(std::shared_ptr<Model> model, llama_adapter_lora * adapter) : model_(std::move(model)), adapter_(adapter) {}

    std::shared_ptr<Model> model_;
    llama_adapter_lora *   adapter_;
};

} // namespace paceline
