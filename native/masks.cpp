#include "masks.hpp"

#include <algorithm>

#include "error.hpp"

namespace paceline {

MaskSlots::MaskSlots(size_t num_slots, int32_t n_vocab)
    : num_words_((static_cast<size_t>(n_vocab) + 31) / 32),
      n_vocab_(n_vocab),
      words_(num_slots * num_words_, 0),
      states_(num_slots, State::empty),
      reasons_(num_slots) {}

void MaskSlots::clear(size_t slot) {
    std::lock_guard<std::mutex> lock(mutex_);
    states_.at(slot) = State::empty;
}

void MaskSlots::ready(size_t slot) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        states_.at(slot) = State::filled;
    }
    changed_.notify_all();
}

void MaskSlots::fail(size_t slot, const std::string & reason) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        states_.at(slot)  = State::failed;
        reasons_.at(slot) = reason;
    }
    changed_.notify_all();
}

const uint32_t * MaskSlots::wait(size_t slot, std::chrono::steady_clock::time_point deadline, const std::atomic<bool> & aborted) {
    constexpr auto               poll_interval = std::chrono::milliseconds(5); // latency of an abort
    std::unique_lock<std::mutex> lock(mutex_);
    while (states_.at(slot) == State::empty) {
        const auto now = std::chrono::steady_clock::now();
        if (aborted) {
            paceline::fail("Aborted", "the step was aborted while it waited for mask slot " + str(slot));
        }
        if (now >= deadline) {
            paceline::fail("SamplingError", "mask slot " + str(slot) + " was not filled in time");
        }
        changed_.wait_until(lock, std::min(deadline, now + poll_interval));
    }
    if (states_[slot] == State::failed) {
        paceline::fail("SamplingError", "mask slot " + str(slot) + " failed: " + reasons_[slot]);
    }
    return words(slot);
}

} // namespace paceline
