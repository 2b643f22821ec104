"""The instruments of an engine as one: calls, removal of an instrument that raises, changes from other threads."""

from __future__ import annotations

import inspect
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.errors import InvalidParams, InvalidType
from paceline.observability.metrics import HOOKS, Instrument, Instruments, Metrics, resolve_instruments


class Listening(Instrument):
    """Override two hooks and keep their arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def evicted(self, num_tokens: int, source: str, now_s: float) -> None:
        self.calls.append(("evicted", num_tokens, source, now_s))

    def engine_restarted(self, now_s: float) -> None:
        self.calls.append(("engine_restarted", now_s))


class Raising(Listening):
    def evicted(self, num_tokens: int, source: str, now_s: float) -> None:
        super().evicted(num_tokens, source, now_s)
        raise ZeroDivisionError("no tokens")


class Interrupting(Listening):
    def evicted(self, num_tokens: int, source: str, now_s: float) -> None:
        raise KeyboardInterrupt


READY = Listening()


def arguments(hook: str) -> tuple[object, ...]:
    """Return as many different objects as the hook takes."""
    return tuple(f"argument {name}" for name in list(inspect.signature(getattr(Instrument, hook)).parameters)[1:])


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_dispatched_with_its_arguments(hook: str) -> None:
    """Every hook that an instrument overrides is called with the engine's arguments."""
    calls: list[tuple[object, ...]] = []
    kind = type("Watching", (Instrument,), {hook: lambda self, *args: calls.append(args)})
    getattr(Instruments([kind()]), hook)(*arguments(hook))
    assert calls == [arguments(hook)]
    assert arguments(hook)


def test_the_engine_s_own_instrument_comes_first_and_is_not_counted() -> None:
    """The index in a message is that of the caller's list."""
    own, other = Listening(), Listening()
    assert Instruments([other], own=own).members == (own, other)
    with pytest.raises(InvalidType, match=r"instruments\[1\] must be an Instrument"):
        Instruments([other, 3], own=own)  # type: ignore[list-item]


def test_the_hooks_match_the_base_class() -> None:
    """Every public method of the base class is a hook, and nothing else is."""
    assert {"request_queued", "tick_finished", "paused", "prefix_instability"} <= set(HOOKS)
    assert all(hook in vars(Instruments) for hook in HOOKS)


def test_a_hook_that_no_instrument_overrides_has_no_listeners() -> None:
    """The methods of the base class are never called."""
    instruments = Instruments([Listening(), Instrument()])
    with_listeners = {hook for hook in HOOKS if instruments._listeners[hook]}
    assert with_listeners == {"evicted", "engine_restarted"}


def test_ticks_are_wanted_only_while_an_instrument_listens_to_them() -> None:
    """A scheduler need not build a record of a tick that no instrument reads."""
    watching = Listening()
    watching.tick_finished = lambda record: None  # type: ignore[method-assign] # set on the object, it counts too
    instruments = Instruments([Listening()])
    assert not instruments.wants_ticks
    instruments.add(watching)
    assert instruments.wants_ticks
    assert instruments.remove(watching)
    assert not instruments.wants_ticks


def test_instruments_are_called_in_their_order() -> None:
    """Instruments are called in the order in which they were added."""
    order: list[str] = []
    kinds = [
        type(name, (Instrument,), {"engine_restarted": lambda self, now_s, name=name: order.append(name)})
        for name in ("first", "second", "third")
    ]
    Instruments([kind() for kind in kinds]).engine_restarted(0.0)
    assert order == ["first", "second", "third"]


def test_one_that_raises_is_logged_once_and_removed_from_every_hook(caplog: pytest.LogCaptureFixture) -> None:
    """None of its hooks is called any more, and the log has its name and traceback."""
    raising = Raising()
    instruments = Instruments([raising])
    with caplog.at_level(logging.DEBUG, "paceline.engine"):
        for _ in range(3):
            instruments.evicted(1, "host", 0.5)
            instruments.engine_restarted(0.5)
    assert raising.calls == [("evicted", 1, "host", 0.5)]
    assert instruments.members == ()
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("paceline.engine", logging.ERROR)
    assert "Raising failed in evicted" in record.getMessage()
    assert record.exc_info is not None and record.exc_info[0] is ZeroDivisionError


def test_the_others_are_called_although_one_raises(caplog: pytest.LogCaptureFixture) -> None:
    """Instruments before and after it are called, in the same hook and in later hooks."""
    before, after = Listening(), Listening()
    instruments = Instruments([before, Raising(), after])
    with caplog.at_level(logging.CRITICAL, "paceline.engine"):
        instruments.evicted(1, "host", 0.5)
    instruments.engine_restarted(0.6)
    assert before.calls == after.calls == [("evicted", 1, "host", 0.5), ("engine_restarted", 0.6)]
    assert instruments.members == (before, after)


def test_an_interrupt_propagates_and_removes_no_instrument() -> None:
    """Ctrl-C is not a failure of the instrument that it interrupts."""
    interrupting = Interrupting()
    instruments = Instruments([interrupting])
    with pytest.raises(KeyboardInterrupt):
        instruments.evicted(1, "host", 0.5)
    assert instruments.members == (interrupting,)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([Listening(), 3], r"instruments\[1\] must be an Instrument, not a int"),
        ([Listening], "not the class Listening; make one of it"),
        (Listening(), "a sequence of Instrument objects, not a Listening"),
        ("metrics", r"instruments\[0\] must be an Instrument, not a str"),
    ],
)
def test_invalid_instrument_is_refused(given: Any, message: str) -> None:
    """The message has its index and its type."""
    with pytest.raises(InvalidType, match=message):
        Instruments(given)


def test_an_instrument_by_name_is_imported_and_made() -> None:
    """A class is instantiated; an object is used as it is."""
    given = Metrics()
    found = resolve_instruments(
        [given, "paceline.observability.metrics:Metrics", "tests.unit.observability.test_instruments:READY"]
    )
    assert found[0] is given
    assert isinstance(found[1], Metrics)
    assert found[2] is READY
    assert Instruments(found).members == found


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("metrics", r"instruments\[1\] must be an Instrument or the name of one as 'module:attr', not 'metrics'"),
        ("no_such_module:A", r"instruments\[1\] 'no_such_module:A' cannot be loaded: ModuleNotFoundError"),
        ("paceline.observability.metrics:A", r"instruments\[1\] .* cannot be loaded: AttributeError"),
        ("paceline.observability.trace_file:TraceRecorder", r"cannot be loaded: TypeError: .*target"),
    ],
)
def test_a_name_of_no_instrument_raises_with_its_index(name: str, message: str) -> None:
    """The message has the error of the import or the constructor."""
    with pytest.raises(InvalidParams, match=message):
        resolve_instruments([Metrics(), name])


def test_the_same_instrument_is_refused_a_second_time() -> None:
    """An instrument that is added twice would count everything twice."""
    watching = Listening()
    instruments = Instruments([watching])
    with pytest.raises(InvalidParams, match="already among the instruments"):
        instruments.add(watching)
    assert instruments.members == (watching,)


def test_removing_an_unknown_instrument_returns_false() -> None:
    """Removing one that is gone returns False, since it may have raised before."""
    assert not Instruments([Listening()]).remove(Listening())


def test_a_hook_under_way_is_not_disturbed_by_changes() -> None:
    """An instrument added or removed during a hook is so from the next hook on."""
    leaving, coming = Listening(), Listening()

    class Changing(Instrument):
        def engine_restarted(self, now_s: float) -> None:
            instruments.remove(leaving)
            instruments.add(coming)
            instruments.remove(self)

    instruments = Instruments([Changing(), leaving])
    instruments.engine_restarted(1.0)
    instruments.engine_restarted(2.0)
    assert (leaving.calls, coming.calls) == ([("engine_restarted", 1.0)], [("engine_restarted", 2.0)])


@pytest.fixture
def many_switches() -> Iterator[None]:
    """Switch threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("many_switches")
def test_changes_from_many_threads_are_all_kept() -> None:
    """Concurrent adds and removes lose no instrument."""
    instruments = Instruments()
    kept: list[Instrument] = []

    def change() -> None:
        for _ in range(40):
            passing, staying = Listening(), Listening()
            instruments.add(passing)
            instruments.add(staying)
            kept.append(staying)
            assert instruments.remove(passing)

    threads = [threading.Thread(target=change) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        instruments.engine_restarted(0.0)
        thread.join()
    assert len(instruments.members) == 160
    assert set(map(id, instruments.members)) == set(map(id, kept))
    assert len(instruments._listeners["evicted"]) == 160


def test_a_change_is_complete_before_another_one_begins() -> None:
    """An instrument is checked and added under one lock."""
    locked: list[bool] = []

    class Looked(Instrument):
        def __getattribute__(self, name: str) -> object:
            if name in HOOKS:
                locked.append(instruments._changing.locked())
            return super().__getattribute__(name)

    instruments = Instruments()
    instruments.add(Looked())
    instruments.remove(Listening())
    assert len(locked) >= 2 * len(HOOKS) and all(locked)
