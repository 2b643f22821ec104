#include "model.hpp"

#include <algorithm>
#include <cstring>
#include <regex>
#include <set>

#include "device.hpp"
#include "error.hpp"
#include "llama-ext.h"
#include "log.hpp"
#include "meta_text.hpp"
#include "process.hpp"

// All tensors of a model by name (llama.cpp's src/llama-model.h, which is not installed). A change there fails to link.
const std::vector<std::pair<std::string, ggml_tensor *>> & llama_internal_get_tensor_map(const llama_model * model);

namespace paceline {
namespace {

constexpr size_t MAX_PATTERN = 512; // std::regex recurses with the length of a pattern

std::vector<ggml_backend_buffer_type_t> all_buffer_types() {
    std::vector<ggml_backend_buffer_type_t> found;
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        if (ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(ggml_backend_dev_get(i))) {
            found.push_back(type);
        }
    }
    return found;
}

ggml_backend_buffer_type_t find_buffer_type(const std::string & name) {
    std::string known;
    for (ggml_backend_buffer_type_t type : all_buffer_types()) {
        if (name == ggml_backend_buft_name(type)) {
            return type;
        }
        known += (known.empty() ? "" : ", ") + std::string(ggml_backend_buft_name(type));
    }
    fail("InvalidParams", "tensor_overrides: there is no buffer type '" + name.substr(0, 80) + "'; this build has " + known);
}

void copy_text(const std::string & what, const std::string & text, char * to, size_t size) {
    if (text.empty() || text.size() >= size || text.find('\0') != std::string::npos) {
        fail("InvalidParams", "kv_overrides: the " + what + " must be 1 to " + str(size - 1) + " bytes without a NUL, not '" +
                                  text.substr(0, 40) + "'");
    }
    std::memcpy(to, text.data(), text.size());
}

// The C structs that llama_model_params points into, kept alive while a load runs.
struct LoadParams {
    explicit LoadParams(const ModelOptions & options) {
        set_devices(options);
        set_tensor_split(options);
        for (const KvOverride & entry : options.kv_overrides) {
            overrides.push_back(as_override(entry));
        }
        params.split_mode      = options.split_mode;
        params.load_mode       = options.load_mode;
        params.main_gpu        = options.main_gpu;
        params.vocab_only      = options.vocab_only;
        params.check_tensors   = options.check_tensors;
        params.use_extra_bufts = options.use_extra_bufts;
        params.load_mtp        = options.draft_heads;
        if (options.no_alloc) {
            params.no_alloc  = true;
            params.load_mode = LLAMA_LOAD_MODE_NONE;
        }
        set_tensor_overrides(options);
        if (options.n_gpu_layers) {
            params.n_gpu_layers = *options.n_gpu_layers;
        }
        if (!overrides.empty()) {
            overrides.push_back({}); // an empty key ends the list
            params.kv_overrides = overrides.data();
        }
    }

    void set_devices(const ModelOptions & options) {
        if (!options.devices) {
            return;
        }
        for (ggml_backend_dev_t device : find_devices(*options.devices)) {
            if (!device || ggml_backend_dev_type(device) != GGML_BACKEND_DEVICE_TYPE_CPU) {
                devices.push_back(device);
            }
        }
        params.devices = devices.data();
    }

    void set_tensor_split(const ModelOptions & options) {
        if (options.tensor_split.empty()) {
            return;
        }
        if (options.tensor_split.size() > llama_max_devices()) {
            fail("InvalidParams", "tensor_split has " + str(options.tensor_split.size()) +
                                      " entries, but at most " + str(llama_max_devices()) +
                                      " devices are possible");
        }
        tensor_split = options.tensor_split;
        tensor_split.resize(llama_max_devices(), 0.0f);
        params.tensor_split = tensor_split.data();
    }

    void set_tensor_overrides(const ModelOptions & options) {
        if (options.tensor_overrides.empty()) {
            return;
        }
        if (options.tensor_overrides.size() >= llama_max_tensor_buft_overrides()) {
            fail("InvalidParams", "tensor_overrides has " + str(options.tensor_overrides.size()) + " entries, but at most " +
                                      str(llama_max_tensor_buft_overrides() - 1) + " are possible");
        }
        for (const auto & [pattern, buffer] : options.tensor_overrides) {
            check_pattern("tensor_overrides", pattern);
            tensor_overrides.push_back({pattern.c_str(), find_buffer_type(buffer)});
        }
        tensor_overrides.push_back({nullptr, nullptr});
        params.tensor_buft_overrides = tensor_overrides.data();
    }

    llama_model_params                   params = llama_model_default_params();
    std::vector<ggml_backend_dev_t>      devices;
    std::vector<float>                   tensor_split;
    std::vector<llama_model_kv_override> overrides;
    std::vector<llama_model_tensor_buft_override> tensor_overrides;
};

llama_model * load_files(const std::vector<std::string> & paths, const llama_model_params & params) {
    if (paths.size() == 1) {
        return llama_model_load_from_file(paths[0].c_str(), params);
    }
    std::vector<const char *> names;
    for (const std::string & path : paths) {
        names.push_back(path.c_str());
    }
    return llama_model_load_from_splits(names.data(), names.size(), params);
}

} // namespace

// llama.cpp compiles it again for every tensor, in the middle of a load.
void check_pattern(const char * option, const std::string & pattern) {
    if (pattern.empty() || pattern.size() > MAX_PATTERN || pattern.find('\0') != std::string::npos) {
        fail("InvalidParams", std::string(option) + ": a pattern must be 1 to " + str(MAX_PATTERN) +
                                  " bytes without a NUL, not '" + pattern.substr(0, 40) + "'");
    }
    try {
        const std::regex compiled(pattern);
    } catch (const std::regex_error & error) {
        fail("InvalidParams", std::string(option) + ": '" + pattern.substr(0, 80) +
                                  "' is no regular expression (ECMAScript): " + error.what());
    }
}

llama_model_kv_override as_override(const KvOverride & entry) {
    llama_model_kv_override out{};
    copy_text("key", entry.first, out.key, sizeof(out.key));
    if (const bool * flag = std::get_if<bool>(&entry.second)) {
        out.tag      = LLAMA_KV_OVERRIDE_TYPE_BOOL;
        out.val_bool = *flag;
    } else if (const int64_t * integer = std::get_if<int64_t>(&entry.second)) {
        out.tag     = LLAMA_KV_OVERRIDE_TYPE_INT;
        out.val_i64 = *integer;
    } else if (const double * number = std::get_if<double>(&entry.second)) {
        out.tag     = LLAMA_KV_OVERRIDE_TYPE_FLOAT;
        out.val_f64 = *number;
    } else {
        out.tag = LLAMA_KV_OVERRIDE_TYPE_STR;
        copy_text("value of " + entry.first, std::get<std::string>(entry.second), out.val_str, sizeof(out.val_str));
    }
    return out;
}

std::shared_ptr<Model> Model::load(const ModelOptions & options) {
    if (options.paths.empty()) {
        fail("InvalidParams", "path: an empty list of files");
    }
    LoadParams load(options);
    struct Progress {
        const ModelOptions & options;
        bool                 stopped = false;
    } progress{options};
    load.params.progress_callback_user_data = &progress;
    load.params.progress_callback           = [](float share, void * data) {
        auto & self  = *static_cast<Progress *>(data);
        self.stopped = process_is_ending() || (self.options.progress && !self.options.progress(share));
        return !self.stopped;
    };
    LogCapture    log;
    llama_model * model = load_files(options.paths, load.params);
    if (progress.stopped) {
        llama_model_free(model);
        fail("Aborted", "loading " + options.paths[0] + " was cancelled");
    }
    if (!model) {
        fail("ModelLoadError", "llama.cpp cannot load " + options.paths[0] + ": " + log.words("it gave no reason"));
    }
    ModelOptions kept = options;
    kept.progress     = nullptr; // holds objects of the caller's
    return std::shared_ptr<Model>(new Model(model, std::move(kept)));
}

Model::~Model() { llama_model_free(model_); }

std::string Model::architecture() const {
    return read_text([&](char * out, size_t size) {
        return llama_model_meta_val_str(model_, "general.architecture", out, size);
    });
}

int64_t Model::position_rows() const {
    const ggml_tensor * table = tensor("position_embd.weight");
    return table ? table->ne[1] : 0;
}

const ggml_tensor * Model::tensor(const std::string & name) const {
    for (const auto & [found, tensor] : llama_internal_get_tensor_map(model_)) {
        if (found == name) {
            return tensor;
        }
    }
    return nullptr;
}

size_t Model::num_tensors() const { return llama_internal_get_tensor_map(model_).size(); }

bool Model::one_sequence_per_pass() const { return architecture() == "plamo2"; }

bool Model::computes_all_outputs() const { return architecture() == "cogvlm"; }

bool Model::embeddings_are_too_narrow() const {
    const std::string name = architecture();
    return (name == "deepseek4" || name == "qwen4exp") && llama_model_n_embd_out(model_) > llama_model_n_embd(model_);
}

namespace {

// llama.cpp reports only with a context which models have no memory: encoders and diffusion models.
bool is_without_memory(const Model & model) {
    static const std::set<std::string> encoders = {
        "bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3", "eurobert",
        "gemma-embedding", "wavtokenizer-dec",
    };
    return !llama_model_has_decoder(model.get()) || llama_model_is_diffusion(model.get()) ||
           encoders.count(model.architecture()) > 0;
}

} // namespace

MemoryClass Model::memory_class() const {
    if (is_without_memory(*this)) {
        return MemoryClass::none;
    }
    if (llama_model_is_hybrid(model_)) {
        return MemoryClass::hybrid;
    }
    if (llama_model_is_recurrent(model_)) {
        return MemoryClass::recurrent;
    }
    return llama_model_n_swa(model_) > 0 ? MemoryClass::sliding_window : MemoryClass::attention;
}

std::string Model::desc() const {
    char buffer[256];
    llama_model_desc(model_, buffer, sizeof(buffer));
    return buffer;
}

std::vector<std::pair<std::string, std::string>> Model::metadata() const {
    std::vector<std::pair<std::string, std::string>> entries;
    for (int32_t i = 0; i < llama_model_meta_count(model_); ++i) {
        entries.emplace_back(
            read_text([&](char * out, size_t size) { return llama_model_meta_key_by_index(model_, i, out, size); }),
            read_text([&](char * out, size_t size) { return llama_model_meta_val_str_by_index(model_, i, out, size); }));
    }
    return entries;
}

std::optional<std::string> Model::chat_template(const std::optional<std::string> & name) const {
    const char * text = llama_model_chat_template(model_, name ? name->c_str() : nullptr);
    return text ? std::optional<std::string>(text) : std::nullopt;
}

std::vector<std::string> buffer_types() {
    std::vector<std::string> names;
    for (ggml_backend_buffer_type_t type : all_buffer_types()) {
        names.push_back(ggml_backend_buft_name(type));
    }
    return names;
}

// A mapped buffer reaches from the first to the last of its tensors in the file, whatever lies in other buffers between them.
static size_t mapped_weights(const llama_model * model, ggml_backend_buffer_type_t type) {
    std::set<const ggml_tensor *> tensors;
    size_t bytes = 0;
    for (const auto & [name, tensor] : llama_internal_get_tensor_map(model)) {
        if (tensor->buffer && ggml_backend_buffer_get_type(tensor->buffer) == type && tensors.insert(tensor).second) {
            bytes += ggml_nbytes(tensor);
        }
    }
    return bytes;
}

std::vector<BufferUse> memory_use(const llama_context * context) {
    std::vector<BufferUse> uses;
    for (auto [type, used] : llama_get_memory_breakdown(context)) {
        if (ggml_backend_buft_is_host(type)) {
            used.model = std::min(used.model, mapped_weights(llama_get_model(context), type));
        }
        ggml_backend_dev_t device = ggml_backend_buft_get_device(type);
        uses.push_back({ggml_backend_buft_name(type), device ? ggml_backend_dev_name(device) : "", ggml_backend_buft_is_host(type),
                        used.model, used.context, used.compute});
    }
    return uses;
}

void add_uses(std::vector<BufferUse> & uses, const std::vector<BufferUse> & added, bool is_same_model) {
    for (BufferUse use : added) {
        use.weights = is_same_model ? 0 : use.weights;
        const auto same = [&](const BufferUse & one) { return one.buffer == use.buffer && one.device == use.device; };
        const auto found = std::find_if(uses.begin(), uses.end(), same);
        if (found == uses.end()) {
            uses.push_back(use);
            continue;
        }
        found->weights += use.weights;
        found->cache += use.cache;
        found->compute += use.compute;
    }
}

// A model and a context that nothing was allocated for.
struct Sketch {
    std::unique_ptr<llama_model, decltype(&llama_model_free)> model{nullptr, llama_model_free};
    std::unique_ptr<llama_context, decltype(&llama_free)>     context{nullptr, llama_free};

    Sketch(const Model & of, const llama_context_params & params) {
        if (!of.no_alloc()) {
            ModelOptions options = of.options_;
            options.no_alloc     = true;
            LoadParams load(options);
            model.reset(load_files(options.paths, load.params));
            if (!model) {
                fail("ModelLoadError", "the model's file cannot be read again: " + log.words("llama.cpp gave no reason"));
            }
        }
        make_context(model ? model.get() : of.get(), params);
    }

    Sketch(llama_model * of, const llama_context_params & params) { make_context(of, params); }

    void make_context(llama_model * of, const llama_context_params & params) {
        context.reset(llama_init_from_model(of, params));
        if (!context) {
            fail("NotEnoughMemory", "llama.cpp cannot plan this context: " + log.words("it gave no reason"));
        }
    }

    LogCapture log;
};

std::vector<BufferUse> measure_memory(const Model & model, llama_context_params params, const Model * heads,
                                      llama_context_params heads_params) {
    const Sketch           sketch(model, params);
    std::vector<BufferUse> uses = memory_use(sketch.context.get());
    if (!heads) {
        return uses;
    }
    heads_params.ctx_other = sketch.context.get();
    const bool   is_same   = heads == &model;
    const Sketch beside    = is_same && sketch.model ? Sketch(sketch.model.get(), heads_params) : Sketch(*heads, heads_params);
    add_uses(uses, memory_use(beside.context.get()), is_same);
    return uses;
}

} // namespace paceline
