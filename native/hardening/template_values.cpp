#include "template_values.hpp"

#include <algorithm>
#include <cstdint>
#include <string>

namespace paceline {

using jinja::mk_val;
using jinja::value;
using jinja::value_array;
using jinja::value_object;
using jinja::value_string;

bool has_input(const value & value) {
    if (is_text(value)) {
        const auto & parts = value->val_str.parts;
        return std::any_of(parts.begin(), parts.end(), [](const auto & part) { return part.is_input && !part.val.empty(); });
    }
    return std::any_of(value->val_arr.begin(), value->val_arr.end(), has_input) ||
           std::any_of(value->val_obj.begin(), value->val_obj.end(),
                       [](const auto & pair) { return has_input(pair.first) || has_input(pair.second); });
}

value as_marked_text(const value & value) {
    const bool is_list = jinja::is_val<value_array>(value) || jinja::is_val<value_object>(value);
    if (!is_list || !has_input(value)) {
        return value;
    }
    auto text = mk_val<value_string>(value->as_string());
    text->mark_input();
    return text;
}

value from_json(const common_json & json, bool is_input) {
    const auto text = [&](const std::string & content) { return mk_val<value_string>(jinja::string(content, is_input)); };
    if (json.is_string()) {
        return text(json.get<std::string>());
    }
    if (json.is_array()) {
        auto list = mk_val<value_array>();
        for (const common_json & element : json) {
            list->push_back(from_json(element, is_input));
        }
        return list;
    }
    if (json.is_object()) {
        value object = mk_val<value_object>();
        for (const auto & [key, content] : json.items()) {
            object->insert(text(key), from_json(content, is_input));
        }
        return object;
    }
    if (json.is_boolean()) {
        return mk_val<jinja::value_bool>(json.get<bool>());
    }
    if (json.is_number_integer()) {
        return mk_val<jinja::value_int>(json.get<int64_t>());
    }
    return json.is_number() ? value(mk_val<jinja::value_float>(json.get<double>())) : mk_val<jinja::value_none>();
}

} // namespace paceline
