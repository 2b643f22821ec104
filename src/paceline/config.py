"""How an engine is set up: one frozen record, resolved once. Standard library only."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any, Literal, Self

from paceline import validation
from paceline.errors import InvalidParams, InvalidType

_MAX_SLOTS = 250  # llama.cpp has 256 sequence ids, and some are for kept prefixes


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The options of an engine; llama.cpp's own go beside it. Immutable; wrong values raise `InvalidParams`.

    num_slots: sequences that run at once. chunk_size: most prompt tokens of one sequence in a tick.
    strategy: what goes into a tick: "paced", "decode_maximal", "prefill_priority", "balanced", "module:attr", or an object
    with a `plan` method (see `BatchStrategy`).
    itl_target_ms: time between two tokens of a stream that "paced" aims at; None: 250 on a CPU, 50 where a GPU computes (of a
    `Model` that was loaded before: where there is one).
    max_tick_ms: longest tick of "paced" while nobody decodes, so that admission and cancel stay prompt.
    max_queue: requests that may be open beyond num_slots of them; open are all that have not ended, waiting or running, each
    counted once, whatever its n, embeddings as well. max_queue_tokens: prompt tokens that may wait; None: no limit; where
    none wait, a prompt of any length is taken. Beyond, `QueueFull`.
    isolation: "thread" computes in this process, "process" in one of its own, which may die without this one.
    on_engine_death: what becomes of requests whose process died: "replay" (the default there) lets them go on in a new
    process, "fail" ends them with `EngineDied`. Means nothing with threads.
    cache_prompt: whether prefixes are shared and kept at all; host_cache_bytes: most that idle ones may take in host memory;
    None: an eighth of the machine's. state_folder: where `save_prefix` writes; None: nowhere.
    """

    num_slots: int = 8
    chunk_size: int = 512
    strategy: Any = "paced"
    itl_target_ms: float | None = None
    max_tick_ms: float = 1000.0
    max_queue: int = 256
    max_queue_tokens: int | None = None
    isolation: Literal["thread", "process"] = "thread"
    on_engine_death: Literal["replay", "fail"] | None = None
    cache_prompt: bool = True
    host_cache_bytes: int | None = None
    state_folder: str | os.PathLike[str] | None = None

    def __new__(cls, **options: Any) -> Self:
        """Refuses unknown options with the nearest known one."""
        validation.reject_unknown(options, CONFIG_NAMES, "EngineConfig")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        validation.integer("num_slots", self.num_slots, 1, _MAX_SLOTS)
        validation.integer("chunk_size", self.chunk_size, 1)
        if self.itl_target_ms is not None:
            validation.number("itl_target_ms", self.itl_target_ms, above=0)
        validation.number("max_tick_ms", self.max_tick_ms, above=0)
        validation.integer("max_queue", self.max_queue, 0)
        if self.max_queue_tokens is not None:
            validation.integer("max_queue_tokens", self.max_queue_tokens, 1)
        validation.choice("isolation", self.isolation, ("thread", "process"))
        if self.on_engine_death is not None:
            validation.choice("on_engine_death", self.on_engine_death, ("replay", "fail"))
            if self.isolation == "thread":
                raise InvalidParams(
                    f'on_engine_death={self.on_engine_death!r} needs isolation="process": a thread dies with its program'
                )
        validation.boolean("cache_prompt", self.cache_prompt)
        if self.state_folder is not None and not isinstance(self.state_folder, (str, os.PathLike)):
            raise InvalidType(f"state_folder must be a path, not {type(self.state_folder).__name__}")
        if self.host_cache_bytes is not None:
            validation.integer("host_cache_bytes", self.host_cache_bytes, 0)


CONFIG_NAMES = frozenset(field.name for field in dataclasses.fields(EngineConfig))
