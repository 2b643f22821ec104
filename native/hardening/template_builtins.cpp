#include "template_builtins.hpp"

#include <algorithm>
#include <ctime>
#include <mutex>
#include <string>
#include <vector>

#include "template_budget.hpp"
#include "template_text.hpp"
#include "template_values.hpp"

namespace paceline {

namespace {

using jinja::func_args;
using jinja::func_builtins;
using jinja::func_handler;
using jinja::mk_val;
using jinja::value;
using jinja::value_array;
using jinja::value_bool;
using jinja::value_int;
using jinja::value_object;
using jinja::value_string;
using jinja::value_undefined;
using template_text::attribute_of;
using template_text::refuse;
using template_text::text_at;

// llama.cpp adds the step to an index, which must not overflow.
value slice_list(const func_args & args, const func_handler & plain) {
    for (const value & argument : args.get_args()) {
        if (jinja::is_val<value_int>(argument) && std::abs(argument->as_int()) > (int64_t{1} << 40)) {
            refuse("a slice of that size or step is not known");
        }
    }
    return plain(args);
}

value checked_slice_text(const func_args & args, const func_handler & plain) {
    return slice_list(args, [&](const func_args & same) { return template_text::slice(same, plain); });
}

// JSON or text of a value: within the budget, and marked as input if a part of the value is.
value print_value(const func_args & args, const func_handler & plain) {
    const value & subject = args.get_args().at(0);
    TemplateBudget::current().charge(subject);
    const value indent = args.get_kwarg_or_pos("indent", 2);
    if (jinja::is_val<value_int>(indent) && indent->as_int() > 100) {
        refuse("tojson() indents by 100 at most");
    }
    value result = plain(args);
    if (is_text(result) && !is_text(subject) ? has_input(subject) : has_input(subject) && is_text(result)) {
        result->val_str.mark_input();
    }
    return result;
}

value indent(const func_args & args, const func_handler & plain) {
    const value width = args.get_kwarg_or_pos("width", 1);
    if (jinja::is_val<value_int>(width) && (width->as_int() < 0 || width->as_int() > 1000)) {
        refuse("indent() needs a width of 0 to 1000");
    }
    const value & text = args.get_args().at(0);
    if (is_text(text)) {
        const std::string plain_text = text->val_str.str();
        const auto        lines      = std::count(plain_text.begin(), plain_text.end(), '\n') + 1;
        const std::size_t each = jinja::is_val<value_int>(width) ? width->as_int() : is_text(width) ? width->val_str.length() : 4;
        TemplateBudget::current().charge(plain_text.size() + each * static_cast<std::size_t>(lines));
    }
    return plain(args);
}

value format(const func_args & args, const func_handler & plain) {
    func_args   same(args.ctx);
    std::size_t num_bytes = 0;
    for (const value & argument : args.get_args()) {
        TemplateBudget::current().charge(argument);
        same.push_back(as_marked_text(argument));
        num_bytes += is_text(argument) ? argument->val_str.length() : 0;
    }
    TemplateBudget::current().charge(num_bytes);
    return plain(same);
}

value range(const func_args & args) {
    args.ensure_count(1, 3);
    for (const value & argument : args.get_args()) {
        if (!jinja::is_val<value_int>(argument)) {
            refuse("range() needs integers, not " + argument->type());
        }
    }
    const bool    one   = args.count() == 1;
    const int64_t start = one ? 0 : args.get_pos(0)->as_int(), stop = args.get_pos(one ? 0 : 1)->as_int();
    const int64_t step = args.count() == 3 ? args.get_pos(2)->as_int() : 1;
    if (step == 0) {
        refuse("range() step argument must not be zero");
    }
    const bool runs = step > 0 ? start < stop : start > stop;
    // as unsigned numbers, since their differences do not overflow
    const auto     from = static_cast<uint64_t>(start), to = static_cast<uint64_t>(stop), by = static_cast<uint64_t>(step);
    const uint64_t width = step > 0 ? to - from : from - to, stride = step > 0 ? by : 0 - by;
    const uint64_t count = runs ? (width - 1) / stride + 1 : 0;
    if (count > TemplateLimits::max_range) {
        refuse("range() of more than " + std::to_string(TemplateLimits::max_range) + " numbers");
    }
    TemplateBudget::current().charge(512 * count);
    auto numbers = mk_val<value_array>();
    for (uint64_t i = 0; i < count; ++i) {
        numbers->push_back(mk_val<value_int>(static_cast<int64_t>(from + i * by)));
    }
    return numbers;
}

value is_divisible(const func_args & args, const func_handler & plain) {
    args.ensure_count(2, 2);
    const value by = args.get_pos(1);
    if (jinja::is_val<value_int>(by) && (by->as_int() == 0 || by->as_int() == -1)) {
        return by->as_int() == 0 ? (refuse("division by zero"), value()) : mk_val<value_bool>(true);
    }
    return plain(args);
}

// std::localtime, which llama.cpp calls, returns one object to all threads.
value time_now(const func_args & args) {
    args.ensure_count(1, 1);
    const std::string     format = text_at(args, 0, "strftime_now").str();
    std::tm               now{};
    std::array<char, 256> text{};
    localtime_r(&args.ctx.current_time, &now);
    if (std::strftime(text.data(), text.size(), format.c_str(), &now) == 0) {
        refuse("strftime_now() cannot show the time as '" + format.substr(0, 100) + "'");
    }
    return mk_val<value_string>(std::string(text.data()));
}

// Numbers and texts in one list, and NaN, have no strict weak order, which std::sort needs.
void require_order(const std::vector<value> & elements, const value & attribute) {
    bool texts = false, others = false;
    for (const value & element : elements) {
        const value key = attribute->is_undefined() ? element : attribute_of(element, attribute);
        (is_text(key) ? texts : others) = true;
        if (jinja::is_val<jinja::value_float>(key) && key->as_float() != key->as_float()) {
            refuse("sort() of something that is not a number");
        }
    }
    if (texts && others) {
        refuse("sort() of texts together with something else");
    }
}

value sort(const func_args & args, const func_handler & plain) {
    if (args.count() > 0 && jinja::is_val<value_array>(args.get_pos(0))) {
        require_order(args.get_pos(0)->as_array(), args.get_kwarg_or_pos("attribute", 3));
    }
    return plain(args);
}

value dictsort(const func_args & args, const func_handler & plain) {
    std::vector<value> keys, contents;
    if (args.count() > 0 && jinja::is_val<value_object>(args.get_pos(0))) {
        for (const auto & [key, content] : args.get_pos(0)->as_ordered_object()) {
            keys.push_back(key);
            contents.push_back(content);
        }
    }
    const value by = args.get_kwarg_or_pos("by", 2);
    require_order(is_text(by) && by->val_str.str() == "value" ? contents : keys, mk_val<value_undefined>());
    return plain(args);
}

value raise_exception(const func_args & args) {
    TemplateBudget::current().refuse(args.count() > 0 && is_text(args.get_pos(0)) ? args.get_pos(0)->val_str.str() : "");
}

using Wrapper = value (*)(const func_args &, const func_handler &);

// llama.cpp's tables of functions are constant; the entries they hold are not.
func_handler & entry(const func_builtins & table, const std::string & name) {
    return const_cast<func_builtins &>(table).at(name);
}

void wrap(const func_builtins & table, const std::string & name, Wrapper wrapper) {
    func_handler & place = entry(table, name);
    place = [wrapper, plain = place](const func_args & args) { return wrapper(args, plain); };
}

void replace_all() {
    const func_builtins & globals = jinja::global_builtins();
    const func_builtins & texts   = mk_val<value_string>("")->get_builtins();
    const func_builtins & lists   = mk_val<value_array>()->get_builtins();
    const func_builtins & objects = mk_val<value_object>()->get_builtins();
    entry(globals, "range")           = range;
    entry(globals, "strftime_now")    = time_now;
    entry(globals, "raise_exception") = raise_exception;
    wrap(globals, "tojson", print_value);
    wrap(globals, "test_is_divisibleby", is_divisible);
    entry(texts, "split")   = [](const func_args & args) { return template_text::split(args, false); };
    entry(texts, "rsplit")  = [](const func_args & args) { return template_text::split(args, true); };
    entry(texts, "replace") = template_text::replace;
    wrap(texts, "slice", checked_slice_text);
    wrap(texts, "tojson", print_value);
    wrap(texts, "indent", indent);
    wrap(texts, "format", format);
    entry(lists, "join") = template_text::join;
    wrap(lists, "slice", slice_list);
    wrap(lists, "string", print_value);
    wrap(lists, "tojson", print_value);
    wrap(lists, "sort", sort);
    wrap(objects, "string", print_value);
    wrap(objects, "tojson", print_value);
    wrap(objects, "dictsort", dictsort);
}

} // namespace

void harden_builtins() {
    static std::once_flag once;
    std::call_once(once, replace_all);
}

} // namespace paceline
