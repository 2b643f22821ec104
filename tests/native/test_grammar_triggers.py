"""Lazy grammars: free text until a trigger, and the grammar from there on."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.native.apart import run_apart
from tests.native.grammars import accept_all, bits, spm

from paceline.errors import InvalidParams
from paceline.params import SamplingParams
from paceline.runtime import Model, Sampler


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
    """A text after ^ begins the grammar if the output begins with it, and nowhere else."""
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
