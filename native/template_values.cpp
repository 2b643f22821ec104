#include "template_values.hpp"

#include <algorithm>
#include <ctime>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "template_budget.hpp"

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

[[noreturn]] void refuse(const std::string & message) { throw jinja::raised_exception(message); }

// Behind what is there already; stretches of the same origin become one.
void append(jinja::string & text, const jinja::string & more) {
    for (const jinja::string_part & part : more.parts) {
        if (!text.parts.empty() && text.parts.back().is_input == part.is_input) {
            text.parts.back().val += part.val;
        } else {
            text.parts.push_back(part);
        }
    }
}

// Takes a text apart from its beginning to its end; every piece keeps the marks of the parts it is from.
class Scissors {
public:
    explicit Scissors(const jinja::string & text) : parts_(text.parts) {}

    jinja::string take(std::size_t length) {
        jinja::string piece;
        walk(length, [&](const jinja::string_part & part, std::size_t begin, std::size_t count) {
            piece.parts.push_back({part.is_input, part.val.substr(begin, count)});
        });
        return piece;
    }

    bool skip(std::size_t length) { // whether a part of it was input
        bool input = false;
        walk(length, [&](const jinja::string_part & part, std::size_t, std::size_t) { input = input || part.is_input; });
        return input;
    }

private:
    template <typename Visit> void walk(std::size_t length, Visit visit) {
        while (length > 0 && index_ < parts_.size()) {
            const std::size_t count = std::min(length, parts_[index_].val.size() - offset_);
            visit(parts_[index_], offset_, count);
            length -= count;
            offset_ += count;
            if (offset_ == parts_[index_].val.size()) {
                ++index_;
                offset_ = 0;
            }
        }
    }

    const std::vector<jinja::string_part> & parts_;
    std::size_t                             index_  = 0;
    std::size_t                             offset_ = 0;
};

const jinja::string & text_at(const func_args & args, std::size_t index, const char * function) {
    const value & argument = args.get_args().at(index);
    if (!is_text(argument)) {
        refuse(std::string(function) + "() wants texts, not " + argument->type());
    }
    return argument->val_str;
}

std::string delimiter(const func_args & args, const char * function) {
    std::string text = args.count() > 1 ? text_at(args, 1, function).str() : " ";
    if (text.empty()) {
        refuse("empty separator");
    }
    return text;
}

int64_t limit(const func_args & args, std::size_t index) { return args.count() > index ? args.get_pos(index)->as_int() : -1; }

// Where `part` begins in `text`, at most `count` times; from the end where asked for. Ascending.
std::vector<std::size_t> places(const std::string & text, const std::string & part, int64_t count, bool from_end) {
    std::vector<std::size_t> found;
    if (!from_end) {
        for (std::size_t at = 0; count != 0 && (at = text.find(part, at)) != text.npos; at += part.size(), --count) {
            found.push_back(at);
        }
        return found;
    }
    for (std::size_t end = text.size(); count != 0 && end >= part.size(); --count) {
        const std::size_t at = text.rfind(part, end - part.size());
        if (at == text.npos) {
            break;
        }
        found.push_back(at);
        end = at;
    }
    std::reverse(found.begin(), found.end());
    return found;
}

value split(const func_args & args, bool from_end) {
    args.ensure_count(1, 3);
    const char *          name  = from_end ? "rsplit" : "split";
    const jinja::string & whole = text_at(args, 0, name);
    const std::string     mark  = delimiter(args, name);
    const auto            found = places(whole.str(), mark, limit(args, 2), from_end);
    TemplateBudget::current().charge(whole.length() + 512 * found.size());
    Scissors    scissors(whole);
    auto        pieces = mk_val<value_array>();
    std::size_t begin  = 0;
    for (const std::size_t at : found) {
        pieces->push_back(mk_val<value_string>(scissors.take(at - begin)));
        scissors.skip(mark.size());
        begin = at + mark.size();
    }
    pieces->push_back(mk_val<value_string>(scissors.take(whole.length() - begin)));
    return pieces;
}

value replace(const func_args & args) {
    args.ensure_count(3, 4);
    const jinja::string &    whole = text_at(args, 0, "replace");
    const std::string        text = whole.str(), old = text_at(args, 1, "replace").str();
    const jinja::string &    fresh = text_at(args, 2, "replace");
    const int64_t            count = limit(args, 3);
    std::vector<std::size_t> found;
    if (!old.empty()) {
        found = places(text, old, count, false);
    } else {
        for (std::size_t at = 0; at <= text.size() && static_cast<int64_t>(at) != count; ++at) {
            found.push_back(at);
        }
    }
    TemplateBudget::current().charge(text.size() + found.size() * (fresh.length() + sizeof(std::size_t)));
    Scissors      scissors(whole);
    jinja::string result;
    std::size_t   begin = 0;
    for (const std::size_t at : found) {
        append(result, scissors.take(at - begin));
        jinja::string in_place = fresh;
        if (scissors.skip(old.size())) {
            in_place.mark_input();
        }
        append(result, in_place);
        begin = at + old.size();
    }
    append(result, scissors.take(text.size() - begin));
    return mk_val<value_string>(result);
}

value attribute_of(const value & element, const value & name) {
    value nothing = mk_val<value_undefined>();
    if (jinja::is_val<value_object>(element)) {
        return element->at(name, nothing);
    }
    return jinja::is_val<value_array>(element) ? element->at(name, nothing) : nothing;
}

value join(const func_args & args) {
    args.ensure_count(1, 3);
    const value mark = args.get_kwarg_or_pos("d", 1), attribute = args.get_kwarg_or_pos("attribute", 2);
    const jinja::string between = mark->is_undefined() ? jinja::string("") : mark->as_string();
    jinja::string       result;
    bool                first = true;
    for (const value & element : args.get_pos(0)->as_array()) {
        const value shown = attribute->is_undefined() ? element : attribute_of(element, attribute);
        if (!is_text(shown) && !jinja::is_val<value_int>(shown) && !jinja::is_val<jinja::value_float>(shown)) {
            refuse("join() can only join texts and numbers");
        }
        TemplateBudget::current().charge(shown);
        TemplateBudget::current().charge(result.length() + between.length());
        if (!first) {
            append(result, between);
        }
        append(result, shown->as_string());
        first = false;
    }
    return mk_val<value_string>(result);
}

// As Python: a slice of every byte between two places. What has steps is left to llama.cpp.
value slice_text(const func_args & args, const func_handler & plain) {
    value result = plain(args);
    if (args.count() == 4 && is_text(args.get_pos(0)) && args.get_pos(3)->as_int() == 1) {
        const jinja::string & whole = args.get_pos(0)->val_str;
        const auto            size  = static_cast<int64_t>(whole.length());
        const int64_t         start = args.get_pos(1)->as_int();
        Scissors              scissors(whole);
        scissors.skip(static_cast<std::size_t>(start < 0 ? std::max<int64_t>(size + start, 0) : std::min(start, size)));
        return mk_val<value_string>(scissors.take(result->val_str.length()));
    }
    if (has_input(args.get_pos(0))) {
        result->val_str.mark_input();
    }
    return result;
}

// The step of a list's slice may not run over the end of the numbers.
value slice_list(const func_args & args, const func_handler & plain) {
    for (const value & argument : args.get_args()) {
        if (jinja::is_val<value_int>(argument) && std::abs(argument->as_int()) > (int64_t{1} << 40)) {
            refuse("a slice of that size or step is not known");
        }
    }
    return plain(args);
}

value checked_slice_text(const func_args & args, const func_handler & plain) {
    return slice_list(args, [&](const func_args & same) { return slice_text(same, plain); });
}

// JSON or text of a value: as long as the budget allows, and input as soon as a part of it is.
value shown(const func_args & args, const func_handler & plain) {
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
        refuse("indent() wants a width of 0 to 1000");
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
            refuse("range() wants integers, not " + argument->type());
        }
    }
    const bool    one   = args.count() == 1;
    const int64_t start = one ? 0 : args.get_pos(0)->as_int(), stop = args.get_pos(one ? 0 : 1)->as_int();
    const int64_t step = args.count() == 3 ? args.get_pos(2)->as_int() : 1;
    if (step == 0) {
        refuse("range() step argument must not be zero");
    }
    const bool runs = step > 0 ? start < stop : start > stop;
    // as unsigned numbers, whose differences do not overflow
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

// std::localtime, which llama.cpp uses, has one answer for all threads.
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

// Numbers and texts in one list have no order that std::sort would survive.
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

// llama.cpp hands its tables of functions out as constant; what they map to is not.
func_handler & entry(const func_builtins & table, const std::string & name) {
    return const_cast<func_builtins &>(table).at(name);
}

void wrap(const func_builtins & table, const std::string & name, Wrapper wrapper) {
    func_handler & place = entry(table, name);
    place = [wrapper, plain = place](const func_args & args) { return wrapper(args, plain); };
}

void tame_all() {
    const func_builtins & globals = jinja::global_builtins();
    const func_builtins & texts   = mk_val<value_string>("")->get_builtins();
    const func_builtins & lists   = mk_val<value_array>()->get_builtins();
    const func_builtins & objects = mk_val<value_object>()->get_builtins();
    entry(globals, "range")           = range;
    entry(globals, "strftime_now")    = time_now;
    entry(globals, "raise_exception") = raise_exception;
    wrap(globals, "tojson", shown);
    wrap(globals, "test_is_divisibleby", is_divisible);
    entry(texts, "split")   = [](const func_args & args) { return split(args, false); };
    entry(texts, "rsplit")  = [](const func_args & args) { return split(args, true); };
    entry(texts, "replace") = replace;
    wrap(texts, "slice", checked_slice_text);
    wrap(texts, "tojson", shown);
    wrap(texts, "indent", indent);
    wrap(texts, "format", format);
    entry(lists, "join") = join;
    wrap(lists, "slice", slice_list);
    wrap(lists, "string", shown);
    wrap(lists, "tojson", shown);
    wrap(lists, "sort", sort);
    wrap(objects, "string", shown);
    wrap(objects, "tojson", shown);
    wrap(objects, "dictsort", dictsort);
}

} // namespace

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
        return mk_val<value_bool>(json.get<bool>());
    }
    if (json.is_number_integer()) {
        return mk_val<value_int>(json.get<int64_t>());
    }
    return json.is_number() ? value(mk_val<jinja::value_float>(json.get<double>())) : mk_val<jinja::value_none>();
}

void tame_builtins() {
    static std::once_flag once;
    std::call_once(once, tame_all);
}

} // namespace paceline
