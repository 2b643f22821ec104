#include "template_metering.hpp"

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <utility>

#include "template_budget.hpp"
#include "template_values.hpp"

namespace paceline {

namespace {

using jinja::statement_ptr;
using jinja::value;

// A statement in the body of the template, a block or a macro.
struct Metered : jinja::statement {
    explicit Metered(statement_ptr && inner) : inner(std::move(inner)) { pos = this->inner->pos; }

    std::string type() const override { return inner->type(); }
    void        visit(jinja::context & ctx) const override { inner->visit(ctx); }
    value       execute_impl(jinja::context & ctx) const override {
        TemplateBudget & budget = TemplateBudget::current();
        budget.step();
        value result = inner->execute(ctx);
        budget.print(result);
        return result;
    }

    statement_ptr inner;
};

// An expression with work around it: calls, through which all recursion goes, tuples, which are compared by recursion,
// and operands that a filter converts to text.
template <typename Around> struct Wrapped : jinja::expression {
    explicit Wrapped(statement_ptr && inner) : inner(std::move(inner)) { pos = this->inner->pos; }

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

// An expression of a value that is already computed.
struct Constant : jinja::expression {
    explicit Constant(value content) : content(std::move(content)) { pos = 0; }
    value execute_impl(jinja::context &) const override { return content; }

    value content;
};

// a + b, a ~ b and a * b: charges the result before it is built. Comparisons: charges tuples, as llama.cpp compares every level
// once for each level around it.
struct Charged : jinja::expression {
    explicit Charged(jinja::binary_expression & plain)
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
                charge_product(budget, text_size(a), b->as_int());
            } else if (is_text(b) && jinja::is_val<jinja::value_int>(a)) {
                charge_product(budget, text_size(b), a->as_int());
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
bool converts_to_text(const statement_ptr & filter);
template <typename Around> void wrap(statement_ptr & place);

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

// llama.cpp inspects the class of filters, tests, names and targets of assignments, so these nodes are not replaced.
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
        if (converts_to_text(e->filter)) {
            wrap<AroundText>(e->operand);
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

template <typename Around> void wrap(statement_ptr & place) { place = std::make_unique<Wrapped<Around>>(std::move(place)); }

void rebuild(statement_ptr & place) {
    if (!place) {
        return;
    }
    if (!rebuild_block(place.get()) && !rebuild_access(place.get())) {
        rebuild_operation(place.get());
    }
    if (auto * binary = jinja::cast_stmt<jinja::binary_expression>(place)) {
        const std::string & op = binary->op.value;
        if (op != "and" && op != "or") { // these may skip their right side
            place = std::make_unique<Charged>(*binary);
        }
    } else if (jinja::is_stmt<jinja::call_expression>(place)) {
        wrap<AroundCall>(place);
    } else if (jinja::is_stmt<jinja::tuple_literal>(place)) {
        wrap<AroundTuple>(place);
    }
}

// Whether llama.cpp converts the filter's operand to text, whatever it is.
bool converts_to_text(const statement_ptr & filter) {
    static const std::array<std::string, 8> names = {"capitalize", "lower", "replace",  "strip",
                                                     "trim",       "title", "upper",    "wordcount"};
    const auto * name = jinja::cast_stmt<jinja::identifier>(filter);
    return name && std::find(names.begin(), names.end(), name->val) != names.end();
}

} // namespace

void meter_program(jinja::program & program) { meter(program.body); }

} // namespace paceline
