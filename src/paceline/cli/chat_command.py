"""`paceline chat`: a conversation in the terminal."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import terminal
from paceline.cli.chat_session import QUOTES, ChatSession, SessionOptions, stats_line
from paceline.cli.chat_view import make_view
from paceline.cli.generate import ContextSize
from paceline.cli.image_options import (
    AudioFiles,
    ImageFiles,
    ImageMaxTokens,
    ImageMinTokens,
    ImageOptions,
    Mmproj,
    NoMmproj,
    NoMmprojOffload,
)
from paceline.cli.interrupt import StopSignal, run
from paceline.cli.options import (
    DeviceOption,
    FileOption,
    GpuLayersOption,
    LoraOption,
    ModelChoice,
    ModelOption,
    PromptOption,
    RpcOption,
    ThreadsOption,
    VerboseOption,
    calling_tools,
    engine_model,
    given_text,
    load,
    lora_adapters,
    missing,
    reading_text,
    sampling_params,
    showing,
    takes_sampling,
    text_argument,
    way_to_longer_texts,
)
from paceline.errors import InvalidParams
from paceline.params import SamplingParams

_PROMPT = "> "
_GOES_ON = "... "
_POLL_S = 0.1

Message = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MESSAGE",
        help="One message, whose reply ends the command. A text sent to stdin by a pipe follows it. Without both, a chat.",
        show_default=False,
    ),
]
System = Annotated[
    str | None,
    reading_text(
        "--system", metavar="TEXT", help="Instructions for the model: the system message.", show_default=False
    ),
]
ChatFile = Annotated[
    Path | None, reading_text("--load", metavar="FILE", help="Go on with a saved conversation.", show_default=False)
]
ChatTemplate = Annotated[
    str | None,
    reading_text(
        "--chat-template",
        metavar="TEMPLATE",
        help="Name of another template of the model, or Jinja source.",
        show_default="the model's",
    ),
]
Effort = Annotated[
    str | None,
    reading_text(
        "--reasoning-effort",
        metavar="WORD",
        help="How much the model thinks, such as low or high; none for no thinking. Some templates have no effort.",
        show_default=False,
    ),
]
ToolFile = Annotated[
    Path | None,
    calling_tools(
        "--tools",
        metavar="FILE",
        help="Python file whose public functions with docstrings the model may call.",
        show_default=False,
    ),
]
Yes = Annotated[bool, calling_tools("--yes", "-y", help="Run each call without asking first.")]
Plain = Annotated[bool, showing("--plain", help="Show the text without setting its Markdown.")]
HideThinking = Annotated[bool, showing("--hide-thinking", help="Do not show the model's thinking.")]
Quiet = Annotated[bool, showing("--quiet", "-q", help="Show no progress bar, no greeting and no statistics.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatJob:
    """The options of a run, checked. message: the only one; None for a chat."""

    message: str | None
    params: SamplingParams
    model: ModelChoice
    system: str | None
    load: Path | None
    turn: dict[str, Any]
    llm: dict[str, Any]
    tools: Sequence[Callable[..., Any]]
    allows: Callable[[StopSignal], bool] | None
    is_plain: bool
    shows_thinking: bool
    quiet: bool
    images: ImageOptions


@takes_sampling(max_tokens=-1)
def chat(
    message: Message = None,
    *,
    prompt_text: PromptOption = None,
    file: FileOption = None,
    model: ModelOption = None,
    n_gpu_layers: GpuLayersOption = None,
    device: DeviceOption = None,
    rpc: RpcOption = None,
    lora: LoraOption = None,
    system: System = None,
    load_file: ChatFile = None,
    chat_template: ChatTemplate = None,
    tools: ToolFile = None,
    yes: Yes = False,
    reasoning_effort: Effort = None,
    image: ImageFiles = None,
    audio: AudioFiles = None,
    mmproj: Mmproj = None,
    no_mmproj: NoMmproj = False,
    no_mmproj_offload: NoMmprojOffload = False,
    image_min_tokens: ImageMinTokens = None,
    image_max_tokens: ImageMaxTokens = None,
    ctx_size: ContextSize = None,
    threads: ThreadsOption = None,
    verbose: VerboseOption = False,
    plain: Plain = False,
    hide_thinking: HideThinking = False,
    quiet: Quiet = False,
    **sampling: Any,
) -> None:
    """Chat with a model. /help lists commands, Ctrl-C stops a reply, Ctrl-D ends.

    With a MESSAGE, or if stdin is no terminal, one reply is written to stdout and statistics to stderr. The message
    is MESSAGE, the text of --file, and the text that a pipe sends to stdin, with a blank line between them. The
    model's thinking is dimmed on a terminal, and left out elsewhere. Images and audio are sent with the first message.
    """
    params = sampling_params({"max_tokens": -1, **sampling})
    if system is not None and load_file is not None:
        raise InvalidParams("--system and --load exclude each other: a saved conversation has its own system message")
    turn = (
        {} if reasoning_effort is None else {"reasoning_effort": text_argument("--reasoning-effort", reasoning_effort)}
    )
    images = ImageOptions(
        files=tuple(image or ()),
        audio_files=tuple(audio or ()),
        mmproj=mmproj,
        no_mmproj=no_mmproj,
        no_mmproj_offload=no_mmproj_offload,
        min_tokens=image_min_tokens,
        max_tokens=image_max_tokens,
    )
    job = ChatJob(
        message=_only_message(given_text("MESSAGE", message, prompt_text, file)),
        params=params,
        model=ModelChoice(
            path=images.model_path(model),
            n_gpu_layers=n_gpu_layers,
            devices=device,
            rpc=rpc,
            lora=lora_adapters(lora),
            show_progress=not quiet,
            verbose=verbose,
        ),
        system=None if system is None else text_argument("--system", system),
        load=load_file,
        turn=turn,
        llm={"n_ctx": ctx_size, "n_threads": threads, "chat_template": chat_template},
        tools=() if tools is None else load_tools(tools),
        allows=None if tools is None or yes else _asking(),
        is_plain=plain,
        shows_thinking=not hide_thinking,
        quiet=quiet,
        images=images,
    )
    _run(job)


def _only_message(given: str | None) -> str | None:
    """Return the only message of a run; None for a chat, which needs a terminal. Raises `InvalidParams` if there is neither."""
    if given is None and not terminal.can_read_keys():
        raise missing("MESSAGE")
    return given


def load_tools(path: Path) -> list[Callable[..., Any]]:
    """Return the functions that a Python file defines whose names have no leading underscore and that have a docstring.

    Raises `InvalidParams` if the file cannot be run, has no such function, or one of them has no JSON schema.
    """
    from paceline import FunctionTool

    spec = importlib.util.spec_from_loader(
        "paceline_tools", importlib.machinery.SourceFileLoader("paceline_tools", str(path))
    )
    assert spec is not None and spec.loader is not None  # noqa: S101, PT018 - a loader is given
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # pydantic looks for it
    sys.path.insert(0, str(path.resolve().parent))  # as `python FILE` does
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InvalidParams(f"--tools {path}: {type(error).__name__}: {error}") from error
    found: list[Callable[..., Any]] = [
        value
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
        and value.__doc__
    ]
    if not found:
        raise InvalidParams(f"--tools {path} has no public function with a docstring, which describes it to the model")
    for function in found:
        if FunctionTool.of(function).is_async:
            raise InvalidParams(f"--tools {path}: {function.__name__} is async; only plain functions run in a chat")
    return found


def _asking() -> Callable[[StopSignal], bool]:
    """Return a function that asks for a key on the terminal, which stays the terminal if stdin is a pipe.

    Raises `InvalidParams` if there is no terminal to ask on.
    """
    try:
        keyboard = sys.stdin.fileno() if terminal.is_terminal(sys.stdin) else os.open("/dev/tty", os.O_RDONLY)
    except (AttributeError, OSError):  # no stdin, or no terminal at all
        keyboard = -1
    if keyboard < 0 or not terminal.is_terminal(sys.stderr):
        raise InvalidParams("--tools asks on a terminal before each call, and there is none; --yes runs calls unasked")
    is_for_all = False

    def allows(stop: StopSignal) -> bool:
        nonlocal is_for_all
        if is_for_all:
            return True
        key = ""
        with terminal.Keys(keyboard) as keys:
            keys.read()  # what was typed before the question
            terminal.note("Run it? y yes, n no, a yes to all")
            while not stop.requested and not key:
                keys.wait(_POLL_S)
                key = next((pressed for pressed in keys.read().lower() if pressed in "yna"), "")
        is_for_all = key == "a"
        return key in ("y", "a")

    return allows


def _run(job: ChatJob) -> None:
    from paceline.llm import LLM

    attachments = job.images.attachments()
    loaded = run(lambda stop: load(job.model, stop))
    source, options = engine_model(job.model, loaded.model)
    options |= job.images.engine_options(takes_images_later=True)
    with LLM(source, num_slots=1, **options, **job.llm) as llm:
        session = ChatSession(
            llm,
            SessionOptions(
                params=job.params,
                turn={**job.turn, "lora": job.model.lora_scales, "context_overflow": "drop_oldest"},
                make_view=lambda: make_view(is_plain=job.is_plain, shows_thinking=job.shows_thinking),
                run=run,
                full_advice="/clear begins anew" if job.message is None else way_to_longer_texts(llm.limits),
                tools=job.tools,
                allows=job.allows,
            ),
            job.system,
        )
        if job.load is not None:
            session.load(job.load)
        for path, attachment in attachments:
            session.attach(path, attachment)
        if job.message is not None:
            session.say(job.message)
            if not job.quiet and session.last_usage is not None:
                terminal.note(stats_line(session.last_usage))
            return
        if not job.quiet:
            name = loaded.model.metadata.get("general.name", "") or "the model"
            terminal.note(f"Chatting with {name}. /help lists commands, Ctrl-C stops a reply, Ctrl-D ends.")
        _converse(session)


def _converse(session: ChatSession) -> None:
    """Read lines until one ends the chat."""
    with suppress(ImportError):
        import readline  # which gives `input` a history and editing

        readline.set_completer(_completer(session.commands))
        readline.set_completer_delims(" \t\n")  # a command's slash is part of its name
        readline.parse_and_bind("tab: complete")
        readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines are one message
    while True:
        try:
            line = _read()
        except EOFError:
            terminal.write("\n")
            return
        except KeyboardInterrupt:
            terminal.write("\n")
            continue
        if not session.handle(line):
            return


def _read() -> str:
    """Return a line. One that ends with a backslash goes on in the next, and three quotes go on to the closing ones.

    Raises `EOFError` at the end.
    """
    lines = [input(_PROMPT)]
    if lines[0].lstrip().startswith(QUOTES):
        while not "\n".join(lines).strip().removeprefix(QUOTES).endswith(QUOTES):
            lines.append(input(_GOES_ON))
        return "\n".join(lines)
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input(_GOES_ON))
    return "\n".join(lines)


def _completer(commands: tuple[str, ...]) -> Any:
    """Return a function that completes the names of commands, as readline calls it."""

    def complete(text: str, state: int) -> str | None:
        found = [name for name in commands if text.startswith("/") and name.startswith(text)]
        return found[state] if state < len(found) else None

    return complete
