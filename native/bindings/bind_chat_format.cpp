#include "bindings.hpp"

#include <string>
#include <vector>

#include <nanobind/stl/map.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "chat_format.hpp"
#include "chat_parser.hpp"

namespace paceline {

namespace {

std::string to_string(const nb::bytes & text) { return std::string(text.c_str(), text.size()); }

nb::list texts(const std::vector<std::string> & values) {
    nb::list list;
    for (const std::string & value : values) {
        list.append(as_text(value));
    }
    return list;
}

nb::list parts(const ChatPrompt & prompt) {
    nb::list list;
    for (const PromptPart & part : prompt.parts) {
        list.append(nb::make_tuple(as_text(part.text), part.is_input));
    }
    return list;
}

nb::list triggers(const ChatPrompt & prompt) {
    nb::list list;
    for (const ChatTrigger & trigger : prompt.triggers) {
        list.append(nb::make_tuple(trigger.type, as_text(trigger.value)));
    }
    return list;
}

ChatPrompt apply(const ChatFormat & format, const nb::bytes & request) {
    const std::string given = to_string(request);
    Unlocked          unlocked;
    return format.apply(given);
}

nb::tuple parse(const ChatParser & parser, const nb::bytes & text, bool is_partial) {
    const std::string given = to_string(text);
    ParsedMessage     parsed;
    {
        Unlocked unlocked;
        parsed = parser.parse(given, is_partial);
    }
    nb::list calls;
    for (const ToolCall & call : parsed.tool_calls) {
        calls.append(nb::make_tuple(as_text(call.id), as_text(call.name), as_text(call.arguments)));
    }
    return nb::make_tuple(as_text(parsed.content), as_text(parsed.reasoning), calls);
}

void bind_prompt(nb::module_ & m) {
    nb::class_<ChatPrompt>(m, "ChatPrompt")
        .def_prop_ro("parts", &parts)
        .def_prop_ro("generation_prompt", [](const ChatPrompt & prompt) { return as_text(prompt.generation_prompt); })
        .def_ro("format", &ChatPrompt::format)
        .def_prop_ro("parser", [](const ChatPrompt & prompt) { return as_text(prompt.parser); })
        .def_prop_ro("grammar", [](const ChatPrompt & prompt) { return as_text(prompt.grammar); })
        .def_ro("is_grammar_lazy", &ChatPrompt::is_grammar_lazy)
        .def_prop_ro("triggers", &triggers)
        .def_prop_ro("preserved_tokens", [](const ChatPrompt & prompt) { return texts(prompt.preserved_tokens); })
        .def_prop_ro("stops", [](const ChatPrompt & prompt) { return texts(prompt.stops); })
        .def_ro("supports_thinking", &ChatPrompt::supports_thinking)
        .def_prop_ro("thinking_start", [](const ChatPrompt & prompt) { return as_text(prompt.thinking_start); })
        .def_prop_ro("thinking_ends", [](const ChatPrompt & prompt) { return texts(prompt.thinking_ends); });
}

} // namespace

void bind_chat_format(nb::module_ & m) {
    bind_prompt(m);
    nb::class_<ChatFormat>(m, "ChatFormat")
        .def(
            "__init__",
            [](ChatFormat * self, const std::shared_ptr<Model> & model, const std::string & source) {
                Unlocked unlocked;
                new (self) ChatFormat(model, source);
            },
            nb::arg("model"), nb::arg("source"))
        .def_prop_ro("source", [](const ChatFormat & format) { return as_text(format.source()); })
        .def_prop_ro("bos", [](const ChatFormat & format) { return as_text(format.bos()); })
        .def_prop_ro("eos", [](const ChatFormat & format) { return as_text(format.eos()); })
        .def_prop_ro("capabilities", &ChatFormat::capabilities)
        .def("apply", &apply, nb::arg("request"));
    nb::class_<ChatParser>(m, "ChatParser")
        .def(nb::init<const std::string &, const std::string &, const std::string &>(), nb::arg("parser"), nb::arg("format"),
             nb::arg("generation_prompt"))
        .def("parse", &parse, nb::arg("text"), nb::arg("is_partial"));
}

} // namespace paceline
