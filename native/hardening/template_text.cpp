#include "template_text.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "template_budget.hpp"
#include "template_values.hpp"

namespace paceline::template_text {

using jinja::func_args;
using jinja::func_handler;
using jinja::mk_val;
using jinja::value;
using jinja::value_array;
using jinja::value_int;
using jinja::value_object;
using jinja::value_string;
using jinja::value_undefined;

namespace {

// Appends, and joins neighbouring parts of the same origin.
void append(jinja::string & text, const jinja::string & more) {
    for (const jinja::string_part & part : more.parts) {
        if (!text.parts.empty() && text.parts.back().is_input == part.is_input) {
            text.parts.back().val += part.val;
        } else {
            text.parts.push_back(part);
        }
    }
}

// Reads a text from its beginning to its end in pieces, which keep the marks of the parts they come from.
class MarkedReader {
public:
    explicit MarkedReader(const jinja::string & text) : parts_(text.parts) {}

    jinja::string take(std::size_t length) {
        jinja::string piece;
        walk(length, [&](const jinja::string_part & part, std::size_t begin, std::size_t count) {
            piece.parts.push_back({part.is_input, part.val.substr(begin, count)});
        });
        return piece;
    }

    // Returns whether a part of the skipped text is input.
    bool skip(std::size_t length) {
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

std::string delimiter(const func_args & args, const char * function) {
    std::string text = args.count() > 1 ? text_at(args, 1, function).str() : " ";
    if (text.empty()) {
        refuse("empty separator");
    }
    return text;
}

int64_t limit(const func_args & args, std::size_t index) { return args.count() > index ? args.get_pos(index)->as_int() : -1; }

// Positions at which `part` begins in `text`, ascending; at most `count` of them, the last if `from_end`.
std::vector<std::size_t> find_all(const std::string & text, const std::string & part, int64_t count, bool from_end) {
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

} // namespace

void refuse(const std::string & message) { throw jinja::raised_exception(message); }

const jinja::string & text_at(const func_args & args, std::size_t index, const char * function) {
    const value & argument = args.get_args().at(index);
    if (!is_text(argument)) {
        refuse(std::string(function) + "() needs texts, not " + argument->type());
    }
    return argument->val_str;
}

value attribute_of(const value & element, const value & name) {
    value nothing = mk_val<value_undefined>();
    if (jinja::is_val<value_object>(element)) {
        return element->at(name, nothing);
    }
    return jinja::is_val<value_array>(element) ? element->at(name, nothing) : nothing;
}

value split(const func_args & args, bool from_end) {
    args.ensure_count(1, 3);
    const char *          name  = from_end ? "rsplit" : "split";
    const jinja::string & whole = text_at(args, 0, name);
    const std::string     mark  = delimiter(args, name);
    const auto            found = find_all(whole.str(), mark, limit(args, 2), from_end);
    TemplateBudget::current().charge(whole.length() + 512 * found.size());
    MarkedReader reader(whole);
    auto         pieces = mk_val<value_array>();
    std::size_t  begin  = 0;
    for (const std::size_t at : found) {
        pieces->push_back(mk_val<value_string>(reader.take(at - begin)));
        reader.skip(mark.size());
        begin = at + mark.size();
    }
    pieces->push_back(mk_val<value_string>(reader.take(whole.length() - begin)));
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
        found = find_all(text, old, count, false);
    } else {
        for (std::size_t at = 0; at <= text.size() && static_cast<int64_t>(at) != count; ++at) {
            found.push_back(at);
        }
    }
    TemplateBudget::current().charge(text.size() + found.size() * (fresh.length() + sizeof(std::size_t)));
    MarkedReader  reader(whole);
    jinja::string result;
    std::size_t   begin = 0;
    for (const std::size_t at : found) {
        append(result, reader.take(at - begin));
        jinja::string in_place = fresh;
        if (reader.skip(old.size())) {
            in_place.mark_input();
        }
        append(result, in_place);
        begin = at + old.size();
    }
    append(result, reader.take(text.size() - begin));
    return mk_val<value_string>(result);
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

// As Python for step 1: the bytes between two positions. llama.cpp's for other steps.
value slice(const func_args & args, const func_handler & plain) {
    value result = plain(args);
    if (args.count() == 4 && is_text(args.get_pos(0)) && args.get_pos(3)->as_int() == 1) {
        const jinja::string & whole = args.get_pos(0)->val_str;
        const auto            size  = static_cast<int64_t>(whole.length());
        const int64_t         start = args.get_pos(1)->as_int();
        MarkedReader          reader(whole);
        reader.skip(static_cast<std::size_t>(start < 0 ? std::max<int64_t>(size + start, 0) : std::min(start, size)));
        return mk_val<value_string>(reader.take(result->val_str.length()));
    }
    if (has_input(args.get_pos(0))) {
        result->val_str.mark_input();
    }
    return result;
}

} // namespace paceline::template_text
