// What the binding files share: one function per noun, called once from module.cpp.
#pragma once

#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace paceline {

void bind_build_info(nb::module_ & m);
void bind_log(nb::module_ & m);
void bind_device(nb::module_ & m);
void bind_model(nb::module_ & m);
void bind_vocab(nb::module_ & m);
void bind_adapter(nb::module_ & m);
void bind_sampler(nb::module_ & m);
void bind_context(nb::module_ & m);

} // namespace paceline
