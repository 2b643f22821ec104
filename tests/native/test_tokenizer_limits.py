"""Encoding when the stack, the memory or the vocabulary is short; in processes of their own if it might crash."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.native.vocabularies import write_vocabulary

from paceline import _native
from paceline.errors import Unsupported
from paceline.runtime.tokenizer import Tokenizer

PRELUDE = """
import sys, threading
from paceline import _native
from paceline.errors import NotEnoughMemory
from paceline.runtime.tokenizer import Tokenizer
tokenizer = Tokenizer(_native.Model.load([sys.argv[1]], vocab_only=True))
"""


@pytest.fixture
def run(llama_cpp_source: Path) -> Callable[[str, str], str]:
    """Run Python code with a `tokenizer` of the named vocabulary in a new process and return its output."""

    def call(name: str, code: str) -> str:
        path = llama_cpp_source / "models" / f"ggml-vocab-{name}.gguf"
        command = [sys.executable, "-c", PRELUDE + code, str(path)]
        env = {**os.environ, "GGML_NO_BACKTRACE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    return call


@pytest.mark.parametrize("name", ["deepseek-llm", "deepseek-coder", "falcon", "aquila", "gpt-neox", "llama-bpe"])
def test_runs_of_one_character_do_not_overflow_the_stack(run: Callable[[str, str], str], name: str) -> None:
    """Three times the run that overflows a usual stack is encoded, whatever the character, and decodes to itself."""
    code = """
for unit in ("a", "1", ".", "é", "世", "_"):
    text = unit * 120_000
    assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text, unit
print("done")
"""
    assert run(name, code) == "done\n"


def test_a_small_stack_is_enough_for_every_text(run: Callable[[str, str], str]) -> None:
    """A caller's thread with 512 KiB of stack encodes runs of any length and kind, blanks beyond ASCII included."""
    code = r"""
def check(text):
    results.append(tokenizer.decode(tokenizer.encode(text, add_special=False)) == text)
def work():
    for length in (1, 100, 255, 256, 257, 1_000, 100_000):
        for unit in ("a", "é", "."):
            check(unit * length)
    for text in (" \u3000 " * 3_000, "\n\u3000" * 3_000, "/\n" * 3_000, "a " * 3_000, "\n a" * 3_000):
        check(text)
results = []
threading.stack_size(512 * 1024)
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(len(results), all(results))
"""
    assert run("deepseek-llm", code) == "26 True\n"


def test_no_room_for_the_stack_is_an_error(run: Callable[[str, str], str]) -> None:
    """If the address space has no room for the stack, the caller gets an error, and short texts still work."""
    code = """
import resource
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, resource.RLIM_INFINITY))
try:
    tokenizer.encode("a" * 500_000)
except NotEnoughMemory as error:
    print(error)
print(tokenizer.decode(tokenizer.encode("still here", add_special=False)))
"""
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs a system with /proc and limits on address space")
    first, second = run("deepseek-llm", code).splitlines()
    size = re.fullmatch(r"no address space for a stack of (\d+) bytes.*", first)
    assert size and int(size[1]) > 2**28, first
    assert second == "still here"


def _load(path: Path) -> Tokenizer:
    return Tokenizer(_native.Model.load([str(path)], vocab_only=True))


def test_a_model_without_vocabulary_raises(tmp_path: Path) -> None:
    """Without texts of tokens, each function that needs them raises an error of its own."""
    tokenizer = _load(write_vocabulary(tmp_path / "none.gguf", "none", [], [], add_vocab_size=10))
    assert (tokenizer.vocab_type, tokenizer.special_tokens, tokenizer.eog_ids) == ("none", {}, frozenset())
    with pytest.raises(
        Unsupported, match=r"^this model has no vocabulary and cannot encode text; pass token ids instead$"
    ):
        tokenizer.encode("abc")
    assert tokenizer.n_vocab == 10
    for ask in (tokenizer.token_text, tokenizer.attributes, tokenizer.token_bytes, tokenizer.is_control):
        with pytest.raises(Unsupported, match="no vocabulary"):
            ask(0)
    assert not tokenizer.is_eog(0)


def test_a_pre_tokenizer_of_another_kind_is_refused(tmp_path: Path) -> None:
    """A combination that would abort on two spaces is an error before anything is encoded."""
    tokens = ["a", "b", "ab", "<e>"]
    path = write_vocabulary(
        tmp_path / "odd.gguf", "gpt2", tokens, [1, 1, 1, 3],
        add_token_merges=["a b"], add_tokenizer_pre="whitespace", add_eos_token_id=3, add_bos_token_id=3,
    )  # fmt: skip
    tokenizer = _load(path)
    with pytest.raises(Unsupported, match=r"^the pre-tokenizer 'whitespace' works only with"):
        tokenizer.encode("a  b")
    assert tokenizer.decode([0, 1, 2]) == "abab"


def test_missing_special_tokens_are_an_error_only_where_they_are_wanted(tmp_path: Path) -> None:
    """A vocabulary that is told to add tokens it lacks still encodes without them."""
    path = write_vocabulary(
        tmp_path / "odd.gguf", "gemma4", ["a", "b", "ab", "\n"], [1] * 4,
        add_token_merges=["a b"], add_add_bos_token=True,
    )  # fmt: skip
    tokenizer = _load(path)
    assert tokenizer.bos is None and tokenizer.add_bos
    with pytest.raises(Unsupported, match="add_special=False"):
        tokenizer.encode("ab")
    assert tokenizer.encode("ab", add_special=False) == [2]


def test_text_without_tokens_is_an_error(tmp_path: Path) -> None:
    """A vocabulary without a token for a byte reports it and encodes the rest."""
    tokens = ["<unk>", "<s>", "</s>", "\u2581", "a", "\u2581a"]
    tokenizer = _load(write_vocabulary(tmp_path / "odd.gguf", "llama", tokens, [2, 3, 3, 1, 1, 1]))
    with pytest.raises(Unsupported, match=r"^the vocabulary cannot encode this text"):
        tokenizer.encode("ab")
    assert tokenizer.encode("aa") == [1, 5, 4]


def test_an_rwkv_vocabulary_that_would_never_end_is_refused(tmp_path: Path) -> None:
    """A token that begins with a byte that is no token itself is found before anything is encoded."""
    good = _load(write_vocabulary(tmp_path / "good.gguf", "rwkv", ["<0>", "a", "ab", "<"], [3, 1, 1, 1]))
    assert good.encode("aba") == [2, 1]
    bad = _load(write_vocabulary(tmp_path / "bad.gguf", "rwkv", ["<0>", "a", "ab", "<", "cd"], [3, 1, 1, 1, 1]))
    with pytest.raises(Unsupported, match="begin with a byte that is no token itself"):
        bad.encode("ce")
    assert bad.decode([4, 1]) == "cda"
