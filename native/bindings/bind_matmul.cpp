#include "bindings.hpp"
#include "error.hpp"
#if PACELINE_OWN_MATMUL
#include <cstring>
#include <optional>
#include <string>
#include <tuple>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "arrays.hpp"
#include "ggml.h"
#include "matmul/install.hpp"
#include "matmul/peaks.hpp"
#include "matmul/single_product.hpp"
#endif

namespace paceline {

#if PACELINE_OWN_MATMUL

namespace {

template <typename T, int dims> using Array = nb::ndarray<const T, nb::numpy, nb::ndim<dims>, nb::c_contig, nb::device::cpu>;
using Weights     = Array<uint8_t, 3>;
using Activations = Array<float, 3>;
using Experts     = Array<int32_t, 2>;

void require(bool holds, const std::string & problem) {
    if (!holds) {
        fail("InvalidParams", problem);
    }
}

ggml_type type_of(const std::string & name) {
    for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
        const ggml_type type = static_cast<ggml_type>(i);
        const char * known   = ggml_type_name(type);
        if (known && name == known && ggml_blck_size(type) > 0 && (type == GGML_TYPE_F32 || ggml_get_type_traits(type)->to_float)) {
            return type;
        }
    }
    fail("InvalidParams", "type: ggml has no '" + name.substr(0, 40) + "'");
}

matmul::SingleProduct product_of(const std::string & type_name, const Weights & weights, const Activations & activations,
                                 const std::optional<Experts> & experts, int num_threads, int num_times) {
    const ggml_type type      = type_of(type_name);
    const auto num_columns    = static_cast<int64_t>(activations.shape(2));
    const auto num_tokens     = static_cast<int64_t>(activations.shape(0));
    require(weights.size() > 0 && activations.size() > 0, "no array may be empty");
    require(num_columns % ggml_blck_size(type) == 0, "activations: rows must be whole blocks of " + str(ggml_blck_size(type)));
    require(weights.shape(2) == ggml_row_size(type, num_columns), "weights and activations must have the same columns");
    require(experts || (weights.shape(0) == 1 && activations.shape(1) == 1), "without experts there is one matrix, and one row a token");
    if (experts) {
        require(experts->shape(0) == activations.shape(0) && experts->shape(1) == activations.shape(1), "experts: one for each row is needed");
        for (size_t i = 0; i < experts->size(); ++i) {
            require(experts->data()[i] >= 0 && experts->data()[i] < static_cast<int64_t>(weights.shape(0)), "experts: there is no such matrix");
        }
    }
    require(num_threads >= 1 && num_threads <= 64 && num_times >= 1, "num_threads must be 1 to 64, num_times at least 1");
    return {type, weights.data(), static_cast<int64_t>(weights.shape(0)), static_cast<int64_t>(weights.shape(1)), num_columns,
            activations.data(), num_tokens, experts ? experts->data() : nullptr, experts ? static_cast<int64_t>(experts->shape(1)) : 1,
            num_threads, num_times};
}

matmul::FileKey key_of(const nb::bytes & bytes) {
    matmul::FileKey key;
    require(bytes.size() == key.size(), "key: 32 bytes are needed");
    std::memcpy(key.data(), bytes.data(), key.size());
    return key;
}

} // namespace

void bind_matmul(nb::module_ & m) {
    matmul::install();
    nb::class_<matmul::PackedLoad>(m, "PackedLoad")
        .def(
            "__init__",
            [](matmul::PackedLoad * load, const nb::bytes & path, const nb::bytes & key) {
                new (load) matmul::PackedLoad(std::string(path.c_str(), path.size()), key_of(key));
            },
            nb::arg("path"), nb::arg("key"))
        .def("begin", &matmul::PackedLoad::begin)
        .def("end", &matmul::PackedLoad::end, nb::call_guard<Unlocked>())
        .def_prop_ro("has_packed", &matmul::PackedLoad::has_packed)
        .def_prop_ro("mapped_bytes", &matmul::PackedLoad::mapped_bytes)
        .def_prop_ro("problem", [](const matmul::PackedLoad & load) { return as_text(load.problem()); })
        .def("start_writing", &matmul::PackedLoad::start_writing)
        .def("wait_until_written", [](const matmul::PackedLoad & load) {
            std::string problem;
            {
                Unlocked unlocked;
                problem = load.wait_until_written();
            }
            return as_text(problem);
        });
    m.def("own_matmul", [] { return matmul::uses_ours() ? matmul::kernel_name() : std::string(); });
    m.def("own_matmul_kernels", &matmul::kernel_names);
    m.def("use_own_matmul", &matmul::use_ours, nb::arg("wanted"));
    m.def("use_own_matmul_kernel", &matmul::use_kernel, nb::arg("name"));
    m.def(
        "machine_peaks",
        [](int num_threads) {
            require(num_threads >= 1 && num_threads <= 64, "num_threads must be 1 to 64");
            require(matmul::kernel_in_use(), "this processor runs none of the kernels");
            nb::gil_scoped_release release;
            const matmul::Peaks peaks = matmul::measure_peaks(*matmul::kernel_in_use(), num_threads);
            return std::tuple(peaks.bytes, peaks.dots, peaks.float_dots);
        },
        nb::arg("num_threads"));
    m.def(
        "matrix_product",
        [](const std::string & type, Weights weights, Activations activations, std::optional<Experts> experts, int num_threads, int num_times) {
            const matmul::SingleProduct product  = product_of(type, weights, activations, experts, num_threads, num_times);
            matmul::SingleProduct::Result result = [&] {
                nb::gil_scoped_release release;
                return product.run();
            }();
            nb::object outputs = to_numpy(std::move(result.outputs), {activations.shape(0), activations.shape(1), weights.shape(1)});
            return std::tuple(outputs, result.seconds, result.buffer);
        },
        nb::arg("type"), nb::arg("weights"), nb::arg("activations"), nb::arg("experts").none(), nb::arg("num_threads"), nb::arg("num_times"));
    m.def(
        "quantise",
        [](const std::string & type, Array<float, 2> values) {
            const auto num_rows = values.shape(0), num_columns = values.shape(1);
            const ggml_type wanted = type_of(type);
            require(values.size() > 0 && num_columns % ggml_blck_size(wanted) == 0, "values: rows must be whole blocks of " + str(ggml_blck_size(wanted)));
            return to_numpy(matmul::quantised(wanted, values.data(), num_rows, num_columns), {num_rows, ggml_row_size(wanted, num_columns)});
        },
        nb::arg("type"), nb::arg("values"));
    m.def(
        "dequantise",
        [](const std::string & type, Array<uint8_t, 2> weights) {
            const ggml_type known = type_of(type);
            require(weights.size() > 0 && weights.shape(1) % ggml_type_size(known) == 0, "weights: rows must be whole blocks");
            const size_t num_columns = weights.shape(1) / ggml_type_size(known) * ggml_blck_size(known);
            return to_numpy(matmul::dequantised(known, weights.data(), weights.shape(0) * num_columns), {weights.shape(0), num_columns});
        },
        nb::arg("type"), nb::arg("weights"));
}

#else

void bind_matmul(nb::module_ & m) {
    m.def("own_matmul", [] { return ""; });
    m.def("own_matmul_kernels", [] { return nb::list(); });
    m.def("use_own_matmul", [](bool wanted) {
        if (wanted) {
            fail("Unsupported", "this build has llama.cpp's matrix products alone; PACELINE_OWN_MATMUL=ON builds it with paceline's");
        }
    });
    m.def("use_own_matmul_kernel", [](const char *) { return false; });
}

#endif

} // namespace paceline
