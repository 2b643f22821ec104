"""Speculation on llama.cpp: the text is that of decoding alone, models that cannot do it say so, workers have the drafter."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.drafters import LastAgain, Oracle, force_depths, read_beside_a_kill
from tests.exact import EXACT, assert_same_but_for_near_ties
from tests.native.conftest import TinyModels
from tests.native.test_windowed_hybrid import WindowedLfm2Spec
from tests.sweeps import sampled

from paceline import LLM, NgramDrafter
from paceline.engine import engine_factory
from paceline.engine.arguments import engine_arguments
from paceline.engine.engine_factory import build
from paceline.errors import DrafterError, InvalidParams, NotEnoughMemory, Unsupported
from paceline.streaming import FinishReason
from paceline.testing.models import write_model

pytestmark = pytest.mark.native

SMALL: dict[str, Any] = {**EXACT, "num_slots": 3, "n_ctx": 1024}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
PROMPTS = ["Hello", "The quick brown fox", "a"]


@pytest.fixture
def deep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sequence gets as many drafts as there is room for, whatever they cost."""
    force_depths(monkeypatch, 6)


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
def test_streams_together_with_drafts_write_the_same_as_alone(
    plain: LLM, tiny_models: TinyModels, error_rate: float
) -> None:
    """With right and wrong drafts, except near ties; right drafts are accepted."""
    alone = [futures(plain, prompt, **GREEDY)[0] for prompt in PROMPTS]
    with LLM(tiny_models("llama"), speculation=Oracle(alone, error_rate=error_rate), **SMALL) as llm:
        found = llm.generate(PROMPTS, **GREEDY)
        for prompt, completion, expected in zip(PROMPTS, found, alone, strict=True):
            ids = llm.tokenizer.encode(prompt)
            assert_same_but_for_near_ties(plain, ids, expected[len(ids) :], completion.token_ids)
            assert completion.usage.accepted_tokens <= completion.usage.draft_tokens
        assert sum(completion.usage.accepted_tokens for completion in found) > 3 * 24 * (
            0.6 if error_rate == 0 else 0.1
        )
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
    oracle = Oracle([item for both in known for item in both], error_rate=0.3)
    with LLM(tiny_models("llama"), speculation=oracle, **SMALL) as llm:
        found = [llm.generate("Hello", seed=seed, **options) for seed in range(20)]
    assert oracle.num_proposals > 40
    for completion, other in zip(found, expected, strict=True):
        for mine, theirs in zip(completion.choices, other.choices, strict=True):
            assert mine.token_ids == theirs.token_ids
            assert mine.logprobs is not None and theirs.logprobs is not None
            values = [token.own for token in mine.logprobs]
            assert values == pytest.approx([token.own for token in theirs.logprobs], abs=1e-3)


@pytest.mark.usefixtures("deep")
@pytest.mark.parametrize("error_rate", [0.0, 0.4])
def test_constraints_are_followed_along_drafts(error_rate: float) -> None:
    """The text satisfies its schema, and equals the text without drafts except near ties; forbidden drafts are cut."""
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


GRAMMARS: dict[str, dict[str, Any]] = {
    "fixed": {"grammar": 'root ::= "abcdefghij"'},
    "list": {"grammar": 'root ::= item ("," item){2,4}\nitem ::= [a-f]{3}', "ignore_eos": True},
    "open": {"grammar": "root ::= [a-f]{4} [g-k]*", "max_tokens": 24},
    "lazy": {"grammar": "root ::= [a-e] [a-z]{9} [0-9]{3}", "grammar_lazy": True, "grammar_triggers": ("a", "e", "z")},
    "calls": {
        "grammar": 'root ::= [a-e] [0-9]+ "," [a-z]{9}',
        "grammar_lazy": True,
        "grammar_triggers": ("a", "b", "c", "d", "e"),
        "call_grammar": {
            "lark": 'start: /[a-e]/ count "," /[a-z]{9}/\ncount: %json {"type": "integer", "minimum": 10, "maximum": 99}\n',
            "triggers": ("a", "b", "c", "d", "e"),
        },
    },
    "with penalties": {"grammar": "root ::= [a-f ]{20}", "repeat_penalty": 1.3, "penalty_last_n": 8, "logprobs": 2},
    "sampled": {"grammar": "root ::= [a-f ]{20}", "temperature": 1.0, "seed": 3, "n": 3},
}


@pytest.mark.usefixtures("deep")
@pytest.mark.parametrize("error_rate", [0.0, 0.4])
@pytest.mark.parametrize("name", GRAMMARS)
def test_grammars_are_followed_along_drafts(tiny_models: TinyModels, name: str, error_rate: float) -> None:
    """Tokens, ends and log-probabilities equal those without drafts, also if the grammar ends among right drafts."""
    options = {"temperature": 0, "max_tokens": 40, **GRAMMARS[name]}
    ids = [*b"Hello, this is a prompt that is long enough to be kept: "]
    with LLM(tiny_models("llama"), **SMALL) as plain:
        alone = plain.generate(ids, **options)
        eos = min(plain.tokenizer.eog_ids)
        behind = [eos, 97, 98] if error_rate else [97, 98, 99]  # the end, or as text would go on there
        known = [[*ids, *choice.token_ids, *behind] for choice in alone.choices]
        with LLM(tiny_models("llama"), speculation=Oracle(known, error_rate=error_rate), **SMALL) as llm:
            found = llm.generate(ids, timeout_s=60, **options)
            assert found.usage.accepted_tokens > 0
            assert found.usage.completion_tokens == alone.usage.completion_tokens
            for mine, theirs in zip(found.choices, alone.choices, strict=True):
                assert (mine.token_ids, mine.finish_reason) == (theirs.token_ids, theirs.finish_reason)
                assert (mine.logprobs is None) == (theirs.logprobs is None)
                if mine.logprobs is not None and theirs.logprobs is not None:
                    values = [token.own for token in mine.logprobs]
                    assert values == pytest.approx([token.own for token in theirs.logprobs], abs=1e-3)
            again = llm.generate([*ids, *found.choices[0].token_ids, 65], temperature=0, max_tokens=2)
            assert again.usage.cached_tokens >= len(ids) + len(found.choices[0].token_ids) - 2


@pytest.mark.usefixtures("deep")
def test_processors_and_grammars_that_sleep_go_without_drafts(plain: LLM, tiny_models: TinyModels) -> None:
    """Samplers that look at each token outside of the pass are served as before."""
    known = futures(plain, "Hello", **GREEDY)
    with LLM(tiny_models("llama"), speculation=Oracle(known), **SMALL) as llm:
        processed = llm.generate("Hello", logits_processors=[lambda ids, logits: logits], **GREEDY)
        assert processed.usage.draft_tokens == 0
        thinking = {"start": "<t>", "ends": ["</t>"], "is_open": True, "budget": 7}
        lazy: dict[str, Any] = {"grammar": "root ::= [a-e]+", "grammar_lazy": True, "grammar_triggers": ("a",)}
        asleep = llm.generate("Hello", thinking=thinking, **lazy, **GREEDY)
        assert asleep.usage.draft_tokens == 0


def test_ngram_speculation_of_text_that_repeats_itself(tiny_models: TinyModels) -> None:
    """Prompt lookup by name, in this process and in a worker. Whatever is measured, there is a trial sooner or later."""
    for options in ({"speculation": "ngram:size_n=2"}, {"speculation": NgramDrafter(size_n=2), "isolation": "process"}):
        with LLM(tiny_models("llama"), **{**SMALL, **options}) as llm:
            num_drafts = num_accepted = 0
            for _ in range(100):
                one = llm.generate("ab" * 20, temperature=0, max_tokens=200, ignore_eos=True, logit_bias={97: 100.0})
                assert one.usage.completion_tokens == 200
                num_drafts += one.usage.draft_tokens
                num_accepted += one.usage.accepted_tokens
                if num_accepted:
                    break
            assert 0 < num_accepted <= num_drafts
            stats = llm.stats()
            assert stats.number("paceline_draft_tokens_total") == num_drafts
            assert stats.number("paceline_draft_tokens_accepted_total") == num_accepted


def test_a_killed_worker_continues_with_drafts(plain: LLM, tiny_models: TinyModels) -> None:
    """The next worker has the drafter too, and the text is that of decoding alone."""
    options: dict[str, Any] = {**GREEDY, "max_tokens": 600, "logit_bias": {97: 100.0}}
    prompt = "ab" * 20
    (alone,) = futures(plain, prompt, **options)
    with LLM(tiny_models("llama"), speculation="tests.drafters:LastAgain", isolation="process", **SMALL) as llm:
        found, chunk = read_beside_a_kill(llm, prompt, options)
        assert llm.stats().number("paceline_engine_restarts_total") == 1
        assert chunk.usage is not None
        assert 0 < chunk.usage.accepted_tokens <= chunk.usage.draft_tokens  # of the next worker, which counts anew
        assert found == alone[len(llm.tokenizer.encode(prompt)) :]


UNCUT = ["gemma3", "gemma4", "mamba", "rwkv6", "rwkv7", "falcon-h1", "lfm2", "granitehybrid", "qwen35"]
TOGETHER = ["The quick brown fox jumps", "The quick brown fox jumps over", "The quick brown dog", "a b c a b c"] * 2


@pytest.mark.usefixtures("deep")
@pytest.mark.parametrize("error_rate", sampled([0.1, 0.0, 0.5, 1.0], every=4))
@pytest.mark.parametrize("kind", UNCUT)
def test_models_with_states_verify_drafts(tiny_models: TinyModels, kind: str, error_rate: float) -> None:
    """The text is that of decoding alone, through shared prefixes, choices, turns that go on, and prompts beside."""
    options: dict[str, Any] = {**GREEDY, "max_tokens": 40}
    with LLM(tiny_models(kind), **SMALL) as plain:
        alone = [futures(plain, prompt, **options)[0] for prompt in TOGETHER[:4]]
        oracle = Oracle(alone, error_rate=error_rate)
        with LLM(tiny_models(kind), speculation=oracle, **SMALL) as llm:
            found = llm.generate(TOGETHER, **options)
            for prompt, completion, expected in zip(TOGETHER, found, alone * 2, strict=True):
                ids = llm.tokenizer.encode(prompt)
                assert_same_but_for_near_ties(plain, ids, expected[len(ids) :], completion.token_ids)
            accepted = sum(completion.usage.accepted_tokens for completion in found)
            assert sum(completion.usage.draft_tokens for completion in found) > 0
            assert accepted > 8 * 40 * 0.5 if error_rate == 0 else accepted < 8 * 40
            several = llm.generate(TOGETHER[0], n=3, **options)
            ids = llm.tokenizer.encode(TOGETHER[0])
            for choice in several.choices:
                assert_same_but_for_near_ties(plain, ids, alone[0][len(ids) :], choice.token_ids)
            turn = [*alone[1], 65, 66]
            after = llm.generate(turn, temperature=0, max_tokens=8, ignore_eos=True)
            expected_turn = plain.generate(turn, temperature=0, max_tokens=8, ignore_eos=True)
            assert_same_but_for_near_ties(plain, turn, expected_turn.token_ids, after.token_ids)
            assert after.usage.cached_tokens > 0


@pytest.mark.usefixtures("deep")
@pytest.mark.parametrize("kind", ["gemma3", "mamba", "falcon-h1", "lfm2"])
def test_little_memory_and_cancelled_neighbours_change_nothing(tiny_models: TinyModels, kind: str) -> None:
    """Sequences with drafts are preempted, go to host memory and come back, and others leave within their bursts."""
    options: dict[str, Any] = {**GREEDY, "max_tokens": 60}
    little: dict[str, Any] = {**SMALL, "n_ctx": 256, "num_slots": 4}
    prompts = ["The quick brown fox " * 3, "A fox and a dog went " * 2, "Hello " * 8, "abc " * 20]
    with LLM(tiny_models(kind), **SMALL) as plain:
        alone = [futures(plain, prompt, **options)[0] for prompt in prompts]
        with LLM(tiny_models(kind), speculation=Oracle(alone, error_rate=0.15), **little) as llm:
            for _ in range(2):
                streams = [llm.stream(prompt, **options) for prompt in prompts for _ in range(2)]
                for stream in streams[1::2]:
                    stream.get()
                    stream.cancel()
                found = [[token for chunk in stream for token in chunk.token_ids] for stream in streams[::2]]
                for prompt, item, expected in zip(prompts, found, alone, strict=True):
                    ids = llm.tokenizer.encode(prompt)
                    assert_same_but_for_near_ties(plain, ids, expected[len(ids) :], item)
            assert llm.stats().number("paceline_draft_tokens_accepted_total") > 100


@pytest.mark.usefixtures("deep")
@pytest.mark.parametrize("kind", ["gemma3", "mamba", "falcon-h1", "lfm2"])
def test_a_stop_within_a_burst_is_exact_with_states(tiny_models: TinyModels, kind: str) -> None:
    """The text ends the same as alone, and the next turn goes on from a state of read tokens."""
    with LLM(tiny_models(kind), **SMALL) as plain:
        prompt = "The quick brown fox jumps over the lazy dog"
        (alone,) = futures(plain, prompt, **{**GREEDY, "max_tokens": 60})
        start = len(plain.tokenizer.encode(prompt))
        stop = next(item for index, item in enumerate(alone) if index > start + 20 and item not in alone[start:index])
        options: dict[str, Any] = {**GREEDY, "max_tokens": 60, "stop_token_ids": [stop]}
        expected = plain.generate(prompt, **options)
        with LLM(tiny_models(kind), speculation=Oracle([alone]), **SMALL) as llm:
            found = llm.generate(prompt, **options)
            assert (found.token_ids, found.choices[0].finish_reason) == (expected.token_ids, FinishReason.STOP)
            turn = [*alone[: alone.index(stop, start) + 1], 65, 66]
            after = llm.generate(turn, temperature=0, max_tokens=8, ignore_eos=True)
            assert after.token_ids == plain.generate(turn, temperature=0, max_tokens=8, ignore_eos=True).token_ids
            assert after.usage.cached_tokens >= len(turn) - 2 - 8


def test_a_worker_verifies_drafts_on_a_recurrent_model(tiny_models: TinyModels) -> None:
    """In a process of its own, and after it was killed."""
    options: dict[str, Any] = {**GREEDY, "max_tokens": 400, "logit_bias": {97: 100.0}}
    prompt = "ab" * 20
    with LLM(tiny_models("mamba"), **SMALL) as plain:
        (alone,) = futures(plain, prompt, **options)
        with LLM(tiny_models("mamba"), speculation="tests.drafters:LastAgain", isolation="process", **SMALL) as llm:
            found, chunk = read_beside_a_kill(llm, prompt, options)
            assert found == alone[len(llm.tokenizer.encode(prompt)) :]
            assert chunk.usage is not None
            assert 0 < chunk.usage.accepted_tokens <= chunk.usage.draft_tokens


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("lfm2", {}, (3, None)),
        ("lfm2", {"n_ubatch": 4}, (2, None)),
        ("lfm2", {"max_rollback": 0}, (0, None)),
        ("lfm2", {"max_rollback": 6}, (6, None)),
        ("mamba", {}, (0, None)),
        ("falcon-h1", {}, (0, None)),
        ("llama", {}, (None, None)),
        ("gemma3", {"n_ubatch": 64}, (None, 64)),
    ],
)
def test_what_can_be_taken_back_is_read_from_the_context(
    tiny_models: TinyModels, kind: str, options: dict[str, Any], expected: tuple[int | None, int | None]
) -> None:
    """States of single tokens by default if llama.cpp has them, and drafts within a ubatch beside a window."""
    built = build(tiny_models(kind), engine_arguments({**SMALL, **options, "speculation": "ngram"}))
    assert (built.limits.max_rollback, built.limits.n_verify) == expected
    assert built.context is not None
    built.context.close()
    built.model.close()


def test_states_of_single_tokens_are_left_out_where_memory_is_short(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the KV cache gets fewer cells, with a warning; a drafter requested by name is refused."""

    def made(model: Any, **options: Any) -> Any:
        if options.get("max_rollback"):
            raise NotEnoughMemory("too much")
        return context(model, **options)

    context = engine_factory.Context
    monkeypatch.setattr(engine_factory, "Context", made)
    with LLM(tiny_models("lfm2"), speculation="ngram", **SMALL) as llm:
        assert "max_rollback=0" in caplog.text
        assert len(llm.generate("Hello", **GREEDY).token_ids) == 24
    with pytest.raises(NotEnoughMemory):
        LLM(tiny_models("lfm2"), speculation="ngram", max_rollback=2, **SMALL)


def test_a_window_beside_recurrent_layers_is_refused(tmp_path: Path) -> None:
    """When it is loaded, with the reason."""
    path = write_model(tmp_path / "windowed.gguf", WindowedLfm2Spec())
    with pytest.raises(Unsupported, match=r"window beside recurrent layers.*leave speculation out"):
        LLM(path, speculation="ngram", **SMALL)


@pytest.mark.usefixtures("deep")
def test_a_window_that_is_kept_whole_verifies_drafts(tiny_models: TinyModels) -> None:
    """With swa_full a sliding-window model writes the same as alone."""
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
    """Rows of logits match the number of drafts."""
    with pytest.raises(InvalidParams, match="n_batch"):
        LLM(tiny_models("llama"), speculation="ngram", n_batch=1, **SMALL)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_several_drafters_are_asked_in_turn(tiny_models: TinyModels, isolation: str) -> None:
    """By names and as objects, in this process and in a worker: of text that n-grams do not know the last one drafts."""
    chains: list[Any] = ["ngram:size_n=60,tests.drafters:LastAgain", [NgramDrafter(size_n=60), LastAgain()]]
    for chain in chains:
        with LLM(tiny_models("llama"), speculation=chain, isolation=isolation, **SMALL) as llm:
            one = llm.generate("ab", temperature=0, max_tokens=100, ignore_eos=True, logit_bias={97: 100.0})
            assert 0 < one.usage.accepted_tokens <= one.usage.draft_tokens
