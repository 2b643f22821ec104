"""Grammars: what they let through, what is no grammar, and that no text ends the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.native.apart import run_apart

from paceline.errors import GrammarError, InvalidParams, SamplingError, Unsupported
from paceline.params import SamplingParams
from paceline.runtime import Model, Sampler

LIST = 'root ::= "[" [0-9]{1,3} ("," [0-9]{1,3}){0,3} "]"'
OPEN: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}


def spm(llama_cpp_source: Path) -> Path:
    """The file of `vocabulary`."""
    return llama_cpp_source / "models" / "ggml-vocab-llama-spm.gguf"


def row(seed: int, n: int) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=n) * 3).astype(np.float32)


def text_of(sampler: Sampler, model: Model, num_tokens: int = 60) -> str:
    """Generates on random logits until the model would end."""
    ids = []
    for k in range(num_tokens):
        token = sampler.sample(row(k, sampler.n_vocab))
        sampler.accept(token)
        if sampler.is_eog(token):
            return model.tokenizer.decode(ids)
        ids.append(token)
    return model.tokenizer.decode(ids) + "..."


def accept_all(sampler: Sampler, token_ids: list[int]) -> None:
    for token in token_ids:
        sampler.accept(token)


def bits(mask: np.ndarray, n: int) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:n]).tolist())


@pytest.mark.parametrize(
    "options", [{}, OPEN, {"temperature": 0}, {"top_k": 3}, {"mirostat": 2}, {"min_p": 0.3, "top_k": 0}]
)
def test_generated_text_follows_the_grammar(vocabulary: Model, options: dict[str, Any]) -> None:
    """Whatever the samplers, the text is one that the grammar makes, and it ends."""
    text = text_of(Sampler(SamplingParams(grammar=LIST, seed=4, **options), vocabulary), vocabulary)
    numbers = text.removeprefix("[").removesuffix("]").split(",")
    assert 1 <= len(numbers) <= 4
    assert all(number.isdigit() and len(number) <= 3 for number in numbers)
    assert text == f"[{','.join(numbers)}]"


@pytest.mark.parametrize(
    "options", [{}, OPEN, {"temperature": 0}, {"top_k": 0}, {"xtc_probability": 0.5}, {"mirostat": 1}]
)
@pytest.mark.parametrize(
    "grammar", [LIST, 'root ::= [^"]* "\\""', 'root ::= [^é]+ "x"', 'root ::= "a" | [^\\x00-\\x7F]+']
)
def test_a_grammar_draws_what_its_own_mask_draws(vocabulary: Model, grammar: str, options: dict[str, Any]) -> None:
    """The shortcuts around a grammar give the token that masking every forbidden token first gives."""
    guided = Sampler(SamplingParams(grammar=grammar, seed=9, **options), vocabulary)
    masked = Sampler(SamplingParams(seed=9, **options), vocabulary)
    for k in range(6):
        logits = row(k, guided.n_vocab)
        token = guided.sample(logits)
        assert masked.sample(logits, guided.allowed_mask()) == token
        guided.accept(token)
        masked.accept(token)
        if guided.is_eog(token):
            break


@pytest.mark.parametrize("grammar", [LIST, 'root ::= [^"]* "\\""', 'root ::= [^é]+ "x"', "root ::= [é-ü]+ | <[300]>"])
def test_the_mask_is_what_the_grammar_says_of_each_token(vocabulary: Model, grammar: str) -> None:
    """The mask of a whole vocabulary agrees with asking about one token at a time."""
    sampler = Sampler(SamplingParams(grammar=grammar, temperature=0), vocabulary)
    allowed = bits(sampler.allowed_mask(), sampler.n_vocab)
    lone = np.full(sampler.n_vocab, -np.inf, dtype=np.float32)
    for token in range(0, sampler.n_vocab, 7):
        lone[token] = 0.0
        try:
            assert (sampler.sample(lone) == token) == (token in allowed)
        except SamplingError:
            assert token not in allowed
        lone[token] = -np.inf


def test_after_the_grammar_is_complete_only_the_end_can_come(vocabulary: Model) -> None:
    """A finished text is followed by an end-of-generation token and nothing else."""
    sampler = Sampler(SamplingParams(choice=("yes",), seed=1), vocabulary)
    yes = vocabulary.tokenizer.token_id("yes")
    assert yes is not None
    sampler.accept(yes)
    assert bits(sampler.allowed_mask(), sampler.n_vocab) == set(vocabulary.tokenizer.eog_ids)


def test_accept_moves_the_grammar_exactly_once(vocabulary: Model) -> None:
    """Sampling does not move the grammar, accepting moves it one token: "aa" and no more than that comes of two."""
    sampler = Sampler(SamplingParams(grammar='root ::= "a" "b" "a"', temperature=0), vocabulary)
    letters = {letter: vocabulary.tokenizer.token_id(letter) for letter in "ab"}
    logits = np.full(sampler.n_vocab, -np.inf, dtype=np.float32)
    logits[[letters["a"], letters["b"]]] = [1.0, 0.0]
    for letter in "aba":
        assert [sampler.sample(logits) for _ in range(3)] == [letters[letter]] * 3
        sampler.accept(letters[letter])
    with pytest.raises(SamplingError, match="no token is allowed"):
        sampler.sample(logits)


def test_a_token_that_the_grammar_forbids_is_refused_and_nothing_moves(vocabulary: Model) -> None:
    """Accepting a forbidden token, an early end among them, raises and leaves the sampler as it was."""
    sampler = Sampler(SamplingParams(grammar=LIST, seed=4), vocabulary)
    eos = vocabulary.tokenizer.eos
    assert eos is not None
    before = sampler.state()
    for token in (eos, 300, vocabulary.tokenizer.encode("x", add_special=False)[-1]):
        with pytest.raises(InvalidParams, match=f"does not allow token {token}"):
            sampler.accept(token)
    assert sampler.state() == before
    assert text_of(sampler, vocabulary).endswith("]")


def test_a_grammar_that_names_tokens_is_followed(vocabulary: Model) -> None:
    """A token named by id comes where the grammar has it, and text around it goes on."""
    end = vocabulary.tokenizer.token_id("</s>")
    sampler = Sampler(SamplingParams(grammar='root ::= [a-c]{2} <[300]> "x"', temperature=0), vocabulary)
    ids = []
    while not ids or not sampler.is_eog(ids[-1]):
        ids.append(sampler.sample(row(len(ids), sampler.n_vocab)))
        sampler.accept(ids[-1])
    assert 300 in ids
    assert ids[-1] == end
    assert vocabulary.tokenizer.decode(ids[: ids.index(300)]).strip("abc") == ""


def test_a_drawn_token_can_always_be_accepted(vocabulary: Model) -> None:
    """Where a grammar mixes characters and tokens, nothing is drawn that it would not go on with."""
    grammar = 'root ::= (ident "=" ident "\\n")+\nident ::= [a-z] [a-z0-9_]* ws\nws ::= !<[7]> [ \\t\\n]*'
    for seed in range(4):
        sampler = Sampler(SamplingParams(grammar=grammar, seed=seed, **OPEN), vocabulary)
        for k in range(12):
            sampler.accept(sampler.sample(row(100 * seed + k, sampler.n_vocab)))
        assert sampler.num_generated == 12


def test_a_lazy_grammar_begins_at_its_trigger(vocabulary: Model) -> None:
    """Before the trigger anything goes, after it only the grammar; the trigger may be text or a token."""
    encode = vocabulary.tokenizer.encode
    less = vocabulary.tokenizer.token_id("<")
    assert less is not None
    for triggers in (("<",), ("never", "<"), (less,)):
        options = SamplingParams(
            grammar='root ::= "<" [0-9]+', grammar_lazy=True, grammar_triggers=triggers, temperature=0
        )
        sampler = Sampler(options, vocabulary)
        for token in encode("free text", add_special=False):
            sampler.accept(token)
        assert len(bits(sampler.allowed_mask(), sampler.n_vocab)) == sampler.n_vocab
        sampler.accept(less)
        mask = bits(sampler.allowed_mask(), sampler.n_vocab)
        assert 0 < len(mask) < 100
        with pytest.raises(InvalidParams, match="does not allow"):
            sampler.accept(300)
        assert bits(sampler.allowed_mask(), sampler.n_vocab) == mask


def test_a_trigger_that_the_grammar_does_not_go_on_with_is_refused(vocabulary: Model) -> None:
    """If the triggering text is not the grammar's beginning, accept raises and the sampler still waits."""
    options = SamplingParams(grammar='root ::= "y"', grammar_lazy=True, grammar_triggers=("x",), temperature=0)
    sampler = Sampler(options, vocabulary)
    x = vocabulary.tokenizer.token_id("x")
    assert x is not None
    with pytest.raises(InvalidParams, match="does not allow"):
        sampler.accept(x)
    sampler.accept(300)
    assert sampler.num_generated == 1


def test_a_lazy_grammar_waits_through_a_long_text(vocabulary: Model) -> None:
    """The trigger is found however much text comes before it."""
    options = SamplingParams(grammar='root ::= "<" [0-9]+', grammar_lazy=True, grammar_triggers=("<1",), temperature=0)
    sampler = Sampler(options, vocabulary)
    hello, less, one = (vocabulary.tokenizer.encode(text, add_special=False)[-1] for text in ("hello", "<", "1"))
    accept_all(sampler, [*[hello] * 4000, less, one])
    assert 0 < len(bits(sampler.allowed_mask(), sampler.n_vocab)) < 1000


def test_an_anchored_trigger_counts_at_the_beginning_alone(vocabulary: Model) -> None:
    """A text behind ^ begins the grammar where the answer begins with it, and nowhere else."""
    options = SamplingParams(grammar='root ::= "<b" [0-9]', grammar_lazy=True, grammar_triggers=("^<b",), temperature=0)
    less, letter = (vocabulary.tokenizer.token_id(text) for text in "<b")
    assert less is not None and letter is not None
    for before, is_free in (([], False), ([letter], True), ([letter] * 40, True)):
        sampler = Sampler(options, vocabulary)
        accept_all(sampler, [*before, less, letter])
        assert (len(bits(sampler.allowed_mask(), sampler.n_vocab)) == sampler.n_vocab) == is_free


def test_the_grammar_begins_within_a_token(vocabulary: Model) -> None:
    """A trigger may begin in the middle of one token and end in that of another; the grammar gets all from there on."""
    options = SamplingParams(
        grammar='root ::= "lo" "th" "e" [x-z]', grammar_lazy=True, grammar_triggers=("loth",), temperature=0
    )
    tokens = {vocabulary.tokenizer.token_bytes(token): token for token in range(vocabulary.tokenizer.n_vocab)}
    hello, the, other = (tokens[text] for text in (b" hello", b"the", b"thing"))
    sampler = Sampler(options, vocabulary)
    sampler.accept(hello)
    with pytest.raises(InvalidParams, match="does not allow"):
        sampler.accept(other)
    sampler.accept(the)
    texts = {vocabulary.tokenizer.decode([token]) for token in bits(sampler.allowed_mask(), sampler.n_vocab)}
    assert texts == {"x", "y", "z"}


@pytest.mark.parametrize(
    "trigger", ["(" * 200, "^((((((([ ])))))))*x", "^([ ]|b)*x", "(a+)+x", "\\", "[", "a|b", "^^", "$"]
)
def test_a_trigger_is_no_expression(llama_cpp_source: Path, trigger: str) -> None:
    """A trigger is found as it is written, whatever a regular expression would make of it."""
    code = r"""
model = Model.load(sys.argv[1], vocab_only=True)
trigger = sys.argv[2]
literal = "".join(f"\\U{ord(c):08X}" for c in trigger.removeprefix("^"))
params = SamplingParams(grammar=f'root ::= "{literal}" "!"', grammar_lazy=True, grammar_triggers=(trigger,))
def run():
    sampler = Sampler(params, model)
    ids = {text: model.tokenizer.encode(text, add_special=False)[-1] for text in "ab x"}
    if trigger[0] != "^":
        for text in "ab x" * 600 + "a" * 300:
            sampler.accept(ids[text])
    else:
        Sampler(params, model).accept(ids["a"])
    byte = {model.tokenizer.token_bytes(i): i for i in reversed(range(sampler.n_vocab))}
    for text in trigger.removeprefix("^"):
        sampler.accept(byte[text.encode()])
    mask = sampler.allowed_mask()
    print(int(np.bitwise_count(mask).sum()) if hasattr(np, "bitwise_count") else 1)
threading.stack_size(512 * 1024)
thread = threading.Thread(target=run)
thread.start()
thread.join()
"""
    (line,) = run_apart(code, spm(llama_cpp_source), trigger)
    assert 1 <= int(line) < 10


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("", "no rule 'root'"),
        ('start ::= "a"', "no rule 'root'"),
        ('root ::= "a', "ends within a literal"),
        ("root ::= [a-", "ends within a literal"),
        ('root ::= "\\q"', "unknown escape"),
        ('root ::= "\\x1"', "2 hexadecimal digits"),
        ("root ::= other", "'other' is used and nowhere defined"),
        ('root ::= ("a"', r"expected '\)'"),
        ('root ::= "a")', "end of the line"),
        ('root "a"', "expected '::='"),
        ("root ::= *", "needs something before it"),
        ('root ::= ""*', "needs something before it"),
        ('root ::= "a"{', "expected a number"),
        ('root ::= "a"{3', "expected '}'"),
        ('root ::= "a"{2,1}', "below its lowest"),
        ('root ::= "a"{1,1000000}', "beyond 2000"),
        ('root ::= "a"{99999999999999999999}', "beyond 2000"),
        ('root ::= (("a" "b"?){1,60}){1,60}', "2000 rules"),
        ("root ::= <[32000]>", "not in this model's vocabulary"),
        ("root ::= <nothing like that>", "not one token"),
        ("root ::= <[1", "expected ']'"),
        ('root ::= é "a"', "'é' cannot stand here"),
        ('root ::= "\0"', "no text"),
        ('root ::= root "a" | "b"', "left recursion"),
        ('root ::= a\na ::= b\nb ::= root "x" | "y"', "left recursion"),
        ('root ::= root | "b"', "left recursion"),
        ('root ::= e root "z" | "x"\ne ::= f\nf ::= "" | "y"', "left recursion"),
        ('root ::= ("a" | ""){0,2000} "b"', "can be empty"),
        ('root ::= "a"?{11}', "can be empty"),
        ("root ::= " + "(" * 100_000, "nested deeper than 200"),
        ("root ::= " + "(" * 201 + '"a"' + ")" * 201, "nested deeper than 200"),
        ('root ::= "' + "a" * 2**20 + '"', "1048576"),
        ('root ::= "' + "a" * 2000 + '"{2000}', "too large"),
        ("root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(2000)) + 'r2000 ::= "x"', "chains of 2002"),
        ("root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} | r{i + 1}\n" for i in range(60)) + 'r60 ::= "x"', "altern"),
        ("root ::= " + " | ".join(f'"w{i}"' for i in range(20_001)), "20001 alternatives"),
    ],
)  # fmt: skip
def test_what_is_no_grammar_is_refused_with_the_reason(vocabulary: Model, grammar: str, message: str) -> None:
    """A text that does not parse, or that llama.cpp would crash or hang on, raises GrammarError and says why."""
    with pytest.raises(GrammarError, match=message):
        Sampler(SamplingParams(grammar=grammar), vocabulary)


def test_an_error_in_a_grammar_names_line_and_column(vocabulary: Model) -> None:
    """Where a grammar is wrong is said in lines and columns."""
    with pytest.raises(GrammarError, match="line 3, column 6"):
        Sampler(SamplingParams(grammar='root ::= a\n# comment\na ::=$ "x"'), vocabulary)


def test_only_a_rule_of_the_grammar_can_be_its_root(vocabulary: Model) -> None:
    """A name that is no rule is refused, also one that would read as several or as a group."""
    for root in ("other", "root x", "a group in line 1", 'root ::= "x"\nroot', ""):
        with pytest.raises(GrammarError, match="no rule"):
            Sampler(SamplingParams(grammar='root ::= ("a") x\nx ::= "y"', grammar_root=root), vocabulary)
    params = SamplingParams(grammar='root ::= ("a") x\nx ::= "y"', grammar_root="x", seed=1)
    assert text_of(Sampler(params, vocabulary), vocabulary) == "y"


def test_a_grammar_of_almost_a_megabyte_works(vocabulary: Model) -> None:
    """The limit on size is one that llama.cpp can take."""
    rules = [f'r{i} ::= "{"é" * 1030}"\n' for i in range(500)]
    grammar = "root ::= " + " | ".join(f"r{i}" for i in range(500)) + "\n" + "".join(rules)
    assert 1_000_000 < len(grammar.encode()) <= 2**20
    sampler = Sampler(SamplingParams(grammar=grammar, temperature=0), vocabulary)
    sampler.accept(sampler.sample(row(1, sampler.n_vocab)))
    assert sampler.num_generated == 1


def test_grammars_at_the_limits_run_on_a_small_stack(llama_cpp_source: Path) -> None:
    """Grammars as deep as they may be compile and sample on a thread with a stack of 512 KiB."""
    script = """
import sys, threading
import numpy as np
from paceline.params import SamplingParams
from paceline.runtime import Model, Sampler
model = Model.load(sys.argv[1], vocab_only=True)
chain = "".join(f"r{i} ::= r{i + 1}\\n" for i in range(990))
deep = [
    "root ::= " + "(" * 199 + '"a"' + ")" * 199,
    'root ::= ("a" | "c"){0,2000} "b"',
    "root ::= r0\\n" + chain + 'r990 ::= "x"',
]
def run():
    for grammar in deep:
        sampler = Sampler(SamplingParams(grammar=grammar, temperature=0), model)
        sampler.accept(sampler.sample(np.zeros(sampler.n_vocab, dtype=np.float32)))
        done.append(grammar)
done = []
threading.stack_size(512 * 1024)
thread = threading.Thread(target=run)
thread.start()
thread.join()
sys.exit(0 if len(done) == len(deep) else 1)
"""
    model = llama_cpp_source / "models" / "ggml-vocab-llama-spm.gguf"
    result = subprocess.run(
        [sys.executable, "-c", script, str(model)], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 0, result.stderr[-2000:]


def test_every_grammar_of_the_source_tree_is_taken(vocabulary: Model, llama_cpp_source: Path) -> None:
    """The checks before llama.cpp refuse nothing that llama.cpp itself ships as a grammar."""
    grammars = sorted((llama_cpp_source / "grammars").glob("*.gbnf"))
    assert len(grammars) > 3
    for path in grammars:
        sampler = Sampler(SamplingParams(grammar=path.read_text(), seed=2), vocabulary)
        allowed = bits(sampler.allowed_mask(), sampler.n_vocab)
        assert 0 < len(allowed) < sampler.n_vocab, path.name
        token = sampler.sample(row(1, sampler.n_vocab))
        assert token in allowed, path.name
        sampler.accept(token)
        assert bits(sampler.allowed_mask(), sampler.n_vocab) != allowed, path.name


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "a" root "b" | "a" root "c" | "d"',
        'root ::= " " root "b" | " " root "c" | "d"',
        'root ::= x x\nx ::= "a" x y | "a" x | "b"\ny ::= "c" | "c" y',
        'root ::= e "+" e "!"\ne ::= "a" e e | "a" | "a" e',
        'root ::= ("a" | "aa" | "aaa" | [a-z])+ "!"',
    ],
)
def test_ambiguous_grammars_are_followed_without_doubling(llama_cpp_source: Path, grammar: str) -> None:
    """Grammars whose readings double with every character are followed through hundreds of them."""
    code = """
import time
model = Model.load(sys.argv[1], vocab_only=True)
sampler = Sampler(SamplingParams(grammar=sys.argv[2], temperature=0), model)
first = sampler.allowed_mask()
row = np.zeros(sampler.n_vocab, dtype=np.float32)
for k in range(100):
    sampler.accept(sampler.sample(row, first))
sampler.allowed_mask()
print(sampler.num_generated)
"""
    assert run_apart(code, spm(llama_cpp_source), grammar, timeout_s=30) == ["100"]


def test_a_grammar_that_is_too_ambiguous_says_so_and_nothing_moves(vocabulary: Model) -> None:
    """Where even one token would take seconds SamplingError is raised, and the sampler stands where it stood."""
    many = " | ".join(f'. . . . . . . . "{i}"' for i in range(4000))
    sampler = Sampler(SamplingParams(grammar=f"root ::= ({many})+", temperature=0), vocabulary)
    before = sampler.state()
    with pytest.raises(SamplingError, match="too many ways"):
        sampler.allowed_mask()
    assert sampler.state() == before
    sampler.accept(sampler.sample(row(1, sampler.n_vocab)))
    assert sampler.num_generated == 1


def test_a_mask_in_an_ambiguous_text_is_within_the_limit(vocabulary: Model) -> None:
    """Forty letters that can be read in ever so many ways leave room for the mask of a whole vocabulary."""
    sampler = Sampler(
        SamplingParams(grammar='root ::= e "+" e "!"\ne ::= [a-z] e e | [a-z] | [a-z] e', temperature=0), vocabulary
    )
    tokens = {vocabulary.tokenizer.token_bytes(token): token for token in range(sampler.n_vocab)}
    accept_all(sampler, [tokens[b"a"]] * 40)
    allowed = bits(sampler.allowed_mask(), sampler.n_vocab)
    assert {tokens[b"z"], tokens[b"+"]} <= allowed
    assert tokens[b"!"] not in allowed


def test_deep_nesting_is_followed_and_left_again(vocabulary: Model) -> None:
    """Thousands of open brackets are remembered, and closed one by one."""
    sampler = Sampler(SamplingParams(grammar='root ::= "(" root ")" | "x"', temperature=0), vocabulary)
    tokens = {vocabulary.tokenizer.token_bytes(token): token for token in range(sampler.n_vocab)}
    ids = {text: tokens[text.encode()] for text in "(x)"}
    accept_all(sampler, [ids[text] for text in "(" * 3000 + "x" + ")" * 2999])
    copied = sampler.clone()
    with pytest.raises(InvalidParams, match="does not allow"):
        sampler.accept(ids["("])
    for one in (sampler, copied):
        one.accept(ids[")"])
        assert bits(one.allowed_mask(), one.n_vocab) == set(vocabulary.tokenizer.eog_ids)


def test_a_character_in_several_tokens_is_followed(vocabulary: Model) -> None:
    """A character that only byte tokens spell comes byte after byte, and nothing but its own bytes in between."""
    sampler = Sampler(SamplingParams(grammar='root ::= [\\U0001F600-\\U0001F601] "!"', temperature=0), vocabulary)
    tokens = {vocabulary.tokenizer.token_bytes(token): token for token in range(sampler.n_vocab)}
    pieces = [tokens[bytes([byte])] for byte in "😀".encode()]
    for piece in pieces[:-1]:
        assert piece in bits(sampler.allowed_mask(), sampler.n_vocab)
        sampler.accept(piece)
    last = bits(sampler.allowed_mask(), sampler.n_vocab)
    assert last == {tokens[b"\x80"], tokens[b"\x81"]}
    with pytest.raises(InvalidParams, match="does not allow"):
        sampler.accept(tokens[b"!"])
    sampler.accept(pieces[-1])
    sampler.accept(tokens[b"!"])
    assert bits(sampler.allowed_mask(), sampler.n_vocab) == set(vocabulary.tokenizer.eog_ids)


@pytest.mark.parametrize("text", ["yes", 'a "quoted" one', "line\nbreak", "\\back[slash]-", "日本 é 😀"])
def test_a_choice_makes_exactly_its_texts(vocabulary: Model, text: str) -> None:
    """What is chosen from is literal text, whatever characters it has."""
    assert text_of(Sampler(SamplingParams(choice=(text,), seed=3, **OPEN), vocabulary), vocabulary) == text


def test_a_json_schema_makes_json_that_fits(vocabulary: Model) -> None:
    """A schema is turned into a grammar of the JSON that it describes."""
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
    }
    text = text_of(Sampler(SamplingParams(json_schema=schema, temperature=0), vocabulary), vocabulary, 200)
    assert text.startswith("{")
    assert '"a"' in text


def test_a_schema_that_cannot_be_translated_is_refused(vocabulary: Model) -> None:
    """What the translation does not know is an error and not ignored."""
    with pytest.raises(GrammarError, match="json_schema"):
        Sampler(SamplingParams(json_schema={"type": "nonsense"}), vocabulary)


def test_regex_is_named_as_missing(vocabulary: Model) -> None:
    """A valid request for what is not there yet raises Unsupported."""
    with pytest.raises(Unsupported, match="regex"):
        Sampler(SamplingParams(regex="a+"), vocabulary)
