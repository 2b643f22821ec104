#include "bindings.hpp"

#include <list>

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "arrays.hpp"
#include "error.hpp"
#include "step.hpp"

namespace paceline {
namespace {

// A step's output as arrays, made once the GIL is back.
struct StepArrays {
    nb::object num_drawn, token_ids;
    nb::object drawn_own, drawn_ids, drawn_values;
    nb::object scored_own, scored_ids, scored_values;
    std::vector<std::tuple<int32_t, std::string, std::string>> errors; // sampler, kind, message
    std::vector<int32_t> taken_back;
    int64_t decode_us, sample_us;
};

StepArrays to_arrays(StepOutput && output) {
    const size_t width  = static_cast<size_t>(output.width);
    const size_t drawn  = output.drawn.own.size();
    const size_t scored = output.scored.own.size();
    StepArrays   arrays;
    arrays.num_drawn     = to_numpy(std::move(output.num_drawn));
    arrays.token_ids     = to_numpy(std::move(output.token_ids));
    arrays.drawn_own     = to_numpy(std::move(output.drawn.own));
    arrays.drawn_ids     = to_numpy(std::move(output.drawn.ids), {drawn, width});
    arrays.drawn_values  = to_numpy(std::move(output.drawn.values), {drawn, width});
    arrays.scored_own    = to_numpy(std::move(output.scored.own));
    arrays.scored_ids    = to_numpy(std::move(output.scored.ids), {scored, width});
    arrays.scored_values = to_numpy(std::move(output.scored.values), {scored, width});
    for (StepError & error : output.errors) {
        arrays.errors.emplace_back(error.sampler, std::move(error.kind), std::move(error.message));
    }
    arrays.taken_back = std::move(output.taken_back);
    arrays.decode_us = output.decode_us;
    arrays.sample_us = output.sample_us;
    return arrays;
}

// Copies of the caller's arrays, for the duration of a step.
class Copies {
public:
    std::span<const int32_t> of(const Ints & array) { return kept_.emplace_back(copied(array)); }

private:
    std::list<std::vector<int32_t>> kept_;
};

StepArrays run_step(Context & context, const Ints & seq_ids, const Ints & positions, const Ints & num_tokens,
                    const Ints & num_drafts, const Ints & num_samplers, const Ints & num_scored, const Ints & num_logprobs,
                    const Ints & token_ids, const Ints & targets, const Ints & mask_slots, const nb::list & samplers,
                    MaskSlots * masks, int64_t mask_timeout_ms) {
    Copies    copies;
    StepInput input;
    input.seq_ids      = copies.of(seq_ids);
    input.positions    = copies.of(positions);
    input.num_tokens   = copies.of(num_tokens);
    input.num_drafts   = copies.of(num_drafts);
    input.num_samplers = copies.of(num_samplers);
    input.num_scored   = copies.of(num_scored);
    input.num_logprobs = copies.of(num_logprobs);
    input.token_ids    = copies.of(token_ids);
    input.targets      = copies.of(targets);
    input.mask_slots   = copies.of(mask_slots);
    input.masks        = masks;
    input.mask_timeout = std::chrono::milliseconds(mask_timeout_ms);
    for (nb::handle sampler : samplers) { // the list keeps them alive meanwhile
        input.samplers.push_back(nb::cast<Sampler *>(sampler));
    }
    StepOutput output;
    {
        Unlocked unlocked;
        output = step(context, input);
    }
    return to_arrays(std::move(output));
}

int32_t int_of(nb::handle value, const char * name) {
    int32_t number = 0;
    if (!PyLong_CheckExact(value.ptr()) || !nb::try_cast(value, number, false)) {
        fail("InvalidType", std::string(name) + " must be integers of 32 bits, not " + nb::repr(value).c_str());
    }
    return number;
}

std::vector<int32_t> ints_of(const nb::list & values, const char * name) {
    std::vector<int32_t> numbers;
    numbers.reserve(nb::len(values));
    for (nb::handle value : values) {
        numbers.push_back(int_of(value, name));
    }
    return numbers;
}

nb::list list_of(nb::handle value, const char * name) {
    if (!nb::isinstance<nb::list>(value)) {
        fail("InvalidType", std::string(name) + " must be a list, not " + nb::repr(value).c_str());
    }
    return nb::borrow<nb::list>(value);
}

// A step without drafts, scores, log-probabilities and masks, as nearly all are: lists in and out, which for a few rows is
// much faster than a dozen arrays.
nb::tuple run_plain_step(Context & context, const nb::list & seq_ids, const nb::list & positions,
                         const nb::list & token_ids, const nb::list & samplers) {
    const size_t num_rows = nb::len(seq_ids);
    if (nb::len(token_ids) != num_rows || nb::len(samplers) != num_rows) {
        fail("InvalidParams", "token_ids and samplers must have an entry a row");
    }
    const std::vector<int32_t> ids = ints_of(seq_ids, "seq_id"), starts = ints_of(positions, "position");
    const std::vector<int32_t> none(num_rows, 0), without(num_rows, -1);
    std::vector<int32_t>       tokens, num_tokens, num_samplers;
    StepInput                  input;
    for (size_t row = 0; row < num_rows; ++row) {
        const std::vector<int32_t> its = ints_of(list_of(token_ids[row], "token_ids of a row"), "token_ids");
        tokens.insert(tokens.end(), its.begin(), its.end());
        num_tokens.push_back(static_cast<int32_t>(its.size()));
        const nb::handle sampler = samplers[row]; // the list keeps it alive meanwhile
        num_samplers.push_back(sampler.is_none() ? 0 : 1);
        if (!sampler.is_none()) {
            input.samplers.push_back(nb::cast<Sampler *>(sampler));
        }
    }
    input.seq_ids      = ids;
    input.positions    = starts;
    input.num_tokens   = num_tokens;
    input.num_drafts   = none;
    input.num_samplers = num_samplers;
    input.num_scored   = none;
    input.num_logprobs = without;
    input.token_ids    = tokens;
    StepOutput output;
    {
        Unlocked unlocked;
        output = step(context, input);
    }
    nb::list drawn; // a token of each sampler; None if it could not draw
    size_t   next = 0;
    for (const int32_t count : output.num_drawn) {
        count ? drawn.append(output.token_ids[next]) : drawn.append(nb::none());
        next += static_cast<size_t>(count);
    }
    nb::list errors;
    for (const StepError & error : output.errors) {
        errors.append(nb::make_tuple(error.sampler, error.kind, error.message));
    }
    return nb::make_tuple(drawn, errors);
}

} // namespace

void bind_step(nb::module_ & m) {
    nb::class_<MaskSlots>(m, "MaskSlots")
        .def(nb::init<size_t, int32_t>(), nb::arg("num_slots"), nb::arg("n_vocab"))
        .def(
            "array",
            [](nb::handle self) {
                MaskSlots & slots = nb::cast<MaskSlots &>(self);
                return nb::cast(nb::ndarray<nb::numpy, uint32_t>(slots.words(0), {slots.num_slots(), slots.num_words()}, self));
            },
            "The words of all slots, uint32 (num_slots, num_words), a view that keeps the slots alive.")
        .def("clear", &MaskSlots::clear, nb::arg("slot"))
        .def("ready", &MaskSlots::ready, nb::arg("slot"))
        .def("fail", &MaskSlots::fail, nb::arg("slot"), nb::arg("reason"));
    nb::class_<StepArrays>(m, "StepArrays")
        .def_ro("num_drawn", &StepArrays::num_drawn)
        .def_ro("token_ids", &StepArrays::token_ids)
        .def_ro("drawn_own", &StepArrays::drawn_own)
        .def_ro("drawn_ids", &StepArrays::drawn_ids)
        .def_ro("drawn_values", &StepArrays::drawn_values)
        .def_ro("scored_own", &StepArrays::scored_own)
        .def_ro("scored_ids", &StepArrays::scored_ids)
        .def_ro("scored_values", &StepArrays::scored_values)
        .def_ro("errors", &StepArrays::errors)
        .def_ro("taken_back", &StepArrays::taken_back)
        .def_ro("decode_us", &StepArrays::decode_us)
        .def_ro("sample_us", &StepArrays::sample_us);
    const auto ints = [](const char * name) { return nb::arg(name).noconvert(); };
    m.def("step", &run_step, nb::arg("context"), ints("seq_ids"), ints("positions"), ints("num_tokens"), ints("num_drafts"),
          ints("num_samplers"), ints("num_scored"), ints("num_logprobs"), ints("token_ids"), ints("targets"),
          ints("mask_slots"), nb::arg("samplers"), nb::arg("masks").none(), nb::arg("mask_timeout_ms"));
    m.def("plain_step", &run_plain_step, nb::arg("context"), nb::arg("seq_ids"), nb::arg("positions"), nb::arg("token_ids"),
          nb::arg("samplers"), "Returns what each sampler drew, None where it could not, and the errors.");
}

} // namespace paceline
