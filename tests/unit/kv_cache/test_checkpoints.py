"""Memory that cannot be cut: its checkpoints, their number, and the sequences that start from them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests.unit.kv_cache.prefix_rig import KINDS, STATES, UNCUT, WHOLE, Rig, operations_of, text

from paceline.errors import DecodeError
from paceline.kv_cache import Copy, Load, LoadState, Save, SaveState
from paceline.testing.fake_backend import FakeCost, FakeState


@pytest.mark.parametrize("kind", UNCUT)
def test_checkpoints_serve_a_prompt_again_and_its_next_turn(kind: str) -> None:
    """States at a prompt's last token but one and at the turn's end hit; between them nothing does, and nothing is cut."""
    world = Rig(kind=kind)
    prompt = text(100)
    first = world.ask(prompt, 10)
    assert world.computed(world.ask(prompt)) == 1
    turn = world.ask([*prompt, *first.token_ids(), 1, 2, 3], 2)
    assert world.shared(turn) == [(109, "host")]
    assert world.recorder.prefilled[turn.request.key] == 1 + 3
    middle = world.ask([*prompt[:60], 1, 2, 3], 2)
    assert world.shared(middle) == []
    assert world.computed(middle) == 63 + 1
    within = world.ask([*prompt[:-1], 249, 1], 2)
    assert world.shared(within) == [(99, "host")]
    world.check_output_as_alone(turn, middle, within)
    world.check_done()


@pytest.mark.parametrize("kind", KINDS)
def test_a_next_turn_that_comes_at_once_finds_the_last_one(kind: str) -> None:
    """Submitted as soon as the completion has ended, before anything else was done, it goes on from there."""
    world = Rig(kind=kind)
    first = world.begin(text(100), 10)
    while first.terminal is None:
        world.tick()
    turn = world.ask([*text(100), *first.token_ids(), 1, 2, 3])
    assert world.computed(turn) == 1 + 3
    world.check_output_as_alone(turn)
    world.check_done()


def saved_states(done: list[Any]) -> Counter[int]:
    """How many states were saved after how many tokens."""
    return Counter(item.num_tokens for item in done if isinstance(item, SaveState))


@pytest.mark.parametrize("kind", UNCUT)
def test_a_state_that_is_in_host_memory_is_not_saved_again(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by choices that copied it nor by a prompt that loaded it, nor by one that ends there as well."""
    world = Rig(kind=kind)
    done = operations_of(world, monkeypatch)
    world.ask(text(100), 2, n=4)
    assert saved_states(done) == {99: 1, 101: 1}
    num_saved = sum(item.end - item.start for item in done if isinstance(item, Save))
    assert num_saved == 0 if kind in WHOLE else num_saved < 101 + 4
    world.ask(text(100), 2)
    assert saved_states(done) == {99: 1, 101: 1}


@pytest.mark.parametrize("kind", UNCUT)
def test_a_short_prompt_is_not_worth_a_checkpoint(kind: str) -> None:
    """It is computed in one go, and nothing of it is saved."""
    world = Rig(kind=kind)
    world.ask(text(10), 2)
    world.tick()
    assert world.scheduler.kv_cache.host_bytes == 0
    assert world.computed(world.ask(text(10))) == 10


@pytest.mark.parametrize(
    ("kind", "host_bytes"), [*((item, 3600) for item in (*STATES, "compressed")), ("recurrent", 600)]
)
def test_checkpoints_keep_to_the_budget(kind: str, host_bytes: int) -> None:
    """Least recently used first; the newest stays."""
    world = Rig(kind=kind, limits={"host_bytes": host_bytes})
    for seed in range(10):
        world.ask(text(100, seed))
    assert 0 < world.scheduler.kv_cache.host_bytes <= world.limits.host_bytes
    assert world.computed(world.ask(text(100, 9))) == 1
    assert world.computed(world.ask(text(100, 0))) == 100
    world.check_done()


@pytest.mark.parametrize("kind", UNCUT)
def test_requests_that_begin_alike_wait_for_the_first_and_start_from_its_place(kind: str) -> None:
    """24 with a cold prefix of 1,000 tokens, 8 at a time: it is computed once, whatever chunks end elsewhere."""
    world = Rig(kind=kind, num_cells=32768, limits={"num_slots": 8, "n_batch": 2048, "host_bytes": 10_000_000})
    prefix = text(1000)
    outcomes = [world.begin([*prefix, *text(20, seed)], 4) for seed in range(1, 25)]
    world.run()
    assert sum(world.recorder.prefilled.values()) == 1000 + 24 * 20
    assert [world.shared(outcome)[0][0] for outcome in outcomes[1:]] == [1000] * 23
    world.check_output_as_alone(*outcomes)
    world.check_done()


@pytest.mark.parametrize("kind", UNCUT)
def test_a_place_where_prompts_were_seen_to_branch_has_a_checkpoint(kind: str) -> None:
    """The second prompt that branches off there computes it and saves it for the third, which comes when nothing runs."""
    world = Rig(kind=kind, limits={"chunk_size": 128})
    prefix = text(300)
    for seed, hit in ((1, 0), (2, 0), (3, 300), (4, 300)):
        outcome = world.ask([*prefix, *text(30, seed)], 3)
        assert world.shared(outcome) == ([(hit, "host")] if hit else [])
        world.check_output_as_alone(outcome)
    world.check_done()


@pytest.mark.parametrize("kind", UNCUT)
def test_long_prompts_have_checkpoints_at_intervals(kind: str) -> None:
    """A prompt with a new branch starts from the last of them before its own."""
    world = Rig(kind=kind, num_cells=8192, limits={"host_bytes": 10_000_000})
    world.ask(text(100, 2))  # what a state takes is known then
    world.ask(text(3000))
    outcome = world.ask([*text(3000)[:1700], *text(30, 1)])
    assert world.shared(outcome) == [(1536, "host")]
    assert world.computed(outcome) == 1730 - 1536
    world.check_output_as_alone(outcome)
    world.check_done()


def test_the_first_long_prompt_has_few_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of a state is not known yet."""
    world = Rig(kind="hybrid", num_cells=16384, limits={"host_bytes": 10_000_000})
    done = operations_of(world, monkeypatch)
    world.ask(text(6000))
    assert sorted(saved_states(done)) == [4096, 5999, 6000]


def test_states_that_take_long_to_save_have_checkpoints_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saving takes at most a fiftieth of computing, except before a prompt's last token and at its end."""
    world = Rig(kind="hybrid", num_cells=16384, limits={"host_bytes": 10_000_000}, cost=FakeCost(saved_state_s=0.03))
    world.ask(text(100, 1))  # learns what saving takes, and computing: 0.001 s a token
    world.ask(text(100, 2))
    done = operations_of(world, monkeypatch)
    world.ask(text(6000))
    assert sorted(saved_states(done)) == [2048, 4096, 5999, 6000]


def test_large_states_fill_an_eighth_of_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The regular checkpoints of one prompt do."""
    world = Rig(kind="hybrid", num_cells=16384, limits={"host_bytes": 128 * 8 * 3})
    world.ask(text(100, 1))
    done = operations_of(world, monkeypatch)
    world.ask(text(6000))
    assert sorted(saved_states(done)) == [2048, 4096, 5999, 6000]


@pytest.mark.parametrize("kind", UNCUT)
def test_forks_of_a_running_conversation_start_where_it_is(kind: str) -> None:
    """With all of its generated tokens, by a copy; from an earlier place if it has gone on since."""
    world = Rig(kind=kind, limits={"num_slots": 5})
    source = world.begin(text(600), 40)
    while len(source.token_ids()) < 15:
        world.tick()
    (sequence,) = source.request.sequences
    there = sequence.token_ids[: sequence.num_computed_tokens]
    here = world.begin([*there, 200, 7, 9], 3)
    earlier = world.begin([*there[:-5], 201, 7, 9], 3)
    world.run()
    assert world.shared(here) == [(len(there), "running")]
    source_of = "host" if kind in WHOLE else "running"
    assert world.shared(earlier) == [(599, source_of)]
    world.check_output_as_alone(source, here, earlier)
    world.check_done()


@pytest.mark.parametrize("kind", STATES)
def test_the_cells_of_a_running_sequence_are_shared_beneath_a_checkpoint(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are copied, the state is loaded, and no cell is loaded; once it has ended, its cells come from host memory."""
    world = Rig(kind=kind)
    source = world.begin(text(600), 60)
    while len(source.token_ids()) < 15:
        world.tick()
    done = operations_of(world, monkeypatch)
    num_cells = world.scheduler.kv_cache.num_cells
    again = world.begin(text(600), 20)
    world.tick()
    assert [type(item) for item in done if not isinstance(item, SaveState)] == [Copy, LoadState]
    assert world.scheduler.kv_cache.num_cells == num_cells + 2
    world.run()
    assert not any(isinstance(item, Load) for item in done)
    third = world.ask(text(600), 20)
    assert [item.end - item.start for item in done if isinstance(item, Load)] == [512, 87]
    world.check_output_as_alone(source, again, third)
    world.check_done()


@pytest.mark.parametrize("kind", STATES)
def test_later_turns_save_the_cells_that_are_new(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part of a conversation in host memory is not saved again at the end of its next turn."""
    world = Rig(kind=kind)
    done = operations_of(world, monkeypatch)
    first = world.ask(text(100), 10)
    assert [(item.start, item.end) for item in done if isinstance(item, Save)] == [(0, 99), (99, 109)]
    done.clear()
    world.ask([*text(100), *first.token_ids(), *text(40, 3)], 10)
    assert min(item.start for item in done if isinstance(item, Save)) == 109
    assert sum(item.end - item.start for item in done if isinstance(item, Save)) == 1 + 40 + 9
    world.check_done()


@pytest.mark.parametrize("kind", STATES)
def test_a_state_that_cannot_be_loaded_is_computed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request computes its prompt itself; cells without a state are not left behind."""
    world = Rig(kind=kind)
    world.ask(text(100))

    def fail(*_: Any) -> None:
        raise DecodeError("cannot be loaded")

    monkeypatch.setattr(world.backend, "load_state", fail)
    again = world.ask(text(100), 5)
    assert world.computed(again) == 100 + 4
    world.check_output_as_alone(again)
    world.check_done()


@pytest.mark.parametrize("kind", STATES)
def test_a_checkpoint_whose_cells_are_gone_is_passed_over(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells could not be saved: the prompt is computed, and then everything is there."""
    world = Rig(kind=kind)

    def fail(*_: Any) -> FakeState:
        raise MemoryError("no host memory")

    with monkeypatch.context() as patched:
        patched.setattr(world.backend, "save", fail)
        world.ask(text(100))
    again = world.ask(text(100))
    assert world.computed(again) == 100
    assert world.computed(world.ask(text(100))) == 1
    world.check_output_as_alone(again)
    world.check_done()


@pytest.mark.parametrize("kind", UNCUT)
def test_a_prompt_that_is_paused_or_ends_is_not_waited_for(kind: str) -> None:
    """Sequences that waited for it begin, and compute their prefix once among them."""
    world = Rig(kind=kind, limits={"chunk_size": 64, "num_slots": 3})
    first = world.begin([*text(600), 1], 5)
    world.tick(2)
    others = [world.begin([*text(600), *text(9, seed)], 5) for seed in (2, 3)]
    world.tick()
    assert not any(other.is_started for other in others)
    world.cancel(first)
    world.run()
    assert all(other.terminal is not None for other in others)
    num_before = 64 * 3
    assert sum(world.recorder.prefilled.values()) <= num_before + 600 + 2 * 9
    world.check_output_as_alone(*others)
    world.check_done()


@pytest.mark.parametrize("kind", UNCUT)
def test_decoding_sequences_have_no_places(kind: str) -> None:
    """A tick that only decodes finds nothing to look through."""
    world = Rig(kind=kind)
    outcome = world.begin(text(300), 30)
    while not outcome.token_ids():
        world.tick()
    assert world.scheduler.kv_cache._places.places == {}
    world.run()
    world.check_done()
