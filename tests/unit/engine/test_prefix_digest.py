"""Hashes of cached prefixes, by which a router finds the engine that has most of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.engine_world import World
from tests.running_engine import LONG_S

from paceline.engine import EngineClient, questions
from paceline.engine.prompts import prefix_hash
from paceline.errors import EngineStopped, InvalidParams, InvalidType
from paceline.kv_cache import PrefixDigest
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.scheduling.records import Answered
from paceline.testing.fake_engine_client import FakeEngineClient, fake_worker_engine

HEAD = list(range(100, 150))
FIRST, SECOND = [*HEAD, *range(200, 240)], [*HEAD, *range(300, 340)]


def digest(world: World, max_prefixes: int = 100, block_tokens: int | None = None) -> PrefixDigest:
    """Tick once."""
    world.commands.queue.append(questions.digest.command(10**6, (max_prefixes, block_tokens)))
    world.num_ticks += 1
    events = world.engine.tick()
    (found,) = [event.result for event in events if isinstance(event, Answered)]
    world.take([event for event in events if not isinstance(event, Answered)])
    assert isinstance(found, PrefixDigest)
    return found


def num_cached(found: PrefixDigest, prompt: Sequence[int], **options: Any) -> int:
    """How many of a prompt's first tokens a router would find."""
    return max(
        (
            prefix.num_tokens
            for prefix in found.prefixes
            if prefix.num_tokens <= len(prompt)
            and prefix_hash(prompt[: prefix.num_tokens], RequestOptions(**options)) == prefix.hash
        ),
        default=0,
    )


def test_a_prompt_is_found_up_to_where_cached_ones_branch() -> None:
    """A prompt that was generated from is cached whole; one with its head is cached up to the branch."""
    world = World(eos_every=10**9)
    assert digest(world) == PrefixDigest()
    for prompt in (FIRST, SECOND):
        world.submit(prompt, max_tokens=1)
        world.run()
    found = digest(world)
    assert found.is_complete
    assert sorted(prefix.num_tokens for prefix in found.prefixes) == [50, 90, 90]
    assert [num_cached(found, prompt) for prompt in (FIRST, SECOND, [*HEAD, 1, 2, 3])] == [90, 90, 50]
    assert num_cached(found, range(30)) == 0


def test_namespaces_have_hashes_of_their_own() -> None:
    """A tenant's prefix is not another one's."""
    world = World(eos_every=10**9)
    world.submit(FIRST, max_tokens=1, tenant="mine")
    world.run()
    found = digest(world)
    assert num_cached(found, FIRST, tenant="mine") == 90
    assert num_cached(found, FIRST) == num_cached(found, FIRST, tenant="other") == 0


def test_the_number_of_prefixes_is_bounded() -> None:
    """Prefixes shared by many sequences come first, and omissions are reported."""
    world = World(eos_every=10**9)
    for prompt in (FIRST, SECOND):
        world.submit(prompt, max_tokens=1)
        world.run()
    found = digest(world, 1)
    assert ([prefix.num_tokens for prefix in found.prefixes], found.is_complete) == ([50], False)
    assert digest(world, 3).is_complete


def test_what_is_not_computed_yet_is_not_in_it() -> None:
    """A prompt in the middle of its prefill is not cached."""
    world = World(limits={"chunk_size": 8, "n_batch": 8}, eos_every=10**9)
    world.submit(FIRST, max_tokens=1)
    assert digest(world).prefixes == ()
    world.run()
    assert num_cached(digest(world), FIRST) == 90


def test_prefixes_that_are_not_cached_for_others_are_not_in_it() -> None:
    """A running request without cache_prompt takes no place in the digest."""
    world = World(eos_every=10**9)
    world.submit(FIRST, max_tokens=50, cache_prompt=False)
    world.tick(5)
    assert world.scheduler.running
    assert digest(world, 1) == PrefixDigest()


def test_in_blocks_a_prompt_is_found_to_within_a_block() -> None:
    """Also a prompt that leaves a cached prefix at a new branch; blocks that several share are listed once."""
    world = World(eos_every=10**9)
    for prompt in (FIRST, SECOND):
        world.submit(prompt, max_tokens=1)
        world.run()
    found = digest(world, block_tokens=16)
    assert found.is_complete
    assert [prefix.num_tokens for prefix in found.prefixes] == [16, 32, 48, 64, 64, 80, 80]
    assert [num_cached(found, prompt) for prompt in (FIRST, [*FIRST[:70], 1, 2], [*HEAD[:40], 3])] == [80, 64, 32]


def test_of_blocks_the_longest_prefixes_are_left_out() -> None:
    """Earlier blocks are of use without later blocks, and not the other way round."""
    world = World(eos_every=10**9)
    for prompt in (FIRST, SECOND):
        world.submit(prompt, max_tokens=1)
        world.run()
    found = digest(world, 5, block_tokens=16)
    assert ([prefix.num_tokens for prefix in found.prefixes], found.is_complete) == ([16, 32, 48, 64, 64], False)


@pytest.mark.parametrize("kind", ["sliding_window", "hybrid", "recurrent"])
def test_where_a_checkpoint_is_needed_blocks_without_one_are_not_cached(kind: str) -> None:
    """The last whole block before a checkpoint stands for it."""
    world = World(kind=kind, limits={"host_bytes": 2**30}, eos_every=10**9)
    world.submit(FIRST, max_tokens=3)
    world.run()
    assert [prefix.num_tokens for prefix in digest(world, block_tokens=16).prefixes] == [80]
    assert digest(world, block_tokens=1000) == PrefixDigest()


def test_a_walk_over_many_nodes_ends_early() -> None:
    """If few nodes are cached, the time of a tick is not spent on the others; omissions are reported."""
    world = World(kind="compressed", num_cells=10_000, limits={"host_bytes": 0, "num_slots": 20}, eos_every=10**9)
    for number in range(20):
        world.submit([*HEAD, 1000 + number], max_tokens=50)
    world.tick(5)
    assert not digest(world, 1).is_complete
    assert digest(world, 100).is_complete
    assert not digest(world, 1, block_tokens=16).is_complete
    assert digest(world, 100, block_tokens=16).is_complete


def test_invalid_token_id_has_no_hash() -> None:
    """Text and bytes are refused, and so is a number that no vocabulary has."""
    with pytest.raises(InvalidType, match="token_ids must be a sequence of token ids, not bytes"):
        prefix_hash(b"1234", RequestOptions())  # type: ignore[arg-type]
    for item in (-1, 2**31, 1.5):
        with pytest.raises(InvalidParams, match=r"token_ids\[1\] must be "):
            prefix_hash([1, item], RequestOptions())  # type: ignore[list-item]


@pytest.mark.parametrize("kind", ["sliding_window", "hybrid", "recurrent", "compressed"])
def test_a_memory_that_cannot_be_cut_has_its_checkpoints(kind: str) -> None:
    """Before the prompt's last token, and at the end."""
    world = World(kind=kind, limits={"host_bytes": 2**30}, eos_every=10**9)
    world.submit(FIRST, max_tokens=3)
    world.run()
    found = digest(world)
    assert num_cached(found, FIRST) == 89
    assert max(prefix.num_tokens for prefix in found.prefixes) > 90


def generate(engine: EngineClient, prompt: list[int]) -> None:
    channel = engine.accept(engine.prepare(prompt, SamplingParams(max_tokens=1), RequestOptions()))
    assert channel.wait_released(LONG_S)


@pytest.mark.parametrize("make", [FakeEngineClient, fake_worker_engine])
def test_engines_with_a_thread_and_with_a_worker_report_it(make: Any) -> None:
    """Through `EngineClient`, with the same hashes; an engine that has ended says so."""
    engine: EngineClient = make()
    try:
        assert engine.prefix_digest().result(LONG_S) == PrefixDigest()
        generate(engine, HEAD)
        assert num_cached(engine.prefix_digest().result(LONG_S), [*HEAD, 1]) == len(HEAD)
        for wrong in (0, 2**16 + 1, 10**30):
            with pytest.raises(InvalidParams, match="max_prefixes"):
                engine.prefix_digest(wrong)
        assert engine.prefix_digest(2**16).result(LONG_S).is_complete
    finally:
        engine.close()
    with pytest.raises(EngineStopped):
        engine.prefix_digest().result(LONG_S)
