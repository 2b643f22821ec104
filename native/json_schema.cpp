#include "json_schema.hpp"

#include <algorithm>
#include <exception>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "error.hpp"
#include "hardening/stack.hpp"
#include "json-schema-to-grammar.h"

namespace paceline {

namespace {

using Node = common_chat_schema;

// llama.cpp follows chains of references, and names with long runs of unusual characters, by recursion.
constexpr size_t stack_bytes = size_t{512} << 20;

template <typename T> const T & as(const Node & node) { return static_cast<const T &>(node); }

[[noreturn]] void refuse(const std::string & what) { fail("GrammarError", "json_schema: " + what); }

// Whether llama.cpp can translate a pattern. It turns others into the rule of any string and only warns on standard error;
// this detects that it requests that rule, and stops before the warning.
class Verdict : public std::exception {
public:
    explicit Verdict(bool taken) : taken(taken) {}
    bool taken;
};

bool is_supported(const Node & pattern) {
    try {
        build_grammar([&](const common_grammar_builder & builder) {
            const std::string rule = builder.add_schema("p", pattern);
            throw Verdict(!rule.empty() && builder.add_rule(rule, "string") != rule);
        });
    } catch (const Verdict & verdict) {
        return verdict.taken;
    }
    return false;
}

// Every node of a schema once, references included.
class Walk {
public:
    void   check(const Node & root);
    size_t num_properties() const { return properties_; }

private:
    size_t paths(const Node & node);
    void visit(const Node & node);
    void visit_object(const common_chat_schema_object & object);
    void visit_all_of(const common_chat_schema_all_of & all);
    void put(const common_chat_schema_ptr & node);
    void count(size_t optional, size_t all);
    const Node & target(const Node & node) const;

    std::set<const Node *>    seen_;
    std::vector<const Node *> todo_;
    std::map<const Node *, size_t> paths_; // 1 while it is being counted: a cycle
    size_t                    properties_ = 0;
};

void Walk::check(const Node & root) {
    todo_ = {&root};
    while (!todo_.empty()) {
        const Node * node = todo_.back();
        todo_.pop_back();
        if (seen_.insert(node).second) {
            visit(*node);
            if (paths(*node) > SchemaLimits::max_paths) {
                refuse("its alternatives and references lead to more than " + str(SchemaLimits::max_paths) + " combinations");
            }
        }
    }
}

size_t Walk::paths(const Node & node) {
    const auto [known, is_new] = paths_.emplace(&node, 1);
    if (!is_new) {
        return known->second;
    }
    const auto sum = [&](const auto & children) {
        size_t total = 0;
        for (const auto & child : children) {
            total = std::min(total + paths(*child), SchemaLimits::max_paths + 1);
        }
        return total;
    };
    size_t total = 1;
    if (node.kind() == Node::KIND_REF) {
        total = paths(target(node));
    } else if (node.kind() == Node::KIND_ANY_OF) {
        total = sum(as<common_chat_schema_any_of>(node).children);
    } else if (node.kind() == Node::KIND_ALL_OF) {
        total = sum(as<common_chat_schema_all_of>(node).children);
    }
    return paths_[&node] = std::max(total, size_t{1});
}

void Walk::put(const common_chat_schema_ptr & node) {
    if (node) {
        todo_.push_back(node.get());
    }
}

// The end of a chain of references.
const Node & Walk::target(const Node & node) const {
    const Node * at = &node;
    for (size_t i = 0; at->kind() == Node::KIND_REF; ++i) {
        const auto & reference = as<common_chat_schema_ref>(*at);
        if (i == SchemaLimits::max_references || !reference.target) {
            refuse("the $ref " + reference.ref + " leads to another, and so on, " +
                   (reference.target ? "more than " + str(SchemaLimits::max_references) + " times"
                                     : std::string("without an end")));
        }
        at = reference.target;
    }
    return *at;
}

void Walk::count(size_t optional, size_t all) {
    properties_ += all;
    if (optional > SchemaLimits::max_optional) {
        refuse("an object has " + str(optional) + " optional properties (at most " +
               str(SchemaLimits::max_optional) + "); make some of them required");
    }
    if (properties_ > SchemaLimits::max_properties) {
        refuse("its objects have more than " + str(SchemaLimits::max_properties) + " properties in all");
    }
}

void Walk::visit_object(const common_chat_schema_object & object) {
    size_t optional = 0;
    for (const auto & property : object.properties) {
        if (property.name.size() > SchemaLimits::max_name_bytes) {
            refuse("the name of a property has " + str(property.name.size()) + " bytes (at most " +
                   str(SchemaLimits::max_name_bytes) + ")");
        }
        optional += !property.required;
        put(property.schema);
    }
    put(object.additional_properties);
    count(optional, object.properties.size());
}

// llama.cpp makes one object of the properties of all objects in it; properties of an anyOf's alternatives are optional.
void Walk::visit_all_of(const common_chat_schema_all_of & all) {
    size_t     optional = 0, properties = 0;
    const auto component = [&](const Node & given, bool required) {
        const Node & node = target(given);
        todo_.push_back(&node);
        if (node.kind() == Node::KIND_OBJECT) {
            properties += as<common_chat_schema_object>(node).properties.size();
            optional += required ? 0 : as<common_chat_schema_object>(node).properties.size();
        }
    };
    for (const auto & child : all.children) {
        if (child->kind() != Node::KIND_ANY_OF) {
            component(*child, true);
            continue;
        }
        for (const auto & alternative : as<common_chat_schema_any_of>(*child).children) {
            component(*alternative, false);
        }
    }
    count(optional, properties);
}

void Walk::visit(const Node & node) {
    switch (node.kind()) {
        case Node::KIND_REF: todo_.push_back(&target(node)); break;
        case Node::KIND_ANY_OF:
            for (const auto & child : as<common_chat_schema_any_of>(node).children) {
                put(child);
            }
            break;
        case Node::KIND_ALL_OF: visit_all_of(as<common_chat_schema_all_of>(node)); break;
        case Node::KIND_STRING: {
            const std::string & pattern = as<common_chat_schema_string>(node).pattern;
            if (!pattern.empty() && !is_supported(node)) {
                refuse("the pattern '" + pattern + "' is none, or cannot be turned into a grammar: it must begin with ^ " +
                       "and end with $, and look-around, classes such as \\d and anchors within are not known");
            }
            break;
        }
        case Node::KIND_ARRAY: put(as<common_chat_schema_array>(node).items); break;
        case Node::KIND_TUPLE:
            for (const auto & item : as<common_chat_schema_tuple>(node).items) {
                put(item);
            }
            break;
        case Node::KIND_OBJECT: visit_object(as<common_chat_schema_object>(node)); break;
        default: break;
    }
}

// llama.cpp reads a schema with several types once for each, with all that is in it: kinds that read the same parts
// would double the work with every level.
void check_types(const common_json & types, bool all_of) {
    std::set<std::string> names;
    for (const common_json & type : types) {
        if (type.is_string() && !names.insert(type.get<std::string>()).second) {
            refuse("type names '" + type.get<std::string>() + "' twice");
        }
    }
    if (all_of && names.count("object") && names.count("string")) {
        refuse("allOf together with the types object and string is not known; write anyOf with one type each");
    }
}

void check_all_types(const common_json & value) {
    if (value.is_object()) {
        if (value.contains("type") && value.at("type").is_array()) {
            check_types(value.at("type"), value.contains("allOf"));
        }
        for (const auto & [name, child] : value.items()) {
            check_all_types(child);
        }
    } else if (value.is_array()) {
        for (const common_json & child : value) {
            check_all_types(child);
        }
    }
}

std::string translate(const std::string & schema) {
    const common_json json = common_json::parse(schema);
    check_all_types(json);
    const common_chat_schema_document document = common_chat_schema_from_json(json);
    Walk().check(*document.root);
    return json_schema_to_grammar(document);
}

bool is_supported_pattern(const std::string & pattern) {
    const common_chat_schema_document document =
        common_chat_schema_from_json(common_json{{"type", "string"}, {"pattern", pattern}});
    return document.root->kind() != Node::KIND_STRING || is_supported(*document.root);
}

common_json without_patterns(const common_json & schema, size_t & num_patterns);

// Schemas by names of properties or definitions, which may be words that schemas use.
common_json named_without_patterns(const common_json & schemas, size_t & num_patterns) {
    common_json object = common_json::object();
    for (const auto & [name, schema] : schemas.items()) {
        object[name] = schema.is_boolean() && schema.get<bool>() ? common_json::object() : without_patterns(schema, num_patterns);
    }
    return object;
}

// A copy without the patterns that cannot be translated. Values are no schemas.
common_json without_patterns(const common_json & schema, size_t & num_patterns) {
    static const std::set<std::string> values = {"const", "default", "enum", "example", "examples"};
    static const std::set<std::string> maps   = {"$defs", "definitions", "patternProperties", "properties"};
    if (schema.is_array()) {
        common_json list = common_json::array();
        for (const common_json & element : schema) {
            list.push_back(without_patterns(element, num_patterns));
        }
        return list;
    }
    if (!schema.is_object()) {
        return schema;
    }
    common_json object = common_json::object();
    for (const auto & [name, child] : schema.items()) {
        if (name == "pattern" && child.is_string()) {
            if (++num_patterns > SchemaLimits::max_patterns) {
                refuse("there are more than " + str(SchemaLimits::max_patterns) + " patterns in all tools; leave some out");
            }
            if (is_supported_pattern(child.get<std::string>())) {
                object[name] = child;
            }
        } else if (maps.count(name) && child.is_object()) {
            object[name] = named_without_patterns(child, num_patterns);
        } else {
            object[name] = values.count(name) ? child : without_patterns(child, num_patterns);
        }
    }
    return object;
}

} // namespace

common_json SchemaGuard::admitted(const common_json & schema, const std::string & place, bool drops_patterns) {
    static const std::string prefix = "json_schema: ";
    try {
        check_all_types(schema);
        const common_json usable = drops_patterns ? without_patterns(schema, num_patterns_) : schema;
        const common_chat_schema_document document = common_chat_schema_from_json(usable);
        Walk walk;
        walk.check(*document.root);
        num_properties_ += walk.num_properties();
        if (num_properties_ > SchemaLimits::max_properties) {
            refuse("all schemas together have more than " + str(SchemaLimits::max_properties) + " properties");
        }
        return usable;
    } catch (const std::exception & error) {
        const std::string reason = error.what();
        fail("GrammarError", place + ": " + (reason.rfind(prefix, 0) == 0 ? reason.substr(prefix.size()) : reason));
    }
}

std::string grammar_of_json_schema(const std::string & schema) {
    std::string grammar;
    run_on_stack(stack_bytes, [&] {
        try {
            grammar = translate(schema);
        } catch (const Error &) {
            throw;
        } catch (const std::exception & error) {
            refuse(error.what());
        }
    });
    return grammar;
}

} // namespace paceline
