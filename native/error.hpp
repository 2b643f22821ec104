// The exception of the native core, and helpers to build its messages. `kind` is the name of a class in paceline/errors.py.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace paceline {

class Error : public std::runtime_error {
public:
    Error(const char * kind, const std::string & message) : std::runtime_error(message), kind_(kind) {}

    const char * kind() const noexcept { return kind_; }

private:
    const char * kind_; // a string literal
};

[[noreturn]] inline void fail(const char * kind, const std::string & message) { throw Error(kind, message); }

// A number in a message.
template <typename Number>
    requires std::is_arithmetic_v<Number>
std::string str(Number value) {
    return std::to_string(value);
}

} // namespace paceline
