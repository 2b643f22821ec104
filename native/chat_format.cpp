#include "chat_format.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <ctime>
#include <exception>
#include <optional>
#include <stdexcept>

#include "chat-auto-parser.h"
#include "chat.h"
#include "error.hpp"
#include "hardening/template_budget.hpp"
#include "hardening/template_builtins.hpp"
#include "hardening/template_metering.hpp"
#include "hardening/template_source.hpp"
#include "jinja/caps.h"
#include "jinja/parser.h"
#include "jinja/runtime.h"
#include "log.h"
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

std::string date(std::chrono::system_clock::time_point now, const char * format) {
    const std::time_t    seconds = std::chrono::system_clock::to_time_t(now);
    std::tm              day{};
    std::array<char, 64> text{};
    localtime_r(&seconds, &day);
    std::strftime(text.data(), text.size(), format, &day);
    return text.data();
}

common_chat_tool_choice tool_choice(const std::string & name) {
    return name == "required" ? COMMON_CHAT_TOOL_CHOICE_REQUIRED
                              : (name == "none" ? COMMON_CHAT_TOOL_CHOICE_NONE : COMMON_CHAT_TOOL_CHOICE_AUTO);
}

std::string text_of(const common_json & object, const char * key) {
    return object.contains(key) && object.at(key).is_string() ? object.at(key).get<std::string>() : "";
}

// The message that the model continues, as llama.cpp's parsers want it.
common_chat_msg continued(const common_json & message) {
    common_chat_msg result;
    result.role              = text_of(message, "role");
    result.reasoning_content = text_of(message, "reasoning_content");
    const common_json & content = message.at("content");
    if (content.is_string()) {
        result.content = content.get<std::string>();
    } else {
        for (const common_json & part : content) {
            result.content_parts.push_back({text_of(part, "type"), text_of(part, "text")});
        }
    }
    return result;
}

autoparser::generation_params inputs_of(const common_json & request) {
    autoparser::generation_params inputs;
    inputs.messages              = request.at("messages");
    inputs.tools                 = request.contains("tools") ? request.at("tools") : common_json();
    inputs.tool_choice           = tool_choice(text_of(request, "tool_choice"));
    inputs.parallel_tool_calls   = request.at("parallel_tool_calls").get<bool>();
    inputs.reasoning_format      = common_reasoning_format_from_name(text_of(request, "reasoning_format"));
    inputs.enable_thinking       = request.at("enable_thinking").get<bool>();
    inputs.json_schema           = request.contains("json_schema") ? request.at("json_schema") : common_json();
    inputs.add_generation_prompt = request.at("add_generation_prompt").get<bool>();
    inputs.extra_context         = common_json::object();
    inputs.extra_context["datetime"]    = date(inputs.now, "%b %d %Y");
    inputs.extra_context["date_string"] = date(inputs.now, "%d %b %Y");
    for (const auto & [name, content] : request.at("variables").items()) {
        inputs.extra_context[name] = content;
    }
    const std::string continuation = text_of(request, "continuation");
    if (!continuation.empty()) {
        inputs.add_generation_prompt  = false;
        inputs.continue_final_message = continuation == "content" ? COMMON_CHAT_CONTINUATION_CONTENT
                                                                  : COMMON_CHAT_CONTINUATION_REASONING;
        inputs.continue_msg = continued(inputs.messages.at(inputs.messages.size() - 1));
        inputs.messages.erase(inputs.messages.size() - 1);
    }
    return inputs;
}

ChatPrompt to_prompt(const common_chat_params & params) {
    static const char * const names[] = {"token", "word", "pattern", "pattern_full"};

    ChatPrompt prompt;
    prompt.generation_prompt = params.generation_prompt;
    prompt.format            = common_chat_format_name(params.format);
    prompt.parser            = params.parser;
    prompt.grammar           = params.grammar;
    prompt.is_grammar_lazy   = params.grammar_lazy;
    prompt.preserved_tokens  = params.preserved_tokens;
    prompt.stops             = params.additional_stops;
    prompt.supports_thinking = params.supports_thinking;
    prompt.thinking_start    = params.thinking_start_tag;
    prompt.thinking_ends     = params.thinking_end_tags;
    for (const common_grammar_trigger & trigger : params.grammar_triggers) {
        prompt.triggers.push_back({names[trigger.type], trigger.value});
    }
    return prompt;
}

std::string trimmed(const std::string & text) {
    static const char * const spaces = " \t\n\r\f\v";
    const std::size_t         start  = text.find_first_not_of(spaces);
    return start == text.npos ? "" : text.substr(start, text.find_last_not_of(spaces) + 1 - start);
}

} // namespace

ChatFormat::ChatFormat(std::shared_ptr<Model> model, const std::string & source)
    : model_(std::move(model)), source_(checked_template_source(source)), bos_(token_text(*model_, llama_vocab_bos(model_->vocab()))),
      eos_(token_text(*model_, llama_vocab_eos(model_->vocab()))) {
    harden_builtins();
    common_log_set_verbosity_thold(-1); // what goes wrong is thrown; the rest quotes conversations
    run_within_budget(0, [this] {
        parse();
        analyze();
    });
}

ChatFormat::~ChatFormat() = default;

void ChatFormat::parse() {
    // llama.cpp's own constructor executes the program, before it could be metered.
    template_ = std::make_unique<common_chat_template>("", bos_, eos_);
    try {
        jinja::lexer              lexer;
        const jinja::lexer_result words = lexer.tokenize(source_);
        check_template_nesting(words.tokens);
        template_->prog = jinja::parse_from_tokens(words);
        template_->src  = words.source;
    } catch (const Error &) {
        throw;
    } catch (const std::out_of_range &) {
        fail("TemplateError", "the chat template does not parse: a number in it is too large");
    } catch (const std::exception & error) {
        fail("TemplateError", "the chat template does not parse: " + parse_reason(error.what()));
    }
    meter_program(template_->prog);
    record_renderings(template_->prog);
    template_->caps = jinja::caps_get(template_->prog);
}

void ChatFormat::analyze() {
    auto analysis = std::make_unique<autoparser::autoparser>();
    try {
        analysis->analyze_template(*template_);
        analysis_ = std::move(analysis);
    } catch (const std::exception & error) {
        if (!TemplateBudget::current().exhausted().empty()) {
            throw;
        }
        analysis_failure_ = error.what();
    }
}

std::map<std::string, bool> ChatFormat::capabilities() const { return template_->caps.to_map(); }

ChatPrompt ChatFormat::apply(const std::string & request) const {
    ChatPrompt prompt;
    run_within_budget(request.size(), [&] { prompt = applied(request); });
    return prompt;
}

ChatPrompt ChatFormat::applied(const std::string & request) const {
    autoparser::generation_params inputs = inputs_of(common_json::parse(request));
    const llama_vocab *           vocab  = model_->vocab();
    inputs.add_bos                       = llama_vocab_get_add_bos(vocab);
    inputs.add_eos                       = llama_vocab_get_add_eos(vocab);

    RenderingRecord                   record;
    std::optional<common_chat_params> params = common_chat_try_specialized_template(*template_, template_->src, inputs);
    if (!params && analysis_) {
        params = autoparser::peg_generator::generate_parser(*template_, inputs, *analysis_);
        params->supports_thinking = analysis_->reasoning.mode != autoparser::reasoning_mode::NONE;
        if (params->supports_thinking) {
            params->thinking_start_tag = trimmed(analysis_->reasoning.start);
            const std::string end      = trimmed(analysis_->reasoning.end);
            if (!end.empty()) {
                params->thinking_end_tags = {end};
            }
        }
    }
    if (!params) {
        if (!inputs.tools.is_null() || !inputs.json_schema.is_null()) {
            fail("TemplateError", "the chat template's format cannot be inferred, so tools cannot be used with it: " + analysis_failure_);
        }
        params.emplace();
        params->prompt = common_chat_template_direct_apply(*template_, inputs);
        if (inputs.has_continuation()) {
            params->prompt += common_chat_template_generation_prompt(*template_, inputs) + inputs.continue_msg.render_content();
        }
    }
    ChatPrompt prompt = to_prompt(*params);
    std::vector<std::string> appended;
    if (inputs.has_continuation()) {
        appended = {inputs.continue_msg.reasoning_content, inputs.continue_msg.render_content()};
    }
    prompt.parts = record.parts_of(params->prompt, inputs.add_bos ? bos_ : "", appended);
    return prompt;
}

} // namespace paceline
