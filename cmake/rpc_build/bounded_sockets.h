// Included before ggml's transport.cpp: its sockets are set up, read and written by the core (native/rpc_sockets.cpp), which
// bounds how long they wait and says which server was lost. ggml itself waits without end, and then only says that one was.
#pragma once

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/types.h>

extern "C" {
int     paceline_rpc_setsockopt(int socket, int level, int name, const void * value, socklen_t size);
ssize_t paceline_rpc_recv(int socket, void * data, size_t size, int flags);
ssize_t paceline_rpc_send(int socket, const void * data, size_t size, int flags);
}

#define setsockopt paceline_rpc_setsockopt
#define recv       paceline_rpc_recv
#define send       paceline_rpc_send
