"""An engine's activity as members of events, for one tenant at a time: plain values that JSON has. Pure.

docs/reference/engine_events.md describes each member.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from paceline.kv_cache import TenantTree
from paceline.observability import metric_table as table
from paceline.observability.metric_table import Histogram, MetricsSnapshot
from paceline.scheduling.records import (
    EngineActivity,
    Mark,
    RowRecord,
    SlotView,
    TickActivity,
    WaitingSequence,
)

MOST_COLUMNS: Final = 25
"""Ticks of 100 ms that are shown apart from each other; more are merged."""

_DIGITS: Final = 6  # of seconds
_MS_DIGITS: Final = 3
_QUANTILES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
_HISTOGRAMS: Final = {"itl_s": table.ITL_S, "ttft_s": table.TTFT_S}

Rates = Mapping[tuple[int, int], float]
"""Tokens a second by key and choice."""


def slot_members(activity: EngineActivity, tenant: str, rates: Rates) -> list[dict[str, Any]]:
    """Return the slots that the tenant's sequences have."""
    return [_slot(slot, rates) for slot in activity.slots if slot.is_processing and slot.tenant == tenant]


def _slot(slot: SlotView, rates: Rates) -> dict[str, Any]:
    assert slot.key is not None  # noqa: S101 - it is in use
    return {
        "id": slot.id,
        "state": slot.state,
        "key": slot.key,
        "request_id": slot.request_id,
        "choice": slot.choice,
        "prompt_tokens": slot.num_prompt_tokens,
        "cached_tokens": slot.num_cached,
        "cached_from": slot.cached_from,
        "computed_tokens": slot.num_computed_tokens,
        "generated_tokens": slot.num_generated,
        "max_tokens": slot.max_tokens,
        "running_s": round(slot.running_s, 3),
        "tokens_per_s": _rounded(rates.get((slot.key, slot.choice)), 2),
        "num_preempted": slot.num_preempted,
        "priority": slot.priority,
    }


def others_member(activity: EngineActivity, tenant: str, rates: Rates, trees: Iterable[TenantTree]) -> Any:
    """Return the sums of all other tenants; None if they have nothing."""
    slots = [slot for slot in activity.slots if slot.is_processing and slot.tenant != tenant]
    others = [tree for tree in trees if tree.tenant != tenant]
    num_own_waiting = sum(sequence.tenant == tenant for sequence in activity.waiting)
    num_listed = len(activity.waiting)
    num_waiting = num_listed - num_own_waiting
    if not slots and not others and not num_waiting:
        return None
    states = [slot.state for slot in slots]
    return {
        "slots": len(slots),
        **{state: states.count(state) for state in ("prefilling", "decoding", "paused")},
        "waiting": num_waiting,
        "tokens_per_s": round(sum(rates.get((slot.key or 0, slot.choice), 0.0) for slot in slots), 2),
        "tree_nodes": sum(tree.num_nodes for tree in others),
        "tree_tokens": sum(tree.num_tokens for tree in others),
    }


def queue_member(activity: EngineActivity, tenant: str) -> dict[str, Any]:
    """Return how many sequences wait, and the tenant's."""
    own = [_waiting(sequence) for sequence in activity.waiting if sequence.tenant == tenant]
    return {"waiting": activity.num_waiting, "sequences": own, "embeddings": activity.num_embedding}


def _waiting(sequence: WaitingSequence) -> dict[str, Any]:
    return {
        "key": sequence.key,
        "request_id": sequence.request_id,
        "choice": sequence.choice,
        "prompt_tokens": sequence.num_prompt_tokens,
        "generated_tokens": sequence.num_generated,
        "waiting_s": round(sequence.waiting_s, 3),
        "is_preempted": sequence.is_preempted,
        "waits_for": sequence.waits_for,
        "reads_disk": sequence.reads_disk,
        "priority": sequence.priority,
    }


def mark_members(marks: Iterable[Mark], tenant: str) -> list[dict[str, Any]]:
    """Return the events of the tenant's sequences beside ticks."""
    return [_mark(mark) for mark in marks if mark.tenant == tenant]


def _mark(mark: Mark) -> dict[str, Any]:
    reason = {} if mark.reason is None else {"reason": mark.reason}
    return {
        "t": round(mark.now_s, _DIGITS),
        "what": mark.what,
        "slot": mark.slot,
        "key": mark.key,
        "choice": mark.choice,
        **reason,
    }


def tree_member(trees: Iterable[TenantTree], tenant: str, max_nodes: int) -> dict[str, Any]:
    """Return the tenant's part of the radix tree."""
    own = next((tree for tree in trees if tree.tenant == tenant), None)
    if own is None:
        return {"num_nodes": 0, "num_tokens": 0, "is_complete": True, "nodes": []}
    nodes = [
        {
            "id": node.id,
            "parent": node.parent,
            "start": node.start,
            "end": node.end,
            "running": node.running,
            "cached": node.num_cached,
            "on_device": node.on_device,
            "on_host": node.on_host,
            "has_state": node.has_state,
        }
        for node in own.nodes[:max_nodes]  # each behind its parent
    ]
    return {
        "num_nodes": own.num_nodes,
        "num_tokens": own.num_tokens,
        "is_complete": own.is_complete and len(own.nodes) <= max_nodes,
        "nodes": nodes,
    }


def memory_member(activity: EngineActivity, rss_bytes: int | None) -> dict[str, Any]:
    """Return cells and bytes in use. rss_bytes: of the process that computes."""
    return {
        "cells": activity.num_cells,
        "free_cells": activity.num_free,
        "running_cells": activity.num_running_cells,
        "cached_cells": activity.num_cells - activity.num_running_cells,
        "host_bytes": activity.host_bytes,
        "rss_bytes": rss_bytes,
    }


def count_members(metrics: MetricsSnapshot) -> dict[str, Any]:
    """Return the counts of all tenants since the engine began."""
    counters = {
        "preemptions": table.PREEMPTIONS,
        "evicted_tokens": table.EVICTED,
        "cached_prompt_tokens": table.PREFIX_TOKENS,
        "prompt_tokens": table.PROMPT,
        "generated_tokens": table.GENERATED,
        "draft_tokens": table.DRAFTED,
        "accepted_tokens": table.ACCEPTED,
    }
    states = ("submitted", "completed", "cancelled", "failed", "resident", "queued")
    return {
        **{name: int(getattr(metrics, name)) for name in states},
        **{name: int(metrics.number(metric.name)) for name, metric in counters.items()},
    }


def histogram_members(metrics: MetricsSnapshot) -> dict[str, Any]:
    """Return the distributions of inter-token latency and time to first token."""
    return {name: _histogram(metrics.histogram(metric.name)) for name, metric in _HISTOGRAMS.items()}


def _histogram(histogram: Histogram) -> dict[str, Any]:
    quantiles = {name: _rounded(histogram.quantile(q), _DIGITS) for name, q in _QUANTILES.items()}
    return {
        "bounds": histogram.bounds,
        "counts": histogram.counts,
        "sum": round(histogram.sum, _DIGITS),
        **quantiles,
    }


# ---- ticks


def tick_members(ticks: Sequence[TickActivity], tenant: str, max_columns: int = MOST_COLUMNS) -> list[dict[str, Any]]:
    """Return ticks in order. More than max_columns: neighbours of the same kind are merged, so that about as many are left."""
    size = -(-len(ticks) // max(1, max_columns))
    shown: list[dict[str, Any]] = []
    for _, same in groupby(ticks, key=lambda tick: tick.record.kind):
        found = list(same)
        parts = [found[at : at + size] for at in range(0, len(found), size)] if size > 1 else [[tick] for tick in found]
        shown += [_column(part, tenant) for part in parts]
    return shown


def _column(ticks: list[TickActivity], tenant: str) -> dict[str, Any]:
    """Return one tick, or several neighbours as one."""
    last, num = ticks[-1].record, len(ticks)
    members: dict[str, Any] = {
        "t": round(ticks[0].record.start_s, _DIGITS),
        "ms": round(1000 * sum([tick.record.elapsed_s for tick in ticks]) / num, _MS_DIGITS),
        "step_ms": round(1000 * sum([tick.record.step_s for tick in ticks]) / num, _MS_DIGITS),
        "n": num,
        "running": last.num_running,
        "waiting": last.num_waiting,
        "cells": last.num_cells,
    }
    if num > 1:
        members["longest_ms"] = round(1000 * max([tick.record.elapsed_s for tick in ticks]), _MS_DIGITS)
        members["end_t"] = round(last.start_s + last.elapsed_s, _DIGITS)
    if last.kind == "embed":
        texts = sum([tick.record.num_embedded for tick in ticks])
        tokens = sum([tick.record.num_embedded_tokens for tick in ticks])
        return {**members, "embed": [texts, tokens], "rows": []}
    return {**members, **_row_members(ticks, tenant)}


def _row_members(ticks: list[TickActivity], tenant: str) -> dict[str, Any]:
    """Return the rows of the tenant, summed up by slot, request and choice, and the sums of the others'. Often called: quick."""
    if len(ticks) == 1 and not ticks[0].tenants and not tenant:
        return {"rows": [_row(row) for row in ticks[0].record.rows]}
    own: dict[tuple[int, int, int], list[int]] = {}
    others = [0, 0, 0, 0, 0]
    for tick in ticks:
        rows = tick.record.rows
        for row, owner in zip(rows, tick.tenants or ("",) * len(rows), strict=True):
            if owner != tenant:
                others[0] += 1
                _add(others, 1, row)
            elif (same := own.get((row.slot, row.key, row.choice))) is None:
                own[row.slot, row.key, row.choice] = _row(row)
            else:
                _add(same, 3, row)
    return {"rows": list(own.values()), **({"others": others} if others[0] else {})}


def _row(row: RowRecord) -> list[int]:
    prefill = row.num_tokens - row.num_decode - row.num_drafts
    return [row.slot, row.key, row.choice, prefill, row.num_decode, row.num_drafts, row.num_new]


def _add(sums: list[int], at: int, row: RowRecord) -> None:
    """Add prefill, decode, drafts and new tokens of a row to sums, which has them from there on."""
    num_decode, num_drafts = row.num_decode, row.num_drafts
    sums[at] += row.num_tokens - num_decode - num_drafts
    sums[at + 1] += num_decode
    sums[at + 2] += num_drafts
    sums[at + 3] += row.num_new


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


# ---- rates

_RATE_S: Final = 1.0


@dataclass(slots=True)
class _Look:
    """One look at the engine: the number of generated tokens of each sequence, and sums of the ticks since the last look."""

    now_s: float
    generated: dict[tuple[int, int], int]
    num_new: int
    num_prefill: int
    num_ticks: int


class RateMeter:
    """Tokens a second of about the last second, from successive looks at one engine."""

    def __init__(self) -> None:
        self._looks: list[_Look] = []

    def take(self, activity: EngineActivity) -> None:
        """Take in the current activity."""
        slots = [slot for slot in activity.slots if slot.key is not None]
        records = [tick.record for tick in activity.ticks]
        look = _Look(
            now_s=activity.now_s,
            generated={(slot.key or 0, slot.choice): slot.num_generated for slot in slots},
            num_new=sum([row.num_new for record in records for row in record.rows]),
            num_prefill=sum([record.num_prefill for record in records]),
            num_ticks=len(records),
        )
        self._looks.append(look)
        while len(self._looks) > 2 and self._looks[1].now_s <= look.now_s - _RATE_S:
            del self._looks[0]

    def clear(self) -> None:
        """Forget all looks, since the engine began anew."""
        self._looks.clear()

    def of_sequences(self) -> dict[tuple[int, int], float]:
        """Return the rate of each sequence that has had a slot for two looks."""
        if not self._looks:
            return {}
        now = self._looks[-1]
        rates: dict[tuple[int, int], float] = {}
        for name, num_generated in now.generated.items():
            before = next((look for look in self._looks if name in look.generated), now)
            passed_s = now.now_s - before.now_s
            if passed_s > 0:
                rates[name] = max(0, num_generated - before.generated[name]) / passed_s
        return rates

    def member(self) -> dict[str, float]:
        """Return the rates of the whole engine."""
        looks = self._looks
        passed_s = looks[-1].now_s - looks[0].now_s if len(looks) > 1 else 0.0
        if passed_s <= 0:
            return {"generated_per_s": 0.0, "prefill_per_s": 0.0, "ticks_per_s": 0.0}
        later = looks[1:]
        return {
            "generated_per_s": round(sum(look.num_new for look in later) / passed_s, 2),
            "prefill_per_s": round(sum(look.num_prefill for look in later) / passed_s, 2),
            "ticks_per_s": round(sum(look.num_ticks for look in later) / passed_s, 2),
        }
