"""Which engine a front door opens: one with a thread here, or one with a process of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.engine.arguments import engine_arguments
from paceline.runtime import Model

if TYPE_CHECKING:
    from paceline.engine.any_engine import AnyEngine


def check_options(model: Any, options: Mapping[str, Any]) -> None:
    """Raises what can be said to be wrong with the options before anything is loaded."""
    if engine_arguments(options).config.isolation == "process":
        from paceline.engine.isolation.setup import worker_setup

        worker_setup(model, options)


def open_engine(model: Model | str | os.PathLike[str] | None, options: Mapping[str, Any]) -> AnyEngine:
    """An engine by its option `isolation`. Raises what is wrong with the options, and what loading raises."""
    if engine_arguments(options).config.isolation == "process":
        from paceline.engine.process_engine import ProcessEngine

        return ProcessEngine(model, options)
    from paceline.engine.local_engine import LocalEngine

    return LocalEngine(model, options)
