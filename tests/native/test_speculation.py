"""Speculation on llama.cpp: the text is that of decoding alone, models that cannot do it say so, workers have the drafter."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from tests.drafters import Oracle
from tests.exact import EXACT, assert_same_but_for_near_ties
from tests.native.conftest import TinyModels

from paceline import LLM, NgramDrafter
from paceline.errors import DrafterError, InvalidParams, Unsupported
from paceline.scheduling.speculation import DepthChooser
from paceline.streaming import FinishReason

pytestmark = pytest.mark.native

SMALL: dict[str, Any] = {**EXACT, "num_slots": 3, "n_ctx": 1024}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
PROMPTS = ["Hello", "The quick brown fox", "a"]


@pytest.fixture
def deep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sequence gets as many drafts as there is room for, whatever they cost."""

    def choose(self: Any, candidates: Sequence[tuple[float, int]], rows: Any, num_cells: int, most: int) -> list[int]:
        return [min(cap, 6, most // len(candidates)) for _, cap in candidates]

    monkeypatch.setattr(DepthChooser, "choose", choose)


@pytest.fixture(scope="module")
def plain(tiny_models: TinyModels) -> Iterator[LLM]:
    with LLM(tiny_models("llama"), **SMALL) as llm:
        yield llm


def futures(llm: LLM, prompt: str, **options: Any) -> list[list[int]]:
    found = llm.generate(prompt, **options)
    ids = llm.tokenizer.encode(prompt)
    return [[*ids, *choice.token_ids] for choice in found.choices]


@pytest.mark.usefixtures("deep")
@pytest.mark.parametrize("error_rate", [0.0, 0.5])
def test_streams_together_with_drafts_say_what_each_says_alone(
    plain: LLM, tiny_models: TinyModels, error_rate: float
) -> None:
    """Whether drafts are right or wrong, but for near ties; right ones are accepted."""
    alone = [futures(plain, prompt, **GREEDY)[0] for prompt in PROMPTS]
    with LLM(tiny_models("llama"), speculation=Oracle(alone, error_rate=error_rate), **SMALL) as llm:
        found = llm.generate(PROMPTS, **GREEDY)
        for prompt, one, expected in zip(PROMPTS, found, alone, strict=True):
            ids = llm.tokenizer.encode(prompt)
            assert_same_but_for_near_ties(plain, ids, expected[len(ids) :], one.token_ids)
            assert one.usage.accepted_tokens <= one.usage.draft_tokens
        assert sum(one.usage.accepted_tokens for one in found) > 3 * 24 * (0.6 if error_rate == 0 else 0.1)
        without = llm.generate(PROMPTS[0], speculation=False, **GREEDY)
        assert without.usage.draft_tokens == 0
        again = llm.generate([*alone[0], 65], temperature=0, max_tokens=4)
        assert again.usage.cached_tokens > len(alone[0]) - 2


@pytest.mark.usefixtures("deep")
def test_draws_of_a_seed_are_those_without_drafts(plain: LLM, tiny_models: TinyModels) -> None:
    """So the distribution is: the same seed draws the same tokens, with log-probabilities, penalties and choices."""
    options: dict[str, Any] = {
        "temperature": 1.0,
        "max_tokens": 12,
        "ignore_eos": True,
        "n": 2,
        "logprobs": 1,
        "repeat_penalty": 1.1,
    }
    expected = [plain.generate("Hello", seed=seed, **options) for seed in range(20)]
    known = [futures(plain, "Hello", seed=seed, **options) for seed in range(20)]
    oracle = Oracle([one for both in known for one in both], error_rate=0.3)
    with LLM(tiny_models("llama"), speculation=oracle, **SMALL) as llm:
        found = [llm.generate("Hello", seed=seed, **options) for seed in range(20)]
    assert oracle.num_proposals > 40
    for one, other in zip(found, expected, strict=True):
        for mine, theirs in zip(one.choices, other.choices, strict=True):
            assert mine.token_ids == theirs.token_ids
            assert mine.logprobs is not None and theirs.logprobs is not None
            values = [token.own for token in mine.logprobs]
            assert values == pytest.approx([token.own for token in theirs.logprobs], abs=1e-3)


@pytest.mark.usefixtures("deep")
@pytest.mark.parametrize("error_rate", [0.0, 0.4])
def test_constraints_are_followed_along_drafts(error_rate: float) -> None:
    """The text satisfies its schema, and is that without drafts but for near ties; what the constraint forbids is cut."""
    schema = {
        "type": "object",
        "properties": {
            "names": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
            "age": {"type": "integer", "minimum": 10, "maximum": 99},
        },
        "required": ["names", "age"],
        "additionalProperties": False,
    }
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 100, "json_schema": schema}
    prompt = "The fox is"
    with LLM(num_slots=2, n_ctx=1024, **EXACT) as plain:
        (alone,) = futures(plain, prompt, **options)
        oracle = Oracle([[*alone, 65, 66]], error_rate=error_rate)
        with LLM(num_slots=2, n_ctx=1024, speculation=oracle, **EXACT) as llm:
            found = llm.generate(prompt, **options)
            assert json.loads(found.text)["age"] >= 10
            assert found.usage.accepted_tokens > 0
            assert list(found.token_ids) == alone[len(llm.tokenizer.encode(prompt)) :] or error_rate > 0


@pytest.mark.usefixtures("deep")
def test_a_thinking_budget_ends_within_right_drafts() -> None:
    """The last draft before the forced end is drawn without being verified, and decoding goes on to its limit."""
    thinking = {"start": "<t>", "ends": ["</t>"], "is_open": True, "budget": 7}
    options: dict[str, Any] = {**GREEDY, "thinking": thinking}
    prompt = "The fox is"
    with LLM(num_slots=2, n_ctx=1024, **EXACT) as plain:
        (alone,) = futures(plain, prompt, **options)
    with LLM(num_slots=2, n_ctx=1024, speculation=Oracle([alone]), **EXACT) as llm:
        found = llm.generate(prompt, timeout_s=60, **options)
        assert found.choices[0].finish_reason is FinishReason.LENGTH
        assert list(found.token_ids) == alone[len(llm.tokenizer.encode(prompt)) :]
        assert found.usage.accepted_tokens > 8
        again = llm.generate([*alone, 65], temperature=0, max_tokens=4)
        assert again.usage.cached_tokens == len(alone) - 1


@pytest.mark.usefixtures("deep")
def test_a_turn_behind_a_finished_schema_finds_all_of_it_in_the_cache() -> None:
    """The draft that completes the text is drawn without being verified, and is no part of the cached prefix."""
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 100, "regex": "[a-z ]{20}END"}
    prompt = "The fox went to the market with a red apple, a red pear and a red plum, and there it met a"
    with LLM(num_slots=2, n_ctx=1024, **EXACT) as plain:
        (alone,) = futures(plain, prompt, **options)
    with LLM(num_slots=2, n_ctx=1024, speculation=Oracle([[*alone, 65, 66]]), **EXACT) as llm:
        found = llm.generate(prompt, **options)
        assert found.text.endswith("END")
        assert found.usage.accepted_tokens > 0
        again = llm.generate([*alone, 65], temperature=0, max_tokens=4)
        assert again.usage.cached_tokens == len(alone) - 1


class Anything:
    """A constraint that allows everything, and of which there is no copy once it runs."""

    is_complete, may_end = False, True

    def __init__(self, is_made: bool = False) -> None:
        self._is_made = is_made

    def fill_mask(self, words: Any) -> bool:
        return False

    def accept(self, token_id: int) -> None:
        pass

    def rollback(self, num_tokens: int) -> None:
        pass

    def copy(self) -> Anything:
        if self._is_made:
            raise RuntimeError("no copy")
        return Anything(is_made=True)


@pytest.mark.usefixtures("deep")
def test_a_constraint_that_cannot_be_copied_goes_without_drafts() -> None:
    """None of them is verified, and none counts as accepted though each is drawn."""
    prompt = "The fox is"
    with LLM(num_slots=2, n_ctx=1024, **EXACT) as plain:
        (alone,) = futures(plain, prompt, **GREEDY)
    with LLM(num_slots=2, n_ctx=1024, speculation=Oracle([alone]), **EXACT) as llm:
        found = llm.generate(prompt, constraint=Anything(), timeout_s=60, **GREEDY)
        assert found.choices[0].finish_reason is FinishReason.LENGTH
        assert list(found.token_ids) == alone[len(llm.tokenizer.encode(prompt)) :]
        assert found.usage.accepted_tokens == 0
        again = llm.generate([*alone, 65], temperature=0, max_tokens=4)
        assert again.usage.cached_tokens == len(alone) - 1


@pytest.mark.usefixtures("deep")
def test_grammars_and_processors_go_without_drafts(plain: LLM, tiny_models: TinyModels) -> None:
    """What looks at one token after the other is served as before."""
    known = futures(plain, "Hello", **GREEDY)
    with LLM(tiny_models("llama"), speculation=Oracle(known), **SMALL) as llm:
        grammar = llm.generate("Hello", temperature=0, max_tokens=5, grammar='root ::= "ab"')
        assert (grammar.text, grammar.usage.draft_tokens) == ("ab", 0)
        processed = llm.generate("Hello", logits_processors=[lambda ids, logits: logits], **GREEDY)
        assert processed.usage.draft_tokens == 0


def test_ngram_speculation_of_text_that_repeats_itself(tiny_models: TinyModels) -> None:
    """Prompt lookup by name, in this process and in a worker; whatever is measured, the 200 tokens have a trial among them."""
    for options in ({"speculation": "ngram:size_n=2"}, {"speculation": NgramDrafter(size_n=2), "isolation": "process"}):
        with LLM(tiny_models("llama"), **{**SMALL, **options}) as llm:
            one = llm.generate("ab" * 20, temperature=0, max_tokens=200, ignore_eos=True, logit_bias={97: 100.0})
            assert one.usage.completion_tokens == 200
            assert 0 < one.usage.accepted_tokens <= one.usage.draft_tokens
            stats = llm.stats()
            assert stats.number("paceline_draft_tokens_total") == one.usage.draft_tokens
            assert stats.number("paceline_draft_tokens_accepted_total") == one.usage.accepted_tokens


def test_a_killed_worker_continues_with_drafts(plain: LLM, tiny_models: TinyModels) -> None:
    """The next worker has the drafter too, and the text is that of decoding alone."""
    options: dict[str, Any] = {**GREEDY, "max_tokens": 600, "logit_bias": {97: 100.0}}
    prompt = "ab" * 20
    (alone,) = futures(plain, prompt, **options)
    with LLM(tiny_models("llama"), speculation="tests.drafters:LastAgain", isolation="process", **SMALL) as llm:
        found: list[int] = []
        with llm.stream(prompt, max_buffered_tokens=4, **options) as stream:
            while len(found) < 20:
                found += stream.get().token_ids
            engine: Any = llm._engine
            os.kill(engine.worker_pid, signal.SIGKILL)
            for chunk in stream:
                found += chunk.token_ids
        assert llm.stats().number("paceline_engine_restarts_total") == 1
        assert chunk.usage is not None
        assert 0 < chunk.usage.accepted_tokens <= chunk.usage.draft_tokens  # of the next worker, which counts anew
        assert found == alone[len(llm.tokenizer.encode(prompt)) :]


@pytest.mark.parametrize(
    ("kind", "says"), [("mamba", "state"), ("falcon-h1", "recurrent"), ("gemma3", "swa_full=True")]
)
def test_models_whose_memory_cannot_be_cut_are_refused(tiny_models: TinyModels, kind: str, says: str) -> None:
    """When they are loaded, with the reason; swa_full makes up for a window."""
    with pytest.raises(Unsupported, match=says):
        LLM(tiny_models(kind), speculation="ngram", **SMALL)


@pytest.mark.usefixtures("deep")
def test_a_window_that_is_kept_whole_verifies_drafts(tiny_models: TinyModels) -> None:
    """With swa_full a sliding-window model says what it says alone."""
    options: dict[str, Any] = {**GREEDY, "max_tokens": 60}
    with LLM(tiny_models("gemma3"), swa_full=True, **SMALL) as plain:
        (alone,) = futures(plain, PROMPTS[1], **options)
        oracle = Oracle([alone], error_rate=0.3)
        with LLM(tiny_models("gemma3"), swa_full=True, speculation=oracle, **SMALL) as llm:
            found = llm.generate(PROMPTS[1], **options)
            ids = llm.tokenizer.encode(PROMPTS[1])
            assert_same_but_for_near_ties(plain, ids, alone[len(ids) :], found.token_ids)
            assert found.usage.accepted_tokens > 10


class Locked(NgramDrafter):
    """Does not pickle."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Raising(NgramDrafter):
    """Fails when it is asked."""

    def propose(self, key: int, max_tokens: int) -> list[int]:
        raise ValueError("no idea")


def test_a_drafter_that_cannot_go_to_a_worker_is_refused(tiny_models: TinyModels) -> None:
    """With the ways out: a name, or a thread."""
    with pytest.raises(InvalidParams, match=r"pickle.*module:attr.*thread"):
        LLM(tiny_models("llama"), speculation=Locked(), isolation="process", **SMALL)


@pytest.mark.usefixtures("deep")
def test_a_failing_drafter_ends_its_request_alone(tiny_models: TinyModels) -> None:
    """The error names it; the engine goes on."""
    with LLM(tiny_models("llama"), speculation=Raising(), **SMALL) as llm:
        with pytest.raises(DrafterError, match=r"Raising.*no idea"):
            llm.generate("Hello", **GREEDY)
        assert len(llm.generate("Hello", speculation=False, **GREEDY).token_ids) == 24


def test_a_batch_without_room_for_drafts_is_refused(tiny_models: TinyModels) -> None:
    """Rows of logits are what drafts need."""
    with pytest.raises(InvalidParams, match="n_batch"):
        LLM(tiny_models("llama"), speculation="ngram", n_batch=1, **SMALL)
