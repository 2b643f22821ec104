"""Too few cells: the preempted sequence, its saved KV, and its continuation."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.unit.kv_cache.prefix_rig import KINDS, Rig, learn_to_save, operations_of, slow_saves, text

from paceline.kv_cache import Save
from paceline.streaming import FinishReason
from paceline.testing.fake_backend import FakeCost


@pytest.mark.parametrize(("kind", "most"), [("attention", 8), ("sliding_window", 8), ("hybrid", 8), ("compressed", 8)])
def test_preempted_requests_resume_from_host_memory(kind: str, most: int) -> None:
    """Eight requests that each need half of the cells all finish, and nearly nothing is computed twice."""
    world = Rig(kind=kind, num_cells=256, limits={"num_slots": 8})
    outcomes = [world.begin(text(60, seed), 64) for seed in range(8)]
    world.run()
    needed = 8 * (60 + 63)
    assert world.recorder.num_preempted > 0
    assert sum(world.recorder.computed.values()) - needed <= most
    world.check_output_as_alone(*outcomes)
    world.check_done()


def test_a_request_preempted_for_a_slow_reader_waits_for_it() -> None:
    """It takes no slot before its reader is back, though one is free."""
    world = Rig(limits={"num_slots": 1})
    paused = world.begin(text(40), 30)
    world.tick(5)
    world.pause(paused)
    world.ask(text(50, 3))
    assert world.scheduler.running == ()
    assert world.scheduler.num_waiting == 1
    world.pause(paused, is_paused=False)
    world.run()
    world.check_output_as_alone(paused)
    world.check_done()


def test_the_next_victim_is_saved_before_it_is_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part a tick while cells run out, so that the tick in which it does gives others no pause."""
    world = Rig(num_cells=600, limits={"num_slots": 2})
    counts = slow_saves(world, monkeypatch)
    learn_to_save(world)
    both = [world.begin(text(250, seed), 100) for seed in range(2)]
    del counts[:-1]
    while not world.recorder.num_preempted:
        world.tick()
    world.tick()
    assert max(counts) <= 32
    assert sum(counts) >= 250
    world.run()
    assert world.recorder.num_preempted == 1
    assert sum(map(world.computed, both)) <= 2 * (250 + 99) + 1
    world.check_output_as_alone(*both)
    world.check_done()


@pytest.mark.usefixtures("anything_idle")
def test_an_idle_prefix_is_offloaded_before_its_cells_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many idle cells may stay: cells run out, and it goes in parts before they have."""
    world = Rig(num_cells=600)
    counts = slow_saves(world, monkeypatch)
    learn_to_save(world)
    world.ask(text(300, 1))
    del counts[:-1]
    runner = world.begin(text(200, 2), 250)
    world.run()
    assert max(counts) <= 32
    assert sum(counts) == 300
    assert world.recorder.num_preempted == 0
    assert world.shared(world.ask(text(300, 1))) == [(299, "host")]
    world.check_output_as_alone(runner)
    world.check_done()


@pytest.mark.usefixtures("anything_idle")
def test_with_many_free_cells_nothing_is_saved_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither running sequences nor cached prefixes are saved."""
    world = Rig(num_cells=1000, limits={"num_slots": 3})
    done = operations_of(world, monkeypatch)
    for seed in range(3):
        world.begin(text(150, seed), 60)
    world.run()
    assert len(world.scheduler.kv_cache._offloader) == 3
    assert not any(isinstance(item, Save) for item in done)


def test_a_request_without_cache_is_not_saved_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves nothing in host memory, and is computed again."""
    world = Rig(num_cells=600, limits={"num_slots": 2})
    done = operations_of(world, monkeypatch)
    both = [world.begin(text(250, seed), 100, cache_prompt=False) for seed in range(2)]
    world.run()
    assert world.recorder.num_preempted == 1
    assert not any(isinstance(item, Save) for item in done)
    world.check_output_as_alone(*both)


@pytest.mark.parametrize(("saved_token_s", "is_saved"), [(0.0, True), (0.0009, True), (0.005, False)])
def test_preempted_requests_are_recomputed_where_that_is_faster(saved_token_s: float, is_saved: bool) -> None:
    """A token takes 1 ms to compute; whichever is cheaper, the output is the same."""
    cost = FakeCost(base_s=0.0, token_s=0.001, saved_token_s=saved_token_s)
    world = Rig(num_cells=300, limits={"num_slots": 2, "host_bytes": 100_000}, cost=cost)
    learn_to_save(world)
    both = [world.begin(text(120, seed), 70) for seed in range(2)]
    world.run()
    assert world.recorder.num_preempted == 1
    num_again = sum(world.recorder.computed[begin.request.key] for begin in both) - 2 * (120 + 69)
    assert num_again <= 2 if is_saved else num_again > 120
    world.check_output_as_alone(*both)
    world.check_done()


def test_without_host_memory_preempted_requests_are_recomputed() -> None:
    """Their output is the same as alone."""
    world = Rig(num_cells=256, limits={"num_slots": 8, "host_bytes": 0})
    outcomes = [world.begin(text(60, seed), 64) for seed in range(8)]
    world.run()
    assert sum(world.recorder.computed.values()) > 8 * (60 + 63)
    world.check_output_as_alone(*outcomes)
    world.check_done()


@pytest.mark.parametrize("kind", KINDS)
def test_a_preempted_choice_of_several_resumes_where_it_was(kind: str) -> None:
    """Paused and out of the way, with a sibling that starts over: it takes its own state up again."""
    world = Rig(kind=kind, num_cells=400, limits={"num_slots": 2})
    outcome = world.begin(text(60), 40, n=2)
    world.tick(20)
    world.pause(outcome)
    rival = world.begin(text(50, 3), 5)
    world.tick(10)
    assert rival.terminal is not None
    world.pause(outcome, is_paused=False)
    world.run()
    assert world.recorder.prefilled[outcome.request.key] <= 59 + 2 + 2
    world.check_output_as_alone(outcome, rival)
    world.check_done()


@pytest.mark.parametrize("kind", KINDS)
def test_a_scored_prompt_that_was_preempted_is_scored_to_its_end(kind: str) -> None:
    """Its sibling has the prompt computed, and it still needs each of its logits."""
    world = Rig(kind=kind, limits={"num_slots": 2, "max_scored": 2})
    outcome = world.begin(text(60), 20, n=2, prompt_logprobs=0)
    world.tick(4)
    first = next(sequence for sequence in world.scheduler.running if sequence.choice == 0)
    assert first.is_scoring
    world.scheduler._admission.preempt(world.clock.now())
    if first.slot is not None:  # the sibling it was; now it is this one's turn
        world.scheduler._admission.preempt(world.clock.now())
    world.run()
    scored = [token for chunk in outcome.of_choice(0) for token in chunk.prompt_logprobs]
    assert len(scored) == 59
    world.check_output_as_alone(outcome)
    world.check_done()


def test_a_long_prompt_does_not_wait_for_its_own_prefix() -> None:
    """If the prefix that it continues has to be evicted for it, it waits for the saved copy, and computes little."""
    world = Rig(num_cells=200)
    history = text(110)
    world.ask([*history, *text(50, 1)])
    again = world.ask([*history, *text(50, 2)])
    assert world.computed(again) == 50
    world.check_output_as_alone(again)
    world.check_done()


@pytest.mark.parametrize("num_seq_ids", [2, 3, 4])
def test_sequence_ids_do_not_run_out(num_seq_ids: int) -> None:
    """With one id more than there are slots, hundreds of distinct prompts, forks and hits pass through."""
    world = Rig(num_seq_ids=num_seq_ids, limits={"num_slots": num_seq_ids - 1})
    outcomes = [world.begin(text(40 + seed % 7, seed // 2 % 23), 1 + seed % 3, n=1 + seed % 2) for seed in range(120)]
    world.run()
    assert all(outcome.last(0).finish_reason is FinishReason.LENGTH for outcome in outcomes)
    sources = Counter(source for _, _, _, source in world.recorder.shared)
    assert {"device", "host"} <= set(sources), sources
    world.check_done()
