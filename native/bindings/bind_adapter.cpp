#include "bindings.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "adapter.hpp"

namespace paceline {

void bind_adapter(nb::module_ & m) {
    nb::class_<Adapter>(m, "Adapter")
        .def_static("load", &Adapter::load, nb::arg("model"), nb::arg("path"), nb::call_guard<Unlocked>())
        .def_prop_ro("metadata", &Adapter::metadata);
}

} // namespace paceline
