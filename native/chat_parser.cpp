#include "chat_parser.hpp"

#include <exception>

#include "chat.h"
#include "error.hpp"
#include "hardening/stack.hpp"

namespace paceline {

namespace {

// The parser descends once for every bracket of a tool call's arguments, which takes some 2,500 bytes of stack.
constexpr std::size_t max_depth   = 5'000;
constexpr std::size_t stack_bytes = std::size_t{64} << 20;

void check_depth(const std::string & text) {
    std::size_t depth = 0;
    for (const char byte : text) {
        if (byte == '[' || byte == '{') {
            if (++depth > max_depth) {
                fail("ChatParseError", "the generated text nests brackets more than " + str(max_depth) + " deep");
            }
        } else if ((byte == ']' || byte == '}') && depth > 0) {
            --depth;
        }
    }
}

common_chat_format format_named(const std::string & name) {
    for (int format = 0; format < COMMON_CHAT_FORMAT_COUNT; ++format) {
        if (name == common_chat_format_name(static_cast<common_chat_format>(format))) {
            return static_cast<common_chat_format>(format);
        }
    }
    fail("InvalidParams", "format must be one that ChatFormat returned, not " + name);
}

} // namespace

ChatParser::ChatParser(const std::string & parser, const std::string & format, const std::string & generation_prompt)
    : params_(std::make_unique<common_chat_parser_params>()) {
    params_->format            = format_named(format);
    params_->generation_prompt = generation_prompt;
    try {
        if (!parser.empty()) {
            params_->parser.load(parser);
        }
    } catch (const std::exception & error) {
        fail("InvalidParams", std::string("parser must be one that ChatFormat returned: ") + error.what());
    }
}

ChatParser::~ChatParser() = default;

ParsedMessage ChatParser::parse(const std::string & text, bool is_partial) const {
    check_depth(text);
    ParsedMessage parsed;
    run_on_stack(stack_bytes, [&] {
        common_chat_msg message;
        try {
            message = common_chat_parse(text, is_partial, *params_);
        } catch (const std::exception & error) {
            fail("ChatParseError", error.what());
        }
        parsed.content   = message.render_content();
        parsed.reasoning = message.reasoning_content;
        for (const common_chat_tool_call & call : message.tool_calls) {
            parsed.tool_calls.push_back({call.id, call.name, call.arguments});
        }
    });
    return parsed;
}

} // namespace paceline
