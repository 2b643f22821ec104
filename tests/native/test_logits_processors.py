"""Logits processors of a user's own, on the demo model: their input, their effect, and their failures."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
from tests.unit.constraints.test_engine import PERSON

from paceline import LLM, Sampler, SamplingParams
from paceline.engine.worker.worker_engine import WorkerEngine
from paceline.errors import EngineError, InvalidParams, InvalidType, PacelineError, SamplingError, Unsupported
from paceline.streaming import FinishReason, StreamChunk

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "cache_prompt": False}
MIROSTAT: dict[str, Any] = {**GREEDY, "temperature": 1, "seed": 5, "mirostat": 2}
STORY = "Once upon a time"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(n_ctx=4096, num_slots=4, n_threads=1) as made:
        yield made


def same(token_ids: list[int], logits: Any) -> Any:
    """Change nothing."""
    return logits


def count_up(token_ids: list[int], logits: Any) -> Any:
    """Allow one token: 400 and, at each step, the next one."""
    only = np.full_like(logits, -np.inf)
    only[400 + len(token_ids)] = 1.0
    return only


def no_repeats(token_ids: list[int], logits: Any) -> Any:
    """Ban every token that has come, in place."""
    logits[token_ids] = -np.inf
    return logits


@pytest.mark.parametrize("options", [GREEDY, {**GREEDY, "temperature": 0.8, "seed": 3}, MIROSTAT])
def test_a_processor_that_changes_nothing_changes_nothing(llm: LLM, options: dict[str, Any]) -> None:
    """Tokens, text and log-probabilities equal those without a processor, and so do other requests'."""
    wanted: dict[str, Any] = {"max_tokens": 20, "logprobs": 3, **options}
    plain = llm.generate(STORY, **wanted)
    processed = llm.generate(STORY, logits_processors=[same, same], **wanted)
    assert processed.token_ids == plain.token_ids
    assert processed.text == plain.text
    for token, other in zip(processed.logprobs or (), plain.logprobs or (), strict=True):
        assert token.token_ids == other.token_ids
        assert token.own == pytest.approx(other.own, abs=1e-4)
    with llm.stream(STORY, logits_processors=[same], **wanted) as stream:
        assert llm.generate(STORY, **wanted).token_ids[:4] == plain.token_ids[:4]
        list(stream)


def test_what_comes_is_what_the_processor_leaves(llm: LLM) -> None:
    """It sees the tokens that its own choice has generated, and an array of its own."""
    seen: list[tuple[list[int], Any]] = []

    def note(token_ids: list[int], logits: Any) -> Any:
        seen.append((list(token_ids), (logits.shape, logits.dtype)))
        token_ids.clear()  # a copy
        return logits

    done = llm.generate(STORY, logits_processors=[note, count_up], max_tokens=5, seed=1)
    assert list(done.token_ids) == [400, 401, 402, 403, 404]
    assert [ids for ids, _ in seen] == [[400 + i for i in range(n)] for n in range(5)]
    assert {kind for _, kind in seen} == {((llm.tokenizer.n_vocab,), np.dtype(np.float32))}
    unlike = llm.generate(STORY, logits_processors=[no_repeats], max_tokens=60, **GREEDY)
    assert len(set(unlike.token_ids)) == 60


def test_each_choice_is_processed_by_itself(llm: LLM) -> None:
    """With n, beside requests without processors, and as a chat."""
    many = llm.generate(STORY, logits_processors=[no_repeats], n=3, seed=2, max_tokens=30, ignore_eos=True)
    assert [len(set(choice.token_ids)) for choice in many.choices] == [30] * 3
    assert len({choice.token_ids for choice in many.choices}) == 3
    talk = [{"role": "user", "content": "Hello!"}]
    reply = llm.chat(talk, logits_processors=[no_repeats], max_tokens=20, **GREEDY)
    assert len(set(reply.choices[0].token_ids)) == 20


def test_log_probabilities_are_of_the_model_or_of_what_was_drawn_from(llm: LLM) -> None:
    """By logprobs_mode, as without processors."""
    options: dict[str, Any] = {"logits_processors": [count_up], "max_tokens": 1, "logprobs": 1, "cache_prompt": False}
    (raw,) = llm.generate(STORY, **options).logprobs or ()
    (sampled,) = llm.generate(STORY, logprobs_mode="sampled", **options).logprobs or ()
    assert raw.own < -1
    assert raw.token_ids != (400,)
    assert sampled.own == pytest.approx(0)
    assert sampled.token_ids == (400,)


def test_constraints_and_bans_hold_beside_processors(llm: LLM) -> None:
    """A schema, a grammar, thinking with a budget, stops and min_tokens; a processor cannot allow forbidden tokens."""

    def loves_a(token_ids: list[int], logits: Any) -> Any:
        logits[llm.tokenizer.encode("a", add_special=False)] += 1000
        return logits

    found = llm.generate("A", json_schema=PERSON, logits_processors=[loves_a], max_tokens=300, seed=1)
    jsonschema.validate(json.loads(found.text), PERSON)
    assert found.choices[0].finish_reason is FinishReason.STOP
    assert "a" in json.loads(found.text)["name"]
    found = llm.generate("A", grammar='root ::= "x" [a-c]{3}', logits_processors=[loves_a], max_tokens=9, seed=1)
    assert found.text == "xaaa"
    thinking = {"start": "<t>", "ends": ["</t>"], "is_open": True, "budget": 3}
    found = llm.generate("A", choice=("yes", "no"), thinking=thinking, logits_processors=[same], max_tokens=30, seed=1)
    assert found.text.partition("</t>")[2].strip() in ("yes", "no")
    (letter,) = llm.tokenizer.encode("a", add_special=False)
    found = llm.generate("A", logits_processors=[loves_a], logit_bias={letter: -1e6}, max_tokens=4, **GREEDY)
    assert letter not in found.token_ids


def broken(token_ids: list[int], logits: Any) -> Any:
    """Fail at the third token."""
    if len(token_ids) == 2:
        raise ZeroDivisionError("of the user's own")
    return logits


def leave(token_ids: list[int], logits: Any) -> Any:
    """Leave the program."""
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("processor", "error", "message", "num_tokens"),
    [
        (broken, EngineError, "ZeroDivisionError: of the user's own", 2),
        (leave, EngineError, "SystemExit: 3", 0),
        (lambda ids, logits: None, InvalidType, "must return an array of the shape .*, not NoneType", 0),
        (lambda ids, logits: logits[:-1], InvalidType, "an array of the shape", 0),
        (lambda ids, logits: "x", InvalidType, "must return an array", 0),
        (lambda ids: ids, EngineError, "TypeError", 0),
        (lambda ids, logits: logits * np.float32("nan"), SamplingError, "logit", 0),
        (lambda ids, logits: logits - np.inf, SamplingError, "no token", 0),
    ],
)
def test_one_that_fails_ends_its_own_choice_alone(
    llm: LLM, processor: Any, error: type[PacelineError], message: str, num_tokens: int
) -> None:
    """With the text until then; others go on, and so does the engine."""
    options: dict[str, Any] = {"max_tokens": 8, **GREEDY}
    with llm.stream(STORY, **options) as beside, llm.stream(STORY, logits_processors=[processor], **options) as failing:
        chunks: list[StreamChunk] = []
        with pytest.raises(error, match=message):
            failing.consume(chunks.append)
        assert sum(len(chunk.token_ids) for chunk in chunks) == num_tokens
        assert failing.finish_reason is FinishReason.ERROR
        assert sum(len(chunk.token_ids) for chunk in beside) == 8
    assert llm.generate(STORY, **options).usage.completion_tokens == 8


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([3], InvalidType, r"logits_processors\[0\] must be a function"),
        (["nowhere"], InvalidParams, "module:attr"),
        (same, InvalidType, "logits_processors must be a list"),
        ([same] * 17, InvalidParams, "at most 16"),
        ([f"{__name__}:GREEDY"], InvalidType, "is not a function"),
        ([f"{__name__}:missing"], AttributeError, "missing"),
    ],
)
def test_invalid_processor_is_refused(llm: LLM, given: Any, error: type[Exception], message: str) -> None:
    """Before the request is queued."""
    with pytest.raises(error, match=message):
        llm.generate(STORY, logits_processors=given)


def test_a_sampler_alone_runs_none(llm: LLM) -> None:
    """It says so."""
    with pytest.raises(Unsupported, match="logits_processors"):
        Sampler(SamplingParams(logits_processors=(same,)), llm.model)


def test_a_worker_runs_those_that_have_a_name() -> None:
    """Functions are refused; after its death the next worker goes on with all tokens."""
    with LLM(n_ctx=2048, num_slots=2, isolation="process") as apart:
        with pytest.raises(Unsupported, match="module:attr"):
            apart.generate(STORY, logits_processors=[count_up])
        with apart.stream(
            STORY, logits_processors=[f"{__name__}:count_up"], max_tokens=40, max_buffered_tokens=4
        ) as stream:
            ids = []
            for chunk in stream:
                ids += chunk.token_ids
                if 10 <= len(ids) < 15:
                    engine = apart._engine
                    assert isinstance(engine, WorkerEngine)
                    if engine.worker_pid is not None:
                        os.kill(engine.worker_pid, signal.SIGKILL)
        assert ids == [400 + i for i in range(40)]
        with pytest.raises(EngineError, match="of the user's own"):
            apart.generate(STORY, logits_processors=[f"{__name__}:broken"], max_tokens=9, ignore_eos=True)
        with pytest.raises(PacelineError, match="missing"):
            apart.generate(STORY, logits_processors=[f"{__name__}:missing"], max_tokens=9)
        assert apart.generate(STORY, max_tokens=2, ignore_eos=True).usage.completion_tokens == 2
