#include "thread_pools.hpp"

#include <string>

#include "error.hpp"
#include "process.hpp"
#include "worker_pool.hpp"

namespace paceline {
namespace {

// A fork has none of the threads that its copy of a pool would wait for.
struct FreeAtHome {
    Home home;
    void operator()(ggml_threadpool * pool) const noexcept { home.here() ? ggml_threadpool_free(pool) : void(); }
};

std::shared_ptr<ggml_threadpool> start(int32_t count) {
    const size_t num_workers = static_cast<size_t>(count) - 1;
    if (WorkerPool(num_workers).num_workers() < num_workers) { // ggml would assert
        fail("NotEnoughMemory", "the system does not let this process start " + str(count) +
                                    " threads; lower n_threads and n_threads_batch");
    }
    ggml_threadpool_params params = ggml_threadpool_params_default(count);
    params.poll                   = 1; // idle threads spin for a millisecond or two between passes, then sleep
    ggml_threadpool * pool        = ggml_threadpool_new(&params);
    if (!pool) {
        fail("NotEnoughMemory", "cannot start " + str(count) + " threads");
    }
    return {pool, FreeAtHome{}};
}

} // namespace

void ThreadPools::attach(llama_context * context, int32_t n_threads, int32_t n_threads_batch) {
    Pool one   = start(n_threads);
    Pool batch = n_threads_batch == n_threads ? one : start(n_threads_batch);
    llama_set_n_threads(context, n_threads, n_threads_batch);
    replace(context, std::move(one), std::move(batch));
    n_threads_ = n_threads;
    n_threads_batch_ = n_threads_batch;
}

void ThreadPools::share(llama_context * context, const ThreadPools & other) {
    llama_set_n_threads(context, other.n_threads_, other.n_threads_batch_);
    replace(context, other.one_, other.batch_);
    n_threads_       = other.n_threads_;
    n_threads_batch_ = other.n_threads_batch_;
}

void ThreadPools::replace(llama_context * context, Pool one, Pool batch) {
    if (maybe_held_) {
        replaced_.insert(replaced_.end(), {one_, batch_});
    }
    llama_attach_threadpool(context, one.get(), batch.get());
    one_        = std::move(one);
    batch_      = std::move(batch);
    maybe_held_ = false;
}

} // namespace paceline
