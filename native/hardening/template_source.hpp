// Checks the source of a chat template before llama.cpp parses it: its parser recurses along nested blocks and brackets,
// and its lexer takes time with the square of Windows line ends.
#pragma once

#include <string>
#include <vector>

#include "jinja/lexer.h"

namespace paceline {

// Returns the source with the line breaks that the lexer would make of \r\n and \r. TemplateError beyond
// TemplateLimits::max_bytes.
std::string checked_template_source(const std::string & source);

// TemplateError if blocks or the expressions of a tag nest deeper than the parser survives. `tokens`: of the lexer.
void check_template_nesting(const std::vector<jinja::token> & tokens);

} // namespace paceline
