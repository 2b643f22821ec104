// Matches a text with a grammar, byte by byte: allowed bytes, and whether the text may end here.
//
// Earley's method (1970) from the top down: after each character there is a set of items, each a place in a rule and the
// node of the call of this rule. A node stands for a rule that was called after a certain character, once
// however many callers there are, and holds where each of them continues. So the work for a character grows with the number
// of rules and of earlier characters at which open calls began, and never doubles with each, for any grammar. A call
// at the end of a rule continues at its caller's place, which keeps repetitions flat. Every call here has a work limit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "grammar_rules.hpp"

namespace paceline {

class GrammarMatcher {
public:
    // Of one call: a unit for each element and caller visited, and item_work for each item that is made. Grammars made to
    // reach the limit did so in 0.2 to 1.7 s on one core, 2.3 s on a busy one (demo model: 1.2 s); a mask by a usual grammar
    // takes 0.1 to 8 ms there.
    static constexpr uint64_t max_work  = 2'000'000'000;
    static constexpr uint64_t item_work = 10;

    explicit GrammarMatcher(std::shared_ptr<const GrammarRules> rules);

    bool complete() const { return levels_[0].complete && steps_[0].missing == 0; }
    // Whether the text is whole and no character may follow.
    bool exhausted() const { return complete() && levels_[0].items.empty(); }
    // Whether these bytes, or this token if the grammar names tokens, are allowed next. Reuses the prefix in common with
    // the previous call. SamplingError beyond max_work since `begin`.
    bool takes(int32_t token, std::string_view bytes);
    void begin() { work_ = 0; }
    uint64_t work() const { return work_; } // since `begin` or the last `accept` began
    size_t   size() const { return nodes_.size() + entered_.size(); } // the cost of a copy grows with it
    // Advances by these bytes; `whole`: they are all of the token. False if they are not allowed; nothing changed.
    bool accept(int32_t token, std::string_view bytes, bool whole);

private:
    using Kind = GrammarRules::Kind;
    struct Item {
        uint32_t at;   // an element; 0: the end of its rule
        uint32_t node; // of the call
    };
    struct Node {
        uint32_t          rule;
        bool              top  = false; // the text may end at the end of this rule
        bool              done = false; // has ended after no character
        std::vector<Item> callers;      // the place at which each continues
    };
    // After each character.
    struct Level {
        std::vector<Item> items; // at characters and tokens
        bool              named    = false; // some are at tokens
        bool              complete = false;
        size_t            nodes    = 0; // made until then
    };
    // After each byte.
    struct Step {
        size_t   level;
        uint32_t value   = 0; // of the character so far
        uint32_t missing = 0; // bytes of it
        uint32_t least   = 0; // that its number of bytes is used for
    };
    // A set of numbers that is cheap to empty.
    class Seen {
    public:
        void clear() { ++round_, count_ = 0; }
        bool insert(uint64_t key);

    private:
        std::vector<std::pair<uint64_t, uint64_t>> slots_ = std::vector<std::pair<uint64_t, uint64_t>>(64); // key, round
        uint64_t                                   round_ = 1;
        size_t                                     count_ = 0;
    };

    const GrammarRules::Element & element(uint32_t at) const { return rules_->elements[at]; }
    template <typename Use> uint32_t ranges(uint32_t at, Use use);
    bool matches(const Item & item, uint32_t character, uint32_t & next);
    bool touches(const Item & item, uint32_t low, uint32_t high);
    bool may_become(const Step & step);
    bool names(const Item & item, int32_t token) const;
    void spend(uint64_t work);

    void back(size_t length);
    bool takes(std::string_view bytes);
    bool step(unsigned char byte);
    void add_named(const std::vector<Item> & seeds, bool with_character);
    bool advance(const std::vector<Item> & seeds, bool with_character, uint32_t character);
    void put(uint32_t at, uint32_t node);
    void close(Level & level);
    void end(uint32_t node, Level & level);
    void call(uint32_t rule, uint32_t next, uint32_t caller, Level & level);
    void link(uint32_t node, const Item & caller);
    void keep_last();
    void forget_nodes();

    std::shared_ptr<const GrammarRules> rules_;
    std::vector<Node>                   nodes_;
    std::vector<Level>                  levels_; // the first is the place of the text, the others are places of the query
    size_t                              num_levels_ = 1;
    std::vector<Step>                   steps_;  // the same
    std::string                         asked_;  // the bytes of the steps,
    int                                 dead_ = -1; // and the character that may not come after them
    uint64_t                            work_  = 0;
    size_t                              kept_  = 0; // nodes after the last clearing
    uint32_t                            first_ = 0; // node of the level in the making
    std::vector<uint32_t>               entered_;   // by rule, its node of this level
    std::vector<Item>                   todo_;
    Seen                                seen_;
};

} // namespace paceline
