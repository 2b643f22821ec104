"""The positions of a prompt's cells, its possible cuts, and the keys of its media."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.media_prompts import Part, Picture, positions_of, prompt_of

from paceline.errors import InvalidParams
from paceline.kv_cache import TEXT_LAYOUT, MediaItem, PromptLayout
from paceline.kv_cache.prompt_layout import MIN_SHARED_CELLS

TEXTS = st.text("abc", min_size=1, max_size=6)
PICTURES = st.integers(1, 9).flatmap(
    lambda cells: st.builds(Picture, st.sampled_from("xyz"), st.just(cells), st.integers(1, cells), st.booleans())
)
PARTS = st.lists(TEXTS | PICTURES, max_size=6).map(lambda parts: [*parts, "end"])


def layout_of(*parts: Part) -> PromptLayout:
    return PromptLayout(prompt_of(*parts)["media"])


@given(PARTS)
def test_positions_are_those_counted_one_by_one(parts: list[Part]) -> None:
    """A token has the next position; the cells of an item its first position; generated tokens go on after it."""
    layout, expected = layout_of(*parts), positions_of(*parts)
    assert [layout.position(cell) for cell in range(len(expected))] == expected
    end = len(expected) - 1
    assert layout.position(end + 100) == expected[-1] + 100


@given(PARTS)
def test_a_prompt_is_cut_beside_its_items_alone(parts: list[Part]) -> None:
    """At every place but within an item, and not from an item with too short a key on; a range has at least one item."""
    layout, num_cells = layout_of(*parts), len(positions_of(*parts)) - 1
    within = {cell for item in layout.items for cell in range(item.start + 1, item.end)}
    short = min((item.start for item in layout.items if item.num_cells < MIN_SHARED_CELLS), default=num_cells)
    places = sorted(set(range(short + 1)) - within)
    for cell in range(num_cells + 1):
        assert layout.shareable(cell) == max(place for place in places if place <= cell)
    for start in places[:-1]:
        for end in range(start + 1, short + 1):
            expected = [place for place in places if start < place <= end]
            assert layout.cut(start, end) == (expected[-1] if expected else min(p for p in places if p > start))


@given(PARTS)
def test_a_cell_belongs_to_its_item(parts: list[Part]) -> None:
    """A token to none, and from it on there are so many to the next item."""
    layout, num_cells = layout_of(*parts), len(positions_of(*parts)) - 1
    for cell in range(num_cells):
        owners = [item for item in layout.items if item.start <= cell < item.end]
        assert layout.item_at(cell) == (owners[0] if owners else None)
        behind = [item.start - cell for item in layout.items if item.start > cell]
        assert layout.tokens_left(cell) == (behind[0] if behind else None)


def test_text_has_cells_for_positions() -> None:
    """And can be cut anywhere."""
    assert [TEXT_LAYOUT.position(cell) for cell in (0, 7, 10**6)] == [0, 7, 10**6]
    assert [TEXT_LAYOUT.shareable(cell) for cell in (0, 7, 10**6)] == [0, 7, 10**6]
    assert TEXT_LAYOUT.cut(3, 9) == 9
    assert (TEXT_LAYOUT.item_at(3), TEXT_LAYOUT.tokens_left(3)) == (None, None)


def test_a_key_is_equal_where_all_but_the_place_is() -> None:
    """Content, cells, positions and the kind of attention belong to it; none of its numbers is a token."""
    item = MediaItem(3, 6, 2, b"x")
    assert MediaItem(9, 6, 2, b"x").key_tokens() == item.key_tokens()
    others = [
        MediaItem(3, 6, 2, b"y"),
        MediaItem(3, 7, 2, b"x"),
        MediaItem(3, 6, 3, b"x"),
        MediaItem(3, 6, 2, b"x", False),
    ]
    for other in others:
        assert set(other.key_tokens()).isdisjoint(item.key_tokens())
    assert all(-(2**31) <= key_token < 0 for key_token in item.key_tokens())
    assert len(set(item.key_tokens())) == MIN_SHARED_CELLS


def test_keys_are_the_same_tomorrow() -> None:
    """Digests and saved prefixes of other processes have them."""
    assert MediaItem(0, 5, 2, b"x").key_tokens() == MediaItem(0, 5, 2, b"x").key_tokens()
    keyed = PromptLayout([MediaItem(1, 4, 2, b"x")]).keyed([5, 0, 0, 0, 0, 6])
    assert keyed == [5, *MediaItem(1, 4, 2, b"x").key_tokens(), 6]


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([MediaItem(1, 0, 0, b"")], "needs 1 to"),
        ([MediaItem(1, 2, 3, b"")], "not 2 and 3 from cell 1 on"),
        ([MediaItem(1, 2, 0, b"")], "not 2 and 0 from cell 1 on"),
        ([MediaItem(-1, 2, 1, b"")], "from cell -1 on"),
        ([MediaItem(0, 2**20 + 1, 1, b"")], "needs 1 to"),
        ([MediaItem(1, 3, 1, b""), MediaItem(3, 2, 1, b"")], "must not overlap"),
        ([MediaItem(5, 2, 1, b""), MediaItem(1, 2, 1, b"")], "must be in order"),
        ([MediaItem(7, 3, 1, b"")], "ends at cell 10 of 10"),
    ],
)
def test_items_that_do_not_fit_are_refused(items: list[MediaItem], message: str) -> None:
    """Sizes that no encoder gives, overlaps, and prompts that end without a token to give logits."""
    with pytest.raises(InvalidParams, match=message):
        PromptLayout(items).keyed([0] * 10)


def test_a_cell_is_found_by_its_position() -> None:
    """Of tokens, of the beginnings of items, and of the place behind the last."""
    layout = PromptLayout([MediaItem(2, 6, 3, b"x"), MediaItem(8, 4, 4, b"y"), MediaItem(15, 5, 1, b"z")])
    cells = [0, 1, 2, 8, 12, 13, 14, 15, 20, 21, 40]
    assert [layout.cell(layout.position(cell)) for cell in cells] == cells
    assert PromptLayout().cell(7) == 7
