#include "bindings.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "arrays.hpp"
#include "step.hpp"

namespace paceline {
namespace {

// A step's output as arrays, made once the GIL is back.
struct StepArrays {
    nb::object num_drawn, token_ids;
    nb::object drawn_own, drawn_ids, drawn_values;
    nb::object scored_own, scored_ids, scored_values;
    std::vector<std::tuple<int32_t, std::string, std::string>> errors; // sampler, kind, message
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
    arrays.decode_us = output.decode_us;
    arrays.sample_us = output.sample_us;
    return arrays;
}

StepArrays run_step(Context & context, const Ints & seq_ids, const Ints & positions, const Ints & num_tokens,
                    const Ints & num_drafts, const Ints & num_samplers, const Ints & num_scored, const Ints & num_logprobs,
                    const Ints & token_ids, const Ints & targets, const Ints & mask_slots, const nb::list & samplers,
                    MaskSlots * masks, int64_t mask_timeout_ms) {
    StepInput input;
    const auto owned_seq_ids = copied(seq_ids);
    input.seq_ids = owned_seq_ids;
    const auto owned_positions = copied(positions);
    input.positions = owned_positions;
    const auto owned_num_tokens = copied(num_tokens);
    input.num_tokens = owned_num_tokens;
    const auto owned_num_drafts = copied(num_drafts);
    input.num_drafts = owned_num_drafts;
    const auto owned_num_samplers = copied(num_samplers);
    input.num_samplers = owned_num_samplers;
    const auto owned_num_scored = copied(num_scored);
    input.num_scored = owned_num_scored;
    const auto owned_num_logprobs = copied(num_logprobs);
    input.num_logprobs = owned_num_logprobs;
    const auto owned_token_ids = copied(token_ids);
    input.token_ids = owned_token_ids;
    const auto owned_targets = copied(targets);
    input.targets = owned_targets;
    const auto owned_mask_slots = copied(mask_slots);
    input.mask_slots = owned_mask_slots;
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
        .def_ro("decode_us", &StepArrays::decode_us)
        .def_ro("sample_us", &StepArrays::sample_us);
    m.def("step", &run_step, nb::arg("context"), nb::arg("seq_ids").noconvert(), nb::arg("positions").noconvert(),
          nb::arg("num_tokens").noconvert(), nb::arg("num_drafts").noconvert(), nb::arg("num_samplers").noconvert(),
          nb::arg("num_scored").noconvert(), nb::arg("num_logprobs").noconvert(), nb::arg("token_ids").noconvert(),
          nb::arg("targets").noconvert(), nb::arg("mask_slots").noconvert(), nb::arg("samplers"),
          nb::arg("masks").none(), nb::arg("mask_timeout_ms"));
}

} // namespace paceline
