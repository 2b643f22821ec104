// Limits of one rendering of a chat template, and its usage so far.
//
// llama.cpp runs Jinja without limits: a template that counts to a billion, doubles a text in a loop or recurses without
// end would exhaust the process.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>

#include "jinja/runtime.h"

namespace paceline {

// Beyond these is a TemplateError.
struct TemplateLimits {
    static constexpr std::size_t max_bytes          = 1 << 20;     // of a template's source
    static constexpr std::size_t max_tag_tokens     = 2000;        // between {{ and }}, or {% and %}
    static constexpr std::size_t max_blocks         = 200;         // nested; an elif counts as one
    static constexpr std::size_t max_steps          = 1'000'000;   // statements and calls executed
    static constexpr std::size_t max_range          = 100'000;     // numbers of one range()
    static constexpr std::size_t max_depth          = 200;         // of a value that is printed as JSON or text
    static constexpr std::size_t max_value_bytes    = 256u << 20;  // of one text, and of the whole output, and ...
    static constexpr std::size_t value_per_input    = 32;          // ... so many more for each byte of the messages
    static constexpr std::size_t max_work_bytes     = std::size_t{8} << 30; // of all texts and lists built
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

    static TemplateBudget & current() { return *current_; } // of this thread; must exist while a template runs

    // Each of these throws once the budget is exceeded, and at every later call: a template cannot continue after that.
    void step();
    void charge(std::size_t bytes);          // about to be built
    void charge(const jinja::value & value); // about to be converted to text
    void print(const jinja::value & value);  // added to the output
    void limit_output(std::size_t bytes);    // of the rest

    [[noreturn]] void refuse(const std::string & message); // the template's own decision: raise_exception

    const std::string &                exhausted() const noexcept { return exhausted_; } // the reason; empty while within limits
    const std::optional<std::string> & refusal() const noexcept { return refusal_; }

private:
    std::size_t       measure(const jinja::value & value, std::size_t depth); // stops at values that contain themselves
    void              require_some() const;
    [[noreturn]] void stop(const std::string & why);

    static thread_local TemplateBudget * current_;

    TemplateBudget * outer_;
    const char *     stack_top_;
    std::size_t      num_steps_ = 0;
    std::size_t      max_value_;
    std::size_t      output_left_;
    std::size_t      work_left_;
    double           cpu_end_;

    std::string                exhausted_;
    std::optional<std::string> refusal_;
};

inline constexpr std::size_t bytes_per_part    = 64; // of a text, beside its characters
inline constexpr std::size_t bytes_per_element = 16; // of a list

// Bytes that a text value holds.
std::size_t text_size(const jinja::value & text);

// Runs `work`, which parses or executes a template, within a budget and on a stack of its own. Fails with TemplateError
// if `work` exceeds the budget or throws.
void run_within_budget(std::size_t input_bytes, const std::function<void()> & work);

} // namespace paceline
