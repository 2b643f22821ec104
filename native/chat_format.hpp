// The chat format of a model: a conversation, its tools and its options become a prompt, the grammar and triggers that constrain
// the model's text, and the parser that reads it. llama.cpp's chat layer within a TemplateBudget. Constant once made; any
// thread may use it.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "hardening/template_origins.hpp"
#include "model.hpp"
#include "recent_cache.hpp"

class common_json;
struct common_chat_params;
struct common_chat_template;

namespace autoparser {
struct autoparser;
struct generation_params;
} // namespace autoparser

namespace paceline {

// A text that switches the grammar on.
struct ChatTrigger {
    std::string type; // word, token, pattern or pattern_full, as llama.cpp has them
    std::string value;
};

// The result of a conversation.
struct ChatPrompt {
    std::vector<PromptPart>  parts; // neighbours differ in is_input; special tokens that the vocabulary adds are left out
    std::string              generation_prompt; // the end of the prompt, with which the message to parse begins
    std::string              format;            // llama.cpp's name of it
    std::string              parser;            // serialised; for ChatParser
    std::string              grammar;           // GBNF; empty: unconstrained
    bool                     is_grammar_lazy = false;
    std::vector<ChatTrigger> triggers;
    std::vector<std::string> preserved_tokens; // control tokens that the parser reads as text
    std::vector<std::string> stops;
    bool                     supports_thinking = false;
    std::string              thinking_start;
    std::vector<std::string> thinking_ends;
};

class ChatFormat {
public:
    // Fails with TemplateError if the source does not parse or exceeds TemplateLimits.
    ChatFormat(std::shared_ptr<Model> model, const std::string & source);
    ~ChatFormat();
    ChatFormat(const ChatFormat &)             = delete;
    ChatFormat & operator=(const ChatFormat &) = delete;

    const std::string &         source() const noexcept { return source_; }
    const std::string &         bos() const noexcept { return bos_; }
    const std::string &         eos() const noexcept { return eos_; }
    std::map<std::string, bool> capabilities() const;

    // `request`: a JSON object, made by paceline.chat.ChatFormat: messages, tools (may be missing), tool_choice,
    // parallel_tool_calls, reasoning_format, enable_thinking, json_schema (may be missing), add_generation_prompt,
    // continued (may be missing; content and reasoning_content of the message that the model continues) and variables.
    // Results that depend on tools and options alone are kept for the next turn of a conversation.
    ChatPrompt apply(const std::string & request) const;

private:
    struct Inference; // results that depend on tools and options, for any messages
    struct Recalled {
        std::string                      options; // the key
        std::shared_ptr<const Inference> inference;
    };

    void       parse();
    void       analyze();
    ChatPrompt applied(const std::string & request) const;

    Recalled                          recalled(const common_json & request) const;
    common_chat_params                inferred(autoparser::generation_params & inputs, const Recalled & recalled) const;
    common_chat_params                analyzed(autoparser::generation_params & inputs, const Recalled & recalled) const;
    std::optional<common_chat_params> rendered(autoparser::generation_params & inputs, const Inference & inference) const;

    std::shared_ptr<Model>                  model_;
    std::string                             source_;
    std::string                             bos_;
    std::string                             eos_;
    std::unique_ptr<common_chat_template>   template_;
    std::unique_ptr<autoparser::autoparser> analysis_; // null if llama.cpp has a parser of its own for the format
    std::string                             analysis_failure_;

    mutable RecentCache<Inference>          inferences_; // by the options of requests
};

} // namespace paceline
