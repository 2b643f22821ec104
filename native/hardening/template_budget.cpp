#include "template_budget.hpp"

#include <algorithm>
#include <ctime>
#include <exception>
#include <stdexcept>
#include <utility>

#include "error.hpp"
#include "stack.hpp"
#include "template_values.hpp"

namespace paceline {

namespace {

double cpu_seconds() {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// llama.cpp reports of a failed template: the place, a piece of the source, and after the last "Error: " the reason.
std::string reason(const std::string & report) {
    const std::size_t what  = report.rfind("Error: ");
    const std::size_t place = report.find(" at line ");
    if (what == report.npos || place == report.npos) {
        return report;
    }
    const std::size_t place_end = std::min(report.find(" in source", place), report.size());
    return report.substr(what + 7) + " (" + report.substr(place + 4, place_end - place - 4) + ")";
}

} // namespace

thread_local TemplateBudget * TemplateBudget::current_ = nullptr;

TemplateBudget::TemplateBudget(std::size_t input_bytes)
    : outer_(std::exchange(current_, this)), stack_top_(static_cast<const char *>(__builtin_frame_address(0))),
      max_value_(TemplateLimits::max_value_bytes + TemplateLimits::value_per_input * input_bytes), output_left_(max_value_),
      work_left_(TemplateLimits::max_work_bytes), cpu_end_(cpu_seconds() + TemplateLimits::max_cpu_s) {}

TemplateBudget::~TemplateBudget() { current_ = outer_; }

void TemplateBudget::stop(const std::string & why) {
    exhausted_ = why;
    throw std::runtime_error(why);
}

void TemplateBudget::refuse(const std::string & message) {
    refusal_ = message;
    throw jinja::raised_exception(message);
}

void TemplateBudget::require_some() const {
    if (!exhausted_.empty()) {
        throw std::runtime_error(exhausted_);
    }
}

void TemplateBudget::step() {
    require_some();
    if (++num_steps_ > TemplateLimits::max_steps) {
        stop("takes more than " + str(TemplateLimits::max_steps) + " steps");
    }
    if (num_steps_ % 16 == 0 && cpu_seconds() > cpu_end_) {
        stop("takes more than " + str(static_cast<int>(TemplateLimits::max_cpu_s)) + " seconds");
    }
    const char * here = static_cast<const char *>(__builtin_frame_address(0));
    if (stack_top_ - here > static_cast<std::ptrdiff_t>(TemplateLimits::max_recursion)) {
        stop("nests calls of its macros too deeply");
    }
}

void TemplateBudget::charge(std::size_t bytes) {
    require_some();
    if (bytes > max_value_ || bytes > work_left_) {
        stop("builds too much text");
    }
    work_left_ -= bytes;
}

void TemplateBudget::charge(const jinja::value & value) { charge(measure(value, 0)); }

void TemplateBudget::print(const jinja::value & value) {
    const std::size_t bytes = measure(value, 0);
    require_some();
    if (bytes > output_left_) {
        stop("prints too much text");
    }
    output_left_ -= bytes;
}

void TemplateBudget::limit_output(std::size_t bytes) { output_left_ = std::min(output_left_, bytes); }

std::size_t TemplateBudget::measure(const jinja::value & value, std::size_t depth) {
    if (depth > TemplateLimits::max_depth) {
        stop("prints a value that is nested more than " + str(TemplateLimits::max_depth) + " deep, or contains itself");
    }
    if (is_text(value)) {
        return text_size(value);
    }
    std::size_t bytes = bytes_per_element * (1 + value->val_arr.size() + value->val_obj.size());
    const auto  add   = [&](const jinja::value & element) {
        bytes += measure(element, depth + 1);
        if (bytes > max_value_) {
            stop("builds too much text");
        }
    };
    for (const jinja::value & element : value->val_arr) {
        add(element);
    }
    for (const auto & [key, content] : value->val_obj) {
        add(key);
        add(content);
    }
    return bytes;
}

std::size_t text_size(const jinja::value & text) {
    return text->val_str.length() + bytes_per_part * text->val_str.parts.size();
}

void run_within_budget(std::size_t input_bytes, const std::function<void()> & work) {
    run_on_stack(TemplateLimits::stack_bytes, [&] {
        TemplateBudget budget(input_bytes);
        std::string    failure;
        try {
            work();
        } catch (const Error &) {
            throw;
        } catch (const std::exception & error) {
            failure = reason(error.what());
        }
        if (!budget.exhausted().empty()) {
            fail("TemplateError", "the chat template " + budget.exhausted());
        }
        if (!failure.empty() && budget.refusal()) {
            fail("TemplateError", "the chat template refuses this conversation: " + *budget.refusal());
        }
        if (!failure.empty()) {
            fail("TemplateError", "the chat template failed: " + failure);
        }
    });
}

} // namespace paceline
