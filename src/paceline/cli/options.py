"""Shared parts of commands: options under the headings of help, loading a model, images and audio of prompts."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, get_origin, get_type_hints

import typer

from paceline import validation
from paceline.cli import terminal
from paceline.cli.config_file import MODEL_VARIABLE
from paceline.cli.endings import StopSignal
from paceline.cli.inputs import text_argument
from paceline.errors import InvalidParams, PacelineError, PromptTooLong
from paceline.params import SamplingParams, flag_help
from paceline.sampling_table import PARAMETERS, Parameter

if TYPE_CHECKING:
    from paceline.media import Attachment, Audio, Image
    from paceline.runtime import Model
    from paceline.sequence import Limits
    from paceline.streaming import Usage


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
    from paceline.hub.caches import find_models
    from paceline.hub.references import hub_settings

    try:
        names = [model.name for model in find_models(hub_settings())]
    except (PacelineError, OSError):  # a shell shows no errors between the words that are typed
        return []
    shortened = [name.removeprefix("hf:") for name in names] if incomplete else []
    return [name for name in dict.fromkeys([*names, *shortened]) if name.startswith(incomplete)]


# Options are laid out by hand, a few lines each.
# fmt: off
ModelOption = Annotated[str | None, choosing_model(
    "--model", "-m", metavar="MODEL", envvar=MODEL_VARIABLE, autocompletion=model_names, show_envvar=False,
    help="GGUF file, of a split set its first part; or hf:USER/REPO[:QUANT], a URL, ollama:NAME.",
    show_default="PACELINE_MODEL, or the demo model",
)]
PromptOption = Annotated[str | None, reading_text(
    "--prompt", "-p", metavar="TEXT", help="The text, in place of the argument.", show_default=False,
)]
FileOption = Annotated[Path | None, reading_text(
    "--file", "-f", metavar="FILE", help="Add the text of a file after the argument.", show_default=False,
)]
ApiKeyOption = Annotated[str | None, running(
    "--api-key", metavar="KEY", envvar="PACELINE_API_KEY", show_envvar=False,
    help="The server's key; else PACELINE_API_KEY.", show_default=False,
)]
GpuLayersOption = Annotated[int | None, choosing_model(
    "--n-gpu-layers", "-ngl", metavar="N", help="Layers on the GPU, -1 for all.", show_default="as many as fit",
)]
DeviceOption = Annotated[list[str] | None, choosing_model(
    metavar="NAME", help="Compute on this device; may be repeated. `paceline info` lists devices.",
    show_default="all",
)]
RpcOption = Annotated[str | None, choosing_model(
    "--rpc", metavar="HOST:PORT,...",
    help="Compute also on the devices of these hosts, each of which runs `paceline rpc-serve`.", show_default="none",
)]
LoraOption = Annotated[list[str] | None, choosing_model(
    "--lora", metavar="FILE[=SCALE]", help="Apply this LoRA adapter, with scale 1 or SCALE; may be repeated.",
    show_default="none",
)]
ContextSize = Annotated[int | None, running(
    "--ctx-size", "-c", metavar="N", min=1, help="Size of the context in tokens: prompt and generated text together.",
    show_default="what the model was trained with, as memory allows",
)]
ThreadsOption = Annotated[int | None, running(
    "--threads", "-t", metavar="N", min=1, help="CPU threads.", show_default="physical cores, fewer for small models",
)]
ParseSpecialOption = Annotated[bool, reading_text(
    "--parse-special", help="Read names such as <|im_start|> in the text as control tokens.",
)]
VerboseOption = Annotated[bool, running("--verbose", "-v", help="Show llama.cpp's log on stderr.")]
# fmt: on


_seeing = partial(typer.Option, rich_help_panel="Images and audio")

# Options are laid out by hand, a few lines each.
# fmt: off
ImageFiles = Annotated[list[Path] | None, _seeing(
    "--image", metavar="FILE",
    help="An image before the text; may be repeated. If no model is named, a demo model for images is loaded.",
    show_default=False,
)]
AudioFiles = Annotated[list[Path] | None, _seeing(
    "--audio", metavar="FILE", help="Audio before the text and after the images; may be repeated.",
    show_default=False,
)]
Mmproj = Annotated[Path | None, _seeing(
    "--mmproj", metavar="FILE", help="The model's projector.", show_default="the one beside the model",
)]
NoMmproj = Annotated[bool, _seeing("--no-mmproj", help="Load no projector: the model takes no images and no audio.")]
NoMmprojOffload = Annotated[bool, _seeing("--no-mmproj-offload", help="Keep the projector off the GPU.")]
ImageMinTokens = Annotated[int | None, _seeing(
    "--image-min-tokens", metavar="N", help="Minimum of tokens for an image.", show_default="the projector's",
)]
ImageMaxTokens = Annotated[int | None, _seeing(
    "--image-max-tokens", metavar="N", help="Maximum of tokens for an image.", show_default="the projector's",
)]
# fmt: on


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """The options about the model and its loading. Raises `InvalidParams` for wrong adapters.

    Attributes:
        model: A file, or a name such as "hf:user/repo"; None: the demo model.
        rpc: Other hosts that compute, separated by commas.
        vocab_only: Whether only the vocabulary is loaded.
        show_progress: Whether a bar is shown while it loads.
    """

    model: ModelOption = None
    n_gpu_layers: GpuLayersOption = None
    device: DeviceOption = None
    rpc: RpcOption = None
    lora: LoraOption = None
    verbose: VerboseOption = False
    vocab_only: bool = False
    show_progress: bool = True

    def __post_init__(self) -> None:
        lora_adapters(self.lora)

    @property
    def lora_scales(self) -> dict[str, float]:
        """The scales of the adapters for a request."""
        return {name: scale for name, (_, scale) in lora_adapters(self.lora).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions:
    """The options about images and audio. Raises `InvalidParams` if they exclude each other."""

    image: ImageFiles = None
    audio: AudioFiles = None
    mmproj: Mmproj = None
    no_mmproj: NoMmproj = False
    no_mmproj_offload: NoMmprojOffload = False
    image_min_tokens: ImageMinTokens = None
    image_max_tokens: ImageMaxTokens = None

    def __post_init__(self) -> None:
        given = {"--image": self.image, "--audio": self.audio, "--mmproj": self.mmproj}
        other = next((name for name, value in given.items() if value), None)
        if self.no_mmproj and other is not None:
            raise InvalidParams(f"--no-mmproj and {other} exclude each other; leave one of them out")

    def attachments(self) -> list[tuple[Path, Attachment]]:
        """Return all files with their images and audio. Raises as `read_image` and `read_audio`."""
        images: list[tuple[Path, Attachment]] = [(path, read_image(path, "--image")) for path in self.image or ()]
        return images + [(path, read_audio(path, "--audio")) for path in self.audio or ()]

    def model_path(self, model: str | None) -> str | None:
        """Return the model to load: with images and without a name, the demo model for images."""
        if model is not None or not self.image or self.mmproj is not None:
            return model
        from paceline.demo import demo_vision_model_path

        return str(demo_vision_model_path())

    def engine_options(self, *, takes_images_later: bool) -> dict[str, Any]:
        """Return the keywords of `LLM`. takes_images_later: so that the projector beside the model is loaded in any case."""
        beside = True if self.image or self.audio else None if takes_images_later and not self.no_mmproj else False
        return {
            "mmproj": beside if self.mmproj is None else self.mmproj,
            "mmproj_offload": not self.no_mmproj_offload,
            "image_min_tokens": self.image_min_tokens,
            "image_max_tokens": self.image_max_tokens,
        }


_PANELS: Final = {"Length": ending, "Output": constraining}  # of groups of parameters; the others choose tokens


def takes_options(**defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives a command its options from records and from the table of sampling parameters.

    A parameter whose type is a dataclass stands for the options among its fields. `**sampling` stands for an option for each
    sampling parameter that a text can set.

    Args:
        **defaults: Defaults of sampling options that differ from those of the fields.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        records: dict[str, Any] = {}
        made: list[inspect.Parameter] = []
        for parameter in own.parameters.values():
            if dataclasses.is_dataclass(parameter.annotation):
                records[parameter.name] = parameter.annotation
                made += _options_in(parameter.annotation)
            elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
                made += [option for row in PARAMETERS if row.group for option in _options_of(row, defaults)]
            else:
                made.append(parameter)

        @functools.wraps(command)
        def with_records(*arguments: Any, **options: Any) -> None:
            for name, record in records.items():
                given = [option.name for option in _options_in(record) if option.name in options]
                options |= {name: record(**{option: options.pop(option) for option in given})}
            command(*arguments, **options)

        with_records.__signature__ = own.replace(parameters=made)  # type: ignore[attr-defined]
        return with_records

    return decorate


def _options_in(record: Any) -> list[inspect.Parameter]:
    """Return the options among the fields of a dataclass."""
    types = get_type_hints(record, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=types[field.name]
        )
        for field in dataclasses.fields(record)
        if get_origin(types[field.name]) is Annotated
    ]


def _options_of(row: Parameter, defaults: Mapping[str, Any]) -> Iterator[inspect.Parameter]:
    """Yield the option of a parameter, and the option that reads its value from a file, if there is one."""
    kind: Any = {"number": float, "integer": int, "boolean": bool}.get(row.kind)
    default = getattr(SamplingParams(), row.name) if kind else None
    default = defaults.get(row.name, -1 if row.name == "seed" else default)
    metavar = row.metavar or {int: "N", float: "X"}.get(kind)
    kind = kind or (list[str] if row.is_repeated else str)
    about = flag_help(row.name)
    about = f"{about.removesuffix('.')}; may be repeated." if row.is_repeated else about
    yield _option(row, row.name, row.flags, kind, default, metavar, about)
    if row.file_flags:
        about = f"The same, with the {'schema' if row.kind == 'json' else row.name} in a file."
        yield _option(row, f"{row.name}_file", row.file_flags, Path, None, "FILE", about)


def _option(  # noqa: PLR0917 - the parts of an option
    row: Parameter, name: str, flags: str, kind: Any, default: Any, metavar: str | None, about: str
) -> inspect.Parameter:
    short = [flag for flag in flags.split() if not flag.startswith("--")]
    panel = _PANELS.get(str(row.group), choosing_tokens)
    has_default = default is not None and kind is not bool
    info = panel(f"--{name.replace('_', '-')}", *short, metavar=metavar, help=about, show_default=has_default)
    taken = kind if row.kind in ("number", "integer", "boolean") else kind | None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[taken, info])


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


def way_to_longer_texts(limits: Limits, num_tokens: int = 0) -> str:
    """Return how a command could take a text of `num_tokens`, which the context does not hold; 0: of a few more tokens."""
    if max(num_tokens, limits.max_positions + 1) <= limits.n_ctx_train:
        return f"raise --ctx-size (at most {limits.n_ctx_train})"
    return limits.longer_prompts(num_tokens)


@contextmanager
def advising_flags(limits: Limits) -> Iterator[None]:
    """Have a `PromptTooLong` of the block advise options of the command in place of options of the library."""
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
        show_log(logging.DEBUG)
    path = demo_model_path() if choice.model is None else local_path(choice.model, stop)
    start = time.perf_counter()
    with progress_bar(f"Loading {path.name}", choice.show_progress and not choice.verbose) as progress:
        model = Model.load(
            path,
            n_gpu_layers=choice.n_gpu_layers,
            devices=choice.device or None,
            vocab_only=choice.vocab_only or choice.rpc is not None,
            progress=progress,
            cancel=stop.event,
        )
    return LoadedModel(model, time.perf_counter() - start)


def engine_model(choice: ModelChoice, model: Model) -> tuple[Any, dict[str, Any]]:
    """Return the first argument of `LLM` for a loaded model, and its options: adapters; with hosts, files and a process.

    llama.cpp ends the process that loses a host, so it is not this one.
    """
    options: dict[str, Any] = {}
    if choice.lora:
        options["lora"] = {name: path for name, (path, _) in lora_adapters(choice.lora).items()}
    if choice.rpc is None:
        return model, options
    options |= {"rpc": text_argument("--rpc", choice.rpc), "isolation": "process"}
    if choice.n_gpu_layers is not None:
        options["n_gpu_layers"] = choice.n_gpu_layers
    if choice.device:
        options["devices"] = choice.device
    return model.paths[0] if len(model.paths) == 1 else list(model.paths), options


def decode_speed(usage: Usage) -> float | None:
    """Return tokens a second after the first token; None without a second token."""
    count, decode_s = usage.completion_tokens, usage.decode_s
    return (count - 1) / decode_s if count > 1 and decode_s > 0 else None


def shown_speed(tokens_per_s: float | None) -> str:
    """Return a speed as the continuation of a line of statistics; empty for None."""
    return "" if tokens_per_s is None else f", {tokens_per_s:.{1 if tokens_per_s < 100 else 0}f} tok/s"


def local_path(model: str, stop: StopSignal) -> Path:
    """Return the file of a model, which is downloaded if it is given by name. Raises as `load`."""
    from paceline.hub import check_is_path, is_reference, local_model

    text = text_argument("the model's path", model)
    if not is_reference(text):
        check_is_path(text)
        return validation.path("the model's path", text)
    return local_model(text, cancel=stop.event, stream=sys.stderr, note=terminal.note).path


@contextmanager
def progress_bar(title: str, is_shown: bool) -> Iterator[Callable[[float], object] | None]:
    """Show a transient bar on stderr; yield the function that sets its share of 1, or None without a bar."""
    if not is_shown or not terminal.is_terminal(sys.stderr):
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


def show_log(level: int) -> None:
    """Write llama.cpp's log to stderr."""
    logger = logging.getLogger("paceline.llama")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(terminal.LogLines())
    logger.addHandler(handler)
    logger.setLevel(level)


# ---- images and audio


def read_image(path: Path, name: str) -> Image:
    """Return the image of a file, which can be decoded. name: of the option or command that named the file.

    Raises `InvalidParams`, naming the file, if it is no image, too large or damaged.
    """
    from paceline.media import Image
    from paceline.runtime import decoded_pixels

    with _naming(path, name):
        image = Image(path)
        decoded_pixels(image)
    return image


def read_audio(path: Path, name: str) -> Audio:
    """Return the audio of a file, which can be decoded. Raises as `read_image`."""
    from paceline.media import Audio
    from paceline.runtime import decoded_samples

    with _naming(path, name):
        audio = Audio(path)
        decoded_samples(audio, audio.rate)
    return audio


@contextmanager
def _naming(path: Path, name: str) -> Iterator[None]:
    """Name option and file in errors."""
    try:
        yield
    except PacelineError as error:
        words = str(error)
        raise InvalidParams(f"{name} {words}" if str(path) in words else f"{name} {path}: {words}") from error
