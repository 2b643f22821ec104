// The source and options of this module's build, fixed when it was compiled. Folders are the building machine's, except
// that a path in the builder's home folder is reported in the user's.
#pragma once

#include <string>
#include <vector>

namespace paceline {

struct BuildInfo {
    std::string              backend;           // cpu, cuda, metal, vulkan or hip
    std::string              backend_reason;    // why it was chosen
    std::string              llama_cpp_version; // "unknown" if the tree has none
    std::string              llama_cpp_commit;  // likewise
    std::string              llama_cpp_source;  // folder of the source tree
    std::string              build_type;        // Release, Debug, ...
    std::string              sanitizers;        // empty, or for example "address,undefined"
    std::vector<std::string> flags;             // NAME=VALUE, as given to llama.cpp's build
    std::string              compiler;          // name and version
    std::string              target;            // system and processor
    std::string              cache_dir;         // folder of built libraries
    std::string              cache_entry;       // the linked version
    bool                     assertions;        // whether debug assertions are compiled in
    bool                     own_attention;     // whether attention on a CPU may be computed by us
    bool                     rpc;               // whether ggml's RPC backend is linked
    bool                     own_matmul;        // likewise matrix products
};

BuildInfo build_info();

} // namespace paceline
