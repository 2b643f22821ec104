// NumPy arrays in and out. Inputs are not converted: a silent conversion would wrap values that do not fit.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <type_traits>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

namespace paceline {

namespace nb = nanobind;

using Ints  = nb::ndarray<const int32_t, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename Array> auto as_span(const Array & array) {
    return std::span(array.data(), array.size());
}

// A copy of the caller's array: a concurrent write cannot change the checked values.
template <typename Array> auto copied(const Array & array) {
    using T = std::remove_cv_t<typename Array::Scalar>;
    return std::vector<T>(array.data(), array.data() + array.size());
}

// An array that owns its memory.
template <typename T> nb::object to_numpy(std::vector<T> && values, std::initializer_list<size_t> shape) {
    auto *      kept  = new std::vector<T>(std::move(values));
    nb::capsule owner(kept, [](void * data) noexcept { delete static_cast<std::vector<T> *>(data); });
    return nb::cast(nb::ndarray<nb::numpy, T>(kept->data(), shape, owner));
}

template <typename T> nb::object to_numpy(std::vector<T> && values) {
    const size_t size = values.size();
    return to_numpy(std::move(values), {size});
}

} // namespace paceline
