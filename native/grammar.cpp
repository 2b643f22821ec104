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

// The rules of a grammar. Those of late are kept: a chat's tools make the same grammar at every turn.
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

bool Grammar::may_begin_with(int32_t token) const {
    if (!waiting_ || asleep_) {
        return true;
    }
    GrammarMatcher begun = matcher_;
    if (is_trigger(token)) {
        return begun.accept(token, texts_->of_token(token), true);
    }
    if (llama_vocab_is_eog(model_->vocab(), token)) {
        return true;
    }
    Waiting next = *waiting_;
    next.add(token, texts_->of_token(token));
    const std::optional<size_t> start = next.find();
    return !start || begin_with(begun, next, *start);
}

bool Grammar::accept_waiting(int32_t token) {
    if (is_trigger(token)) {
        if (!matcher_.accept(token, texts_->of_token(token), true)) {
            return false;
        }
        waiting_.reset();
        return true;
    }
    if (llama_vocab_is_eog(model_->vocab(), token)) {
        return true;
    }
    Waiting next = *waiting_;
    next.add(token, texts_->of_token(token));
    if (const std::optional<size_t> start = next.find()) {
        GrammarMatcher begun = matcher_;
        if (!begin_with(begun, next, *start)) {
            return false;
        }
        matcher_ = std::move(begun);
        waiting_.reset();
        return true;
    }
    next.shorten();
    waiting_ = std::move(next);
    return true;
}

bool Grammar::begin_with(GrammarMatcher & begun, const Waiting & text, size_t start) const {
    size_t begin = 0;
    for (const auto & [token, end] : text.tokens) {
        const size_t from  = std::max(begin, start);
        const auto   bytes = std::string_view(text.text).substr(from, end > from ? end - from : 0);
        if (end > start && !bytes.empty() && !begun.accept(token, bytes, from == begin)) {
            return false;
        }
        begin = end;
    }
    return true;
}

void Grammar::Waiting::add(int32_t token, std::string_view bytes) {
    if (bytes.empty()) {
        return;
    }
    text += bytes;
    tokens.emplace_back(token, text.size());
    uint64_t work_left = TriggerSearch::max_work;
    for (TriggerSearch & search : searches) {
        search.advance(bytes, work_left);
    }
}

std::optional<size_t> Grammar::Waiting::find() const {
    size_t start = std::string::npos;
    for (const std::string & word : first_words) {
        if (dropped == 0 && text.starts_with(word)) {
            return 0;
        }
    }
    for (const std::string & word : words) {
        start = std::min(start, text.find(word));
    }
    for (auto search = searches.begin(); start == std::string::npos && search != searches.end(); ++search) {
        if (const std::optional<size_t> found = search->found()) {
            start = *found - dropped;
        }
    }
    return start == std::string::npos ? std::nullopt : std::optional(start);
}

// Drops tokens in which no trigger can have begun.
void Grammar::Waiting::shorten() {
    size_t keep_from = text.size() - std::min(text.size(), longest);
    for (TriggerSearch & search : searches) {
        search.forget_before(dropped + text.size() - std::min(text.size(), max_text));
        keep_from = std::min(keep_from, search.earliest() - dropped);
    }
    size_t count = 0;
    while (count < tokens.size() && tokens[count].second <= keep_from) {
        ++count;
    }
    if (count == 0) {
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
