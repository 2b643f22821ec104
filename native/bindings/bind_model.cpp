#include "bindings.hpp"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "model.hpp"

namespace paceline {

void bind_model(nb::module_ & m) {
    nb::class_<Model>(m, "Model").def_static(
        "load",
        [](const std::string & path, bool vocab_only) {
            ModelOptions options;
            options.paths      = {path};
            options.vocab_only = vocab_only;
            nb::gil_scoped_release released;
            return Model::load(options);
        },
        nb::arg("path"), nb::arg("vocab_only") = false);
}

} // namespace paceline
