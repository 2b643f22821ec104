"""All metrics at one moment, as records that never change; any thread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from paceline import validation
from paceline.engine import metric_table
from paceline.engine.histogram import Histogram
from paceline.engine.metric_table import NAMES, Kind
from paceline.errors import InvalidParams
from paceline.streaming.chunk import FinishReason

COMPLETED: Final = (FinishReason.STOP, FinishReason.END, FinishReason.LENGTH)
CANCELLED: Final = (FinishReason.CANCELLED,)
FAILED: Final = tuple(reason for reason in FinishReason if reason not in (*COMPLETED, *CANCELLED))


@dataclass(frozen=True, slots=True)
class Sample:
    """One metric under one value of its label. labels: none, or a name and its value. value: a number, or a histogram."""

    name: str
    kind: Kind
    labels: tuple[tuple[str, str], ...]
    value: float | Histogram


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """Samples in the order of the table. Unknown names raise `InvalidParams` and are answered with the nearest known one."""

    samples: tuple[Sample, ...]

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.samples)

    def number(self, name: str, label: str | None = None) -> float:
        """A counter or a gauge, under one value of its label or the sum of all; 0 for a value that never occurred."""
        values = [sample.value for sample in self._named(name, label)]
        numbers = [value for value in values if not isinstance(value, Histogram)]
        if len(numbers) < len(values):
            raise InvalidParams(f"{name} is a histogram; use histogram({name!r})")
        return sum(numbers)

    def histogram(self, name: str, label: str | None = None) -> Histogram:
        """A histogram; `label` chooses one where there are several."""
        found = [sample.value for sample in self._named(name, label) if isinstance(sample.value, Histogram)]
        if len(found) != 1:
            labels = [value for sample in self._named(name) for _, value in sample.labels]
            way_out = f"give a label, one of {', '.join(labels)}" if labels else f"use number({name!r})"
            raise InvalidParams(f"{name} is no single histogram under the label {label!r}; {way_out}")
        return found[0]

    @property
    def submitted(self) -> int:
        """Requests accepted so far."""
        return int(self.number(metric_table.REQUESTS.name))

    @property
    def completed(self) -> int:
        """Requests that ended by themselves: at a stop, at the model's end, at their length."""
        return self._ended(COMPLETED)

    @property
    def cancelled(self) -> int:
        """Requests that their caller cancelled."""
        return self._ended(CANCELLED)

    @property
    def failed(self) -> int:
        """Requests that ended otherwise: error, deadline, shutdown, slow reader."""
        return self._ended(FAILED)

    @property
    def resident(self) -> int:
        """Requests that had a slot and have not ended."""
        return int(self.number(metric_table.RESIDENT.name))

    @property
    def queued(self) -> int:
        """Requests that never had a slot yet."""
        return int(self.number(metric_table.QUEUED.name))

    def _ended(self, reasons: tuple[FinishReason, ...]) -> int:
        return int(sum(self.number(metric_table.FINISHED.name, reason.value) for reason in reasons))

    def _named(self, name: str, label: str | None = None) -> list[Sample]:
        validation.choice("name", name, NAMES)
        named = [sample for sample in self.samples if sample.name == name]
        return [sample for sample in named if label is None or label in dict(sample.labels).values()]
