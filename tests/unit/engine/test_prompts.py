"""Prompts: a single prompt, a list of prompts, and cutting of too long prompts."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.pictures import picture

from paceline.cli.options import way_to_longer_texts
from paceline.engine.prompts import chat_too_long, embeddable, fitted, is_batch, prompt_ids, refuse_media, truncated
from paceline.engine.worker import messages
from paceline.errors import InvalidParams, InvalidType, PromptTooLong
from paceline.media import Image
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.runtime.tokenizer import FimTokens
from paceline.scheduling.records import Failed
from paceline.testing import FakeEngineClient
from paceline.testing.fake_backend import FakeTokenizer


class Bytes:
    """A tokenizer of bytes with a token in front."""

    n_vocab = 300

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return [*([257] if add_special else []), *text.encode()]


def ids_of(prompt: object, **options: bool) -> list[int]:
    return prompt_ids(prompt, Bytes(), RequestOptions(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("text", False),
        ([1, 2, 3], False),
        ((1, 2), False),
        (np.array([1, 2]), False),
        ([np.int32(1), np.int64(2)], False),
        ([], True),
        (["a"], True),
        (("a", "b"), True),
        ([[1], [2]], True),
        ([np.array([1])], True),
        (["a", [1]], True),
        (None, False),
        (b"bytes", False),
    ],
)
def test_what_is_a_list_of_prompts(prompts: object, expected: bool) -> None:
    """Texts or lists of ids in a list are many prompts; a text or ids, of NumPy as well, are one."""
    assert is_batch(prompts) is expected


def test_text_and_ids_become_ids() -> None:
    """Text is tokenised as the options say, ids are checked and copied."""
    assert ids_of("ab") == [257, 97, 98]
    assert ids_of("ab", add_special=False) == [97, 98]
    given_ids = [1, 2, 299]
    assert ids_of(given_ids) == given_ids
    assert ids_of(given_ids) is not given_ids
    assert ids_of(np.array([5, 6])) == [5, 6]


@pytest.mark.parametrize("prompt", [[], (), np.array([], dtype=np.int32)])
def test_an_empty_prompt_is_refused(prompt: object) -> None:
    """There is nothing to go on from, and a hint says so."""
    with pytest.raises(InvalidParams, match="no tokens"):
        ids_of(prompt)
    with pytest.raises(InvalidParams, match="no tokens"):
        ids_of("", add_special=False)


@pytest.mark.parametrize("prompt", [[-1], [300], [10_000_000], [1, True], [1.5], ["a"], b"ab", None, 7, {"a": 1}])
def test_invalid_prompt_is_refused(prompt: object) -> None:
    """Ids beyond the vocabulary, other types and text that is none raise before anything begins."""
    with pytest.raises(InvalidParams):
        ids_of(prompt)
    if isinstance(prompt, bytes):
        with pytest.raises(InvalidType, match="decode it"):
            ids_of(prompt)


def fit(num_tokens: int, max_positions: int, *, max_tokens: int | None = 256, truncate: str | None = None) -> list[int]:
    options = RequestOptions(truncate=truncate)  # type: ignore[arg-type]
    limits = replace(FakeEngineClient().limits, max_positions=max_positions)
    return fitted(list(range(num_tokens)), SamplingParams(max_tokens=max_tokens), options, limits, 0)


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers() -> None:
    """Nothing is cut silently; a prompt of exactly all positions is accepted."""
    assert fit(100, 100) == list(range(100))
    with pytest.raises(
        PromptTooLong, match=r"101 tokens\) exceeds the available context size \(100 tokens\).*truncate"
    ):
        fit(101, 100)


@pytest.mark.parametrize(
    ("num_tokens", "n_ctx_train", "advice"),
    [
        (101, 2048, "load the model with a larger n_ctx (at most 2048)"),
        (2048, 2048, "load the model with a larger n_ctx (at most 2048)"),
        (2049, 2048, "take a model that was trained for longer texts (this model takes at most 2048 tokens)"),
        (101, 100, "take a model that was trained for longer texts (this model takes at most 100 tokens)"),
        (101, 0, "take a model that was trained for longer texts (this model takes at most 100 tokens)"),
    ],
)
def test_the_advice_about_a_long_prompt_works(num_tokens: int, n_ctx_train: int, advice: str) -> None:
    """A larger context is named only if the model was trained for as many tokens as the prompt has."""
    limits = replace(FakeEngineClient().limits, max_positions=100, n_ctx_train=n_ctx_train)
    with pytest.raises(PromptTooLong) as caught:
        fitted([1] * num_tokens, SamplingParams(), RequestOptions(), limits, 0)
    assert str(caught.value).endswith(f", or {advice}")
    of_command = advice.replace("load the model with a larger n_ctx", "raise --ctx-size")
    assert way_to_longer_texts(limits, num_tokens) == of_command
    in_chat = chat_too_long(caught.value, limits, "leave some out, ")
    numbers = f"the prompt ({num_tokens} tokens) exceeds the available context size (100 tokens)"
    assert str(in_chat) == f"{numbers}; leave some out, shorten the messages, or {advice}"
    assert (in_chat.num_tokens, in_chat.max_tokens) == (num_tokens, 100)


@pytest.mark.parametrize(("max_tokens", "room"), [(10, 90), (0, 100), (256, 50), (None, 50), (50, 50), (51, 50)])
def test_truncation_leaves_room_for_the_completion(max_tokens: int | None, room: int) -> None:
    """For max_tokens, or half of the positions if that is more or unknown."""
    assert len(fit(1000, 100, max_tokens=max_tokens, truncate="left")) == room


@pytest.mark.parametrize("num_tokens", [1, 90, 91, 100])
def test_a_prompt_that_fits_is_not_cut(num_tokens: int) -> None:
    """It stays whole even if it leaves less room than max_tokens."""
    assert fit(num_tokens, 100, max_tokens=10, truncate="left") == list(range(num_tokens))


def test_each_side_is_cut_as_its_name_says() -> None:
    """Left keeps the end and a bos token, right the beginning, middle both ends."""
    ids = list(range(10))
    assert truncated(ids, 4, "left", keep=1) == [0, 7, 8, 9]
    assert truncated(ids, 4, "left") == [6, 7, 8, 9]
    assert truncated(ids, 4, "right") == [0, 1, 2, 3]
    assert truncated(ids, 4, "middle") == [0, 1, 8, 9]
    assert truncated(ids, 5, "middle") == [0, 1, 7, 8, 9]


@given(st.integers(1, 50), st.integers(1, 60), st.sampled_from(["left", "right", "middle"]), st.integers(0, 1))
def test_what_is_left_is_in_order_and_fits(num_tokens: int, room: int, side: str, keep: int) -> None:
    """Never more than the room, all of it used, the order kept, nothing doubled."""
    ids = list(range(num_tokens))
    cut = truncated(ids, room, side, keep=keep)  # type: ignore[arg-type]
    assert len(cut) == min(room, num_tokens)
    assert cut == sorted(set(cut))
    assert keep == 0 or room == 1 or cut[0] == 0 or side == "right"


@pytest.mark.parametrize("max_positions", [1, 2, 3])
def test_the_smallest_contexts_work(max_positions: int) -> None:
    """At least one token of the prompt stays."""
    for side in ("left", "right", "middle"):
        assert 1 <= len(fit(5, max_positions, truncate=side)) <= max_positions


@pytest.mark.parametrize("ids", [(258,), (0, 2**31 - 1)])
def test_preserved_tokens_outside_of_the_vocabulary_are_refused(ids: tuple[int, ...]) -> None:
    """When the request is prepared, with the name of the option."""
    with closing(FakeEngineClient()) as client:
        with pytest.raises(InvalidParams, match=r"preserved_tokens\[\d\] must be .* the vocabulary has 258 tokens"):
            client.prepare("a", SamplingParams(), RequestOptions(preserved_tokens=ids))
        assert client.prepare("a", SamplingParams(), RequestOptions(preserved_tokens=(257,))).options.preserved_tokens


class Eighths(FakeTokenizer):
    """The fake tokenizer, which promises a token for each eight bytes; it notes the texts it encodes."""

    add_bos = add_eos = False
    fim = FimTokens(prefix=1, suffix=2, middle=3)

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        self.encoded.append(text)
        return super().encode(text, add_special=add_special, parse_special=parse_special)


def prepare(prompt: Any, tokenizer: Eighths, **options: Any) -> Any:
    """Prepare a request for an engine of 100 positions."""
    with closing(FakeEngineClient()) as engine:
        limits = replace(engine.limits, max_positions=100, n_ctx_train=4096)
        requests = replace(engine._text_requests, tokenizer=tokenizer, limits=limits)
        return requests.prepare(prompt, SamplingParams(max_tokens=1), RequestOptions(**options))


def embed(texts: list[Any], tokenizer: Eighths, **options: Any) -> list[Any]:
    return embeddable(texts, tokenizer, RequestOptions(**options), 100, refuse_media)


def test_a_text_of_too_many_bytes_is_refused_before_it_is_encoded() -> None:
    """A text may have as many bytes as the context's tokens, and the error says that the number is a bound."""
    tokenizer = Eighths()
    with pytest.raises(PromptTooLong) as caught:
        prepare("x" * 808, tokenizer)
    assert str(caught.value) == (
        "the prompt (at least 101 tokens) exceeds the available context size (100 tokens); shorten it, set truncate to "
        '"left", "right" or "middle", or load the model with a larger n_ctx (at most 4096)'
    )
    assert (caught.value.num_tokens, caught.value.max_tokens, caught.value.is_counted) == (101, 100, False)
    for prompt, options in (
        ("x", {"suffix": "y" * 808}),
        ("x" * 408, {"suffix": "y" * 408}),
        (["x" * 808, Image(picture(1))], {}),
    ):
        with pytest.raises(PromptTooLong, match=r"at least 10\d tokens"):
            prepare(prompt, tokenizer, **options)
    with pytest.raises(
        PromptTooLong, match=r"^text 1 is too large: it has at least 101 tokens.*context size \(100 tokens\)"
    ):
        embed(["x", "x" * 808], tokenizer)
    assert tokenizer.encoded == ["x"]


def test_a_text_whose_bytes_might_fit_is_encoded() -> None:
    """Its tokens are counted, and the error has their number."""
    tokenizer = Eighths()
    for refused in (lambda: prepare("x" * 807, tokenizer), lambda: embed(["x" * 807], tokenizer)):
        with pytest.raises(PromptTooLong, match=r"\b807 tokens") as caught:
            refused()
        assert caught.value.is_counted
    assert prepare("x" * 100, tokenizer).prompt == [ord("x")] * 100


@given(size=st.integers(0, 2000), side=st.sampled_from(["left", "right", "middle"]))
def test_a_text_that_is_cut_is_never_refused(size: int, side: str) -> None:
    """Prompts and texts to be embedded lose tokens in place."""
    text = "x" * (size + 1)
    assert len(prepare(text, Eighths(), truncate=side).prompt) <= 100
    assert len(embed([text], Eighths(), truncate=side)[0]) <= 100


def test_the_error_of_a_bound_stays_one_on_its_way() -> None:
    """Between processes, and as a chat's."""
    error = PromptTooLong("the prompt (at least 9 tokens) is too long; shorten it", 9, 8, is_counted=False)
    arrived = messages.decode_up(messages.encode(messages.Happened([Failed(1, error)])))
    assert isinstance(arrived, messages.Happened)
    [failed] = arrived.events
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, PromptTooLong)
    assert (str(failed.error), failed.error.num_tokens, failed.error.is_counted) == (str(error), 9, False)
    assert chat_too_long(error, FakeEngineClient().limits).is_counted is False
