// Values of chat templates, and which parts of a text are input: from the conversation and not from the template.
#pragma once

#include "jinja/runtime.h"
#include "json.h"

namespace paceline {

inline bool is_text(const jinja::value & value) { return jinja::is_val<jinja::value_string>(value); }

// Whether a part of it is input. Charge a value first that may contain itself: this function recurses.
bool has_input(const jinja::value & value);

// The value itself, or, of a list or mapping that holds input, its text marked as input.
jinja::value as_marked_text(const jinja::value & value);

// Converts JSON to a value; `is_input`: whether its texts are input.
jinja::value from_json(const common_json & json, bool is_input);

} // namespace paceline
