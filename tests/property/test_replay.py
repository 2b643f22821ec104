"""For any request and any time of its worker's death, the reader gets the same as without the death."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine_world import World
from tests.isolated_world import IsolatedWorld, ReaderOutcome
from tests.media_prompts import Picture, prompt_of

from paceline.engine.core import Cancel
from paceline.errors import EngineStopped
from paceline.output import OutputProcessor, Vocabulary
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.streaming import FinishReason, StreamChunk, TokenLogprobs

VOCABULARY = Vocabulary(
    pieces=(b"a", b"b", b"ab", b"ba", b"\xe2", b"\x82", b"\xac", b"\xe2\x82", "€".encode(), b"", b"<end>"),
    pieces_special=(b"a", b"b", b"ab", b"ba", b"\xe2", b"\x82", b"\xac", b"\xe2\x82", "€".encode(), b"<x>", b"<end>"),
    eog_ids=frozenset({10}),
)
stops = st.lists(st.sampled_from(["ab", "aba", "€", "b€", "bbb", "a€b", "aaaa"]), max_size=3, unique=True)


@dataclass
class Feed:
    """An output processor fed as ticks do: after each token a chunk, if there is one, and the last one at the end."""

    processor: OutputProcessor
    chunks: list[StreamChunk]
    num_delivered: int | None = None
    undelivered: list[TokenLogprobs] = field(default_factory=list)

    def feed(self, tokens: list[int]) -> FinishReason | None:
        for token in tokens:
            reason = self.processor.take(token, TokenLogprobs(-float(token)))
            if reason is not None:
                self.processor.finish()
                self.chunks.append(self.processor.last_chunk(reason, None))
                return reason
            chunk = self.processor.chunk()
            if chunk is None:
                self.undelivered += self.processor.latest_logprobs(1)
                continue
            self.chunks.append(chunk)
            self.num_delivered, self.undelivered = (
                self.processor.num_generated,
                list(self.processor.latest_logprobs(99)),
            )
        return None


def joined(chunks: list[Any]) -> Any:
    first = chunks[0]
    for later in chunks[1:]:
        assert later.index == first.index + len(first.token_ids)
        first = first.joined(later)
    return first


@settings(max_examples=300)
@given(
    tokens=st.lists(st.integers(0, 9), min_size=1, max_size=30),
    stop=stops,
    min_tokens=st.integers(0, 6),
    cut=st.integers(0, 30),
    special=st.booleans(),
    interval=st.sampled_from([1, 1, 2, 5, 1000]),
)
def test_an_output_resumed_anywhere_is_the_same(
    tokens: list[int], stop: list[str], min_tokens: int, cut: int, special: bool, interval: int
) -> None:
    """In the middle of a character, of a stop or of an interval: the chunks join to the undisturbed text."""
    params = SamplingParams(stop=stop, min_tokens=min_tokens, max_tokens=None, logprobs=0)
    options = RequestOptions(special=special, interval=interval)
    script = [*tokens, 10]

    def new() -> OutputProcessor:
        return OutputProcessor(params, VOCABULARY, 0, options, "echo: ")

    undisturbed = Feed(new(), [])
    undisturbed.feed(script)
    first = Feed(new(), [])
    if first.feed(script[:cut]) is None:
        second = Feed(new(), first.chunks)
        second.processor.resume(script[:cut], first.num_delivered, first.undelivered)
        second.feed(script[cut:])
    assert joined(first.chunks) == joined(undisturbed.chunks)


requests = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(3, 255), min_size=1, max_size=90),
        "max_tokens": st.one_of(st.none(), st.integers(0, 60)),
        "n": st.integers(1, 3),
        "temperature": st.sampled_from([0.0, 1.0]),
        "seed": st.integers(0, 2**64 - 1),
        "stop": st.lists(st.sampled_from([" e", "th", "e", "tao", "\n", ", o"]), max_size=2, unique=True),
        "min_tokens": st.integers(0, 0),
        "ignore_eos": st.just(False),
        "logprobs": st.one_of(st.none(), st.integers(0, 2)),
        "prompt_logprobs": st.one_of(st.none(), st.integers(0, 1)),
        "echo": st.booleans(),
        "mirostat": st.sampled_from([0, 2]),
        "special": st.booleans(),
        "interval": st.sampled_from([1, 1, 3, 1000]),
        "priority": st.integers(0, 2),
    }
)


def play(wanted: list[dict[str, Any]], deaths: set[int], options: dict[str, Any]) -> list[ReaderOutcome]:
    world = IsolatedWorld(**{"eos_every": 60, "num_cells": 1024, **options})
    outcomes = [world.submit(item["prompt"], **{k: v for k, v in item.items() if k != "prompt"}) for item in wanted]
    world.run(lambda number: world.die() if number in deaths else None)
    return outcomes


@settings(max_examples=60, deadline=None)
@given(
    wanted=st.lists(requests, min_size=1, max_size=5),
    deaths=st.sets(st.integers(0, 120), max_size=12),
    options=st.sampled_from([{}, {"kind": "recurrent"}, {"num_seq_ids": 2}, {"num_cells": 300, "num_seq_ids": 6}]),
)
def test_deaths_change_nothing_in_the_output(
    wanted: list[dict[str, Any]], deaths: set[int], options: dict[str, Any]
) -> None:
    """Ids, texts, logprobs, reasons, stops and counts equal those of an undisturbed engine."""
    outcomes, undisturbed = play(wanted, deaths, options), play(wanted, set(), options)
    for outcome, other in zip(outcomes, undisturbed, strict=True):
        assert outcome.summary() == other.summary()
        assert outcome.is_released
        assert outcome.num_started == other.num_started <= 1
        assert outcome.terminal is not None
        assert other.terminal is not None
        assert outcome.terminal.usage is not None
        assert other.terminal.usage is not None
        assert outcome.terminal.usage.completion_tokens == other.terminal.usage.completion_tokens
        assert outcome.terminal.usage.prompt_tokens == other.terminal.usage.prompt_tokens


@settings(max_examples=60, deadline=None)
@given(
    wanted=st.lists(requests, min_size=1, max_size=4),
    happenings=st.lists(
        st.tuples(st.integers(0, 60), st.sampled_from(["die", "cancel", "pause", "go on"]), st.integers(1, 4)),
        max_size=12,
    ),
)
def test_deaths_amid_cancels_and_pauses_end_every_stream_once(
    wanted: list[dict[str, Any]], happenings: list[tuple[int, str, int]]
) -> None:
    """Every output is the beginning of the undisturbed output; each ends once, and nothing is left open."""
    expected = [item.summary() for item in play(wanted, set(), {})]
    world = IsolatedWorld(eos_every=60, num_cells=1024)
    outcomes = [world.submit(item["prompt"], **{k: v for k, v in item.items() if k != "prompt"}) for item in wanted]

    def happen(number: int) -> None:
        for _, what, key in [happening for happening in happenings if happening[0] == number]:
            if what == "die":
                world.die()
            elif what == "cancel":
                world.worker.inbox.put(Cancel(key))
            else:
                world.pause(key, is_paused=what == "pause")
        if number > 60:
            for key in range(1, 5):
                world.pause(key, is_paused=False)

    world.run(happen)
    for outcome, whole in zip(outcomes, expected, strict=True):
        assert outcome.is_released
        for (ids, text, _, _, reasons, _, _), (all_ids, all_text, *_) in zip(outcome.summary(), whole, strict=True):
            assert ids == all_ids[: len(ids)]
            assert len(reasons) == 1
            if FinishReason.CANCELLED not in reasons:
                assert text == all_text


@settings(max_examples=60, deadline=None)
@given(one=requests, after=st.integers(1, 60))
def test_what_the_front_ends_by_itself_brings_held_back_text(one: dict[str, Any], after: int) -> None:
    """A request that is cancelled while there is no worker has the output of one that is cancelled in an engine."""
    prompt, max_tokens = one.pop("prompt"), one.pop("max_tokens")
    ended = []
    for is_front in (True, False):
        world = IsolatedWorld(eos_every=60, num_cells=1024)
        outcome = world.submit(prompt, max_tokens=max_tokens or 1, **one)
        for _ in range(after):
            world.tick()
        if outcome.terminal is None and is_front:
            world.end(outcome, FinishReason.CANCELLED)
        elif outcome.terminal is None:
            world.worker.inbox.put(Cancel(outcome.request.key))
            world.tick()
        world.worker.close()
        assert outcome.is_released
        ended.append(outcome)
    assert ended[0].summary() == ended[1].summary()
    usages = [item.terminal.usage for item in ended if item.terminal is not None]
    assert usages[0] is not None
    assert usages[1] is not None
    assert usages[0].completion_tokens == usages[1].completion_tokens


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["attention", "hybrid", "recurrent"]), st.lists(st.integers(0, 12), max_size=3))
def test_deaths_change_nothing_of_what_is_said_about_pictures(kind: str, deaths: list[int]) -> None:
    """Items go to the next worker with the request: their cells, positions and kind of attention."""
    parts = ("what is", Picture("cat", 70, 9), "and", Picture("dog", 30, 30, is_causal=False), "there?")
    undisturbed, disturbed = IsolatedWorld(kind=kind), IsolatedWorld(kind=kind)
    outcomes = [
        world.submit(**prompt_of(*parts), max_tokens=9, ignore_eos=True, n=2, temperature=1, seed=3)
        for world in (undisturbed, disturbed)
    ]
    undisturbed.run()
    disturbed.run(lambda number: disturbed.die() if number in deaths else None)
    assert outcomes[0].summary() == outcomes[1].summary()
    alone = World().alone(**prompt_of(*parts), max_tokens=9, ignore_eos=True, n=2, temperature=1, seed=3)
    assert [list(item[0]) for item in outcomes[1].summary()] == [alone.token_ids(0), alone.token_ids(1)]


def test_a_request_after_the_engine_gave_up_goes_on_in_the_next_worker() -> None:
    """A worker that takes nothing any more is about to exit; its reader does not get an error that there is no engine."""
    world = IsolatedWorld(eos_every=10**9)
    before = world.submit([65, 66], max_tokens=5)
    world.worker.inbox.close()
    late = world.submit([67, 68], max_tokens=5)
    world.worker.sink.end_all(EngineStopped("the engine's thread has ended"))
    assert world.worker.link.received == []
    world.die()
    world.run()
    for outcome in (before, late):
        assert outcome.terminal is not None
        assert outcome.terminal.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("interval", [1, 3, 9])
def test_an_interval_changed_before_a_death_costs_no_token(interval: int) -> None:
    """At whatever tick the interval changes and the worker dies after it: each token once, as if nothing had died."""
    script = IsolatedWorld()
    undisturbed = script.submit([65, 66, 67], max_tokens=20, interval=6, ignore_eos=True)
    script.run()
    expected = undisturbed.summary()[0][:2]
    for change in range(1, 10):
        for death in range(change, change + 3):
            world = IsolatedWorld()
            outcome = world.submit([65, 66, 67], max_tokens=20, interval=6, ignore_eos=True)

            def disturb(tick: int, world: IsolatedWorld = world, change: int = change, death: int = death) -> None:
                if tick == change:
                    world.set_interval(1, interval)
                if tick == death:
                    world.die()

            world.run(disturb)
            assert outcome.summary()[0][:2] == expected, (change, death)
