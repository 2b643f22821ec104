// What the binding files share: one function per noun, called once from module.cpp.
#pragma once

#include <optional>

#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace paceline {

// Hands the queued lines of llama.cpp's log to Python. Needs the GIL; never throws.
void flush_log();

// Frees the GIL while it lives, and delivers what llama.cpp logged meanwhile once it is back.
class Unlocked {
public:
    Unlocked() : released_(std::in_place) {}
    ~Unlocked() {
        released_.reset();
        flush_log();
    }

private:
    std::optional<nb::gil_scoped_release> released_;
};

void bind_build_info(nb::module_ & m);
void bind_log(nb::module_ & m);
void bind_device(nb::module_ & m);
void bind_model(nb::module_ & m);
void bind_vocab(nb::module_ & m);
void bind_adapter(nb::module_ & m);
void bind_sampler(nb::module_ & m);
void bind_context(nb::module_ & m);
void bind_step(nb::module_ & m);

} // namespace paceline
