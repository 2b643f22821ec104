"""The number of paceline's modules that a token passes: modules entered during a tick that decodes one stream.

python -m benchmarks.hops [--verbose]

The tick is `Engine.tick`: commands, plan, pass, events. A turn of the engine's thread adds their router to the reader.
Counted with `sys.setprofile` over the ticks of one stream; the median of them, since every eighth teaches the cost model.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import paceline
from paceline.engine.core import Engine
from paceline.engine.engine_thread import Runner

_FIRST, _NUM_TICKS = 20, 40


class Hops:
    """The modules entered during each call of a method."""

    def __init__(self, owner: type, name: str) -> None:
        self.calls: list[dict[str, int]] = []
        self.is_on = False
        self._wrapped: Callable[..., Any] = getattr(owner, name)
        setattr(owner, name, lambda *args: self._call(*args))  # noqa: PLW0108 - a function binds, a method does not

    def _call(self, *args: Any) -> Any:
        if not self.is_on:
            return self._wrapped(*args)
        counts: dict[str, int] = {}

        def enter(frame: FrameType, event: str, _arg: object) -> None:
            module = frame.f_globals.get("__name__", "")
            if event == "call" and module.startswith("paceline"):
                counts[module] = counts.get(module, 0) + 1

        before = sys.getprofile()
        sys.setprofile(enter)
        try:
            return self._wrapped(*args)
        finally:
            sys.setprofile(before)
            self.calls.append(counts)

    def report(self, name: str, *, is_verbose: bool) -> None:
        """Print the median, and the modules of one call that has it."""
        count = int(statistics.median_low([len(counts) for counts in self.calls]))
        print(f"{name}: {count} modules, median of {len(self.calls)}")
        if is_verbose:
            typical = next(counts for counts in self.calls if len(counts) == count)
            for module, calls in sorted(typical.items()):
                print(f"  {calls:3}  {module}")


def measure(owner: type, name: str) -> Hops:
    """Decode one stream of the demo model, and record the ticks in its middle."""
    hops = Hops(owner, name)
    with paceline.LLM() as llm:
        stream = llm.stream("A fox", max_tokens=_FIRST + _NUM_TICKS + 20, ignore_eos=True)
        for index, _ in enumerate(stream):
            hops.is_on = _FIRST <= index < _FIRST + _NUM_TICKS
    setattr(owner, name, hops._wrapped)  # noqa: SLF001 - its own
    return hops


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verbose", action="store_true", help="name the modules, with calls")
    options = parser.parse_args()
    measure(Engine, "tick").report("a tick", is_verbose=options.verbose)
    measure(Runner, "_turn").report("a turn of the engine's thread", is_verbose=options.verbose)


if __name__ == "__main__":
    main()
