#include "template_origins.hpp"

#include <algorithm>
#include <cctype>
#include <memory>
#include <utility>

#include "template_budget.hpp"
#include "template_values.hpp"

namespace paceline {

namespace {

using jinja::mk_val;
using jinja::value;
using jinja::value_array;
using jinja::value_object;
using jinja::value_string;

// Some templates make control tokens of roles, so a role that looks like a name is not marked as input.
bool is_plain_role(const std::string & role) {
    return role.size() <= 64 && std::all_of(role.begin(), role.end(), [](unsigned char c) {
               return std::isalnum(c) || c == '_' || c == '-';
           });
}

value text(const std::string & content, bool is_input) { return mk_val<value_string>(jinja::string(content, is_input)); }

// A copy in which keys are input, and plain roles of messages are not.
value marked(const value & original, bool is_message) {
    if (jinja::is_val<value_array>(original)) {
        auto list = mk_val<value_array>();
        for (const value & element : original->as_array()) {
            list->push_back(marked(element, is_message));
        }
        return list;
    }
    if (!jinja::is_val<value_object>(original)) {
        return original;
    }
    value object = mk_val<value_object>();
    for (const auto & [key, content] : original->as_ordered_object()) {
        const std::string name = key->as_string().str();
        if (is_message && name == "role" && is_text(content)) {
            const std::string role = content->as_string().str();
            object->insert(text(name, true), text(role, !is_plain_role(role)));
        } else {
            object->insert(text(name, true), marked(content, false));
        }
    }
    return object;
}

// The first statement of a template.
struct Beginning : jinja::statement {
    Beginning() { pos = 0; }

    std::string type() const override { return "Beginning"; }
    value       execute_impl(jinja::context & ctx) const override {
        if (RenderingRecord * record = RenderingRecord::current()) {
            record->mark(ctx);
            record->begin();
        }
        return text("", false);
    }
};

// The last one.
struct Ending : jinja::statement {
    Ending() { pos = 0; }

    std::string type() const override { return "Ending"; }
    value       execute_impl(jinja::context &) const override {
        if (RenderingRecord * record = RenderingRecord::current()) {
            record->end();
        }
        return text("", false);
    }
};

struct Recorded : jinja::statement {
    explicit Recorded(jinja::statement_ptr && inner) : inner(std::move(inner)) { pos = this->inner->pos; }

    std::string type() const override { return inner->type(); }
    void        visit(jinja::context & ctx) const override { inner->visit(ctx); }
    value       execute_impl(jinja::context & ctx) const override {
        value printed = inner->execute(ctx);
        if (RenderingRecord * record = RenderingRecord::current()) {
            record->add(printed);
        }
        return printed;
    }

    jinja::statement_ptr inner;
};

void append(std::vector<PromptPart> & parts, std::string text, bool is_input) {
    if (text.empty()) {
        return;
    }
    if (!parts.empty() && parts.back().is_input == is_input) {
        parts.back().text += text;
    } else {
        parts.push_back({std::move(text), is_input});
    }
}

std::string text_of(const std::vector<PromptPart> & parts) {
    std::string text;
    for (const PromptPart & part : parts) {
        text += part.text;
    }
    return text;
}

bool starts_with(const std::string & text, const std::string & start) { return text.compare(0, start.size(), start) == 0; }

bool ends_with(const std::string & text, const std::string & end) {
    return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// A rendering's bytes from `start` to `end`.
std::vector<PromptPart> range(const std::vector<PromptPart> & rendering, std::size_t start, std::size_t end) {
    std::vector<PromptPart> parts;
    std::size_t             at = 0;
    for (const PromptPart & part : rendering) {
        const std::size_t first = std::max(start, at), last = std::min(end, at + part.text.size());
        if (first < last) {
            append(parts, part.text.substr(first - at, last - first), part.is_input);
        }
        at += part.text.size();
    }
    return parts;
}

void append_replaced(std::vector<PromptPart> & parts, std::string text, const std::vector<Placeholder> & placeholders) {
    for (const Placeholder & placeholder : placeholders) {
        const std::size_t found = text.find(placeholder.text);
        if (found != text.npos) {
            append(parts, text.substr(0, found), false);
            append(parts, placeholder.input, true);
            text.erase(0, found + placeholder.text.size());
        }
    }
    append(parts, std::move(text), false);
}

} // namespace

thread_local RenderingRecord * RenderingRecord::current_ = nullptr;

RenderingRecord::RenderingRecord(std::vector<std::string> variables)
    : outer_(std::exchange(current_, this)), variables_(std::move(variables)) {}

RenderingRecord::~RenderingRecord() { current_ = outer_; }

void RenderingRecord::mark(jinja::context & ctx) const {
    for (const char * name : {"bos_token", "eos_token"}) {
        const value token = ctx.get_val(name);
        if (is_text(token)) {
            ctx.set_val(name, text(token->as_string().str(), false));
        }
    }
    // llama.cpp sets this one from reasoning_effort, without a mark.
    const value strength = ctx.get_val("reasoning_strength");
    if (is_text(strength)) {
        ctx.set_val("reasoning_strength", text(strength->as_string().str(), true));
    }
    for (const std::string & name : variables_) {
        ctx.set_val(name, marked(ctx.get_val(name), false));
    }
    ctx.set_val("messages", marked(ctx.get_val("messages"), true));
    const value tools = ctx.get_val("tools");
    if (!tools->is_undefined()) {
        ctx.set_val("tools", marked(tools, false));
    }
}

void RenderingRecord::begin() { current_rendering_.clear(); }

void RenderingRecord::end() { renderings_.push_back(std::move(current_rendering_)); }

void RenderingRecord::add(const jinja::value & printed) {
    const jinja::value_string text = jinja::runtime::gather_string_parts(printed);
    for (const jinja::string_part & part : text->val_str.parts) {
        append(current_rendering_, part.val, part.is_input);
    }
}

std::optional<std::vector<PromptPart>> RenderingRecord::parts_of(const std::string & prompt, const std::string & bos,
                                                                 const std::string & eos,
                                                                 const std::vector<Placeholder> & placeholders) const {
    std::optional<std::vector<PromptPart>> parts;
    std::size_t                            longest = 0;
    for (const std::vector<PromptPart> & rendering : renderings_) {
        const std::string rendered = text_of(rendering);
        const std::size_t start    = starts_with(rendered, bos) ? bos.size() : 0;
        const std::size_t end      = ends_with(rendered, eos) && rendered.size() - start >= eos.size() ? rendered.size() - eos.size()
                                                                                                       : rendered.size();
        const std::string kept     = rendered.substr(start, end - start);
        if (starts_with(prompt, kept) && (!parts || kept.size() > longest)) {
            longest = kept.size();
            parts   = range(rendering, start, end);
        }
    }
    if (parts) {
        append_replaced(*parts, prompt.substr(longest), placeholders);
    }
    return parts;
}

void record_renderings(jinja::program & program) {
    for (jinja::statement_ptr & place : program.body) {
        place = std::make_unique<Recorded>(std::move(place));
    }
    program.body.insert(program.body.begin(), std::make_unique<Beginning>());
    program.body.push_back(std::make_unique<Ending>());
}

} // namespace paceline
