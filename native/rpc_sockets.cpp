#if PACELINE_RPC

#include "rpc_sockets.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>

#include "ggml.h"

namespace paceline {
namespace {

constexpr double  hello_timeout_s = 10;     // for a peer that connects to our server and says nothing
constexpr ssize_t hello_bytes     = 1 + 8 + 24;
constexpr int     keepalive_idle_s = 30, keepalive_interval_s = 10, keepalive_count = 3;

std::atomic<double> timeout_s{0};
std::atomic<bool>   serving{false};
std::atomic<int>    greeted_by{-1};  // the socket of our server's peer
std::atomic<ssize_t> greeted_bytes{0};
std::string         servers; // all that were added, as their addresses were given, before threads talk to them
std::map<std::string, std::string> given; // addresses by endpoints

void set_wait(int socket, double seconds) {
    timeval wait{};
    wait.tv_sec  = static_cast<time_t>(std::floor(seconds));
    wait.tv_usec = static_cast<suseconds_t>((seconds - std::floor(seconds)) * 1e6);
    ::setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof(wait));
    ::setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof(wait));
}

// So that the end of a host is noticed that could not say goodbye.
void keep_alive(int socket) {
    const auto set = [socket](int level, int name, int value) {
        ::setsockopt(socket, level, name, &value, sizeof(value));
    };
    set(SOL_SOCKET, SO_KEEPALIVE, 1);
#ifdef TCP_KEEPIDLE
    set(IPPROTO_TCP, TCP_KEEPIDLE, keepalive_idle_s);
    set(IPPROTO_TCP, TCP_KEEPINTVL, keepalive_interval_s);
    set(IPPROTO_TCP, TCP_KEEPCNT, keepalive_count);
#endif
}

std::string peer_of(int socket) {
    sockaddr_in address{};
    socklen_t   size = sizeof(address);
    char        host[INET_ADDRSTRLEN] = "";
    if (getpeername(socket, reinterpret_cast<sockaddr *>(&address), &size) != 0 ||
        !inet_ntop(AF_INET, &address.sin_addr, host, sizeof(host))) {
        return "";
    }
    return std::string(host) + ":" + std::to_string(ntohs(address.sin_port));
}

// Who this thread talks to: a connection that was reset has no peer any more. Each thread of ggml has one connection at a time.
thread_local int         talks_by = -1;
thread_local std::string talks_to;

void note_peer(int socket) {
    if (socket != talks_by || talks_to.empty()) {
        talks_by = socket;
        talks_to = peer_of(socket);
    }
}

// To stderr, from which an engine's front reads the last words of its worker.
void say_lost(const std::string & endpoint, const std::string & why) {
    const auto          found = given.find(endpoint);
    const std::string & name  = found != given.end() ? found->second : endpoint.empty() ? servers : endpoint;
    std::fprintf(stderr, "the RPC server %s was lost: %s\n", name.c_str(), why.c_str());
    std::fflush(stderr);
}

std::string reason_of(ssize_t result, int error) {
    if (result == 0) {
        return "it closed the connection";
    }
    if (error == EAGAIN || error == EWOULDBLOCK) {
        return "it was silent for " + std::to_string(std::lround(timeout_s)) + " s (rpc_timeout_s; a pass that takes longer needs more)";
    }
    return std::strerror(error);
}

thread_local bool said = false;

void note_loss(int socket, ssize_t result) {
    const int error = errno;
    note_peer(socket);
    say_lost(talks_to, reason_of(result, error));
    said  = true; // ggml aborts in this thread
    errno = error;
}

// Instead of ggml's own lines: they do not say which server, and a reply that is malformed is seen by ggml alone.
void on_abort(const char * message) {
    static const char * const before_endpoint[] = {"Failed to connect to ", "RPC handshake failed for "};
    for (const char * words : before_endpoint) {
        if (const char * found = std::strstr(message, words)) {
            const char * endpoint = found + std::strlen(words);
            say_lost(std::string(endpoint, std::strcspn(endpoint, " \n")), "no connection, though it had just replied");
            said = true;
        }
    }
    if (!said && std::strstr(message, "Remote RPC server")) {
        say_lost(talks_to, "its reply is malformed");
    }
    std::fprintf(stderr, "%s\n", message);
    std::fflush(stderr);
}

void note_greeting(int socket, ssize_t result) {
    if (socket != greeted_by || result <= 0) {
        return;
    }
    greeted_bytes += result;
    if (greeted_bytes >= hello_bytes) {
        greeted_by = -1;
        set_wait(socket, 0);
    }
}

} // namespace

void watch_rpc_server(const std::string & endpoint, const std::string & address, double seconds) {
    timeout_s       = seconds;
    given[endpoint] = address;
    servers += (servers.empty() ? "" : ",") + address;
    ggml_set_abort_callback(on_abort);
}

void set_rpc_serving() { serving = true; }

} // namespace paceline

// Called by ggml's transport.cpp instead of the functions of the same name: see cmake/rpc_build/bounded_sockets.h.
extern "C" {

int paceline_rpc_setsockopt(int socket, int level, int name, const void * value, socklen_t size) {
    using namespace paceline;
    const int result = ::setsockopt(socket, level, name, value, size);
    if (level == IPPROTO_TCP && name == TCP_NODELAY) { // of every new connection, on both sides
        keep_alive(socket);
        if (serving) {
            greeted_bytes = 0;
            greeted_by    = socket;
            set_wait(socket, hello_timeout_s);
        } else {
            talks_by = -1;
            set_wait(socket, timeout_s);
        }
    }
    return result;
}

ssize_t paceline_rpc_recv(int socket, void * data, size_t size, int flags) {
    ssize_t result;
    do {
        result = ::recv(socket, data, size, flags);
    } while (result < 0 && errno == EINTR);
    if (paceline::serving) {
        paceline::note_greeting(socket, result);
    } else if (result <= 0 && size > 0) {
        paceline::note_loss(socket, result);
    } else {
        paceline::note_peer(socket);
    }
    return result;
}

ssize_t paceline_rpc_send(int socket, const void * data, size_t size, int flags) {
    ssize_t result;
    do {
        result = ::send(socket, data, size, flags);
    } while (result < 0 && errno == EINTR);
    if (result < 0 && !paceline::serving) {
        paceline::note_loss(socket, result);
    } else if (!paceline::serving) {
        paceline::note_peer(socket);
    }
    return result;
}
}

#endif
