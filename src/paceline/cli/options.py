"""What several commands share: options with the headings of help, texts from arguments, stdin and files, loading a model."""

from __future__ import annotations

import builtins
import dataclasses
import inspect
import io
import logging
import os
import re
import select
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar, get_args

import typer

from paceline import validation
from paceline.cli import terminal
from paceline.cli.config_file import MODEL_VARIABLE
from paceline.cli.interrupt import StopSignal
from paceline.errors import InvalidParams, PacelineError, PromptTooLong
from paceline.params import NAMES_ELSEWHERE, SamplingParams

if TYPE_CHECKING:
    from paceline.runtime import Model
    from paceline.sequence import Limits


Command = TypeVar("Command", bound=Callable[..., None])

STDIN = "-"
_SILENCE_S = 2.0
_MAX_TEXT_BYTES = 256 << 20  # of a file with prompts, a schema or a grammar


def text_argument(name: str, text: str) -> str:
    """Return an argument as text. Raise `InvalidParams` if its bytes were not in the locale's encoding."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidParams(f"{name} is not valid text: character {error.start} is a stray byte") from None
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


def given_text(name: str, words: list[str] | None, prompt: str | None, file: Path | None) -> str | None:
    """Return the argument or --prompt, the text of --file and the text of a redirected stdin, with a blank line between them.

    The words of the argument are joined by spaces. "-" as the argument or the file reads stdin there. Returns None if nothing
    is given and stdin has no text.
    """
    argument = " ".join(words) if words else None
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
        data = validation.read_file(path, _MAX_TEXT_BYTES, pipes=True)
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
constraining = partial(typer.Option, rich_help_panel="What may be written")
ending = partial(typer.Option, rich_help_panel="When it ends")
reading_text = partial(typer.Option, rich_help_panel="How the text is read")
making_vectors = partial(typer.Option, rich_help_panel="What the vectors are")
calling_tools = partial(typer.Option, rich_help_panel="Tools")
running = partial(typer.Option, rich_help_panel="How it runs")
showing = partial(typer.Option, rich_help_panel="What is shown")


def model_names(incomplete: str) -> list[str]:
    """Return the names of downloaded models that begin so, for completion by a shell."""
    from paceline.hub.found_models import find_models
    from paceline.hub.hub_settings import hub_settings

    try:
        names = [model.name for model in find_models(hub_settings())]
    except (PacelineError, OSError):  # a shell shows no errors between the words that are typed
        return []
    shortened = [name.removeprefix("hf:") for name in names] if incomplete else []
    return [name for name in dict.fromkeys([*names, *shortened]) if name.startswith(incomplete)]


ModelOption = Annotated[
    str | None,
    choosing_model(
        "--model",
        "-m",
        metavar="MODEL",
        envvar=MODEL_VARIABLE,
        autocompletion=model_names,
        show_envvar=False,
        help="GGUF file, of a split set its first part; or hf:USER/REPO[:QUANT], a URL, ollama:NAME.",
        show_default="PACELINE_MODEL, or the demo model",
    ),
]
PromptOption = Annotated[
    str | None,
    reading_text("--prompt", "-p", metavar="TEXT", help="The text, in place of the argument.", show_default=False),
]
FileOption = Annotated[
    Path | None,
    reading_text("--file", "-f", metavar="FILE", help="Add the text of a file after the argument.", show_default=False),
]
ApiKeyOption = Annotated[
    str | None,
    running(
        "--api-key",
        metavar="KEY",
        envvar="PACELINE_API_KEY",
        show_envvar=False,
        help="The server's key; else PACELINE_API_KEY.",
        show_default=False,
    ),
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
        metavar="NAME",
        help="Compute on this device; may be repeated. `paceline info` lists devices.",
        show_default="all",
    ),
]
RpcOption = Annotated[
    str | None,
    choosing_model(
        "--rpc",
        metavar="HOST:PORT,...",
        help="Compute also on the devices of these hosts, each of which runs `paceline rpc-serve`.",
        show_default="none",
    ),
]
LoraOption = Annotated[
    list[str] | None,
    choosing_model(
        "--lora",
        metavar="FILE[=SCALE]",
        help="Apply this LoRA adapter, with scale 1 or SCALE; may be repeated.",
        show_default="none",
    ),
]
ThreadsOption = Annotated[
    int | None,
    running(
        "--threads",
        "-t",
        metavar="N",
        min=1,
        help="CPU threads.",
        show_default="physical cores, fewer for small models",
    ),
]
ParseSpecialOption = Annotated[
    bool, reading_text("--parse-special", help="Read names such as <|im_start|> in the text as control tokens.")
]
VerboseOption = Annotated[bool, running("--verbose", "-v", help="Show llama.cpp's log on stderr.")]


_SHORT: Final = {  # llama.cpp's short names of options
    "max_tokens": "-n",
    "stop": "-r",
    "seed": "-s",
    "logit_bias": "-l",
    "json_schema": "-j",
    "json_schema_file": "-jf",
}
LLAMA_NAMES: Final = {  # llama.cpp's long names of options that have the name of a field here
    "predict": "max-tokens",
    "n-predict": "max-tokens",
    "temp": "temperature",
    "top-nsigma": "top-n-sigma",
    "typical": "typical-p",
    "dynatemp-exp": "dynatemp-exponent",
    "mirostat-lr": "mirostat-eta",
    "mirostat-ent": "mirostat-tau",
    "repeat-last-n": "penalty-last-n",
    "dry-sequence-breaker": "dry-sequence-breakers",
    "reverse-prompt": "stop",
}
_METAVARS: Final = {  # of options that take no number
    "stop": "TEXT",
    "samplers": "NAME;...",
    "dry_sequence_breakers": "TEXT",
    "bad_words": "TEXT",
    "logit_bias": "TOKEN+BIAS",
    "grammar": "GBNF",
    "grammar_file": "FILE",
    "json_schema": "JSON",
    "json_schema_file": "FILE",
    "regex": "REGEX",
    "choice": "TEXT",
    "lark": "LARK",
}
_REPEATED: Final = frozenset({"stop", "dry_sequence_breakers", "bad_words", "logit_bias", "choice"})
_HELP: Final = {  # of options whose values are not those of the field
    "max_tokens": "Maximum of tokens to generate; -1: until the context is full.",
    "min_tokens": "Minimum of tokens to generate before the model may end.",
    "ignore_eos": "Go on after the model's end-of-generation token.",
    "disable_any_whitespace": "Generate the JSON of a schema without whitespace between its tokens.",
    "seed": "The same seed draws the same tokens; -1 draws a new seed.",
    "samplers": "Names of the samplers to apply, in order, separated by semicolons.",
    "logit_bias": "Add to the logit of a token id, as 15043+1 or 15043-1; may be repeated.",
    "stop": "Stop when the model generates this text, which is left out; may be repeated.",
    "dry_sequence_breakers": "A text at which DRY counts anew, in place of the default ones; may be repeated; none: no text.",
    "bad_words": "A text that the model must not generate; may be repeated.",
    "grammar": "Generate only text that this GBNF grammar allows.",
    "grammar_file": "The same, with the grammar in a file.",
    "json_schema": "Generate only JSON that this JSON schema allows.",
    "json_schema_file": "The same, with the schema in a file.",
    "regex": "Generate only text that this regular expression matches.",
    "choice": "Generate one of the texts that are given in this way; may be repeated.",
    "lark": "Generate only text that this Lark grammar allows.",
}
_PANELS: Final = {
    **dict.fromkeys(("max_tokens", "min_tokens", "stop", "ignore_eos"), ending),
    **dict.fromkeys(
        ("grammar", "grammar_file", "json_schema", "json_schema_file", "regex", "choice", "lark"), constraining
    ),
    **dict.fromkeys(("disable_any_whitespace", "bad_words"), constraining),
}
_NOT_OFFERED: Final = ("n", "echo", "grammar_lazy")


def usual_name(option: str) -> str:
    """Return the name of an option, without dashes, for llama.cpp's name of it; any other name as it is."""
    return LLAMA_NAMES.get(option, option)


def takes_sampling(**defaults: Any) -> Callable[[Command], Command]:
    """Return a decorator that gives a command with `**sampling` an option for each field of `SamplingParams` a text can set.

    Args:
        **defaults: Defaults of options that differ from those of the fields.
    """

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        made = signature.replace(parameters=[*own, *_sampling_options(defaults)])
        command.__signature__ = made  # type: ignore[attr-defined]
        return command

    return decorate


def _sampling_options(defaults: Mapping[str, Any]) -> Iterator[inspect.Parameter]:
    """Yield an option for each number and switch of `SamplingParams`, and for the fields of `_METAVARS`."""
    described = dict(re.findall(r"^ +(\w+): (.+)$", SamplingParams.__doc__ or "", re.MULTILINE))
    numbers: dict[str, Any] = {"float": float, "int": int, "bool": bool}
    for field in dataclasses.fields(SamplingParams):
        name, kind = field.name, numbers.get(str(field.type))
        if name in ("max_tokens", "seed"):
            kind = int
        if name not in _METAVARS and (kind is None or name in _NOT_OFFERED):
            continue
        for option in (name, f"{name}_file"):
            if option not in (name, *_METAVARS):
                continue
            default = {"max_tokens": field.default, "seed": -1}.get(name, field.default if kind else None)
            yield _option(option, kind, defaults.get(option, default), _HELP.get(option) or described.get(option, ""))


def _option(name: str, kind: Any, default: Any, text: str) -> inspect.Parameter:
    if kind is None:
        kind = Path | None if name.endswith("_file") else list[str] | None if name in _REPEATED else str | None
    panel = _PANELS.get(name, choosing_tokens)
    metavar = _METAVARS.get(name, {int: "N", float: "X"}.get(kind))
    spelled = (f"--{name.replace('_', '-')}", *([_SHORT[name]] if name in _SHORT else []))
    info = panel(*spelled, metavar=metavar, help=text, show_default=default is not None and kind is not bool)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])


def sampling_params(given: Mapping[str, Any], **changes: Any) -> SamplingParams:
    """Return the parameters of the options of `takes_sampling`. Raises `InvalidParams`.

    Args:
        given: The options by the names of the fields; None and an empty list are not given.
        **changes: Fields that win over the options.
    """
    values = {name: value for name, value in given.items() if value is not None and value != []}
    for name in [name for name in values if name.endswith("_file")]:
        field, path = name.removesuffix("_file"), values.pop(name)
        option = f"--{name.replace('_', '-')}"
        if field in values:
            raise InvalidParams(f"--{field.replace('_', '-')} and {option} exclude each other: give one of them")
        values[field] = text_file(option, path)
    for name in _REPEATED & values.keys():
        values[name] = tuple(text_argument(f"--{name.replace('_', '-')}", text) for text in values[name])
    if values.get("dry_sequence_breakers") == ("none",):
        values["dry_sequence_breakers"] = ()
    if values.get("max_tokens") == -1:
        values["max_tokens"] = None
    if "samplers" in values or "logit_bias" in values:
        from paceline.server.flags import readers

        if "samplers" in values:
            values["samplers"] = readers.sampler_names("--samplers", values["samplers"])
        biases = [pair for text in values.get("logit_bias", ()) for pair in readers.bias("--logit-bias", text)]
        values["logit_bias"] = dict(biases)
    return SamplingParams(**values | changes)


def read_sampling(name: str, text: str, start: SamplingParams) -> tuple[str, Any]:
    """Return the field of `SamplingParams` that an option of `takes_sampling` sets, and its value. Raises `InvalidParams`.

    Args:
        name: The option, with or without dashes before it, or the field.
        text: The value, as the command line has it; a switch takes true and false. "-" is the value in `start`.
        start: The parameters of the command line.
    """
    from paceline.server.flags import readers

    option = usual_name(name.lstrip("-").replace("_", "-")).replace("-", "_")
    kinds = {each.name: get_args(each.annotation)[0] for each in _sampling_options({})}
    validation.reject_unknown([option], kinds, "docs/guide/sampling.md", NAMES_ELSEWHERE)
    field = option.removesuffix("_file")
    value: Any = text
    if text == "-":
        return field, getattr(start, field)
    match kinds[option]:
        case builtins.bool:
            value = readers.switch(name, text)
        case builtins.int | builtins.float as number:
            try:
                value = number(text)
            except ValueError:
                wanted = "a whole number" if number is int else "a number"
                raise InvalidParams(f"{name} must be {wanted}, not {text[:80]!r}") from None
        case _ if option in _REPEATED:
            value = [text]
        case _ if option.endswith("_file"):
            value = Path(text).expanduser()
    return field, getattr(sampling_params({option: value}), field)


def lora_adapters(given: list[str] | None) -> dict[str, tuple[Path, float]]:
    """Return the adapters of --lora and their scales, by the names of their files. Raises `InvalidParams`."""
    adapters: dict[str, tuple[Path, float]] = {}
    for text in given or ():
        name, equals, scale = text_argument("--lora", text).rpartition("=")
        has_scale = bool(equals) and not Path(text).exists()
        path = Path(name if has_scale else text)
        try:
            number = float(scale) if has_scale else 1.0
        except ValueError:
            raise InvalidParams(f"--lora must be FILE or FILE=SCALE, such as style.gguf=0.5, not {text!r}") from None
        if path.stem in adapters:
            raise InvalidParams(f"--lora: two adapters would be called {path.stem!r}; rename a file")
        adapters[path.stem] = (path, number)
    return adapters


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """Which model to load and how.

    path: of a file, or a name such as "hf:user/repo"; None: the demo model. rpc: other hosts that compute, between commas.
    lora: files and scales of adapters, by their names.
    """

    path: str | Path | None = None
    n_gpu_layers: int | None = None
    devices: list[str] | None = None
    rpc: str | None = None
    lora: Mapping[str, tuple[Path, float]] = dataclasses.field(default_factory=dict)
    vocab_only: bool = False
    show_progress: bool = True
    verbose: bool = False

    @property
    def lora_scales(self) -> dict[str, float]:
        """The scales of the adapters for a request."""
        return {name: scale for name, (_, scale) in self.lora.items()}


def way_to_longer_texts(limits: Limits, num_tokens: int = 0) -> str:
    """Return how a command could take a text of `num_tokens`, which the context does not hold; 0: of a few more tokens."""
    if max(num_tokens, limits.max_positions + 1) <= limits.n_ctx_train:
        return f"raise --ctx-size (at most {limits.n_ctx_train})"
    return limits.longer_prompts(num_tokens)


@contextmanager
def advising_flags(limits: Limits) -> Iterator[None]:
    """Have a `PromptTooLong` of the block advise what a command offers, in place of options of the library."""
    try:
        yield
    except PromptTooLong as error:
        if error.num_tokens is None:
            raise
        with_media = "image_max_tokens" in str(error)
        tokens = "tokens with those of images and audio" if with_media else "tokens"
        shorter = "leave some out, lower --image-max-tokens" if with_media else "shorten it"
        number = f"{'' if error.is_counted else 'at least '}{error.num_tokens}"
        raise PromptTooLong(
            f"the prompt has {number} {tokens}, and the context {limits.max_positions}; {shorter}, or "
            f"{way_to_longer_texts(limits, error.num_tokens)}",
            error.num_tokens,
            error.max_tokens,
            error.is_counted,
        ) from None


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
    """Return what `LLM` takes for a model that `load` returned, and options for it: adapters; with hosts, files and a process.

    llama.cpp ends the process that loses a host, so it is not this one.
    """
    options: dict[str, Any] = {"lora": {name: path for name, (path, _) in choice.lora.items()}} if choice.lora else {}
    if choice.rpc is None:
        return model, options
    options |= {"rpc": text_argument("--rpc", choice.rpc), "isolation": "process"}
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
        return validation.path("the model's path", text)
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
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(terminal.LogLines())
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
