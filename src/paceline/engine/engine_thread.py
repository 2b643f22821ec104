"""The one thread of an engine, as its callers have it: a `Runner`'s, or the `Supervisor`'s of a worker."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from abc import ABC, abstractmethod
from concurrent.futures import Future
from functools import cache

from paceline.engine.commands import Drain, Stop
from paceline.engine.inbox import Inbox
from paceline.errors import EngineStopped
from paceline.observability.heartbeat import Heartbeat

_threads: weakref.WeakSet[EngineThread] = weakref.WeakSet()


class EngineThread(ABC):
    """Owns the thread, which runs `_run` until it has ended every request.

    `ended` is done when every request has ended for good; its result is why the engine gave up, or None if it was closed.
    exit_join_s: how long the end of the process waits for the thread; None: without a limit.
    """

    _gave_up: EngineStopped | None = None

    def __init__(self, name: str, inbox: Inbox, exit_join_s: float | None = None) -> None:
        self._inbox, self._exit_join_s = inbox, exit_join_s
        self._process = os.getpid()
        self.ended: Future[EngineStopped | None] = Future()
        self.ended.set_running_or_notify_cancel()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _start_thread(self) -> None:
        _close_at_exit()
        _threads.add(self)
        self._thread.start()

    @abstractmethod
    def _run(self) -> None: ...

    @abstractmethod
    def heartbeat(self) -> Heartbeat:
        """Return whether the loop turns. Any thread; waits for nothing."""

    def check_process(self) -> None:
        """Raise `EngineStopped` in a forked child, which has none of the engine's threads."""
        if os.getpid() != self._process:
            raise EngineStopped("this process was forked from the engine's, and has none of its threads; make one here")

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def close(self, *, drain: bool, timeout_s: float | None, join_s: float | None = None) -> None:
        """End the engine: accept no more requests, let the open ones finish (drain) or cancel them, and wait.

        After timeout_s what is left ends with SHUTDOWN. Idempotent, any thread; memory is free when it returns, unless it was
        called on the engine's own thread, which goes on to its end then, or join_s was not enough.
        """
        if os.getpid() != self._process:
            return
        is_own = threading.current_thread() is self._thread
        self._inbox.close()
        if drain and not is_own:
            self._inbox.put(Drain())
            self._inbox.wait_until_empty(timeout_s)
        self._inbox.put(Stop())
        self._interrupt()
        if not is_own:
            self._thread.join(join_s)

    @abstractmethod
    def _interrupt(self) -> None:
        """Cut short what the thread is in, after `Stop` was put into the inbox."""

    def abandon(self) -> None:
        """End the engine without waiting or taking a lock: for finalizers, which run in the middle of anything."""
        if os.getpid() == self._process:
            self._inbox.put(Stop())

    def close_at_exit(self) -> None:
        """End the engine before Python goes down: no pass or worker runs on, no reader is left without an ending."""
        self.close(drain=False, timeout_s=None, join_s=self._exit_join_s)


@cache
def _close_at_exit() -> None:
    """Register once, with the first thread: after the native core, whose own end then comes later."""

    def close_all() -> None:
        for thread in tuple(_threads):
            thread.close_at_exit()

    atexit.register(close_all)
