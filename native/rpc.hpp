// ggml's RPC backend: devices of other hosts, and the server that lends this host's. Without PACELINE_RPC in the build
// every function raises Unsupported. ggml ends the process if a server is lost, so callers check a server before they add
// it, and only add servers in a process that may die.
#pragma once

#include <cstddef>
#include <string>
#include <tuple>
#include <vector>

namespace paceline {

// Major, minor and patch of the protocol: a server must have the same major version and no newer minor one.
std::tuple<int, int, int> rpc_protocol();

// Makes the devices of a server known to ggml, once each. endpoint: "1.2.3.4:50052", of a server that was checked just now;
// address: its name in the error when it is lost: takes or sends nothing for timeout_s while ggml waits for it.
void rpc_add_server(const std::string & endpoint, const std::string & address, double timeout_s);

// Lends devices until the process ends; raises EngineError if the endpoint cannot be bound. cache_dir: empty for none.
void rpc_serve(const std::string & endpoint, const std::string & cache_dir, size_t n_threads,
               const std::vector<std::string> & devices);

// The hash by which the server names a cached tensor, of a whole file; raises EngineError if it cannot be read.
std::string rpc_file_hash(const std::string & path);

} // namespace paceline
