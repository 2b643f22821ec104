"""What a replica reports to routers."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from paceline import validation
from paceline.cluster.digest_update import DigestUpdate

ReplicaState = Literal["ready", "draining", "unhealthy"]


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What waits at a replica, and what its ticks cost.

    Attributes:
        num_slots: Sequences that run there at once, at least 1.
        num_running: Sequences that have a slot.
        num_waiting: Requests that have none yet.
        waiting_tokens: Prompt tokens that are accepted and left to compute.
        free_cells: KV cells that no running sequence has; those of cached prefixes are free, since they are evicted for
            it. None where memory is not made of cells.
        prefill_token_s: Seconds that a prompt token took lately, with what was computed beside it. Here and below 0 stands for
            what was not measured yet.
        tick_s: Seconds of a tick.
        slot_s: Seconds that a request has its slot.
    """

    num_slots: int
    num_running: int
    num_waiting: int
    waiting_tokens: int
    free_cells: int | None
    prefill_token_s: float
    tick_s: float
    slot_s: float


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True):
    """A replica at one moment.

    Attributes:
        state: Only a replica that is "ready" gets new requests.
        load: What waits there.
        digest: What changed of its cached prefixes; None: nothing is said of them.
    """

    state: ReplicaState
    load: ReplicaLoad
    digest: DigestUpdate | None = None


def check_report(report: ReplicaReport) -> None:
    """Raise `InvalidParams`, naming the field, for what no replica can report."""
    validation.choice("state", report.state, get_args(ReplicaState))
    load = report.load
    validation.integer("num_slots", load.num_slots, 1)
    for name in ("num_running", "num_waiting", "waiting_tokens"):
        validation.integer(name, getattr(load, name), 0)
    if load.free_cells is not None:
        validation.integer("free_cells", load.free_cells, 0)
    for name in ("prefill_token_s", "tick_s", "slot_s"):
        validation.number(name, getattr(load, name), 0)
