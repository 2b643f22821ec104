// Functions of text in chat templates: in linear time, charged to the TemplateBudget, with the marks of input kept.
#pragma once

#include <cstddef>
#include <string>

#include "jinja/runtime.h"

namespace paceline::template_text {

// Fails as Jinja does for wrong arguments; the template ends.
[[noreturn]] void refuse(const std::string & message);

// An argument that must be a text. `function`: its name, for the error.
const jinja::string & text_at(const jinja::func_args & args, std::size_t index, const char * function);

// Looks up the attribute of a mapping or the element of a list; undefined if it has none.
jinja::value attribute_of(const jinja::value & element, const jinja::value & name);

jinja::value split(const jinja::func_args & args, bool from_end);
jinja::value replace(const jinja::func_args & args);
jinja::value join(const jinja::func_args & args);
jinja::value slice(const jinja::func_args & args, const jinja::func_handler & plain); // `plain`: llama.cpp's

} // namespace paceline::template_text
