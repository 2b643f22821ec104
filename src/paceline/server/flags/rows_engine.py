"""Rows of the table: the engine's own options."""

from __future__ import annotations

from typing import Final

from paceline.server.flags import reading
from paceline.server.flags.flag import Flag, Group, Sets

_ENGINE: Final = (
    Flag(
        "--strategy",
        "NAME",
        reading.some_text,
        Sets(("engine.strategy",)),
        "What goes into a tick: paced, decode_maximal, prefill_priority, balanced, or module:attr.",
        ours=True,
    ),
    Flag(
        "--itl-target-ms",
        "MS",
        reading.number(),
        Sets(("engine.itl_target_ms",)),
        "Time between two tokens of a stream that the strategy paced aims at.",
        default="250 on a CPU, 50 on a GPU",
        ours=True,
    ),
    Flag(
        "--max-tick-ms",
        "MS",
        reading.number(),
        Sets(("engine.max_tick_ms",)),
        "Longest tick of the strategy paced while nobody decodes.",
        ours=True,
    ),
    Flag(
        "--chunk-size",
        "N",
        reading.integer(),
        Sets(("engine.chunk_size",)),
        "Most prompt tokens of one sequence in a tick.",
        ours=True,
    ),
    Flag(
        "--max-queue",
        "N",
        reading.integer(),
        Sets(("engine.max_queue",)),
        "Requests that may be open beyond one for each slot; further ones get a 429.",
        ours=True,
    ),
    Flag(
        "--max-queue-tokens",
        "N",
        reading.integer(),
        Sets(("engine.max_queue_tokens",)),
        "Prompt tokens that may wait; further requests get a 429.",
        default="no limit",
        ours=True,
    ),
    Flag(
        "--isolation",
        "process|thread",
        reading.text,
        Sets(("engine.isolation",)),
        "Where the engine computes: a process of its own, which may die without the server, or a thread of the server.",
        default="process",
        ours=True,
    ),
    Flag(
        "--on-engine-death",
        "replay|fail",
        reading.text,
        Sets(("engine.on_engine_death",)),
        "What becomes of requests whose engine died: they go on in a new one, or end with an error.",
        default="replay",
        ours=True,
    ),
)

GROUPS: Final[dict[Group, tuple[Flag, ...]]] = {"Engine": _ENGINE}
