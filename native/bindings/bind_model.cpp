#include "bindings.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "context.hpp"
#include "model.hpp"

namespace paceline {
const char * memory_class_name(MemoryClass memory_class) {
    switch (memory_class) {
        case MemoryClass::none: return "none";
        case MemoryClass::attention: return "attention";
        case MemoryClass::sliding_window: return "sliding_window";
        case MemoryClass::recurrent: return "recurrent";
        case MemoryClass::hybrid: return "hybrid";
    }
    return "none";
}

namespace {

std::shared_ptr<Model> load(std::vector<std::string> paths, std::optional<std::vector<std::string>> devices,
                            std::optional<int32_t> n_gpu_layers, int split_mode, int load_mode, int32_t main_gpu,
                            std::vector<float> tensor_split, std::vector<KvOverride> kv_overrides, bool vocab_only,
                            bool check_tensors, bool use_extra_bufts, nb::object progress,
                            std::vector<std::pair<std::string, std::string>> tensor_overrides, bool no_alloc,
                            bool draft_heads) {
    ProgressCall call(progress);
    ModelOptions options;
    options.paths           = std::move(paths);
    options.devices         = std::move(devices);
    options.n_gpu_layers    = n_gpu_layers;
    options.split_mode      = static_cast<llama_split_mode>(split_mode);
    options.load_mode       = static_cast<llama_load_mode>(load_mode);
    options.main_gpu        = main_gpu;
    options.tensor_split    = std::move(tensor_split);
    options.kv_overrides    = std::move(kv_overrides);
    options.vocab_only      = vocab_only;
    options.check_tensors   = check_tensors;
    options.use_extra_bufts = use_extra_bufts;
    options.no_alloc        = no_alloc;
    options.draft_heads     = draft_heads;
    options.tensor_overrides = std::move(tensor_overrides);
    if (!progress.is_none()) {
        options.progress = [&call](float share) { return call(share); };
    }
    std::exception_ptr     error;
    std::shared_ptr<Model> model;
    {
        Unlocked unlocked;
        try {
            model = Model::load(options);
        } catch (...) {
            error = std::current_exception();
        }
    }
    call.rethrow();
    if (error) {
        std::rethrow_exception(error);
    }
    return model;
}

// A property read straight from llama.cpp.
template <auto function> auto read(const Model & model) { return function(model.get()); }

// The same for tensors that llama.cpp looks up in the first layer without a check.
template <auto function> int32_t read_first_layer(const Model & model) {
    return llama_model_n_layer(model.get()) > 0 ? function(model.get()) : 0;
}

std::optional<nb::object> chat_template(const Model & model, const std::optional<std::string> & name) {
    const std::optional<std::string> text = model.chat_template(name);
    return text ? std::optional<nb::object>(as_text(*text)) : std::nullopt;
}

} // namespace

void bind_model(nb::module_ & m) {
    const auto defaults = llama_model_default_params();
    m.def("buffer_types", &buffer_types);
    nb::class_<Model>(m, "Model")
        .def_static("load", &load, nb::arg("paths"), nb::arg("devices").none() = nb::none(),
                    nb::arg("n_gpu_layers").none() = nb::none(), nb::arg("split_mode") = static_cast<int>(defaults.split_mode),
                    nb::arg("load_mode") = static_cast<int>(defaults.load_mode), nb::arg("main_gpu") = 0,
                    nb::arg("tensor_split") = std::vector<float>{}, nb::arg("kv_overrides") = std::vector<KvOverride>{},
                    nb::arg("vocab_only") = false, nb::arg("check_tensors") = false, nb::arg("use_extra_bufts") = true,
                    nb::arg("progress").none() = nb::none(),
                    nb::arg("tensor_overrides") = std::vector<std::pair<std::string, std::string>>{}, nb::arg("no_alloc") = false,
                    nb::arg("draft_heads") = false)
        .def_prop_ro("desc", [](const Model & model) { return as_text(model.desc()); })
        .def_prop_ro("metadata", [](const Model & model) { return as_texts(model.metadata()); })
        .def("chat_template", &chat_template, nb::arg("name").none() = nb::none())
        .def_prop_ro("memory_class", [](const Model & model) { return memory_class_name(model.memory_class()); })
        .def_prop_ro("vocab_only", &Model::vocab_only)
        .def_prop_ro("n_vocab", &Model::n_vocab)
        .def_prop_ro("size_bytes", &read<llama_model_size>)
        .def_prop_ro("n_params", &read<llama_model_n_params>)
        .def_prop_ro("n_ctx_train", &read<llama_model_n_ctx_train>)
        .def_prop_ro("n_embd", &read<llama_model_n_embd>)
        .def_prop_ro("n_embd_out", &read<llama_model_n_embd_out>)
        .def_prop_ro("n_layer", &read<llama_model_n_layer>)
        .def_prop_ro("n_draft_heads", &read<llama_model_n_layer_nextn>)
        .def_prop_ro("n_head", &read_first_layer<llama_model_n_head>)
        .def_prop_ro("n_head_kv", &read_first_layer<llama_model_n_head_kv>)
        .def_prop_ro("n_swa", &read<llama_model_n_swa>)
        .def_prop_ro("n_cls_out", &read<llama_model_n_cls_out>)
        .def_prop_ro("is_recurrent", &read<llama_model_is_recurrent>)
        .def_prop_ro("is_hybrid", &read<llama_model_is_hybrid>)
        .def_prop_ro("is_diffusion", &read<llama_model_is_diffusion>)
        .def_prop_ro("one_sequence_per_pass", &Model::one_sequence_per_pass)
        .def(
            "draft_refusal",
            [](const Model & model, bool swa_full) {
                ContextOptions options;
                options.params.swa_full   = swa_full;
                options.params.kv_unified = true;
                return draft_refusal(model, options);
            },
            nb::arg("swa_full"), "Why wrong drafts could not be taken out of memory again; empty where they can.")
        .def_prop_ro("architecture", &Model::architecture)
        .def_prop_ro("has_encoder", &read<llama_model_has_encoder>)
        .def_prop_ro("has_decoder", &read<llama_model_has_decoder>)
        .def_prop_ro("decoder_start_token", &read<llama_model_decoder_start_token>)
        .def_prop_ro("ftype", [](const Model & model) { return llama_ftype_name(llama_model_ftype(model.get())); })
        .def("class_label", [](const Model & model, uint32_t index) -> std::optional<nb::object> {
            const char * label = index < llama_model_n_cls_out(model.get()) ? llama_model_cls_label(model.get(), index) : nullptr;
            return label ? std::optional<nb::object>(as_text(label)) : std::nullopt;
        });
}

} // namespace paceline
