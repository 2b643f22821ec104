#include "process.hpp"

#include <atomic>
#include <mutex>
#include <string>
#include <thread>

#include "error.hpp"

namespace paceline {
namespace {

using Clock = std::chrono::steady_clock;

std::atomic<bool> ending{false};
std::atomic<bool> gone{false}; // the interpreter, for every thread but the ending thread
std::atomic<int>  num_calls{0};
std::atomic<int>  num_coming_back{0}; // of these, on their way to the interpreter
thread_local int  depth     = 0;     // calls of this thread: a log handler may call again
thread_local bool ends_here = false; // this thread ends the process

std::mutex             came_back_mutex;
std::vector<pthread_t> came_back; // since the end began

// A child has one thread, the forking thread.
void count_anew() {
    num_calls       = depth;
    num_coming_back = 0;
}

[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, count_anew);

void wait_until_at_most(const std::atomic<int> & count, int wanted, std::chrono::milliseconds patience) {
    const auto deadline = Clock::now() + patience;
    while (count > wanted && Clock::now() < deadline) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

} // namespace

void Home::check(const char * what) const {
    if (!here()) {
        fail("Closed", std::string(what) + " was made before a fork, and its threads are not in this process: make it in "
                                           "the child, or start processes with multiprocessing's \"spawn\"");
    }
}

NativeCall::NativeCall() {
    ++num_calls; // before the look at `ending`: either end_calls() sees this call or this call sees the end
    if (ending) {
        --num_calls;
        fail("Closed", "the process is ending");
    }
    ++depth;
}

void NativeCall::come_back() noexcept {
    ++num_coming_back;
    coming_back_ = true;
    if (gone && !ends_here) {
        --num_coming_back;
        while (true) {
            pause();
        }
    }
    if (ending) {
        std::lock_guard<std::mutex> lock(came_back_mutex);
        came_back.push_back(pthread_self());
    }
}

NativeCall::~NativeCall() {
    if (coming_back_) {
        --num_coming_back;
    }
    --depth;
    --num_calls;
}

bool process_is_ending() noexcept { return ending.load(std::memory_order_relaxed); }

std::vector<pthread_t> end_calls(std::chrono::milliseconds patience) {
    if (gone) {
        return {};
    }
    ends_here = true;
    ending    = true;
    wait_until_at_most(num_calls, depth, patience);
    gone = true;
    wait_until_at_most(num_coming_back, 0, std::chrono::seconds(1)); // threads that were about to take the lock
    std::lock_guard<std::mutex> lock(came_back_mutex);
    return came_back;
}

} // namespace paceline
