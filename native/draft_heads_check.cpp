// Checks of a file of draft heads: llama.cpp asserts on most of its errors.
#include "draft_heads.hpp"

#include <algorithm>
#include <set>

#include "error.hpp"
#include "ggml-backend.h"
#include "llama-ext.h"

namespace paceline {
namespace {

// Architectures with an MTP graph in the pinned llama.cpp; for all others it would run the layers of the model itself.
const std::set<std::string> WITH_MTP_GRAPH = {
    "bailingmoe3", "cohere2moe", "deepseek2", "deepseek32", "deepseek4", "glm-dsa", "glm4moe", "hy_v3", "mimo2", "nemotron_h_moe",
    "qwen35", "qwen35moe", "qwen3next", "step35",
};
const std::set<std::string> WITH_CHAINED_HEADS = {"hy_v3", "mimo2", "step35"};

// Architectures with a graph that keeps the inputs of its layers.
const std::set<std::string> WITH_LAYER_INPUTS = {
    "bailingmoe3", "gemma4", "gpt-oss", "hunyuan_vl", "lfm2", "llama", "mimo2", "minimax-01", "minimax-m2", "muse-glimmer",
    "nanbeige", "nemotron_h", "nemotron_h_moe", "qwen3", "qwen35", "qwen35moe", "qwen3moe", "qwen3next", "qwen4exp",
};

void check_vocabulary(const Model & model, const Model & heads) {
    if (heads.n_vocab() != model.n_vocab()) {
        fail("InvalidParams", "the draft heads are for a vocabulary of " + str(heads.n_vocab()) + " tokens, and the model has " +
                                  str(model.n_vocab()));
    }
}

void check_mtp(const Model & model, const Model & heads) {
    const std::string architecture = heads.architecture();
    if (architecture != model.architecture()) {
        fail("InvalidParams", "a file of the architecture " + architecture + " has no draft heads for a model of " +
                                  model.architecture() + "; a model of its own drafts with speculation=\"draft-model\"");
    }
    const int32_t count = llama_model_n_layer_nextn(heads.get());
    if (count < 1) {
        fail("Unsupported", "the model has no next-token-prediction heads: its file has no " + architecture +
                                ".nextn_predict_layers, or 0");
    }
    if (!WITH_MTP_GRAPH.contains(architecture)) {
        fail("Unsupported", "llama.cpp computes no next-token-prediction heads of the architecture " + architecture);
    }
    if (count > 1 && !WITH_CHAINED_HEADS.contains(architecture)) {
        fail("Unsupported", "llama.cpp computes one next-token-prediction head of the architecture " + architecture + ", not " +
                                str(count));
    }
    const int32_t n_layer = llama_model_n_layer(heads.get());
    for (int32_t layer = n_layer; layer < n_layer + count; ++layer) {
        const std::string block = "blk." + str(layer) + ".";
        for (const char * name : {"nextn.eh_proj.weight", "nextn.enorm.weight", "nextn.hnorm.weight"}) {
            if (!heads.has_tensor(block + name)) {
                fail("Unsupported", "the model's file has no " + block + name +
                                        ": its next-token-prediction heads were left out, or not loaded (draft_heads=True)");
            }
        }
        if (architecture == "mimo2" && !(heads.has_tensor(block + "attn_qkv.weight") && heads.has_tensor(block + "ffn_gate.weight") &&
                                         heads.has_tensor(block + "ffn_up.weight") && heads.has_tensor(block + "ffn_down.weight"))) {
            fail("Unsupported", "the head " + block + " has no attn_qkv and dense ffn, which llama.cpp needs of mimo2");
        }
    }
    if (llama_model_n_embd_out(heads.get()) != llama_model_n_embd_out(model.get())) {
        fail("InvalidParams", "the draft heads read hidden rows of " + str(llama_model_n_embd_out(heads.get())) +
                                  " values, and the model's have " + str(llama_model_n_embd_out(model.get())));
    }
}

void check_layers(const Model & model, const Model & heads) {
    const uint32_t  count   = llama_model_target_layer_ids_n(heads.get());
    const int32_t * layers  = llama_model_target_layer_ids(heads.get());
    const int32_t   n_layer = llama_model_n_layer(model.get());
    if (count != 3) {
        fail("InvalidParams", "an EAGLE-3 file reads 3 layers of the model, not " + str(count));
    }
    for (uint32_t i = 0; i < count; ++i) {
        if (layers[i] < 0 || layers[i] > n_layer || std::count(layers, layers + count, layers[i]) != 1) {
            fail("InvalidParams", "the EAGLE-3 file reads layers " + str(layers[0]) + ", " + str(layers[1]) + " and " + str(layers[2]) +
                                      ", and the model has " + str(n_layer));
        }
    }
}

// Rows of the draft vocabulary lead into the model's. kind: of file, for errors.
void check_mapping(const Model & heads, const std::string & kind) {
    const ggml_tensor * mapping = heads.tensor("d2t");
    if (!mapping || heads.no_alloc()) {
        return;
    }
    if (mapping->type != GGML_TYPE_I64 || ggml_n_dims(mapping) != 1 || !mapping->buffer) {
        fail("InvalidParams", "d2t of the " + kind + " file must be a vector of 64-bit integers");
    }
    std::vector<int64_t> tokens(static_cast<size_t>(mapping->ne[0]));
    ggml_backend_tensor_get(mapping, tokens.data(), 0, tokens.size() * sizeof(int64_t));
    for (const int64_t token : tokens) {
        if (token < 0 || token >= heads.n_vocab()) {
            fail("InvalidParams", "d2t of the " + kind + " file names token " + str(token) + ", and the vocabulary has " +
                                      str(heads.n_vocab()));
        }
    }
}

void check_output(const Model & model, const Model & heads, const std::string & kind) {
    const int64_t width   = llama_model_n_embd(model.get());
    const bool    borrows = !heads.tensor("token_embd.weight") || !heads.tensor("output.weight");
    if (borrows && llama_model_n_embd(heads.get()) != width) {
        fail("InvalidParams", "the " + kind + " file takes embeddings or the output layer from the model, whose rows have " + str(width) +
                                  " values, not " + str(llama_model_n_embd(heads.get())));
    }
    const ggml_tensor * output = heads.tensor("output.weight");
    const ggml_tensor * mapping = heads.tensor("d2t");
    if (output && output->ne[1] != (mapping ? mapping->ne[0] : heads.n_vocab())) {
        fail("InvalidParams", "output.weight of the " + kind + " file has " + str(output->ne[1]) + " rows, which are not its vocabulary");
    }
    if (!output && mapping) {
        fail("InvalidParams", "the " + kind + " file has a draft vocabulary (d2t) and no output.weight for it");
    }
    check_mapping(heads, kind);
}

void check_eagle(const Model & model, const Model & heads) {
    if (!WITH_LAYER_INPUTS.contains(model.architecture())) {
        fail("Unsupported", "llama.cpp keeps no hidden states of layers of the architecture " + model.architecture() + " for EAGLE-3");
    }
    check_layers(model, heads);
    const int64_t      width = llama_model_n_embd(model.get());
    const ggml_tensor * fc   = heads.tensor("fc.weight");
    if (!fc || fc->ne[0] != 3 * width) {
        fail("InvalidParams", "the EAGLE-3 file is for a model whose hidden states have " + str(fc ? fc->ne[0] / 3 : 0) +
                                  " values, and this one's have " + str(width));
    }
    if (llama_model_n_layer(heads.get()) != 1) {
        fail("InvalidParams", "an EAGLE-3 file has one layer, not " + str(llama_model_n_layer(heads.get())));
    }
    check_output(model, heads, "EAGLE-3");
}

// Attention that is not causal takes a pass of one ubatch, and a Markov head whole blocks.
void check_block_fits(const BlockShape & block, const llama_context_params & params) {
    if (params.n_ubatch < static_cast<uint32_t>(block.size)) {
        fail("InvalidParams", "n_ubatch is " + str(params.n_ubatch) + ", and the DFlash file drafts blocks of " + str(block.size) +
                                  " tokens, each in one pass; raise it to " + str(block.size) + " or more");
    }
}

void check_blocks(const Model & model, const Model & heads, const llama_context_params & params) {
    if (!WITH_LAYER_INPUTS.contains(model.architecture())) {
        fail("Unsupported", "llama.cpp keeps no hidden states of layers of the architecture " + model.architecture() + " for DFlash");
    }
    if (heads.has_tensor("selector_hidden.weight")) {
        fail("Unsupported", "DFlash 2 files, which have a selector, are not supported: their drafts are no logits");
    }
    const uint32_t  count   = llama_model_target_layer_ids_n(heads.get());
    const int32_t * layers  = llama_model_target_layer_ids(heads.get());
    const int32_t   n_layer = llama_model_n_layer(model.get());
    for (uint32_t i = 0; i < count; ++i) {
        if (layers[i] < 0 || layers[i] > n_layer || std::count(layers, layers + count, layers[i]) != 1) {
            fail("InvalidParams", "the DFlash file reads layer " + str(layers[i]) + " twice, or the model has no such layer: it has " + str(n_layer));
        }
    }
    if (count == 0 || llama_model_n_embd(heads.get()) != llama_model_n_embd(model.get())) {
        fail("InvalidParams", "the DFlash file reads " + str(count) + " layers of " + str(llama_model_n_embd(heads.get())) +
                                  " values, and the model's have " + str(llama_model_n_embd(model.get())));
    }
    check_block_fits(block_shape(heads), params);
    check_output(model, heads, "DFlash");
}

} // namespace

void DraftHeads::check(const Model & model, const Model & heads, const llama_context_params & params) {
    if (heads.vocab_only()) {
        fail("InvalidParams", "the draft heads were loaded with vocab_only=True");
    }
    const std::string architecture = heads.architecture();
    if (architecture == "gemma4-assistant") {
        fail("Unsupported", "draft heads of the architecture gemma4-assistant are not supported: they have no cells of their own, and "
                            "nothing of theirs can be cut or copied");
    }
    if (model.memory_class() == MemoryClass::none || llama_model_has_encoder(model.get())) {
        fail("Unsupported", "draft heads are for models that write token after token");
    }
    check_vocabulary(model, heads);
    if (architecture == "dflash") {
        check_blocks(model, heads, params);
    } else {
        architecture == "eagle3" ? check_eagle(model, heads) : check_mtp(model, heads);
    }
}

} // namespace paceline
