"""From the keywords of `LLM` to the setup of a worker: names and paths instead of objects, which stay in their process."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Mapping, Sequence
from contextlib import suppress
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from paceline import validation
from paceline.engine.projector_file import projector_file
from paceline.engine.spare_workers import module_path
from paceline.engine.worker import messages
from paceline.errors import InvalidParams, PacelineError
from paceline.runtime import Model
from paceline.runtime.gguf_check import files_beside
from paceline.speculation.named_drafter import draft_heads_of

_OF_THE_FRONT = frozenset(
    {
        "isolation",
        "on_engine_death",
        "max_restarts",
        "sleep_idle_s",
        "instruments",
        "progress",
        "cancel",
        "trace",
        "trace_max_bytes",
    }
)


def worker_setup(model: Any, options: Mapping[str, Any], trace_start_s: float | None = None) -> messages.Setup:
    """Return the first message to a worker. Raises `InvalidParams` for what cannot go to another process, with the way out."""
    options = validation.given(options)
    strategy = options.get("strategy", "")
    if not isinstance(strategy, (str, Mapping)):
        raise _no_object("strategy", strategy)
    drafter, is_object = options.get("speculation"), _is_object(options.get("speculation"))
    return messages.Setup(
        protocol=messages.PROTOCOL,
        model=_paths(model),
        options={
            name: _plain(name, value)
            for name, value in options.items()
            if name not in _OF_THE_FRONT and not (is_object and name == "speculation")
        },
        drafter=_pickled(drafter) if is_object else b"",
        instruments=_names(options.get("instruments", ())),
        path=module_path(),
        log_level=logging.getLogger("paceline").getEffectiveLevel(),
        reports_progress=options.get("progress") is not None or options.get("cancel") is not None,
        trace_start_s=trace_start_s,
    )


def model_files(setup: messages.Setup) -> list[Path]:
    """Return the files that a worker loads, without LoRA adapters: splits, projector, draft model and draft heads."""
    paths, options = [Path(path) for path in setup.model], setup.options
    given = options.get("draft_model") or ()
    files = [*_split(paths), *_split([Path(path) for path in ([given] if isinstance(given, str) else given)])]
    with suppress(PacelineError, OSError):  # the worker reports it
        if paths and (projector := projector_file(paths, options.get("mmproj"))) is not None:
            files.append(projector)
    with suppress(PacelineError):
        heads = draft_heads_of(options.get("speculation"))
        if heads is not None and heads.model is not None:
            files.append(Path(heads.model).absolute())
    return files


def _split(paths: list[Path]) -> Sequence[Path]:
    """Return all parts of a split set that is named by its first part."""
    with suppress(PacelineError):
        return files_beside(paths[0]) if len(paths) == 1 else paths
    return paths


def _paths(model: Any) -> list[str]:
    if isinstance(model, Model):
        raise InvalidParams(
            'model is loaded already, and isolation="process" loads it in a process of its own; give its path instead'
        )
    if model is None:
        from paceline.demo import demo_model_path

        model = demo_model_path()
    paths = [model] if isinstance(model, (str, os.PathLike)) else list(model)
    return [str(Path(path).absolute()) for path in paths]


def _names(instruments: Any) -> list[str]:
    if isinstance(instruments, str):
        raise InvalidParams(f"instruments must be a list of names, not the text {instruments!r}")
    for one in instruments:
        if not isinstance(one, str) or ":" not in one:
            raise _no_object("instruments", one)
    return list(instruments)


def _is_object(speculation: object) -> bool:
    if isinstance(speculation, (list, tuple)):
        return any(map(_is_object, speculation))
    return speculation is not None and not isinstance(speculation, (str, Mapping))


def _pickled(drafter: object) -> bytes:
    """Return the bytes of a drafter, or of several. Raises `InvalidParams` for one without, or that the worker would not find."""
    if isinstance(drafter, (list, tuple)):
        for one in drafter:
            _pickled(one)
    name = type(drafter).__name__
    if type(drafter).__module__ == "__main__":
        raise InvalidParams(
            f'speculation: {name} is defined in __main__, which the worker of isolation="process" does not run; move it into '
            'a module of its own, or use isolation="thread"'
        )
    try:
        return pickle.dumps(drafter)
    except Exception as error:
        raise InvalidParams(
            f'speculation: this {name} does not pickle ({error}), and lives in the worker with isolation="process"; give it '
            'as "module:attr", or use isolation="thread"'
        ) from error


def _no_object(name: str, value: object) -> InvalidParams:
    return InvalidParams(
        f'{name} must be named as "module:attr" with isolation="process", since it lives in the worker; '
        f"a {type(value).__name__} cannot go there"
    )


def _plain(name: str, value: Any) -> Any:
    """Return the value as messages carry it."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # of a subclass, such as NumPy's, the plain value
    if isinstance(value, Real):
        return int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, os.PathLike):
        return str(Path(value).absolute())
    if isinstance(value, Mapping):
        return {key: _plain(name, each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [_plain(name, each) for each in value]
    raise InvalidParams(
        f'{name} must be made of texts, numbers, paths, lists and mappings with isolation="process", '
        f"not of a {type(value).__name__}"
    )
