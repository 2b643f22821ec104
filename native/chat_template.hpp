// The chat template of a model: a conversation becomes the text of a prompt. Constant once made; any thread may use it.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "model.hpp"

namespace jinja {
struct program;
struct caps;
} // namespace jinja

namespace paceline {

// A stretch of a prompt; `is_input`: it came from the conversation and not from the template.
struct PromptPart {
    std::string text;
    bool        is_input;
};

class ChatTemplate {
public:
    // Fails with TemplateError where the source does not parse or exceeds TemplateLimits.
    ChatTemplate(std::shared_ptr<Model> model, const std::string & source);
    ~ChatTemplate();
    ChatTemplate(const ChatTemplate &)             = delete;
    ChatTemplate & operator=(const ChatTemplate &) = delete;

    const std::string & source() const noexcept { return source_; }
    const std::string & bos() const noexcept { return bos_; }
    const std::string & eos() const noexcept { return eos_; }
    bool                supports_system() const noexcept;

    // `messages`: a JSON array of {"role", "content": text or parts, "name"}; `variables`: a JSON object, further variables
    // of the template. Neighbouring parts differ in is_input; the special tokens that the vocabulary adds are left out.
    std::vector<PromptPart> render(const std::string & messages, const std::string & variables,
                                   bool add_generation_prompt) const;

private:
    void                    parse();
    std::vector<PromptPart> run(const std::string & messages, const std::string & variables, bool generate) const;

    std::shared_ptr<Model>          model_;
    std::string                     source_;
    std::string                     bos_;
    std::string                     eos_;
    std::unique_ptr<jinja::program> program_;
    std::unique_ptr<jinja::caps>    caps_;
};

} // namespace paceline
