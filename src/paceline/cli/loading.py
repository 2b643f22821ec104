"""Loading a model while somebody watches."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli import reading, terminal
from paceline.cli.interrupt import Stop

if TYPE_CHECKING:
    from paceline.runtime import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """What the options say about the model; `path` None is the demo model."""

    path: Path | None = None
    n_gpu_layers: int | None = None
    devices: list[str] | None = None
    vocab_only: bool = False
    show_progress: bool = True
    verbose: bool = False


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and how long it took to load, in seconds."""

    model: Model
    load_s: float


def load(choice: ModelChoice, stop: Stop) -> LoadedModel:
    """Loads the model, with a progress bar where stderr is a terminal.

    Raises as `Model.load`, and `InvalidParams` for a path that is no text.
    """
    from paceline.demo import demo_model_path
    from paceline.runtime import Model

    if choice.verbose:
        _show_log()
    path = demo_model_path() if choice.path is None else choice.path
    reading.argument("the model's path", str(path))
    start = time.perf_counter()
    with _progress_bar(f"Loading {path.name}", choice.show_progress and not choice.verbose) as progress:
        model = Model.load(
            path,
            n_gpu_layers=choice.n_gpu_layers,
            devices=choice.devices or None,
            vocab_only=choice.vocab_only,
            progress=progress,
            cancel=stop.event,
        )
    return LoadedModel(model, time.perf_counter() - start)


@contextmanager
def _progress_bar(title: str, wanted: bool) -> Iterator[Callable[[float], object] | None]:
    """A bar on stderr that goes away at the end, as a function to be told the share that is done."""
    if not wanted or not terminal.is_terminal(sys.stderr):
        yield None
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    console = terminal.console(sys.stderr)
    if console.is_dumb_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task(terminal.printable(title), total=1.0)
        yield lambda share: bar.update(task, completed=share)


def _show_log() -> None:
    logger = logging.getLogger("paceline.llama")
    logger.addHandler(logging.StreamHandler(sys.stderr))
    logger.setLevel(logging.DEBUG)
