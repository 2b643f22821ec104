#include "build_info.hpp"

#include <cstdlib>
#include <sstream>

#include "build_facts.hpp"

namespace paceline {

namespace {

std::vector<std::string> lines_of(const std::string & text) {
    std::vector<std::string> lines;
    std::istringstream       stream(text);
    for (std::string line; std::getline(stream, line);) {
        lines.push_back(line);
    }
    return lines;
}

// A path in the home folder is kept with a ~ for it.
std::string path_of(const std::string & fact) {
    const char * home = std::getenv("HOME");
    return home && fact.starts_with("~/") ? home + fact.substr(1) : fact;
}

#ifdef NDEBUG
constexpr bool assertions = false;
#else
constexpr bool assertions = true;
#endif

} // namespace

BuildInfo build_info() {
    return {
        .backend           = facts::backend,
        .backend_reason    = facts::backend_reason,
        .llama_cpp_version = facts::llama_cpp_version,
        .llama_cpp_commit  = facts::llama_cpp_commit,
        .llama_cpp_source  = path_of(facts::llama_cpp_source),
        .build_type        = facts::build_type,
        .sanitizers        = facts::sanitizers,
        .flags             = lines_of(facts::flags),
        .compiler          = facts::compiler,
        .target            = facts::target,
        .cache_dir         = path_of(facts::cache_dir),
        .cache_entry       = path_of(facts::cache_entry),
        .assertions        = assertions,
        .own_attention     = facts::own_attention,
        .rpc               = facts::rpc,
        .own_matmul        = facts::own_matmul,
    };
}

} // namespace paceline
