"""Prompts of text and media in any order: the output is that of the request alone, whatever shares, interrupts or moves it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.engine_world import World
from tests.media_prompts import Part, Picture, prompt_of

from paceline.kv_cache import MediaItem

key_tokens = MediaItem.key_tokens
TEXTS = st.integers(1, 60).flatmap(lambda size: st.sampled_from("ab").map(lambda letter: letter * size))
PICTURES = st.integers(1, 50).flatmap(
    lambda cells: st.builds(
        Picture, st.sampled_from("xy"), st.just(cells), st.sampled_from([1, cells, (cells + 1) // 2]), st.booleans()
    )
)
PARTS = st.lists(TEXTS | PICTURES, max_size=4).map(lambda parts: (*parts, "end"))


@st.composite
def requests(draw: st.DrawFn) -> list[tuple[Part, ...]]:
    """Prompts that often begin alike."""
    prompts: list[tuple[Part, ...]] = [draw(PARTS)]
    for _ in range(draw(st.integers(1, 6))):
        like = draw(st.sampled_from(prompts))
        prompts.append((*like[: draw(st.integers(0, len(like)))], *draw(PARTS)))
    return prompts


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    requests(),
    st.sampled_from(["attention", "sliding_window", "hybrid", "recurrent", "compressed"]),
    st.integers(7, 40),
    st.sampled_from([400, 5000]),
    st.booleans(),
    st.data(),
)
def test_the_output_is_that_of_the_request_alone(
    prompts: list[tuple[Part, ...]],
    kind: str,
    chunk_size: int,
    num_cells: int,
    are_keys_alike: bool,
    data: st.DataObject,
) -> None:
    """In memory that is large or soon full, with pauses and cancellations between; and nothing is left of it.

    are_keys_alike: the keys of all items begin with the same number, as they may by chance.
    """
    with pytest.MonkeyPatch.context() as patched:
        if are_keys_alike:
            patched.setattr(MediaItem, "key_tokens", lambda item: [-1, *key_tokens(item)[1:]])
        check_outputs(prompts, kind, chunk_size, num_cells, data)


def check_outputs(
    prompts: list[tuple[Part, ...]], kind: str, chunk_size: int, num_cells: int, data: st.DataObject
) -> None:
    limits = {"chunk_size": chunk_size, "num_slots": 3, "host_bytes": 8000}
    world = World(kind=kind, window=8, num_cells=num_cells, limits=limits)
    kept, paused = [], []
    for parts in prompts:
        options: dict[str, Any] = {"max_tokens": data.draw(st.integers(1, 9)), "ignore_eos": True}
        options["n"] = data.draw(st.sampled_from([1, 1, 2]))
        prompt = prompt_of(*parts)
        if len(prompt["prompt"]) > num_cells:  # it is refused before it gets to a scheduler
            continue
        outcome = world.submit(**prompt, **options)
        world.tick(data.draw(st.integers(0, 6)))
        action = data.draw(st.integers(0, 5))
        if action == 0:
            world.cancel(outcome)
        elif action == 1:
            paused.append(outcome)
            world.pause(outcome)
            kept.append((outcome, parts, options))
        else:
            kept.append((outcome, parts, options))
    world.tick(data.draw(st.integers(0, 20)))
    for outcome in paused:
        world.pause(outcome, is_paused=False)
    world.run()
    world.check_done()
    for outcome, parts, options in kept:
        lone = World(num_cells=5000)
        alone = lone.submit(**prompt_of(*parts), **options)
        lone.run()
        for choice in range(options["n"]):
            assert outcome.reason(choice) == alone.reason(choice)
            assert outcome.token_ids(choice) == alone.token_ids(choice)
