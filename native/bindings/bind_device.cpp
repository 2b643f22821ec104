#include "bindings.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "device.hpp"
#include "llama.h"

namespace paceline {

void bind_device(nb::module_ & m) {
    nb::class_<Device>(m, "Device")
        .def_ro("name", &Device::name)
        .def_ro("description", &Device::description)
        .def_ro("kind", &Device::kind)
        .def_ro("free_bytes", &Device::free_bytes)
        .def_ro("total_bytes", &Device::total_bytes);
    m.def("devices", &devices);
    m.def("backend_features", &backend_features);
    m.def("llama_version", [] { return llama_version(); });
    m.def("max_devices", [] { return llama_max_devices(); });
    m.def("max_sequences", [] { return llama_max_parallel_sequences(); });
    m.def("supports_gpu_offload", [] { return llama_supports_gpu_offload(); });
}

} // namespace paceline
