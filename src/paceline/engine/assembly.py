"""Backend, scheduler and limits of an engine, put together from a model and options; whoever asked gives them a thread."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from paceline.engine.arguments import EngineArguments
from paceline.engine.building import build
from paceline.engine.calibration import calibrate
from paceline.engine.llama_backend import LlamaBackend
from paceline.runtime import Model
from paceline.scheduling.clock import Clock
from paceline.scheduling.limits import Limits
from paceline.scheduling.reports import Watch
from paceline.scheduling.scheduler import Scheduler
from paceline.scheduling.strategies import resolve_strategy


@dataclass(frozen=True, slots=True)
class Assembly:
    """The parts. at_end: what gives their memory back, in order, when the engine's thread is through.

    fingerprint: of whatever saved prefixes fit; empty for a model that cannot generate.
    """

    backend: LlamaBackend
    scheduler: Scheduler
    limits: Limits
    model: Model
    adapters: tuple[str, ...]
    fingerprint: bytes
    at_end: tuple[Callable[[], None], ...]


def assemble(
    model: Model | str | os.PathLike[str] | None, arguments: EngineArguments, clock: Clock, watch: Watch
) -> Assembly:
    """Loads and measures. Raises as `build`, and `InvalidParams` for a strategy that is none."""
    strategy = resolve_strategy(arguments.config.strategy)
    built = build(model, arguments)
    backend = LlamaBackend(built.model, built.context, built.adapters, built.embedder_options)
    scheduler = Scheduler(built.limits, strategy, clock, watch)
    if built.context is not None:
        calibrate(built.context, scheduler.pace)
    at_end = (backend.close, *((built.model.close,) if built.owns_model else ()))
    return Assembly(
        backend=backend,
        scheduler=scheduler,
        limits=built.limits,
        model=built.model,
        adapters=tuple(built.adapters),
        fingerprint=b"" if built.context is None else built.context.fingerprint,
        at_end=at_end,
    )
