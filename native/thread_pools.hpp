// ggml's threads for the passes of one context: a pool for passes over one token, and a pool for larger passes.
//
// The CPU backend holds the pool that it computed with last, and reads it once more when a pass brings another. So a pool
// that was replaced lives until a pass has computed with its successor.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ggml-cpu.h"
#include "llama.h"

namespace paceline {

class ThreadPools {
public:
    // From the next pass of `context` on; NotEnoughMemory, and nothing changed, where the system starts fewer threads.
    void attach(llama_context * context, int32_t n_threads, int32_t n_threads_batch);

    // The pools of another context, for one that never computes at the same time: two pairs would wait for the same cores.
    void share(llama_context * context, const ThreadPools & other);

    // Around every pass.
    void before_pass() noexcept { maybe_held_ = true; }
    void after_pass(bool computed) noexcept { computed ? replaced_.clear() : void(); }

private:
    using Pool = std::shared_ptr<ggml_threadpool>;

    void replace(llama_context * context, Pool one, Pool batch);

    int32_t           n_threads_       = 0;
    int32_t           n_threads_batch_ = 0;
    Pool              one_;
    Pool              batch_; // the same pool where the counts are the same
    std::vector<Pool> replaced_;
    bool              maybe_held_ = false; // by the backend: those of now
};

} // namespace paceline
