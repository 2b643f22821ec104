"""Exports from memory to a file: all of it, a part a tick, whatever happens meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine_world import Outcome, World
from tests.unit.kv_cache.prefix_rig import KINDS, STATES, TOKEN_BYTES, UNCUT, Rig, slow_saves, text

from paceline.testing.fake_backend import FakeMemory, FakeState


def exported(world: World, key: int) -> list[FakeState]:
    """Return the exported ranges, which follow each other from the first token on."""
    states = world.exported[key]
    assert states is not None
    at = 0
    for state in states:
        assert state.start == at
        at += len(state.hashes)
    return states


def finish(world: World, outcome: Outcome) -> None:
    """Tick until it has ended; others go on."""
    while outcome.terminal is None:
        world.tick()


def hashes(states: list[FakeState]) -> list[int]:
    return [value for state in states for value in state.hashes]


def computed(token_ids: list[int]) -> list[int]:
    """Return the tokens that a memory holds after computing them."""
    memory = FakeMemory(len(token_ids), 1, "attention", 1)
    memory.append(0, 0, token_ids)
    return memory.hashes(0)


@pytest.mark.parametrize("kind", KINDS)
def test_an_idle_engine_exports_everything_at_once(kind: str) -> None:
    """With memory saved in parts all computed tokens; with whole states the longest."""
    world = Rig(kind=kind)
    world.ask(text(700), 5)
    key = world.export(text(700))
    world.tick()
    assert hashes(exported(world, key))[-1] == computed(text(700))[len(hashes(exported(world, key))) - 1]
    assert len(hashes(exported(world, key))) == (700 if kind == "attention" else 699)
    world.run()
    world.check_done()


@pytest.mark.usefixtures("anything_idle")
def test_a_long_prefix_is_exported_in_parts_while_another_request_generates(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tick saves more than fits it; in the end all is exported, and the decoding request has the output it has alone."""
    world = Rig(limits={"num_slots": 3})
    counts = slow_saves(world, monkeypatch)
    world.ask(text(200, 1))
    world.run()
    world.export(text(200, 1))
    world.tick()  # now it is known what saving takes
    runner = world.begin(text(20, 3), 300)
    finish(world, world.begin(text(600, 2)))
    del counts[:-1]
    key = world.export(text(600, 2))
    while world.exported[key] is None:
        world.tick()
    assert runner.terminal is None
    assert max(counts) <= 32
    assert hashes(exported(world, key)) == computed(text(600, 2))
    world.run()
    world.check_output_as_alone(runner)
    world.check_done()


def test_a_prompt_that_is_being_computed_is_not_waited_for() -> None:
    """The prefix at the time of the request for the export goes out."""
    world = Rig(limits={"chunk_size": 100})
    (sequence,) = world.begin(text(1000), 3).request.sequences
    world.tick(2)
    num_there = sequence.num_computed_tokens
    assert 0 < num_there < 900
    key = world.export(text(1000))
    world.tick(2)
    assert hashes(exported(world, key)) == computed(text(1000))[:num_there]
    world.run()
    world.check_done()


@pytest.mark.parametrize("budget", [0, 100, 600, 700])
def test_what_host_memory_cannot_hold_does_not_go_out(budget: int) -> None:
    """The export ends: the beginning that fits is reported, or nothing."""
    world = Rig(limits={"host_bytes": budget * TOKEN_BYTES})
    world.ask(text(1024))
    key = world.export(text(1024))
    world.run()
    assert hashes(exported(world, key)) == computed(text(1024))[: 512 if budget >= 512 else 0]
    world.check_done()


@pytest.mark.parametrize("is_generating", [False, True])
def test_a_save_that_fails_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, is_generating: bool) -> None:
    """The export then has nothing."""
    world = Rig()
    world.ask(text(100))

    def fail(*_: Any) -> FakeState:
        raise MemoryError("no host memory")

    monkeypatch.setattr(world.backend, "save", fail)
    if is_generating:
        world.begin(text(20, 3), 50)
    key = world.export(text(100))
    world.run()
    assert exported(world, key) == []
    world.check_done()


def test_a_prefix_that_leaves_the_device_meanwhile_is_exported_nevertheless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pressure takes its source away in the middle: it has gone to host memory by then."""
    world = Rig(num_cells=700, limits={"num_slots": 3})
    slow_saves(world, monkeypatch)
    world.ask(text(200, 1))
    world.export(text(200, 1))
    world.run()
    runner = world.begin(text(20, 3), 150)
    finish(world, world.begin(text(400, 2)))
    key = world.export(text(400, 2))
    world.tick(2)
    late = world.begin(text(300, 4), 3)
    assert runner.terminal is None
    world.run()
    assert hashes(exported(world, key)) == computed(text(400, 2))
    world.check_output_as_alone(late)
    world.check_done()


def test_a_range_that_was_saved_with_more_than_is_wanted_goes_out_as_it_is_wanted() -> None:
    """Saved ranges cannot be cut, so the part on the device is saved once more."""
    world = Rig()
    world.ask(text(300))
    world.export(text(300))
    world.run()
    other = [*text(300)[:120], *text(40, 9)]
    world.ask(other)
    for prompt, count in ((other, 160), (text(300)[:50], 50)):
        key = world.export(prompt)
        world.run()
        assert hashes(exported(world, key)) == computed(prompt)[:count]


@pytest.mark.usefixtures("nothing_idle")
@pytest.mark.parametrize(("length", "parting"), [(700, 600), (300, 120), (1400, 1030), (1100, 30)])
@pytest.mark.parametrize("kind", ["attention", *STATES])
def test_a_prompt_that_parts_within_a_saved_block_is_exported_whole(kind: str, length: int, parting: int) -> None:
    """A part is cut from another prompt's block in host memory; it is loaded elsewhere, and the other goes out too."""
    world, elsewhere = Rig(kind=kind, num_cells=8192), Rig(kind=kind)
    prompt, other = text(length), [*text(length)[:parting], *text(90, 9)]
    num_last = 0 if kind == "attention" else 1  # of states the one before the last token goes out
    for item in (prompt, other):
        world.ask(item, 3)
    world.ask(text(20, 3), 20, cache_prompt=False)  # what is idle goes to host memory meanwhile
    exports = []
    for item in (other, prompt):
        key = world.export(item)
        world.run()
        exports.append(exported(world, key))
        assert hashes(exports[-1]) == computed(item)[: len(item) - num_last]
    elsewhere.bring_in(other, exports[0])
    again = elsewhere.ask(other, 5)
    assert elsewhere.shared(again) == [(len(other) - 1, "host")]
    elsewhere.check_output_as_alone(again)
    world.check_done()


@pytest.mark.parametrize("kind", STATES)
def test_a_block_that_cannot_be_cut_goes_out_up_to_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a prompt with a state but without its cells nothing goes out; no one waits for it."""
    world = Rig(kind=kind)
    world.ask(text(300))
    other = [*text(300)[:120], *text(40, 9)]
    world.ask(other)
    world.begin(text(30, 4), 30)

    def fail(*_: Any) -> FakeState:
        raise MemoryError("no cells")

    monkeypatch.setattr(world.backend, "cut", fail)
    key = world.export(other)
    world.run()
    assert exported(world, key) == []
    world.check_done()


@pytest.mark.parametrize("kind", ["attention", *STATES])
def test_a_block_for_which_there_are_no_cells_now_is_not_waited_for(kind: str) -> None:
    """While a request has nearly all cells the export ends, with the part that needs no cutting."""
    world = Rig(kind=kind, num_cells=1024, limits={"num_slots": 2})
    world.ask(text(300))
    other = [*text(300)[:120], *text(40, 9)]
    world.ask(other)
    running = world.begin(text(850, 4), 100)
    world.tick(4)
    key = world.export(other)
    world.tick(3)
    assert world.exported[key] is not None
    assert running.terminal is None
    world.run()
    world.check_output_as_alone(running)
    again = world.export(other)
    world.run()
    assert len(hashes(exported(world, again))) >= len(other) - 1
    world.check_done()


def test_other_namespaces_export_nothing() -> None:
    """Prefixes of another salt and of requests without cache are not exported."""
    world = Rig()
    world.ask(text(100), cache_salt="a")
    running = world.begin(text(100), 20, cache_prompt=False)
    world.tick(3)
    keys = [world.export(text(100)), world.export(text(100), cache_salt="b"), world.export(text(100), tenant="a")]
    world.run()
    assert [exported(world, key) for key in keys] == [[], [], []]
    assert running.terminal is not None


@pytest.mark.parametrize("kind", KINDS)
def test_what_went_out_comes_in_elsewhere(kind: str) -> None:
    """Another engine that takes it in computes one token, with the same output."""
    world, other = Rig(kind=kind), Rig(kind=kind)
    world.ask(text(700), 2)
    key = world.export(text(700))
    world.run()
    states = exported(world, key)
    imported = other.bring_in(text(700), states)
    other.run()
    assert other.imported[imported] == states
    again = other.ask(text(700), 5)
    assert other.computed(again) == 1 + 4
    assert other.shared(again) == [(699, "host")]
    other.check_output_as_alone(again)
    other.check_done()


@pytest.mark.parametrize("kind", UNCUT)
def test_a_prefix_without_a_state_exports_nothing(kind: str) -> None:
    """If memory cannot be cut there is no part of a state."""
    world = Rig(kind=kind)
    world.ask(text(100))
    key = world.export(text(50))
    world.run()
    assert exported(world, key) == []
