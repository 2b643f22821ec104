"""Logits processors of a user's own: functions that change a row of logits before a token is drawn, on the engine's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline import validation
from paceline.errors import InvalidType
from paceline.params import SamplingParams

LogitRow = npt.NDArray[np.float32]

LogitsProcessor = Callable[[list[int], LogitRow], LogitRow]
"""Takes the tokens that a choice has generated and the logits of the next one, and returns logits."""


class LogitsProcessors:
    """The processors of one choice, in order, and the tokens that it has generated."""

    def __init__(self, processors: Sequence[LogitsProcessor], token_ids: Sequence[int] = ()) -> None:
        self._processors = tuple(processors)
        self._token_ids = list(token_ids)

    def process(self, logits: LogitRow) -> LogitRow:
        """Return the logits that a token is drawn by. They may be the given ones, changed in place.

        Raises:
            InvalidType: A processor returned no row of logits.
            Exception: Whatever a processor raises.
        """
        shape = logits.shape
        for processor in self._processors:
            returned: Any = processor(list(self._token_ids), logits)
            logits = _row(returned, shape, processor)
        return logits

    def accept(self, token_id: int) -> None:
        """Note a token that was drawn."""
        self._token_ids.append(token_id)

    def copy(self) -> LogitsProcessors:
        """Return the same for another choice; the functions are shared."""
        return LogitsProcessors(self._processors, self._token_ids)


def logits_processors_of(params: SamplingParams) -> LogitsProcessors | None:
    """Return the processors of params, those that are named imported; None where there are none.

    Raises:
        InvalidParams: A name is not of the form "module:attr".
        InvalidType: What a name refers to is no function.
        Exception: Whatever an import raises.
    """
    if not params.logits_processors:
        return None
    return LogitsProcessors([_processor(index, one) for index, one in enumerate(params.logits_processors)])


def _processor(index: int, given: Any) -> LogitsProcessor:
    found = validation.import_named(given) if isinstance(given, str) else given
    if not callable(found):
        raise InvalidType(f"logits_processors[{index}]: {given!r:.80} is not a function, but a {type(found).__name__}")
    processor: LogitsProcessor = found
    return processor


def _row(returned: Any, shape: tuple[int, ...], processor: LogitsProcessor) -> LogitRow:
    try:
        row = None if returned is None else np.ascontiguousarray(returned, dtype=np.float32)
    except (TypeError, ValueError):
        row = None
    if row is None or row.shape != shape:
        name = getattr(processor, "__qualname__", type(processor).__name__)
        found = type(returned).__name__ if row is None else f"an array of the shape {row.shape}"
        raise InvalidType(f"logits_processors: {name} must return an array of the shape {shape}, not {found}")
    return row
