"""`paceline demo`: several requests at once, and a picture of how they share the engine."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline import validation
from paceline.cli import terminal
from paceline.cli.demo_requests import (
    FOR_ANY_MODEL,
    FOR_DEMO_MODEL,
    DemoRequest,
    buffered,
    limited,
    read_requests,
    requests_of,
    seeded,
)
from paceline.cli.endings import StopSignal, run
from paceline.cli.options import (
    DeviceOption,
    GpuLayersOption,
    ModelChoice,
    ModelOption,
    ThreadsOption,
    VerboseOption,
    choosing_tokens,
    ending,
    load,
    running,
    showing,
)
from paceline.config import EngineConfig
from paceline.demo import demo_draft_model_path
from paceline.errors import InvalidParams

if TYPE_CHECKING:
    from paceline.cli.demo_instruments import Pacer
    from paceline.cli.demo_streams import DemoStreams, SpeedUp
    from paceline.runtime import Model

_DEFAULTS = EngineConfig()
_WATCHABLE = 25.0  # ticks a second: a little faster than one reads
_SEED = 1
_BUFFERED = {True: 16, False: 256}  # tokens a picture's reader may be behind, held back or not
_POLL_S = 0.02
_MEASURED_POLL_S = 0.002
_MEASURED_S, _MOST_ROUNDS = 1.5, 8
_DRAFTER = "ngram:size_n=2"
_WITH_PAIR = "ngram,draft-model"  # for the demo model, which has a draft model
_FAILED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoJob:
    """The options of a demo, checked. pace: most ticks a second, 0 for no limit.

    measured: the requests as they run where nothing is shown, for which no reader makes the engine wait.
    """

    requests: Sequence[DemoRequest]
    measured: Sequence[DemoRequest]
    model: ModelChoice
    config: EngineConfig
    n_threads: int | None
    pace: float
    seed: int
    is_live: bool
    as_json: bool
    trace: Path | None


Requests = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help='What to run: a JSON list of prompts, or of objects of a prompt and its options; "-" for stdin.',
        show_default="eight requests of ours",
    ),
]
FirstSeed = Annotated[
    int,
    choosing_tokens(
        "--seed", "-s", metavar="N", help="Seed of the first request; each next request adds 1. -1 draws a new seed."
    ),
]
MostTokens = Annotated[
    int | None,
    ending(
        "--max-tokens", "-n", metavar="N", help="Maximum of tokens for each choice.", show_default="each request's own"
    ),
]
NumSlots = Annotated[
    int, running("--num-slots", "-np", metavar="N", help="Sequences that run at once; the others wait.")
]
Pace = Annotated[
    float | None,
    running(
        metavar="N",
        help="Maximum of ticks per second, slow enough to follow by eye; 0 for no limit.",
        show_default="25 for a picture of the demo model, else 0",
    ),
]
Speculate = Annotated[
    bool,
    running(
        "--speculate",
        help="Speculate: propose draft tokens. The requests also run without drafts, for comparison.",
    ),
]
Speculation = Annotated[
    str | None,
    running(
        metavar="NAME",
        help="How draft tokens are proposed, as --speculation of `paceline serve`.",
        show_default=f"{_WITH_PAIR}; for another model {_DRAFTER}",
    ),
]
Plain = Annotated[
    bool, showing("--plain", help="Write one line for each choice and one line of figures, as without a terminal.")
]
AsJson = Annotated[bool, showing("--json", help="One JSON object at the end.")]
TraceTarget = Annotated[
    Path | None, showing(metavar="FILE", help="Record what the engine does, as lines of JSON.", show_default=False)
]


def demo(
    *,
    model: ModelOption = None,
    n_gpu_layers: GpuLayersOption = None,
    device: DeviceOption = None,
    requests: Requests = None,
    seed: FirstSeed = _SEED,
    max_tokens: MostTokens = None,
    num_slots: NumSlots = _DEFAULTS.num_slots,
    pace: Pace = None,
    speculate: Speculate = False,
    speculation: Speculation = None,
    threads: ThreadsOption = None,
    verbose: VerboseOption = False,
    plain: Plain = False,
    as_json: AsJson = False,
    trace: TraceTarget = None,
) -> None:
    """Run several requests together on one engine, and show how they share it.

    On a terminal there is a picture of the slots, and keys act on it: a digit cancels the request in that slot; p and
    a digit stops or starts its reader, p and p the readers of all requests, and the engine pauses a request that is not
    read; q ends the demo. Figures come last: time to first token (TTFT), time between tokens (ITL), throughput, and more.
    """
    if plain and as_json:
        raise InvalidParams("--plain and --json exclude each other; choose one")
    is_live = not plain and not as_json and terminal.can_draw(sys.stdout)
    if pace is None:
        pace = _WATCHABLE if is_live and model is None else 0.0
    pace = validation.number("pace", pace, 0)
    validation.integer("seed", seed, -1, 2**32 - 1)
    if speculation is not None:
        from paceline.speculation.named_drafter import check_drafter_name

        check_drafter_name(speculation)
    chosen = _requests(requests, is_demo_model=model is None)
    seed = secrets.randbits(32) if seed == -1 else seed
    chosen = seeded(limited(chosen, max_tokens), seed)
    job = DemoJob(
        requests=buffered(chosen, _BUFFERED[pace > 0]) if is_live else chosen,
        measured=chosen,
        model=ModelChoice(
            path=model, n_gpu_layers=n_gpu_layers, devices=device, show_progress=not as_json, verbose=verbose
        ),
        config=EngineConfig(
            num_slots=num_slots,
            max_queue=max(_DEFAULTS.max_queue, len(chosen)),
            speculation=speculation or ((_WITH_PAIR if model is None else _DRAFTER) if speculate else None),
        ),
        n_threads=threads,
        pace=pace,
        seed=seed,
        is_live=is_live,
        as_json=as_json,
        trace=trace,
    )
    with _keys(job) as keys:
        have_failed = run(lambda stop: _run(job, keys, stop))
    if have_failed:
        raise typer.Exit(_FAILED)


def _requests(path: Path | None, *, is_demo_model: bool) -> list[DemoRequest]:
    if path is not None:
        return read_requests(path)
    ours = FOR_DEMO_MODEL if is_demo_model else FOR_ANY_MODEL
    return requests_of(ours, "our requests")


def _keys(job: DemoJob) -> terminal.Keys | nullcontext[None]:
    return terminal.Keys(sys.stdin.fileno()) if job.is_live and terminal.can_read_keys() else nullcontext()


def _run(job: DemoJob, keys: terminal.Keys | None, stop: StopSignal) -> bool:
    """Run the demo and return whether a request failed, or writing the trace."""
    from paceline.cli.demo_instruments import Pacer, SlotBoard, TraceFile
    from paceline.cli.demo_screen import LiveScreen
    from paceline.cli.demo_streams import DemoStreams
    from paceline.llm import LLM
    from paceline.observability.trace_file import TraceRecorder

    board, pacer, streams = SlotBoard(), Pacer(job.pace), DemoStreams()
    with ExitStack() as stack:
        file = None if job.trace is None else stack.enter_context(TraceFile(job.trace))
        recorders = () if file is None else (stack.enter_context(TraceRecorder(file)),)
        loaded = load(job.model, stop)
        speed_up = None if job.config.speculation is None else _measured(job, loaded.model, stop)
        llm = stack.enter_context(LLM(loaded.model, instruments=(board, *recorders, pacer), **_options(job)))

        def end() -> None:
            pacer.hurry()
            streams.cancel_all()

        stack.enter_context(stop.aborting(end))
        streams.submit(llm, job.requests)
        if job.is_live:
            LiveScreen(streams, board, job.config.num_slots, _title(job, loaded.model), keys).run()
        else:
            _read(streams, job)
    _tell(job, streams, pacer, loaded.load_s, speed_up)
    if file is not None and file.problem is not None:
        terminal.report(file.problem)
        return True
    return any(one.error is not None for one in streams)


def _options(job: DemoJob) -> dict[str, Any]:
    config = job.config
    options = {
        "num_slots": config.num_slots,
        "max_queue": config.max_queue,
        "n_threads": job.n_threads,
        "speculation": config.speculation,
        "mmproj": False,
    }
    if job.model.path is None and _names_draft_model(config.speculation):
        options["draft_model"] = demo_draft_model_path()
    return options


def _names_draft_model(speculation: str | None) -> bool:
    from paceline.speculation.named_drafter import DRAFT_MODEL, drafter_parts

    return speculation is not None and DRAFT_MODEL in drafter_parts(speculation)


def _measured(job: DemoJob, model: Model, stop: StopSignal) -> SpeedUp:
    """Run the requests without drafts and then with them, as fast as they go, with nothing else to do."""
    from paceline.cli.demo_streams import SpeedUp

    if job.is_live:
        terminal.write("Measuring the requests without drafts, then with them ...\n")
    return SpeedUp(_rate(job, model, stop, with_drafts=False), _rate(job, model, stop, with_drafts=True))


def _rate(job: DemoJob, model: Model, stop: StopSignal, *, with_drafts: bool) -> float | None:
    """Return the tokens a second of the requests in an engine of their own, over as many rounds as a second or two has."""
    from paceline.cli.demo_instruments import Pacer
    from paceline.cli.demo_streams import DemoStreams, run_figures
    from paceline.llm import LLM

    pacer, streams = Pacer(0.0), DemoStreams()
    options = _options(job) if with_drafts else _options(job) | {"speculation": None, "draft_model": None}
    with LLM(model, instruments=(pacer,), **options) as llm:
        for _ in range(_MOST_ROUNDS):
            streams = DemoStreams()
            with stop.aborting(streams.cancel_all):
                streams.submit(llm, job.measured)
                while not streams.are_over:
                    streams.take()
                    time.sleep(_MEASURED_POLL_S)
            if pacer.elapsed_s > _MEASURED_S or stop.requested:
                break
    return run_figures(streams, pacer).tokens_per_s


def _title(job: DemoJob, model: Model) -> str:
    held_back = f" · at most {job.pace:g} ticks a second" if job.pace else ""
    drafts = "" if job.config.speculation is None else f" · drafts by {terminal.printable(job.config.speculation)}"
    return f" {terminal.printable(model.paths[0].name)} · {job.config.num_slots} slots{drafts}{held_back}"


def _read(streams: DemoStreams, job: DemoJob) -> None:
    """Read all streams to their end; write each result as soon as it is complete."""
    from paceline.cli.demo_streams import result_lines

    waiting = list(streams)
    while waiting:
        streams.take()
        over = [one for one in waiting if one.is_over]
        waiting = [one for one in waiting if not one.is_over]
        if not job.as_json:
            for one in over:
                terminal.write("".join(f"{line}\n" for line in result_lines(one)))
        if waiting:
            time.sleep(_POLL_S)


def _tell(job: DemoJob, streams: DemoStreams, pacer: Pacer, load_s: float, speed_up: SpeedUp | None) -> None:
    from paceline.cli import demo_streams

    found = demo_streams.run_figures(streams, pacer)
    if job.as_json:
        terminal.write(demo_streams.run_json(streams, found, job.seed, load_s, speed_up))
    elif job.is_live:
        for one in streams:
            if one.error is not None:
                terminal.write("".join(f"{line}\n" for line in demo_streams.result_lines(one)), style="red")
        terminal.write("\n")
        terminal.write_section("Summary", demo_streams.figure_rows(found, job.seed, load_s, speed_up))
    else:
        terminal.write(demo_streams.figure_line(found, job.seed, load_s, speed_up) + "\n")
