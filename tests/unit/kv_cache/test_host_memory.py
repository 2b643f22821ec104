"""Contents of host memory, loads from it, and requests with a failing save, load or copy."""

from __future__ import annotations

import pytest
from tests.unit.kv_cache.prefix_rig import KINDS, STATES, TOKEN_BYTES, UNCUT, Rig, operations_of, text

from paceline.errors import DecodeError
from paceline.kv_cache import Load, Save
from paceline.kv_cache.offload import BLOCK_TOKENS as _PIECE
from paceline.streaming import FinishReason
from paceline.testing.fake_backend import FakeState


@pytest.mark.usefixtures("nothing_idle")
@pytest.mark.parametrize("budget", [100, 600, 700])
def test_a_prefix_that_host_memory_cannot_hold_leaves_the_device_nevertheless(
    budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that does not fit is tried once, and not again in every tick; the fitting part is the beginning of the prefix."""
    world = Rig(strategy="decode_maximal", limits={"host_bytes": budget * TOKEN_BYTES})
    done = operations_of(world, monkeypatch)
    prompt = text(2 * _PIECE)
    world.begin(text(10, 5), 30, cache_prompt=False)
    world.begin(prompt)
    world.run()
    assert len(world.scheduler.kv_cache._offloader) == 0
    assert len([item for item in done if isinstance(item, Save)]) <= 2
    assert world.scheduler.kv_cache.host_bytes <= budget * TOKEN_BYTES
    again = world.ask(prompt)
    assert world.computed(again) in ({2 * _PIECE} if budget == 100 else {_PIECE})
    world.check_output_as_alone(again)


@pytest.mark.usefixtures("nothing_idle")
def test_a_save_that_fails_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefix leaves the device unsaved, and is computed again by the next request for it."""
    world = Rig()
    num_tries = 0

    def fail(seq_id: int, start: int, end: int) -> FakeState:
        nonlocal num_tries
        num_tries += 1
        raise MemoryError("no host memory")

    monkeypatch.setattr(world.backend, "save", fail)
    world.ask(text(100))
    world.begin(text(10, 5), 30, cache_prompt=False)
    world.run()
    assert num_tries == 1
    assert len(world.scheduler.kv_cache._offloader) == 0
    assert world.computed(world.ask(text(100))) == 100
    world.check_done()


@pytest.mark.usefixtures("nothing_idle")
def test_the_least_recently_used_leaves_host_memory_first() -> None:
    """Three prefixes with memory for two: the most recently used stay, and the budget holds after every tick."""
    world = Rig(limits={"host_bytes": 210 * TOKEN_BYTES})
    paths = [text(100, seed) for seed in range(3)]

    def rest() -> None:
        world.begin(text(10, 77), 5, cache_prompt=False)
        world.run()
        assert len(world.scheduler.kv_cache._offloader) == 0
        assert world.scheduler.kv_cache.host_bytes <= world.limits.host_bytes

    for path in paths[:2]:
        world.ask(path)
        rest()
    assert world.computed(world.ask(paths[0])) == 1  # the first is the younger one now
    rest()
    world.ask(paths[2])
    rest()
    assert world.recorder.evicted_tokens["host"] >= 100
    assert world.computed(world.ask(paths[0])) == 1
    assert world.computed(world.ask(paths[1])) == 100


@pytest.mark.usefixtures("nothing_idle")
@pytest.mark.parametrize("kind", KINDS)
def test_what_host_memory_can_never_hold_evicts_nothing(kind: str) -> None:
    """A state larger than the whole budget is not taken in; existing blocks stay."""
    world = Rig(kind=kind, limits={"host_bytes": 250 * TOKEN_BYTES})

    def rest() -> None:
        world.ask(text(10, 77), 5, cache_prompt=False)

    world.ask(text(100))
    rest()
    world.ask(text(400, 1))
    rest()
    assert world.computed(world.ask(text(100))) == 1
    assert world.recorder.evicted_tokens["host"] == 0
    world.check_done()


@pytest.mark.usefixtures("nothing_idle")
def test_a_hot_prefix_does_not_keep_all_that_was_saved_with_it() -> None:
    """Large saves in one tick are in pieces, so that most of a prefix can be evicted while its beginning stays."""
    world = Rig(limits={"host_bytes": 2600 * TOKEN_BYTES})
    stem = text(100)

    def rest() -> None:
        world.ask(text(10, 77), 6, cache_prompt=False)

    world.ask([*stem, *text(1900, 1)])
    rest()
    for seed in range(2, 12):
        world.ask([*stem, *text(300, seed)])
        rest()
    nodes = [node for node in world.scheduler.kv_cache._tree.nodes() if node.block is not None]
    assert max(node.block.end - node.block.start for node in nodes if node.block is not None) <= _PIECE
    assert sum(node.end - node.start for node in nodes) >= 2600 - _PIECE - 400
    world.check_done()


def test_without_host_memory_nothing_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached prefixes are shared on the device, and gone once evicted."""
    world = Rig(num_cells=128, limits={"host_bytes": 0})
    done = operations_of(world, monkeypatch)
    world.ask(text(100))
    assert world.computed(world.ask(text(100))) == 1
    world.ask(text(100, 1))
    assert world.computed(world.ask(text(100))) == 100
    assert not any(isinstance(item, (Save, Load)) for item in done)
    world.check_done()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "recurrent"])
def test_what_was_evicted_from_the_device_is_loaded_from_host_memory(kind: str) -> None:
    """A prefix that was offloaded from a full device is loaded, not computed."""
    world = Rig(kind=kind, num_cells=128)
    world.ask(text(100))
    world.ask(text(100, 1))
    again = world.ask(text(100))
    assert world.shared(again) == [(99, "host")]
    assert world.computed(again) == 1
    world.check_output_as_alone(again)
    world.check_done()


def test_a_prefix_is_assembled_from_device_and_host() -> None:
    """The beginning is shared with a sequence on the device, the rest is loaded behind it."""
    world = Rig(num_cells=200)
    long = text(150)
    world.ask(long)
    world.ask(text(100, 1))  # the long one leaves
    holder = world.begin([*long[:40], 3], 60)
    world.tick(4)
    again = world.ask(long)
    assert world.shared(again) == [(149, "host")]
    assert world.computed(again) == 1
    world.check_output_as_alone(again, holder)
    world.check_done()


def test_a_load_has_to_hold_what_was_saved_beside_what_is_there() -> None:
    """A part of a large saved range is not loaded if the whole of it has no room for a moment, but computed."""
    world = Rig(num_cells=256)
    long = text(200)
    world.ask(long)
    runner = world.begin(text(150, 1), 60)
    world.tick(3)
    assert len(world.scheduler.kv_cache._offloader) == 0
    short = world.begin([*long[:20], 3, 4], 3)
    world.run()
    assert world.shared(short) == []
    assert world.recorder.num_preempted == 0
    for outcome in (runner, short):
        assert outcome.last().finish_reason is FinishReason.LENGTH, outcome.last().error
    world.check_output_as_alone(runner, short)
    world.check_done()


# ---- accidents


def broken_load(world: Rig, monkeypatch: pytest.MonkeyPatch, *, after: int = 0) -> None:
    """From the given one on, every load fails and adds nothing."""
    load, num_loads = world.backend.load, 0

    def fail(seq_id: int, data: FakeState, start: int, end: int) -> None:
        nonlocal num_loads
        num_loads += 1
        if num_loads > after:
            raise DecodeError("the state does not fit")
        load(seq_id, data, start, end)

    monkeypatch.setattr(world.backend, "load", fail)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_that_cannot_be_loaded_is_computed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that fails costs time and nothing else: no request fails, and none gets KV that is not there."""
    world = Rig(kind=kind, num_cells=128)
    world.ask(text(100))
    world.ask(text(100, 1))
    broken_load(world, monkeypatch)
    again = world.ask(text(100), 3)
    third = world.ask([*text(100), 4], 3)
    world.check_output_as_alone(again, third)
    world.check_done()


def test_a_load_that_fails_before_its_sequence_has_a_row_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without a row of the strategy in that tick, tokens that were not loaded count as not computed."""
    world = Rig(num_cells=160, strategy="decode_maximal", limits={"n_batch": 2, "chunk_size": 2, "num_slots": 3})
    world.ask(text(100))
    world.ask(text(100, 1))
    broken_load(world, monkeypatch)
    crowd = [world.begin(text(2, seed), 30, cache_prompt=False) for seed in (2, 3)]
    world.tick(4)
    again = world.begin(text(100), 3)
    world.run()
    world.check_output_as_alone(again, *crowd)
    world.check_done()


def test_a_load_that_fails_is_no_cached_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Usage counts the tokens really taken from memory."""
    world = Rig(num_cells=128)
    world.ask(text(100))
    world.ask(text(100, 1))
    broken_load(world, monkeypatch)
    usage = world.ask(text(100)).last().usage
    assert usage is not None
    assert (usage.cached_tokens, usage.cached_from) == (0, None)


def test_a_load_that_fails_later_takes_no_cached_token_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that a request began with from the cache stay counted when it is preempted and a later load fails."""
    world = Rig(num_cells=400, limits={"num_slots": 1})
    world.ask(text(100))
    outcome = world.begin([*text(100), 3], 40)
    world.tick(5)
    world.pause(outcome)
    world.ask(text(300, 3))
    broken_load(world, monkeypatch)
    world.pause(outcome, is_paused=False)
    world.run()
    assert world.recorder.num_preempted == 2, "by its rival, and by the load that failed"
    usage = outcome.last().usage
    assert usage is not None
    assert (usage.cached_tokens, usage.cached_from) == (100, "device")
    world.check_output_as_alone(outcome)


@pytest.mark.parametrize("kind", UNCUT)
def test_a_state_that_cannot_be_loaded_is_tried_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request that tried computes its prompt and saves a state in place of that one, from which the next requests start."""
    world = Rig(kind=kind)
    world.ask(text(300), 3)
    load_state, broken = world.backend.load_state, []

    def fail(seq_id: int, data: FakeState, num_tokens: int) -> None:
        broken[:] = broken or [data]  # the first that is loaded
        if data is broken[0]:
            broken.append(data)
            raise DecodeError("the state does not fit")
        load_state(seq_id, data, num_tokens)

    monkeypatch.setattr(world.backend, "load_state", fail)
    outcomes = [world.ask(text(300), 3) for _ in range(3)]
    assert [world.computed(outcome) for outcome in outcomes] == [300 + 2, 1 + 2, 1 + 2]
    assert len(broken) == 2
    world.check_output_as_alone(*outcomes)
    world.check_done()


@pytest.mark.parametrize("kind", ["attention", *STATES])
def test_cells_that_cannot_be_loaded_are_tried_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a state; the other blocks of the path stay."""
    world = Rig(kind=kind, num_cells=1536)
    prompt = text(2 * _PIECE + 76)
    world.ask(prompt, 3)
    world.ask(text(1400, 1))  # drives it off the device
    load, broken = world.backend.load, []

    def fail(seq_id: int, data: FakeState, start: int, end: int) -> None:
        if start == _PIECE and (not broken or data is broken[0]):  # what is saved in its place is equal
            broken[:] = [data]
            raise DecodeError("the range does not fit")
        load(seq_id, data, start, end)

    monkeypatch.setattr(world.backend, "load", fail)
    first = world.ask(prompt, 3)
    assert world.computed(first) == len(prompt) + 2
    assert broken
    world.ask(text(1400, 2))
    second = world.ask(prompt, 3)
    assert world.computed(second) == 1 + 2
    assert world.shared(second) == [(len(prompt) - 1, "host")]
    world.check_output_as_alone(first, second)
    world.check_done()


@pytest.mark.parametrize("kind", KINDS)
def test_a_load_that_fails_for_an_ended_request_leaves_no_prefix(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The strategy fails in the very tick of the failing load: the tokens to be loaded belong to no sequence."""
    world = Rig(kind=kind, num_cells=160)
    world.ask(text(100))
    world.ask(text(100, 1))
    broken_load(world, monkeypatch)
    world.faults.next_plans.append(RuntimeError("no idea"))
    world.begin(text(100))
    world.tick()
    monkeypatch.undo()
    again = world.ask(text(100), 3)
    world.check_output_as_alone(again)
    world.check_done()


def test_a_load_that_fails_in_an_embedding_tick_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text and prompt ticks alternate; the loads of a tick count, whichever kind it is."""
    world = Rig(num_cells=160)
    world.ask(text(100))
    world.ask(text(100, 1))
    broken_load(world, monkeypatch)
    for _ in range(6):
        world.submit_embedding(["a text"])
    again = world.begin(text(100), 3)
    world.run()
    world.check_output_as_alone(again)
    world.check_done()


@pytest.mark.usefixtures("nothing_idle")
def test_a_load_that_fails_half_way_leaves_no_hole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three pieces the second fails: afterwards the records of the device match its content."""
    world = Rig()
    prompt = text(2 * _PIECE + 76)
    world.ask(prompt)
    world.begin(text(30, 5), 20)
    world.run()
    broken_load(world, monkeypatch, after=1)
    again = world.ask(prompt, 3)
    world.check_output_as_alone(again)
    assert world.computed(world.ask(prompt)) == 1
    world.check_done()


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_that_fails_is_computed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice that could not share computes its prompt itself."""
    world = Rig(kind=kind)

    def fail(from_seq_id: int, to_seq_id: int, num_tokens: int) -> None:
        raise DecodeError("cannot be copied")

    monkeypatch.setattr(world.backend, "copy", fail)
    outcome = world.ask(text(50), 3, n=2)
    world.check_output_as_alone(outcome)
    assert world.computed(outcome) == 2 * (50 + 2)
    world.check_done()
