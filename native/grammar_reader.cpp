#include "grammar_reader.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <string_view>
#include <utility>

#include "error.hpp"
#include "grammar_guard.hpp"
#include "vocab.hpp"

namespace paceline {

namespace {

using Item        = GrammarItem;
using Alternative = GrammarAlternative;
using Rule        = GrammarRule;

// A parser of GBNF as llama.cpp reads it (llama-grammar.cpp), for the checks alone.
class Reader {
public:
    Reader(const std::shared_ptr<Model> & model, const std::string & text) : model_(model), text_(text) {}

    std::vector<Rule> read();

private:
    [[noreturn]] void wrong(const std::string & what) const;
    size_t character_size() const { // bytes of the UTF-8 character here
        const size_t next = std::find_if(text_.begin() + static_cast<ptrdiff_t>(at_) + 1, text_.end(),
                                         [](char c) { return (c & 0xC0) != 0x80; }) - text_.begin();
        return next - at_;
    }
    char at(size_t offset = 0) const { return at_ + offset < text_.size() ? text_[at_ + offset] : '\0'; }
    void space(bool newlines);
    void expect(char c, const char * where);
    bool word() const;
    size_t rule_id(const std::string & name);
    std::string name();
    uint64_t number();
    void     rule();
    void     alternatives(size_t rule, bool nested);
    Alternative sequence(bool nested);
    void     item(Alternative & items, bool nested);
    uint64_t literal();
    uint64_t char_class();
    void     character();
    void     token();
    void     group(Alternative & items);
    void     repetition(Alternative & items, bool nested);
    void     repeat(Alternative & items, uint64_t least, std::optional<uint64_t> most);
    void     grow(uint64_t elements);

    const std::shared_ptr<Model> & model_;
    std::optional<Vocab>          vocab_; // made for the first token that is named by its text
    const std::string &           text_;
    size_t                        at_       = 0;
    size_t                        nesting_  = 0;
    uint64_t                      elements_ = 0;
    uint64_t                      symbols_  = 0; // rules that llama.cpp has made or heard of
    uint64_t                      length_   = 0; // elements of the item before; 0: there is none
    uint64_t                      cost_     = 1; // rules in it
    std::vector<Rule>             rules_;
    std::map<std::string, size_t> ids_;
};

void Reader::wrong(const std::string & what) const {
    const size_t line   = 1 + static_cast<size_t>(std::count(text_.begin(), text_.begin() + static_cast<ptrdiff_t>(at_), '\n'));
    const size_t start  = at_ == 0 ? std::string::npos : text_.rfind('\n', at_ - 1);
    const size_t column = start == std::string::npos ? at_ + 1 : at_ - start;
    fail("GrammarError", "grammar, line " + str(line) + ", column " + str(column) + ": " + what);
}

void Reader::space(bool newlines) {
    for (;; ++at_) {
        const char c = at();
        if (c == '#') {
            while (at_ < text_.size() && at() != '\n' && at() != '\r') {
                ++at_;
            }
            --at_;
        } else if (!(c == ' ' || c == '\t' || (newlines && (c == '\n' || c == '\r')))) {
            return;
        }
    }
}

void Reader::expect(char c, const char * where) {
    if (at() != c) {
        wrong(std::string("expected '") + c + "' " + where);
    }
    ++at_;
}

bool Reader::word() const {
    const char c = at();
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-';
}

size_t Reader::rule_id(const std::string & name) {
    const auto [found, is_new] = ids_.emplace(name, rules_.size());
    if (is_new) {
        ++symbols_;
        rules_.push_back({name, false, {}});
    }
    return found->second;
}

std::string Reader::name() {
    const size_t start = at_;
    while (word()) {
        ++at_;
    }
    if (at_ == start) {
        wrong("expected the name of a rule (letters, digits and '-')");
    }
    return text_.substr(start, at_ - start);
}

uint64_t Reader::number() {
    uint64_t     value = 0;
    const size_t start = at_;
    while (at() >= '0' && at() <= '9') {
        value = std::min<uint64_t>(value * 10 + static_cast<uint64_t>(at() - '0'), UINT32_MAX);
        ++at_;
    }
    if (at_ == start) {
        wrong("expected a number");
    }
    return value;
}

std::vector<Rule> Reader::read() {
    for (space(true); at_ < text_.size(); space(true)) {
        rule();
    }
    for (const Rule & rule : rules_) {
        if (!rule.defined) {
            fail("GrammarError", "grammar: the rule '" + rule.name + "' is used and nowhere defined");
        }
    }
    return rules_;
}

void Reader::rule() {
    const size_t id = rule_id(name());
    space(false);
    if (at() != ':' || at(1) != ':' || at(2) != '=') {
        wrong("expected '::=' after the name of a rule");
    }
    at_ += 3;
    space(true);
    rules_[id].alternatives.clear(); // llama.cpp takes the last definition
    alternatives(id, false);
    if (at_ < text_.size() && at() != '\n' && at() != '\r') {
        wrong("expected the end of the line, or more of the rule");
    }
}

void Reader::alternatives(size_t rule, bool nested) {
    std::vector<Alternative> all = {sequence(nested)};
    while (at() == '|') {
        ++at_;
        space(true);
        all.push_back(sequence(nested));
        grow(1);
    }
    rules_[rule].defined      = true;
    rules_[rule].alternatives = std::move(all);
}

Alternative Reader::sequence(bool nested) {
    Alternative items;
    length_ = 0;
    while (at_ < text_.size() && at() != '|' && at() != ')' && at() != '\n' && at() != '\r') {
        item(items, nested);
        space(nested);
    }
    return items;
}

void Reader::item(Alternative & items, bool nested) {
    const char c = at();
    if (c == '*' || c == '+' || c == '?' || c == '{') {
        repetition(items, nested);
        return;
    }
    length_ = 1;
    cost_   = 1;
    if (c == '"') {
        length_ = literal();
    } else if (c == '[') {
        length_ = char_class();
    } else if (c == '<' || c == '!') {
        token();
    } else if (c == '.') {
        ++at_;
    } else if (c == '(') {
        group(items);
        return;
    } else if (word()) {
        items.push_back({.rule = static_cast<int64_t>(rule_id(name()))});
        grow(1);
        return;
    } else {
        wrong("'" + text_.substr(at_, character_size()) + "' cannot stand here" + (nested ? " (a '(' is open)" : ""));
    }
    if (length_ > 0) {
        items.push_back({});
        grow(length_);
    }
}

uint64_t Reader::literal() {
    uint64_t length = 0;
    for (++at_; at() != '"'; ++length) {
        character();
    }
    ++at_;
    return length;
}

uint64_t Reader::char_class() {
    uint64_t length = 0;
    ++at_;
    at_ += at() == '^' ? 1 : 0;
    for (; at() != ']'; ++length) {
        character();
        if (at() == '-' && at(1) != ']') {
            ++at_;
            character();
            ++length;
        }
    }
    ++at_;
    return length;
}

void Reader::character() {
    if (at_ >= text_.size()) {
        wrong("the grammar ends within a literal");
    }
    if (at() != '\\') {
        at_ += character_size();
        return;
    }
    const char   c      = at(1);
    const size_t digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
    if (digits == 0 && (c == '\0' || std::string_view("trn\\\"[]-").find(c) == std::string_view::npos)) {
        wrong("unknown escape; there are \\t \\r \\n \\\\ \\\" \\[ \\] \\- \\xHH \\uHHHH \\UHHHHHHHH");
    }
    at_ += 2;
    for (size_t i = 0; i < digits; ++i, ++at_) {
        const char d = at();
        if (!((d >= '0' && d <= '9') || (d >= 'a' && d <= 'f') || (d >= 'A' && d <= 'F'))) {
            wrong("expected " + str(digits) + " hexadecimal digits");
        }
    }
}

// <[id]> or <text of one token>, with a ! before it for any other token.
void Reader::token() {
    at_ += at() == '!' ? 1 : 0;
    const size_t start = at_;
    expect('<', "to begin a token");
    if (at() == '[') {
        ++at_;
        const uint64_t id = number();
        if (id >= static_cast<uint64_t>(model_->n_vocab())) {
            wrong("the token " + str(id) + " is not in this model's vocabulary");
        }
        expect(']', "after the token's id");
        expect('>', "to end a token");
        return;
    }
    const size_t end = text_.find('>', at_);
    if (end == std::string::npos) {
        wrong("expected '>' to end a token");
    }
    const std::string text = text_.substr(start, end + 1 - start);
    if (!vocab_) {
        vocab_.emplace(model_);
    }
    if (text.size() > 256 || vocab_->encode(text, false, true).size() != 1) {
        wrong("this is not one token of the model");
    }
    at_ = end + 1;
}

void Reader::group(Alternative & items) {
    if (++nesting_ > GrammarLimits::max_nesting) {
        wrong("parentheses are nested deeper than " + str(GrammarLimits::max_nesting));
    }
    const size_t   id     = rules_.size();
    const uint64_t before = symbols_++;
    rules_.push_back({"a group in line " + str(1 + std::count(text_.begin(), text_.begin() + static_cast<ptrdiff_t>(at_), '\n')), true, {}});
    ++at_;
    space(true);
    alternatives(id, true);
    expect(')', "to end a group");
    --nesting_;
    items.push_back({.rule = static_cast<int64_t>(id)});
    length_ = 1;
    cost_   = symbols_ - before;
    grow(2);
}

void Reader::repetition(Alternative & items, bool nested) {
    const char c = at();
    ++at_;
    if (c != '{') {
        repeat(items, c == '+' ? 1 : 0, c == '?' ? std::optional<uint64_t>(1) : std::nullopt);
        return;
    }
    space(nested);
    const uint64_t          least = number();
    std::optional<uint64_t> most  = least;
    space(nested);
    if (at() == ',') {
        ++at_;
        space(nested);
        most = at() == '}' ? std::nullopt : std::optional<uint64_t>(number());
        space(nested);
    }
    expect('}', "to end a repetition");
    repeat(items, least, most);
}

// llama.cpp writes repetitions out: the item `least` times, then a rule for each time that it may go on.
void Reader::repeat(Alternative & items, uint64_t least, std::optional<uint64_t> most) {
    if (length_ == 0) {
        wrong("a repetition needs something before it that is not empty");
    }
    if (least > GrammarLimits::max_repetitions || most.value_or(0) > GrammarLimits::max_repetitions) {
        wrong("a repetition goes beyond " + str(GrammarLimits::max_repetitions));
    }
    if (most && *most < least) {
        wrong("a repetition whose highest number is below its lowest");
    }
    cost_ *= std::max<uint64_t>(1, most && *most > 0 ? *most : least);
    if (cost_ > GrammarLimits::max_repetitions) {
        wrong("nested repetitions come to more than " + str(GrammarLimits::max_repetitions) + " rules");
    }
    const uint64_t times = most ? *most - least : 1; // that it may go on
    symbols_ += times;
    if (most || least > 1) {
        items.back().counted = std::max(least, most.value_or(0));
        items.back().hollow  = items.back().optional;
    }
    items.back().optional |= least == 0;
    items.back().repeats  |= most.value_or(2) > 1;
    grow(length_ * least + times * (length_ + 3));
    length_ = least * length_ + std::min<uint64_t>(times, 1);
}

void Reader::grow(uint64_t elements) {
    elements_ += elements;
    if (elements_ > GrammarLimits::max_elements) {
        wrong("the grammar is too large: with its repetitions written out it has more than " +
              str(GrammarLimits::max_elements) + " elements");
    }
}

bool is_utf8(const std::string & text) {
    for (size_t i = 0; i < text.size();) {
        const auto   c      = static_cast<unsigned char>(text[i]);
        const size_t length = c < 0x80 ? 1 : c >= 0xC2 && c < 0xE0 ? 2 : c >= 0xE0 && c < 0xF0 ? 3 : c >= 0xF0 && c < 0xF5 ? 4 : 0;
        if (length == 0 || i + length > text.size()) {
            return false;
        }
        for (size_t j = 1; j < length; ++j) {
            if ((static_cast<unsigned char>(text[i + j]) & 0xC0) != 0x80) {
                return false;
            }
        }
        i += length;
    }
    return true;
}

} // namespace

std::vector<GrammarRule> outline_grammar(const std::shared_ptr<Model> & model, const std::string & text) {
    if (text.size() > GrammarLimits::max_bytes) {
        fail("GrammarError", "grammar: " + str(text.size()) + " bytes are more than the " +
                                 str(GrammarLimits::max_bytes) + " a grammar may have");
    }
    if (text.find('\0') != std::string::npos || !is_utf8(text)) {
        fail("GrammarError", "grammar: it holds bytes that are no text (UTF-8 without NUL)");
    }
    return Reader(model, text).read();
}

} // namespace paceline
