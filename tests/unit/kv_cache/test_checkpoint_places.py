"""Places at which a running sequence stops because others ask for it."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from paceline.kv_cache import TEXT_LAYOUT, MediaItem, PromptLayout
from paceline.kv_cache.prefix_match import MIN_SPACING_TOKENS, CheckpointPlaces


class Running:
    """A sequence of 2,000 prompt tokens."""

    num_computed_tokens = 0
    num_prompt_tokens = 2000
    layout = TEXT_LAYOUT


def places() -> tuple[CheckpointPlaces, Any]:
    """No places yet, and a sequence."""
    nothing: Any = None
    return CheckpointPlaces(nothing, nothing, nothing), Running()


def stops(found: CheckpointPlaces, sequence: Any) -> list[int]:
    """Return the ends of passes in order."""
    ends = []
    while (left := found.tokens_left(sequence)) is not None:
        sequence.num_computed_tokens += left
        ends.append(sequence.num_computed_tokens)
        list(found.take_due())
    return ends


def test_no_place_lies_within_a_media_item() -> None:
    """Such a place is moved to the start of the item, or after it if nothing else is left."""
    found, sequence = places()
    sequence.layout = PromptLayout([MediaItem(500, 100, 9, b"x"), MediaItem(1990, 4, 2, b"y")])
    cost: Any = SimpleNamespace(seconds=lambda num_tokens, num_cells: 1e-3 * num_tokens)
    transfers: Any = SimpleNamespace(state_seconds=lambda num: 0.0, state_bytes=1)
    limits: Any = SimpleNamespace(host_bytes=2**20, boundary_ids=frozenset())
    sequence.writes_cache = True
    node: Any = SimpleNamespace(path=lambda: [SimpleNamespace(end=1992, children=[1, 2])])
    found = CheckpointPlaces(limits, transfers, cost)
    found.begin(sequence, node)
    assert stops(found, sequence) == [500, 1024, 1536, 1990, 1999]


def test_a_single_place_is_exact() -> None:
    """Nothing is computed twice for it; so are places far from each other, and one just before the prompt's end."""
    found, sequence = places()
    assert [found.request(sequence, end) for end in (1000, 300, 1999, 1990)] == [1000, 300, 1999, 1990]
    assert stops(found, sequence) == [300, 1000, 1990, 1999]


def test_many_places_close_to_each_other_do_not_make_passes_of_a_token() -> None:
    """A hundred requests that part one token earlier each stop it at most once in 64 tokens, but for the first."""
    found, sequence = places()
    for end in range(1000, 900, -1):
        assert end - MIN_SPACING_TOKENS < found.request(sequence, end) <= end
    ends = stops(found, sequence)
    assert ends == [896, 960, 1000]
    assert all(after - before >= 40 for before, after in pairwise(ends))


def test_a_place_is_never_behind_the_sequence() -> None:
    """A reached place is not asked for again, however places are rounded."""
    found, sequence = places()
    sequence.num_computed_tokens = 970
    for end in range(1000, 970, -1):
        assert 970 < found.request(sequence, end) <= end
