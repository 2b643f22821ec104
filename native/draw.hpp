// Candidates for the next token, the samplers that narrow them down, and the draw itself.
//
// The k-th draw of a choice is a pure function of (seed, choice, k): no generator with a state exists, so a sampler can
// be rebuilt in the middle of a text. The winner is found by the Gumbel-max rule (Gumbel 1954; Maddison et al. 2014):
// every candidate gets noise that depends on (seed, choice, k, token id) alone, and the highest sum of logit and noise
// wins, which happens with exactly the candidate's softmax probability. Unlike a walk along the cumulative sum it does
// not depend on the order of the candidates, rounding noise in the logits or one candidate more or less at the edge of a
// truncation rarely changes the outcome, and removing candidates that were not going to win changes nothing.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "llama.h"

namespace paceline {

using Philox = std::array<uint32_t, 4>;

// Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section 4.3.
Philox philox(const Philox & counter, uint32_t key0, uint32_t key1);

// All the randomness of one draw. Streams keep the uses of it apart.
class Noise {
public:
    Noise(uint64_t seed, uint32_t choice, uint32_t k) : seed_(seed), choice_(choice), k_(k) {}

    Philox of_four(uint32_t index) const;   // bits of the tokens 4 * index to 4 * index + 3
    double uniform(uint32_t stream) const; // in (0, 1), independent of every token's bits

private:
    Philox block(uint32_t index, uint32_t stream) const;

    uint64_t seed_;
    uint32_t choice_;
    uint32_t k_;
};

// Candidates with their first `sorted()` entries the highest in order: by logit descending, then id ascending.
class Candidates {
public:
    std::vector<llama_token_data> items;

    void   clear() { items.clear(), sorted_ = 0; }
    size_t size() const { return items.size(); }
    size_t sorted() const { return sorted_; }
    void   set_sorted(size_t count) { sorted_ = count; }

    void sort_first(size_t count);  // makes sorted() at least min(count, size())
    void keep_first(size_t count);  // of the sorted part
    void keep_above(float logit);   // keeps candidates of at least this logit
    void drop_impossible();         // candidates of -inf
    float max_logit() const;
    // Fills p of every item with its softmax probability.
    void softmax();

private:
    size_t sorted_ = 0;
};

// Copies the `count` highest of a row into `out`, sorted; -inf never counts. All of them, by id, if count >= n.
void select_highest(const float * row, size_t n, size_t count, Candidates & out);
// The lowest id among the highest logits; -1 if all are -inf.
int32_t argmax(const float * row, size_t n);

// The samplers named as in llama.cpp, which they follow in meaning. Each needs at least one finite candidate and leaves
// at least one.
void top_k(Candidates & list, int32_t k);                                   // the k highest
void top_p(Candidates & list, float p);                                     // nucleus: Holtzman et al. 2020
void min_p(Candidates & list, float p);                                     // Nguyen et al. 2024
void typical_p(Candidates & list, float p);                                 // Meister et al. 2023
void top_n_sigma(Candidates & list, float n);                               // Tang et al. 2024
void xtc(Candidates & list, float probability, float threshold, double coin); // exclude top choices
void temperature(Candidates & list, float temperature, float range, float exponent); // range > 0: by entropy

// Mirostat (Basu et al. 2021) versions 1 and 2: truncate so that the expected surprise comes near `mu`, in bits.
void mirostat_1(Candidates & list, double mu, int32_t n_vocab);
void mirostat_2(Candidates & list, double mu);

// Moves the probabilities towards tokens near `target` (llama.cpp's adaptive-p).
void adaptive_p(Candidates & list, float target);

// Index of the winner among the candidates.
size_t draw(const Candidates & list, const Noise & noise);
// Index of the highest logit, the lowest id among equals.
size_t highest(const Candidates & list);

} // namespace paceline
