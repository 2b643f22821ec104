// Bitmasks of allowed tokens, filled by other threads while a forward pass runs.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace paceline {

class MaskSlots {
public:
    MaskSlots(size_t num_slots, int32_t n_vocab);
    MaskSlots(const MaskSlots &)             = delete;
    MaskSlots & operator=(const MaskSlots &) = delete;

    size_t num_slots() const noexcept { return states_.size(); }
    size_t num_words() const noexcept { return num_words_; } // words of 32 tokens, bit set = allowed
    int32_t n_vocab() const noexcept { return n_vocab_; }

    // The words of a slot. Written by one thread between clear() and ready(), read by the step after that.
    uint32_t * words(size_t slot) noexcept { return words_.data() + slot * num_words_; }

    void clear(size_t slot); // not filled yet: a step waits for it
    void ready(size_t slot);
    void fail(size_t slot, const std::string & reason);

    // Waits until the slot is filled. Raises SamplingError if it failed or was not filled by the deadline, Aborted if the
    // flag was set meanwhile.
    const uint32_t * wait(size_t slot, std::chrono::steady_clock::time_point deadline, const std::atomic<bool> & aborted);

private:
    enum class State { empty, filled, failed };

    size_t                   num_words_;
    int32_t                  n_vocab_;
    std::vector<uint32_t>    words_;
    std::vector<State>       states_;
    std::vector<std::string> reasons_;
    std::mutex               mutex_;
    std::condition_variable  changed_;
};

} // namespace paceline
