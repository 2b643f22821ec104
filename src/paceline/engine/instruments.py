"""The instruments of an engine as one: hands every hook on to those that listen, and survives those that raise.

Hooks are called on the engine's thread; `add` and `remove` may be called on any. Knows nothing of what an instrument does.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from paceline.errors import InvalidParams, InvalidType
from paceline.scheduling.instrument import EndRecord, Instrument, RequestRecord, TickRecord

_log = logging.getLogger("paceline.engine")

HOOKS: Final = tuple(name for name, value in vars(Instrument).items() if callable(value) and not name.startswith("_"))
"""The names of the hooks, in the order in which `Instrument` has them."""

_Listeners = tuple[tuple[Instrument, Callable[..., object]], ...]


class Instruments(Instrument):
    """What the engine calls. A hook that nobody overrides costs one look at an empty tuple.

    An instrument whose hook raises an `Exception` is logged once, with its traceback, on the logger "paceline.engine", and
    removed from every hook; the others are still called. `KeyboardInterrupt` and its like pass. Raises `InvalidType` for what
    is no `Instrument`, `InvalidParams` for one that is given twice; own: called before them, and not counted in messages.
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
        """Those that listen now; one that raised is no longer among them."""
        return self._members

    @property
    def wants_ticks(self) -> bool:
        """Whether anybody looks at ticks; where not, a `TickRecord` need not be made."""
        return bool(self._listeners["tick_finished"])

    def add(self, instrument: Instrument) -> None:
        """From now on it is called too, for requests it has not seen the start of as well."""
        self._add("instrument", instrument)

    def remove(self, instrument: Instrument) -> bool:
        """No hook that begins from now on calls it. Answers whether it was still there."""
        with self._changing:
            others = tuple(member for member in self._members if member is not instrument)
            was_there = len(others) < len(self._members)
            self._replace(others)
        return was_there

    def request_queued(self, record: RequestRecord) -> None:
        """Hands it on."""
        self._call("request_queued", record)

    def request_started(self, key: int, choice: int, slot: int, now_s: float) -> None:
        """Hands it on."""
        self._call("request_started", key, choice, slot, now_s)

    def request_ended(self, record: EndRecord) -> None:
        """Hands it on."""
        self._call("request_ended", record)

    def slot_freed(self, key: int, choice: int, slot: int, now_s: float) -> None:
        """Hands it on."""
        self._call("slot_freed", key, choice, slot, now_s)

    def preempted(self, key: int, choice: int, num_computed: int, now_s: float) -> None:
        """Hands it on."""
        self._call("preempted", key, choice, num_computed, now_s)

    def prefix_shared(self, key: int, choice: int, num_tokens: int, source: str) -> None:
        """Hands it on."""
        self._call("prefix_shared", key, choice, num_tokens, source)

    def prefix_instability(self, key: int, num_cached: int, num_matched: int, now_s: float) -> None:
        """Hands it on."""
        self._call("prefix_instability", key, num_cached, num_matched, now_s)

    def evicted(self, num_tokens: int, source: str, now_s: float) -> None:
        """Hands it on."""
        self._call("evicted", num_tokens, source, now_s)

    def engine_restarted(self, now_s: float) -> None:
        """Hands it on."""
        self._call("engine_restarted", now_s)

    def paused(self, key: int, is_paused: bool, now_s: float) -> None:
        """Hands it on."""
        self._call("paused", key, is_paused, now_s)

    def tick_finished(self, record: TickRecord) -> None:
        """Hands it on."""
        self._call("tick_finished", record)

    def _call(self, hook: str, *args: Any) -> None:
        for instrument, listen in self._listeners[hook]:
            try:
                listen(*args)
            except Exception:  # noqa: BLE001 - whatever an instrument does, the engine goes on
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
        """Never changes what a hook may be walking over: both are new objects."""
        self._members = members
        self._listeners = {
            hook: tuple((member, getattr(member, hook)) for member in members if _overrides(member, hook))
            for hook in HOOKS
        }


def _listed(instruments: object) -> list[object]:
    if not isinstance(instruments, Iterable):
        raise InvalidType(f"instruments must be a sequence of Instrument objects, not {_described(instruments)}")
    return list(instruments)


def _overrides(instrument: Instrument, hook: str) -> bool:
    return getattr(getattr(instrument, hook), "__func__", None) is not vars(Instrument)[hook]


def _described(value: object) -> str:
    return f"the class {value.__qualname__}; make one of it" if isinstance(value, type) else f"a {type(value).__name__}"
