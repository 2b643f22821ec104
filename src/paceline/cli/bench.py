"""`paceline bench`: how fast a model reads prompts and generates, with the names of llama-bench."""

from __future__ import annotations

import csv
import io
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

from paceline.cli import options as option
from paceline.cli import terminal
from paceline.cli.endings import StopSignal, run
from paceline.errors import EngineError, InvalidParams

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.runtime import Model

_MOST_SLOTS: Final = 250
_CELLS: Final = 256  # by which llama.cpp rounds contexts up
_SEED: Final = 1  # of the prompts' tokens


class OutputFormat(StrEnum):
    """How the figures are written."""

    MD = "md"
    CSV = "csv"
    JSON = "json"
    JSONL = "jsonl"


@dataclass(frozen=True, slots=True)
class BenchTest:
    """A test. n_prompt or n_gen is 0. n_streams: prompts or generations at once."""

    n_prompt: int
    n_gen: int
    n_streams: int

    @property
    def name(self) -> str:
        """The name that llama-bench gives it, such as "pp512" or "tg128"."""
        return f"pp{self.n_prompt}" if self.n_prompt else f"tg{self.n_gen}"


Row = dict[str, Any]
"""The result of a test, with the names of llama-bench and `n_streams`. Tokens are of all streams together."""


def bench(
    *,
    model: option.ModelOption = None,
    n_gpu_layers: option.GpuLayersOption = None,
    device: option.DeviceOption = None,
    n_prompt: Annotated[
        str, option.running("--n-prompt", "-p", metavar="N,...", help="Tokens of a prompt; 0 leaves the test out.")
    ] = "512",
    n_gen: Annotated[
        str, option.running("--n-gen", "-n", metavar="N,...", help="Tokens that are generated; 0 leaves the test out.")
    ] = "128",
    parallel: Annotated[
        str, option.running("--parallel", "-np", metavar="N,...", help="Streams at once: prompts, or generations.")
    ] = "1,8",
    repetitions: Annotated[
        int, option.running("--repetitions", "-r", metavar="N", min=1, help="How often each test is repeated.")
    ] = 5,
    no_warmup: Annotated[
        bool, option.running("--no-warmup", help="Do not run each test once before it is measured.")
    ] = False,
    threads: option.ThreadsOption = None,
    verbose: option.VerboseOption = False,
    output: Annotated[
        OutputFormat, option.showing("--output", "-o", help="How the figures are written.")
    ] = OutputFormat.MD,
) -> None:
    """Measure how many tokens a second a model reads and generates, alone and with several streams.

    The tests have the names of llama-bench: pp512 reads a prompt of 512 tokens, tg128 generates 128 tokens. They run
    through the engine, as requests do, without cached prefixes; the figures are of all streams together. Ctrl-C ends the
    run and keeps the tests that are complete.
    """
    prompts, lengths = _counts("-p", n_prompt, 0), _counts("-n", n_gen, 0)
    streams = _counts("-np", parallel, 1, _MOST_SLOTS)
    sizes = [(count, 0) for count in prompts if count] + [(0, count) for count in lengths if count]
    tests = [BenchTest(*size, number) for number in streams for size in sizes]
    if not tests:
        raise InvalidParams("there is nothing to measure: -p and -n are both 0")
    choice = option.ModelChoice(model=model, n_gpu_layers=n_gpu_layers, device=device, verbose=verbose)

    def work(stop: StopSignal) -> None:
        loaded = option.load(choice, stop).model
        rows = _measure(loaded, tests, threads, choice, stop, repetitions=repetitions, warms_up=not no_warmup)
        _WRITERS[output](rows)

    run(work)


def _counts(name: str, text: str, low: int, high: int = 2**20) -> list[int]:
    """Parse numbers between commas. Raises `InvalidParams`."""
    counts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and low <= int(part[:9]) <= high for part in counts):
        raise InvalidParams(f"{name} must be numbers from {low} to {high} between commas, not {text!r:.80}")
    return [int(part) for part in counts]


def _measure(
    model: Model,
    tests: Sequence[BenchTest],
    threads: int | None,
    choice: option.ModelChoice,
    stop: StopSignal,
    *,
    repetitions: int,
    warms_up: bool,
) -> Iterator[Row]:
    """Yield the result of each test, until a stop is requested."""
    from paceline.llm import LLM
    from paceline.runtime import build_info, devices
    from paceline.runtime.context_options import default_threads

    for test in tests:
        if model.n_ctx_train and max(test.n_prompt, test.n_gen) >= model.n_ctx_train:
            raise InvalidParams(
                f"{test.name} needs more tokens than the {model.n_ctx_train} that the model was trained with; "
                f"give -{'p' if test.n_prompt else 'n'} a smaller number"
            )
    n_threads = default_threads(model) if threads is None else threads
    cells = max(test.n_streams * -(-(test.n_prompt + test.n_gen + 1) // _CELLS) * _CELLS for test in tests)
    facts = {
        "build_commit": build_info().llama_cpp_commit,
        "cpu_info": ", ".join(each.description for each in devices() if each.kind == "cpu"),
        "gpu_info": ", ".join(each.description for each in devices() if each.kind != "cpu"),
        "backends": build_info().backend.upper(),
        "model_filename": str(model.paths[0]),
        "model_type": model.desc,
        "model_size": model.size_bytes,
        "model_n_params": model.n_params,
        "n_threads": n_threads,
        "n_gpu_layers": -1 if choice.n_gpu_layers is None else choice.n_gpu_layers,
    }
    tokens = random.Random(_SEED)  # noqa: S311 - no secrets
    slots = max(test.n_streams for test in tests)
    with LLM(model, num_slots=slots, n_ctx=cells, n_threads=n_threads, mmproj=False) as llm:
        for test in tests:
            began = datetime.now(UTC)
            samples = []
            for number in range(repetitions + warms_up):
                elapsed_ns = _time_ns(llm, test, tokens, stop)
                if stop.requested:
                    return
                if number >= warms_up:
                    samples.append(elapsed_ns)
            yield _row(facts, test, began, samples)


def _time_ns(llm: LLM, test: BenchTest, tokens: random.Random, stop: StopSignal) -> int:
    """Run a test once, and return the nanoseconds that it took."""
    n_vocab = llm.tokenizer.n_vocab
    prompts = [[tokens.randrange(n_vocab) for _ in range(test.n_prompt or 1)] for _ in range(test.n_streams)]
    began_ns = time.perf_counter_ns()
    with (
        llm.stream(prompts, max_tokens=test.n_gen or 1, ignore_eos=True, cache_prompt=False) as streams,
        stop.aborting(streams.cancel),
    ):
        count = sum(len(chunk.token_ids) for _, chunk in streams)
    elapsed_ns = time.perf_counter_ns() - began_ns
    if count != test.n_streams * (test.n_gen or 1) and not stop.requested:
        raise EngineError(f"{test.name} ended after {count} of {test.n_streams * (test.n_gen or 1)} tokens")
    return elapsed_ns


def _row(facts: dict[str, Any], test: BenchTest, began: datetime, samples_ns: Sequence[int]) -> Row:
    num_tokens = (test.n_prompt or test.n_gen) * test.n_streams
    samples_ts = [num_tokens * 1e9 / each for each in samples_ns]
    spread: Callable[[Sequence[float]], float] = statistics.stdev if len(samples_ns) > 1 else lambda _: 0.0
    return {
        **facts,
        **asdict(test),
        "test_time": f"{began:%Y-%m-%dT%H:%M:%SZ}",
        "avg_ns": round(statistics.fmean(samples_ns)),
        "stddev_ns": round(spread(samples_ns)),
        "avg_ts": statistics.fmean(samples_ts),
        "stddev_ts": spread(samples_ts),
        "samples_ns": samples_ns,
        "samples_ts": samples_ts,
    }


_HEADING: Final = ("model", "size", "params", "backend", "threads", "streams", "test", "t/s")
_WIDTHS: Final = (30, -10, -10, 10, -7, -7, -15, -20)  # below 0: aligned to the right


def _write_markdown(rows: Iterator[Row]) -> None:
    """Write a table, each row as soon as it is measured, and the commit of llama.cpp."""
    commit = None
    for row in rows:
        if commit is None:
            commit = row["build_commit"]
            terminal.write(_table_line(_HEADING))
            terminal.write("".join(f"| {'-' * (abs(width) - 1)}{':-'[width > 0]} " for width in _WIDTHS) + "|\n")
        size, params = row["model_size"], row["model_n_params"]
        cells = (
            row["model_type"],
            f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB",
            f"{params / 1e9:.2f} B" if params >= 1e9 else f"{params / 1e6:.2f} M",
            row["backends"],
            str(row["n_threads"]),
            str(row["n_streams"]),
            f"pp{row['n_prompt']}" if row["n_prompt"] else f"tg{row['n_gen']}",
            f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}",
        )
        terminal.write(_table_line(cells))
    if commit is not None:
        terminal.write(f"\nbuild: {commit[:9]}\n")


def _table_line(cells: Sequence[str]) -> str:
    padded = (f"{cell:{'<>'[width < 0]}{abs(width)}}" for cell, width in zip(cells, _WIDTHS, strict=True))
    return "".join(f"| {cell} " for cell in padded) + "|\n"


def _write_lines(rows: Iterator[Row]) -> None:
    for row in rows:
        terminal.write_json(row)


def _write_csv(rows: Iterator[Row]) -> None:
    """Write a line of names, and a line for each row as soon as it is measured. Samples are left out, as by llama-bench."""
    for number, row in enumerate(rows):
        values = {name: value for name, value in row.items() if not name.startswith("samples")}
        text = io.StringIO()
        if number == 0:
            csv.writer(text, lineterminator="\n").writerow(values)
        csv.DictWriter(text, values, quoting=csv.QUOTE_ALL, lineterminator="\n").writerow(values)
        terminal.write(text.getvalue())


_WRITERS: Final[dict[OutputFormat, Callable[[Iterator[Row]], None]]] = {
    OutputFormat.MD: _write_markdown,
    OutputFormat.CSV: _write_csv,
    OutputFormat.JSON: lambda rows: terminal.write_json(list(rows), indent=2),
    OutputFormat.JSONL: _write_lines,
}
