// The one exception of the native core. `kind` is the name of a class in paceline/errors.py.
#pragma once

#include <stdexcept>
#include <string>
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

} // namespace paceline
