#include "rpc.hpp"

#include <array>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <set>

#include "device.hpp"
#include "error.hpp"

#if PACELINE_RPC
#include "ggml-rpc.h"
#include "rpc_sockets.hpp"
#endif

namespace paceline {

#if PACELINE_RPC

std::tuple<int, int, int> rpc_protocol() {
    return {RPC_PROTO_MAJOR_VERSION, RPC_PROTO_MINOR_VERSION, RPC_PROTO_PATCH_VERSION};
}

void rpc_add_server(const std::string & endpoint, const std::string & address, double timeout_s) {
    static std::mutex            mutex;
    static std::set<std::string> added;
    std::lock_guard<std::mutex>  lock(mutex);
    if (added.contains(endpoint)) {
        return;
    }
    watch_rpc_server(endpoint, address, timeout_s);
    ggml_backend_reg_t server = ggml_backend_rpc_add_server(endpoint.c_str());
    if (!server) {
        fail("RpcServerUnavailable", "the RPC server " + address + " has no devices");
    }
    ggml_backend_register(server);
    added.insert(endpoint);
}

void rpc_serve(const std::string & endpoint, const std::string & cache_dir, size_t n_threads,
               const std::vector<std::string> & devices) {
    std::vector<ggml_backend_dev_t> found = find_devices(devices);
    set_rpc_serving();
    ggml_backend_rpc_start_server(endpoint.c_str(), cache_dir.empty() ? nullptr : cache_dir.c_str(), n_threads,
                                  found.size() - 1, found.data());
    fail("EngineError", "the RPC server on " + endpoint + " could not be started, or accepts no connections any more");
}

#else

namespace {

[[noreturn]] void refuse() {
    fail("Unsupported", "this build of paceline has no RPC backend; build it with PACELINE_RPC=ON");
}

} // namespace

std::tuple<int, int, int> rpc_protocol() { refuse(); }
void rpc_add_server(const std::string &, const std::string &, double) { refuse(); }
void rpc_serve(const std::string &, const std::string &, size_t, const std::vector<std::string> &) { refuse(); }

#endif

// FNV-1a of 64 bits.
std::string rpc_file_hash(const std::string & path) {
    std::FILE * file = std::fopen(path.c_str(), "rb");
    if (!file) {
        fail("EngineError", "cannot read " + path);
    }
    static constexpr size_t     part = size_t{1} << 20;
    std::vector<unsigned char>  data(part);
    uint64_t                    hash = 0xcbf29ce484222325;
    while (const size_t size = std::fread(data.data(), 1, part, file)) {
        for (size_t i = 0; i < size; ++i) {
            hash = (hash ^ data[i]) * 0x100000001b3;
        }
    }
    const bool failed = std::ferror(file) != 0;
    std::fclose(file);
    if (failed) {
        fail("EngineError", "cannot read " + path);
    }
    std::array<char, 17> text{};
    std::snprintf(text.data(), text.size(), "%016" PRIx64, hash);
    return text.data();
}

} // namespace paceline
