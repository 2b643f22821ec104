#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "build_info.hpp"

namespace paceline {

namespace {

nb::dict to_dict(const BuildInfo & info) {
    nb::dict dict;
    dict["backend"]           = info.backend;
    dict["backend_reason"]    = info.backend_reason;
    dict["llama_cpp_version"] = info.llama_cpp_version;
    dict["llama_cpp_commit"]  = info.llama_cpp_commit;
    dict["llama_cpp_source"]  = info.llama_cpp_source;
    dict["build_type"]        = info.build_type;
    dict["sanitizers"]        = info.sanitizers;
    dict["flags"]             = info.flags;
    dict["compiler"]          = info.compiler;
    dict["target"]            = info.target;
    dict["cache_dir"]         = info.cache_dir;
    dict["cache_entry"]       = info.cache_entry;
    dict["assertions"]        = info.assertions;
    dict["own_attention"]     = info.own_attention;
    dict["rpc"]               = info.rpc;
    dict["own_matmul"]        = info.own_matmul;
    return dict;
}

} // namespace

void bind_build_info(nb::module_ & m) {
    m.def("build_info", [] { return to_dict(build_info()); },
          "What this module was built from and how, fixed when it was compiled.");
}

} // namespace paceline
