// A few threads that share the items of one loop with the caller.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace paceline {

class WorkerPool {
public:
    // In addition to the caller; fewer if the system starts no more threads.
    explicit WorkerPool(size_t num_workers);
    ~WorkerPool();
    WorkerPool(const WorkerPool &)             = delete;
    WorkerPool & operator=(const WorkerPool &) = delete;

    size_t num_workers() const noexcept { return threads_.size(); }

    // Runs task(0) ... task(count - 1), each once, and returns when all have ended. The task must not throw.
    // One caller at a time.
    void run(size_t count, const std::function<void(size_t)> & task);

private:
    void work();
    void take_items();

    std::vector<std::thread>              threads_;
    std::mutex                            mutex_;
    std::condition_variable               wake_;
    std::condition_variable               done_;
    const std::function<void(size_t)> *   task_ = nullptr;
    size_t                                count_ = 0;
    size_t                                num_busy_ = 0;
    size_t                                round_ = 0;
    bool                                  stopping_ = false;
    std::atomic<size_t>                   next_{0};
};

} // namespace paceline
