#include "bindings.hpp"
#include "error.hpp"
#if PACELINE_OWN_ATTENTION
#include <optional>
#include <string>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "arrays.hpp"
#include "attention/install.hpp"
#include "attention/single_attention.hpp"
#endif

namespace paceline {

#if PACELINE_OWN_ATTENTION

namespace {

template <typename T, int dims> using Array = nb::ndarray<const T, nb::numpy, nb::ndim<dims>, nb::c_contig, nb::device::cpu>;
using Queries = Array<float, 4>;
using Cells   = nb::ndarray<nb::numpy, nb::ro, nb::ndim<4>, nb::c_contig, nb::device::cpu>;
using Masks   = Array<uint16_t, 3>;
using Sinks   = Array<float, 1>;

void require(bool holds, const char * problem) {
    if (!holds) {
        fail("InvalidParams", problem);
    }
}

bool is_half(const Cells & cells) { return cells.dtype() == nb::dlpack::dtype{uint8_t(nb::dlpack::dtype_code::Float), 16, 1}; }
bool is_single(const Cells & cells) { return cells.dtype() == nb::dtype<float>(); }

attention::SingleAttention operation_of(const Queries & queries, const Cells & keys, const Cells & values, const std::optional<Masks> & mask,
                           const std::optional<Sinks> & sinks, float scale, float max_bias, float softcap, int num_threads,
                           int num_times) {
    const auto size = [](const auto & array, int i) { return static_cast<int64_t>(array.shape(i)); };
    require(is_half(keys) || is_single(keys), "keys: float16 or float32 is needed");
    require(keys.dtype() == values.dtype(), "keys and values must have one type");
    for (int i = 0; i < 3; ++i) {
        require(keys.shape(i) == values.shape(i), "keys and values must have the same streams, cells and heads");
    }
    require(queries.shape(0) == keys.shape(0), "queries and keys must have the same streams");
    require(queries.shape(3) == keys.shape(3), "queries and keys must have the same width");
    require(queries.size() > 0 && keys.size() > 0 && values.size() > 0, "no array may be empty");
    require(queries.shape(2) % keys.shape(2) == 0, "the query heads must be a multiple of the heads of keys");
    require(!mask || (mask->shape(0) == queries.shape(0) && mask->shape(1) == queries.shape(1) && mask->shape(2) == keys.shape(1)),
            "mask: one value for each stream, token and cell is needed");
    require(!sinks || sinks->shape(0) == queries.shape(2), "sinks: one value for each head is needed");
    require(max_bias <= 0 || mask, "max_bias needs a mask");
    require(num_threads >= 1 && num_threads <= 64 && num_times >= 1, "num_threads must be 1 to 64, num_times at least 1");
    return {queries.data(), keys.data(), values.data(), is_half(keys), mask ? mask->data() : nullptr, sinks ? sinks->data() : nullptr,
            size(queries, 0), size(queries, 1), size(queries, 2), size(keys, 2), size(keys, 1), size(queries, 3), size(values, 3),
            scale, max_bias, softcap, num_threads, num_times};
}

} // namespace

void bind_attention(nb::module_ & m) {
    attention::install();
    m.def("own_attention", &attention::uses_ours);
    m.def("use_own_attention", &attention::use_ours, nb::arg("wanted"));
    m.def(
        "flash_attention",
        [](Queries queries, Cells keys, Cells values, std::optional<Masks> mask, std::optional<Sinks> sinks, float scale, float max_bias,
           float softcap, int num_threads, int num_times) {
            const attention::SingleAttention operation = operation_of(queries, keys, values, mask, sinks, scale, max_bias, softcap, num_threads, num_times);
            attention::SingleAttention::Result result = [&] {
                nb::gil_scoped_release release;
                return operation.run();
            }();
            nb::object outputs = to_numpy(std::move(result.outputs), {queries.shape(0), queries.shape(1), queries.shape(2), values.shape(3)});
            return std::pair(outputs, result.seconds);
        },
        nb::arg("queries"), nb::arg("keys"), nb::arg("values"), nb::arg("mask").none(), nb::arg("sinks").none(), nb::arg("scale"),
        nb::arg("max_bias"), nb::arg("softcap"), nb::arg("num_threads"), nb::arg("num_times"));
}

#else

void bind_attention(nb::module_ & m) {
    m.def("own_attention", [] { return false; });
    m.def("use_own_attention", [](bool wanted) {
        if (wanted) {
            fail("Unsupported", "this build has llama.cpp's attention alone; PACELINE_OWN_ATTENTION=ON builds it with paceline's");
        }
    });
}

#endif

} // namespace paceline
