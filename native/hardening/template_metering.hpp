// Rewrites a parsed chat template so that executing it is counted against the TemplateBudget.
#pragma once

#include "jinja/runtime.h"

namespace paceline {

// Every statement and call becomes a step, and every operation that builds text is charged before it does. Also keeps
// the marks of input when llama.cpp would convert a list to text. Call once, before the template is executed.
void meter_program(jinja::program & program);

} // namespace paceline
