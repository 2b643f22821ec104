"""Cached prefixes of a detached adapter: gone from the device, from host memory, and from pending saves."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
from tests.engine_world import World

from paceline.engine import questions
from paceline.engine.core import Ask
from paceline.scheduling.records import Answered
from paceline.sequence import uses_adapter

KINDS = ["attention", "sliding_window", "hybrid", "recurrent", "compressed"]
PROMPT = "a prompt of some length that ends differently each time: "


def world_of(kind: str, **limits: Any) -> World:
    return World(kind=kind, adapters=("one", "two"), limits={"num_slots": 2, **limits})


def generated(world: World, prompt: str, **options: Any) -> tuple[str, int]:
    """The text, and how many tokens of the prompt were cached."""
    outcome = world.submit(prompt, max_tokens=8, ignore_eos=True, **options)
    world.run()
    assert outcome.terminal is not None
    assert outcome.terminal.usage is not None
    return outcome.text(), outcome.terminal.usage.cached_tokens


def detach(world: World, adapter: str, key: int = 10**6) -> None:
    world.commands.queue.append(Ask(key, partial(questions.detach, adapter)))
    events = world.engine.tick()
    assert Answered(key, None) in events
    world.take([event for event in events if not isinstance(event, Answered)])
    world.check()
    roots = world.scheduler.kv_cache._tree._roots
    assert not [namespace for namespace in roots if uses_adapter(namespace, adapter)]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_a_detached_adapter_is_found_again(kind: str) -> None:
    """Requests with it compute all, requests with others find their prefixes."""
    world = world_of(kind)
    sets: list[dict[str, float]] = [{}, {"one": 1.0}, {"two": 1.0}, {"one": 0.5}, {"one": 0.5, "two": 1.0}]
    first = [generated(world, PROMPT, lora=lora) for lora in sets]
    before = [generated(world, PROMPT, lora=lora) for lora in sets]
    assert [text for text, _ in before] == [text for text, _ in first]
    assert all(num_cached > 0 for _, num_cached in before)
    detach(world, "one")
    after = [generated(world, PROMPT, lora=lora) for lora in sets]
    assert [text for text, _ in after] == [text for text, _ in first]
    assert [num_cached > 0 for _, num_cached in after] == ["one" not in lora for lora in sets]
    world.check_done()


@pytest.mark.parametrize("kind", KINDS)
def test_host_memory_is_given_back(kind: str) -> None:
    """All of it if nothing else is cached."""
    world = world_of(kind, host_bytes=10**6)
    for number in range(12):
        generated(world, f"{number} {PROMPT * 2}", lora={"one": 1.0})
    detach(world, "one")
    world.run()
    assert world.scheduler.kv_cache.host_bytes == 0
    assert world.scheduler.kv_cache.num_cells == 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_about_to_be_saved_is_not(kind: str) -> None:
    """The saves of a request that ended in the tick before do not come back into the tree."""
    world = world_of(kind, host_bytes=10**6)
    outcome = world.submit(PROMPT * 2, max_tokens=8, ignore_eos=True, lora={"one": 1.0})
    while not outcome.is_released:
        world.tick()
    detach(world, "one")
    world.tick(3)
    assert world.scheduler.kv_cache.host_bytes == 0


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_come_and_go_among_other_requests(kind: str) -> None:
    """At random, under pressure of cells, with every tick checked: the others' output never changes."""
    world = World(kind=kind, adapters=("one", "two"), num_cells=260, limits={"num_slots": 3, "host_bytes": 9000})
    chance = random.Random(7)
    expected: dict[tuple[str, str], str] = {}
    running: list[tuple[Any, tuple[str, str]]] = []
    for number in range(60):
        adapter, prompt = chance.choice(["", "one", "two"]), PROMPT[: chance.randint(1, len(PROMPT))]
        lora = {adapter: 1.0} if adapter else {}
        running.append((world.submit(prompt, lora=lora, max_tokens=6, ignore_eos=True), (adapter, prompt)))
        world.tick(chance.randint(0, 6))
        running = [sequence for sequence in running if not _ended(sequence, expected)]
        for adapter in ("one", "two"):
            if chance.random() < 0.3 and not any(key[0] == adapter for _, key in running):
                detach(world, adapter, 10**6 + number)
    world.run()
    assert not [sequence for sequence in running if not _ended(sequence, expected)]
    world.check_done()


def _ended(one: tuple[Any, tuple[str, str]], expected: dict[tuple[str, str], str]) -> bool:
    outcome, key = one
    if not outcome.is_released:
        return False
    assert expected.setdefault(key, outcome.text()) == outcome.text()
    return True
