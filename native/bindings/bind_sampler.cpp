#include "bindings.hpp"

#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "arrays.hpp"
#include "error.hpp"
#include "json_schema.hpp"
#include "sampler.hpp"

namespace paceline {

namespace {

using Row  = nb::ndarray<const float, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Mask = nb::ndarray<const uint32_t, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void check_length(const char * name, size_t length, size_t wanted) {
    if (length != wanted) {
        fail("InvalidParams",
             std::string(name) + " must have " + str(wanted) + " entries, not " + str(length));
    }
}

// Waits for the sampler's turn, without the GIL.
template <auto Method> auto waiting(const Sampler & self) {
    Unlocked unlocked;
    return (self.*Method)();
}

void bind_options(nb::module_ & m) {
    nb::enum_<SamplerKind>(m, "SamplerKind")
        .value("penalties", SamplerKind::penalties)
        .value("dry", SamplerKind::dry)
        .value("top_n_sigma", SamplerKind::top_n_sigma)
        .value("top_k", SamplerKind::top_k)
        .value("typ_p", SamplerKind::typ_p)
        .value("top_p", SamplerKind::top_p)
        .value("min_p", SamplerKind::min_p)
        .value("xtc", SamplerKind::xtc)
        .value("temperature", SamplerKind::temperature)
        .value("adaptive_p", SamplerKind::adaptive_p)
        .value("infill", SamplerKind::infill);
    nb::class_<PatternTrigger>(m, "PatternTrigger")
        .def(nb::init<std::string, bool>(), nb::arg("pattern"), nb::arg("full"));
    nb::class_<GrammarOptions>(m, "GrammarOptions")
        .def(nb::init<>())
        .def_rw("text", &GrammarOptions::text)
        .def_rw("root", &GrammarOptions::root)
        .def_rw("prefix", &GrammarOptions::prefix)
        .def_rw("lazy", &GrammarOptions::lazy)
        .def_rw("trigger_words", &GrammarOptions::trigger_words)
        .def_rw("trigger_tokens", &GrammarOptions::trigger_tokens)
        .def_rw("trigger_patterns", &GrammarOptions::trigger_patterns);
    nb::class_<SamplerOptions>(m, "SamplerOptions")
        .def(nb::init<>())
        .def_rw("seed", &SamplerOptions::seed)
        .def_rw("choice", &SamplerOptions::choice)
        .def_rw("samplers", &SamplerOptions::samplers)
        .def_rw("temperature", &SamplerOptions::temperature)
        .def_rw("dynatemp_range", &SamplerOptions::dynatemp_range)
        .def_rw("dynatemp_exponent", &SamplerOptions::dynatemp_exponent)
        .def_rw("top_k", &SamplerOptions::top_k)
        .def_rw("top_p", &SamplerOptions::top_p)
        .def_rw("min_p", &SamplerOptions::min_p)
        .def_rw("typical_p", &SamplerOptions::typical_p)
        .def_rw("top_n_sigma", &SamplerOptions::top_n_sigma)
        .def_rw("xtc_probability", &SamplerOptions::xtc_probability)
        .def_rw("xtc_threshold", &SamplerOptions::xtc_threshold)
        .def_rw("mirostat", &SamplerOptions::mirostat)
        .def_rw("mirostat_tau", &SamplerOptions::mirostat_tau)
        .def_rw("mirostat_eta", &SamplerOptions::mirostat_eta)
        .def_rw("adaptive_target", &SamplerOptions::adaptive_target)
        .def_rw("adaptive_decay", &SamplerOptions::adaptive_decay)
        .def_rw("repeat_penalty", &SamplerOptions::repeat_penalty)
        .def_rw("frequency_penalty", &SamplerOptions::frequency_penalty)
        .def_rw("presence_penalty", &SamplerOptions::presence_penalty)
        .def_rw("penalty_last_n", &SamplerOptions::penalty_last_n)
        .def_rw("dry_multiplier", &SamplerOptions::dry_multiplier)
        .def_rw("dry_base", &SamplerOptions::dry_base)
        .def_rw("dry_allowed_length", &SamplerOptions::dry_allowed_length)
        .def_rw("dry_penalty_last_n", &SamplerOptions::dry_penalty_last_n)
        .def_rw("dry_sequence_breakers", &SamplerOptions::dry_sequence_breakers)
        .def_rw("logit_bias", &SamplerOptions::logit_bias)
        .def_rw("bad_words", &SamplerOptions::bad_words)
        .def_rw("allowed_token_ids", &SamplerOptions::allowed_token_ids)
        .def_rw("ignore_eos", &SamplerOptions::ignore_eos)
        .def_rw("min_tokens", &SamplerOptions::min_tokens)
        .def_rw("stop_token_ids", &SamplerOptions::stop_token_ids)
        .def_rw("grammar", &SamplerOptions::grammar)
        .def_rw("sampled_logprobs", &SamplerOptions::sampled_logprobs);
}

} // namespace

void bind_sampler(nb::module_ & m) {
    bind_options(m);
    nb::class_<Logprobs>(m, "Logprobs")
        .def_ro("chosen", &Logprobs::chosen)
        .def_ro("ids", &Logprobs::ids)
        .def_ro("values", &Logprobs::values);
    nb::class_<Draw>(m, "Draw").def_ro("token", &Draw::token).def_ro("logprobs", &Draw::logprobs);
    nb::class_<Sampler>(m, "Sampler")
        .def(nb::new_([](std::shared_ptr<Model> model, const SamplerOptions & options) {
                 Unlocked unlocked;
                 return std::make_shared<Sampler>(std::move(model), options);
             }),
             nb::arg("model"), nb::arg("options"))
        .def("sample",
             [](Sampler & self, const Row & logits, const std::optional<Mask> & mask, int32_t num_logprobs) {
                 check_length("logits", logits.size(), static_cast<size_t>(self.n_vocab()));
                 if (mask) {
                     check_length("mask", mask->size(), self.mask_words());
                 }
                 Unlocked unlocked;
                 return self.sample(logits.data(), mask ? mask->data() : nullptr, num_logprobs);
             },
             nb::arg("logits"), nb::arg("mask").none() = nb::none(), nb::arg("num_logprobs") = -1)
        .def("logprobs",
             [](const Sampler & self, const Row & logits, int32_t chosen, int32_t k) {
                 check_length("logits", logits.size(), static_cast<size_t>(self.n_vocab()));
                 Unlocked unlocked;
                 return self.logprobs(logits.data(), chosen, k);
             },
             nb::arg("logits"), nb::arg("chosen"), nb::arg("k"))
        .def("accept", &Sampler::accept, nb::arg("token_id"), nb::call_guard<Unlocked>())
        .def("accept_prompt",
             [](Sampler & self, const Ints & tokens) {
                 Unlocked unlocked;
                 self.accept_prompt(tokens.data(), tokens.size());
             },
             nb::arg("token_ids"))
        .def("is_eog", &Sampler::is_eog, nb::arg("token_id"))
        .def("token_bytes",
             [](const Sampler & self, int32_t token) {
                 const std::string bytes = self.token_bytes(token);
                 return nb::bytes(bytes.data(), bytes.size());
             },
             nb::arg("token_id"))
        .def("set_grammar_asleep", &Sampler::set_grammar_asleep, nb::arg("asleep"), nb::call_guard<Unlocked>())
        .def("may_end", &waiting<&Sampler::may_end>)
        .def("is_complete", &waiting<&Sampler::is_complete>)
        .def("allowed_mask",
             [](Sampler & self) {
                 std::vector<uint32_t> mask;
                 {
                     Unlocked unlocked;
                     mask = self.allowed_mask();
                 }
                 return to_numpy(std::move(mask));
             })
        .def("reset", &Sampler::reset, nb::call_guard<Unlocked>())
        .def("clone", &Sampler::clone, nb::arg("choice").none() = nb::none(), nb::call_guard<Unlocked>())
        .def("state",
             [](const Sampler & self) {
                 const std::string bytes = waiting<&Sampler::state>(self);
                 return nb::bytes(bytes.data(), bytes.size());
             })
        .def("restore",
             [](Sampler & self, const nb::bytes & state) {
                 const std::string bytes(state.c_str(), state.size());
                 Unlocked unlocked;
                 self.restore(bytes);
             },
             nb::arg("state"))
        .def_prop_ro("seed", &waiting<&Sampler::seed>)
        .def_prop_ro("choice", &waiting<&Sampler::choice>)
        .def_prop_ro("num_generated", &waiting<&Sampler::num_generated>)
        .def_prop_ro("n_vocab", &Sampler::n_vocab);
    m.def("grammar_of_json_schema", &grammar_of_json_schema, nb::arg("schema"), nb::call_guard<Unlocked>());
    m.def("philox", &philox, nb::arg("counter"), nb::arg("key0"), nb::arg("key1"));
}

} // namespace paceline
