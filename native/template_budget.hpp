// What the running of one chat template may take. llama.cpp runs templates without any limit: one that counts to a billion,
// doubles a text in a loop or calls itself without an end would take the process with it.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "jinja/runtime.h"

namespace paceline {

// Beyond these is a TemplateError.
struct TemplateLimits {
    static constexpr std::size_t max_bytes          = 1 << 20;     // of a template's source
    static constexpr std::size_t max_tag_tokens     = 2000;        // between {{ and }}, or {% and %}
    static constexpr std::size_t max_blocks         = 200;         // one in the other; an elif counts as one
    static constexpr std::size_t max_steps          = 1'000'000;   // statements executed
    static constexpr std::size_t max_range          = 100'000;     // numbers of one range()
    static constexpr std::size_t max_depth          = 200;         // of a value that is shown as JSON or text
    static constexpr std::size_t max_value_bytes    = 256u << 20;  // of one text, and of all that is shown, and ...
    static constexpr std::size_t value_per_input    = 32;          // ... so many more for each byte of the conversation
    static constexpr std::size_t max_work_bytes     = std::size_t{8} << 30; // of all texts and lists put together
    static constexpr double      max_cpu_s          = 20;
    static constexpr std::size_t max_recursion      = 16u << 20;   // bytes of stack
    static constexpr std::size_t stack_bytes        = 512u << 20;  // of address space; values are freed by recursion too
};

// The budget of the template that runs on this thread, while it lives.
class TemplateBudget {
public:
    explicit TemplateBudget(std::size_t input_bytes);
    ~TemplateBudget();
    TemplateBudget(const TemplateBudget &)             = delete;
    TemplateBudget & operator=(const TemplateBudget &) = delete;

    static TemplateBudget & current() { return *current_; } // there must be one wherever a template is run

    // All of these throw once something is used up, and from then on: a template cannot go on after that.
    void step();
    void charge(std::size_t bytes);          // about to be put together
    void charge(const jinja::value & value); // about to be made a text
    void show(const jinja::value & value);   // has become a part of what is shown

    [[noreturn]] void refuse(const std::string & message); // the template's own doing: raise_exception

    const std::string &                exhausted() const noexcept { return exhausted_; } // empty while something is left
    const std::optional<std::string> & refusal() const noexcept { return refusal_; }

private:
    std::size_t       measure(const jinja::value & value, std::size_t depth); // stops at values that hold themselves
    void              require_some() const;
    [[noreturn]] void stop(const std::string & why);

    static thread_local TemplateBudget * current_;

    TemplateBudget * outer_;
    const char *     stack_top_;
    std::size_t      num_steps_ = 0;
    std::size_t      max_value_;
    std::size_t      shown_left_;
    std::size_t      work_left_;
    double           cpu_end_;

    std::string                exhausted_;
    std::optional<std::string> refusal_;
};

// Makes a parsed template spend its budget: every statement is a step, everything that puts texts together is charged.
void put_on_budget(jinja::program & program);

// Refuses nesting that the parser would not survive. `tokens`: of the lexer.
void check_nesting(const std::vector<jinja::token> & tokens);

} // namespace paceline
