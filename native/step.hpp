// One tick's native work in one call: a forward pass over rows of several sequences, then a draw for each that wants one.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "context.hpp"
#include "masks.hpp"
#include "sampler.hpp"

namespace paceline {

// Rows as parallel arrays, one entry a row, and data of their tokens and samplers as flat arrays in row order.
//
//   row r:  tokens   t0 t1 ... tn-1 | d1 ... dm          num_tokens = n + m, num_drafts = m
//   logits wanted:            tn-1  | d1 ... dm          if it has samplers: one position more than it has drafts
//           scored   t0 t1 ...                           the first num_scored tokens, each against its target
struct StepInput {
    std::span<const int32_t> seq_ids;
    std::span<const int32_t> positions;    // of the row's first token
    std::span<const int32_t> num_tokens;   // at least 1, drafts included
    std::span<const int32_t> num_drafts;   // tokens at the row's end that are only proposed
    std::span<const int32_t> num_samplers; // several draw from one row of logits (then without drafts); 0: no draw
    std::span<const int32_t> num_scored;   // leading tokens with a known and scored successor
    std::span<const int32_t> num_logprobs; // per drawn or scored token: -1 none, 0 its own, k the k most likely too

    std::span<const int32_t> token_ids;  // all tokens of all rows
    std::span<const int32_t> targets;    // sum of num_scored
    std::span<const int32_t> mask_slots; // one per position drawn at: max(num_samplers, num_drafts + 1) a row; -1 none
    std::vector<Sampler *>   samplers;   // sum of num_samplers
    MaskSlots *              masks = nullptr;
    std::chrono::milliseconds mask_timeout{10000}; // for all masks of the step together
};

struct StepError {
    int32_t     sampler; // index into samplers
    std::string kind;
    std::string message;
};

// The k most likely tokens of each position, k = `width` for all, missing tokens -1 and -inf.
struct TopTokens {
    std::vector<float>   own;    // log-probability of the token itself, NaN if not requested
    std::vector<int32_t> ids;    // [n, width]
    std::vector<float>   values; // [n, width]
};

struct StepOutput {
    std::vector<int32_t>   num_drawn; // per sampler: tokens it drew and accepted; with drafts up to num_drafts + 1
    std::vector<int32_t>   token_ids; // sum of num_drawn
    TopTokens              drawn;
    TopTokens              scored;
    int32_t                width = 0;
    std::vector<StepError> errors; // samplers that failed; their earlier draws stand
    std::vector<int32_t>   taken_back; // samplers with nothing of their rows in memory, though their draws stand
    int64_t                decode_us = 0;
    int64_t                sample_us = 0;
};

// Everything is checked before the pass. If the pass fails all rows are restored and no sampler has moved.
// Rejected drafts are taken out of memory again, and if it cannot be cut there (recurrent state) their whole row with them.
// A drawn end-of-generation token ends a burst.
StepOutput step(Context & context, const StepInput & input);

} // namespace paceline
