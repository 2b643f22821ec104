"""Prompts with media on the fake backend: rows of their own kind in passes of their own, positions apart from cells."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import pytest
from tests.engine_world import Outcome, World
from tests.media_prompts import Part, Picture, positions_of, prompt_of

from paceline.errors import InvalidParams, Unsupported
from paceline.kv_cache import MediaItem, PromptLayout, Save
from paceline.kv_cache.offload import BLOCK_TOKENS, RangeSaver
from paceline.sequence import Row, RowKind
from paceline.streaming import FinishReason

CAT, DOG = Picture("cat", 24, 5), Picture("dog", 24, 5)
BIRD = Picture("bird", 24, 24, is_causal=False)
KINDS = ["attention", "sliding_window", "hybrid", "recurrent", "compressed"]
TOKENS, PARTS, WHOLE = RowKind.TOKENS, RowKind.EMBEDDINGS, RowKind.WHOLE_EMBEDDINGS
TEXT = "what is to be seen here, and where, "  # 36 tokens


class MediaWorld(World):
    """Keeps the rows of every pass, as (key, kind, position, cells, offset)."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.passes: list[list[tuple[int, RowKind, int, int, int]]] = []
        step = self.backend.step

        def noted(rows: Many[Row], lora: Any) -> Any:
            self.passes.append(
                [(row.sequence.request.key, row.kind, row.position, len(row.token_ids), row.offset) for row in rows]
            )
            return step(rows, lora)

        self.backend.step = noted  # type: ignore[method-assign]

    def ask(self, *parts: Part, **options: Any) -> Outcome:
        return self.submit(**prompt_of(*parts), **{"max_tokens": 4, "ignore_eos": True, **options})

    def ask_alone(self, *parts: Part, **options: Any) -> Outcome:
        outcome = self.alone(**prompt_of(*parts), **{"max_tokens": 4, "ignore_eos": True, **options})
        assert outcome.reason() is FinishReason.LENGTH
        return outcome

    def rows_of(self, outcome: Outcome) -> list[tuple[RowKind, int, int, int]]:
        return [row[1:] for rows in self.passes for row in rows if row[0] == outcome.request.key]

    def num_computed(self, outcome: Outcome) -> int:
        return sum(row[2] for row in self.rows_of(outcome))


def test_rows_have_positions_and_cells_of_their_own() -> None:
    """An item's row begins with the item and has its cells; later rows go on after its positions."""
    world = MediaWorld()
    outcome = world.ask("0123456789", CAT, "abc", BIRD, DOG, "de", max_tokens=3)
    world.run()
    assert world.rows_of(outcome) == [
        (TOKENS, 0, 10, 0),
        (PARTS, 10, 24, 0),
        (TOKENS, 15, 3, 0),
        (WHOLE, 18, 24, 0),
        (PARTS, 42, 24, 0),
        (TOKENS, 47, 2, 0),
        (TOKENS, 49, 1, 0),
        (TOKENS, 50, 1, 0),
    ]
    assert positions_of("0123456789", CAT, "abc", BIRD, DOG, "de")[-1] == 49
    assert outcome.terminal is not None
    assert outcome.terminal.usage is not None
    assert outcome.terminal.usage.prompt_tokens == 10 + 24 + 3 + 24 + 24 + 2
    world.check_done()


def test_an_item_is_computed_in_parts_where_its_attention_is_causal() -> None:
    """Each part has the first position of the item, and the number of its first cell; else all go at once."""
    world = MediaWorld(limits={"chunk_size": 10})
    outcome, whole = world.ask("ab", CAT, "c"), world.ask("ab", BIRD, "c")
    world.run()
    parts = [row for row in world.rows_of(outcome) if row[0] is PARTS]
    assert parts == [(PARTS, 2, 10, 0), (PARTS, 2, 10, 10), (PARTS, 2, 4, 20)]
    assert [row for row in world.rows_of(whole) if row[0] is WHOLE] == [(WHOLE, 2, 24, 0)]
    assert outcome.token_ids() == world.ask_alone("ab", CAT, "c").token_ids()
    assert outcome.token_ids() == MediaWorld().ask_alone("ab", CAT, "c").token_ids()


def test_a_pass_has_rows_of_one_kind_and_kinds_take_turns() -> None:
    """While others decode, every second tick at most is for media, and whole items have one each."""
    world = MediaWorld(limits={"num_slots": 5})
    texts = [world.ask("some text", max_tokens=30) for _ in range(2)]
    world.tick(3)
    pictures = [world.ask(CAT, "a"), world.ask(BIRD, "b"), world.ask(DOG, "c")]
    world.run()
    kinds = []
    for rows in world.passes:
        (kind,) = {row[1] for row in rows}
        assert kind is not WHOLE or len(rows) == 1
        kinds.append(kind)
    media = [index for index, kind in enumerate(kinds) if kind is not TOKENS]
    assert any(len({row[0] for row in world.passes[index]}) == 2 for index in media), "causal ones share a pass"
    assert all(kinds[index + 1] is TOKENS for index in media)
    for outcome, parts in zip(pictures, ((CAT, "a"), (BIRD, "b"), (DOG, "c")), strict=True):
        assert outcome.token_ids() == world.ask_alone(*parts).token_ids()
    for outcome in texts:
        assert outcome.token_ids() == world.ask_alone("some text", max_tokens=30).token_ids()


def test_many_items_keep_no_sequence_from_decoding() -> None:
    """A decoding sequence has every second pass, however many pictures wait."""
    world = MediaWorld(limits={"num_slots": 6}, num_cells=2000)
    text = world.ask("some text", max_tokens=40)
    world.tick(2)
    for number in range(5):
        world.ask(*(Picture(f"{number} {index}", 30, 30, is_causal=False) for index in range(4)), "x")
    world.run()
    gaps, last = [], 0
    for index, rows in enumerate(world.passes):
        if text.request.key in {row[0] for row in rows}:
            gaps.append(index - last)
            last = index
    assert max(gaps) == 2
    world.check_done()


def test_a_part_of_an_item_fits_the_target_of_those_that_decode() -> None:
    """With sequences at tokens waiting, a pass over media takes no longer than one over prompts would."""
    world = MediaWorld(limits={"chunk_size": 64, "itl_target_s": 0.05})  # 10 ms, and 1 ms a token
    world.ask("some text", max_tokens=30)
    world.tick(3)
    world.ask(Picture("large", 64, 8), "a", max_tokens=1)
    world.run()
    parts = [sum(row[3] for row in rows) for rows in world.passes if rows[0][1] is PARTS]
    assert sum(parts) == 64
    assert max(parts) <= 40


@pytest.mark.parametrize("kind", KINDS)
def test_equal_pictures_share_a_prefix_and_different_pictures_do_not(kind: str) -> None:
    """Text in front is shared by all, a picture by the prompts that have the same one in the same place."""
    world = MediaWorld(kind=kind, window=8, num_cells=2000)
    first = world.ask(TEXT, CAT, TEXT, "one?")
    world.run()
    same, other = world.ask(TEXT, CAT, TEXT, "two?"), world.ask(TEXT, DOG, TEXT, "one?")
    world.run()
    assert first.token_ids() != other.token_ids()
    for outcome, parts in (
        (first, (TEXT, CAT, TEXT, "one?")),
        (same, (TEXT, CAT, TEXT, "two?")),
        (other, (TEXT, DOG, TEXT, "one?")),
    ):
        assert outcome.token_ids() == world.ask_alone(*parts).token_ids()
    if kind == "attention":
        assert same.request.progress.num_cached == 36 + 24 + 36
        assert other.request.progress.num_cached == 36
        assert not [row for row in world.rows_of(same) if row[0] is not TOKENS]
    world.check_done()


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_prompt_again_computes_no_picture(kind: str) -> None:
    """Also if memory is taken over only at a place."""
    world = MediaWorld(kind=kind, window=8)
    first = world.ask(TEXT, CAT, TEXT)
    world.run()
    again = world.ask(TEXT, CAT, TEXT)
    world.run()
    assert again.token_ids() == first.token_ids()
    assert again.request.progress.num_cached == 36 + 24 + 35
    assert {row[0] for row in world.rows_of(again)} == {TOKENS}


def test_a_conversation_about_a_picture_goes_on() -> None:
    """Tokens generated after it are cached at their positions, too."""
    world = MediaWorld()
    first = world.ask(TEXT, CAT, "what?", max_tokens=20)
    world.run()
    said = bytes(first.drawn()).decode("latin-1")
    said = said if said.isascii() else "".join(item for item in said if item.isascii())
    prompt = prompt_of(TEXT, CAT, "what?")
    ids = [*prompt["prompt"], *first.drawn(), *b"and then?"]
    second = world.submit(ids, media=prompt["media"], max_tokens=4, ignore_eos=True)
    world.run()
    assert second.request.progress.num_cached == 36 + 24 + 5 + 19
    alone = world.alone(ids, media=prompt["media"], max_tokens=4, ignore_eos=True)
    assert second.token_ids() == alone.token_ids()


@pytest.mark.parametrize("kind", KINDS)
def test_choices_share_a_prompt_with_media(kind: str) -> None:
    """The picture is computed once for all of them."""
    world = MediaWorld(kind=kind, window=8)
    outcome = world.ask(TEXT, CAT, TEXT, n=3, temperature=1, seed=5)
    world.run()
    alone = world.ask_alone(TEXT, CAT, TEXT, n=3, temperature=1, seed=5)
    for choice in range(3):
        assert outcome.token_ids(choice) == alone.token_ids(choice)
    assert sum(row[2] for row in world.rows_of(outcome) if row[0] is PARTS) == 24


def test_an_item_with_a_short_key_is_not_shared() -> None:
    """Nor later tokens; earlier tokens are."""
    world = MediaWorld()
    beep = Picture("beep", 3, 3)
    first = world.ask(TEXT, beep, TEXT)
    world.run()
    again = world.ask(TEXT, beep, TEXT)
    world.run()
    assert again.request.progress.num_cached == 36
    assert again.token_ids() == first.token_ids()
    world.check_done()


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_ends_within_an_item_leaves_what_is_before_it(kind: str) -> None:
    """Half a picture is of no use to others, and is not found."""
    world = MediaWorld(kind=kind, window=8, limits={"chunk_size": 36})
    outcome = world.ask(TEXT, Picture("large", 60, 8), "a")
    world.tick(3)
    assert world.num_computed(outcome) == 36 + 36
    world.cancel(outcome)
    world.run()
    again = world.ask(TEXT, Picture("large", 60, 8), "a")
    world.run()
    if kind == "attention":
        assert again.request.progress.num_cached == 36
    assert again.token_ids() == world.ask_alone(TEXT, Picture("large", 60, 8), "a").token_ids()
    world.check_done()


@pytest.mark.parametrize("kind", ["recurrent", "compressed"])
def test_no_state_within_an_item_is_saved(kind: str) -> None:
    """It would take host memory and not be found."""
    world = MediaWorld(kind=kind, limits={"chunk_size": 36})
    outcome = world.ask(TEXT, Picture("large", 60, 8), "a")
    world.tick(3)
    assert world.num_computed(outcome) == 36 + 36
    world.cancel(outcome)
    world.run()
    assert world.scheduler.kv_cache.host_bytes == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_paused_sequence_shares_no_part_of_an_item(kind: str) -> None:
    """Another one that does not wait for it takes the text in front, if memory can be cut there, and computes the item."""
    world = MediaWorld(kind=kind, window=8, limits={"chunk_size": 36})
    parts = (TEXT, Picture("large", 60, 8), "a")
    first = world.ask(*parts)
    world.tick(3)
    assert world.num_computed(first) == 36 + 36
    world.pause(first)
    second = world.ask(*parts)
    world.tick(8)
    assert second.request.progress.num_cached == (36 if kind == "attention" else 0)
    assert second.token_ids() == world.ask_alone(*parts).token_ids()
    world.pause(first, is_paused=False)
    world.run()
    assert first.token_ids() == second.token_ids()


def test_a_victim_within_an_item_is_saved_up_to_it() -> None:
    """Eager offload saves ranges that others and itself can load again, and no cell twice."""
    world = MediaWorld(limits={"chunk_size": 36, "num_slots": 2}, num_cells=700)
    victim = world.ask(TEXT * 2, Picture("large", 300, 8), "a")
    cache = world.scheduler.kv_cache
    saves = []
    for _ in range(2):
        while world.num_computed(victim) <= 72:
            world.tick()
        (sequence,) = victim.request.sequences
        cache._offloader.offload_eagerly(sequence, cache._running[sequence], 1000, 1)
        saves.append(
            [(operation.start, operation.end) for operation in cache._cells.operations if isinstance(operation, Save)]
        )
        world.tick()
    assert world.num_computed(victim) < 72 + 300
    assert saves == [[(0, 72)], []]
    world.run()
    assert victim.reason() is FinishReason.LENGTH
    world.check_done()


def test_ranges_that_end_within_an_item_are_saved_around_it() -> None:
    """Nodes of the tree may end there, if the keys of two items begin alike by chance."""
    (item,) = prompt_of("x" * 10, Picture("large", 20, 5), "x" * 10)["media"]
    saver = RangeSaver(seq_id=0, namespace=(), tokens=b"", layout=PromptLayout([item]))
    saves = saver.next_saves([(0, 11), (11, 40)], 1000)
    assert [(save.start, save.end) for save in saves] == [(0, 10), (10, 40)]
    assert all(save.layout is saver.layout for save in saves)


@pytest.mark.parametrize("kind", KINDS)
def test_saved_ranges_end_beside_items(kind: str) -> None:
    """A block of saved tokens is longer if an item would be cut, and all of it is found again in host memory."""
    large = Picture("large", BLOCK_TOKENS + 100, 40)
    limits = {"n_batch": 700, "n_ubatch": 700, "chunk_size": 700, "host_bytes": 100_000}
    world = MediaWorld(kind=kind, window=8, num_cells=1500, limits=limits)
    parts = (TEXT * 2, large, TEXT, CAT, TEXT)
    first = world.ask(*parts)
    world.run()
    for number in range(3):
        world.ask(f"{number}" + TEXT * 30)
        world.run()
    again = world.ask(*parts)
    world.run()
    assert again.token_ids() == first.token_ids() == world.ask_alone(*parts).token_ids()
    assert again.request.progress.cached_from == "host"
    assert again.request.progress.num_cached == 72 + BLOCK_TOKENS + 100 + 36 + 24 + 35
    world.check_done()


def test_a_whole_item_that_no_pass_has_room_for_ends_its_request_alone() -> None:
    """With the number that is too small."""
    world = MediaWorld(limits={"n_ubatch": 32})
    large, other = world.ask("ab", Picture("large", 33, 33, is_causal=False), "c"), world.ask("ab", CAT, "c")
    world.run()
    error = large.last().error
    assert isinstance(error, Unsupported)
    assert "item of 33 cells" in str(error)
    assert "n_ubatch allows 32" in str(error)
    assert other.reason() is FinishReason.LENGTH
    world.check_done()


def test_wrong_items_and_scored_prompts_are_refused() -> None:
    """At the making of the request."""
    world = MediaWorld()
    with pytest.raises(InvalidParams, match="must end with a token"):
        world.request([1, 2, 3], media=[MediaItem(1, 2, 1, b"x")])
    with pytest.raises(Unsupported, match="prompt_logprobs are of tokens"):
        world.request([1, 2, 3], media=[MediaItem(0, 2, 1, b"x")], prompt_logprobs=1)


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_pass_over_media_that_fails_ends_its_request_alone(is_causal: bool) -> None:
    """As any other row."""
    world = MediaWorld()
    poisoned, other = (
        world.ask("ab", Picture("x", 9, 3, is_causal), "c"),
        world.ask("de", Picture("y", 9, 3, is_causal), "f"),
    )
    world.faults.poisonous.add(poisoned.request.key)
    world.run()
    assert poisoned.reason() is FinishReason.ERROR
    assert other.token_ids() == world.ask_alone("de", Picture("y", 9, 3, is_causal), "f").token_ids()
    world.check_done()
