"""The engine under random events, in any order, with each strategy and each kind of memory.

The oracle is one request at a time: a request that ended by itself equals the same request alone, and a request that was cut
off is a beginning of it.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.drafters import BatchOracle, Oracle
from tests.engine_world import Outcome, World
from tests.stream_reference import expected_output
from tests.sweeps import sampled

from paceline.errors import Aborted, DecodeError
from paceline.kv_cache import offload, prefix_match
from paceline.observability.metrics import Instrument
from paceline.sequence import Request, Row
from paceline.speculation import depth_chooser
from paceline.streaming import FinishReason
from paceline.testing.fake_backend import EOS, FakeCost, FakeMemory

STRATEGIES = ("paced", "balanced", "decode_maximal", "prefill_priority")
KINDS = ("attention", "sliding_window", "hybrid", "recurrent", "compressed")
BY_ITSELF = {FinishReason.STOP, FinishReason.LENGTH}
MOST_CELLS = 60
MOST_PROMPT = 24

PATHS = ([7, 8, 9] * 7, [7, 8, 9] * 6 + [1, 2, 3], [65] * 20)  # what many prompts begin with
BEGINNINGS = st.sampled_from(PATHS)
TAILS = st.lists(st.integers(60, 70), max_size=4)
SHARED = st.builds(lambda path, length, tail: path[:length] + tail, BEGINNINGS, st.sampled_from([3, 17, 18, 20]), TAILS)
PROMPTS = st.one_of(
    st.text("abc é", min_size=1, max_size=12),
    st.lists(st.integers(0, 257), min_size=1, max_size=MOST_PROMPT),
    SHARED,
    SHARED,
    SHARED,
)
STOPS = st.lists(st.sampled_from([" ", "e", "th", "he", "\n", "é", "ta", "t"]), max_size=2)


DRAFTERS = {"one by one": Oracle, "all at once": BatchOracle}


@st.composite
def samplings(draw: st.DrawFn) -> dict[str, Any]:
    """The parameters that decide an output."""
    max_tokens = draw(st.none() | st.integers(0, 30))
    least = 30 if max_tokens is None else max_tokens
    options: dict[str, Any] = {"max_tokens": max_tokens}
    maybe = {
        "n": st.integers(2, 4),
        "stop": STOPS,
        "min_tokens": st.integers(0, min(6, least)),
        "stop_token_ids": st.lists(st.sampled_from([32, 101, 116]), max_size=2),
        "ignore_eos": st.booleans(),
        "logprobs": st.integers(0, 2),
        "prompt_logprobs": st.integers(0, 2),
        "echo": st.booleans(),
        "lora": st.sampled_from([(), (("one", 1.0),), (("two", 0.5),)]),
        "special": st.booleans(),
        "regex": st.sampled_from(["[a-e ]{3,9}x", "(the|that|then) [a-z]+", "[^q]{1,12}"]),
    }
    for name, values in maybe.items():
        if draw(st.integers(0, 3)) == 0:
            options[name] = draw(values)
    if draw(st.booleans()):
        options |= {"temperature": 1.0, "seed": draw(st.integers(0, 3))}
    return options


TIMINGS = st.fixed_dictionaries(
    {},
    optional={
        "priority": st.integers(-3, 3),
        "timeout_s": st.sampled_from([0.05, 0.5, 3.0]),
        "ttft_timeout_s": st.sampled_from([0.05, 0.5]),
        "queue_timeout_s": st.sampled_from([0.01, 0.3]),
    },
)


SHARING = st.fixed_dictionaries(
    {},
    optional={
        "cache_salt": st.sampled_from(["", "s"]),
        "tenant": st.sampled_from(["", "s", "t"]),
        "tenant_weight": st.sampled_from([0.001, 1.0, 3.0]),
        "cache_prompt": st.booleans(),
        "speculation": st.booleans(),
        "max_draft": st.sampled_from([None, 0, 2]),
    },
)


SALTS = st.fixed_dictionaries(
    {}, optional={"cache_salt": st.sampled_from(["", "s"]), "tenant": st.sampled_from(["", "s"])}
)


class Sources(Instrument):
    """Reports the sources of cached tokens, and preemptions."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self.report = report

    def prefix_shared(self, key: int, choice: int, num_tokens: int, source: str) -> None:
        self.report(source)

    def preempted(self, key: int, choice: int, num_computed_tokens: int, now_s: float) -> None:
        self.report("preempted")


class Machine(RuleBasedStateMachine):
    """Callers, readers and accidents; a subclass sets strategy and memory."""

    strategy = "paced"
    kind = "attention"
    drafts = ""

    @initialize(
        num_cells=st.integers(25, MOST_CELLS),
        num_slots=st.integers(1, 4),
        chunk_size=st.sampled_from([1, 3, 32]),
        n_batch=st.sampled_from([4, 7, 64]),
        max_scored=st.sampled_from([1, 5]),
        host_bytes=st.sampled_from([0, 200, 1000, 16_000]),
        is_tidy=st.booleans(),
        saved_token_s=st.sampled_from([0.0, 0.01]),
        max_drafted=st.sampled_from([1, 3, 20]),
        rollback=st.sampled_from([0, 0, 1, 3]),
        seed=st.integers(0, 3),
    )
    def begin(
        self, num_cells: int, is_tidy: bool, saved_token_s: float, rollback: int, seed: int, **limits: int
    ) -> None:
        self.make = {
            "kind": self.kind,
            "rollback": rollback,
            "strategy": self.strategy,
            "num_cells": num_cells,
            "eos_every": 25,
            "adapters": ("one", "two"),
            "cost": FakeCost(saved_token_s=saved_token_s),
        }
        self.oracle = DRAFTERS[self.drafts](error_rate=0.3) if self.drafts else None
        self.world = World(limits=limits, instruments=(Sources(event),), drafter=self.oracle, **self.make)
        if self.world.scheduler._speculation is not None:  # whatever the costs say
            self.world.scheduler._speculation._chooser.choose = random_depths(seed)  # type: ignore[method-assign]
        if is_tidy:  # no idle cell may stay where it is
            self.world.scheduler.kv_cache._idle_limit = lambda: 0  # type: ignore[method-assign]
        self.num_broken = 0
        backend: Any = self.world.backend
        for name in ("copy", "load", "save"):
            setattr(backend, name, self.breakable(getattr(backend, name)))
        self.asked: dict[int, tuple[Any, dict[str, Any]]] = {}
        self.causes: dict[int, set[FinishReason]] = {}  # why each may have ended, beside by itself
        self.embedding: dict[int, tuple[list[str], str | None]] = {}
        self.embedding_causes: dict[int, set[str]] = {}
        self.exports: dict[int, list[int]] = {}
        self.must_end: set[int] = set()
        self.is_stopped = False

    # ---- callers

    @rule(prompt=PROMPTS, sampling=samplings(), timing=TIMINGS, sharing=SHARING)
    def submit(self, prompt: Any, sampling: dict[str, Any], timing: dict[str, Any], sharing: dict[str, Any]) -> None:
        outcome = self.world.submit(prompt, **sampling, **timing, **sharing)
        key = outcome.request.key
        self.asked[key] = (prompt, sampling)
        if self.oracle is not None:
            alone = lone(repr(sorted(self.make.items())), repr((prompt, sorted(sampling.items()))))
            for choice in range(alone.request.params.n):
                self.oracle.futures.append([*alone.request.prompt, *alone.drawn(choice), 65, EOS, 66])
        self.causes[key] = {FinishReason.DEADLINE} if timing.keys() - {"priority"} else set()
        if self.is_stopped:
            self.causes[key].add(FinishReason.SHUTDOWN)

    @precondition(lambda self: self.world.outcomes)
    @rule(data=st.data(), tail=TAILS, sampling=samplings(), sharing=SHARING)
    def go_on(self, data: st.DataObject, tail: list[int], sampling: dict[str, Any], sharing: dict[str, Any]) -> None:
        """The next turn of a conversation, or a fork of one that is still running."""
        before = data.draw(st.sampled_from(list(self.world.outcomes.values())))
        self.submit((before.request.prompt + before.token_ids() + tail)[:MOST_PROMPT], sampling, {}, sharing)

    @rule(
        texts=st.lists(st.text("ab", min_size=1, max_size=80), min_size=1, max_size=6),
        pooling=st.sampled_from([None, "cls"]),
    )
    def submit_embedding(self, texts: list[str], pooling: str | None) -> None:
        key = self.world.submit_embedding(texts, pooling=pooling)
        self.embedding[key] = (texts, pooling)
        self.embedding_causes[key] = {"engine_stopped"} if self.is_stopped else set()

    @precondition(lambda self: self.open())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        outcome = data.draw(st.sampled_from(self.open()))
        self.world.cancel(outcome)
        self.causes[outcome.request.key].add(FinishReason.CANCELLED)
        self.must_end.add(outcome.request.key)

    @precondition(lambda self: self.open_embedding())
    @rule(data=st.data())
    def cancel_embedding(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.open_embedding()))
        self.world.cancel_embedding(key)
        self.embedding_causes[key].add("cancelled")

    # ---- readers

    @precondition(lambda self: self.open())
    @rule(data=st.data(), is_paused=st.booleans())
    def pause(self, data: st.DataObject, is_paused: bool) -> None:
        self.world.pause(data.draw(st.sampled_from(self.open())), is_paused=is_paused)

    @precondition(lambda self: self.open())
    @rule(data=st.data(), interval=st.sampled_from([1, 3, 1000]))
    def set_interval(self, data: st.DataObject, interval: int) -> None:
        self.world.set_interval(data.draw(st.sampled_from(self.open())), interval)

    @precondition(lambda self: self.open())
    @rule(data=st.data())
    def end_slow(self, data: st.DataObject) -> None:
        outcome = data.draw(st.sampled_from(self.open()))
        self.world.end_slow(outcome)
        self.causes[outcome.request.key].add(FinishReason.SLOW_READER)
        self.must_end.add(outcome.request.key)

    # ---- files

    @rule(prompt=SHARED, sharing=st.just({}) | SALTS)
    def export(self, prompt: list[int], sharing: dict[str, Any]) -> None:
        """Export the part of a path in memory."""
        self.exports[self.world.export(prompt, **sharing)] = prompt

    @precondition(lambda self: any(self.world.exported.values()))
    @rule(data=st.data(), sharing=st.just({}) | SALTS)
    def bring_in(self, data: st.DataObject, sharing: dict[str, Any]) -> None:
        """Import an exported prefix again, perhaps in another namespace."""
        key = data.draw(st.sampled_from([key for key, states in self.world.exported.items() if states]))
        self.world.bring_in(self.exports[key], self.world.exported[key] or [], **sharing)

    # ---- accidents

    @precondition(lambda self: self.open() or self.open_embedding())
    @rule(is_abort=st.booleans())
    def fail_a_pass(self, is_abort: bool) -> None:
        self.world.faults.next_passes.append(Aborted("told to stop") if is_abort else DecodeError("failed"))
        if not is_abort:
            self.blame_all(FinishReason.ERROR, "decode_error")
        self.tick()
        self.world.faults.next_passes.clear()

    @precondition(lambda self: self.open())
    @rule(data=st.data())
    def poison(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.open())).request.key
        self.world.faults.poisonous.add(key)
        self.causes[key].add(FinishReason.ERROR)

    @precondition(lambda self: self.open())
    @rule(data=st.data())
    def fail_a_draw(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.open())).request.key
        self.world.faults.undrawable.add(key)
        self.causes[key].add(FinishReason.ERROR)

    @rule(times=st.integers(1, 3))
    def fail_operations(self, times: int) -> None:
        """Copies, loads and saves fail: no request notices."""
        self.num_broken = times

    @precondition(lambda self: self.open())
    @rule()
    def fail_a_plan(self) -> None:
        self.world.faults.next_plans.append(RuntimeError("no idea"))
        self.blame_all(FinishReason.ERROR, None)
        self.tick()
        self.world.faults.next_plans.clear()

    @precondition(lambda self: not self.is_stopped)
    @rule(really=st.integers(0, 5))
    def stop(self, really: int) -> None:
        if really == 0:
            self.is_stopped = True
            self.world.stop()
            self.blame_all(FinishReason.SHUTDOWN, "engine_stopped")
            self.must_end |= {outcome.request.key for outcome in self.open()}

    # ---- time

    @rule(prompt=SHARED, num_tokens=st.integers(1, 3), sharing=st.just({}) | SHARING)
    def ask(self, prompt: list[int], num_tokens: int, sharing: dict[str, Any]) -> None:
        """Submit a short request and let it run for a while."""
        self.submit(prompt, {"max_tokens": num_tokens}, {}, sharing)
        self.tick(6)

    @rule(times=st.integers(1, 8))
    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            must_end, self.must_end = self.must_end, set()
            self.world.tick()
            assert must_end.isdisjoint(self.world.open_keys()), "not ended within one tick"

    @rule(seconds=st.sampled_from([0.01, 0.2, 5.0]))
    def advance(self, seconds: float) -> None:
        self.world.clock.advance(seconds)

    # ---- what must hold

    @invariant()
    def everything_is_in_its_place(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for outcome in self.open():
            self.world.pause(outcome, is_paused=False)
        self.world.run(max_ticks=3000)
        self.world.check_done()
        for outcome in self.world.outcomes.values():
            self.judge_cached(outcome)
            self.judge_drafts(outcome)
            for choice in range(outcome.request.params.n):
                self.judge(outcome, choice)
        for key in self.embedding:
            self.judge_embedding(key)
        for key in self.exports:
            self.judge_export(key)

    def judge(self, outcome: Outcome, choice: int) -> None:
        """Compare a choice with the same request alone."""
        key = outcome.request.key
        prompt, sampling = self.asked[key]
        alone = lone(repr(sorted(self.make.items())), repr((prompt, sorted(sampling.items()))))
        reason = outcome.reason(choice)
        is_own_error = reason is alone.reason(choice) is FinishReason.ERROR and reason not in self.causes[key]
        if reason in BY_ITSELF or is_own_error:  # bans may leave none of the tokens that a constraint allows
            assert (outcome.token_ids(choice), outcome.text(choice)) == (alone.token_ids(choice), alone.text(choice))
            last, other = outcome.last(choice), alone.last(choice)
            assert (reason, last.stop, last.stop_token_ids) == (other.finish_reason, other.stop, other.stop_token_ids)
            assert outcome.logprobs(choice) == alone.logprobs(choice)
        else:
            assert reason in self.causes[key], f"{reason} without a cause"
            self.judge_cut_off(outcome, alone, choice)
        scored = [token for chunk in outcome.of_choice(choice) for token in chunk.prompt_logprobs]
        wanted = [token for chunk in alone.of_choice(choice) for token in chunk.prompt_logprobs]
        assert scored == wanted[: len(scored)]
        assert reason not in BY_ITSELF or scored == wanted

    def judge_drafts(self, outcome: Outcome) -> None:
        """Usage counts drafts, and no more accepted drafts than generated tokens."""
        usage = outcome.chunks[-1].usage
        assert usage is not None
        assert 0 <= usage.accepted_tokens <= min(usage.draft_tokens, usage.completion_tokens)
        if usage.accepted_tokens:
            event("accepted")
        if self.oracle is None or not outcome.request.options.speculation:
            assert usage.draft_tokens == 0

    def judge_cached(self, outcome: Outcome) -> None:
        """Usage counts tokens that really came from other requests, and is zero if sharing is off."""
        usage, request = outcome.chunks[-1].usage, outcome.request
        assert usage is not None
        assert (usage.cached_tokens == 0) == (usage.cached_from is None)
        assert 0 <= usage.cached_tokens < max(1, len(request.prompt))
        others = [item.request for item in self.world.outcomes.values() if item is not outcome]
        if not any(may_share(other, request) for other in others) and not self.world.imported:
            assert usage.cached_tokens == 0

    def judge_cut_off(self, outcome: Outcome, alone: Outcome, choice: int) -> None:
        drawn, params = outcome.drawn(choice), outcome.request.params
        assert drawn == alone.drawn(choice)[: len(drawn)]
        vocabulary = self.world.vocabulary
        expected = expected_output(
            drawn,
            pieces=vocabulary.pieces_special if outcome.request.options.special else vocabulary.pieces,
            ends=() if params.ignore_eos else {EOS},
            stops=params.stop,
            stop_ids=params.stop_token_ids,
            min_tokens=params.min_tokens,
            max_tokens=params.max_tokens,
            cut_off=outcome.reason(choice),
        )
        assert outcome.token_ids(choice) == expected.token_ids
        assert outcome.text(choice) == outcome.request.echo + expected.text
        assert outcome.last(choice).stop == expected.stop

    def judge_export(self, key: int) -> None:
        """The tokens reported as saved are a path's own, from the first on."""
        states = self.world.exported[key]
        assert states is not None
        hashes = [value for state in states for value in state.hashes]
        memory = FakeMemory(MOST_CELLS, 1, "attention", 1)
        memory.append(0, 0, self.exports[key])
        assert hashes == memory.hashes(0)[: len(hashes)]

    def judge_embedding(self, key: int) -> None:
        embedded, (texts, pooling) = self.world.embedded[key], self.embedding[key]
        if embedded.error is None:
            backend = self.world.backend
            assert embedded.vectors == [backend.embed([backend.encode(text)], pooling)[0] for text in texts]
        else:
            assert embedded.error.code in self.embedding_causes[key]

    # ---- the rest

    def breakable(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if self.num_broken:
                self.num_broken -= 1
                raise DecodeError("the operation failed")
            return operation(*arguments)

        return call

    def open(self) -> list[Outcome]:
        return [outcome for outcome in self.world.outcomes.values() if outcome.terminal is None]

    def open_embedding(self) -> list[int]:
        return [key for key in self.embedding if key not in self.world.embedded]

    def blame_all(self, reason: FinishReason, code: str | None) -> None:
        for outcome in self.open():
            self.causes[outcome.request.key].add(reason)
        for key in self.open_embedding():
            self.embedding_causes[key] |= {code} if code else set()


def random_depths(seed: int) -> Callable[..., list[int]]:
    """Return a chooser of random depths, within the limits of each sequence and the tick."""
    source = random.Random(seed)

    def choose(
        candidates: list[tuple[float, int]], rows: list[Row], num_cells: int, most: int, num_ticks: int
    ) -> list[int]:
        depths = []
        for _, cap in candidates:
            depths.append(source.randint(0, min(cap, most)))
            most -= depths[-1]
        return depths

    return choose


def may_share(one: Request, other: Request) -> bool:
    """Return whether two requests may share cached prefixes."""
    mine, theirs = one.options, other.options
    return (
        mine.cache_prompt
        and theirs.cache_prompt
        and (mine.lora, mine.tenant, mine.cache_salt) == (theirs.lora, theirs.tenant, theirs.cache_salt)
    )


@lru_cache(maxsize=4096)
def lone(make: str, asked: str) -> Outcome:
    """Run the request in a world of its own, without failures."""
    prompt, sampling = eval(asked)
    return World(**dict(eval(make))).alone(prompt, **dict(sampling))


@pytest.mark.parametrize(
    ("strategy", "kind", "drafts"),
    sampled(
        [
            ("paced", "attention", "all at once"),
            *((*item, "") for item in itertools.product(STRATEGIES, KINDS)),
            *((*item, "one by one") for item in itertools.product(STRATEGIES, KINDS) if item[1] != "compressed"),
        ],
        every=3,
    ),
)
def test_whatever_happens_each_request_ends_once_with_the_output_it_has_alone(
    strategy: str, kind: str, drafts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Places, cells and counts add up after each tick, nothing is left, no request notices the others, nor speculation."""
    monkeypatch.setattr(offload, "_MIN_TRANSFER_TOKENS", 2)  # small paths leave in parts, too
    monkeypatch.setattr(offload, "BLOCK_TOKENS", 4)
    monkeypatch.setattr(prefix_match, "BLOCK_TOKENS", 4)
    monkeypatch.setattr(prefix_match, "MIN_SPACING_TOKENS", 2)
    monkeypatch.setattr(depth_chooser, "KEPT_FOR", 0)  # depths are random
    if kind != "attention":
        monkeypatch.setattr(prefix_match, "MIN_PENDING_TOKENS", 2)
    machine = type("Machine", (Machine,), {"strategy": strategy, "kind": kind, "drafts": drafts})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=12, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_traffic_hits_every_source(kind: str) -> None:
    """The machine's requests, drawn with a fixed seed: prefixes come from wherever they can, and outputs stay the same."""
    counts: Counter[str] = Counter()
    rng = random.Random(5)
    make: dict[str, Any] = {"kind": kind, "num_cells": 70, "eos_every": 25}
    limits = {"num_slots": 3, "chunk_size": 7, "host_bytes": 1000}
    world = World(limits=limits, instruments=(Sources(lambda source: counts.update([source])),), **make)
    for _ in range(100):
        if world.outcomes and rng.random() < 0.3:
            before = rng.choice(list(world.outcomes.values()))
            prompt = [*(before.request.prompt + before.token_ids())[: MOST_PROMPT - 1], rng.randrange(60, 70)]
        else:
            prompt = rng.choice(PATHS)[: rng.choice([3, 17, 18, 20])] + [rng.randrange(60, 70) for _ in range(2)]
        world.submit(prompt, max_tokens=rng.randrange(1, 12), n=rng.choice([1, 1, 2]))
        world.tick(rng.randrange(1, 6))
    world.run()
    world.check_done()
    for outcome in world.outcomes.values():
        params = outcome.request.params
        alone = lone(repr(sorted(make.items())), repr((outcome.request.prompt, [("max_tokens", params.max_tokens)])))
        for choice in range(params.n):
            assert outcome.token_ids(choice) == alone.token_ids()
    sources = {"running", "device", "host"} if kind == "attention" else {"running", "host"}
    assert sources <= counts.keys(), counts
