#include "grammar_matcher.hpp"

#include <algorithm>
#include <utility>

#include "error.hpp"

namespace paceline {

namespace {

constexpr uint32_t last_character = 0x10FFFF;

bool is_surrogate(uint32_t character) { return character >= 0xD800 && character <= 0xDFFF; }

} // namespace

bool GrammarMatcher::Seen::insert(uint64_t key) {
    if (2 * count_ >= slots_.size()) {
        const auto old = std::exchange(slots_, std::vector<std::pair<uint64_t, uint64_t>>(2 * slots_.size()));
        count_         = 0;
        for (const auto & [other, round] : old) {
            if (round == round_) {
                insert(other);
            }
        }
    }
    const size_t mask = slots_.size() - 1;
    for (size_t i = (key * 0x9E3779B97F4A7C15) >> 40 & mask;; i = (i + 1) & mask) {
        if (slots_[i].second != round_) {
            slots_[i] = {key, round_};
            ++count_;
            return true;
        }
        if (slots_[i].first == key) {
            return false;
        }
    }
}

GrammarMatcher::GrammarMatcher(std::shared_ptr<const GrammarRules> rules)
    : rules_(std::move(rules)), nodes_(1), levels_(1), steps_(1), entered_(rules_->starts.size()) {
    nodes_[0].top = true;
    first_        = 1;
    seen_.clear();
    call(0, 0, 0, levels_[0]);
    close(levels_[0]);
    levels_[0].nodes = nodes_.size();
    steps_[0].level  = 0;
}

void GrammarMatcher::spend(uint64_t work) {
    work_ += work;
    if (work_ > max_work) {
        fail("SamplingError", "grammar: too ambiguous: there are too many ways to match the text; make its rules begin with "
                              "characters that distinguish them");
    }
}

// Calls `use` with the bounds of each range of the characters at `at`; returns the element after them.
template <typename Use> uint32_t GrammarMatcher::ranges(uint32_t at, Use use) {
    const uint32_t first = at;
    do {
        if (element(at).kind == Kind::any) {
            use(0u, last_character);
        } else if (element(at + 1).kind == Kind::upto) {
            use(element(at).value, element(at + 1).value);
            ++at;
        } else {
            use(element(at).value, element(at).value);
        }
        ++at;
    } while (element(at).kind == Kind::also);
    spend(at - first);
    return at;
}

bool GrammarMatcher::matches(const Item & item, uint32_t character, uint32_t & next) {
    if (element(item.at).kind == Kind::token || element(item.at).kind == Kind::not_token) {
        return false;
    }
    bool found = false;
    next       = ranges(item.at, [&](uint32_t low, uint32_t high) { found |= low <= character && character <= high; });
    return found != (element(item.at).kind == Kind::excluded);
}

// Whether any of these characters is allowed here.
bool GrammarMatcher::touches(const Item & item, uint32_t low, uint32_t high) {
    const Kind kind = element(item.at).kind;
    if (kind == Kind::token || kind == Kind::not_token) {
        return false;
    }
    if (kind != Kind::excluded) {
        bool found = false;
        ranges(item.at, [&](uint32_t from, uint32_t to) { found |= from <= high && low <= to; });
        return found;
    }
    uint64_t at = low; // the first that is not known to be excluded
    for (bool moved = true; moved && at <= high;) {
        moved = false;
        ranges(item.at, [&](uint64_t from, uint64_t to) {
            if (from <= at && at <= to) {
                at    = to + 1;
                moved = true;
            }
        });
    }
    return at <= high;
}

bool GrammarMatcher::may_become(const Step & step) {
    const uint32_t low  = std::max(step.value << (6 * step.missing), step.least);
    const uint32_t high = std::min(((step.value + 1) << (6 * step.missing)) - 1, last_character);
    if (low > high || (is_surrogate(low) && is_surrogate(high))) {
        return false;
    }
    const std::vector<Item> & items = levels_[step.level].items;
    return std::any_of(items.begin(), items.end(), [&](const Item & item) { return touches(item, low, high); });
}

bool GrammarMatcher::names(const Item & item, int32_t token) const {
    const GrammarRules::Element & e = element(item.at);
    return (e.kind == Kind::token && e.value == static_cast<uint32_t>(token)) ||
           (e.kind == Kind::not_token && e.value != static_cast<uint32_t>(token));
}

bool GrammarMatcher::takes(int32_t token, std::string_view bytes) {
    if (bytes.empty()) {
        return false;
    }
    const std::vector<Item> & items = levels_[0].items;
    if (levels_[0].named && steps_[0].missing == 0) {
        spend(items.size());
        if (std::any_of(items.begin(), items.end(), [&](const Item & item) { return names(item, token); })) {
            return true;
        }
    }
    return takes(bytes);
}

bool GrammarMatcher::takes(std::string_view bytes) {
    const auto   end    = std::mismatch(asked_.begin(), asked_.end(), bytes.begin(), bytes.end()).first;
    const size_t common = static_cast<size_t>(end - asked_.begin());
    if (common == asked_.size() && common < bytes.size() && static_cast<unsigned char>(bytes[common]) == dead_) {
        return false;
    }
    back(common);
    for (const char byte : bytes.substr(common)) {
        if (!step(static_cast<unsigned char>(byte))) {
            dead_ = static_cast<unsigned char>(byte);
            return false;
        }
        asked_ += byte;
    }
    return true;
}

void GrammarMatcher::back(size_t length) {
    asked_.resize(length);
    steps_.resize(length + 1, steps_[0]);
    num_levels_ = steps_.back().level + 1;
    nodes_.resize(levels_[num_levels_ - 1].nodes);
    dead_ = -1;
}

bool GrammarMatcher::step(unsigned char byte) {
    Step now = steps_.back();
    if (byte == 0) {
        return false;
    }
    if (now.missing > 0) {
        if ((byte & 0xC0) != 0x80) {
            return false;
        }
        now.value = now.value << 6 | (byte & 0x3Fu);
        --now.missing;
    } else if (byte < 0x80) {
        now = {now.level, byte, 0, 0};
    } else if (byte >= 0xC2 && byte < 0xE0) {
        now = {now.level, byte & 0x1Fu, 1, 0x80};
    } else if (byte >= 0xE0 && byte < 0xF0) {
        now = {now.level, byte & 0x0Fu, 2, 0x800};
    } else if (byte >= 0xF0 && byte < 0xF5) {
        now = {now.level, byte & 0x07u, 3, 0x10000};
    } else {
        return false;
    }
    if (!may_become(now)) {
        return false;
    }
    if (now.missing == 0) {
        if (!advance({}, true, now.value)) {
            return false;
        }
        now.level = num_levels_ - 1;
    }
    steps_.push_back(now);
    return true;
}

// Makes the level after the last: by a character, and by the places that `seeds` reached by a token.
bool GrammarMatcher::advance(const std::vector<Item> & seeds, bool with_character, uint32_t character) {
    if (levels_.size() == num_levels_) {
        levels_.emplace_back();
    }
    const Level & before = levels_[num_levels_ - 1];
    Level &       level  = levels_[num_levels_];
    level.items.clear();
    level.named = level.complete = false;
    nodes_.resize(before.nodes);
    first_ = static_cast<uint32_t>(nodes_.size());
    todo_.clear();
    seen_.clear();
    for (size_t i = 0; with_character && i < before.items.size(); ++i) {
        uint32_t next = 0;
        if (matches(before.items[i], character, next)) {
            put(next, before.items[i].node);
        }
    }
    for (const Item & item : seeds) {
        put(item.at, item.node);
    }
    close(level);
    if (level.items.empty() && !level.complete) {
        nodes_.resize(before.nodes);
        return false;
    }
    level.nodes = nodes_.size();
    ++num_levels_;
    return true;
}

void GrammarMatcher::put(uint32_t at, uint32_t node) {
    at = rules_->ends(at) ? 0 : at;
    if (seen_.insert(static_cast<uint64_t>(at) << 32 | node)) {
        todo_.push_back({at, node});
    }
}

void GrammarMatcher::close(Level & level) {
    while (!todo_.empty()) {
        const Item item = todo_.back();
        todo_.pop_back();
        spend(item_work);
        if (item.at == 0) {
            end(item.node, level);
        } else if (element(item.at).kind == Kind::rule) {
            call(element(item.at).value, item.at + 1, item.node, level);
        } else {
            const Kind kind = element(item.at).kind;
            level.named |= kind == Kind::token || kind == Kind::not_token;
            level.items.push_back(item);
        }
    }
}

void GrammarMatcher::end(uint32_t node, Level & level) {
    nodes_[node].done = node >= first_; // not read for older levels
    level.complete |= nodes_[node].top;
    for (const Item & caller : nodes_[node].callers) {
        put(caller.at, caller.node);
    }
    spend(nodes_[node].callers.size());
}

void GrammarMatcher::call(uint32_t rule, uint32_t next, uint32_t caller, Level & level) {
    uint32_t node = entered_[rule];
    if (node < first_ || node >= nodes_.size() || nodes_[node].rule != rule) {
        node = entered_[rule] = static_cast<uint32_t>(nodes_.size());
        nodes_.push_back({rule, false, false, {}});
        for (uint32_t at = rules_->starts[rule];; ++at) {
            put(at, node);
            while (!rules_->ends(at)) {
                ++at;
                spend(1);
            }
            if (element(at).kind == Kind::end) {
                break;
            }
        }
    }
    if (!rules_->ends(next) || caller >= first_) {
        link(node, {rules_->ends(next) ? 0 : next, caller});
        return;
    }
    nodes_[node].top |= nodes_[caller].top;
    level.complete |= nodes_[node].top && nodes_[node].done;
    for (size_t i = 0; i < nodes_[caller].callers.size(); ++i) {
        link(node, nodes_[caller].callers[i]);
    }
}

void GrammarMatcher::link(uint32_t node, const Item & caller) {
    std::vector<Item> & callers = nodes_[node].callers;
    spend(callers.size());
    if (std::any_of(callers.begin(), callers.end(),
                    [&](const Item & other) { return other.at == caller.at && other.node == caller.node; })) {
        return;
    }
    callers.push_back(caller);
    if (nodes_[node].done) {
        put(caller.at, caller.node);
    }
}

bool GrammarMatcher::accept(int32_t token, std::string_view bytes, bool whole) {
    begin();
    std::vector<Item> seeds;
    for (const Item & item : levels_[0].items) {
        if (whole && steps_[0].missing == 0 && names(item, token)) {
            seeds.push_back({item.at + 1, item.node});
        }
    }
    if (bytes.empty() || (!takes(bytes) && seeds.empty())) {
        return false;
    }
    if (!seeds.empty()) {
        add_named(seeds, asked_.size() == bytes.size() && steps_.back().missing == 0);
    }
    keep_last();
    return true;
}

// If a token is named that its characters lead beyond as well, both ways are open. A token with characters that end within a name
// is taken as the token alone.
void GrammarMatcher::add_named(const std::vector<Item> & seeds, bool with_character) {
    const uint32_t last = steps_.back().value;
    if (with_character) {
        --num_levels_;
    } else {
        back(0);
    }
    try {
        advance(seeds, with_character, last);
    } catch (...) {
        back(0);
        throw;
    }
    steps_.push_back({num_levels_ - 1});
}

void GrammarMatcher::keep_last() {
    std::swap(levels_[0], levels_[num_levels_ - 1]);
    steps_          = {steps_.back()};
    steps_[0].level = 0;
    num_levels_     = 1;
    asked_.clear();
    dead_ = -1;
    if (nodes_.size() > 2 * kept_ + 1024) {
        forget_nodes();
    }
}

// Drops the nodes that no item leads to.
void GrammarMatcher::forget_nodes() {
    std::vector<uint32_t> to(nodes_.size(), 0), found;
    const auto            reach = [&](const std::vector<Item> & items) {
        for (const Item & item : items) {
            if (!std::exchange(to[item.node], 1)) {
                found.push_back(item.node);
            }
        }
    };
    reach(levels_[0].items);
    for (size_t i = 0; i < found.size(); ++i) {
        reach(nodes_[found[i]].callers);
    }
    uint32_t kept = 0;
    for (size_t i = 0; i < nodes_.size(); ++i) {
        if (to[i]) {
            to[i] = kept;
            std::swap(nodes_[kept++], nodes_[i]);
        }
    }
    nodes_.resize(kept);
    const auto rename = [&](std::vector<Item> & items) {
        for (Item & item : items) {
            item.node = to[item.node];
        }
    };
    rename(levels_[0].items);
    for (Node & node : nodes_) {
        rename(node.callers);
    }
    levels_[0].nodes = kept_ = kept;
}

} // namespace paceline
