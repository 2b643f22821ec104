#include "grammar_rules.hpp"

#include <exception>

#include "error.hpp"

// Internals of llama.cpp (src/llama-grammar.h), which installs no header for them. A change there fails to link, or in the
// tests of the grammars.
struct llama_grammar;
struct llama_grammar_element {
    uint32_t type;
    uint32_t value;
};
llama_grammar * llama_grammar_init_impl(const llama_vocab * vocab, const char * text, const char * root, bool lazy,
                                        const char ** patterns, size_t n_patterns, const llama_token * tokens,
                                        size_t n_tokens);
void llama_grammar_free_impl(llama_grammar * grammar);
const std::vector<std::vector<llama_grammar_element>> & llama_grammar_get_rules(const llama_grammar * grammar);

namespace paceline {

namespace {

struct Free {
    void operator()(llama_grammar * grammar) const { llama_grammar_free_impl(grammar); }
};

// llama.cpp numbers rules as they come: one that is put before all of them is rule 0.
std::string beginning(const std::string & text) {
    std::string name = "beginning";
    while (text.find(name) != std::string::npos) {
        name += "-x";
    }
    return name;
}

} // namespace

std::shared_ptr<const GrammarRules> read_grammar(const llama_vocab * vocab, const std::string & text,
                                                 const std::string & root) {
    const std::string                    first = beginning(text);
    const std::string                    whole = first + " ::= " + root + "\n" + text;
    std::unique_ptr<llama_grammar, Free> grammar;
    try {
        grammar.reset(llama_grammar_init_impl(vocab, whole.c_str(), first.c_str(), false, nullptr, 0, nullptr, 0));
    } catch (const std::exception & error) {
        fail("GrammarError", std::string("grammar: llama.cpp refuses it: ") + error.what());
    }
    if (!grammar) {
        fail("GrammarError", "grammar: llama.cpp refuses it: a rule leads to itself before any character (left recursion)");
    }
    auto rules = std::make_shared<GrammarRules>();
    rules->elements.push_back({GrammarRules::Kind::end, 0});
    for (const std::vector<llama_grammar_element> & rule : llama_grammar_get_rules(grammar.get())) {
        rules->starts.push_back(static_cast<uint32_t>(rules->elements.size()));
        for (const llama_grammar_element & element : rule) {
            rules->elements.push_back({static_cast<GrammarRules::Kind>(element.type), element.value});
        }
    }
    return rules;
}

} // namespace paceline
