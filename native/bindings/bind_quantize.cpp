#include "bindings.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "arrays.hpp"
#include "quantize.hpp"

namespace paceline {
namespace {

using Floats = nb::ndarray<const float, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void quantize_file(std::string input, std::string output, int file_type, int32_t n_threads, std::optional<int> output_type,
                   std::optional<int> embedding_type, const std::vector<std::pair<std::string, int>> & tensor_types,
                   const std::vector<std::pair<std::string, Floats>> & importances, std::vector<KvOverride> metadata,
                   bool allow_requantize, bool quantize_output, bool pure, bool only_copy, bool keep_split, bool dry_run,
                   nb::object on_tensor) {
    ProgressCall    call(on_tensor);
    QuantizeOptions options;
    options.input            = std::move(input);
    options.output           = std::move(output);
    options.file_type        = static_cast<llama_ftype>(file_type);
    options.n_threads        = n_threads;
    options.output_type      = static_cast<ggml_type>(output_type.value_or(GGML_TYPE_COUNT));
    options.embedding_type   = static_cast<ggml_type>(embedding_type.value_or(GGML_TYPE_COUNT));
    options.metadata         = std::move(metadata);
    options.allow_requantize = allow_requantize;
    options.quantize_output  = quantize_output;
    options.pure             = pure;
    options.only_copy        = only_copy;
    options.keep_split       = keep_split;
    options.dry_run          = dry_run;
    options.on_tensor        = [&call](const std::string & line) { return call(line); };
    for (const auto & [pattern, type] : tensor_types) {
        options.tensor_types.emplace_back(pattern, static_cast<ggml_type>(type));
    }
    for (const auto & [name, values] : importances) {
        options.importances.emplace_back(name, copied(values));
    }
    std::exception_ptr error;
    {
        Unlocked unlocked;
        try {
            quantize(options);
        } catch (...) {
            error = std::current_exception();
        }
    }
    call.rethrow();
    if (error) {
        std::rethrow_exception(error);
    }
}

} // namespace

void bind_quantize(nb::module_ & m) {
    m.def("quantize_file", &quantize_file, nb::arg("input"), nb::arg("output"), nb::arg("file_type"), nb::kw_only(),
          nb::arg("n_threads"), nb::arg("output_type").none(), nb::arg("embedding_type").none(), nb::arg("tensor_types"),
          nb::arg("importances"), nb::arg("metadata"), nb::arg("allow_requantize"), nb::arg("quantize_output"), nb::arg("pure"),
          nb::arg("only_copy"), nb::arg("keep_split"), nb::arg("dry_run"), nb::arg("on_tensor"));
}

} // namespace paceline
