// The values that chat templates work with: where they come from, and which part of a text is whose.
#pragma once

#include "jinja/runtime.h"
#include "json.h"

namespace paceline {

inline bool is_text(const jinja::value & value) { return jinja::is_val<jinja::value_string>(value); }

// Whether a part of it came from the conversation. Not for values that hold themselves: charge them first.
bool has_input(const jinja::value & value);

// The value itself, or, of a list or mapping that holds input, its text marked as such.
jinja::value as_marked_text(const jinja::value & value);

// JSON as a value; `is_input`: whether its texts came from the conversation.
jinja::value from_json(const common_json & json, bool is_input);

// Replaces those of the functions of llama.cpp's templates that take time with the square of a text, forget which part of it
// came from the conversation, or end the process. Once for all; any thread.
void tame_builtins();

} // namespace paceline
