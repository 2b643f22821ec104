"""What several commands share: options with the headings of help, texts from arguments, stdin and files, loading a model."""

from __future__ import annotations

import io
import logging
import os
import select
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import terminal
from paceline.cli.interrupt import StopSignal
from paceline.errors import InvalidParams

if TYPE_CHECKING:
    from paceline.runtime import Model


STDIN = "-"
_SILENCE_S = 2.0


def text_argument(name: str, text: str) -> str:
    """Return an argument as text. Raise `InvalidParams` if its bytes were not in the locale's encoding."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidParams(f"{name} is no valid text: character {error.start} of it is a stray byte") from None
    return text


def argument_or_stdin(name: str, text: str | None) -> str:
    """Return the argument; for "-", or without an argument if stdin is redirected, all of stdin but its last line break."""
    if text is None and not stdin_is_redirected():
        raise missing(name)
    return stdin_text() if text in (None, STDIN) else text_argument(name, text)


def arguments_or_lines(name: str, texts: list[str] | None) -> list[str]:
    """Return the arguments, each "-" replaced by the lines of stdin; without any, the lines of a redirected stdin."""
    if not texts and not stdin_is_redirected():
        raise missing(name)
    found: list[str] = []
    for text in texts or [STDIN]:
        found += stdin_text().split("\n") if text == STDIN else [text_argument(name, text)]
    return found


def given_text(name: str, argument: str | None, prompt: str | None, file: Path | None) -> str | None:
    """Return the argument or --prompt, the text of --file and the text of a redirected stdin, with a blank line between them.

    "-" as the argument or the file reads stdin there. Returns None if nothing is given and stdin has no text.
    """
    if argument is not None and prompt is not None:
        raise InvalidParams(f"{name} and --prompt exclude each other: give one of them")
    question = prompt if argument is None else argument
    parts = [] if question is None else [argument_or_stdin(name, question)]
    if file is not None:
        parts.append(stdin_text() if str(file) == STDIN else _without_line_end(text_file("--file", file)))
    is_read = question == STDIN or str(file) == STDIN
    if not is_read and stdin_is_redirected() and (not parts or _stdin_speaks()):
        piped = stdin_text()
        parts += [piped] if piped.strip() else []
    return "\n\n".join(filter(None, parts)) if parts else None


def missing(name: str) -> InvalidParams:
    """Return the error of a text that was neither given nor sent to stdin."""
    return InvalidParams(f"{name} is missing: give a text, or send one to stdin by a pipe; --help lists the options")


def stdin_is_redirected() -> bool:
    """Return whether stdin is a pipe, a file or a socket: not a terminal, not the null device, not closed."""
    mode = _stdin_mode()
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def _stdin_mode() -> int:
    """Return the mode of stdin's file, 0 if it is closed; a stream without a descriptor counts as a regular file."""
    try:
        return 0 if sys.stdin is None else os.fstat(sys.stdin.fileno()).st_mode
    except io.UnsupportedOperation:
        return stat.S_IFREG
    except OSError:
        return 0


def _stdin_speaks() -> bool:
    """Return whether to read stdin beside an argument: not a socket that stays silent, as ssh and Node.js leave one open."""
    mode = _stdin_mode()
    if stat.S_ISREG(mode) or select.select([sys.stdin], [], [], _SILENCE_S)[0]:
        return True
    if stat.S_ISSOCK(mode):
        terminal.note(f"stdin is a socket that sent no text within {_SILENCE_S:g} s; it is left out")
        return False
    terminal.note("stdin is a pipe without text so far; it is read to its end. Add < /dev/null to leave it out.")
    return True


def stdin_text() -> str:
    """Read all of stdin but the line break at its end. Raise `InvalidParams` if it is closed or not UTF-8."""
    if sys.stdin is None:
        raise InvalidParams('"-" reads stdin, which is closed')
    return _without_line_end(_decoded("stdin", sys.stdin.buffer.read()))


def text_file(name: str, path: Path) -> str:
    """Read a file. Raise `InvalidParams` if it cannot be read or is not UTF-8."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidParams(f"{name}: cannot read {path}: {error.strerror or error}") from None
    return _decoded(f"{name} {path}", data)


def _without_line_end(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")


def _decoded(name: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidParams(f"{name} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}") from None


choosing_model = partial(typer.Option, rich_help_panel="Which model")
choosing_tokens = partial(typer.Option, rich_help_panel="How tokens are chosen")
ending = partial(typer.Option, rich_help_panel="When it ends")
reading_text = partial(typer.Option, rich_help_panel="How the text is read")
making_vectors = partial(typer.Option, rich_help_panel="What the vectors are")
running = partial(typer.Option, rich_help_panel="How it runs")
showing = partial(typer.Option, rich_help_panel="What is shown")

ModelOption = Annotated[
    str | None,
    choosing_model(
        "--model",
        "-m",
        metavar="MODEL",
        help="GGUF file, of a split set its first part; or hf:USER/REPO[:QUANT], a URL, ollama:NAME.",
        show_default="the demo model",
    ),
]
PromptOption = Annotated[
    str | None,
    reading_text("--prompt", "-p", metavar="TEXT", help="The same as the argument.", show_default=False),
]
FileOption = Annotated[
    Path | None,
    reading_text("--file", "-f", metavar="FILE", help="Add the text of a file after it.", show_default=False),
]
GpuLayersOption = Annotated[
    int | None,
    choosing_model(
        "--n-gpu-layers", "-ngl", metavar="N", help="Layers on the GPU, -1 for all.", show_default="as many as fit"
    ),
]
DeviceOption = Annotated[
    list[str] | None,
    choosing_model(
        metavar="NAME", help="Compute on this device, may be repeated; see `paceline info`.", show_default="all"
    ),
]
RpcOption = Annotated[
    str | None,
    choosing_model(
        "--rpc",
        metavar="HOST:PORT,...",
        help="Compute on the devices of these hosts as well, where `paceline rpc-serve` runs.",
        show_default="none",
    ),
]
ThreadsOption = Annotated[
    int | None,
    running(
        "--threads",
        "-t",
        metavar="N",
        help="CPU threads.",
        show_default="physical cores, fewer for small models",
    ),
]
ParseSpecialOption = Annotated[
    bool, reading_text("--parse-special", help="Take names like <|im_start|> in it for control tokens.")
]
VerboseOption = Annotated[bool, running("--verbose", "-v", help="Show llama.cpp's log on stderr.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """Which model to load and how.

    path: of a file, or a name such as "hf:user/repo"; None: the demo model. rpc: other hosts that compute, between commas.
    """

    path: str | Path | None = None
    n_gpu_layers: int | None = None
    devices: list[str] | None = None
    rpc: str | None = None
    vocab_only: bool = False
    show_progress: bool = True
    verbose: bool = False


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and the seconds that loading it took."""

    model: Model
    load_s: float


def load(choice: ModelChoice, stop: StopSignal) -> LoadedModel:
    """Load the model, with a progress bar if stderr is a terminal; of one that other hosts compute, the vocabulary alone.

    A model that is given by name is downloaded first. Raises as `Model.load` and `local_model`, and `InvalidParams` for a
    path that is no text.
    """
    from paceline.demo import demo_model_path
    from paceline.runtime import Model

    if choice.verbose:
        _show_log()
    path = demo_model_path() if choice.path is None else _local_path(choice, stop)
    start = time.perf_counter()
    with _progress_bar(f"Loading {path.name}", choice.show_progress and not choice.verbose) as progress:
        model = Model.load(
            path,
            n_gpu_layers=choice.n_gpu_layers,
            devices=choice.devices or None,
            vocab_only=choice.vocab_only or choice.rpc is not None,
            progress=progress,
            cancel=stop.event,
        )
    return LoadedModel(model, time.perf_counter() - start)


def engine_model(choice: ModelChoice, model: Model) -> tuple[Any, dict[str, Any]]:
    """Return what `LLM` takes for a model that `load` returned, and options for it: with hosts, its files and a process.

    llama.cpp ends the process that loses a host, so it is not this one.
    """
    if choice.rpc is None:
        return model, {}
    options: dict[str, Any] = {"rpc": text_argument("--rpc", choice.rpc), "isolation": "process"}
    if choice.n_gpu_layers is not None:
        options["n_gpu_layers"] = choice.n_gpu_layers
    if choice.devices:
        options["devices"] = choice.devices
    return model.paths[0] if len(model.paths) == 1 else list(model.paths), options


def _local_path(choice: ModelChoice, stop: StopSignal) -> Path:
    from paceline.hub import check_is_path, is_reference, local_model

    text = text_argument("the model's path", str(choice.path))
    if not is_reference(text):
        check_is_path(text)
        return Path(text)
    return local_model(text, cancel=stop.event, stream=sys.stderr, note=terminal.note).path


@contextmanager
def _progress_bar(title: str, wanted: bool) -> Iterator[Callable[[float], object] | None]:
    """Show a transient bar on stderr; yield the function that sets its share of 1, or None without a bar."""
    if not wanted or not terminal.is_terminal(sys.stderr):
        yield None
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    console = terminal.console(sys.stderr)
    if console.is_dumb_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task(terminal.printable(title), total=1.0)
        yield lambda share: bar.update(task, completed=share)


def _show_log() -> None:
    logger = logging.getLogger("paceline.llama")
    logger.addHandler(logging.StreamHandler(sys.stderr))
    logger.setLevel(logging.DEBUG)
