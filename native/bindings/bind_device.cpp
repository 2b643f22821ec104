#include "bindings.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "device.hpp"
#include "llama.h"

namespace paceline {
namespace {

// The size of one type of tensor: bytes of a block, and values in it; nothing for a type that is not known.
std::optional<std::pair<size_t, int64_t>> tensor_type_size(int type) {
    if (type < 0 || type >= GGML_TYPE_COUNT || ggml_blck_size(static_cast<ggml_type>(type)) == 0) {
        return std::nullopt;
    }
    return std::pair{ggml_type_size(static_cast<ggml_type>(type)), ggml_blck_size(static_cast<ggml_type>(type))};
}

// The name of one type of tensor, as llama.cpp writes it; nothing for a type that is not known.
std::optional<std::string> tensor_type_name(int type) {
    return tensor_type_size(type) ? std::optional<std::string>(ggml_type_name(static_cast<ggml_type>(type))) : std::nullopt;
}

} // namespace

void bind_device(nb::module_ & m) {
    nb::class_<Device>(m, "Device")
        .def_ro("name", &Device::name)
        .def_ro("description", &Device::description)
        .def_ro("kind", &Device::kind)
        .def_ro("free_bytes", &Device::free_bytes)
        .def_ro("total_bytes", &Device::total_bytes);
    m.def("devices", &devices);
    m.def("backend_features", &backend_features);
    m.def("tensor_type_size", &tensor_type_size, nb::arg("type"));
    m.def("tensor_type_name", &tensor_type_name, nb::arg("type"));
    m.def("llama_version", [] { return llama_version(); });
    m.def("max_devices", [] { return llama_max_devices(); });
    m.def("max_sequences", [] { return llama_max_parallel_sequences(); });
    m.def("supports_gpu_offload", [] { return llama_supports_gpu_offload(); });
}

} // namespace paceline
