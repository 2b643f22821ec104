// Forks of this process, and its end.
#pragma once

#include <chrono>
#include <vector>

#include <pthread.h>
#include <unistd.h>

namespace paceline {

// The process that an object was made in. A fork copies the object but none of its threads.
class Home {
public:
    bool here() const noexcept { return pid_ == getpid(); }
    // Raises Closed in another process. `what`: "the context".
    void check(const char * what) const;

private:
    pid_t pid_ = getpid();
};

// A call from Python into the core. The end of the process waits for running calls.
class NativeCall {
public:
    NativeCall(); // raises Closed once the process is ending
    ~NativeCall();
    NativeCall(const NativeCall &)             = delete;
    NativeCall & operator=(const NativeCall &) = delete;

    // Call before the GIL is acquired again. Once the interpreter is finalizing, Python would end this thread there, through
    // C++ frames that cannot be unwound: then this does not return.
    void come_back() noexcept;

private:
    bool coming_back_ = false;
};

bool process_is_ending() noexcept;

// For the thread that ends the process, without the GIL: refuses new calls, ends running passes with Aborted, and waits
// up to `patience` for calls to return; later calls never return. Returns the threads of returned calls.
std::vector<pthread_t> end_calls(std::chrono::milliseconds patience);

} // namespace paceline
