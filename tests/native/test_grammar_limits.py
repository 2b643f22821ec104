"""Invalid grammars, grammars that are too large, and texts: none ends the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.native.apart import run_apart
from tests.native.grammars import accept_all, bits, row, spm, text_of

from paceline.errors import GrammarError, SamplingError
from paceline.params import SamplingParams
from paceline.runtime import Model, Sampler, build_info


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
def test_invalid_grammar_is_refused_with_the_reason(vocabulary: Model, grammar: str, message: str) -> None:
    """A text that does not parse, or that llama.cpp would crash or hang on, raises GrammarError and says why."""
    with pytest.raises(GrammarError, match=message):
        Sampler(SamplingParams(grammar=grammar), vocabulary)


def test_an_error_in_a_grammar_names_line_and_column(vocabulary: Model) -> None:
    """Errors in a grammar have lines and columns."""
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
    """Grammars as deep as they may be compile and sample on a thread with a stack of 512 KiB (sanitizers: 8 MiB)."""
    kib = 8192 if build_info().sanitizers else 512  # their frames are many times as large
    script = """
import sys, threading
import numpy as np
from paceline.params import SamplingParams
from paceline.runtime import Model, Sampler, build_info
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
threading.stack_size(int(sys.argv[2]) * 1024)
thread = threading.Thread(target=run)
thread.start()
thread.join()
sys.exit(0 if len(done) == len(deep) else 1)
"""
    model = llama_cpp_source / "models" / "ggml-vocab-llama-spm.gguf"
    result = subprocess.run(
        [sys.executable, "-c", script, str(model), str(kib)], capture_output=True, text=True, check=False, timeout=60
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
    """Grammars with a number of readings that doubles with every character are followed through hundreds of characters."""
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


def test_a_grammar_that_is_too_ambiguous_raises_and_changes_nothing(vocabulary: Model) -> None:
    """If even one token would take seconds SamplingError is raised, and the sampler is unchanged."""
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
