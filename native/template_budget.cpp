#include "template_budget.hpp"

#include <algorithm>
#include <array>
#include <ctime>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "error.hpp"
#include "template_values.hpp"

namespace paceline {

namespace {

using jinja::statement_ptr;
using jinja::value;

double cpu_seconds() {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

constexpr std::size_t bytes_per_part    = 64; // of a text, beside its letters
constexpr std::size_t bytes_per_element = 16; // of a list

std::size_t size_of(const value & text) { return text->val_str.length() + bytes_per_part * text->val_str.parts.size(); }

// A statement in the body of the template, a block or a macro.
struct Metered : jinja::statement {
    explicit Metered(statement_ptr && inner) : inner(std::move(inner)) { pos = this->inner->pos; }

    std::string type() const override { return inner->type(); }
    void        visit(jinja::context & ctx) const override { inner->visit(ctx); }
    value       execute_impl(jinja::context & ctx) const override {
        TemplateBudget & budget = TemplateBudget::current();
        budget.step();
        value result = inner->execute(ctx);
        budget.show(result);
        return result;
    }

    statement_ptr inner;
};

// An expression that something is done with before or after: calls, by which all recursion goes, tuples, which are compared
// by recursion, and what a filter makes a text of.
template <typename Around> struct Watched : jinja::expression {
    explicit Watched(statement_ptr && inner) : inner(std::move(inner)) { pos = this->inner->pos; }

    std::string type() const override { return inner->type(); }
    void        visit(jinja::context & ctx) const override { inner->visit(ctx); }
    value       execute_impl(jinja::context & ctx) const override {
        return Around::execute(TemplateBudget::current(), [&] { return inner->execute(ctx); });
    }

    statement_ptr inner;
};

struct AroundCall {
    template <typename Run> static value execute(TemplateBudget & budget, Run run) {
        budget.step();
        return run();
    }
};

struct AroundTuple {
    template <typename Run> static value execute(TemplateBudget & budget, Run run) {
        value tuple = run();
        for (const value & element : tuple->val_arr) {
            if (jinja::is_val<jinja::value_tuple>(element)) {
                budget.charge(element);
            }
        }
        return tuple;
    }
};

struct AroundText {
    template <typename Run> static value execute(TemplateBudget & budget, Run run) {
        value result = run();
        budget.charge(result);
        return as_marked_text(result);
    }
};

// A value where an expression is wanted.
struct Constant : jinja::expression {
    explicit Constant(value content) : content(std::move(content)) { pos = 0; }
    value execute_impl(jinja::context &) const override { return content; }

    value content;
};

// a + b, a ~ b and a * b: what they make is charged before it is made. Comparisons: tuples are charged, in which llama.cpp
// looks at every level once for each that is around it.
struct Sized : jinja::expression {
    explicit Sized(jinja::binary_expression & plain)
        : op(plain.op), left(std::move(plain.left)), right(std::move(plain.right)) {
        pos = plain.pos;
    }

    std::string type() const override { return "BinaryExpression"; }
    value       execute_impl(jinja::context & ctx) const override {
        value a = left->execute(ctx), b = right->execute(ctx);
        charge(a, b);
        if ((op.value == "+" || op.value == "~") && (is_text(a) || is_text(b))) {
            a = as_marked_text(a);
            b = as_marked_text(b);
        }
        const jinja::binary_expression plain(op, std::make_unique<Constant>(std::move(a)),
                                             std::make_unique<Constant>(std::move(b)));
        return plain.execute_impl(ctx);
    }

    void charge(const value & a, const value & b) const {
        TemplateBudget & budget = TemplateBudget::current();
        if (op.value == "*") {
            if (is_text(a) && jinja::is_val<jinja::value_int>(b)) {
                charge_product(budget, size_of(a), b->as_int());
            } else if (is_text(b) && jinja::is_val<jinja::value_int>(a)) {
                charge_product(budget, size_of(b), a->as_int());
            }
        } else if (op.value != "+" && op.value != "~") {
            for (const value & side : {a, b}) {
                if (jinja::is_val<jinja::value_tuple>(side)) {
                    budget.charge(side);
                }
            }
        } else if (jinja::is_val<jinja::value_array>(a) && jinja::is_val<jinja::value_array>(b)) {
            budget.charge(bytes_per_element * (a->val_arr.size() + b->val_arr.size()));
        } else {
            budget.charge(a);
            budget.charge(b);
        }
    }

    static void charge_product(TemplateBudget & budget, std::size_t size, int64_t count) {
        const auto times = static_cast<std::size_t>(std::max<int64_t>(count, 0));
        budget.charge(times > SIZE_MAX / (size + 1) ? SIZE_MAX : size * times);
    }

    jinja::token  op;
    statement_ptr left;
    statement_ptr right;
};

void rebuild(statement_ptr & place);
bool makes_text(const statement_ptr & filter);
template <typename Around> void watch(statement_ptr & place);

void rebuild_all(jinja::statements & places) {
    for (statement_ptr & place : places) {
        rebuild(place);
    }
}

void meter(jinja::statements & body) {
    for (statement_ptr & place : body) {
        rebuild(place);
        place = std::make_unique<Metered>(std::move(place));
    }
}

// The rest of a node that llama.cpp looks at by its class stays what it is: filters, tests, names, what is assigned to.
void rebuild_arguments(statement_ptr & place) {
    if (auto * call = jinja::cast_stmt<jinja::call_expression>(place)) {
        rebuild_all(call->args);
    }
}

bool rebuild_block(jinja::statement * node) {
    if (auto * s = dynamic_cast<jinja::if_statement *>(node)) {
        rebuild(s->test);
        meter(s->body);
        meter(s->alternate);
    } else if (auto * s = dynamic_cast<jinja::for_statement *>(node)) {
        rebuild(s->iterable);
        meter(s->body);
        meter(s->default_block);
    } else if (auto * s = dynamic_cast<jinja::set_statement *>(node)) {
        rebuild(s->val);
        meter(s->body);
    } else if (auto * s = dynamic_cast<jinja::macro_statement *>(node)) {
        rebuild_all(s->args);
        meter(s->body);
    } else if (auto * s = dynamic_cast<jinja::filter_statement *>(node)) {
        rebuild_arguments(s->filter);
        meter(s->body);
    } else if (auto * s = dynamic_cast<jinja::call_statement *>(node)) {
        rebuild_arguments(s->call);
        rebuild_all(s->caller_args);
        meter(s->body);
    } else {
        return false;
    }
    return true;
}

bool rebuild_access(jinja::statement * node) {
    if (auto * e = dynamic_cast<jinja::member_expression *>(node)) {
        rebuild(e->object);
        if (e->computed) {
            rebuild(e->property);
        }
    } else if (auto * e = dynamic_cast<jinja::slice_expression *>(node)) {
        rebuild(e->start_expr);
        rebuild(e->stop_expr);
        rebuild(e->step_expr);
    } else if (auto * e = dynamic_cast<jinja::call_expression *>(node)) {
        rebuild(e->callee);
        rebuild_all(e->args);
    } else if (auto * e = dynamic_cast<jinja::keyword_argument_expression *>(node)) {
        rebuild(e->val);
    } else if (auto * e = dynamic_cast<jinja::spread_expression *>(node)) {
        rebuild(e->argument);
    } else if (auto * e = dynamic_cast<jinja::array_literal *>(node)) {
        rebuild_all(e->val);
    } else if (auto * e = dynamic_cast<jinja::tuple_literal *>(node)) {
        rebuild_all(e->val);
    } else if (auto * e = dynamic_cast<jinja::object_literal *>(node)) {
        for (auto & [key, content] : e->val) {
            rebuild(key);
            rebuild(content);
        }
    } else {
        return false;
    }
    return true;
}

void rebuild_operation(jinja::statement * node) {
    if (auto * e = dynamic_cast<jinja::binary_expression *>(node)) {
        rebuild(e->left);
        rebuild(e->right);
    } else if (auto * e = dynamic_cast<jinja::filter_expression *>(node)) {
        rebuild(e->operand);
        rebuild_arguments(e->filter);
        if (makes_text(e->filter)) {
            watch<AroundText>(e->operand);
        }
    } else if (auto * e = dynamic_cast<jinja::select_expression *>(node)) {
        rebuild(e->lhs);
        rebuild(e->test);
    } else if (auto * e = dynamic_cast<jinja::test_expression *>(node)) {
        rebuild(e->operand);
        rebuild_arguments(e->test);
    } else if (auto * e = dynamic_cast<jinja::unary_expression *>(node)) {
        rebuild(e->argument);
    } else if (auto * e = dynamic_cast<jinja::ternary_expression *>(node)) {
        rebuild(e->condition);
        rebuild(e->true_expr);
        rebuild(e->false_expr);
    }
}

template <typename Around> void watch(statement_ptr & place) { place = std::make_unique<Watched<Around>>(std::move(place)); }

void rebuild(statement_ptr & place) {
    if (!place) {
        return;
    }
    if (!rebuild_block(place.get()) && !rebuild_access(place.get())) {
        rebuild_operation(place.get());
    }
    if (auto * binary = jinja::cast_stmt<jinja::binary_expression>(place)) {
        const std::string & op = binary->op.value;
        if (op != "and" && op != "or") { // these may leave their right side
            place = std::make_unique<Sized>(*binary);
        }
    } else if (jinja::is_stmt<jinja::call_expression>(place)) {
        watch<AroundCall>(place);
    } else if (jinja::is_stmt<jinja::tuple_literal>(place)) {
        watch<AroundTuple>(place);
    }
}

// llama.cpp makes a text of whatever these filters are given.
bool makes_text(const statement_ptr & filter) {
    static const std::array<std::string, 8> names = {"capitalize", "lower", "replace",  "strip",
                                                     "trim",       "title", "upper",    "wordcount"};
    const auto * name = jinja::cast_stmt<jinja::identifier>(filter);
    return name && std::find(names.begin(), names.end(), name->val) != names.end();
}

} // namespace

thread_local TemplateBudget * TemplateBudget::current_ = nullptr;

TemplateBudget::TemplateBudget(std::size_t input_bytes)
    : outer_(std::exchange(current_, this)), stack_top_(static_cast<const char *>(__builtin_frame_address(0))),
      max_value_(TemplateLimits::max_value_bytes + TemplateLimits::value_per_input * input_bytes), shown_left_(max_value_),
      work_left_(TemplateLimits::max_work_bytes),
      cpu_end_(cpu_seconds() + TemplateLimits::max_cpu_s) {}

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
        stop("takes more than " + std::to_string(TemplateLimits::max_steps) + " steps");
    }
    if (num_steps_ % 16 == 0 && cpu_seconds() > cpu_end_) {
        stop("takes more than " + std::to_string(static_cast<int>(TemplateLimits::max_cpu_s)) + " seconds");
    }
    const char * here = static_cast<const char *>(__builtin_frame_address(0));
    if (stack_top_ - here > static_cast<std::ptrdiff_t>(TemplateLimits::max_recursion)) {
        stop("calls its macros too deep one from the other");
    }
}

void TemplateBudget::charge(std::size_t bytes) {
    require_some();
    if (bytes > max_value_ || bytes > work_left_) {
        stop("puts too much text together");
    }
    work_left_ -= bytes;
}

void TemplateBudget::charge(const value & value) { charge(measure(value, 0)); }

void TemplateBudget::show(const value & value) {
    const std::size_t bytes = measure(value, 0);
    require_some();
    if (bytes > shown_left_) {
        stop("shows too much text");
    }
    shown_left_ -= bytes;
}

std::size_t TemplateBudget::measure(const value & value, std::size_t depth) {
    if (depth > TemplateLimits::max_depth) {
        stop("shows a value that is nested more than " + std::to_string(TemplateLimits::max_depth) + " deep, or holds itself");
    }
    if (is_text(value)) {
        return size_of(value);
    }
    std::size_t bytes = bytes_per_element * (1 + value->val_arr.size() + value->val_obj.size());
    const auto  add   = [&](const jinja::value & element) {
        bytes += measure(element, depth + 1);
        if (bytes > max_value_) {
            stop("puts too much text together");
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

void put_on_budget(jinja::program & program) { meter(program.body); }

void check_nesting(const std::vector<jinja::token> & tokens) {
    using jinja::token;
    static const std::array<std::string, 6> openers = {"if", "for", "macro", "call", "filter", "set"};
    std::vector<std::size_t>                outer; // depth around each open block
    std::size_t                             depth = 0, in_tag = 0;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
        const bool opens = tokens[i].t == token::open_statement || tokens[i].t == token::open_expression;
        in_tag           = opens ? 0 : in_tag + 1;
        if (tokens[i].t == token::text || tokens[i].t == token::comment) {
            in_tag = 0;
        }
        if (in_tag > TemplateLimits::max_tag_tokens) {
            fail("TemplateError", "the chat template has a tag of more than " +
                                      std::to_string(TemplateLimits::max_tag_tokens) + " words and signs");
        }
        if (tokens[i].t != token::open_statement || i + 1 == tokens.size()) {
            continue;
        }
        const std::string & name  = tokens[i + 1].value;
        bool                block = std::find(openers.begin(), openers.end(), name) != openers.end();
        if (name == "set") { // with a value it opens no block
            for (std::size_t j = i + 1; block && j < tokens.size() && tokens[j].t != token::close_statement; ++j) {
                block = tokens[j].t != token::equals;
            }
        }
        if (block) {
            outer.push_back(depth++);
        } else if (name == "elif") {
            ++depth;
        } else if (name.rfind("end", 0) == 0 && name != "endgeneration" && !outer.empty()) {
            depth = outer.back();
            outer.pop_back();
        }
        if (depth > TemplateLimits::max_blocks) {
            fail("TemplateError", "the chat template has more than " + std::to_string(TemplateLimits::max_blocks) +
                                      " blocks one in the other");
        }
    }
}

} // namespace paceline
