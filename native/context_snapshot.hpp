// Shared by passes over tokens and over embeddings: restoring a sequence.
#pragma once

#include "context.hpp"

namespace paceline {

// A sequence's positions before a batch, and the data to restore it.
struct Context::Snapshot {
    int32_t              seq_id;
    int32_t              next; // the first position of the batch in it
    int32_t              last; // that it held; below next - 1 if the batch leaves positions out
    bool                 shadowed = false;
    std::vector<uint8_t> window; // state of the sliding window and recurrent layers, if the batch can overwrite the window
    int32_t              copy = -1; // a sequence that shares all that it held; -1: none
};

} // namespace paceline
