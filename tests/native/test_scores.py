"""`score` and `decide`: the likelihood of choices after a prompt, from a prefix that is computed once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.exact import EXACT
from tests.native.conftest import TinyModels
from tests.polling import async_wait_until

from paceline import LLM, AsyncLLM, ChoiceScore
from paceline.errors import (
    BatchError,
    DeadlineExceeded,
    EngineStopped,
    InvalidParams,
    InvalidType,
    PromptTooLong,
    QueueFull,
    Unsupported,
)
from paceline.observability.metrics import Instrument
from paceline.scheduling.records import TickRecord

pytestmark = pytest.mark.native

OPTIONS: dict[str, Any] = {**EXACT, "num_slots": 4, "n_ctx": 4096}
PROMPT = "Once upon a time there was a little girl. She liked to play with her"
CHOICES = [" dog.", " cat", " ball and her friends", " a"]
TOLERANCE = 1e-4  # what batches of other shapes change


class Load(Instrument):
    """Counts computed tokens."""

    def __init__(self) -> None:
        self.num_tokens = 0

    def tick_finished(self, record: TickRecord) -> None:
        self.num_tokens += sum(row.num_tokens for row in record.rows)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**OPTIONS) as loaded:
        yield loaded


def of_whole_prompt(llm: LLM, prompt: str, choice: str) -> float:
    """Score a choice by the log-probabilities of a prompt that has it at its end, without the cache."""
    whole = llm.generate(prompt + choice, max_tokens=0, prompt_logprobs=0, cache_prompt=False)
    num_own = len(whole.prompt_token_ids) - len(llm.tokenizer.encode(prompt))
    return math.fsum(token.own for token in (whole.prompt_logprobs or ())[-num_own:])


def test_scores_are_those_of_whole_prompts(llm: LLM) -> None:
    """The prefix from the cache changes nothing; scores are in order, and each is the sum of its tokens'."""
    scores = llm.score(PROMPT, CHOICES)
    assert [score.index for score in scores] == [0, 1, 2, 3]
    for score, choice in zip(scores, CHOICES, strict=True):
        assert score.logprob == pytest.approx(of_whole_prompt(llm, PROMPT, choice), abs=TOLERANCE)
        assert score.logprob == pytest.approx(sum(score.logprobs))
        assert llm.tokenizer.decode(score.token_ids) == choice
        assert score.num_bytes == len(choice)
        assert score.normalized("bytes") == pytest.approx(score.logprob / len(choice))
        assert score.normalized("tokens") == pytest.approx(score.logprob / len(score.token_ids))
    assert llm.score(llm.tokenizer.encode(PROMPT), [llm.tokenizer.encode(choice) for choice in CHOICES]) == scores


def test_the_shared_prefix_is_computed_once() -> None:
    """50 choices compute the prompt's tokens one time, and each its own and one before it."""
    load = Load()
    prompt, choices = PROMPT * 8, [f" {first}{second}" for first in "abcdefghij" for second in "klmno"]
    with LLM(**OPTIONS, instruments=(load,)) as llm:
        scores = llm.score(prompt, choices)
        num_shared = len(llm.tokenizer.encode(prompt))
        assert load.num_tokens == num_shared - 1 + sum(len(score.token_ids) for score in scores)
        again = llm.score(prompt, choices[:1])
        assert load.num_tokens == num_shared - 1 + sum(len(score.token_ids) for score in [*scores, *again])
    assert len({score.token_ids for score in scores}) == 50


def test_bytes_of_token_ids_are_those_of_the_tokens(llm: LLM) -> None:
    """A choice may begin or end in the middle of a character."""
    (part, *_) = llm.tokenizer.encode("日", add_special=False)[-1:]
    scores = llm.score(llm.tokenizer.encode(PROMPT), [[part], [part, part]])
    size = len(llm.tokenizer.token_bytes(part))
    assert len(b"\xef\xbf\xbd") != size
    assert [score.num_bytes for score in scores] == [size, 2 * size]


def test_a_full_queue_and_a_closed_engine_are_errors() -> None:
    """The refused choices are in the error of the batch; a closed engine says so before the prompt is encoded."""
    with LLM(**{**OPTIONS, "num_slots": 1}, max_queue=0, when_full="refuse") as llm:
        with llm.stream("The sun", max_tokens=1000, ignore_eos=True), pytest.raises(BatchError) as caught:
            llm.score(PROMPT, CHOICES)
        assert [type(outcome) for outcome in caught.value.outcomes] == [QueueFull] * len(CHOICES)
    for call in (lambda: llm.score(PROMPT, CHOICES), lambda: llm.decide(PROMPT, CHOICES)):
        with pytest.raises(EngineStopped):
            call()


def test_only_the_likeliest_continuation_is_greedy(llm: LLM) -> None:
    """`is_greedy` tells the likeliest continuation from others."""
    ids = llm.tokenizer.encode(PROMPT)
    likeliest = llm.generate(ids, temperature=0, max_tokens=5, ignore_eos=True).token_ids
    other = [*likeliest[:4], likeliest[4] - 1]
    assert [score.is_greedy for score in llm.score(ids, [likeliest, other])] == [True, False]


def test_beside_streams_scores_stay_the_same(llm: LLM) -> None:
    """Requests that generate meanwhile change no score, and scores change no text."""
    expected = [score.logprob for score in llm.score(PROMPT, CHOICES, cache_prompt=False)]
    alone = llm.generate("The sun", temperature=0, max_tokens=60, ignore_eos=True).text
    with llm.stream(["The sun"] * 2, temperature=0, max_tokens=60, ignore_eos=True) as streams:
        found = [score.logprob for score in llm.score(PROMPT, CHOICES)]
        texts = [completion.text for completion in streams.collect()]
    assert found == pytest.approx(expected, abs=TOLERANCE)
    assert texts == [alone] * 2


def test_a_choice_that_merges_with_the_end_of_the_prompt_is_scored_with_it(llm: LLM) -> None:
    """The blank at the end belongs to the first token of one choice, so it is scored with every choice."""
    (first, second) = llm.score(PROMPT + " ", ["dog", "\n"])
    shared = llm.tokenizer.encode(PROMPT)
    assert first.token_ids == tuple(llm.tokenizer.encode(PROMPT + " dog")[len(shared) :])
    assert second.token_ids == tuple(llm.tokenizer.encode(PROMPT + " \n")[len(shared) :])
    assert first.logprob == pytest.approx(llm.score(PROMPT, [" dog"])[0].logprob, abs=TOLERANCE)
    assert (first.num_bytes, second.num_bytes) == (3, 1)


def test_a_decision_is_the_softmax_of_scores(llm: LLM) -> None:
    """Also of scores by length, and of a single choice."""
    scores = llm.score(PROMPT, CHOICES)
    for by in ("none", "tokens", "bytes"):
        found = llm.decide(PROMPT, CHOICES, length_normalization=by)
        powers = [math.exp(score.normalized(by)) for score in scores]
        assert found.probs == pytest.approx([power / sum(powers) for power in powers], abs=TOLERANCE)
        assert found.label == CHOICES[found.probs.index(max(found.probs))]
        assert found.labels == tuple(CHOICES)
    assert llm.decide(PROMPT, [" x"]).probs == (1.0,)


def test_wrong_arguments_are_refused(llm: LLM) -> None:
    """Before anything is computed."""
    wrong: list[tuple[Any, Any, type[Exception], str]] = [
        (PROMPT, [" a", ""], InvalidParams, r"choices\[1\] is empty"),
        (PROMPT, [], InvalidParams, "at least one"),
        (PROMPT, " a", InvalidType, "must be a list"),
        (PROMPT, [" a", [1]], InvalidType, "all be texts"),
        ([1, 2], [3], InvalidType, "choices"),
        ("", [" a"], InvalidParams, "no token before"),
        (PROMPT, [" a", " a" * 5000], PromptTooLong, "exceeds the available context"),
    ]
    for prompt, choices, error, message in wrong:
        with pytest.raises(error, match=message):
            llm.score(prompt, choices)
    with pytest.raises(InvalidType, match="truncate"):
        llm.score(PROMPT, CHOICES, truncate="left")  # type: ignore[call-arg]
    with pytest.raises(InvalidParams, match="length_normalization"):
        llm.decide(PROMPT, CHOICES, length_normalization="token")  # type: ignore[arg-type]


def test_choices_that_run_out_of_time_are_errors(llm: LLM) -> None:
    """A part of a score is none."""
    with pytest.raises(BatchError) as caught:
        llm.score(PROMPT * 40, CHOICES, timeout_s=1e-6)
    assert all(isinstance(outcome, DeadlineExceeded) for outcome in caught.value.outcomes)


@pytest.mark.parametrize("kind", ["mamba", "gemma3", "falcon-h1"])
def test_every_class_of_memory_scores_alike(kind: str, tiny_models: TinyModels) -> None:
    """Memory that cannot be cut at any place gives the scores of whole prompts, too."""
    prompt = list(range(5, 205))
    choices = [[1, 2, 3], [7], list(range(60, 140))]
    with LLM(tiny_models(kind), **OPTIONS) as llm:
        found = llm.score(prompt, choices)
        for score, choice in zip(found, choices, strict=True):
            whole = llm.generate(prompt + choice, max_tokens=0, prompt_logprobs=0, cache_prompt=False)
            expected = [token.own for token in (whole.prompt_logprobs or ())[-len(choice) :]]
            assert score.logprobs == pytest.approx(expected, abs=5e-3)


def test_a_worker_process_scores_alike(llm: LLM) -> None:
    """The prefix is shared there, too."""
    expected = llm.score(PROMPT, CHOICES)
    with LLM(**OPTIONS, isolation="process") as other:
        found = other.score(PROMPT, CHOICES)
    for score, wanted in zip(found, expected, strict=True):
        assert score.token_ids == wanted.token_ids
        assert score.logprobs == pytest.approx(wanted.logprobs, abs=TOLERANCE)


def test_the_event_loop_gets_the_same_and_may_leave() -> None:
    """A cancelled task frees its slots, and the engine goes on."""

    async def main() -> tuple[list[ChoiceScore], str]:
        async with AsyncLLM(**OPTIONS) as llm:
            task = asyncio.create_task(llm.score(PROMPT * 30, [f" {number}" * 40 for number in range(200)]))
            await async_wait_until(lambda: llm.stats().resident > 0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await async_wait_until(lambda: llm.stats().resident == 0)
            return await llm.score(PROMPT, CHOICES), (await llm.decide(PROMPT, CHOICES)).label

    scores, label = asyncio.run(asyncio.wait_for(main(), 120))
    with LLM(**OPTIONS) as llm:
        assert [score.logprob for score in scores] == pytest.approx(
            [score.logprob for score in llm.score(PROMPT, CHOICES)], abs=TOLERANCE
        )
        assert label == llm.decide(PROMPT, CHOICES).label


def test_a_model_that_cannot_generate_has_no_scores(tiny_models: TinyModels, tmp_path: Path) -> None:
    """An embedding model says so."""
    with LLM(tiny_models("bert"), num_slots=1) as llm, pytest.raises(Unsupported, match="cannot generate"):
        llm.score("a", [" b"])
