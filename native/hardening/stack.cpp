#include "stack.hpp"

#include <csignal>
#include <exception>
#include <string>

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include "error.hpp"

namespace paceline {

namespace {

// Address space for a stack, with a page below it that may not be touched. Nothing is committed beforehand.
class StackMemory {
public:
    explicit StackMemory(std::size_t bytes) : page_(static_cast<std::size_t>(sysconf(_SC_PAGESIZE))) {
        size_ = (bytes + page_ - 1) / page_ * page_ + page_;
        base_ = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (base_ == MAP_FAILED) {
            fail("NotEnoughMemory", "no address space for a stack of " + str(bytes) + " bytes");
        }
        mprotect(base_, page_, PROT_NONE);
    }
    ~StackMemory() { munmap(base_, size_); }
    StackMemory(const StackMemory &)             = delete;
    StackMemory & operator=(const StackMemory &) = delete;

    void *      lowest() const noexcept { return static_cast<char *>(base_) + page_; }
    std::size_t size() const noexcept { return size_ - page_; }

private:
    std::size_t page_;
    std::size_t size_;
    void *      base_;
};

struct Job {
    const std::function<void()> & work;
    std::exception_ptr            error;
};

void * run_job(void * pointer) {
    Job & job = *static_cast<Job *>(pointer);
    try {
        job.work();
    } catch (...) {
        job.error = std::current_exception();
    }
    return nullptr;
}

// Signals stay with the threads that were there before; this one starts with all of them blocked.
int start(pthread_t & thread, const pthread_attr_t & attributes, Job & job) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int result = pthread_create(&thread, &attributes, run_job, &job);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return result;
}

} // namespace

void run_on_stack(std::size_t stack_bytes, const std::function<void()> & work) {
    StackMemory    stack(stack_bytes);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstack(&attributes, stack.lowest(), stack.size());
    Job       job{work, nullptr};
    pthread_t thread;
    const int result = start(thread, attributes, job);
    pthread_attr_destroy(&attributes);
    if (result != 0) {
        fail("NotEnoughMemory", "cannot start a thread with a stack of " + str(stack_bytes) + " bytes");
    }
    pthread_join(thread, nullptr);
    if (job.error) {
        std::rethrow_exception(job.error);
    }
}

} // namespace paceline
