// Regular expressions that begin a lazy grammar, searched for while a text grows.
//
// A pattern is compiled to a program whose threads advance together, a byte at a time (Thompson 1968, Pike's variant with
// priorities): nothing is read twice, and the work for a byte is bounded by the size of the program, for any pattern.
// The syntax is that of std::regex (ECMAScript, on bytes), which llama.cpp uses for triggers, without back references,
// word boundaries and lookahead other than (?!...). A match is std::regex_search's in the text so far: the first
// place at which a match begins, and from there the first alternative.
#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace paceline {

struct TriggerProgram {
    enum class Op : uint8_t {
        byte,       // a character of `classes[other]`, then `next`
        split,      // `next`, or else `other`
        open,       // of group `other`
        close,
        text_begin, // only there
        text_end,
        not_ahead,  // the part from `other` on must not match from here on
        match,
    };
    struct Instruction {
        Op       op;
        uint32_t next  = 0;
        uint32_t other = 0;
    };

    std::vector<Instruction>      code;
    std::vector<std::bitset<256>> classes;
    uint32_t                      begin = 0;
};

// GrammarError if the pattern is malformed, not supported or too large; `size_left` is reduced by the size of the program.
std::shared_ptr<const TriggerProgram> compile_trigger(std::string_view pattern, bool is_full, size_t & size_left);

// The search for one pattern in one text. A copy continues independently.
class TriggerSearch {
public:
    static constexpr size_t   max_program = 32'768; // instructions of all patterns of a grammar
    static constexpr uint32_t max_groups  = 8;
    // Of all patterns for one token. Usual patterns take 5 to 20 for a byte.
    static constexpr uint64_t max_work = 2'000'000;
    // Of all tokens that are tried for one place of the text, and of beginning the grammar with each.
    static constexpr uint64_t max_tried_work = 40'000'000;

    // SamplingError if `work_left` is used up.
    static void spend(uint64_t work, uint64_t & work_left);

    explicit TriggerSearch(std::shared_ptr<const TriggerProgram> program);

    // The text goes on with a token. SamplingError if `work_left` is used up; of no use after that.
    void advance(std::string_view bytes, uint64_t & work_left);
    // The start of the grammar if the text so far has a match: the first non-empty group, or else the match.
    std::optional<size_t> found(uint64_t & work_left) const;
    // No match begins before; earlier text can be dropped.
    size_t earliest() const;
    // Gives up matches that begin before.
    void forget_before(size_t position);

private:
    using States = std::vector<uint32_t>; // sorted
    struct Thread {
        uint32_t pc    = 0;
        uint32_t begin = 0; // positions in the text
        uint32_t opened[max_groups] = {}, from[max_groups] = {}, to[max_groups] = {};
        States   ahead; // of the part that must not match
    };
    struct Step;

    void put(Step & step, Thread thread) const;
    bool enter(States & states, uint32_t pc, Step & step, bool at_end) const; // whether it matches

    std::shared_ptr<const TriggerProgram> program_;
    std::vector<Thread>                   threads_; // the preferred places first
    uint32_t                              position_ = 0;
};

} // namespace paceline
