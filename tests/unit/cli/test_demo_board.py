"""Who is in which slot."""

from __future__ import annotations

import msgspec

from paceline.cli.demo_instruments import SlotBoard
from paceline.scheduling.records import RequestRecord, RowRecord, TickRecord


def queued(board: SlotBoard, key: int, *, prompt_tokens: int = 10, num_choices: int = 1) -> None:
    board.request_queued(
        RequestRecord(
            key=key, request_id=None, kind="generate", prompt_tokens=prompt_tokens, num_choices=num_choices,
            max_tokens=None, priority=0, submitted_s=0.0,
        )
    )  # fmt: skip


def ticked(board: SlotBoard, *rows: RowRecord, num_waiting: int = 0) -> None:
    board.tick_finished(
        TickRecord(
            index=1, kind="generate", start_s=0.0, elapsed_s=0.1, step_s=0.1, rows=rows, num_slots=4, num_running=1,
            num_waiting=num_waiting, num_cells=0, budget=512,
        )
    )  # fmt: skip


def row(slot: int, key: int, position: int, num_tokens: int, num_new: int, choice: int = 0) -> RowRecord:
    return RowRecord(
        slot=slot, key=key, choice=choice, position=position, num_tokens=num_tokens, num_decode=0, num_drafts=0,
        num_new=num_new, first=False,
    )  # fmt: skip


def test_a_sequence_is_followed_from_its_prompt_to_its_end() -> None:
    """It reads, then writes, and stays to be seen when it has left."""
    board = SlotBoard()
    queued(board, 71)
    queued(board, 72)
    board.request_started(72, 0, 3, 0.0)
    assert board.occupants()[3].state == "prefill" and board.occupants()[3].order == 1
    ticked(board, row(3, 72, 0, 6, 0), num_waiting=1)
    assert (board.occupants()[3].state, board.occupants()[3].num_computed_tokens, board.num_waiting) == (
        "prefill",
        6,
        1,
    )
    ticked(board, row(3, 72, 6, 4, 1))
    assert (board.occupants()[3].state, board.occupants()[3].num_generated, board.num_running) == ("decode", 1, 1)
    board.slot_freed(72, 0, 3, 1.0)
    assert (board.occupants()[3].state, board.num_running, board.num_ticks, board.num_generated) == ("left", 0, 2, 1)


def test_the_row_of_a_sequence_that_has_just_left_counts_and_does_not_bring_it_back() -> None:
    """The hook of a tick comes after those of the ends in it."""
    board = SlotBoard()
    queued(board, 1)
    board.request_started(1, 0, 0, 0.0)
    board.slot_freed(1, 0, 0, 1.0)
    ticked(board, row(0, 1, 0, 10, 1))
    assert (board.occupants()[0].state, board.occupants()[0].num_generated, board.num_generated) == ("left", 1, 1)


def test_the_row_of_another_choice_is_not_its_own() -> None:
    """A slot that changed hands keeps the numbers apart."""
    board = SlotBoard()
    queued(board, 1, num_choices=2)
    board.request_started(1, 1, 0, 0.0)
    ticked(board, row(0, 1, 0, 10, 1, choice=0))
    assert board.occupants()[0].num_generated == 0


def test_a_pause_shows_until_the_reader_is_back() -> None:
    """Both choices of a request pause, and one that has left is no longer paused."""
    board = SlotBoard()
    queued(board, 1, num_choices=2)
    board.request_started(1, 0, 0, 0.0)
    board.request_started(1, 1, 1, 0.0)
    board.paused(1, True, 0.0)
    assert [occupant.state for occupant in board.occupants().values()] == ["paused", "paused"]
    board.slot_freed(1, 1, 1, 0.0)
    assert [occupant.state for occupant in board.occupants().values()] == ["paused", "left"]
    board.paused(1, False, 0.0)
    assert board.occupants()[0].state == "prefill"


def test_drafts_are_counted_with_what_came_of_them() -> None:
    """A row with drafts wins all but one of its new tokens; one whose pass failed nothing."""
    board = SlotBoard()
    queued(board, 7)
    board.request_started(7, 0, 0, 0.0)
    drafted = msgspec.structs.replace(row(0, 7, 10, 5, 3), num_drafts=4)
    ticked(board, drafted)
    ticked(board, msgspec.structs.replace(drafted, num_new=0))
    ticked(board, row(0, 7, 15, 1, 1))
    assert (board.num_drafts, board.num_won) == (8, 2)
