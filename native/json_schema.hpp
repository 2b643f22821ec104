// From JSON schemas to grammars. llama.cpp translates; a schema on which it would crash, hang or drop a constraint is refused first.
#pragma once

#include <cstddef>
#include <string>

#include "json.h"

namespace paceline {

// Limits of a schema; beyond them is a GrammarError. Time grows with the cube of an object's optional properties: 500
// take 0.1 s, 4,000 over a minute.
struct SchemaLimits {
    static constexpr size_t max_optional   = 500;  // properties of one object, with the objects of an allOf
    static constexpr size_t max_properties = 5000; // of all objects
    static constexpr size_t max_references = 100;  // that lead from one to the next
    static constexpr size_t max_paths      = 10'000; // through alternatives and references; llama.cpp follows each
    static constexpr size_t max_name_bytes = 4096; // of a property
    static constexpr size_t max_patterns   = 200;  // of all schemas of a conversation's tools
};

// The grammar of the texts that are JSON by a JSON schema, itself given as JSON. GrammarError if it is no schema,
// or uses unsupported keywords: no constraint is dropped.
std::string grammar_of_json_schema(const std::string & schema);

// Lets schemas into llama.cpp's chat layer, within limits for all of them together.
class SchemaGuard {
public:
    // The schema; GrammarError, which begins with `place`, if it may not be used. `drops_patterns`: patterns that cannot be
    // translated become any string, as a tool's arguments are better constrained in part than not at all.
    common_json admitted(const common_json & schema, const std::string & place, bool drops_patterns);

private:
    size_t num_properties_ = 0;
    size_t num_patterns_   = 0;
};

} // namespace paceline
