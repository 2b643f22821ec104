// From JSON schemas to grammars. llama.cpp translates; a schema on which it would crash, hang or drop a constraint is refused first.
#pragma once

#include <cstddef>
#include <string>

namespace paceline {

// What a schema may be; beyond it is a GrammarError. Time grows with the cube of an object's optional properties: 500
// take 0.1 s, 4,000 over a minute.
struct SchemaLimits {
    static constexpr size_t max_optional   = 500;  // properties of one object, with what allOf puts together
    static constexpr size_t max_properties = 5000; // of all objects
    static constexpr size_t max_references = 100;  // that lead from one to the next
};

// The grammar of the texts that are JSON by a JSON schema, itself given as JSON. GrammarError where the schema is none,
// or uses what the translation does not support: no constraint is dropped.
std::string grammar_of_json_schema(const std::string & schema);

} // namespace paceline
