// Parses a model's text in its chat format: content, reasoning and tool calls. Constant once made; any thread may use it.
#pragma once

#include <memory>
#include <string>
#include <vector>

struct common_chat_parser_params;

namespace paceline {

struct ToolCall {
    std::string id;
    std::string name;
    std::string arguments; // JSON, or the beginning of it
};

struct ParsedMessage {
    std::string           content;
    std::string           reasoning;
    std::vector<ToolCall> tool_calls;
};

class ChatParser {
public:
    // `parser`, `format`, `generation_prompt`: as ChatPrompt has them.
    ChatParser(const std::string & parser, const std::string & format, const std::string & generation_prompt);
    ~ChatParser();
    ChatParser(const ChatParser &)             = delete;
    ChatParser & operator=(const ChatParser &) = delete;

    // `is_partial`: more text follows. Fails with ChatParseError if the text is not of the format.
    ParsedMessage parse(const std::string & text, bool is_partial) const;

private:
    std::unique_ptr<common_chat_parser_params> params_;
};

} // namespace paceline
