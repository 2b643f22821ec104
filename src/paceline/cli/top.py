"""`paceline top`: what an engine does, in a terminal: that of a server, or of a demo in this process."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated, Final

import typer

from paceline.cli import terminal
from paceline.cli.options import ApiKeyOption
from paceline.cli.top_sources import EventSource, LocalEvents, ServerEvents
from paceline.cli.top_state import TopState
from paceline.errors import InvalidParams, PacelineError

if TYPE_CHECKING:
    from paceline.llm import LLM

_DEFAULT_URL: Final = "http://127.0.0.1:8080"
_FRAMES: Final = 10  # a second
_ONCE_S: Final = 1.5  # for rates and distributions to come

_SHARED: Final = (
    "A little bear and an old owl lived at the edge of the wood. Every evening they told each other a story."
)
_BEGINNINGS: Final = ("Once upon a time", "One cold morning", "Tonight it was the owl's turn.", "The bear began:")


def top(
    ctx: typer.Context,
    url: Annotated[
        str, typer.Argument(metavar="[URL]", help="URL of a paceline server, with its prefix if it has one.")
    ] = _DEFAULT_URL,
    *,
    api_key: ApiKeyOption = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="NAME",
            help="Name of a model, for a server with several models.",
            show_default=False,
        ),
    ] = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="Watch the demo model, which generates in this process.")
    ] = False,
    interval_ms: Annotated[
        int,
        typer.Option("--interval-ms", min=100, max=60_000, metavar="N", help="Minimum of time between two pictures."),
    ] = 250,
    once: Annotated[
        bool, typer.Option("--once", help="Show one picture and end, as if stdout is no terminal.")
    ] = False,
) -> None:
    """Show what an engine does: slots, the last ticks, shared prefixes, memory, latencies. q quits.

    Nothing is recorded while no client reads. With tenants a key shows its own requests, and sums of the rest.
    """
    source = ctx.get_parameter_source("api_key")
    has_key = source is not None and source.name == "COMMANDLINE"  # the environment or the config file may have it
    if demo and (has_key or model is not None or url != _DEFAULT_URL):
        raise InvalidParams("--demo runs in this process: give no URL, --api-key or --model with it")
    once = once or not terminal.can_draw(sys.stdout)
    if not demo:
        _show(ServerEvents(url, api_key=api_key, model=model, interval_ms=interval_ms), once=once)
        return
    with _working_demo() as llm:
        _show(LocalEvents(llm._engine, "paceline-demo", interval_ms=interval_ms), once=once)  # noqa: SLF001


def _show(source: EventSource, *, once: bool) -> None:
    """Draw the events of a source until it ends, a key or Ctrl-C."""
    state, stop = TopState(), threading.Event()
    reading = threading.Thread(target=source.run, args=(state.take, stop), name="paceline-top", daemon=True)
    reading.start()
    try:
        if once:
            _draw_once(state, source, reading)
        else:
            _draw(state, source, reading)
    finally:
        stop.set()
        if source.failure is None:
            reading.join(1.0)
    if source.failure is not None:
        raise source.failure


def _draw_once(state: TopState, source: EventSource, reading: threading.Thread) -> None:
    from paceline.cli.top_screen import TopPicture

    began_s = time.monotonic()
    while reading.is_alive() and not (state.members and time.monotonic() - began_s > _ONCE_S):
        time.sleep(0.05)
    if source.failure is None:
        terminal.console(sys.stdout).print(TopPicture(state, source.name, source.status))


def _draw(state: TopState, source: EventSource, reading: threading.Thread) -> None:
    from rich.live import Live

    from paceline.cli.top_screen import TopPicture

    console = terminal.console(sys.stdout)
    with ExitStack() as stack:
        keys = stack.enter_context(terminal.Keys(sys.stdin.fileno()) if terminal.can_read_keys() else nullcontext())
        live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False))
        while reading.is_alive():
            live.update(TopPicture(state, source.name, source.status), refresh=True)
            if keys is None:
                time.sleep(1 / _FRAMES)
                continue
            keys.wait(1 / _FRAMES)
            if "q" in keys.read():
                return


@contextmanager
def _working_demo() -> Iterator[LLM]:
    """Yield the demo model while it has some requests to run, again and again."""
    from paceline.llm import LLM

    stop = threading.Event()
    prompts = [f"{_SHARED} {begin}" for begin in _BEGINNINGS]
    with LLM() as llm:

        def work(number: int) -> None:
            seed = number
            while not stop.is_set():
                seed += 1
                try:
                    for _ in llm.stream(prompts[seed % len(prompts)], max_tokens=100 + 40 * (seed % 5), seed=seed):
                        if stop.wait(0.004):  # to be followed by eye
                            return
                except PacelineError:  # the engine ends
                    return

        workers = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(12)]
        for worker in workers:
            worker.start()
        try:
            yield llm
        finally:
            stop.set()
            for worker in workers:
                worker.join(5.0)
