// How long the sockets of ggml's RPC backend wait.
#pragma once

#include <string>

namespace paceline {

// Before connecting to a server: one that takes or sends nothing for timeout_s is lost, and its address, as it was given, is
// written to stderr before ggml ends the process.
void watch_rpc_server(const std::string & endpoint, const std::string & address, double timeout_s);

// Whether this process lends its devices: then a peer may be silent for as long as it likes, once it has said hello.
void set_rpc_serving();

} // namespace paceline
