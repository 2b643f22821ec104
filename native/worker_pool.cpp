#include "worker_pool.hpp"

#include <exception>

namespace paceline {

WorkerPool::WorkerPool(size_t num_workers) {
    threads_.reserve(num_workers);
    try {
        while (threads_.size() < num_workers) {
            threads_.emplace_back([this] { work(); });
        }
    } catch (const std::exception &) { // a limit of the system on threads, or on memory for their stacks
    }
}

WorkerPool::~WorkerPool() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread & thread : threads_) {
        thread.join();
    }
}

void WorkerPool::take_items() {
    for (size_t item = next_++; item < count_; item = next_++) {
        (*task_)(item);
    }
}

void WorkerPool::run(size_t count, const std::function<void(size_t)> & task) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        task_     = &task;
        count_    = count;
        next_     = 0;
        num_busy_ = threads_.size();
        ++round_;
    }
    wake_.notify_all();
    take_items();
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [&] { return num_busy_ == 0; });
    task_ = nullptr;
}

void WorkerPool::work() {
    size_t seen = 0;
    while (true) {
        {
            std::unique_lock<std::mutex> lock(mutex_);
            wake_.wait(lock, [&] { return stopping_ || round_ != seen; });
            if (stopping_) {
                return;
            }
            seen = round_;
        }
        take_items();
        std::lock_guard<std::mutex> lock(mutex_);
        if (--num_busy_ == 0) {
            done_.notify_one();
        }
    }
}

} // namespace paceline
