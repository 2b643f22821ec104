"""Ctrl-C while work runs on its own thread."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from paceline.cli.endings import StopSignal, run
from paceline.errors import Aborted


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_result_of_the_work_comes_back() -> None:
    """`run` returns the result of the work."""
    assert run(lambda _: 7) == 7


def test_an_error_of_the_work_is_raised_by_the_caller() -> None:
    """An exception crosses from the work's thread to the waiting one."""
    with pytest.raises(ZeroDivisionError):
        run(lambda _: 1 // 0)


def test_work_has_a_thread_of_its_own() -> None:
    """The main thread stays free to hear signals."""
    assert run(lambda _: threading.current_thread()) is not threading.main_thread()


def test_ctrl_c_sets_the_event_and_waits_for_the_end_of_the_work() -> None:
    """The work sees the wish to stop, comes to its end, and only then is the interrupt raised."""
    ended = []

    def work(stop: StopSignal) -> None:
        interrupt()
        assert stop.event.wait(30)
        ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        run(work)
    assert ended == [True]


def test_a_call_that_begins_after_the_request_is_aborted_too() -> None:
    """The abort is repeated until the work ends, so that none falls between two calls."""
    aborts = threading.Semaphore(0)

    def work(stop: StopSignal) -> None:
        with stop.aborting(aborts.release):
            interrupt()
            for _ in range(3):
                assert aborts.acquire(timeout=30)
            raise Aborted("told to stop")

    with pytest.raises(KeyboardInterrupt):
        run(work)


def test_an_abort_without_an_interrupt_is_an_error() -> None:
    """Without Ctrl-C, `Aborted` is not taken for an interrupt."""

    def work(_: StopSignal) -> None:
        raise Aborted("another thread")

    with pytest.raises(Aborted):
        run(work)


def test_an_error_on_the_way_to_the_stop_is_not_hidden() -> None:
    """An error after Ctrl-C is still raised."""

    def work(stop: StopSignal) -> None:
        interrupt()
        assert stop.event.wait(30)
        raise ValueError("while stopping")

    with pytest.raises(ValueError, match="while stopping"):
        run(work)


def test_a_second_ctrl_c_ends_the_process_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not wait for work that does not listen."""
    codes: list[int] = []
    ended = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: (codes.append(code), ended.set()))

    def work(stop: StopSignal) -> None:
        interrupt()
        assert stop.event.wait(30)
        assert codes == []
        interrupt()
        assert ended.wait(30)

    with pytest.raises(KeyboardInterrupt):
        run(work)
    assert codes == [130]


def test_the_handler_from_before_is_back_afterwards() -> None:
    """Ctrl-C has its earlier handler."""
    before = signal.getsignal(signal.SIGINT)
    run(lambda _: None)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_process_that_ignores_ctrl_c_goes_on_ignoring_it() -> None:
    """Started in the background by a shell, a process must not be ended by the foreground's Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:

        def work(stop: StopSignal) -> bool:
            interrupt()
            return stop.requested

        assert run(work) is False
    finally:
        signal.signal(signal.SIGINT, before)


def test_run_works_away_from_the_main_thread() -> None:
    """There it hears no signals, and everything else is the same."""
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(run(lambda _: 7)))
    thread.start()
    thread.join(30)
    assert results == [7]
