#include "grammar_guard.hpp"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "error.hpp"
#include "grammar_reader.hpp"

namespace paceline {

namespace {

using Item        = GrammarItem;
using Alternative = GrammarAlternative;
using Rule        = GrammarRule;

// Analyses which rules can begin with which before any character is consumed.
class Beginnings {
public:
    explicit Beginnings(const std::vector<Rule> & rules) : rules_(rules) {
        find_empty();
        find_edges();
    }

    void check();

private:
    struct Edge {
        size_t to;
        bool   grows; // more follows after it
    };

    bool can_be_empty(const Item & item) const {
        return item.optional || (item.rule >= 0 && empty_[static_cast<size_t>(item.rule)]);
    }
    void find_empty();
    void find_edges();
    void check_counts() const;
    void visit(size_t start);
    void leave(size_t rule);

    const std::vector<Rule> &      rules_;
    std::vector<char>              empty_;
    std::vector<std::vector<Edge>> edges_;
    // Tarjan's strongly connected components, without recursion
    std::vector<size_t>                    order_, low_, component_, stack_;
    std::vector<char>                      open_;
    std::vector<std::pair<size_t, size_t>> path_; // rule, next edge
    std::vector<uint64_t>                  depth_, paths_;
    size_t                                 clock_ = 0, components_ = 0;
};

void Beginnings::find_empty() {
    empty_.assign(rules_.size(), 0);
    // A worklist by users: a rule that can be empty affects only the rules that refer to it.
    std::vector<std::vector<size_t>> users(rules_.size());
    std::vector<size_t>              todo(rules_.size());
    for (size_t i = 0; i < rules_.size(); ++i) {
        todo[i] = i;
        for (const Alternative & items : rules_[i].alternatives) {
            for (const Item & item : items) {
                if (item.rule >= 0) {
                    users[static_cast<size_t>(item.rule)].push_back(i);
                }
            }
        }
    }
    while (!todo.empty()) {
        const size_t i = todo.back();
        todo.pop_back();
        const auto & all = rules_[i].alternatives;
        if (!empty_[i] && std::any_of(all.begin(), all.end(), [this](const Alternative & items) {
                return std::all_of(items.begin(), items.end(), [this](const Item & item) { return can_be_empty(item); });
            })) {
            empty_[i] = 1;
            todo.insert(todo.end(), users[i].begin(), users[i].end());
        }
    }
}

void Beginnings::find_edges() {
    edges_.resize(rules_.size());
    for (size_t i = 0; i < rules_.size(); ++i) {
        for (const Alternative & items : rules_[i].alternatives) {
            for (size_t j = 0; j < items.size(); ++j) {
                if (items[j].rule >= 0) {
                    edges_[i].push_back({static_cast<size_t>(items[j].rule), items[j].repeats || j + 1 < items.size()});
                }
                if (!can_be_empty(items[j])) {
                    break;
                }
            }
        }
    }
}

// Each time that a counted item can be left out is one more way to read every text, and llama.cpp tries them all.
void Beginnings::check_counts() const {
    for (const Rule & rule : rules_) {
        for (const Alternative & items : rule.alternatives) {
            for (const Item & item : items) {
                const bool hollow = item.hollow || (item.rule >= 0 && empty_[static_cast<size_t>(item.rule)]);
                if (hollow && item.counted > GrammarLimits::max_hollow) {
                    fail("GrammarError", "grammar: in '" + rule.name + "' something that can be empty is repeated up to " +
                                             str(item.counted) + " times (at most " +
                                             str(GrammarLimits::max_hollow) +
                                             "); make it not empty and the repetition begin at 0");
                }
            }
        }
    }
}

void Beginnings::check() {
    check_counts();
    const size_t n = rules_.size();
    order_.assign(n, 0), low_.assign(n, 0), component_.assign(n, 0), open_.assign(n, 0);
    depth_.assign(n, 1), paths_.resize(n);
    for (size_t i = 0; i < n; ++i) {
        paths_[i] = rules_[i].alternatives.size();
    }
    for (size_t i = 0; i < n; ++i) {
        if (order_[i] == 0) {
            visit(i);
        }
    }
    for (size_t i = 0; i < n; ++i) {
        for (const Edge & edge : edges_[i]) {
            if (edge.grows && component_[i] == component_[edge.to]) {
                fail("GrammarError", "grammar: '" + rules_[i].name + "' refers to itself before any character (left "
                                     "recursion); put the recursive reference behind what its alternative begins with");
            }
        }
        if (depth_[i] > GrammarLimits::max_chain || paths_[i] > GrammarLimits::max_paths) {
            fail("GrammarError", "grammar: '" + rules_[i].name + "' can begin in too many ways: with chains of " +
                                     str(depth_[i]) + " rules (at most " +
                                     str(GrammarLimits::max_chain) + ") and " + str(paths_[i]) +
                                     " alternatives (at most " + str(GrammarLimits::max_paths) + ")");
        }
    }
}

void Beginnings::visit(size_t start) {
    path_ = {{start, 0}};
    while (!path_.empty()) {
        auto & [rule, next] = path_.back();
        if (next == 0) {
            order_[rule] = low_[rule] = ++clock_;
            stack_.push_back(rule);
            open_[rule] = 1;
        }
        if (next < edges_[rule].size()) {
            const size_t to = edges_[rule][next++].to;
            if (order_[to] == 0) {
                path_.push_back({to, 0});
            } else if (open_[to]) {
                low_[rule] = std::min(low_[rule], order_[to]);
            }
            continue;
        }
        leave(rule);
    }
}

void Beginnings::leave(size_t rule) {
    path_.pop_back();
    if (!path_.empty()) {
        low_[path_.back().first] = std::min(low_[path_.back().first], low_[rule]);
    }
    for (const Edge & edge : edges_[rule]) {
        depth_[rule] = std::max(depth_[rule], depth_[edge.to] + 1);
        paths_[rule] = std::min<uint64_t>(paths_[rule] + paths_[edge.to], UINT32_MAX);
    }
    if (low_[rule] == order_[rule]) {
        ++components_;
        for (size_t member = rules_.size(); member != rule;) {
            member = stack_.back();
            stack_.pop_back();
            open_[member]      = 0;
            component_[member] = components_;
        }
    }
}

} // namespace

void check_grammar(const std::shared_ptr<Model> & model, const std::string & text, const std::string & root) {
    const std::vector<Rule> rules = outline_grammar(model, text);
    const bool has_root = std::any_of(rules.begin(), rules.end(), [&](const Rule & rule) { return rule.name == root; });
    if (!has_root || root.find(' ') != std::string::npos) { // groups have names with blanks
        fail("GrammarError", "grammar: there is no rule '" + root + "' to begin with (grammar_root)");
    }
    Beginnings(rules).check();
}

} // namespace paceline
