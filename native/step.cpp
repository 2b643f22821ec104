#include "step.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>

#include "error.hpp"
#include "worker_pool.hpp"

namespace paceline {
namespace {

using Clock = std::chrono::steady_clock;

int64_t microseconds_since(Clock::time_point start) {
    return std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - start).count();
}

// A sampler's work in this step: draws at `first_output`, then along the drafts while they are right.
struct DrawJob {
    size_t                    sampler;      // index into the input's samplers
    size_t                    row;
    int32_t                   first_output; // batch index of the first logits row
    std::span<const int32_t>  drafts;
    std::span<const int32_t>  mask_slots;   // one for each position it may draw at
    std::vector<Draw>         draws;
    std::string               error_kind;
    std::string               error;
    bool                      is_taken_back = false; // all of its row
};

struct ScoreJob {
    int32_t  output;
    int32_t  target;
    int32_t  k;
    Logprobs logprobs;
};

class Step {
public:
    Step(Context & context, const StepInput & input) : context_(context), input_(input) {
        check_rows();
        check_samplers();
        lay_out();
    }

    StepOutput run() {
        std::lock_guard<std::mutex> lock(context_.mutex());
        const Context::Call         call(context_);
        deadline_ = Clock::now() + input_.mask_timeout;
        const Batch                 batch{input_.token_ids, positions_, seq_ids_, wants_output_};
        context_.check_batch(batch);
        StepOutput output;
        const auto start = Clock::now();
        context_.decode_locked(batch, drafting_);
        output.decode_us    = microseconds_since(start);
        const auto sampling = Clock::now();
        sample();
        cut_rejected_drafts();
        output.sample_us = microseconds_since(sampling);
        collect(output);
        return output;
    }

private:
    size_t num_rows() const { return input_.seq_ids.size(); }

    void check_rows() const {
        const size_t rows = num_rows();
        for (std::span<const int32_t> field : {input_.positions, input_.num_tokens, input_.num_drafts, input_.num_samplers,
                                               input_.num_scored, input_.num_logprobs}) {
            if (field.size() != rows) {
                fail("InvalidParams", "every array of rows must have " + str(rows) +
                                          " entries as seq_ids has, not " + str(field.size()));
            }
        }
        std::set<int32_t> seen;
        int64_t           tokens = 0, samplers = 0, scored = 0, slots = 0;
        for (size_t r = 0; r < rows; ++r) {
            check_row(r);
            if (!seen.insert(input_.seq_ids[r]).second) {
                fail("InvalidParams", "sequence " + str(input_.seq_ids[r]) + " has more than one row");
            }
            tokens += input_.num_tokens[r];
            samplers += input_.num_samplers[r];
            scored += input_.num_scored[r];
            slots += num_positions(r);
        }
        check_total("token_ids", input_.token_ids.size(), tokens, "num_tokens");
        check_total("samplers", input_.samplers.size(), samplers, "num_samplers");
        check_total("targets", input_.targets.size(), scored, "num_scored");
        if (!input_.mask_slots.empty()) {
            check_total("mask_slots", input_.mask_slots.size(), slots, "positions drawn at");
        }
    }

    static void check_total(const char * name, size_t size, int64_t wanted, const char * by) {
        if (static_cast<int64_t>(size) != wanted) {
            fail("InvalidParams", std::string(name) + " must have " + str(wanted) + " entries, the sum of " + by + ", not " +
                                      str(size));
        }
    }

    void check_row(size_t r) const {
        const std::string at     = "row " + str(r) + ": ";
        const int32_t     tokens = input_.num_tokens[r], drafts = input_.num_drafts[r], samplers = input_.num_samplers[r];
        if (tokens < 1) {
            fail("InvalidParams", at + "num_tokens must be at least 1, not " + str(tokens));
        }
        if (drafts < 0 || drafts >= tokens) {
            fail("InvalidParams", at + "num_drafts must be in [0, num_tokens = " + str(tokens) + "), not " + str(drafts));
        }
        if (samplers < 0 || (drafts > 0 && samplers != 1)) {
            fail("InvalidParams", at + "num_samplers must be " + (drafts > 0 ? "1, since the row has drafts" : "at least 0") +
                                      ", not " + str(samplers));
        }
        if (drafts > 0 && !context_.draft_refusal().empty()) {
            fail("Unsupported", at + "drafts do not go with this model: " + context_.draft_refusal());
        }
        if (input_.num_scored[r] < 0 || input_.num_scored[r] > tokens - drafts) {
            fail("InvalidParams", at + "num_scored must be in [0, " + str(tokens - drafts) + "], not " + str(input_.num_scored[r]));
        }
        const int32_t most = std::min(context_.model()->n_vocab(), max_logprobs);
        if (input_.num_logprobs[r] < -1 || input_.num_logprobs[r] > most) {
            fail("InvalidParams", at + "num_logprobs must be in [-1, " + str(most) + "], not " + str(input_.num_logprobs[r]));
        }
    }

    void check_samplers() const {
        std::set<const Sampler *> seen;
        for (const Sampler * sampler : input_.samplers) {
            if (!seen.insert(sampler).second) {
                fail("InvalidParams", "the same sampler stands twice in samplers; each draws once a step");
            }
            if (sampler->n_vocab() != context_.model()->n_vocab()) {
                fail("InvalidParams", "a sampler of a vocabulary of " + str(sampler->n_vocab()) + " tokens cannot draw for one of " +
                                          str(context_.model()->n_vocab()));
            }
        }
        for (size_t i = 0; i < input_.targets.size(); ++i) {
            if (input_.targets[i] < 0 || input_.targets[i] >= context_.model()->n_vocab()) {
                fail("InvalidParams", "targets[" + str(i) + "] must be in [0, " +
                                          str(context_.model()->n_vocab()) + "), not " + str(input_.targets[i]));
            }
        }
        for (size_t i = 0; i < input_.mask_slots.size(); ++i) {
            const int32_t slot = input_.mask_slots[i];
            if (slot >= 0 && (!input_.masks || static_cast<size_t>(slot) >= input_.masks->num_slots() ||
                              input_.masks->n_vocab() != context_.model()->n_vocab())) {
                fail("InvalidParams", "mask_slots[" + str(i) + "] is " + str(slot) +
                                          ", and masks has no such slot for this vocabulary");
            }
        }
    }

    // Positions that a row draws at: its last known token and every draft.
    int64_t num_positions(size_t r) const {
        return input_.num_samplers[r] == 0 ? 0 : std::max(input_.num_samplers[r], input_.num_drafts[r] + 1);
    }

    void lay_out() {
        positions_.reserve(input_.token_ids.size());
        seq_ids_.reserve(input_.token_ids.size());
        wants_output_.assign(input_.token_ids.size(), 0);
        size_t token = 0, sampler = 0, target = 0, slot = 0;
        for (size_t r = 0; r < num_rows(); ++r) {
            for (int32_t i = 0; i < input_.num_tokens[r]; ++i) {
                positions_.push_back(input_.positions[r] + i);
                seq_ids_.push_back(input_.seq_ids[r]);
            }
            for (int32_t i = 0; i < input_.num_scored[r]; ++i) {
                wants_output_[token + static_cast<size_t>(i)] = 1;
                scores_.push_back({static_cast<int32_t>(token) + i, input_.targets[target++], std::max(input_.num_logprobs[r], 0), {}});
            }
            lay_out_draws(r, token, sampler, slot);
            token += static_cast<size_t>(input_.num_tokens[r]);
            sampler += static_cast<size_t>(input_.num_samplers[r]);
            slot += static_cast<size_t>(num_positions(r));
        }
    }

    void lay_out_draws(size_t r, size_t first_token, size_t first_sampler, size_t first_slot) {
        if (input_.num_samplers[r] == 0) {
            return;
        }
        const size_t drafts = static_cast<size_t>(input_.num_drafts[r]);
        if (drafts > 0) {
            drafting_.push_back(input_.seq_ids[r]);
        }
        const size_t output = first_token + static_cast<size_t>(input_.num_tokens[r]) - drafts - 1;
        std::fill_n(wants_output_.begin() + static_cast<ptrdiff_t>(output), drafts + 1, 1);
        for (size_t s = 0; s < static_cast<size_t>(input_.num_samplers[r]); ++s) {
            DrawJob job{first_sampler + s, r, static_cast<int32_t>(output), input_.token_ids.subspan(output + 1, drafts), {}, {}, {}, {}, false};
            if (!input_.mask_slots.empty()) {
                job.mask_slots = input_.mask_slots.subspan(first_slot + s, drafts + 1);
            }
            draws_.push_back(std::move(job));
        }
    }

    void sample() {
        // llama.cpp sorts its outputs lazily on the first access, which must not happen in two threads at once.
        rows_.assign(input_.token_ids.size(), nullptr);
        for (size_t i = 0; i < rows_.size(); ++i) {
            if (wants_output_[i]) {
                rows_[i] = context_.logits_row(static_cast<int32_t>(i));
            }
        }
        const std::function<void(size_t)> task = [this](size_t item) {
            if (item < draws_.size()) {
                draw(draws_[item]);
            } else {
                score(scores_[item - draws_.size()]);
            }
        };
        const size_t items = draws_.size() + scores_.size();
        if (items * static_cast<size_t>(context_.model()->n_vocab()) >= min_parallel_logits) {
            context_.workers().run(items, task);
        } else {
            for (size_t item = 0; item < items; ++item) {
                task(item);
            }
        }
    }

    void score(ScoreJob & job) const {
        try {
            job.logprobs = row_logprobs(rows_[static_cast<size_t>(job.output)], static_cast<size_t>(context_.model()->n_vocab()),
                                        job.target, job.k);
        } catch (const std::exception &) {
            job.logprobs.chosen = std::numeric_limits<float>::quiet_NaN(); // as the logits were NaN
        }
    }

    void draw(DrawJob & job) const {
        Sampler & sampler = *input_.samplers[job.sampler];
        try {
            for (size_t i = 0; i <= job.drafts.size(); ++i) {
                const int32_t    slot = job.mask_slots.empty() ? -1 : job.mask_slots[i];
                const uint32_t * mask = slot < 0 ? nullptr : input_.masks->wait(static_cast<size_t>(slot), deadline_, context_.aborted());
                Draw drawn = sampler.sample(rows_[static_cast<size_t>(job.first_output) + i], mask, input_.num_logprobs[job.row]);
                sampler.accept(drawn.token);
                const int32_t token = drawn.token;
                job.draws.push_back(std::move(drawn));
                if (sampler.is_eog(token) || (i < job.drafts.size() && token != job.drafts[i])) {
                    break;
                }
            }
        } catch (const Error & error) {
            job.error_kind = error.kind();
            job.error      = error.what();
        } catch (const std::exception & error) {
            job.error_kind = "SamplingError";
            job.error      = error.what();
        }
    }

    // Draft i stays in memory if the token drawn at its place was the draft itself.
    void cut_rejected_drafts() {
        for (DrawJob & job : draws_) {
            if (job.drafts.empty()) {
                continue;
            }
            size_t right = 0;
            while (right < job.draws.size() && right < job.drafts.size() && job.draws[right].token == job.drafts[right]) {
                ++right;
            }
            if (right < job.drafts.size()) {
                const int32_t first = input_.positions[job.row] + input_.num_tokens[job.row] - input_.num_drafts[job.row];
                const Context::TakenBack taken = context_.take_back_locked(input_.seq_ids[job.row], first + static_cast<int32_t>(right));
                job.is_taken_back              = taken == Context::TakenBack::row;
                if (taken == Context::TakenBack::sequence) {
                    job.error_kind = "DecodeError";
                    job.error      = "the wrong drafts could not be taken back from sequence " + str(input_.seq_ids[job.row]) +
                                ", which is now empty" + (input_.token_ids.size() > context_.n_ubatch() ? ": its window has "
                                "gone on too far in a pass of more than n_ubatch = " + str(context_.n_ubatch()) + " tokens" : "");
                }
            }
        }
    }

    void collect(StepOutput & output) const {
        for (size_t r = 0; r < num_rows(); ++r) {
            output.width = std::max(output.width, input_.num_logprobs[r]);
        }
        for (const DrawJob & job : draws_) {
            output.num_drawn.push_back(static_cast<int32_t>(job.draws.size()));
            for (const Draw & draw : job.draws) {
                output.token_ids.push_back(draw.token);
                add(output.drawn, draw.logprobs ? &*draw.logprobs : nullptr, output.width);
            }
            if (job.is_taken_back) {
                output.taken_back.push_back(static_cast<int32_t>(job.sampler));
            }
            if (!job.error_kind.empty()) {
                output.errors.push_back({static_cast<int32_t>(job.sampler), job.error_kind, job.error});
            }
        }
        for (const ScoreJob & job : scores_) {
            add(output.scored, &job.logprobs, output.width);
        }
    }

    static void add(TopTokens & to, const Logprobs * logprobs, int32_t width) {
        const size_t start = to.ids.size();
        to.own.push_back(logprobs ? logprobs->chosen : std::numeric_limits<float>::quiet_NaN());
        to.ids.resize(start + static_cast<size_t>(width), -1);
        to.values.resize(start + static_cast<size_t>(width), -std::numeric_limits<float>::infinity());
        if (logprobs) {
            std::copy(logprobs->ids.begin(), logprobs->ids.end(), to.ids.begin() + static_cast<ptrdiff_t>(start));
            std::copy(logprobs->values.begin(), logprobs->values.end(), to.values.begin() + static_cast<ptrdiff_t>(start));
        }
    }

    // Below this a thread costs more to wake than it saves.
    static constexpr size_t  min_parallel_logits = 400000;
    static constexpr int32_t max_logprobs        = 1000;

    Context &                  context_;
    const StepInput &          input_;
    std::vector<int32_t>       positions_;
    std::vector<int32_t>       seq_ids_;
    std::vector<uint8_t>       wants_output_;
    std::vector<int32_t>       drafting_; // sequences
    std::vector<DrawJob>       draws_;
    std::vector<ScoreJob>      scores_;
    std::vector<const float *> rows_;
    Clock::time_point          deadline_;
};

} // namespace

StepOutput step(Context & context, const StepInput & input) { return Step(context, input).run(); }

} // namespace paceline
