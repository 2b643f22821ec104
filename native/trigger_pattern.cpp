#include "trigger_pattern.hpp"

#include <algorithm>
#include <limits>

#include "error.hpp"

namespace paceline {

namespace {

using Op          = TriggerProgram::Op;
using Instruction = TriggerProgram::Instruction;
using Bytes       = std::bitset<256>;

constexpr size_t   max_depth   = 100; // of parentheses, which the parser recurses into
constexpr uint32_t max_repeats = 1'000;
constexpr uint32_t unbounded   = std::numeric_limits<uint32_t>::max();
constexpr size_t   max_visits  = 16 * TriggerSearch::max_program; // of parts of a pattern, which may emit nothing

struct Node {
    enum class Kind { empty, bytes, sequence, choice, repeat, group, text_begin, text_end, not_ahead };

    Kind              kind = Kind::empty;
    Bytes             bytes;
    std::vector<Node> parts;
    uint32_t          least = 0, most = 0, group = 0;
    bool              lazy  = false;
};

Bytes range(unsigned char first, unsigned char last) {
    Bytes bytes;
    for (unsigned c = first; c <= last; ++c) {
        bytes.set(c);
    }
    return bytes;
}

Bytes one_of(std::string_view characters) {
    Bytes bytes;
    for (const char c : characters) {
        bytes.set(static_cast<unsigned char>(c));
    }
    return bytes;
}

// The classes of \d, \s and \w, and their opposites; none for other letters.
std::optional<Bytes> named_class(char letter) {
    switch (letter) {
        case 'd': return range('0', '9');
        case 'D': return ~range('0', '9');
        case 's': return one_of(" \t\n\v\f\r");
        case 'S': return ~one_of(" \t\n\v\f\r");
        case 'w': return range('a', 'z') | range('A', 'Z') | range('0', '9') | one_of("_");
        case 'W': return ~(range('a', 'z') | range('A', 'Z') | range('0', '9') | one_of("_"));
        default: return std::nullopt;
    }
}

class Parser {
public:
    explicit Parser(std::string_view pattern) : pattern_(pattern) {}

    Node parse() {
        Node node = choice(0);
        if (at_ < pattern_.size()) {
            refuse("a ) without a (");
        }
        return node;
    }

private:
    [[noreturn]] void refuse(const std::string & reason) const {
        fail("GrammarError", "grammar_triggers: the pattern cannot be used: " + reason + " at byte " + str(at_));
    }

    bool more() const { return at_ < pattern_.size(); }
    char peek() const { return pattern_[at_]; }
    bool take(std::string_view text) {
        if (!pattern_.substr(at_).starts_with(text)) {
            return false;
        }
        at_ += text.size();
        return true;
    }

    Node choice(size_t depth) {
        if (depth > max_depth) {
            refuse("parentheses nest more than " + str(max_depth) + " deep");
        }
        Node node;
        node.kind = Node::Kind::choice;
        node.parts.push_back(sequence(depth));
        while (take("|")) {
            node.parts.push_back(sequence(depth));
        }
        return node.parts.size() == 1 ? Node(std::move(node.parts[0])) : node;
    }

    Node sequence(size_t depth) {
        Node node;
        node.kind = Node::Kind::sequence;
        while (more() && peek() != '|' && peek() != ')') {
            node.parts.push_back(term(depth));
        }
        return node;
    }

    Node term(size_t depth) {
        Node node;
        if (take("^")) {
            node.kind = Node::Kind::text_begin;
        } else if (take("$")) {
            node.kind = Node::Kind::text_end;
        } else if (take("(?!")) {
            if (in_ahead_) {
                refuse("a lookahead within a lookahead");
            }
            in_ahead_ = true;
            node.kind = Node::Kind::not_ahead;
            node.parts.push_back(choice(depth + 1));
            in_ahead_ = false;
            close();
        } else {
            return repeated(atom(depth));
        }
        if (more() && std::string_view("*+?{").find(peek()) != std::string_view::npos) {
            refuse("a repeated assertion");
        }
        return node;
    }

    Node atom(size_t depth) {
        Node node;
        node.kind = Node::Kind::bytes;
        if (take("(?:")) {
            node = choice(depth + 1);
            close();
        } else if (take("(?")) {
            refuse("(? other than (?: and (?!");
        } else if (take("(")) {
            node.kind  = Node::Kind::group;
            node.group = num_groups_++;
            if (num_groups_ > TriggerSearch::max_groups) {
                refuse("more than " + str(TriggerSearch::max_groups) + " groups; write (?:...) for those that capture nothing");
            }
            node.parts.push_back(choice(depth + 1));
            close();
        } else if (take("[")) {
            node.bytes = in_brackets();
        } else if (take(".")) {
            node.bytes = ~one_of("\n\r");
        } else if (take("\\")) {
            node.bytes = escaped(false);
        } else if (std::string_view("*+?{").find(peek()) != std::string_view::npos) {
            refuse("nothing to repeat");
        } else {
            node.bytes = one_of(pattern_.substr(at_++, 1));
        }
        return node;
    }

    void close() {
        if (!take(")")) {
            refuse("a ( without its )");
        }
    }

    Node repeated(Node part) {
        Node node;
        node.kind = Node::Kind::repeat;
        if (take("*")) {
            node.most = unbounded;
        } else if (take("+")) {
            node.least = 1, node.most = unbounded;
        } else if (take("?")) {
            node.most = 1;
        } else if (take("{")) {
            node.least = node.most = number();
            if (take(",")) {
                node.most = more() && peek() == '}' ? unbounded : number();
            }
            if (!take("}") || node.least > node.most) {
                refuse("a { that is no {n}, {n,} or {n,m}");
            }
        } else {
            return part;
        }
        node.lazy = take("?");
        if (more() && std::string_view("*+?{").find(peek()) != std::string_view::npos) {
            refuse("a repeated repetition");
        }
        node.parts.push_back(std::move(part));
        return node;
    }

    uint32_t number() {
        uint32_t     value = 0;
        const size_t start = at_;
        while (more() && peek() >= '0' && peek() <= '9') {
            value = value * 10 + static_cast<uint32_t>(pattern_[at_++] - '0');
            if (value > max_repeats) {
                refuse("more than " + str(max_repeats) + " repetitions");
            }
        }
        if (at_ == start) {
            refuse("a { that is no {n}, {n,} or {n,m}; write \\{ for the character");
        }
        return value;
    }

    Bytes escaped(bool in_class) {
        if (!more()) {
            refuse("a \\ at the end");
        }
        const char c = pattern_[at_++];
        if (const std::optional<Bytes> named = named_class(c)) {
            return *named;
        }
        switch (c) {
            case 't': return one_of("\t");
            case 'n': return one_of("\n");
            case 'v': return one_of("\v");
            case 'f': return one_of("\f");
            case 'r': return one_of("\r");
            case '0': return range(0, 0);
            case 'x': return hexadecimal(2);
            case 'u': return hexadecimal(4);
            default: break;
        }
        if (in_class && c == 'b') {
            return one_of("\b");
        }
        if ((c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')) {
            refuse(std::string("\\") + c);
        }
        return one_of(std::string_view(&c, 1));
    }

    Bytes hexadecimal(size_t digits) {
        unsigned value = 0;
        for (size_t i = 0; i < digits; ++i, ++at_) {
            const std::string_view known = "0123456789abcdefABCDEF";
            const size_t           digit = more() ? known.find(peek()) : std::string_view::npos;
            if (digit == std::string_view::npos) {
                refuse("a \\x or \\u without its digits");
            }
            value = value * 16 + static_cast<unsigned>(digit < 16 ? digit : digit - 6);
        }
        if (value > (digits == 2 ? 0xFFu : 0x7Fu)) {
            refuse("a \\u beyond ASCII; write the character itself");
        }
        return range(static_cast<unsigned char>(value), static_cast<unsigned char>(value));
    }

    Bytes in_brackets() {
        const bool inverted = take("^");
        Bytes      bytes;
        if (more() && peek() == ']') {
            refuse("empty brackets");
        }
        while (!take("]")) {
            const Bytes first = in_class();
            if (!pattern_.substr(at_).starts_with("-") || pattern_.substr(at_).starts_with("-]")) {
                bytes |= first;
                continue;
            }
            ++at_;
            const Bytes last = in_class();
            if (first.count() != 1 || last.count() != 1 || lowest(first) > lowest(last)) {
                refuse("a range of characters that is none");
            }
            bytes |= range(lowest(first), lowest(last));
        }
        return inverted ? ~bytes : bytes;
    }

    Bytes in_class() {
        if (!more()) {
            refuse("a [ without its ]");
        }
        if (take("\\")) {
            return escaped(true);
        }
        for (const std::string_view name : {"[:", "[.", "[="}) {
            if (pattern_.substr(at_).starts_with(name)) {
                refuse("a class of characters by its name");
            }
        }
        return one_of(pattern_.substr(at_++, 1));
    }

    static unsigned char lowest(const Bytes & bytes) {
        unsigned c = 0;
        while (!bytes[c]) {
            ++c;
        }
        return static_cast<unsigned char>(c);
    }

    std::string_view pattern_;
    size_t           at_         = 0;
    uint32_t         num_groups_ = 0;
    bool             in_ahead_   = false;
};

// Emits a program from its end: every part is given its continuation.
class Emitter {
public:
    Emitter(TriggerProgram & program, size_t & size_left) : program_(program), size_left_(size_left) {}

    uint32_t add(Op op, uint32_t next = 0, uint32_t other = 0) {
        if (size_left_ == 0) {
            refuse();
        }
        --size_left_;
        program_.code.push_back({op, next, other});
        return static_cast<uint32_t>(program_.code.size() - 1);
    }

    uint32_t emit(const Node & node, uint32_t next) {
        if (++num_visits_ > max_visits) {
            refuse();
        }
        switch (node.kind) {
            case Node::Kind::empty: return next;
            case Node::Kind::bytes: program_.classes.push_back(node.bytes); return add(Op::byte, next, last_class());
            case Node::Kind::text_begin: return add(Op::text_begin, next);
            case Node::Kind::text_end: return add(Op::text_end, next);
            case Node::Kind::not_ahead: return add(Op::not_ahead, next, emit(node.parts[0], add(Op::match)));
            case Node::Kind::repeat: return repeat(node, next);
            case Node::Kind::group: {
                const uint32_t body = emit(node.parts[0], add(Op::close, next, node.group));
                return add(Op::open, body, node.group);
            }
            case Node::Kind::sequence:
                for (auto part = node.parts.rbegin(); part != node.parts.rend(); ++part) {
                    next = emit(*part, next);
                }
                return next;
            case Node::Kind::choice: {
                uint32_t begin = emit(node.parts.back(), next);
                for (auto part = node.parts.rbegin() + 1; part != node.parts.rend(); ++part) {
                    begin = add(Op::split, emit(*part, next), begin);
                }
                return begin;
            }
        }
        return next;
    }

private:
    [[noreturn]] static void refuse() {
        fail("GrammarError", "grammar_triggers: the patterns are too large: repetitions are written out, and together "
                             "they may have " + str(TriggerSearch::max_program) + " steps");
    }

    uint32_t last_class() const { return static_cast<uint32_t>(program_.classes.size() - 1); }

    uint32_t either(uint32_t body, uint32_t next, bool lazy) {
        return lazy ? add(Op::split, next, body) : add(Op::split, body, next);
    }

    uint32_t repeat(const Node & node, uint32_t next) {
        const Node & part  = node.parts[0];
        uint32_t     begin = next;
        if (node.most == unbounded) {
            begin               = add(Op::split);
            const uint32_t body = emit(part, begin);
            program_.code[begin].next  = node.lazy ? next : body;
            program_.code[begin].other = node.lazy ? body : next;
        }
        for (uint32_t i = node.least; node.most != unbounded && i < node.most; ++i) {
            begin = either(emit(part, begin), next, node.lazy);
        }
        for (uint32_t i = 0; i < node.least; ++i) {
            begin = emit(part, begin);
        }
        return begin;
    }

    TriggerProgram & program_;
    size_t &         size_left_;
    size_t           num_visits_ = 0;
};

bool is_subset(const std::vector<uint32_t> & part, const std::vector<uint32_t> & whole) {
    return std::includes(whole.begin(), whole.end(), part.begin(), part.end());
}

} // namespace

std::shared_ptr<const TriggerProgram> compile_trigger(std::string_view pattern, bool is_full, size_t & size_left) {
    const Node root    = Parser(pattern).parse();
    auto       program = std::make_shared<TriggerProgram>();
    Emitter    emitter(*program, size_left);
    uint32_t   end = emitter.add(Op::match);
    if (is_full) {
        end = emitter.add(Op::text_end, end);
    }
    program->begin = emitter.emit(root, end);
    if (is_full) {
        program->begin = emitter.add(Op::text_begin, program->begin);
    }
    return program;
}

// The threads after one more byte, and which instructions they have passed.
struct TriggerSearch::Step {
    Step(size_t size, uint32_t position, uint64_t & work_left) : passed(size, false), position(position), work_left(work_left) {}

    void spend(uint64_t work) { TriggerSearch::spend(work, work_left); }
    // Whether a preferred thread has been at the place of this one, which lives at least as long: it finds the same.
    bool has_passed(const Thread & thread) {
        spend(1 + passed_if.size());
        if (passed[thread.pc] || std::any_of(passed_if.begin(), passed_if.end(), [&](const auto & one) {
                return one.first == thread.pc && is_subset(one.second, thread.ahead);
            })) {
            return true;
        }
        if (thread.ahead.empty()) {
            passed[thread.pc] = true;
        } else {
            passed_if.emplace_back(thread.pc, thread.ahead);
        }
        return false;
    }

    std::vector<Thread>                      threads;
    std::vector<bool>                        passed;    // by a thread that nothing can end
    std::vector<std::pair<uint32_t, States>> passed_if; // by one that ends if something matches
    uint32_t                                 position;
    uint64_t &                               work_left;
};

void TriggerSearch::spend(uint64_t work, uint64_t & work_left) {
    if (work > work_left) {
        fail("SamplingError", "grammar_triggers: a pattern has too many ways to match this text; make it simpler");
    }
    work_left -= work;
}

TriggerSearch::TriggerSearch(std::shared_ptr<const TriggerProgram> program) : program_(std::move(program)) {
    uint64_t work_left = max_work;
    Step     step(program_->code.size(), 0, work_left);
    Thread   first;
    first.pc = program_->begin;
    put(step, std::move(first));
    threads_ = std::move(step.threads);
}

// Adds a thread with all places that it reaches without a byte.
void TriggerSearch::put(Step & step, Thread thread) const {
    std::vector<Thread> todo;
    todo.push_back(std::move(thread));
    while (!todo.empty()) {
        Thread now = std::move(todo.back());
        todo.pop_back();
        if (step.has_passed(now)) {
            continue;
        }
        const Instruction & instruction = program_->code[now.pc];
        switch (instruction.op) {
            case Op::byte:
            case Op::text_end:
            case Op::match: step.threads.push_back(std::move(now)); continue;
            case Op::split:
                todo.push_back(now);
                todo.back().pc = instruction.other;
                break;
            case Op::open: now.opened[instruction.other] = step.position; break;
            case Op::close:
                now.from[instruction.other] = now.opened[instruction.other];
                now.to[instruction.other]   = step.position;
                break;
            case Op::text_begin:
                if (step.position != 0) {
                    continue;
                }
                break;
            case Op::not_ahead:
                if (enter(now.ahead, instruction.other, step, false)) {
                    continue;
                }
                break;
        }
        now.pc = instruction.next;
        todo.push_back(std::move(now));
    }
}

// Adds the places of a lookahead that are reached from a place; true if it matches already.
bool TriggerSearch::enter(States & states, uint32_t pc, Step & step, bool at_end) const {
    States todo = {pc}, seen;
    while (!todo.empty()) {
        const uint32_t now = todo.back();
        todo.pop_back();
        step.spend(1 + seen.size() / 8);
        if (std::find(seen.begin(), seen.end(), now) != seen.end()) {
            continue;
        }
        seen.push_back(now);
        const Instruction & instruction = program_->code[now];
        switch (instruction.op) {
            case Op::match: return true;
            case Op::byte: break;
            case Op::split: todo.push_back(instruction.other), todo.push_back(instruction.next); continue;
            case Op::text_begin:
                if (step.position == 0) {
                    todo.push_back(instruction.next);
                }
                continue;
            case Op::text_end:
                if (at_end) {
                    todo.push_back(instruction.next);
                }
                break;
            case Op::open:
            case Op::close: todo.push_back(instruction.next); continue;
            case Op::not_ahead: continue; // the parser refuses it here
        }
        const auto place = std::lower_bound(states.begin(), states.end(), now);
        if (place == states.end() || *place != now) {
            states.insert(place, now);
        }
    }
    return false;
}

void TriggerSearch::advance(std::string_view bytes, uint64_t & work_left) {
    for (const char c : bytes) {
        const auto matches = [&](uint32_t pc) {
            const Instruction & instruction = program_->code[pc];
            return instruction.op == Op::byte && program_->classes[instruction.other][static_cast<unsigned char>(c)];
        };
        Step step(program_->code.size(), ++position_, work_left);
        for (Thread & thread : threads_) {
            step.spend(1 + thread.ahead.size());
            const bool done = program_->code[thread.pc].op == Op::match;
            if (!done && !matches(thread.pc)) {
                continue;
            }
            States     ahead;
            const bool ended = std::any_of(thread.ahead.begin(), thread.ahead.end(), [&](uint32_t pc) {
                return matches(pc) && enter(ahead, program_->code[pc].next, step, false);
            });
            if (!ended) {
                thread.ahead = std::move(ahead);
                thread.pc    = done ? thread.pc : program_->code[thread.pc].next;
                put(step, std::move(thread));
            }
        }
        Thread first;
        first.pc    = program_->begin;
        first.begin = position_;
        put(step, std::move(first));
        threads_ = std::move(step.threads);
    }
}

// The text ends here, for $ and for forbidden continuations. Places unreachable for a thread are unreachable for all others.
std::optional<size_t> TriggerSearch::found(uint64_t & work_left) const {
    Step step(program_->code.size(), position_, work_left);
    for (const Thread & thread : threads_) {
        step.spend(1);
        States     ignored;
        const bool may_match = program_->code[thread.pc].op != Op::byte;
        if (!may_match || std::any_of(thread.ahead.begin(), thread.ahead.end(), [&](uint32_t pc) {
                return program_->code[pc].op == Op::text_end && enter(ignored, pc, step, true);
            })) {
            continue;
        }
        std::vector<Thread> todo = {thread};
        todo.back().ahead.clear();
        while (!todo.empty()) {
            Thread now = std::move(todo.back());
            todo.pop_back();
            const Instruction & instruction = program_->code[now.pc];
            if (step.has_passed(now)) {
                continue;
            }
            switch (instruction.op) {
                case Op::match:
                    for (uint32_t group = 0; group < max_groups; ++group) {
                        if (now.to[group] > now.from[group]) {
                            return now.from[group];
                        }
                    }
                    return now.begin;
                case Op::byte: continue;
                case Op::split:
                    todo.push_back(now);
                    todo.back().pc = instruction.other;
                    break;
                case Op::open: now.opened[instruction.other] = position_; break;
                case Op::close:
                    now.from[instruction.other] = now.opened[instruction.other];
                    now.to[instruction.other]   = position_;
                    break;
                case Op::text_begin:
                    if (position_ != 0) {
                        continue;
                    }
                    break;
                case Op::text_end: break;
                case Op::not_ahead:
                    if (enter(ignored, instruction.other, step, true)) {
                        continue;
                    }
                    break;
            }
            now.pc = instruction.next;
            todo.push_back(std::move(now));
        }
    }
    return std::nullopt;
}

size_t TriggerSearch::earliest() const {
    uint32_t first = position_;
    for (const Thread & thread : threads_) {
        first = std::min(first, thread.begin);
    }
    return first;
}

void TriggerSearch::forget_before(size_t position) {
    std::erase_if(threads_, [position](const Thread & thread) { return thread.begin < position; });
}

} // namespace paceline
