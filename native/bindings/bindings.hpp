// Shared by the binding files: one function per noun, called once from module.cpp.
#pragma once

#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>

#include "model.hpp"
#include "process.hpp"

namespace nb = nanobind;

namespace paceline {

// Hands the queued lines of llama.cpp's log to Python. Needs the GIL; never throws.
void flush_log();

// Text of a file, which need not be UTF-8: invalid bytes become U+FFFD.
inline nb::object as_text(std::string_view text) {
    return nb::steal<nb::object>(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

inline nb::list as_texts(const std::vector<std::pair<std::string, std::string>> & entries) {
    nb::list list;
    for (const auto & [key, value] : entries) {
        list.append(nb::make_tuple(as_text(key), as_text(value)));
    }
    return list;
}

// The value of Python's `MemoryClass`.
const char * memory_class_name(MemoryClass memory_class);

// Frees the GIL while it lives, and delivers llama.cpp's log lines once it is back. Everything that gives the
// GIL away does it with this: see NativeCall. Raises Closed once the process is ending.
class Unlocked {
public:
    Unlocked() : released_(std::in_place) {}
    ~Unlocked() {
        call_.come_back();
        released_.reset();
        flush_log();
    }

private:
    NativeCall                            call_;
    std::optional<nb::gil_scoped_release> released_;
};

// Calls a Python function from a thread without the GIL and keeps its exception for when the native call has ended.
class ProgressCall {
public:
    explicit ProgressCall(nb::object function) : function_(std::move(function)) {}

    template <typename Argument> bool operator()(const Argument & argument) {
        nb::gil_scoped_acquire gil;
        try {
            if constexpr (std::is_convertible_v<Argument, std::string_view>) {
                return nb::cast<bool>(function_(as_text(argument)));
            } else {
                return nb::cast<bool>(function_(argument));
            }
        } catch (...) {
            error_ = std::current_exception();
            return false;
        }
    }

    void rethrow() const {
        if (error_) {
            std::rethrow_exception(error_);
        }
    }

private:
    nb::object         function_;
    std::exception_ptr error_;
};

void bind_process(nb::module_ & m);
void bind_build_info(nb::module_ & m);
void bind_log(nb::module_ & m);
void bind_matmul(nb::module_ & m);
void bind_attention(nb::module_ & m);
void bind_device(nb::module_ & m);
void bind_gguf(nb::module_ & m);
void bind_model(nb::module_ & m);
void bind_vocab(nb::module_ & m);
void bind_chat_format(nb::module_ & m);
void bind_adapter(nb::module_ & m);
void bind_sampler(nb::module_ & m);
void bind_context(nb::module_ & m);
void bind_step(nb::module_ & m);
void bind_media(nb::module_ & m);
void bind_quantize(nb::module_ & m);
void bind_rpc(nb::module_ & m);

} // namespace paceline
