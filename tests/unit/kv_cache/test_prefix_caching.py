"""Prefix caching in the scheduler: which are shared, what is computed, what is cached where, and what pressure does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any

import pytest
from tests.engine_world import Outcome, World

from paceline.errors import DecodeError
from paceline.kv_cache import Copy, KVCache, Load, LoadState, Save, SaveState
from paceline.kv_cache.offload import BLOCK_TOKENS as _PIECE
from paceline.observability.instruments import Instrument
from paceline.scheduling.strategies import DecodeMaximal
from paceline.scheduling.telemetry import TickRecord
from paceline.scheduling.view import SchedulerView, TokenAllocation
from paceline.streaming import FinishReason
from paceline.testing.fake_backend import FakeCost
from paceline.testing.fake_memory import FakeState

STATES = ["sliding_window", "hybrid"]  # cells, and a state beside them
WHOLE = ["recurrent", "compressed"]
UNCUT = [*STATES, *WHOLE]
KINDS = ["attention", *UNCUT]
TOKEN_BYTES = 8  # of the fake's saved tokens


class Recorder(Instrument):
    """Records what the scheduler reports of memory."""

    def __init__(self) -> None:
        self.computed: Counter[int] = Counter()
        self.prefilled: Counter[int] = Counter()
        self.shared: list[tuple[int, int, int, str]] = []
        self.unstable: list[tuple[int, int, int]] = []
        self.evicted_tokens: Counter[str] = Counter()
        self.num_preempted = 0

    def tick_finished(self, record: TickRecord) -> None:
        for row in record.rows:
            self.computed[row.key] += row.num_tokens
            self.prefilled[row.key] += row.num_tokens - row.num_decode

    def prefix_shared(self, key: int, choice: int, num_tokens: int, source: str) -> None:
        self.shared.append((key, choice, num_tokens, source))

    def prefix_instability(self, key: int, num_cached: int, num_matched: int, now_s: float) -> None:
        self.unstable.append((key, num_cached, num_matched))

    def evicted(self, num_tokens: int, source: str, now_s: float) -> None:
        self.evicted_tokens[source] += num_tokens

    def preempted(self, key: int, choice: int, num_computed_tokens: int, now_s: float) -> None:
        self.num_preempted += 1


class Rig(World):
    """A world with a recorder, large ticks and many cells, unless options say otherwise."""

    def __init__(self, *, limits: dict[str, Any] | None = None, **options: Any) -> None:
        self.recorder = Recorder()
        wide = {"n_batch": 512, "chunk_size": 512, "host_bytes": 1_000_000}
        super().__init__(
            instruments=(self.recorder,), limits={**wide, **(limits or {})}, **{"num_cells": 4096, **options}
        )

    def ask(self, prompt: str | list[int], num_tokens: int = 1, **options: Any) -> Outcome:
        """A request that ends with exactly so many tokens, run to its end."""
        outcome = self.begin(prompt, num_tokens, **options)
        self.run()
        assert outcome.last(0).finish_reason is FinishReason.LENGTH
        return outcome

    def begin(self, prompt: str | list[int], num_tokens: int = 1, **options: Any) -> Outcome:
        return self.submit(prompt, max_tokens=num_tokens, ignore_eos=True, **options)

    def computed(self, outcome: Outcome) -> int:
        return self.recorder.computed[outcome.request.key]

    def shared(self, outcome: Outcome, choice: int = 0) -> list[tuple[int, str]]:
        key = outcome.request.key
        return [(count, source) for k, c, count, source in self.recorder.shared if (k, c) == (key, choice)]

    def check_output_as_alone(self, *outcomes: Outcome) -> None:
        """Each ended by itself, with what the same request gives in a world of its own."""
        for outcome in outcomes:
            request = outcome.request
            options: dict[str, Any] = {"max_tokens": request.params.max_tokens, "n": request.params.n}
            other = self.alone(request.prompt, ignore_eos=True, **options)
            for choice in range(request.params.n):
                assert outcome.token_ids(choice) == other.token_ids(choice)


def text(length: int, seed: int = 0) -> list[int]:
    """Tokens that begin like no others of another seed."""
    return [(seed * 31 + 7 * place * place + place) % 250 for place in range(length)]


@pytest.fixture
def nothing_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no idle cell stay on the device once a tick runs."""
    monkeypatch.setattr(KVCache, "_idle_limit", lambda self: 0)


# ---- what is shared


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_prompt_again_computes_one_token(kind: str) -> None:
    """Of a prompt that is known in full its last token is computed, and reported as the only one."""
    world = Rig(kind=kind)
    prompt = text(100)
    first, second = world.ask(prompt), world.ask(prompt)
    assert world.computed(first) == 100
    assert world.computed(second) == 1
    source = "device" if kind == "attention" else "host"
    usage = second.last().usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.cached_tokens, usage.cached_from) == (100, 99, source)
    assert first.last().usage.cached_tokens == 0  # type: ignore[union-attr]
    assert first.last().usage.cached_from is None  # type: ignore[union-attr]
    assert first.token_ids() == second.token_ids()
    world.check_done()


def test_forks_of_a_running_conversation_compute_what_is_new() -> None:
    """Four that go on from where another just is, its generated tokens included, share with it while it runs."""
    world = Rig(limits={"num_slots": 5})
    source = world.begin(text(600), 40)
    while len(source.token_ids()) < 15:
        world.tick()
    history = source.request.prompt + source.token_ids()[:12]
    forks = [world.begin([*history, 200 + place, 7, 9], 3) for place in range(4)]
    world.run()
    assert source.last().finish_reason is FinishReason.LENGTH
    for fork in forks:
        assert fork.last().usage.cached_from == "running"  # type: ignore[union-attr]
        assert fork.last().usage.cached_tokens == 612  # type: ignore[union-attr]
        assert world.computed(fork) == 3 + 2  # its own three, and two of the three that it generates
    assert world.computed(source) == 600 + 39
    world.check_output_as_alone(source, *forks)
    world.check_done()


def test_a_new_prompt_looks_only_at_owners_along_its_match() -> None:
    """What others have generated is not copied for it, however many they are."""
    world = Rig()
    one, other = world.begin(text(100, 1), 300), world.begin(text(100, 2), 300)
    world.tick(20)
    cache, (first,), (second,) = world.scheduler.kv_cache, one.request.sequences, other.request.sequences
    fork = world.begin([*first.token_ids, 7, 9], 3)
    world.tick(2)
    assert cache._running[first].end > 110
    assert cache._running[second].end == 100
    world.run()
    assert world.shared(fork) == [(len(fork.request.prompt) - 3, "running")]
    world.check_output_as_alone(one, other, fork)


@pytest.mark.parametrize("chunk_size", [512, 100, 37, 20])
@pytest.mark.parametrize("strategy", ["paced", "balanced"])
def test_a_prefix_of_many_concurrent_requests_is_computed_once(strategy: str, chunk_size: int) -> None:
    """24 requests with a cold prefix of 1,024 tokens, 8 at a time, whatever its chunks leave for the last of them."""
    limits = {"num_slots": 8, "chunk_size": chunk_size, "n_batch": 2048}
    world = Rig(num_cells=16384, strategy=strategy, limits=limits)
    prefix = text(1024)
    outcomes = [world.begin([*prefix, *text(20, seed)], 4) for seed in range(1, 25)]
    world.run()
    assert sum(world.recorder.prefilled.values()) == 1024 + 24 * 20
    world.check_output_as_alone(outcomes[0], outcomes[23])
    world.check_done()


@pytest.mark.parametrize("kind", KINDS)
def test_choices_compute_their_prompt_once(kind: str) -> None:
    """Four choices of one request: the prompt but for its last token is computed by the first of them."""
    world = Rig(kind=kind)
    outcome = world.ask(text(200), 2, n=4)
    assert world.recorder.prefilled[outcome.request.key] == 199 + 4
    world.check_output_as_alone(outcome)
    world.check_done()


@pytest.mark.parametrize(
    ("kind", "num_cells"), [("attention", 2048), ("attention", 700), *((one, 2048) for one in UNCUT)]
)
def test_every_later_turn_computes_its_new_tokens(kind: str, num_cells: int) -> None:
    """12 conversations of 4 turns on 4 slots: from device or host, all earlier turns are cached."""
    world = Rig(kind=kind, num_cells=num_cells, limits={"chunk_size": 64})
    histories = [text(40, seed) for seed in range(12)]
    for turn in range(4):
        outcomes = [world.begin(history, 10) for history in histories]
        world.run()
        for index, outcome in enumerate(outcomes):
            new = 40 if turn == 0 else 5 + 1  # the last completion's last token was never computed
            assert world.recorder.prefilled[outcome.request.key] <= new + 1, (turn, index, world.shared(outcome))
            histories[index] = outcome.request.prompt + outcome.token_ids() + text(5, 100 + turn)
    world.check_output_as_alone(*outcomes)
    world.check_done()


def test_a_request_without_cache_neither_reads_nor_writes() -> None:
    """It computes all, finds nothing and leaves nothing; others are served before and after as if it had not been."""
    world = Rig()
    prompt, other = text(100), text(100, 1)
    world.ask(prompt)
    outcome = world.ask(prompt, cache_prompt=False)
    assert world.computed(outcome) == 100
    assert outcome.last().usage.cached_tokens == 0  # type: ignore[union-attr]
    held = world.scheduler.kv_cache.num_cells
    world.ask(other, cache_prompt=False)
    world.tick()
    assert world.scheduler.kv_cache.num_cells == held
    assert world.computed(world.ask(other)) == 100
    assert world.computed(world.ask(prompt)) == 1
    running = world.begin(text(100, 2), 30, cache_prompt=False)
    world.tick(3)
    assert world.computed(world.ask(text(100, 2))) == 100
    assert running.terminal is not None
    world.check_done()


@pytest.mark.parametrize("kind", KINDS)
def test_choices_of_a_request_without_cache_share_among_themselves(kind: str) -> None:
    """Its own choices are no others."""
    world = Rig(kind=kind)
    outcome = world.ask(text(200), 2, n=3, cache_prompt=False)
    assert world.recorder.prefilled[outcome.request.key] == 199 + 3
    world.ask(text(200))
    assert world.recorder.shared[-1][0] == outcome.request.key  # and no other request
    world.check_done()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "other",
    [{"cache_salt": "s"}, {"tenant": "t"}, {"lora": (("one", 1.0),)}, {"lora": (("one", 0.5),)}, {"tenant": "s"}],
)
def test_salts_tenants_and_adapters_share_nothing(kind: str, other: dict[str, Any]) -> None:
    """Neither what another namespace has on the device, nor in host memory, nor what runs, nor by waiting for it."""
    world = Rig(kind=kind, adapters=("one",))
    prompt = text(100)
    plain = world.ask(prompt)
    running = world.begin(prompt, 20)
    foreign = world.begin(prompt, 20, **other)
    world.tick()
    assert foreign.is_started  # it waits for no other request
    world.run()
    assert world.computed(foreign) == 100 + 19
    assert world.shared(foreign) == []
    again = world.ask(prompt, **other)
    assert world.computed(again) == 1
    assert again.token_ids() == foreign.token_ids()[:1]
    assert plain.token_ids() == running.token_ids()[:1]
    world.check_done()


def test_the_tenant_and_the_salt_are_distinguished() -> None:
    """A salt that reads like another's tenant opens nothing."""
    world = Rig()
    world.ask(text(50), tenant="a", cache_salt="b")
    for other in ({"tenant": "b", "cache_salt": "a"}, {"tenant": "ab"}, {"cache_salt": "ab"}, {"tenant": "a"}):
        assert world.computed(world.ask(text(50), **other)) == 50
    assert world.computed(world.ask(text(50), tenant="a", cache_salt="b")) == 1


def test_a_tiny_match_destroys_nothing() -> None:
    """A prompt that shares three tokens with a long prefix, and runs beside it, leaves the prefix whole."""
    world = Rig(limits={"num_slots": 1})
    prompt = text(300)
    world.ask(prompt)
    tiny = world.ask([*prompt[:3], 249, 248], 20)
    assert world.shared(tiny) == [(3, "device")]
    assert world.computed(world.ask(prompt)) == 1
    world.check_output_as_alone(tiny)
    world.check_done()


def test_a_prompt_that_is_scored_reads_nothing_and_serves_others() -> None:
    """Every prompt token's logits are wanted, so all are computed; later requests find them."""
    world = Rig(limits={"max_scored": 32})
    world.ask(text(60))
    scored = world.ask(text(60), prompt_logprobs=0)
    assert world.computed(scored) == 60
    assert sum(len(chunk.prompt_logprobs) for chunk in scored.chunks) == 59
    other = world.ask(text(70, 3), prompt_logprobs=0)
    assert world.computed(other) == 70
    assert world.computed(world.ask(text(70, 3))) == 1
    world.check_done()


# ---- waiting for a sequence that computes the prefix


def promised(**options: Any) -> tuple[Rig, Outcome, Outcome]:
    """A long prompt that is computed in small chunks, and another request that waits for it."""
    world = Rig(**{"limits": {"chunk_size": 16, "n_batch": 16}, **options})
    first = world.begin(text(200), 20, timeout_s=5.0)
    second = world.begin([*text(200), 5], 5)
    world.tick(3)
    assert first.is_started
    assert not second.is_started
    return world, first, second


def test_a_request_that_waits_for_a_prefix_starts_when_it_is_there() -> None:
    """It computes nothing of the prefix itself."""
    world, _, second = promised()
    world.run()
    assert world.shared(second) == [(200, "running")]
    assert world.computed(second) == 1 + 4
    world.check_output_as_alone(second)


def cancelled(world: Rig, first: Outcome) -> None:
    world.cancel(first)


def paused(world: Rig, first: Outcome) -> None:
    world.pause(first)


def slow(world: Rig, first: Outcome) -> None:
    world.end_slow(first)


def poisoned(world: Rig, first: Outcome) -> None:
    world.faults.poisonous.add(first.request.key)


def too_late(world: Rig, first: Outcome) -> None:
    world.clock.advance(10.0)


@pytest.mark.parametrize("accident", [cancelled, slow, poisoned, too_late])
def test_a_broken_promise_blocks_no_request(accident: Callable[[Rig, Outcome], None]) -> None:
    """Whatever ends the computing request, the waiting one goes on from what is computed."""
    world, first, second = promised()
    accident(world, first)
    world.run()
    assert first.last().finish_reason not in (FinishReason.LENGTH, FinishReason.END)
    assert second.last().finish_reason is FinishReason.LENGTH
    ((num_tokens, _),) = world.shared(second)
    assert 16 <= num_tokens < 200
    world.check_output_as_alone(second)
    world.check_done()


def test_no_request_waits_for_a_paused_one() -> None:
    """Its reader may never come back."""
    world, first, second = promised()
    world.pause(first)
    world.run()
    assert first.terminal is None
    assert second.last().finish_reason is FinishReason.LENGTH
    world.pause(first, is_paused=False)
    world.run()
    world.check_output_as_alone(first, second)
    world.check_done()


def test_a_promiser_that_is_preempted_blocks_no_request() -> None:
    """A preempted request and the one that waited for it resume one after the other, and both end."""
    world, first, second = promised(num_cells=230)
    world.pause(first)
    rival = world.begin(text(60, 9), 100, priority=5)
    world.tick()
    world.pause(first, is_paused=False)
    world.run()
    assert world.recorder.num_preempted > 0
    for outcome in (first, second, rival):
        assert outcome.last().finish_reason is FinishReason.LENGTH
    world.check_output_as_alone(first, second, rival)
    world.check_done()


def test_a_promise_ends_where_the_prompt_does() -> None:
    """A prompt that a running one will perhaps generate is no promise; what differs early is none either."""
    world = Rig(limits={"chunk_size": 16, "n_batch": 32})
    world.begin(text(100), 20)
    longer = world.begin(text(400), 2)
    short = world.begin([*text(20), 249, 248], 2)
    world.tick(2)
    assert short.is_started  # 20 are too few to wait for
    assert not longer.is_started
    world.run()
    assert world.shared(longer) == [(100, "running")]
    assert world.shared(short) == []


def test_many_that_wait_for_one_another_all_end() -> None:
    """Nested prefixes, submitted at once in the worst order on two slots, all end with the output they have alone."""
    world = Rig(limits={"num_slots": 2, "chunk_size": 16, "n_batch": 32})
    lengths = [300, 100, 200, 150, 250, 40, 299, 301]
    outcomes = [world.begin(text(length), 4) for length in lengths]
    world.run()
    assert sum(world.recorder.prefilled.values()) <= 301 + 40 * len(lengths)
    world.check_output_as_alone(*outcomes)
    world.check_done()


# ---- host memory


def saved_blocks(world: Rig) -> set[int]:
    """The sizes in bytes of what is in host memory."""
    blobs = {node.block for node in world.scheduler.kv_cache._tree.nodes() if node.block is not None}
    return {blob.data.nbytes for blob in blobs}


def operations_of(world: Rig, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All that is carried out from now on."""
    done: list[Any] = []
    carry_out = world.executor._carry_out

    def note(operation: Any, output: Any) -> None:
        done.append(operation)
        carry_out(operation, output)

    monkeypatch.setattr(world.executor, "_carry_out", note)
    return done


@pytest.mark.usefixtures("nothing_idle")
def test_idle_prefixes_are_offloaded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a sequence generates, a tick moves one piece; the prefix leaves the device with the last, and comes back whole."""
    world = Rig(strategy="decode_maximal")
    done = operations_of(world, monkeypatch)
    prompt = text(2 * _PIECE + 76)
    runner = world.begin(text(30, 5), 40)
    world.begin(prompt)
    for _ in range(15):
        before = len(done)
        world.tick()
        assert sum(one.end - one.start for one in done[before:] if isinstance(one, Save)) <= _PIECE
    assert runner.terminal is None
    saves = [(one.start, one.end) for one in done if isinstance(one, Save)]
    assert saves == [(0, _PIECE), (_PIECE, 2 * _PIECE), (2 * _PIECE, 2 * _PIECE + 76)]
    assert len(world.scheduler.kv_cache._offloader) == 0
    assert world.scheduler.kv_cache.host_bytes == TOKEN_BYTES * len(prompt)
    again = world.begin(prompt, 1)
    world.run()
    assert world.shared(again) == [(len(prompt) - 1, "host")]
    assert world.computed(again) == 1
    world.check_output_as_alone(again, runner)
    world.check_done()


def slow_saves(world: Rig, monkeypatch: pytest.MonkeyPatch, token_s: float = 0.001) -> list[int]:
    """Make a token take so long to save from now on; return a list of how many are saved, tick by tick."""
    save, tick, counts = world.backend.save, world.engine.tick, [0]

    def save_slowly(seq_id: int, start: int, end: int) -> FakeState:
        world.clock.advance(token_s * (end - start))
        counts[-1] += end - start
        return save(seq_id, start, end)

    def count(*_: Any) -> Any:
        counts.append(0)
        return tick()

    monkeypatch.setattr(world.backend, "save", save_slowly)
    monkeypatch.setattr(world.engine, "tick", count)
    return counts


class KnownCost:
    """A tick of 10 ms, and so much for each cell that a token attends to."""

    def __init__(self, per_cell_s: float) -> None:
        self.per_cell_s = per_cell_s

    def seconds(self, num_tokens: int, num_cells: int, num_outputs: int = 1) -> float:
        return 0.01 + num_tokens * num_cells * self.per_cell_s

    def observe(self, num_tokens: int, num_cells: int, seconds: float, num_outputs: int = 1) -> None:
        """It knows."""


def learn_to_save(world: Rig) -> None:
    """Now it is known what that takes."""
    world.ask(text(40, 99))
    world.export(text(40, 99))
    world.run()


class OneStream:
    """What a dozen prefixes leave on the device while one stream decodes beside them, by what computing and saving take."""

    def __init__(self, per_cell_s: float = 0.0, **options: Any) -> None:
        self.world = world = Rig(strategy="decode_maximal", num_seq_ids=20, **options)
        cost: Any = KnownCost(per_cell_s)
        world.scheduler.cost_model = world.scheduler.kv_cache._cost = cost
        world.scheduler.kv_cache.update_idle_limit()

    def save_a_few(self) -> None:
        """Now it is known for sure what that takes."""
        for seed in range(4):
            self.world.ask(text(40, 90 + seed))
            self.world.export(text(40, 90 + seed))
            self.world.run()

    def num_idle(self) -> int:
        """Compute the prefixes, decode, and return how many cells are idle; then all streams end."""
        world = self.world
        for seed in range(12):
            world.ask(text(120, seed))
        runner = world.begin(text(10, 77), 100, cache_prompt=False)
        world.tick(80)
        assert runner.terminal is None
        num_idle = world.scheduler.kv_cache.num_cells - runner.request.sequences[0].num_computed_tokens
        world.run()
        world.check_output_as_alone(runner)
        return num_idle


@pytest.mark.parametrize(("per_cell_s", "most"), [(0.0, 10_000), (1e-6, 1000), (2e-6, 500), (1e-5, 256)])
def test_where_saving_is_dear_as_many_idle_cells_stay_as_slow_no_decode_down(
    per_cell_s: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A skipped cell costs a fifth of one that is attended to; all of them a fiftieth of a lone stream's tick; 256 are free."""
    one = OneStream(per_cell_s)
    slow_saves(one.world, monkeypatch)
    one.save_a_few()
    num_idle = one.num_idle()
    assert num_idle <= most
    assert num_idle >= min(12, most // 120) * 120
    one.world.check_done()


@pytest.mark.parametrize("share", [0.015, 0.025])
def test_idle_prefixes_leave_where_saving_takes_less_than_a_fiftieth_of_computing(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever idle cells seem to cost, 256 cost nothing; what left is found again in host memory."""
    one = OneStream()
    slow_saves(one.world, monkeypatch, share * one.world.scheduler.kv_cache._token_s)
    one.save_a_few()
    num_idle = one.num_idle()
    assert num_idle <= 256 if share < 0.02 else num_idle >= 12 * 120
    again = one.world.ask(text(120, 0))
    assert one.world.shared(again) == [(119, "host" if share < 0.02 else "device")]
    assert one.world.computed(again) == 1
    one.world.check_done()


@pytest.mark.parametrize(("host_tokens", "is_left"), [(0, True), (1000, True), (5000, False)])
def test_idle_prefixes_stay_where_host_memory_has_no_room(host_tokens: int, is_left: bool) -> None:
    """To leave early they evict nothing, and are not lost where there is no host memory."""
    one = OneStream(limits={"host_bytes": host_tokens * TOKEN_BYTES})
    num_idle = one.num_idle()
    assert num_idle + one.world.scheduler.kv_cache.host_bytes // TOKEN_BYTES >= 12 * 120
    assert num_idle > 400 if is_left else num_idle <= 256
    assert one.world.recorder.evicted_tokens["host"] == 0
    assert [one.world.computed(one.world.ask(text(120, seed))) for seed in range(6)] == [1] * 6
    one.world.check_done()


def test_host_memory_many_times_as_large_as_the_devices_may_be_full() -> None:
    """Else idle cells would slow down every server that has run for long."""
    one = OneStream(num_cells=400, limits={"host_bytes": 1600 * TOKEN_BYTES})
    one.num_idle()
    for seed in range(20, 40):
        one.world.ask(text(100, seed))
    assert one.world.recorder.evicted_tokens["host"] > 0
    runner = one.world.begin(text(10, 77), 30, cache_prompt=False)
    one.world.tick(12)
    assert runner.terminal is None
    assert one.world.scheduler.kv_cache.num_cells <= 256 + runner.request.sequences[0].num_computed_tokens
    one.world.run()
    one.world.check_done()


def many_idle(monkeypatch: pytest.MonkeyPatch, prompts: Many[list[int]], **options: Any) -> tuple[Rig, Outcome]:
    """A world in which a stream decodes beside these prefixes, all on the device; from now on they are too many."""
    world = Rig(strategy="decode_maximal", num_seq_ids=30, **options)
    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "_idle_limit", lambda self: 10_000)
        for prompt in prompts:
            world.ask(prompt)
        runner = world.begin(text(10, 77), 100, cache_prompt=False)
        world.tick()
    assert len(world.scheduler.kv_cache._offloader) == len(prompts)
    return world, runner


def test_as_many_prefixes_leave_in_a_tick_as_fit_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them would not be enough where many short requests end."""
    world, runner = many_idle(monkeypatch, [text(100, seed) for seed in range(12)])
    done = operations_of(world, monkeypatch)
    world.tick(2)
    assert sum(one.end - one.start for one in done if isinstance(one, Save)) >= 2 * _PIECE - 64
    assert len(world.scheduler.kv_cache._offloader) <= 12 - 5
    world.tick(2)
    assert world.scheduler.kv_cache.num_cells <= 256 + runner.request.sequences[0].num_computed_tokens
    world.run()
    world.check_output_as_alone(runner)
    world.check_done()


@pytest.mark.usefixtures("nothing_idle")
def test_what_prefixes_share_is_saved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though they leave at once, whether their common beginning fits a tick or not."""
    for length in (100, _PIECE + 100):
        common = text(length, 1)
        prompts = [[*common, *text(30, 5 + seed)] for seed in range(4)]
        world, runner = many_idle(monkeypatch, prompts)
        done = operations_of(world, monkeypatch)
        world.run()
        assert runner.terminal is not None
        assert sum(one.end - one.start for one in done if isinstance(one, Save)) == length + 4 * 30
        assert [world.computed(world.ask(prompt)) for prompt in prompts] == [1] * 4
        world.check_done()


def test_a_prefix_that_is_used_while_it_leaves_is_saved_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """What host memory has of it may be gone by then, and is saved again."""
    world, runner = many_idle(monkeypatch, [text(300, 1), text(300, 2)])
    limit = [400]
    monkeypatch.setattr(KVCache, "_idle_limit", lambda self: limit[0])
    world.tick()
    limit[0] = 10_000
    again = world.begin([*text(300, 1)[:200], *text(20, 9)], 2)
    world.tick(12)
    assert world.shared(again) == [(200, "device")]
    world.scheduler.kv_cache._host.forget(lambda _: True, 0.0)
    limit[0] = 0
    world.tick(8)
    assert runner.terminal is None
    assert len(world.scheduler.kv_cache._offloader) == 0
    world.run()
    assert world.computed(world.ask(text(300, 1))) == 1
    assert world.computed(world.ask(text(300, 2))) == 1
    world.check_done()


def test_where_cells_run_out_one_prefix_goes_at_a_time() -> None:
    """Also without host memory, where nothing has to be saved of the others."""
    world = Rig(num_cells=600, num_seq_ids=12, limits={"host_bytes": 0, "num_slots": 2})
    for seed in range(5):
        world.ask(text(99, seed))
    runner = world.begin(text(40, 77), 120, cache_prompt=False)
    world.run()
    assert runner.terminal is not None
    assert world.recorder.num_preempted == 0
    assert len(world.scheduler.kv_cache._offloader) >= 3
    assert world.computed(world.ask(text(99, 4))) == 1
    world.check_done()


def test_a_request_that_waits_for_cells_gets_them_in_parts_while_another_generates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tick saves what fits into a part of it; the paused one keeps its slot, and nothing is computed twice."""
    monkeypatch.setattr(KVCache, "_idle_limit", lambda self: 10_000)
    world = Rig(num_cells=600, limits={"num_slots": 3})
    counts = slow_saves(world, monkeypatch)
    known = text(200, 1)
    world.ask(known)
    world.ask(text(430, 2))  # the first has to make way: now it is known what that takes
    paused, runner = world.begin(text(20, 3), 60), world.begin(text(20, 4), 60)
    world.tick(4)
    world.pause(paused)
    world.tick()
    del counts[:-1]
    waiting = world.begin(known, 3)
    while waiting.terminal is None:
        world.tick()
    assert runner.terminal is None, "it was not held up"
    assert max(counts) <= 32
    assert sum(counts) == 430
    assert world.recorder.num_preempted == 0
    world.pause(paused, is_paused=False)
    world.run()
    again = world.ask(text(430, 2))
    assert world.computed(again) == 1
    assert world.shared(again) == [(429, "host")]
    world.check_output_as_alone(paused, runner, waiting, again)
    world.check_done()


def test_without_a_generating_sequence_there_are_no_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all are paused or waiting, what is in the way goes at once."""
    monkeypatch.setattr(KVCache, "_idle_limit", lambda self: 10_000)
    world = Rig(num_cells=600)
    counts = slow_saves(world, monkeypatch)
    world.ask(text(200, 1))
    world.ask(text(430, 2))
    waiting = world.begin(text(300, 5), 2)
    world.tick()
    assert counts[-1] == 430
    assert waiting.is_started
    world.run()
    world.check_output_as_alone(waiting)


def test_what_moves_leaves_less_of_a_tick_to_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The strategy is given what is left of the time between two tokens, and at least half of it."""
    targets: list[float] = []

    class Asked(DecodeMaximal):
        def plan(self, view: SchedulerView, budget: int) -> Many[TokenAllocation]:
            targets.append(view.itl_target_s)
            return super().plan(view, budget)

    world = Rig(strategy=Asked(), limits={"itl_target_s": 0.4})
    slow_saves(world, monkeypatch)
    monkeypatch.setattr(KVCache, "_idle_limit", lambda self: 0)
    runner = world.begin(text(20, 4), 200)
    for seed in range(3):
        world.begin(text(100, 5 + seed))
        world.tick(10)
    assert {round(target, 3) for target in targets} >= {0.4, 0.36}
    assert min(targets) >= 0.2
    world.run()
    world.check_output_as_alone(runner)


@pytest.mark.usefixtures("nothing_idle")
@pytest.mark.parametrize("budget", [100, 600, 700])
def test_a_prefix_that_host_memory_cannot_hold_leaves_the_device_nevertheless(
    budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not fit is tried once, and not again in every tick; what fits is the beginning of the prefix."""
    world = Rig(strategy="decode_maximal", limits={"host_bytes": budget * TOKEN_BYTES})
    done = operations_of(world, monkeypatch)
    prompt = text(2 * _PIECE)
    world.begin(text(10, 5), 30, cache_prompt=False)
    world.begin(prompt)
    world.run()
    assert len(world.scheduler.kv_cache._offloader) == 0
    assert len([one for one in done if isinstance(one, Save)]) <= 2
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
    """A state larger than the whole budget is not taken in; what was there stays."""
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
    assert not any(isinstance(one, (Save, Load)) for one in done)
    world.check_done()


@pytest.mark.parametrize("kind", [one for one in KINDS if one != "recurrent"])
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
    """A part of a large saved range is not loaded where the whole of it has no room for a moment, but computed."""
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
    """Whether or not the strategy has a row for it in that tick, what was not loaded counts as not computed."""
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
    """Usage counts what was really taken from memory."""
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
    """The request that tried computes its prompt and saves a state in place of that one, from which the next ones start."""
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
    assert [world.computed(one) for one in outcomes] == [300 + 2, 1 + 2, 1 + 2]
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
    """The strategy fails in the very tick in which the load does: what was to be loaded belongs to no sequence."""
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


# ---- pressure


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


def test_an_idle_prefix_is_offloaded_before_its_cells_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many idle cells may stay: cells run out, and it goes in parts before they have."""
    world = Rig(num_cells=600)
    monkeypatch.setattr(KVCache, "_idle_limit", lambda self: 10_000)
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


def test_with_many_free_cells_nothing_is_saved_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither running sequences nor cached prefixes are saved."""
    world = Rig(num_cells=1000, limits={"num_slots": 3})
    monkeypatch.setattr(KVCache, "_idle_limit", lambda self: 10_000)
    done = operations_of(world, monkeypatch)
    for seed in range(3):
        world.begin(text(150, seed), 60)
    world.run()
    assert len(world.scheduler.kv_cache._offloader) == 3
    assert not any(isinstance(one, Save) for one in done)


def test_a_request_without_cache_is_not_saved_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves nothing in host memory, and is computed again."""
    world = Rig(num_cells=600, limits={"num_slots": 2})
    done = operations_of(world, monkeypatch)
    both = [world.begin(text(250, seed), 100, cache_prompt=False) for seed in range(2)]
    world.run()
    assert world.recorder.num_preempted == 1
    assert not any(isinstance(one, Save) for one in done)
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
    num_again = sum(world.recorder.computed[one.request.key] for one in both) - 2 * (120 + 69)
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
    first = next(one for one in world.scheduler.running if one.choice == 0)
    assert first.is_scoring
    world.scheduler._admission.preempt(world.clock.now())
    if first.slot is not None:  # the sibling it was; now it is this one's turn
        world.scheduler._admission.preempt(world.clock.now())
    world.run()
    scored = [one for chunk in outcome.of_choice(0) for one in chunk.prompt_logprobs]
    assert len(scored) == 59
    world.check_output_as_alone(outcome)
    world.check_done()


def test_a_long_prompt_does_not_wait_for_its_own_prefix() -> None:
    """Where the prefix that it continues has to be evicted for it, it waits for the saved copy, and computes little."""
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
    assert all(one.last(0).finish_reason is FinishReason.LENGTH for one in outcomes)
    sources = Counter(source for _, _, _, source in world.recorder.shared)
    assert {"device", "host"} <= set(sources), sources
    world.check_done()


# ---- memory that cannot be cut


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
    return Counter(one.num_tokens for one in done if isinstance(one, SaveState))


@pytest.mark.parametrize("kind", UNCUT)
def test_a_state_that_is_in_host_memory_is_not_saved_again(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by choices that copied it nor by a prompt that loaded it, nor by one that ends there as well."""
    world = Rig(kind=kind)
    done = operations_of(world, monkeypatch)
    world.ask(text(100), 2, n=4)
    assert saved_states(done) == {99: 1, 101: 1}
    num_saved = sum(one.end - one.start for one in done if isinstance(one, Save))
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
    ("kind", "host_bytes"), [*((one, 3600) for one in (*STATES, "compressed")), ("recurrent", 600)]
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
    assert [world.shared(one)[0][0] for one in outcomes[1:]] == [1000] * 23
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
    """A prompt that branches off where none did before starts from the last of them before its own."""
    world = Rig(kind=kind, num_cells=8192, limits={"host_bytes": 10_000_000})
    world.ask(text(100, 2))  # what a state takes is known then
    world.ask(text(3000))
    outcome = world.ask([*text(3000)[:1700], *text(30, 1)])
    assert world.shared(outcome) == [(1536, "host")]
    assert world.computed(outcome) == 1730 - 1536
    world.check_output_as_alone(outcome)
    world.check_done()


def test_the_first_long_prompt_has_few_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a state takes is not known yet."""
    world = Rig(kind="hybrid", num_cells=16384, limits={"host_bytes": 10_000_000})
    done = operations_of(world, monkeypatch)
    world.ask(text(6000))
    assert sorted(saved_states(done)) == [4096, 5999, 6000]


def test_states_that_take_long_to_save_have_checkpoints_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saving takes at most a fiftieth of computing, but for those before a prompt's last token and at its end."""
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
    """With all that it has generated, by a copy; from an earlier place where it has gone on since."""
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
    assert [type(one) for one in done if not isinstance(one, SaveState)] == [Copy, LoadState]
    assert world.scheduler.kv_cache.num_cells == num_cells + 2
    world.run()
    assert not any(isinstance(one, Load) for one in done)
    third = world.ask(text(600), 20)
    assert [one.end - one.start for one in done if isinstance(one, Load)] == [512, 87]
    world.check_output_as_alone(source, again, third)
    world.check_done()


@pytest.mark.parametrize("kind", STATES)
def test_later_turns_save_the_cells_that_are_new(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What host memory has of a conversation is not saved again at the end of its next turn."""
    world = Rig(kind=kind)
    done = operations_of(world, monkeypatch)
    first = world.ask(text(100), 10)
    assert [(one.start, one.end) for one in done if isinstance(one, Save)] == [(0, 99), (99, 109)]
    done.clear()
    world.ask([*text(100), *first.token_ids(), *text(40, 3)], 10)
    assert min(one.start for one in done if isinstance(one, Save)) == 109
    assert sum(one.end - one.start for one in done if isinstance(one, Save)) == 1 + 40 + 9
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
    """Those that waited for it begin, and compute their prefix once among them."""
    world = Rig(kind=kind, limits={"chunk_size": 64, "num_slots": 3})
    first = world.begin([*text(600), 1], 5)
    world.tick(2)
    others = [world.begin([*text(600), *text(9, seed)], 5) for seed in (2, 3)]
    world.tick()
    assert not any(one.is_started for one in others)
    world.cancel(first)
    world.run()
    assert all(one.terminal is not None for one in others)
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
    assert world.scheduler.kv_cache._places._places == {}
    world.run()
    world.check_done()


# ---- prompts that change in the middle


def test_a_long_prompt_that_matches_a_little_is_reported() -> None:
    """Between a tenth and a half of a cached prefix of 64 tokens or more: once a request, with both lengths."""
    world = Rig()
    prompt = text(200)
    world.ask(prompt)
    changed = world.ask([*prompt[:60], *text(140, 1)], n=3)
    assert world.recorder.unstable == [(changed.request.key, 200, 60)]
    assert world.metrics.snapshot().number("paceline_prefix_instability_total") == 1


@pytest.mark.parametrize(("known", "same"), [(200, 19), (200, 101), (200, 200), (63, 20), (200, 0)])
def test_follow_ups_and_unrelated_prompts_are_not_reported(known: int, same: int) -> None:
    """A follow-up matches most of it, another prompt nearly nothing, and short prefixes count for nothing."""
    world = Rig()
    world.ask(text(known))
    world.ask([*text(known)[:same], *text(100, 1)])
    assert world.recorder.unstable == []


@pytest.mark.parametrize(("known", "same"), [(200, 20), (200, 100), (64, 32)])
def test_the_bounds_of_a_report_belong_to_it(known: int, same: int) -> None:
    """A tenth and a half are reported, and so are 64 tokens."""
    world = Rig()
    world.ask(text(known))
    world.ask([*text(known)[:same], *text(100, 1)])
    assert [numbers for _, *numbers in world.recorder.unstable] == [[known, same]]


def test_preemption_reports_no_prompt_twice() -> None:
    """Going on after a preemption is no new prompt."""
    world = Rig(num_cells=300, limits={"num_slots": 4})
    world.ask(text(100))
    changed = [world.begin([*text(100)[:30], *text(30, seed)], 60) for seed in range(1, 5)]
    world.run()
    assert world.recorder.num_preempted > 0
    assert max(Counter(key for key, _, _ in world.recorder.unstable).values()) == 1
    world.check_output_as_alone(*changed)
