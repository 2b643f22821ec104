#include "bindings.hpp"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "chat_template.hpp"

namespace paceline {

namespace {

std::string to_string(const nb::bytes & text) { return std::string(text.c_str(), text.size()); }

nb::list render(const ChatTemplate & chat_template, const nb::bytes & messages, const nb::bytes & variables,
                bool add_generation_prompt) {
    const std::string       given_messages = to_string(messages), given_variables = to_string(variables);
    std::vector<PromptPart> parts;
    {
        Unlocked unlocked;
        parts = chat_template.render(given_messages, given_variables, add_generation_prompt);
    }
    nb::list list;
    for (const PromptPart & part : parts) {
        list.append(nb::make_tuple(as_text(part.text), part.is_input));
    }
    return list;
}

} // namespace

void bind_chat_template(nb::module_ & m) {
    nb::class_<ChatTemplate>(m, "ChatTemplate")
        .def(
            "__init__",
            [](ChatTemplate * self, const std::shared_ptr<Model> & model, const std::string & source) {
                Unlocked unlocked;
                new (self) ChatTemplate(model, source);
            },
            nb::arg("model"), nb::arg("source"))
        .def_prop_ro("source", [](const ChatTemplate & chat_template) { return as_text(chat_template.source()); })
        .def_prop_ro("bos", [](const ChatTemplate & chat_template) { return as_text(chat_template.bos()); })
        .def_prop_ro("eos", [](const ChatTemplate & chat_template) { return as_text(chat_template.eos()); })
        .def_prop_ro("supports_system", &ChatTemplate::supports_system)
        .def("render", &render, nb::arg("messages"), nb::arg("variables"), nb::arg("add_generation_prompt"));
}

} // namespace paceline
