"""The tokenizer over real vocabularies of the llama.cpp source tree."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline import _native
from paceline.errors import InvalidParams, InvalidType, NotEnoughMemory, TextTooLong
from paceline.runtime.tokenizer import TokenAttribute, Tokenizer

# The vocabularies with vectors of texts and ids; a test below asserts that these are all there are.
VECTORS = [
    "bert-bge", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-bpe", "llama-spm",
    "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder",
]  # fmt: skip
ONE_OF_A_KIND = ["llama-bpe", "llama-spm", "bert-bge", "nomic-bert-moe", "deepseek-llm", "gemma-4"]

Load = Callable[[str], Tokenizer]


@cache
def _load(path: Path) -> Tokenizer:
    return Tokenizer(_native.Model.load([str(path)], vocab_only=True))


@pytest.fixture
def load(llama_cpp_source: Path) -> Load:
    """Return the tokenizer of a vocabulary by its short name; loaded once."""
    return lambda name: _load(llama_cpp_source / "models" / f"ggml-vocab-{name}.gguf")


def _vectors(source: Path, name: str) -> list[tuple[str, list[int]]]:
    stem = source / "models" / f"ggml-vocab-{name}.gguf"
    texts = stem.with_suffix(".gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = stem.with_suffix(".gguf.out").read_text().splitlines()
    if texts[-1] == "" and len(texts) == len(lines) + 1:
        texts.pop()
    assert len(texts) == len(lines) > 40
    return [(text, [int(token) for token in line.split()]) for text, line in zip(texts, lines, strict=True)]


@pytest.mark.parametrize("name", VECTORS)
def test_encode_agrees_with_the_vectors_of_llama_cpp(load: Load, llama_cpp_source: Path, name: str) -> None:
    """Every text of the vectors becomes exactly the ids that stand beside it."""
    tokenizer = load(name)
    for text, ids in _vectors(llama_cpp_source, name):
        assert tokenizer.encode(text, add_special=False) == ids, text


def test_no_vectors_are_left_out(llama_cpp_source: Path) -> None:
    """The list of vocabularies above is complete."""
    found = {path.name for path in (llama_cpp_source / "models").glob("ggml-vocab-*.gguf.out")}
    assert found == {f"ggml-vocab-{name}.gguf.out" for name in VECTORS}


@pytest.mark.parametrize("name", ["llama-bpe", "gpt-2", "qwen2", "llama-spm", "bert-bge"])
def test_a_text_with_many_special_tokens_encodes_as_its_parts_do(load: Load, llama_cpp_source: Path, name: str) -> None:
    """A text that is encoded in pieces because of its special tokens gives the tokens of the texts between them."""
    tokenizer = load(name)
    end = tokenizer.special_tokens["sep" if name == "bert-bge" else "eos"]
    vectors = [pair for pair in _vectors(llama_cpp_source, name) if pair[0]] * 40
    text = tokenizer.token_text(end).join(text for text, _ in vectors)
    expected = list(chain.from_iterable([*ids, end] for _, ids in vectors))[:-1]
    assert len(vectors) > 1024
    assert tokenizer.encode(text, add_special=False, parse_special=True) == expected
    around = tokenizer.encode("", add_special=True)
    assert tokenizer.encode(text, parse_special=True) == around[:1] + expected + around[1:]


def test_many_tokens_that_are_cut_out_first_overlap_as_in_one_piece(load: Load) -> None:
    """A megabyte of blanks, if runs of 2 to 24 blanks are tokens of their own, takes the longest first."""
    tokenizer = load("gpt-neox")
    blanks = [token for token, piece in enumerate(tokenizer.pieces(True)) if piece and not piece.strip(b" ")]
    first = [token for token in blanks if tokenizer.attributes(token) & TokenAttribute.USER_DEFINED]
    longest = max(len(tokenizer.token_bytes(token)) for token in first)
    [token] = tokenizer.encode(" " * longest)
    count, rest = divmod(1_000_000, longest)
    assert tokenizer.encode(" " * 1_000_000) == [token] * count + tokenizer.encode(" " * rest)


BOUNDED = [name for name in [*VECTORS, "aquila", "baichuan", "gpt-neox"] if name != "bert-bge"]
BLANKS = st.text(" \n\t\v\u2581\u3000", min_size=1, max_size=200)


@cache
def _odd_texts(tokenizer: Tokenizer) -> st.SearchStrategy[str]:
    """Return texts of a vocabulary's longest tokens and control tokens, of blanks, and of any characters."""
    tokens = range(tokenizer.n_vocab)
    pieces = tokenizer.pieces(True)
    longest = [
        pieces[token].decode("utf-8", "ignore") for token in sorted(tokens, key=lambda token: -len(pieces[token]))[:64]
    ]
    control = [tokenizer.token_text(token) for token in tokens if tokenizer.is_control(token)][:32]
    part = st.one_of(
        st.sampled_from(longest + control), BLANKS, st.text(max_size=50), st.characters().map(lambda char: 50 * char)
    )
    parts = st.lists(st.tuples(part, st.integers(1, 40)), max_size=5)
    return parts.map(lambda chosen: "".join(text * number for text, number in chosen))


@pytest.mark.parametrize("name", BOUNDED)
@given(data=st.data(), parse_special=st.booleans())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_text_has_at_least_the_tokens_that_its_bytes_promise(
    load: Load, name: str, data: st.DataObject, parse_special: bool
) -> None:
    """No text is encoded to fewer tokens than `min_tokens`."""
    tokenizer = load(name)
    text = data.draw(_odd_texts(tokenizer))
    assert tokenizer.min_tokens(text) <= len(tokenizer.encode(text, add_special=False, parse_special=parse_special))


@pytest.mark.parametrize("name", BOUNDED)
def test_a_long_text_has_more_tokens_than_a_context_before_it_is_encoded(load: Load, name: str) -> None:
    """A megabyte without blanks promises at least a thousand tokens, whatever its vocabulary: none has more bytes than 1,024."""
    tokenizer = load(name)
    assert tokenizer.min_tokens("a" * (1 << 20)) >= 1024
    assert tokenizer.min_tokens("") == 0


def test_a_text_that_would_take_more_memory_than_is_free_is_refused(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says how much is needed; texts that need less, and all of up to a mebibyte, are encoded."""
    tokenizer = load("gpt-2")
    monkeypatch.setattr("paceline.runtime.tokenizer.available_memory", lambda: 400 << 20)
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_prompt(text, [])):
        with pytest.raises(NotEnoughMemory, match=r"of 3145728 bytes may take 432 MiB of memory, and 400 MiB are free"):
            encode("word " * (3 * 2**20 // 5) + "abc")
        assert len(encode("word " * 400_000)) > 400_000
    monkeypatch.setattr("paceline.runtime.tokenizer.available_memory", lambda: 0)
    assert len(tokenizer.encode("word " * 200_000)) > 200_000


def test_what_encoding_drops_promises_no_tokens(load: Load) -> None:
    """Characters without a token, blanks next to a token that strips them, and all text of WordPiece count for nothing."""
    assert load("falcon").encode("\x03" * 100_000, add_special=False) == []
    assert load("falcon").min_tokens("\x03" * 100_000) == 0
    stripped = "<|end|>" + " " * 100_000
    assert len(load("phi-3").encode(stripped, add_special=False, parse_special=True)) == 1
    assert load("phi-3").min_tokens(stripped) == 1
    assert load("phi-3").min_tokens(" " * 100_000) > 2000
    assert load("bert-bge").min_tokens("a" * 100_000) == load("nomic-bert-moe").min_tokens("a" * 100_000) == 0


@pytest.mark.parametrize("name", ONE_OF_A_KIND)
def test_add_special_puts_the_special_tokens_around(load: Load, name: str) -> None:
    """The tokens around a text with special tokens equal those of an empty text."""
    tokenizer = load(name)
    around, alone = tokenizer.encode(""), tokenizer.encode("Hello", add_special=False)
    assert around and around[0] == tokenizer.bos
    assert tokenizer.encode("Hello") == around[:1] + alone + around[1:]
    assert tokenizer.encode("", add_special=False) == []


def test_special_tokens_are_text_unless_asked_for(load: Load) -> None:
    """Text from outside that names a control token stays text by default."""
    tokenizer = load("qwen2")
    token = tokenizer.token_id("<|im_end|>")
    assert tokenizer.encode("<|im_end|>", parse_special=True) == [token]
    plain = tokenizer.encode("<|im_end|>")
    assert token not in plain and tokenizer.decode(plain) == "<|im_end|>"


def test_nul_bytes_are_part_of_the_text(load: Load) -> None:
    """A text is encoded by its length, not up to its first NUL."""
    tokenizer = load("gpt-2")
    ids = tokenizer.encode("a\0b\0", add_special=False)
    assert tokenizer.decode(ids) == "a\0b\0"


@pytest.mark.parametrize("name", ["llama-bpe", "gpt-2", "qwen2", "gemma-4"])
def test_decoding_returns_the_encoded_text(load: Load, llama_cpp_source: Path, name: str) -> None:
    """Vocabularies that lose nothing give every text of the vectors back."""
    tokenizer = load(name)
    for text, ids in _vectors(llama_cpp_source, name):
        assert tokenizer.decode(ids) == text


def test_a_sentencepiece_vocabulary_shows_the_space_it_puts_in_front(load: Load) -> None:
    """Nothing is stripped, so that the bytes of tokens join."""
    tokenizer = load("llama-spm")
    assert tokenizer.decode(tokenizer.encode("Hello world")) == " Hello world"


@pytest.mark.parametrize("name", ONE_OF_A_KIND)
def test_bytes_of_tokens_join(load: Load, name: str) -> None:
    """The bytes of a sequence are the bytes of its parts, wherever it is cut."""
    tokenizer = load(name)
    ids = tokenizer.encode("Żółć, 世界 and 🚀🙂!", add_special=False)
    whole = tokenizer.decode_bytes(ids)
    for cut in range(len(ids) + 1):
        assert tokenizer.decode_bytes(ids[:cut]) + tokenizer.decode_bytes(ids[cut:]) == whole


def test_decode_replaces_invalid_utf8(load: Load) -> None:
    """A sequence cut inside a character ends with one replacement character."""
    tokenizer = load("gpt-2")
    ids = tokenizer.encode("x🚀", add_special=False)
    assert len(ids) > 2
    for cut in range(2, len(ids)):
        assert tokenizer.decode(ids[:cut]) == "x\ufffd"


@pytest.mark.parametrize("name", ONE_OF_A_KIND)
def test_piece_tables_agree_with_single_tokens(load: Load, name: str) -> None:
    """The table has one entry a token; the table without special tokens differs only in control and unknown tokens.

    For all others both have the same object, which a large vocabulary would have twice otherwise.
    """
    tokenizer = load(name)
    shown, hidden = tokenizer.pieces(True), tokenizer.pieces(False)
    assert len(shown) == len(hidden) == tokenizer.n_vocab
    assert tokenizer.pieces(True) is shown
    for token, (with_text, without) in enumerate(zip(shown, hidden, strict=True)):
        assert without in (with_text, b"")
        if with_text is not without:
            assert with_text != without
            assert tokenizer.attributes(token) & (TokenAttribute.CONTROL | TokenAttribute.UNKNOWN)
    assert tokenizer.token_bytes(5) == shown[5] and tokenizer.token_bytes(5, special=False) == hidden[5]


def test_special_tokens_are_shown_only_when_asked_for(load: Load) -> None:
    """Control tokens have no bytes in a decoded text by default."""
    tokenizer = load("qwen2")
    ids = tokenizer.encode("<|im_start|>Hi<|im_end|>", parse_special=True)
    assert tokenizer.decode(ids) == "Hi"
    assert tokenizer.decode(ids, special=True) == "<|im_start|>Hi<|im_end|>"
    assert tokenizer.is_control(ids[0]) and not tokenizer.is_control(ids[1])


def test_special_tokens_by_name(load: Load) -> None:
    """Only the roles that a vocabulary fills are there, with the ids that its texts have."""
    tokenizer = load("refact")
    special = tokenizer.special_tokens
    assert tokenizer.token_text(special["fim_pre"]) == "<fim_prefix>"
    assert tokenizer.fim.prefix == special["fim_pre"]
    assert "fim_sep" not in special and (tokenizer.bos, tokenizer.eos) == (special["bos"], special["eos"])
    with pytest.raises(TypeError):
        special["bos"] = 1  # type: ignore[index]


def test_generation_ends_with_every_end_token(load: Load) -> None:
    """End of text and end of turn are both in the set, and nothing else is."""
    tokenizer = load("llama-bpe")
    assert {tokenizer.eos, tokenizer.eot} <= tokenizer.eog_ids
    assert all(tokenizer.is_eog(token) for token in tokenizer.eog_ids)
    assert not tokenizer.is_eog(tokenizer.encode("a", add_special=False)[0])


def test_flags_and_kind_come_from_the_vocabulary(load: Load) -> None:
    """The file's facts about special tokens and its kind are returned unchanged."""
    assert [load(name).vocab_type for name in ONE_OF_A_KIND] == ["bpe", "spm", "wpm", "ugm", "bpe", "bpe"]
    assert load("llama-spm").add_bos and not load("llama-spm").add_eos and not load("gpt-2").add_bos
    assert load("nomic-bert-moe").add_eos
    assert load("gpt-2").suppressed_ids == frozenset()


def test_token_text_and_token_id_are_inverse(load: Load) -> None:
    """A token is found by the spelling it has in the vocabulary, and by no other."""
    tokenizer = load("llama-spm")
    assert tokenizer.token_text(13) == "<0x0A>" and tokenizer.token_bytes(13) == b"\n"
    assert tokenizer.token_id("<0x0A>") == 13 and tokenizer.token_id("no such token") is None


@pytest.mark.parametrize("bad", [-1, 50257, 2**31, 2**70])
def test_ids_out_of_range_are_named(load: Load, bad: int) -> None:
    """An id that the vocabulary does not have is refused with its place, and the tokenizer still works."""
    tokenizer = load("gpt-2")
    with pytest.raises(InvalidParams, match=rf"^ids\[1\] must be an integer >= 0 and <= 50256, not {bad}"):
        tokenizer.decode([3, bad])
    one: list[Callable[[Any], Any]] = [
        tokenizer.token_bytes, tokenizer.token_text, tokenizer.attributes, tokenizer.is_control, tokenizer.is_eog,
    ]  # fmt: skip
    for ask in one:
        with pytest.raises(InvalidParams, match=rf"^token must be an integer >= 0 and <= 50256, not {bad}"):
            ask(bad)
    assert tokenizer.decode(np.array(tokenizer.encode("still here"))) == "still here"


def test_wrong_types_are_named(load: Load) -> None:
    """Bytes, numbers and flags that are merely truthy are refused by name, and the tokenizer still works."""
    tokenizer = load("gpt-2")
    wrong: list[tuple[str, Callable[[], Any]]] = [
        ("text must be a str", lambda: tokenizer.encode(b"abc")),  # type: ignore[arg-type]
        ("add_special must be", lambda: tokenizer.encode("abc", add_special=1)),  # type: ignore[arg-type]
        ("parse_special must be", lambda: tokenizer.encode("abc", parse_special="no")),  # type: ignore[arg-type]
        ("ids must be a sequence", lambda: tokenizer.decode("12")),  # type: ignore[arg-type]
        (r"ids\[0\] must be an integer", lambda: tokenizer.decode([True])),
        ("token must be an integer", lambda: tokenizer.token_bytes(1.5)),  # type: ignore[arg-type]
        ("special must be", lambda: tokenizer.pieces(None)),  # type: ignore[arg-type]
    ]
    for message, call in wrong:
        with pytest.raises(InvalidType, match=f"^{message}"):
            call()
    assert tokenizer.decode(tokenizer.encode("still here")) == "still here"


def test_a_lone_surrogate_is_refused_where_it_stands(load: Load) -> None:
    """Text that UTF-8 cannot carry is an error with the place, and the tokenizer still works."""
    tokenizer = load("gpt-2")
    with pytest.raises(InvalidParams, match=r"^text has a lone surrogate \(U\+DC80\) at position 3"):
        tokenizer.encode("abc\udc80")
    assert tokenizer.encode("abc") == [39305]


@pytest.mark.parametrize(
    ("name", "text"),
    [("deepseek-llm", " " * 100_000 + "1"), ("llama-spm", "\n" * 1_000_000), ("phi-3", "🚀" * 400_000)],
)
def test_input_that_would_take_minutes_is_refused(load: Load, name: str, text: str) -> None:
    """Text on which a vocabulary takes time with the square of its length is an error, and a part of it works."""
    tokenizer = load(name)
    with pytest.raises(TextTooLong, match="would take minutes"):
        tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text[-100:])).endswith(text[-100:])


def test_text_beyond_all_memory_is_refused_before_work(load: Load) -> None:
    """A text that could take more memory than is granted names its length and the limit, and a part of it works."""
    tokenizer = load("gpt-2")
    size = _native.Vocab.max_encode_bytes // 256 + 1
    with pytest.raises(TextTooLong, match=f"^text has {size} bytes, and at most {size - 1} can be encoded at once"):
        tokenizer.encode("a" * size)
    with pytest.raises(TextTooLong, match=r"^text has \d+ characters without a line break or a wider gap, and at most"):
        tokenizer.encode("a" * (_native.Vocab.max_encode_bytes // 1024 + 1))
    assert tokenizer.encode("abc") == [39305]


def test_another_thread_runs_while_text_is_encoded(load: Load) -> None:
    """Encoding lets go of the GIL: a thread that is never preempted still lets this one run before it is done."""
    tokenizer, text = load("llama-bpe"), "Once upon a time\n" * 400_000
    finished: list[bool] = []

    def work() -> None:
        tokenizer.encode(text)
        finished.append(True)

    thread = threading.Thread(target=work)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1_000)
    try:
        thread.start()  # comes back when the new thread gives the GIL away: while it encodes, or when it has ended
        assert not finished
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert finished


def test_threads_share_one_tokenizer(load: Load) -> None:
    """Many threads that encode and decode at once get the results of a single thread."""
    tokenizer, text = load("deepseek-llm"), "The quick brown fox, 世界! " + "a" * 2_000
    alone = tokenizer.encode(text)
    results: list[tuple[list[int], str]] = []

    def work() -> None:
        for _ in range(20):
            ids = tokenizer.encode(text)
            results.append((ids, tokenizer.decode(ids)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [(alone, text)] * 80


def test_a_tokenizer_keeps_its_model_alive(llama_cpp_source: Path) -> None:
    """The tokenizer works after the last other reference to its model is gone."""
    model = _native.Model.load([str(llama_cpp_source / "models" / "ggml-vocab-gpt-2.gguf")], vocab_only=True)
    tokenizer = Tokenizer(model)
    del model
    gc.collect()
    assert tokenizer.decode(tokenizer.encode("still here")) == "still here"
