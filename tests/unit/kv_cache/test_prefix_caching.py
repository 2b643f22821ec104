"""Prefix caching in the scheduler: shared prefixes, sequences that wait for them, and computed tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tests.engine_world import Outcome
from tests.unit.kv_cache.prefix_rig import KINDS, UNCUT, Rig, text

from paceline.streaming import FinishReason

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


def test_forks_of_a_running_conversation_compute_new_tokens() -> None:
    """Four that continue another at its current end, its generated tokens included, share with it while it runs."""
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
    """The generated tokens of others are not copied for it, however many they are."""
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
    ("kind", "num_cells"), [("attention", 2048), ("attention", 700), *((item, 2048) for item in UNCUT)]
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
    """Nothing of another namespace, on the device, in host memory, running, or by waiting for it."""
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
    """For any end of the computing request, the waiting request goes on from the computed part."""
    world, first, second = promised()
    accident(world, first)
    world.run()
    assert first.last().finish_reason not in (FinishReason.LENGTH, FinishReason.STOP)
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
    """A preempted request and the request that waited for it resume in turn, and both end."""
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
    """A prompt that a running request will perhaps generate is no promise; an early difference is none either."""
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_is_scored_from_a_place_on_waits_for_its_prefix_and_starts_there(kind: str) -> None:
    """Several at once compute the prefix once; the scores begin with the token that was asked for."""
    world = Rig(kind=kind, limits={"num_slots": 4, "max_scored": 8})
    prompts = [text(100) + text(length, seed=length) for length in (1, 5, 9)]
    outcomes = [world.submit(prompt, max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=100) for prompt in prompts]
    world.run()
    for outcome, prompt in zip(outcomes, prompts, strict=True):
        scored = [token for chunk in outcome.of_choice(0) for token in chunk.prompt_logprobs]
        alone = world.alone(prompt, max_tokens=0, prompt_logprobs=0)
        whole = [token for chunk in alone.of_choice(0) for token in chunk.prompt_logprobs]
        assert len(whole) == len(prompt) - 1
        assert scored == whole[99:]
    computed = sum(map(world.computed, outcomes))
    assert computed <= 99 + sum(len(prompt) - 100 for prompt in prompts) + (0 if kind == "attention" else 2 * 63)
    world.check_done()
