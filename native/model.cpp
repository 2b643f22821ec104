#include "model.hpp"

#include "error.hpp"

namespace paceline {

std::shared_ptr<Model> Model::load(const ModelOptions & options) {
    llama_model_params params = llama_model_default_params();
    params.vocab_only         = options.vocab_only;
    llama_model * model       = llama_model_load_from_file(options.paths.at(0).c_str(), params);
    if (!model) {
        fail("ModelLoadError", "cannot load " + options.paths[0]);
    }
    return std::shared_ptr<Model>(new Model(model, options.vocab_only));
}

Model::~Model() { llama_model_free(model_); }

} // namespace paceline
