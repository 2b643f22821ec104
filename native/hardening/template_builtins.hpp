// Replacements for builtin functions of llama.cpp's Jinja interpreter.
#pragma once

namespace paceline {

// Replaces the builtins that take time with the square of a text, forget which part of it is input, or end the process.
// Takes effect once for the whole process; any thread may call it.
void harden_builtins();

} // namespace paceline
