#include "chat_template.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <ctime>
#include <exception>
#include <stdexcept>

#include "error.hpp"
#include "hardening/template_budget.hpp"
#include "hardening/template_builtins.hpp"
#include "hardening/template_metering.hpp"
#include "hardening/template_source.hpp"
#include "hardening/template_values.hpp"
#include "jinja/caps.h"
#include "jinja/parser.h"
#include "jinja/runtime.h"
#include "json.h"
#include "token_texts.hpp"

namespace paceline {

namespace {

std::string token_text(const Model & model, llama_token token) {
    const bool has_texts = llama_vocab_type(model.vocab()) != LLAMA_VOCAB_TYPE_NONE;
    return token == LLAMA_TOKEN_NULL || !has_texts ? "" : token_piece(model.vocab(), token, true);
}

// llama.cpp reports of a template that does not parse: the reason, a piece of the source in the next line, and a pointer.
std::string parse_reason(std::string report) {
    for (const std::string start : {"parser: ", "lexer: ", "Parser Error: "}) {
        if (report.rfind(start, 0) == 0) {
            report.erase(0, start.size());
        }
    }
    const std::size_t line_end = report.find('\n');
    if (line_end == report.npos) {
        return report;
    }
    const std::size_t next = std::min(report.find('\n', line_end + 1), report.size());
    return report.substr(0, line_end) + ", near: " + report.substr(line_end + 1, next - line_end - 1);
}

// Some templates make control tokens of roles, so a role that looks like a name is not marked as input.
bool is_plain_role(const std::string & role) {
    return role.size() <= 64 && std::all_of(role.begin(), role.end(), [](unsigned char c) {
               return std::isalnum(c) || c == '_' || c == '-';
           });
}

// The parts of a content, joined as llama-server joins them.
std::string joined(const common_json & content) {
    if (content.is_string()) {
        return content.get<std::string>();
    }
    std::string text;
    for (const common_json & part : content) {
        if (!text.empty()) {
            text += '\n';
        }
        text += part.at("text").get<std::string>();
    }
    return text;
}

jinja::value text_part(const std::string & text) {
    jinja::value part = jinja::mk_val<jinja::value_object>();
    part->insert(jinja::mk_val<jinja::value_string>("type"), jinja::mk_val<jinja::value_string>("text"));
    part->insert(jinja::mk_val<jinja::value_string>("text"), jinja::mk_val<jinja::value_string>(jinja::string(text, true)));
    return part;
}

// A message's content in the form that the template can read.
jinja::value content_value(const common_json & content, const jinja::caps & caps) {
    const bool wants_parts = caps.supports_typed_content && (!caps.supports_string_content || content.is_array());
    if (!wants_parts) {
        return jinja::mk_val<jinja::value_string>(jinja::string(joined(content), true));
    }
    auto parts = jinja::mk_val<jinja::value_array>();
    if (content.is_string()) {
        parts->push_back(text_part(content.get<std::string>()));
        return parts;
    }
    for (const common_json & part : content) {
        parts->push_back(text_part(part.at("text").get<std::string>()));
    }
    return parts;
}

jinja::value message_value(const common_json & message, const jinja::caps & caps) {
    jinja::value      object = jinja::mk_val<jinja::value_object>();
    const std::string role   = message.at("role").get<std::string>();
    const auto        set    = [&](const char * key, const jinja::value & content) {
        object->insert(jinja::mk_val<jinja::value_string>(key), content);
    };
    set("role", jinja::mk_val<jinja::value_string>(jinja::string(role, !is_plain_role(role))));
    set("content", content_value(message.at("content"), caps));
    if (message.contains("name")) {
        set("name", from_json(message.at("name"), true));
    }
    return object;
}

// For a template without system messages: puts the system message's text in front of the next message.
common_json without_system(const common_json & messages) {
    if (messages.empty() || messages.at(0).at("role").get<std::string>() != "system") {
        return messages;
    }
    if (messages.size() == 1) {
        fail("TemplateError", "the chat template has no system messages, and there is no other message to put the text into");
    }
    common_json rest = common_json::array();
    for (std::size_t i = 1; i < messages.size(); ++i) {
        rest.push_back(messages.at(i));
    }
    rest.at(0)["content"] = joined(messages.at(0).at("content")) + "\n" + joined(messages.at(1).at("content"));
    return rest;
}

// Only the templates of one family distinguish the role developer from system.
void rename_developers(common_json & messages) {
    for (std::size_t i = 0; i < messages.size(); ++i) {
        if (messages.at(i).at("role").get<std::string>() == "developer") {
            messages.at(i)["role"] = "system";
        }
    }
}

std::string today(std::time_t now, const char * format) {
    std::tm              day{};
    std::array<char, 64> text{};
    localtime_r(&now, &day);
    std::strftime(text.data(), text.size(), format, &day);
    return text.data();
}

void remove_around(std::vector<PromptPart> & parts, const std::string & first, const std::string & last) {
    if (!parts.empty() && !parts.front().is_input && parts.front().text.rfind(first, 0) == 0) {
        parts.front().text.erase(0, first.size());
    }
    if (!parts.empty() && !parts.back().is_input && parts.back().text.size() >= last.size()) {
        std::string & text = parts.back().text;
        if (text.compare(text.size() - last.size(), last.size(), last) == 0) {
            text.resize(text.size() - last.size());
        }
    }
}

} // namespace

ChatTemplate::ChatTemplate(std::shared_ptr<Model> model, const std::string & source)
    : model_(std::move(model)), source_(checked_template_source(source)), bos_(token_text(*model_, llama_vocab_bos(model_->vocab()))),
      eos_(token_text(*model_, llama_vocab_eos(model_->vocab()))) {
    harden_builtins();
    run_within_budget(0, [this] { parse(); });
}

ChatTemplate::~ChatTemplate() = default;

void ChatTemplate::parse() {
    try {
        jinja::lexer              lexer;
        const jinja::lexer_result words = lexer.tokenize(source_);
        check_template_nesting(words.tokens);
        program_ = std::make_unique<jinja::program>(jinja::parse_from_tokens(words));
    } catch (const Error &) {
        throw;
    } catch (const std::out_of_range &) {
        fail("TemplateError", "the chat template does not parse: a number in it is too large");
    } catch (const std::exception & error) {
        fail("TemplateError", "the chat template does not parse: " + parse_reason(error.what()));
    }
    meter_program(*program_);
    caps_ = std::make_unique<jinja::caps>(jinja::caps_get(*program_));
}

bool ChatTemplate::supports_system() const noexcept { return caps_->supports_system_role; }


std::vector<PromptPart> ChatTemplate::render(const std::string & messages, const std::string & variables,
                                             bool add_generation_prompt) const {
    std::vector<PromptPart> parts;
    run_within_budget(messages.size() + variables.size(), [&] { parts = run(messages, variables, add_generation_prompt); });
    return parts;
}

std::vector<PromptPart> ChatTemplate::run(const std::string & messages, const std::string & variables, bool generate) const {
    common_json conversation = common_json::parse(messages);
    if (source_.find("<|channel|>") == source_.npos) {
        rename_developers(conversation);
    }
    if (!caps_->supports_system_role) {
        conversation = without_system(conversation);
    }
    auto list = jinja::mk_val<jinja::value_array>();
    for (const common_json & message : conversation) {
        list->push_back(message_value(message, *caps_));
    }
    jinja::context context(source_);
    const auto     set_text = [&](const char * name, const std::string & text) {
        context.set_val(name, jinja::mk_val<jinja::value_string>(text));
    };
    context.set_val("messages", list);
    set_text("bos_token", bos_);
    set_text("eos_token", eos_);
    set_text("datetime", today(context.current_time, "%b %d %Y"));
    set_text("date_string", today(context.current_time, "%d %b %Y"));
    context.set_val("enable_thinking", jinja::mk_val<jinja::value_bool>(true));
    context.set_val("add_generation_prompt", jinja::mk_val<jinja::value_bool>(generate));
    const common_json further = common_json::parse(variables);
    for (const auto & [name, content] : further.items()) {
        context.set_val(name, from_json(content, true));
    }
    jinja::runtime            runtime(context);
    const jinja::value_string made = jinja::runtime::gather_string_parts(runtime.execute(*program_));
    std::vector<PromptPart>   parts;
    for (const jinja::string_part & part : made->val_str.parts) {
        parts.push_back({part.val, part.is_input});
    }
    const llama_vocab * vocab = model_->vocab();
    remove_around(parts, llama_vocab_get_add_bos(vocab) ? bos_ : "", llama_vocab_get_add_eos(vocab) ? eos_ : "");
    return parts;
}

} // namespace paceline
