#include "grammar.hpp"

#include <algorithm>
#include <limits>

#include "error.hpp"
#include "grammar_guard.hpp"
#include "grammar_rules.hpp"
#include "recent_cache.hpp"

namespace paceline {

namespace {

constexpr float   impossible = -std::numeric_limits<float>::infinity();
constexpr int32_t no_token   = -1;

void check_triggers(const Model & model, const GrammarOptions & options) {
    for (const std::string & word : options.trigger_words) {
        if (word.empty() || word == "^") {
            fail("GrammarError", "grammar_triggers: a text must not be empty");
        }
    }
    for (const int32_t token : options.trigger_tokens) {
        if (token < 0 || token >= model.n_vocab()) {
            fail("InvalidParams", "grammar_triggers: " + str(token) + " is no token of this model (0 to " +
                                      str(model.n_vocab() - 1) + ")");
        }
    }
    if (options.lazy && options.trigger_words.empty() && options.trigger_tokens.empty() && options.trigger_patterns.empty()) {
        fail("GrammarError", "grammar_lazy needs grammar_triggers: without one the grammar would never begin");
    }
}

// The rules of a grammar. Recent rules are kept: a chat's tools make the same grammar at every turn.
std::shared_ptr<const GrammarRules> rules_of(const std::shared_ptr<Model> & model, const GrammarOptions & options) {
    struct Compiled {
        std::weak_ptr<Model>                model;
        std::shared_ptr<const GrammarRules> rules;
    };
    static RecentCache<Compiled> cache(32, 16u << 20);
    const std::string            key = str(reinterpret_cast<uintptr_t>(model.get())) + '\0' + options.root + '\0' + options.text;
    if (const auto found = cache.find(key); found && found->model.lock() == model) {
        return found->rules;
    }
    check_grammar(model, options.text, options.root);
    auto       rules = read_grammar(model->vocab(), options.text, options.root);
    const auto bytes = rules->elements.size() * sizeof(GrammarRules::Element) + rules->starts.size() * sizeof(uint32_t);
    cache.put(key, std::make_shared<const Compiled>(Compiled{model, rules}), bytes);
    return rules;
}

// Of a token that a matcher has just taken or refused, and of copying one, in units of a search for patterns.
uint64_t work_of(const GrammarMatcher & begun) { return 1 + begun.work() / 50; }
uint64_t work_of_copy(const GrammarMatcher & matcher) { return matcher.size() / 8; }

GrammarMatcher matcher(const std::shared_ptr<Model> & model, const GrammarOptions & options) {
    if (llama_vocab_type(model->vocab()) == LLAMA_VOCAB_TYPE_NONE) {
        fail("Unsupported", "grammar: this model has no vocabulary of text");
    }
    check_triggers(*model, options);
    return GrammarMatcher(rules_of(model, options));
}

} // namespace

Grammar::Grammar(const std::shared_ptr<Model> & model, const GrammarOptions & options)
    : model_(model), matcher_(matcher(model, options)) {
    texts_ = TokenTexts::of(model);
    if (!options.lazy) {
        if (!options.prefix.empty() && !matcher_.accept(no_token, options.prefix, false)) {
            fail("GrammarError", "grammar_prefix: the grammar does not allow this text at its beginning");
        }
        return;
    }
    waiting_.emplace();
    waiting_->triggers = options.trigger_tokens;
    for (const std::string & word : options.trigger_words) {
        const bool first = word[0] == '^';
        (first ? waiting_->first_words : waiting_->words).push_back(word.substr(first ? 1 : 0));
        waiting_->longest = std::max(waiting_->longest, word.size());
    }
    size_t size_left = TriggerSearch::max_program;
    for (const PatternTrigger & trigger : options.trigger_patterns) {
        waiting_->searches.emplace_back(compile_trigger(trigger.pattern, trigger.full, size_left));
    }
}

bool Grammar::matches(int32_t token) const {
    return llama_vocab_is_eog(model_->vocab(), token) ? matcher_.complete()
                                                      : matcher_.takes(token, texts_->of_token(token));
}

bool Grammar::allows(int32_t token) const {
    matcher_.begin();
    return waiting_ || matches(token);
}

// In the order of the texts, so that the matcher processes each common prefix once.
void Grammar::filter(Candidates & list) const {
    if (waiting_) {
        return;
    }
    std::vector<std::pair<uint32_t, size_t>> order;
    order.reserve(list.size());
    for (size_t i = 0; i < list.size(); ++i) {
        order.emplace_back(texts_->rank(list.items[i].id), i);
    }
    std::sort(order.begin(), order.end());
    matcher_.begin();
    for (const auto & [rank, i] : order) {
        if (!matches(list.items[i].id)) {
            list.items[i].logit = impossible;
        }
    }
    list.drop_impossible();
}

void Grammar::filter(float * row, size_t) const {
    if (waiting_) {
        return;
    }
    matcher_.begin();
    for (const int32_t token : texts_->sorted()) {
        if (row[token] != impossible && !matches(token)) {
            row[token] = impossible;
        }
    }
}

bool Grammar::accept(int32_t token) {
    if (waiting_) {
        return asleep_ || accept_waiting(token);
    }
    if (llama_vocab_is_eog(model_->vocab(), token)) {
        return matcher_.complete();
    }
    return matcher_.accept(token, texts_->of_token(token), true);
}

bool Grammar::is_trigger(int32_t token) const {
    const std::vector<int32_t> & triggers = waiting_->triggers;
    return std::find(triggers.begin(), triggers.end(), token) != triggers.end();
}

bool Grammar::may_begin_with(int32_t token, uint64_t & work_left) const {
    if (!waiting_ || asleep_) {
        return true;
    }
    const std::string_view bytes = texts_->of_token(token);
    if (is_trigger(token)) {
        TriggerSearch::spend(work_of_copy(matcher_), work_left);
        GrammarMatcher begun  = matcher_;
        const bool     begins = begun.accept(token, bytes, true);
        TriggerSearch::spend(work_of(begun), work_left);
        return begins;
    }
    if (llama_vocab_is_eog(model_->vocab(), token)) {
        return true;
    }
    const Waiting::Next next = waiting_->next(bytes, work_left);
    if (!next.start) {
        return true;
    }
    TriggerSearch::spend(work_of_copy(matcher_), work_left);
    GrammarMatcher begun = matcher_;
    return begin_with(begun, token, bytes, *next.start, work_left);
}

bool Grammar::accept_waiting(int32_t token) {
    const std::string_view bytes = texts_->of_token(token);
    if (is_trigger(token)) {
        if (!matcher_.accept(token, bytes, true)) {
            return false;
        }
        waiting_.reset();
        return true;
    }
    if (llama_vocab_is_eog(model_->vocab(), token)) {
        return true;
    }
    uint64_t      work_left = TriggerSearch::max_tried_work;
    Waiting::Next next      = waiting_->next(bytes, work_left);
    if (next.start) {
        GrammarMatcher begun = matcher_;
        if (!begin_with(begun, token, bytes, *next.start, work_left)) {
            return false;
        }
        matcher_ = std::move(begun);
        waiting_.reset();
        return true;
    }
    waiting_->add(token, bytes, std::move(next));
    waiting_->shorten();
    return true;
}

// The grammar with the text from `start` on, and this token behind it.
bool Grammar::begin_with(GrammarMatcher & begun, int32_t token, std::string_view bytes, size_t start,
                         uint64_t & work_left) const {
    const auto takes = [&](int32_t one, std::string_view its_bytes, bool whole) {
        const bool is_taken = begun.accept(one, its_bytes, whole);
        TriggerSearch::spend(work_of(begun), work_left);
        return is_taken;
    };
    size_t begin = 0;
    for (const auto & [one, end] : waiting_->tokens) {
        const size_t from = std::max(begin, start);
        if (end > from && !takes(one, std::string_view(waiting_->text).substr(from, end - from), from == begin)) {
            return false;
        }
        begin = end;
    }
    const size_t from = std::max(begin, start);
    return from == begin + bytes.size() || takes(token, bytes.substr(from - begin), from == begin);
}

// Words are looked for at places that this token may complete: before it, there was none.
Grammar::Waiting::Next Grammar::Waiting::next(std::string_view bytes, uint64_t & work_left) const {
    const size_t tail_begin = text.size() - std::min(text.size(), longest);
    const std::string tail  = text.substr(tail_begin).append(bytes);
    size_t            start = std::string::npos;
    TriggerSearch::spend(1 + words.size() + first_words.size(), work_left);
    for (const std::string & word : first_words) {
        if (dropped + tail_begin == 0 && tail.starts_with(word)) {
            return {{}, 0};
        }
    }
    for (const std::string & word : words) {
        const size_t found = tail.find(word);
        start              = std::min(start, found == std::string::npos ? found : tail_begin + found);
    }
    Next     next{searches, std::nullopt};
    uint64_t token_work = std::min(work_left, TriggerSearch::max_work);
    work_left -= token_work;
    for (TriggerSearch & search : next.searches) {
        search.advance(bytes, token_work);
        if (start == std::string::npos) {
            if (const std::optional<size_t> found = search.found(token_work)) {
                start = *found - dropped;
            }
        }
    }
    work_left += token_work;
    if (start != std::string::npos) {
        next.start = start;
    }
    return next;
}

void Grammar::Waiting::add(int32_t token, std::string_view bytes, Next && next) {
    searches = std::move(next.searches);
    if (!bytes.empty()) {
        text += bytes;
        tokens.emplace_back(token, text.size());
    }
}

// Drops tokens in which no trigger can have begun.
void Grammar::Waiting::shorten() {
    size_t keep_from = text.size() - std::min(text.size(), longest);
    for (TriggerSearch & search : searches) {
        search.forget_before(dropped + text.size() - std::min(text.size(), max_text));
        keep_from = std::min(keep_from, search.earliest() - dropped);
    }
    const auto   kept  = std::partition_point(tokens.begin(), tokens.end(),
                                              [keep_from](const auto & token) { return token.second <= keep_from; });
    const size_t count = static_cast<size_t>(kept - tokens.begin());
    if (count == 0 || tokens[count - 1].second < text.size() / 2) { // seldom, since the kept text is moved
        return;
    }
    const size_t size = tokens[count - 1].second;
    dropped += size;
    text.erase(0, size);
    tokens.erase(tokens.begin(), tokens.begin() + static_cast<ptrdiff_t>(count));
    for (auto & [token, end] : tokens) {
        end -= size;
    }
}

} // namespace paceline
