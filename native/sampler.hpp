// Chooses the next token from a row of logits, by the options of one request, and remembers the chosen tokens.
//
// A row goes through: logit bias and bans, masks, the samplers in the requested order, the draw (draw.hpp). Temperature
// 0 takes the highest logit after biases, penalties and masks. `sample` chooses and changes nothing; `accept` must be
// called exactly once with each generated token and advances the history, the grammar and k.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "draw.hpp"
#include "grammar.hpp"
#include "llama.h"
#include "logprobs.hpp"
#include "model.hpp"

namespace paceline {

enum class SamplerKind { penalties, dry, top_n_sigma, top_k, typ_p, top_p, min_p, xtc, temperature, adaptive_p, infill };

// Checked by the constructor of Sampler as far as a wrong value could do harm; the ranges are those of params.py.
struct SamplerOptions {
    uint64_t seed   = 0;
    uint32_t choice = 0; // index among the `n` choices of one prompt

    std::vector<SamplerKind> samplers = {SamplerKind::penalties, SamplerKind::dry,   SamplerKind::top_n_sigma,
                                         SamplerKind::top_k,     SamplerKind::typ_p, SamplerKind::top_p,
                                         SamplerKind::min_p,     SamplerKind::xtc,   SamplerKind::temperature};

    float   temperature       = 0.8f; // 0: greedy
    float   dynatemp_range    = 0.0f; // 0: off
    float   dynatemp_exponent = 1.0f;
    int32_t top_k             = 40;    // 0: off
    float   top_p             = 0.95f; // 1: off
    float   min_p             = 0.05f; // 0: off
    float   typical_p         = 1.0f;  // 1: off
    float   top_n_sigma       = 0.0f;  // 0: off
    float   xtc_probability   = 0.0f;  // 0: off
    float   xtc_threshold     = 0.1f;

    int32_t mirostat        = 0; // 0, 1, 2; takes the place of all samplers but temperature
    float   mirostat_tau    = 5.0f;
    float   mirostat_eta    = 0.1f;
    float   adaptive_target = -1.0f; // negative: off
    float   adaptive_decay  = 0.9f;

    float   repeat_penalty    = 1.0f;
    float   frequency_penalty = 0.0f;
    float   presence_penalty  = 0.0f;
    int32_t penalty_last_n    = 64; // over prompt and generated; -1: all of them

    float                    dry_multiplier     = 0.0f; // 0: off
    float                    dry_base           = 1.75f;
    int32_t                  dry_allowed_length = 2;
    int32_t                  dry_penalty_last_n = 64; // as penalty_last_n
    std::vector<std::string> dry_sequence_breakers = {"\n", ":", "\"", "*"};

    std::vector<std::pair<int32_t, float>> logit_bias;
    std::vector<std::string>               bad_words;
    std::optional<std::vector<int32_t>>    allowed_token_ids;
    bool                                   ignore_eos = false;
    int32_t                                min_tokens = 0; // until then no end of generation and no stop token
    std::vector<int32_t>                   stop_token_ids;

    std::optional<GrammarOptions> grammar;

    bool sampled_logprobs = false; // logprobs of the distribution drawn from, instead of the model's
};

struct Draw {
    int32_t                 token;
    std::optional<Logprobs> logprobs;
};

// Safe to call from several threads, one at a time inside.
class Sampler {
public:
    Sampler(std::shared_ptr<Model> model, const SamplerOptions & options);
    Sampler(const Sampler &)             = delete;
    Sampler & operator=(const Sampler &) = delete;

    // Draws from one row of n_vocab logits, which it copies first: a concurrent write to it changes the draw and corrupts
    // nothing. `mask`: null, or mask_words() words, bit set =
    // allowed. num_logprobs: -1 none, 0 the chosen token's alone, k the k most likely as well. Does not accept: the same
    // row gives the same token again. NoTokenAllowed if nothing is allowed, SamplingError if a logit is NaN or +inf; nothing changed.
    Draw sample(const float * logits, const uint32_t * mask, int32_t num_logprobs);

    // A generated token: history, grammar, k and the state of mirostat and adaptive-p move on. InvalidParams if it is no
    // token or the grammar forbids it; nothing changed.
    void accept(int32_t token);
    // Tokens before the generated ones: history for penalties, DRY and bad words; grammar and k stay.
    void accept_prompt(const int32_t * tokens, size_t n);
    bool is_eog(int32_t token) const;
    std::string token_bytes(int32_t token) const; // its bytes, control tokens included

    // Which tokens may come next, by everything but the mask of `sample`: mask_words() words.
    std::vector<uint32_t> allowed_mask();
    // log-softmax of a row: the chosen token's and the k highest.
    Logprobs logprobs(const float * logits, int32_t chosen, int32_t k) const;

    void                     reset(); // to before the prompt; the seed stays
    std::shared_ptr<Sampler> clone(std::optional<uint32_t> choice) const;
    std::string              state() const;
    void                     restore(const std::string & state); // StateError; nothing changed

    // Whether the next tokens are thinking, which a lazy grammar that has not begun pays no attention to.
    void set_grammar_asleep(bool asleep);
    bool may_end() const;     // whether the text follows the grammar as it is; true without one
    bool is_complete() const; // whether the grammar allows nothing more

    uint64_t seed() const;
    uint32_t choice() const;
    uint32_t num_generated() const; // k
    int32_t  n_vocab() const { return n_vocab_; }
    size_t   mask_words() const { return (static_cast<size_t>(n_vocab_) + 31) / 32; }

    const std::shared_ptr<Model> & model() const { return model_; }

private:
    struct SamplerFree {
        void operator()(llama_sampler * sampler) const { llama_sampler_free(sampler); }
    };
    using LlamaSampler = std::unique_ptr<llama_sampler, SamplerFree>;

    // The state that accept changes and reset, state and restore handle.
    struct Progress {
        uint64_t             seed   = 0;
        uint32_t             choice = 0;
        uint32_t             k      = 0;
        std::vector<int32_t> history;   // prompt and generated, as far back as any sampler needs
        std::vector<int32_t> generated; // all of them if there is a grammar, which is rebuilt from them
        double               mu              = 0;
        double               adaptive_sum    = 0; // of p, each step weighing `decay` of the next
        double               adaptive_weight = 0;
    };
    // Results of sample for the accept of the same token.
    struct Pending {
        int32_t token = -1;
        double  value = 0; // mirostat: surprise in bits; adaptive-p: probability before the transform
    };

    Sampler(const Sampler & other, std::optional<uint32_t> choice);

    static constexpr size_t everything = std::numeric_limits<size_t>::max(); // a window without an end

    void check_token(const char * field, int32_t token) const;
    void check_options() const;
    void build_chain();
    void build_bans();
    void ban_words();
    void build_dry();

    bool uses(SamplerKind kind) const;
    bool adaptive() const;
    bool truncates() const;
    bool starts_with_top_k() const;
    bool grammar_on_list() const;

    const float * edit(const uint32_t * mask, bool keeps_given);
    void          ban(float * row) const;
    float         penalized(float logit, int32_t count) const;
    void          edit_penalties(float * row) const;
    void          edit_dry(float * row);
    void          apply_dry();

    int32_t choose(const float * row, bool want_list, Pending & pending);
    const float * without_false_begin(const float * row, int32_t token, bool any, uint64_t & work_left);
    int32_t choose_greedy(const float * row);
    void    select_allowed(const float * row, size_t count);
    int32_t draw_allowed(bool want_list);
    int32_t draw_by_strategy(Pending & pending);
    void    require_some() const;
    void    run(SamplerKind kind, const float * row);
    void    penalize();
    void    infill(const float * row);
    Logprobs list_logprobs(int32_t token, int32_t k);

    void                   remember(int32_t token);
    void                   count(size_t i);
    Progress               initial(uint64_t seed, uint32_t choice) const;
    Noise                  noise() const { return {progress_.seed, progress_.choice, progress_.k}; }
    std::optional<Grammar> grammar_after(const std::vector<int32_t> & generated) const;
    void                   go_to(Progress progress, Pending pending);
    uint64_t               fingerprint() const;

    std::shared_ptr<Model>            model_;
    SamplerOptions                    options_;
    int32_t                           n_vocab_;
    bool                              greedy_ = false;
    size_t                            window_ = 0;  // tokens of history that any sampler needs
    std::vector<SamplerKind>          chain_;       // the samplers that have an effect with these options
    size_t                            leading_ = 0; // how many at its head change a few logits only
    std::vector<int32_t>              banned_;      // always
    std::vector<int32_t>              ends_;        // until min_tokens
    std::vector<uint32_t>             allowed_;     // mask; empty: all
    std::vector<std::vector<int32_t>> bad_sequences_;

    mutable std::mutex                   mutex_;
    Progress                             progress_;
    Pending                              pending_;
    std::unordered_map<int32_t, int32_t> counts_; // of tokens within penalty_last_n
    std::optional<Grammar>               grammar_;
    LlamaSampler                         dry_;
    LlamaSampler                         infill_;
    std::vector<float>                   given_; // the row of this draw,
    std::vector<float>                   row_;   // and with biases, bans and leading penalties in it
    Candidates                           list_;
};

} // namespace paceline
