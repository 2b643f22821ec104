#include "bindings.hpp"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "adapter.hpp"

namespace paceline {

void bind_adapter(nb::module_ & m) {
    nb::class_<Adapter>(m, "Adapter")
        .def_static("load", &Adapter::load, nb::arg("model"), nb::arg("path"), nb::call_guard<Unlocked>())
        .def_prop_ro("metadata", [](const Adapter & adapter) { return as_texts(adapter.metadata()); });
}

} // namespace paceline
