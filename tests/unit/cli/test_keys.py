"""Keys of a terminal, and the terminal afterwards."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from paceline.cli import terminal
from paceline.cli.terminal import Keys


@dataclass
class Pty:
    keyboard: int
    screen: int

    @property
    def mode(self) -> list[Any]:
        return termios.tcgetattr(self.screen)

    @property
    def gives_single_keys(self) -> bool:
        return not self.mode[3] & (termios.ICANON | termios.ECHO)

    def press(self, keys: bytes) -> None:
        os.write(self.keyboard, keys)
        select.select([self.screen], [], [], 30)


@pytest.fixture
def screen() -> Iterator[Pty]:
    keyboard, screen = pty.openpty()
    yield Pty(keyboard, screen)
    os.close(keyboard)
    os.close(screen)


def test_keys_come_one_by_one_without_a_line_break(screen: Pty) -> None:
    """In order, each once, and nothing without a key; bytes that are no ASCII are left out."""
    with Keys(screen.screen) as keys:
        assert keys.read() == ""
        screen.press("1ép".encode())
        keys.wait(30)
        assert keys.read() == "1p"
        assert keys.read() == ""


def test_the_mode_is_as_before_after_the_block(screen: Pty) -> None:
    """Whatever leaves it."""
    before = screen.mode
    with pytest.raises(ZeroDivisionError), Keys(screen.screen):
        assert screen.gives_single_keys
        assert screen.mode[3] & termios.ISIG, "Ctrl-C is no signal any more"
        raise ZeroDivisionError
    assert screen.mode == before


def test_an_exit_in_a_hurry_restores_the_mode(screen: Pty) -> None:
    """The second Ctrl-C calls `terminal.restore`; after the block it has nothing to undo."""
    before = screen.mode
    with Keys(screen.screen):
        terminal.restore()
        assert screen.mode == before
    assert terminal._undoing == []


def test_after_a_stop_the_mode_is_set_again(screen: Pty) -> None:
    """A shell gives a stopped process a terminal in its own mode when it goes on."""
    with Keys(screen.screen) as keys:
        keys.restore()
        os.kill(os.getpid(), signal.SIGCONT)
        assert screen.gives_single_keys


def test_handlers_of_signals_are_as_before_afterwards(screen: Pty) -> None:
    """SIGTERM, SIGHUP, SIGQUIT and SIGCONT have their earlier handlers."""
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCONT)
    before = [signal.getsignal(number) for number in numbers]
    with Keys(screen.screen):
        assert [signal.getsignal(number) for number in numbers] != before
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_that_ends_the_process_restores_the_mode_and_ends_it(screen: Pty, number: signal.Signals) -> None:
    """The process dies of the signal, as its parent expects, and the terminal is usable."""
    before = screen.mode
    code = (
        "import resource, signal, sys\n"
        "from paceline.cli.terminal import Keys\n"
        f"signal.signal({int(number)}, signal.SIG_DFL)\n"  # tests in the background may run with it ignored
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "with Keys(0) as keys:\n"
        "    print('ready', flush=True)\n"
        "    while True: keys.wait(60)\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=screen.screen, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        assert screen.gives_single_keys
        process.send_signal(number)
        assert process.wait(30) == -number
    assert screen.mode == before


def test_a_terminal_that_has_gone_gives_no_keys() -> None:
    """A closed window is no error."""
    keyboard, screen = pty.openpty()
    with Keys(screen) as keys:
        os.close(keyboard)
        assert keys.read() == ""
        keys.wait(0)
    os.close(screen)
