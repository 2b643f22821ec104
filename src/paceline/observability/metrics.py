"""Instruments, the hooks that an engine calls, and `Metrics`, the instrument that counts what `metric_table` defines.

Hooks run on the engine's thread. Only hooks that a subclass overrides are called. If a hook raises, the error is logged once
and the instrument is removed. Any thread may read metrics: a lock is held for as long as copying takes. Memory is bounded by
the live requests, however many have ended.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from paceline import validation
from paceline.errors import InvalidParams, InvalidType, PacelineError
from paceline.observability import metric_table as table
from paceline.observability.metric_table import COMPLETED, METRICS, Histogram, Metric, MetricsSnapshot, Sample
from paceline.scheduling.records import EndRecord, RequestRecord, TickRecord
from paceline.streaming.chunk import FinishReason, Usage

_log = logging.getLogger("paceline.engine")


class Instrument:
    """Observe an engine: override the hooks you need. Their arguments are frozen records and numbers.

    Times are seconds on the engine's clock; key: the request's number, unique in its engine; choice: the number of the choice.

    Example:
        ```python
        class Preemptions(paceline.Instrument):
            num = 0

            def preempted(self, key, choice, num_computed_tokens, now_s):
                self.num += 1
        ```
    """

    def request_queued(self, record: RequestRecord) -> None:
        """Handle an accepted request; it waits in the queue."""

    def request_started(self, key: int, choice: int, slot: int, now_s: float) -> None:
        """Handle a sequence that got its slot, for the first time or again after a preemption."""

    def request_ended(self, record: EndRecord) -> None:
        """Handle the end of a request; its terminal chunk is on its way."""

    def slot_freed(self, key: int, choice: int, slot: int, now_s: float) -> None:
        """Handle a sequence that left its slot: it ended, or was preempted."""

    def preempted(self, key: int, choice: int, num_computed_tokens: int, now_s: float) -> None:
        """Handle a preemption: a sequence with so many computed tokens lost its slot and waits to continue.

        Reasons: KV cells were short, its reader paused it while other requests wait, or its prefix match could not be loaded.
        Host memory keeps the computed tokens if it has space; otherwise they are recomputed.
        """

    def prefix_shared(self, key: int, choice: int, num_tokens: int, source: str) -> None:
        """Handle a prefix match: so many prompt tokens were reused instead of computed; source as in `Usage.cached_from`."""

    def prefix_instability(self, key: int, num_cached: int, num_matched: int, now_s: float) -> None:
        """Handle a long cached prompt of which only the beginning matched: the sign of a template that rewrites history."""

    def evicted(self, num_tokens: int, source: str, now_s: float) -> None:
        """Handle the eviction of this many tokens of a cached prefix; source: their place, "device" or "host".

        Host memory keeps tokens evicted from the device if it has space; tokens evicted from the host are gone.
        """

    def engine_restarted(self, now_s: float) -> None:
        """Handle a restart: the worker process died and a new one took over."""

    def paused(self, key: int, is_paused: bool, now_s: float) -> None:
        """Handle a request that a slow reader paused, or that continues."""

    def tick_finished(self, record: TickRecord) -> None:
        """Handle a tick that has computed something; its events are on their way."""


HOOKS: Final = tuple(name for name, value in vars(Instrument).items() if callable(value) and not name.startswith("_"))
"""The names of the hooks, in the order of `Instrument`."""

_Listeners = tuple[tuple[Instrument, Callable[..., object]], ...]


class Instruments(Instrument):
    """Dispatch every hook to the instruments that override it. One without listeners costs a look at an empty tuple.

    An instrument whose hook raises an `Exception` is logged once, with its traceback, on the logger "paceline.engine", and
    removed from every hook; the others are still called. A `BaseException` like `KeyboardInterrupt` propagates.
    Any thread may call `add` and `remove`.

    Args:
        instruments: called in this order.
        own: the engine's own instrument, called before them and not counted in error messages.

    Raises:
        InvalidType: an element is not an `Instrument`.
        InvalidParams: an instrument is given twice.
    """

    def __init__(self, instruments: Iterable[Instrument] = (), *, own: Instrument | None = None) -> None:
        self._changing = threading.Lock()
        self._members: tuple[Instrument, ...] = ()
        self._listeners: Mapping[str, _Listeners] = dict.fromkeys(HOOKS, ())
        self.metrics = own if isinstance(own, Metrics) else Metrics()
        """The engine's own metrics, for events without a hook."""
        if own is not None:
            self.add(own)
        for index, instrument in enumerate(_listed(instruments)):
            self._add(f"instruments[{index}]", instrument)

    @property
    def members(self) -> tuple[Instrument, ...]:
        """Return the instruments in use; one that raised is no longer among them."""
        return self._members

    @property
    def wants_ticks(self) -> bool:
        """Return whether an instrument overrides `tick_finished`; otherwise no `TickRecord` need be built."""
        return bool(self._listeners["tick_finished"])

    def add(self, instrument: Instrument) -> None:
        """Call this instrument too from now on, also for requests that were queued before."""
        self._add("instrument", instrument)

    def remove(self, instrument: Instrument) -> bool:
        """Stop calling this instrument, a hook in progress aside, and return whether it was in use."""
        with self._changing:
            others = tuple(member for member in self._members if member is not instrument)
            was_there = len(others) < len(self._members)
            self._replace(others)
        return was_there

    def drafter_failed(self, error: PacelineError) -> None:
        """Log it: there is no hook for it."""
        _log.warning("%s; no request fails for it", error, exc_info=error)

    def _call(self, hook: str, *args: Any) -> None:
        for instrument, listen in self._listeners[hook]:
            try:
                listen(*args)
            except Exception:  # noqa: BLE001 - the engine survives any instrument
                self._drop(instrument, hook)

    def _drop(self, instrument: Instrument, hook: str) -> None:
        if self.remove(instrument):
            name = f"{type(instrument).__module__}.{type(instrument).__qualname__}"
            _log.exception("the instrument %s failed in %s and is removed", name, hook)

    def _add(self, name: str, instrument: object) -> None:
        if not isinstance(instrument, Instrument):
            raise InvalidType(f"{name} must be an Instrument, not {_described(instrument)}")
        with self._changing:
            if any(member is instrument for member in self._members):
                raise InvalidParams(f"{name} is already among the instruments; add each one once")
            self._replace((*self._members, instrument))

    def _replace(self, members: tuple[Instrument, ...]) -> None:
        """Replace both by new objects, since a hook may be iterating over the old objects."""
        self._members = members
        self._listeners = {
            hook: tuple((member, getattr(member, hook)) for member in members if _overrides(member, hook))
            for hook in HOOKS
        }


def _dispatching(hook: str) -> Callable[..., None]:
    def dispatch(self: Instruments, *args: Any) -> None:
        self._call(hook, *args)

    return dispatch


for _hook in HOOKS:
    setattr(Instruments, _hook, _dispatching(_hook))


def resolve_instruments(instruments: Iterable[Instrument | str]) -> tuple[Instrument, ...]:
    """Return the instruments; import one named as `module:attr`, and instantiate it if that is a class.

    Raises:
        InvalidParams: a name is not of that form, or cannot be imported or instantiated.
    """
    return tuple(
        _named(index, instrument) if isinstance(instrument, str) else instrument
        for index, instrument in enumerate(instruments)
    )


def _named(index: int, name: str) -> Instrument:
    if ":" not in name:
        raise InvalidParams(
            f"instruments[{index}] must be an Instrument or the name of one as 'module:attr', not {name!r}"
        )
    try:
        found: Any = validation.import_named(name)
        made: Instrument = found() if isinstance(found, type) else found
    except Exception as error:  # whatever an import or a constructor may raise
        raise InvalidParams(
            f"instruments[{index}] {name!r} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    return made


def _listed(instruments: object) -> list[object]:
    if not isinstance(instruments, Iterable):
        raise InvalidType(f"instruments must be a sequence of Instrument objects, not {_described(instruments)}")
    return list(instruments)


def _overrides(instrument: Instrument, hook: str) -> bool:
    return getattr(getattr(instrument, hook), "__func__", None) is not vars(Instrument)[hook]


def _described(value: object) -> str:
    return f"the class {value.__qualname__}; make one of it" if isinstance(value, type) else f"a {type(value).__name__}"


class Metrics(Instrument):
    """Count the work of an engine. Added to a running engine, it counts only requests that are queued afterwards.

    Args:
        num_slots: the engine's number of slots, reported until the first tick.
        has_ticks: False if `tick_finished` is never called, because a worker process counts ticks itself.
    """

    def __init__(self, num_slots: int = 0, *, has_ticks: bool = True) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[str, dict[str, float]] = {
            metric.name: dict.fromkeys(_known(metric), 0) for metric in METRICS if not metric.buckets
        }
        self._tallies = {
            metric.name: {label: Tally(metric.buckets) for label in _known(metric)}
            for metric in METRICS
            if metric.buckets
        }
        self._gauge(table.SLOTS, num_slots)
        self._times = TokenTimes(has_ticks=has_ticks)
        self._in_slots: set[tuple[int, int]] = set()
        self._num_stray = 0

    def set_num_slots(self, count: int) -> None:
        """Set the number of slots, if it is known only after a model is loaded."""
        with self._lock:
            self._gauge(table.SLOTS, count)

    def snapshot(self) -> MetricsSnapshot:
        """Return all metrics at one moment."""
        with self._lock:
            return MetricsSnapshot(tuple(self._samples()))

    def collect(self) -> Iterator[Sample]:
        """Iterate over the samples of a snapshot."""
        return iter(self.snapshot())

    def check(self) -> None:
        """Verify that every accepted request is counted in exactly one state.

        Only for metrics that an engine has had from its first request: hooks for requests queued before count as errors.

        Raises:
            AssertionError: a request is lost, counted twice or unknown.
        """
        with self._lock:
            now, num_stray = MetricsSnapshot(tuple(self._samples())), self._num_stray
            num_resident = sum(live.has_started for live in self._times)
            num_queued = len(self._times) - num_resident
        if (now.queued, now.resident) != (num_queued, num_resident):
            raise AssertionError(f"{num_queued} requests wait and {num_resident} run, but {_describe_states(now)}")
        if now.submitted != now.completed + now.cancelled + now.failed + now.resident + now.queued:
            raise AssertionError(f"requests are lost or counted twice: {_describe_states(now)}")
        if num_stray:
            raise AssertionError(f"{num_stray} hooks named a request that is not live; {_describe_states(now)}")

    def request_queued(self, record: RequestRecord) -> None:
        """Count an accepted request as queued."""
        with self._lock:
            if not self._times.add(record):
                self._num_stray += 1
                return
            self._count(table.REQUESTS, 1, record.kind)
            self._count(table.PROMPT, record.prompt_tokens)
            self._count(table.QUEUED, 1)

    def request_started(self, key: int, choice: int, slot: int, now_s: float) -> None:  # noqa: ARG002 - the hook's shape
        """Count a request as resident from its first slot on."""
        with self._lock:
            self._in_slots.add((key, choice))
            live = self._times.find(key)
            if live is None:
                self._num_stray += 1
            elif live.start():
                self._count(table.QUEUED, -1)
                self._count(table.RESIDENT, 1)
                self._observe(table.QUEUE_S, now_s - live.record.submitted_s)

    def request_ended(self, record: EndRecord) -> None:
        """Count the end of a request and forget it."""
        with self._lock:
            live = self._times.pop(record.key)
            if live is None:
                self._num_stray += 1
                return
            self._count(table.RESIDENT if live.has_started else table.QUEUED, -1)
            self._count(table.FINISHED, 1, record.reason)
            self._observe(table.REQUEST_S, record.now_s - live.record.submitted_s)
            if record.error_code is not None:
                self._count(table.ERRORS, 1, record.error_code)
            if record.reason is FinishReason.SLOW_READER:
                self._count(table.SLOW_READERS, 1, "cancelled")
            if record.reason in COMPLETED and not live.has_started:  # an embedding request needs no slot
                self._observe(table.QUEUE_S, record.usage.queue_s)
            self._count_drafts(record.usage)
            self._note_tokens(live.record, record.usage)

    def slot_freed(self, key: int, choice: int, slot: int, now_s: float) -> None:  # noqa: ARG002
        """Count one slot in use less."""
        with self._lock:
            self._in_slots.discard((key, choice))

    def preempted(self, key: int, choice: int, num_computed_tokens: int, now_s: float) -> None:  # noqa: ARG002
        """Count a preemption and the computed tokens it took away."""
        with self._lock:
            self._count(table.PREEMPTIONS, 1)
            self._count(table.PREEMPTED, num_computed_tokens)

    def prefix_shared(self, key: int, choice: int, num_tokens: int, source: str) -> None:  # noqa: ARG002
        """Count a prefix hit and its tokens by their source."""
        with self._lock:
            self._count(table.PREFIX_HITS, 1, source)
            self._count(table.PREFIX_TOKENS, num_tokens, source)

    def prefix_instability(self, key: int, num_cached: int, num_matched: int, now_s: float) -> None:  # noqa: ARG002
        """Count a cached prompt of which little matched."""
        with self._lock:
            self._count(table.INSTABILITY, 1)

    def evicted(self, num_tokens: int, source: str, now_s: float) -> None:  # noqa: ARG002
        """Count an eviction and its tokens by their source."""
        with self._lock:
            self._count(table.EVICTIONS, 1, source)
            self._count(table.EVICTED, num_tokens, source)

    def count_lookup(self, *, is_hit: bool) -> None:
        """Count a search of the disk cache. This and the next two: any thread, no hook."""
        with self._lock:
            self._count(table.DISK_LOOKUPS, 1, "hit" if is_hit else "miss")

    def count_blocks(self, event: str, num_tokens: int, num_bytes: int, num_blocks: int = 1) -> None:
        """Count blocks of the disk cache. event: a label of `metric_table.DISK_BLOCKS`."""
        with self._lock:
            self._count(table.DISK_BLOCKS, num_blocks, event)
            self._count(table.DISK_TOKENS, num_tokens, event)
            self._count(table.DISK_BLOCK_BYTES, num_bytes, event)

    def note_disk(self, num_bytes: int | None = None, *, read_s: float = 0.0, write_s: float = 0.0) -> None:
        """Note the size of the disk cache, if it is known, and times of the disk."""
        with self._lock:
            if num_bytes is not None:
                self._gauge(table.DISK_BYTES, num_bytes)
            self._count(table.DISK_READ_S, read_s)
            self._count(table.DISK_WRITE_S, write_s)

    def engine_restarted(self, now_s: float) -> None:  # noqa: ARG002
        """Count a restart; no sequence is in a slot any more."""
        with self._lock:
            self._count(table.RESTARTS, 1)
            self._in_slots.clear()

    def paused(self, key: int, is_paused: bool, now_s: float) -> None:  # noqa: ARG002
        """Count a pause, which is excluded from inter-token latency."""
        with self._lock:
            if is_paused:
                self._count(table.SLOW_READERS, 1, "paused")
                self._times.pause(key)

    def tick_finished(self, record: TickRecord) -> None:
        """Count the computed and generated tokens of a tick, and observe the latencies that its tokens end."""
        with self._lock:
            self._tallies[table.TICK_S.name][record.kind].observe(record.elapsed_s)
            self._observe(table.TICK_OWN_S, record.elapsed_s - record.step_s)
            self._gauge(table.SLOTS, record.num_slots)
            if record.kind == "embed":
                self._count(table.EMBEDDED, record.num_embedded)
                self._count(table.EMBEDDED_TOKENS, record.num_embedded_tokens)
            else:
                self._count_rows(record)

    def _count_rows(self, record: TickRecord) -> None:
        self._gauge(table.KV_CELLS, record.num_cells)  # embedding ticks use cells of another context
        num_tokens = num_decode = num_drafts = num_proposals = num_new = 0
        for row in record.rows:
            num_tokens += row.num_tokens
            num_decode += row.num_decode
            num_drafts += row.num_drafts
            num_proposals += row.num_drafts > 0
            num_new += row.num_new
        num_prefill = num_tokens - num_decode - num_drafts
        if num_prefill:
            self._count(table.PREFILL, num_prefill)
            self._count(table.PREFILL_S, record.step_s)
        self._count(table.DECODE, num_decode + num_drafts)
        self._count(table.GENERATED, num_new)
        if num_proposals:
            self._count(table.PROPOSALS, num_proposals)
        self._observe(table.TICK_ROWS, len(record.rows))
        if record.num_slots:  # a trace file may have any value
            self._observe(table.OCCUPANCY, record.num_running / record.num_slots)
        ttfts_s, intervals_s = self._times.tick(record)
        for ttft_s in ttfts_s:
            self._observe(table.TTFT_S, ttft_s)
        for interval_s, num_times in intervals_s.items():
            self._observe(table.ITL_S, interval_s, num_times)

    def _count_drafts(self, usage: Usage) -> None:
        self._count(table.DRAFTED, usage.draft_tokens)
        self._count(table.ACCEPTED, usage.accepted_tokens)

    def _note_tokens(self, request: RequestRecord, usage: Usage) -> None:
        largest, mine = self._numbers[table.TOKENS_MAX.name], usage.prompt_tokens + usage.completion_tokens
        if request.kind == "generate" and mine > largest[""]:
            largest[""] = mine

    def _count(self, metric: Metric, by: float, label: str = "") -> None:
        numbers = self._numbers[metric.name]
        numbers[label] = numbers.get(label, 0) + by

    def _gauge(self, metric: Metric, value: int) -> None:
        self._numbers[metric.name][""] = value

    def _observe(self, metric: Metric, value: float, times: int = 1) -> None:
        self._tallies[metric.name][""].observe(value, times)

    def _samples(self) -> Iterator[Sample]:
        self._gauge(table.SLOTS_IN_USE, len(self._in_slots))
        for metric in METRICS:
            for label, number in self._numbers.get(metric.name, {}).items():
                yield _sample(metric, label, number)
            for label, tally in self._tallies.get(metric.name, {}).items():
                yield _sample(metric, label, tally.histogram())


def _sample(metric: Metric, label: str, value: float | Histogram) -> Sample:
    labels = () if metric.label is None else ((metric.label, label),)
    return Sample(metric.name, metric.kind, labels, value)


def _known(metric: Metric) -> tuple[str, ...]:
    """Return the label values that are present from the start; "" for a metric without a label."""
    return ("",) if metric.label is None else metric.known


def _describe_states(now: MetricsSnapshot) -> str:
    return (
        f"submitted {now.submitted}, completed {now.completed}, cancelled {now.cancelled}, failed {now.failed}, "
        f"resident {now.resident}, queued {now.queued}"
    )


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request that has not ended. last_s: by choice, the time of its last token, unless the request is paused."""

    record: RequestRecord
    has_started: bool = False
    has_token: bool = False
    last_s: dict[int, float] = field(default_factory=dict)

    def start(self) -> bool:
        """Note that it got a slot, and return whether this was the first time."""
        is_first, self.has_started = not self.has_started, True
        return is_first


class TokenTimes:
    """Track the live requests by key, and measure time to first token and inter-token latency. One thread, in order.

    A request may end before the tick with its last token is reported, so one that had a slot is kept until that tick;
    without has_ticks it is forgotten at once.
    """

    def __init__(self, *, has_ticks: bool = True) -> None:
        self._has_ticks = has_ticks
        self._live: dict[int, LiveRequest] = {}
        self._ending: dict[int, LiveRequest] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(self._live.values())

    def add(self, record: RequestRecord) -> bool:
        """Track a request and return True; return False and change nothing if its key is live already."""
        if record.key in self._live:
            return False
        self._live[record.key] = LiveRequest(record)
        return True

    def find(self, key: int) -> LiveRequest | None:
        """Return a live request."""
        return self._live.get(key)

    def pop(self, key: int) -> LiveRequest | None:
        """End a request and return it."""
        live = self._live.pop(key, None)
        if live is not None and live.has_started and self._has_ticks:
            self._ending[key] = live
        return live

    def pause(self, key: int) -> None:
        """Discard the running intervals: a slow reader pauses the request, and the next token starts anew."""
        live = self._live.get(key)
        if live is not None:
            live.last_s.clear()

    def tick(self, record: TickRecord) -> tuple[list[float], dict[float, int]]:
        """Return the times to first token and the inter-token intervals, with their counts, that a tick's tokens end.

        All tokens come at its end; k at once end k intervals of equal length.
        """
        now_s = record.start_s + record.elapsed_s
        ttfts_s: list[float] = []
        intervals_s: dict[float, int] = {}
        for row in record.rows:
            if not row.num_new:
                continue
            live = self._live.get(row.key) or self._ending.get(row.key)
            if live is None:
                continue
            last_s = live.last_s.get(row.choice)
            live.last_s[row.choice] = now_s
            if last_s is not None:
                interval_s = (now_s - last_s) / row.num_new
                intervals_s[interval_s] = intervals_s.get(interval_s, 0) + row.num_new
            if row.first and not live.has_token:
                live.has_token = True
                ttfts_s.append(now_s - live.record.submitted_s)
        self._ending.clear()
        return ttfts_s, intervals_s


class Tally:
    """Collect a histogram in bounded memory. Not thread-safe: the caller holds a lock."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._smallest = float("inf")
        self._largest = float("-inf")

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times
        self._smallest = min(self._smallest, value)
        self._largest = max(self._largest, value)

    def histogram(self) -> Histogram:
        """Return the current counts."""
        counts = tuple(self._counts)
        smallest, largest = (self._smallest, self._largest) if any(counts) else (0.0, 0.0)
        return Histogram(self._bounds, counts, self._sum, smallest, largest)
