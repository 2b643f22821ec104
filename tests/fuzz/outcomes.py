"""Run something risky in forked children, one a case, and report how each of them ended."""

from __future__ import annotations

import os
import resource
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from paceline.errors import PacelineError
from paceline.runtime import build_info

_FINE, _TYPED, _UNTYPED = 0, 3, 4
_SECONDS = 20
_MEMORY = 3 << 30


class Ending(Enum):
    """How a case ended: only the last three are faults."""

    FINE = "fine"
    TYPED_ERROR = "typed error"
    UNTYPED_ERROR = "untyped error"
    KILLED = "killed"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Outcome:
    """An ending, and the words the child left: of its error, or the last lines it wrote before it died."""

    ending: Ending
    words: str

    @property
    def is_fault(self) -> bool:
        """Whether this must not happen."""
        return self.ending not in (Ending.FINE, Ending.TYPED_ERROR)


def run_forked(work: Callable[[], object]) -> Outcome:
    """Do `work` in a child with limited memory and time. Not for processes that have threads."""
    os.environ["GGML_NO_BACKTRACE"] = "1"  # else every abort waits for a debugger
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            _be_the_child(work, said.fileno())
        _, status = os.waitpid(child, 0)
        said.seek(0)
        return _outcome(status, said.read()[-8000:].decode(errors="replace"))


def report(seed: int, cases: Iterable[tuple[int, str, Outcome]]) -> int:
    """Print every fault as it comes, then the counts; the exit code: 1 if there were faults."""
    endings: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for number, words, outcome in cases:
        endings[outcome.ending.value] += 1
        if outcome.is_fault:
            faults[f"{outcome.ending.value}: {outcome.words[:160]}"] += 1
            sys.stdout.write(f"{seed}/{number} {words}\n    {outcome.ending.value}: {outcome.words}\n")
            sys.stdout.flush()
    sys.stdout.writelines(f"{times:5d}  {fault}\n" for fault, times in faults.most_common())
    sys.stdout.write(f"{dict(endings)}\n")
    return 1 if faults else 0


def _be_the_child(work: Callable[[], object], said: int) -> None:
    """Never returns, whatever happens."""
    code = _UNTYPED
    try:
        os.dup2(said, 1)
        os.dup2(said, 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if not build_info().sanitizers:  # they reserve terabytes of addresses
            resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
        signal.alarm(_SECONDS)
        work()
        code = _FINE
    except PacelineError as error:
        os.write(said, f"{type(error).__name__}: {error}".encode())
        code = _TYPED
    except BaseException as error:
        os.write(said, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(code)


def _outcome(status: int, words: str) -> Outcome:
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) == signal.SIGALRM:
            return Outcome(Ending.TIMEOUT, words.strip()[-300:])
        lines = [
            line for line in words.splitlines() if "GGML_ASSERT" in line or "what()" in line or "abort" in line.lower()
        ]
        name = signal.Signals(os.WTERMSIG(status)).name
        return Outcome(Ending.KILLED, f"{name}: {lines[0].strip() if lines else words.strip()[-200:]}")
    endings = {_FINE: Ending.FINE, _TYPED: Ending.TYPED_ERROR}
    return Outcome(endings.get(os.WEXITSTATUS(status), Ending.UNTYPED_ERROR), words.strip()[-500:])
