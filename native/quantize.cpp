#include "quantize.hpp"

#include <cstring>
#include <exception>

#include "error.hpp"
#include "log.hpp"
#include "process.hpp"

namespace paceline {
namespace {

constexpr const char * FAILED = "failed to quantize: "; // in llama.cpp's log, before the reason

constexpr size_t MAX_BUFFER_BYTES = size_t{1} << 30; // of rows in memory; llama.cpp's own limit is 8 GiB

struct Stop : std::exception {
    const char * what() const noexcept override { return "stopped"; }
};

// llama.cpp reports tensors, and can be stopped, by its log alone: it catches exceptions, as of failed writes, and closes its
// files. Of its own lines only those of tensors begin with "[". An error that ends such a line is logged in the handler, out of
// which nothing may be thrown.
class TensorLines : public LogCapture {
public:
    explicit TensorLines(const std::function<bool(const std::string &)> & on_tensor) : on_tensor_(on_tensor) {}

    void add(LogLine line) override {
        const std::string    text       = line.text;
        const ggml_log_level line_level = line.level;
        LogCapture::add(std::move(line));
        const bool is_tensor = line_level == GGML_LOG_LEVEL_INFO && text[0] == '[';
        if (is_tensor && (process_is_ending() || !on_tensor_(text))) {
            stopped = true;
            throw Stop();
        }
    }

    bool stopped = false;

private:
    const std::function<bool(const std::string &)> & on_tensor_;
};

} // namespace

void quantize(const QuantizeOptions & options) {
    llama_model_quantize_params params = llama_model_quantize_default_params();
    params.nthread                = options.n_threads;
    params.ftype                  = options.file_type;
    params.output_tensor_type     = options.output_type;
    params.token_embedding_type   = options.embedding_type;
    params.allow_requantize       = options.allow_requantize;
    params.quantize_output_tensor = options.quantize_output;
    params.only_copy              = options.only_copy;
    params.pure                   = options.pure;
    params.keep_split             = options.keep_split;
    params.dry_run                = options.dry_run;
    params.max_buf_size           = MAX_BUFFER_BYTES;

    std::vector<llama_model_tensor_override> tensor_types;
    for (const auto & [pattern, type] : options.tensor_types) {
        check_pattern("tensor_types", pattern);
        tensor_types.push_back({pattern.c_str(), type});
    }
    if (!tensor_types.empty()) {
        tensor_types.push_back({nullptr, GGML_TYPE_COUNT});
        params.tt_overrides = tensor_types.data();
    }
    std::vector<llama_model_imatrix_data> importances;
    for (const auto & [name, values] : options.importances) {
        importances.push_back({name.c_str(), values.data(), values.size()});
    }
    if (!importances.empty()) {
        importances.push_back({nullptr, nullptr, 0});
        params.imatrix = importances.data();
    }
    std::vector<llama_model_kv_override> metadata;
    for (const KvOverride & entry : options.metadata) {
        metadata.push_back(as_override(entry));
    }
    if (!metadata.empty()) {
        metadata.push_back({}); // an empty key ends the list
        params.kv_overrides = metadata.data();
    }

    TensorLines    log(options.on_tensor);
    const uint32_t status = llama_model_quantize(options.input.c_str(), options.output.c_str(), &params);
    std::string reason = log.words("it gave no reason");
    // The line of the tensor may precede it.
    if (const size_t begin = reason.rfind(FAILED); begin != std::string::npos) {
        reason.erase(0, begin + std::strlen(FAILED));
    }
    log.demote(); // the reason is in the exception, and warnings of other types are what on_tensor was told
    if (log.stopped) {
        fail("Aborted", "quantising " + options.input + " was cancelled");
    }
    if (status != 0) {
        fail("ModelLoadError", "llama.cpp cannot quantise " + options.input + ": " + reason);
    }
}

} // namespace paceline
