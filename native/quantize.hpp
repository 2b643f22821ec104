// Quantisation of model files by llama.cpp.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "llama.h"
#include "model.hpp"

namespace paceline {

struct QuantizeOptions {
    std::string input;  // of a split set the first part
    std::string output; // with keep_split without "-00001-of-00003.gguf", which llama.cpp appends
    llama_ftype file_type      = LLAMA_FTYPE_MOSTLY_Q8_0;
    int32_t     n_threads      = 1;
    ggml_type   output_type    = GGML_TYPE_COUNT; // of output.weight; COUNT: llama.cpp's choice
    ggml_type   embedding_type = GGML_TYPE_COUNT; // of the token embeddings; likewise
    std::vector<std::pair<std::string, ggml_type>>          tensor_types; // pattern of names, type; the first that fits counts
    std::vector<std::pair<std::string, std::vector<float>>> importances;  // by the names of tensors
    std::vector<KvOverride>                                 metadata;     // that the new file has in place of the old values
    bool allow_requantize = false;
    bool quantize_output  = true;
    bool pure             = false;
    bool only_copy        = false;
    bool keep_split       = false;
    bool dry_run          = false; // plan the tensors and write nothing
    std::function<bool(const std::string &)> on_tensor; // gets llama.cpp's log line of each tensor; returns whether to continue
};

// Raises Aborted if on_tensor returns false or the process is ending, ModelLoadError if llama.cpp refuses.
void quantize(const QuantizeOptions & options);

} // namespace paceline
