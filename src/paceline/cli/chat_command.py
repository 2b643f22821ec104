"""`paceline chat`: a conversation in the terminal."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import terminal
from paceline.cli.chat_session import ChatSession, SessionOptions, stats_line
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
from paceline.cli.interrupt import run
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
    engine_model,
    given_text,
    load,
    lora_adapters,
    reading_text,
    sampling_params,
    showing,
    stdin_text,
    takes_sampling,
    text_argument,
)
from paceline.errors import InvalidParams
from paceline.params import SamplingParams

_PROMPT = "> "
_GOES_ON = "... "

Message = Annotated[
    str | None,
    typer.Argument(
        metavar="MESSAGE",
        help="One message, whose reply is all; a text sent to stdin by a pipe follows it. Without both, a chat.",
        show_default=False,
    ),
]
System = Annotated[
    str | None, reading_text("--system", metavar="TEXT", help="What the model should be or know.", show_default=False)
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
        help='How much it thinks, for templates that know; "none".',
        show_default=False,
    ),
]
Plain = Annotated[bool, showing("--plain", help="Show text as it is, not as Markdown.")]
HideThinking = Annotated[bool, showing("--hide-thinking", help="Do not show what the model thinks.")]
Quiet = Annotated[bool, showing("--quiet", "-q", help="No progress bar, no greeting, no statistics.")]


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
    model's thinking is dimmed on a terminal, and left out elsewhere. The first message has the images and audio.
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
        is_plain=plain,
        shows_thinking=not hide_thinking,
        quiet=quiet,
        images=images,
    )
    _run(job)


def _only_message(given: str | None) -> str | None:
    """Return the only message of a run; None for a chat, which needs a terminal to read from."""
    return stdin_text() if given is None and not terminal.can_read_keys() else given


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
        readline.parse_and_bind("tab: complete")
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
    """Return a line; one that ends with a backslash goes on in the next. Raises `EOFError` at the end."""
    lines = [input(_PROMPT)]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input(_GOES_ON))
    return "\n".join(lines)


def _completer(commands: tuple[str, ...]) -> Any:
    """Return a function that completes names of commands, as readline calls it."""

    def complete(text: str, state: int) -> str | None:
        found = [name for name in commands if name.startswith("/" + text.removeprefix("/"))]
        return found[state] if state < len(found) else None

    return complete
