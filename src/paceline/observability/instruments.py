"""Instruments: hooks that an engine calls, and their dispatch. Hooks run on the engine's thread.

Only hooks that a subclass overrides are called. One that raises is logged once, and its instrument removed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from paceline import validation
from paceline.errors import InvalidParams, InvalidType, PacelineError
from paceline.scheduling.records import EndRecord, RequestRecord, TickRecord

_log = logging.getLogger("paceline.engine")


class Instrument:
    """Observe an engine: override the hooks you need. Their arguments are frozen records and numbers.

    Times are seconds on the engine's clock; key: the request's number, unique in its engine; choice: which of its choices.

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
        """Handle the eviction of so many tokens of a cached prefix; source: where they were, "device" or "host".

        Host memory keeps tokens evicted from the device if it has space; those evicted from the host are gone.
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
    removed from every hook; the others are still called. A `BaseException` such as `KeyboardInterrupt` propagates.
    `add` and `remove` may be called on any thread.

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

    def request_queued(self, record: RequestRecord) -> None:
        self._call("request_queued", record)

    def request_started(self, key: int, choice: int, slot: int, now_s: float) -> None:
        self._call("request_started", key, choice, slot, now_s)

    def request_ended(self, record: EndRecord) -> None:
        self._call("request_ended", record)

    def slot_freed(self, key: int, choice: int, slot: int, now_s: float) -> None:
        self._call("slot_freed", key, choice, slot, now_s)

    def preempted(self, key: int, choice: int, num_computed_tokens: int, now_s: float) -> None:
        self._call("preempted", key, choice, num_computed_tokens, now_s)

    def prefix_shared(self, key: int, choice: int, num_tokens: int, source: str) -> None:
        self._call("prefix_shared", key, choice, num_tokens, source)

    def prefix_instability(self, key: int, num_cached: int, num_matched: int, now_s: float) -> None:
        self._call("prefix_instability", key, num_cached, num_matched, now_s)

    def evicted(self, num_tokens: int, source: str, now_s: float) -> None:
        self._call("evicted", num_tokens, source, now_s)

    def engine_restarted(self, now_s: float) -> None:
        self._call("engine_restarted", now_s)

    def paused(self, key: int, is_paused: bool, now_s: float) -> None:
        self._call("paused", key, is_paused, now_s)

    def tick_finished(self, record: TickRecord) -> None:
        self._call("tick_finished", record)

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
        """Replace both as new objects, since a hook may be iterating over the old ones."""
        self._members = members
        self._listeners = {
            hook: tuple((member, getattr(member, hook)) for member in members if _overrides(member, hook))
            for hook in HOOKS
        }


def resolve_instruments(instruments: Iterable[Instrument | str]) -> tuple[Instrument, ...]:
    """Return the instruments; import one named as `module:attr`, and instantiate it if that is a class.

    Raises:
        InvalidParams: a name is not of that form, or cannot be imported or instantiated.
    """
    return tuple(_named(index, one) if isinstance(one, str) else one for index, one in enumerate(instruments))


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
