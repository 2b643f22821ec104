"""All metrics at one moment, as immutable records for any thread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from paceline import validation
from paceline.errors import InvalidParams
from paceline.observability import metric_table
from paceline.observability.metric_table import NAMES, Kind
from paceline.streaming.chunk import ENGINE_REASONS, FinishReason

COMPLETED: Final = (FinishReason.STOP, FinishReason.LENGTH)
CANCELLED: Final = (FinishReason.CANCELLED,)
FAILED: Final = tuple(reason for reason in ENGINE_REASONS if reason not in (*COMPLETED, *CANCELLED))


@dataclass(frozen=True, slots=True)
class Histogram:
    """Values counted by size. counts[i]: values <= bounds[i] and above the bound before; the last: above all bounds.

    bounds ascend; sum, smallest and largest are those of the values, in their unit (0 without values).
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float
    smallest: float
    largest: float

    @property
    def count(self) -> int:
        """Return the number of values."""
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """Return the mean of the values, None without values."""
        return self.sum / self.count if self.count else None

    def quantile(self, q: float) -> float | None:
        """Estimate the value below which a fraction `q` of the values lies; None without values.

        Interpolated linearly between the bounds of its bucket, so its error is at most the bucket's width.

        Raises:
            InvalidParams: q is not in [0, 1].
        """
        q = validation.number("q", q, 0, 1)
        if not self.count:
            return None
        sums = list(accumulate(self.counts))
        wanted = q * self.count
        index = next(index for index, sum_ in enumerate(sums) if self.counts[index] and sum_ >= wanted)
        low = self.bounds[index - 1] if index and self.bounds[index - 1] > self.smallest else self.smallest
        high = self.bounds[index] if index < len(self.bounds) and self.bounds[index] < self.largest else self.largest
        below = sums[index] - self.counts[index]
        return min(high, low + (high - low) * max(0.0, wanted - below) / self.counts[index])


@dataclass(frozen=True, slots=True)
class Sample:
    """One metric with one value of its label. labels: empty, or one pair of name and value."""

    name: str
    kind: Kind
    labels: tuple[tuple[str, str], ...]
    value: float | Histogram


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """The samples of all metrics, in the order of the table.

    An unknown name of a metric raises `InvalidParams`, which suggests a known one.
    """

    samples: tuple[Sample, ...]

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.samples)

    def number(self, name: str, label: str | None = None) -> float:
        """Return a counter or gauge with this label value, or the sum over all; 0 for a label value that never occurred."""
        values = [sample.value for sample in self._named(name, label)]
        numbers = [value for value in values if not isinstance(value, Histogram)]
        if len(numbers) < len(values):
            raise InvalidParams(f"{name} is a histogram; use histogram({name!r})")
        return sum(numbers)

    def histogram(self, name: str, label: str | None = None) -> Histogram:
        """Return a histogram; `label` selects one where a metric has several."""
        found = [sample.value for sample in self._named(name, label) if isinstance(sample.value, Histogram)]
        if len(found) != 1:
            labels = [value for sample in self._named(name) for _, value in sample.labels]
            way_out = f"pass a label, one of {', '.join(labels)}" if labels else f"use number({name!r})"
            raise InvalidParams(f"{name} is not a single histogram under the label {label!r}; {way_out}")
        return found[0]

    @property
    def submitted(self) -> int:
        """Return the number of requests accepted so far."""
        return int(self.number(metric_table.REQUESTS.name))

    @property
    def completed(self) -> int:
        """Return the number of requests that ended with `stop` or `length`."""
        return self._ended(COMPLETED)

    @property
    def cancelled(self) -> int:
        """Return the number of requests that their caller cancelled."""
        return self._ended(CANCELLED)

    @property
    def failed(self) -> int:
        """Return the number of requests that ended with `error`, `deadline`, `shutdown` or `slow_reader`."""
        return self._ended(FAILED)

    @property
    def resident(self) -> int:
        """Return the number of requests that got a slot and have not ended."""
        return int(self.number(metric_table.RESIDENT.name))

    @property
    def queued(self) -> int:
        """Return the number of requests that have not got a slot yet."""
        return int(self.number(metric_table.QUEUED.name))

    def _ended(self, reasons: tuple[FinishReason, ...]) -> int:
        return int(sum(self.number(metric_table.FINISHED.name, reason) for reason in reasons))

    def _named(self, name: str, label: str | None = None) -> list[Sample]:
        validation.choice("name", name, NAMES)
        named = [sample for sample in self.samples if sample.name == name]
        return [sample for sample in named if label is None or label in dict(sample.labels).values()]
