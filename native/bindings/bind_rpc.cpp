#include "bindings.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "rpc.hpp"

namespace paceline {
namespace {

void add_server(const std::string & endpoint, const std::string & address, double timeout_s) {
    Unlocked unlocked;
    rpc_add_server(endpoint, address, timeout_s);
}

void serve(const std::string & endpoint, const std::string & cache_dir, size_t n_threads,
           const std::vector<std::string> & devices) {
    Unlocked unlocked;
    rpc_serve(endpoint, cache_dir, n_threads, devices);
}

std::string file_hash(const std::string & path) {
    Unlocked unlocked;
    return rpc_file_hash(path);
}

} // namespace

void bind_rpc(nb::module_ & m) {
    m.def("rpc_protocol", &rpc_protocol);
    m.def("rpc_add_server", &add_server, nb::arg("endpoint"), nb::arg("address"), nb::arg("timeout_s"));
    m.def("rpc_serve", &serve, nb::arg("endpoint"), nb::arg("cache_dir"), nb::arg("n_threads"), nb::arg("devices"));
    m.def("rpc_file_hash", &file_hash, nb::arg("path"));
}

} // namespace paceline
