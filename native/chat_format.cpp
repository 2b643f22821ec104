#include "chat_format.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <ctime>
#include <exception>
#include <optional>
#include <random>
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
#include "json_schema.hpp"
#include "token_texts.hpp"

namespace paceline {

namespace {

constexpr std::size_t max_analysed_bytes  = 4u << 20; // of all renderings together
constexpr std::size_t max_inferences      = 32;
constexpr std::size_t max_inference_bytes = 16u << 20;
constexpr std::size_t bytes_per_character = 16; // of JSON, in memory

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

// Text of the continued message, which llama.cpp appends to the prompt, goes in as a random one.
std::string placeholder() {
    std::random_device random;
    std::string        text = "paceline";
    for (int i = 0; i < 24; ++i) {
        text += static_cast<char>('a' + random() % 26);
    }
    return text;
}

// The tools, with schemas that llama.cpp translates within limits.
common_json admitted_tools(const common_json & tools, SchemaGuard & guard) {
    common_json admitted = common_json::array();
    for (const common_json & given : tools) {
        common_json       tool  = given;
        const std::string place = "tools[" + str(admitted.size()) + "].function.parameters";
        tool["function"]["parameters"] = guard.admitted(given.at("function").at("parameters"), place, true);
        admitted.push_back(tool);
    }
    return admitted;
}

// Everything that a request has beside its messages, as text.
std::string options_of(const common_json & request) {
    std::string options;
    for (const auto & [name, content] : request.items()) {
        if (name != "messages" && name != "continued") {
            options += name + '=' + content.dump() + '\n';
        }
    }
    return options;
}

// Without tools and schema.
autoparser::generation_params inputs_of(const common_json & request) {
    autoparser::generation_params inputs;
    inputs.messages              = request.at("messages");
    inputs.tool_choice           = tool_choice(text_of(request, "tool_choice"));
    inputs.parallel_tool_calls   = request.at("parallel_tool_calls").get<bool>();
    inputs.reasoning_format      = common_reasoning_format_from_name(text_of(request, "reasoning_format"));
    inputs.enable_thinking       = request.at("enable_thinking").get<bool>();
    inputs.is_inference = false; // for one format llama.cpp would replace a token, also one that a user wrote
    inputs.add_generation_prompt = request.at("add_generation_prompt").get<bool>();
    inputs.extra_context         = common_json::object();
    inputs.extra_context["datetime"]    = date(inputs.now, "%b %d %Y");
    inputs.extra_context["date_string"] = date(inputs.now, "%d %b %Y");
    for (const auto & [name, content] : request.at("variables").items()) {
        inputs.extra_context[name] = content;
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

// Has the model continue the message of the request, and returns the placeholders of its texts.
std::vector<Placeholder> continue_message(autoparser::generation_params & inputs, const common_json & request) {
    if (!request.contains("continued")) {
        return {};
    }
    const common_json & continued = request.at("continued");
    const std::string   content = text_of(continued, "content"), reasoning = text_of(continued, "reasoning_content");
    inputs.add_generation_prompt  = false;
    inputs.continue_final_message = content.empty() ? COMMON_CHAT_CONTINUATION_REASONING : COMMON_CHAT_CONTINUATION_CONTENT;
    inputs.continue_msg.role      = "assistant";
    std::vector<Placeholder> placeholders;
    const auto               put = [&](std::string & field, const std::string & text) {
        if (!text.empty()) {
            placeholders.push_back({placeholder(), text});
            field = placeholders.back().text;
        }
    };
    put(inputs.continue_msg.reasoning_content, reasoning);
    put(inputs.continue_msg.content, content);
    return placeholders;
}

void replace_all(std::string & text, const std::vector<Placeholder> & placeholders) {
    for (const Placeholder & placeholder : placeholders) {
        const std::size_t found = text.find(placeholder.text);
        if (found != text.npos) {
            text.replace(found, placeholder.text.size(), placeholder.input);
        }
    }
}

// A conversation that the model was trained on ends with this token of gpt-oss; one that goes on has the other.
void end_last_message(std::vector<PromptPart> & parts) {
    static const std::string trained = "<|return|>", usual = "<|end|>";
    for (auto part = parts.rbegin(); part != parts.rend(); ++part) {
        const std::size_t found = part->is_input ? part->text.npos : part->text.rfind(trained);
        if (found != part->text.npos) {
            part->text.replace(found, trained.size(), usual);
            return;
        }
    }
}

// The prompt of a continued message if a template ends a conversation otherwise than it begins the
// next message; llama.cpp would append both. `continuation`: llama.cpp's rendering of the message.
std::optional<std::string> begun_message(const common_chat_template & chat_template, autoparser::generation_params inputs,
                                         const std::string & continuation) {
    inputs.continue_final_message = COMMON_CHAT_CONTINUATION_NONE;
    const std::string ended       = common_chat_template_direct_apply(chat_template, inputs);
    const std::string beginning   = common_chat_template_generation_prompt(chat_template, inputs);
    inputs.add_generation_prompt  = true;
    const std::string begun       = common_chat_template_direct_apply(chat_template, inputs);
    if (begun.compare(0, ended.size(), ended) == 0) {
        return std::nullopt;
    }
    if (continuation.compare(0, beginning.size(), beginning) != 0) {
        fail("TemplateError", "the chat template begins messages in a way that none can be continued");
    }
    return begun + continuation.substr(beginning.size());
}

// Every text of the continued message has to be in the prompt, but for thinking in front of content.
void check_continued(const std::string & prompt, const std::vector<Placeholder> & placeholders) {
    if (!placeholders.empty() && prompt.find(placeholders.back().text) == prompt.npos) {
        fail("TemplateError", "the chat format has no place for the text of the continued message; one that has only thinking "
                              "can be continued where the format has thinking");
    }
}

std::vector<std::string> variables_of(const common_json & request) {
    std::vector<std::string> names;
    for (const auto & [name, content] : request.at("variables").items()) {
        names.push_back(name);
    }
    return names;
}

std::string trimmed(const std::string & text) {
    static const char * const spaces = " \t\n\r\f\v";
    const std::size_t         start  = text.find_first_not_of(spaces);
    return start == text.npos ? "" : text.substr(start, text.find_last_not_of(spaces) + 1 - start);
}

} // namespace

struct ChatFormat::Inference {
    common_json                       tools, json_schema; // as admitted
    std::optional<common_chat_params> params; // of the analysis, without a prompt; they hold for their generation prompt
};

ChatFormat::ChatFormat(std::shared_ptr<Model> model, const std::string & source)
    : model_(std::move(model)), source_(checked_template_source(source)), bos_(token_text(*model_, llama_vocab_bos(model_->vocab()))),
      eos_(token_text(*model_, llama_vocab_eos(model_->vocab()))), inferences_(max_inferences, max_inference_bytes) {
    harden_builtins();
    run_within_budget(0, [this] { parse(); });
    try {
        run_within_budget(0, [this] { analyze(); });
    } catch (const Error & error) { // conversations without tools can be rendered all the same
        analysis_failure_ = error.what();
        analysis_.reset(); // llama.cpp goes on after renderings that fail
    }
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
    // llama.cpp compares some fifty renderings, in time that grows faster than they do.
    TemplateBudget::current().limit_output(max_analysed_bytes);
    auto analysis = std::make_unique<autoparser::autoparser>();
    analysis->analyze_template(*template_);
    analysis_ = std::move(analysis);
}

std::map<std::string, bool> ChatFormat::capabilities() const { return template_->caps.to_map(); }

ChatPrompt ChatFormat::apply(const std::string & request) const {
    ChatPrompt prompt;
    run_within_budget(request.size(), [&] { prompt = applied(request); });
    return prompt;
}

ChatPrompt ChatFormat::applied(const std::string & text) const {
    const common_json             request = common_json::parse(text);
    autoparser::generation_params inputs  = inputs_of(request);
    const Recalled                options = recalled(request);
    inputs.tools                          = options.inference->tools;
    inputs.json_schema                    = options.inference->json_schema;
    const std::vector<Placeholder> placeholders = continue_message(inputs, request);
    const llama_vocab *            vocab        = model_->vocab();
    inputs.add_bos                              = llama_vocab_get_add_bos(vocab);
    inputs.add_eos                              = llama_vocab_get_add_eos(vocab);

    RenderingRecord          record(variables_of(request));
    const common_chat_params params = inferred(inputs, options);
    check_continued(params.prompt, placeholders);
    auto parts = record.parts_of(params.prompt, inputs.add_bos ? bos_ : "", inputs.add_eos ? eos_ : "", placeholders);
    if (!parts) {
        fail("TemplateError", "the prompt of this chat format is not what its template renders");
    }
    ChatPrompt prompt = to_prompt(params);
    prompt.parts      = std::move(*parts);
    replace_all(prompt.generation_prompt, placeholders);
    if (!request.at("add_generation_prompt").get<bool>() && source_.find("<|channel|>") != source_.npos) {
        end_last_message(prompt.parts);
    }
    return prompt;
}

ChatFormat::Recalled ChatFormat::recalled(const common_json & request) const {
    Recalled found{options_of(request), nullptr};
    found.inference = inferences_.find(found.options);
    if (!found.inference) {
        SchemaGuard guard;
        auto        made = std::make_shared<Inference>();
        if (request.contains("tools")) {
            made->tools = admitted_tools(request.at("tools"), guard);
        }
        if (request.contains("json_schema")) {
            made->json_schema = guard.admitted(request.at("json_schema"), "json_schema", false);
        }
        inferences_.put(found.options, made, bytes_per_character * found.options.size());
        found.inference = std::move(made);
    }
    return found;
}

common_chat_params ChatFormat::inferred(autoparser::generation_params & inputs, const Recalled & recalled) const {
    std::optional<common_chat_params> params = common_chat_try_specialized_template(*template_, template_->src, inputs);
    if (params) {
        return *params;
    }
    if (analysis_) {
        return analyzed(inputs, recalled);
    }
    if (!inputs.tools.is_null() || !inputs.json_schema.is_null()) {
        fail("TemplateError", "the chat template's format cannot be inferred, so it has no tools and no schemas: " + analysis_failure_);
    }
    params.emplace();
    params->prompt = common_chat_template_direct_apply(*template_, inputs);
    if (inputs.has_continuation()) {
        params->prompt += common_chat_template_generation_prompt(*template_, inputs) + inputs.continue_msg.render_content();
    }
    return *params;
}

common_chat_params ChatFormat::analyzed(autoparser::generation_params & inputs, const Recalled & recalled) const {
    const bool is_continued = inputs.has_continuation();
    if (recalled.inference->params && !is_continued) {
        if (std::optional<common_chat_params> known = rendered(inputs, *recalled.inference)) {
            return *known;
        }
    }
    common_chat_params params = autoparser::peg_generator::generate_parser(*template_, inputs, *analysis_);
    if (is_continued) {
        params.prompt = begun_message(*template_, inputs, params.generation_prompt).value_or(params.prompt);
    }
    params.supports_thinking = analysis_->reasoning.mode != autoparser::reasoning_mode::NONE;
    if (params.supports_thinking) {
        params.thinking_start_tag = trimmed(analysis_->reasoning.start);
        const std::string end     = trimmed(analysis_->reasoning.end);
        if (!end.empty()) {
            params.thinking_end_tags = {end};
        }
    }
    if (!is_continued) {
        auto learned = std::make_shared<Inference>(*recalled.inference);
        learned->params.emplace(params).prompt.clear();
        inferences_.put(recalled.options, learned,
                        bytes_per_character * recalled.options.size() + params.parser.size() + params.grammar.size());
    }
    return params;
}

// The prompt with the cached facts of its options; null if these renderings end with another generation prompt.
std::optional<common_chat_params> ChatFormat::rendered(autoparser::generation_params & inputs,
                                                       const Inference &               inference) const {
    const bool  generates        = inputs.add_generation_prompt;
    std::string prompt           = common_chat_template_direct_apply(*template_, inputs);
    inputs.add_generation_prompt = !generates;
    const std::string other      = common_chat_template_direct_apply(*template_, inputs);
    inputs.add_generation_prompt = generates;

    const std::string & longer  = generates ? prompt : other;
    const std::string & shorter = generates ? other : prompt;
    const auto          same    = std::mismatch(longer.begin(), longer.end(), shorter.begin(), shorter.end()).first;
    if (inference.params->generation_prompt != std::string(same, longer.end())) {
        return std::nullopt;
    }
    common_chat_params params = *inference.params;
    params.prompt             = std::move(prompt);
    return params;
}

} // namespace paceline
