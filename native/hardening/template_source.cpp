#include "template_source.hpp"

#include <algorithm>
#include <array>
#include <cstddef>

#include "error.hpp"
#include "template_budget.hpp"

namespace paceline {

namespace {

using jinja::token;

std::string with_line_breaks(const std::string & source) {
    std::string text;
    text.reserve(source.size());
    for (std::size_t i = 0; i < source.size(); ++i) {
        if (source[i] != '\r') {
            text += source[i];
        } else if (i + 1 == source.size() || source[i + 1] != '\n') {
            text += '\n';
        }
    }
    return text;
}

// Whether the tag that begins at `i` opens a block. `set` with a value opens none.
bool opens_block(const std::vector<token> & tokens, std::size_t i) {
    static const std::array<std::string, 6> openers = {"if", "for", "macro", "call", "filter", "set"};

    const std::string & name = tokens[i + 1].value;
    bool                block = std::find(openers.begin(), openers.end(), name) != openers.end();
    for (std::size_t j = i + 1; block && name == "set" && j < tokens.size() && tokens[j].t != token::close_statement; ++j) {
        block = tokens[j].t != token::equals;
    }
    return block;
}

void check_tags(const std::vector<token> & tokens) {
    std::size_t in_tag = 0;
    for (const token & each : tokens) {
        const bool starts = each.t == token::open_statement || each.t == token::open_expression ||
                            each.t == token::text || each.t == token::comment;
        in_tag = starts ? 0 : in_tag + 1;
        if (in_tag > TemplateLimits::max_tag_tokens) {
            fail("TemplateError",
                 "the chat template has a tag of more than " + str(TemplateLimits::max_tag_tokens) + " tokens");
        }
    }
}

} // namespace

std::string checked_template_source(const std::string & source) {
    std::string text = with_line_breaks(source);
    if (text.size() > TemplateLimits::max_bytes) {
        fail("TemplateError", "the chat template has " + str(text.size()) + " bytes, and may have at most " +
                                  str(TemplateLimits::max_bytes));
    }
    return text;
}

void check_template_nesting(const std::vector<token> & tokens) {
    check_tags(tokens);
    std::vector<std::size_t> outer; // depth around each open block
    std::size_t              depth = 0;
    for (std::size_t i = 0; i + 1 < tokens.size(); ++i) {
        if (tokens[i].t != token::open_statement) {
            continue;
        }
        const std::string & name = tokens[i + 1].value;
        if (opens_block(tokens, i)) {
            outer.push_back(depth++);
        } else if (name == "elif") {
            ++depth;
        } else if (name.rfind("end", 0) == 0 && name != "endgeneration" && !outer.empty()) {
            depth = outer.back();
            outer.pop_back();
        }
        if (depth > TemplateLimits::max_blocks) {
            fail("TemplateError", "the chat template nests more than " + str(TemplateLimits::max_blocks) + " blocks");
        }
    }
}

} // namespace paceline
