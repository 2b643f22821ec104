#include "template_origins.hpp"

#include <algorithm>
#include <cctype>
#include <memory>
#include <numeric>
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
            record->begin();
            for (const char * name : {"bos_token", "eos_token"}) {
                const value token = ctx.get_val(name);
                if (is_text(token)) {
                    ctx.set_val(name, text(token->as_string().str(), false));
                }
            }
            ctx.set_val("messages", marked(ctx.get_val("messages"), true));
            const value tools = ctx.get_val("tools");
            if (!tools->is_undefined()) {
                ctx.set_val("tools", marked(tools, false));
            }
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

// Where a prompt and a rendering, from its byte `start` on, begin to differ.
std::size_t common_length(const std::string & prompt, const std::vector<PromptPart> & rendering, std::size_t start) {
    std::size_t length = 0;
    for (const PromptPart & part : rendering) {
        const std::size_t skipped = std::min(start, part.text.size());
        start -= skipped;
        for (std::size_t i = skipped; i < part.text.size(); ++i, ++length) {
            if (length == prompt.size() || prompt[length] != part.text[i]) {
                return length;
            }
        }
    }
    return length;
}

std::size_t size_of(const std::vector<PromptPart> & rendering) {
    return std::accumulate(rendering.begin(), rendering.end(), std::size_t{0},
                           [](std::size_t size, const PromptPart & part) { return size + part.text.size(); });
}

bool is_input_at(const std::vector<PromptPart> & rendering, std::size_t place) {
    for (const PromptPart & part : rendering) {
        if (place < part.text.size()) {
            return part.is_input;
        }
        place -= part.text.size();
    }
    return false;
}

// How many bytes a prompt and a rendering have in common at their ends, up to `most`.
std::size_t common_tail(const std::string & prompt, const std::vector<PromptPart> & rendering, std::size_t most) {
    std::size_t length = 0;
    for (auto part = rendering.rbegin(); part != rendering.rend(); ++part) {
        for (auto byte = part->text.rbegin(); byte != part->text.rend(); ++byte, ++length) {
            if (length == most || prompt[prompt.size() - 1 - length] != *byte) {
                return length;
            }
        }
    }
    return length;
}

void append_rendering(std::vector<PromptPart> & parts, const std::vector<PromptPart> & rendering, std::size_t start,
                      std::size_t length) {
    for (const PromptPart & part : rendering) {
        const std::size_t skipped = std::min(start, part.text.size());
        start -= skipped;
        const std::size_t taken = std::min(length, part.text.size() - skipped);
        length -= taken;
        append(parts, part.text.substr(skipped, taken), part.is_input);
    }
}

} // namespace

thread_local RenderingRecord * RenderingRecord::current_ = nullptr;

RenderingRecord::RenderingRecord() : outer_(std::exchange(current_, this)) {}

RenderingRecord::~RenderingRecord() { current_ = outer_; }

void RenderingRecord::begin() { renderings_.emplace_back(); }

void RenderingRecord::add(const jinja::value & printed) {
    const jinja::value_string text = jinja::runtime::gather_string_parts(printed);
    for (const jinja::string_part & part : text->val_str.parts) {
        append(renderings_.back(), part.val, part.is_input);
    }
}

std::vector<PromptPart> RenderingRecord::parts_of(const std::string & prompt, const std::string & bos,
                                                  const std::vector<std::string> & inputs) const {
    const std::vector<PromptPart> * best = nullptr;
    std::size_t                     start = 0, length = 0;
    for (const std::vector<PromptPart> & rendering : renderings_) {
        for (const std::size_t skipped : {std::size_t{0}, bos.size()}) {
            const std::size_t found = common_length(prompt, rendering, skipped);
            if (!best || found > length) {
                best   = &rendering;
                start  = skipped;
                length = found;
            }
        }
    }
    std::vector<PromptPart> parts;
    if (best) {
        append_rendering(parts, *best, start, length);
    }
    for (const std::string & input : inputs) {
        const std::size_t found = input.empty() ? prompt.npos : prompt.find(input, length);
        if (found != prompt.npos) {
            append(parts, prompt.substr(length, found - length), false);
            append(parts, input, true);
            length = found + input.size();
        }
    }
    if (!best || !inputs.empty()) {
        append(parts, prompt.substr(length), false);
        return parts;
    }
    // One format replaces a token, wherever it stands; what the user wrote stays as it was.
    const std::size_t whole = size_of(*best), left = whole - start - length;
    if (length < prompt.size() && is_input_at(*best, start + length)) {
        append_rendering(parts, *best, start + length, left);
        return parts;
    }
    const std::size_t tail = common_tail(prompt, *best, std::min(prompt.size() - length, left));
    append(parts, prompt.substr(length, prompt.size() - tail - length), false);
    append_rendering(parts, *best, whole - tail, tail);
    return parts;
}

void record_renderings(jinja::program & program) {
    for (jinja::statement_ptr & place : program.body) {
        place = std::make_unique<Recorded>(std::move(place));
    }
    program.body.insert(program.body.begin(), std::make_unique<Beginning>());
}

} // namespace paceline
