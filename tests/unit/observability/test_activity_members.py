"""An engine's activity as members of events: merged ticks, summed rows of others, rates."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.kv_cache import TenantTree, TreeNode
from paceline.observability.activity_members import (
    RateMeter,
    mark_members,
    others_member,
    queue_member,
    slot_members,
    tick_members,
    tree_member,
)
from paceline.scheduling.records import (
    EngineActivity,
    Mark,
    RowRecord,
    SlotsSnapshot,
    SlotView,
    TickActivity,
    TickRecord,
    WaitingSequence,
)
from paceline.streaming import FinishReason


def row(slot: int = 0, key: int = 1, *, num_tokens: int = 1, num_decode: int = 1, num_new: int = 1) -> RowRecord:
    return RowRecord(
        slot=slot, key=key, choice=0, position=0, num_tokens=num_tokens, num_decode=num_decode, num_drafts=0,
        num_new=num_new, first=False,
    )  # fmt: skip


def tick(number: int, *rows: RowRecord, tenants: tuple[str, ...] = (), **changes: Any) -> TickActivity:
    record: dict[str, Any] = {
        "index": number, "kind": "generate", "start_s": number * 0.01, "elapsed_s": 0.008, "step_s": 0.007, "rows": rows,
        "num_slots": 4, "num_running": len(rows), "num_waiting": 0, "num_cells": 10 * number, "budget": 64,
    }  # fmt: skip
    return TickActivity(number, TickRecord(**{**record, **changes}), tenants)


def busy(slot: int, key: int, num_generated: int = 0, **more: Any) -> SlotView:
    return SlotView(id=slot, state="decoding", key=key, num_generated=num_generated, **more)


def active(now_s: float, *slots: SlotView, **more: Any) -> EngineActivity:
    return EngineActivity(started_s=0.0, now_s=now_s, last_number=0, slots=SlotsSnapshot(slots, 0), **more)


def test_a_tick_has_its_rows_as_lists_of_numbers() -> None:
    """Slot, key, choice, then prompt tokens, generated tokens, drafts and new tokens."""
    (shown,) = tick_members([tick(1, row(0, 7), row(1, 8, num_tokens=128, num_decode=0, num_new=0))], "")
    assert shown == {
        "t": 0.01, "ms": 8.0, "step_ms": 7.0, "n": 1, "running": 2, "waiting": 0, "cells": 10,
        "rows": [[0, 7, 0, 0, 1, 0, 1], [1, 8, 0, 128, 0, 0, 0]],
    }  # fmt: skip


def test_many_ticks_are_merged_with_their_neighbours() -> None:
    """Nothing is lost: their rows are summed up, the longest one shows."""
    ticks = [tick(number, row(0, 7), elapsed_s=0.02 if number == 3 else 0.008) for number in range(1, 11)]
    shown = tick_members(ticks, "", max_columns=5)
    assert [tick_member["n"] for tick_member in shown] == [2] * 5
    assert sum(tick_member["rows"][0][6] for tick_member in shown) == 10
    assert (shown[1]["ms"], shown[1]["longest_ms"]) == (14.0, 20.0)
    assert (shown[0]["t"], shown[0]["end_t"], shown[0]["cells"]) == (0.01, 0.028, 20)


def test_an_embedding_tick_is_not_merged_with_others() -> None:
    """It has texts and tokens in place of rows."""
    embed = tick(2, kind="embed", num_embedded=3, num_embedded_tokens=40)
    shown = tick_members([tick(1, row()), embed, tick(3, row())], "", max_columns=1)
    assert [tick_member.get("embed") for tick_member in shown] == [None, [3, 40], None]
    assert shown[1]["rows"] == []


def test_rows_of_other_tenants_are_sums() -> None:
    """Neither their slots nor their keys show, alone or merged."""
    rows = (row(0, 7), row(1, 8), row(2, 9, num_tokens=50, num_decode=0, num_new=0))
    one = tick(1, *rows, tenants=("blue", "red", "red"))
    (shown,) = tick_members([one], "blue")
    assert (shown["rows"], shown["others"]) == ([[0, 7, 0, 0, 1, 0, 1]], [2, 50, 1, 0, 1])
    (merged,) = tick_members([one, tick(2, row(0, 7))], "blue", max_columns=1)
    assert (merged["rows"], merged["others"]) == ([[0, 7, 0, 0, 1, 0, 1]], [3, 50, 2, 0, 2])
    (own,) = tick_members([tick(1, row(0, 7))], "")
    assert "others" not in own


def test_slots_queue_marks_and_trees_are_the_tenants_own() -> None:
    """Rows of others are counted."""
    wait = WaitingSequence(
        key=4, request_id="r", choice=0, tenant="red", num_prompt_tokens=9, num_generated=0, waiting_s=1.0,
        is_preempted=False, waits_for=None, reads_disk=False, priority=0,
    )  # fmt: skip
    node = TreeNode(
        id=1,
        parent=None,
        start=0,
        end=9,
        running=((4, 0),),
        num_cached=0,
        on_device=True,
        on_host=False,
        has_state=False,
    )
    trees = tuple(
        TenantTree(tenant=tenant, nodes=(node,), num_nodes=1, num_tokens=9, is_complete=True)
        for tenant in ("blue", "red")
    )
    activity = active(
        1.0, busy(0, 7, tenant="blue"), busy(1, 8, tenant="red"), SlotView(id=2), waiting=(wait,), num_waiting=1
    )
    rates = {(7, 0): 5.0, (8, 0): 6.0}
    (slot,) = slot_members(activity, "blue", rates)
    assert (slot["id"], slot["key"], slot["tokens_per_s"]) == (0, 7, 5.0)
    assert others_member(activity, "blue", rates, trees) == {
        "slots": 1, "prefilling": 0, "decoding": 1, "paused": 0, "waiting": 1, "tokens_per_s": 6.0, "tree_nodes": 1,
        "tree_tokens": 9,
    }  # fmt: skip
    assert queue_member(activity, "blue") == {"waiting": 1, "sequences": [], "embeddings": 0}
    assert queue_member(activity, "red")["sequences"][0]["request_id"] == "r"
    assert others_member(active(1.0, busy(0, 7)), "", {}, ()) is None
    mark = Mark(number=1, what="ended", key=8, choice=0, slot=1, now_s=1.5, tenant="red", reason=FinishReason.LENGTH)
    assert mark_members([mark], "blue") == []
    assert mark_members([mark], "red")[0]["reason"] == "length"
    assert tree_member(trees, "green", 5)["nodes"] == []
    assert tree_member(trees, "red", 0)["is_complete"] is False


def test_rates_are_of_the_last_second() -> None:
    """Of each sequence by its generated tokens, of the engine by its ticks; before two looks there is none."""
    meter = RateMeter()
    assert meter.member()["generated_per_s"] == 0.0
    for step in range(31):
        speed = 10 if step > 15 else 1
        before = step * 1 if step <= 15 else 15 + (step - 15) * 10
        meter.take(active(step / 10, busy(0, 7, before), ticks=(tick(step, row(num_new=speed)),)))
    assert meter.of_sequences() == {(7, 0): pytest.approx(100.0)}
    assert meter.member() == {
        "generated_per_s": pytest.approx(100.0), "prefill_per_s": 0.0, "ticks_per_s": pytest.approx(10.0),
    }  # fmt: skip
    meter.clear()
    meter.take(active(9.0, busy(0, 8, 100)))
    assert meter.of_sequences() == {}
