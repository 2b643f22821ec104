// A loaded model. Everything that points into it holds a share of it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "llama.h"

namespace paceline {

using KvOverride = std::pair<std::string, std::variant<bool, int64_t, double, std::string>>;

struct ModelOptions {
    std::vector<std::string> paths; // one file, or every part of a split set in order
    std::optional<std::vector<std::string>> devices; // names; unset: all; the CPU is always used for the rest
    std::optional<int32_t>   n_gpu_layers; // unset: llama.cpp's choice
    llama_split_mode         split_mode = LLAMA_SPLIT_MODE_LAYER;
    llama_load_mode          load_mode  = LLAMA_LOAD_MODE_AUTO;
    int32_t                  main_gpu   = 0;
    std::vector<float>       tensor_split;
    std::vector<KvOverride>  kv_overrides;
    std::vector<std::pair<std::string, std::string>> tensor_overrides; // pattern of names, buffer type; the first that fits counts
    bool                     vocab_only      = false;
    bool                     check_tensors   = false;
    bool                     use_extra_bufts = true;
    bool                     no_alloc        = false; // plan the weights without allocating or reading them
    bool                     draft_heads     = false; // load the layers that predict the tokens behind the next one
    std::function<bool(float)> progress; // returns whether to continue
};

// Bytes of a model and a context in one type of buffer. Outputs are the rows of logits that callers read.
struct BufferUse {
    std::string buffer;
    std::string device; // empty for memory of no device in particular
    bool        is_host = false;
    uint64_t    weights = 0;
    uint64_t    cache   = 0;
    uint64_t    compute = 0;
};

// Whether positions of a sequence may leave some out: with M-RoPE an image spans positions that have no cells.
inline bool may_skip_positions(const llama_model * model) {
    const enum llama_rope_type type = llama_model_rope_type(model);
    return type == LLAMA_ROPE_TYPE_MROPE || type == LLAMA_ROPE_TYPE_IMROPE;
}

// Raises InvalidParams if the pattern is no regular expression that llama.cpp can search for; `option` is in the message.
void check_pattern(const char * option, const std::string & pattern);

// llama.cpp's form of an override. Raises InvalidParams if the key or the value is too long.
llama_model_kv_override as_override(const KvOverride & entry);

// The buffer types that tensor_overrides may name.
std::vector<std::string> buffer_types();

enum class MemoryClass { none, attention, sliding_window, recurrent, hybrid };

// With one owner for Python and C++ (without the base class every call from Python makes another): caches know a model by it.
class Model : public std::enable_shared_from_this<Model> {
public:
    static std::shared_ptr<Model> load(const ModelOptions & options);
    ~Model();
    Model(const Model &)             = delete;
    Model & operator=(const Model &) = delete;

    llama_model *       get() const noexcept { return model_; }
    const llama_vocab * vocab() const noexcept { return llama_model_get_vocab(model_); }
    int32_t             n_vocab() const noexcept { return llama_vocab_n_tokens(vocab()); }
    bool                vocab_only() const noexcept { return vocab_only_; }
    bool                no_alloc() const noexcept { return options_.no_alloc; }
    const ggml_tensor * tensor(const std::string & name) const; // nullptr if there is none
    bool                has_tensor(const std::string & name) const { return tensor(name) != nullptr; }
    size_t              num_tensors() const;
    MemoryClass         memory_class() const;
    std::string         architecture() const; // as the file names it

    // Rows of the learned table of positions, read beyond its end by any position that is not below; 0 without one.
    int64_t position_rows() const;
    // Whether a pass may have tokens of one sequence only: llama.cpp computes a wrong place for the states of several.
    bool one_sequence_per_pass() const;
    // Whether the graph makes logits of every token while llama.cpp reads as many rows as were requested.
    bool computes_all_outputs() const;
    // Whether llama.cpp reads n_embd_out values while the graph has fewer for a token.
    bool embeddings_are_too_narrow() const;

    std::string                                      desc() const;
    std::vector<std::pair<std::string, std::string>> metadata() const;
    std::optional<std::string>                       chat_template(const std::optional<std::string> & name) const;

    // llama.cpp keeps its adapters in a plain set of the model, and counts their nodes whenever it reserves a graph: loading and
    // freeing them takes turns, and a context that reserves shares the lock.
    std::shared_mutex & adapter_mutex() const noexcept { return adapter_mutex_; }

private:
    Model(llama_model * model, ModelOptions options) : model_(model), vocab_only_(options.vocab_only), options_(std::move(options)) {}

    friend struct Sketch; // of a model, without its weights

    llama_model *             model_;
    bool                      vocab_only_;
    ModelOptions              options_;
    mutable std::shared_mutex adapter_mutex_;
};

// The memory of the model and a context with these parameters, counted by building them without allocating. Memory for recurrent
// states is allocated for the moment: llama.cpp plans it in no other way. heads: a model; its context, with these parameters,
// is made beside it; it may be the model itself.
std::vector<BufferUse> measure_memory(const Model & model, llama_context_params params, const Model * heads = nullptr,
                                      llama_context_params heads_params = {});

// Adds the memory of another context; with the same model its weights are counted already.
void add_uses(std::vector<BufferUse> & uses, const std::vector<BufferUse> & added, bool is_same_model);

// Memory that a context and its model have allocated.
std::vector<BufferUse> memory_use(const llama_context * context);

} // namespace paceline
