"""`paceline chat`: a conversation in the terminal: the view of a reply, the commands between turns, and the command itself."""

from __future__ import annotations

import dataclasses
import functools
import importlib.machinery
import importlib.util
import inspect
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline import validation
from paceline.cli import options as option
from paceline.cli import terminal
from paceline.cli.endings import StopSignal, error_text, run
from paceline.cli.inputs import given_text, missing, read_sampling, sampling_params, text_argument
from paceline.errors import InvalidParams, PacelineError, Unsupported
from paceline.params import SamplingParams
from paceline.sampling_table import BY_NAME

if TYPE_CHECKING:
    from paceline.chat_client.chat_call import ChatReply
    from paceline.chat_client.chat_streams import ChatStream
    from paceline.chat_client.conversations import Content, Conversation
    from paceline.llm import LLM
    from paceline.media import Attachment
    from paceline.streaming import Usage


_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_REDRAW_S = 0.06
_FENCE = re.compile(r"`{3,}|~{3,}")


def make_view(*, is_plain: bool, shows_thinking: bool) -> PlainView:
    """Return the view that suits stdout."""
    can_set = terminal.can_draw(sys.stdout) and (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    return MarkdownView(shows_thinking) if can_set and not is_plain else PlainView(shows_thinking)


class PlainView:
    """A reply as plain text. Its thinking is shown on a terminal alone: a program that reads the output wants the content."""

    def __init__(self, shows_thinking: bool = True) -> None:
        self._shows_thinking = shows_thinking and terminal.is_terminal(sys.stdout)
        self._last, self._is_thinking = "", False
        self._wrap = terminal.WordWrap(sys.stdout)

    def thinking(self, text: str) -> None:
        """Show a piece of thinking."""
        if self._shows_thinking:
            self._is_thinking, self._last = True, text
            self._wrap.write(text, style="dim")

    def content(self, text: str) -> None:
        """Show a piece of content."""
        self._end_thinking()
        self._last = text
        self._wrap.write(text)

    def finish(self) -> None:
        """Show the rest. The cursor is at the beginning of a line afterwards."""
        if self._last and not self._last.endswith("\n"):
            self._wrap.write("\n")
        self._wrap.finish()

    def _end_thinking(self) -> None:
        if self._is_thinking:
            self._wrap.write("\n" if self._last.endswith("\n") else "\n\n")
            self._is_thinking = False


class MarkdownView(PlainView):
    """A reply as Markdown, on a terminal that can move its cursor."""

    def __init__(self, shows_thinking: bool = True) -> None:
        from rich.console import Console

        super().__init__(shows_thinking)
        self._console = Console(
            file=sys.stdout, force_terminal=True, highlight=False, emoji=False, markup=False, legacy_windows=False
        )
        self._rest = ""
        self._has_printed = False
        self._num_drawn = 0  # lines of the last block that are on the screen
        self._drawn_s = 0.0

    def thinking(self, text: str) -> None:
        """Show a piece of thinking, without the blanks before the first piece."""
        text = text if self._is_thinking else text.lstrip()
        if self._shows_thinking and text:
            self._is_thinking, self._last = True, text
            self._wrap.write(text, style="dim italic")

    def content(self, text: str) -> None:
        """Show a piece of content, and draw its last block if the earlier picture is old enough."""
        self._end_thinking()
        self._rest += terminal.printable(text)
        done, self._rest = split_blocks(self._rest)
        for block in done:
            self._print(block)
        now = time.monotonic()
        if self._rest.strip() and (done or now - self._drawn_s >= _REDRAW_S):
            shown = self._lines(self._rest)[-max(1, self._console.height - 1) :]  # as much as the screen has room for
            self._put("\n".join(shown), len(shown))
            self._drawn_s = now

    def finish(self) -> None:
        """Print the last block."""
        self._end_thinking()
        if self._rest.strip():
            self._print(self._rest)
        self._rest = ""

    def _print(self, block: str) -> None:
        """Print a complete block, with a blank line before it unless it is the first."""
        self._put("".join(f"{line}\n" for line in self._lines(block)), 0)
        self._has_printed = True

    def _put(self, text: str, num_drawn: int) -> None:
        above = f"\x1b[{self._num_drawn - 1}A" if self._num_drawn > 1 else ""
        erased = f"\r{above}\x1b[J" if self._num_drawn else ""
        sys.stdout.write(erased + text)
        sys.stdout.flush()
        self._num_drawn = num_drawn

    def _lines(self, block: str) -> list[str]:
        """Return the lines of a block with their escapes, with one blank line before them unless the block is the first."""
        from rich.markdown import Markdown

        width = max(20, self._console.width - 1)  # a full line would move some cursors to the next
        with self._console.capture() as captured:
            self._console.print(Markdown(block, code_theme="ansi_dark", hyperlinks=False), width=width)
        lines = [line.rstrip(" ") for line in captured.get().split("\n")]
        while lines and not _ESCAPE.sub("", lines[-1]).strip():
            lines.pop()
        while lines and not _ESCAPE.sub("", lines[0]).strip():
            lines.pop(0)
        return ["", *lines] if self._has_printed else lines


def split_blocks(text: str) -> tuple[list[str], str]:
    """Split Markdown into the blocks that are complete, and the rest: at blank lines outside of fenced code."""
    blocks, begin, position, fence = [], 0, 0, ""
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            continue
        stripped = line.strip()
        position += len(line)
        found = _FENCE.match(stripped)
        if fence:
            fence = "" if stripped.startswith(fence) and not stripped.strip(fence[0]) else fence
        elif found:
            fence = found.group()
        elif not stripped:
            if text[begin:position].strip():
                blocks.append(text[begin:position])
            begin = position
    return blocks, text[begin:]


_NEARLY_FULL = 0.8  # share of the context
_POLL_S = 0.1
_shortened = partial(terminal.shortened, most=400)
QUOTES = '"""'  # around a message of several lines
_ALIASES = {"/?": "/help", "/bye": "/exit", "/quit": "/exit"}


class ChatSession:
    """A conversation and the commands that change it.

    Args:
        llm: The engine.
        system: The system message; None for none.
        params: Sampling parameters of every turn.
        turn: Keywords of `LLM.chat` for every turn.
        make_view: Makes the view of a message.
        full_advice: The advice of a note that the context is full.
        tools: Functions that the model may call.
        allows: Asks whether a call may run, on the thread that reads the reply; None runs all calls.
    """

    def __init__(
        self,
        llm: LLM,
        system: str | None,
        *,
        params: SamplingParams,
        turn: Mapping[str, Any],
        make_view: Callable[[], PlainView],
        full_advice: str,
        tools: Sequence[Callable[..., Any]],
        allows: Callable[[StopSignal], bool] | None,
    ) -> None:
        self._llm, self._make_view, self._full_advice, self._allows = llm, make_view, full_advice, allows
        self._first_params = self._params = params
        self._turn = dict(turn)
        if tools:
            self._turn |= {"tools": [self._guarded(tool) for tool in tools], "run_tools": True}
        self._view: PlainView | None = None  # of the message that is being shown
        self._stop = StopSignal()  # of the turn that runs
        self._talk = self._conversation(system)
        self._last: Usage | None = None
        self._num_turns = self._num_tokens = self._num_left_out = 0
        self._attached: list[tuple[Path, Attachment]] = []  # to the next message
        self._commands: dict[str, tuple[str, str, Callable[[str], None]]] = {
            "/system": ("TEXT", "set the system message, or show it; - for none", self._system),
            "/set": ("NAME VALUE", "set a sampling parameter; - for its value at the start", self._set),
            "/show": ("", "show the model, the system message and parameters", self._show_settings),
            "/image": ("FILE", "attach an image to the next message; - for none", partial(self._attach_file, "image")),
            "/audio": ("FILE", "attach audio to the next message; - for none", partial(self._attach_file, "audio")),
            "/retry": ("", "take the last reply back and generate another", self._retry),
            "/undo": ("", "take the last message and its reply back", self._undo),
            "/clear": ("", "forget all but the system message, which frees the context", lambda _: self._talk.clear()),
            "/save": ("FILE", "write the conversation to a file, as JSON", self._save),
            "/load": ("FILE", "go on with a conversation from a file", self._load),
            "/stats": ("", "show counts and times of the last reply", self._stats),
            "/help": ("", "show this (also /?)", self._help),
            "/exit": ("", "end the chat (also /bye, /quit and Ctrl-D)", lambda _: None),
        }

    @property
    def commands(self) -> tuple[str, ...]:
        """The names of all commands."""
        return tuple(self._commands)

    def handle(self, line: str) -> bool:
        """Run a command or send a message; return whether the chat goes on. Errors are reported, and change nothing."""
        text = line.strip()
        if not text:
            return True
        name, _, rest = text.partition(" ")
        name = _ALIASES.get(name, name)
        if name == "/exit":
            return False
        try:
            if text.startswith(QUOTES):
                self._say_spaced(text.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n"))
            elif text.startswith("//"):
                self._say_spaced(text[1:])
            elif not text.startswith("/") or "/" in name[1:]:  # a path is no command
                self._say_spaced(line)
            elif name in self._commands:
                self._commands[name][2](rest.strip())
            else:
                nearest = validation.nearest_names(name, self._commands)
                hint = f"did you mean {nearest[0]}? " if nearest else ""
                terminal.report(
                    f"there is no command {name}; {hint}/help lists all, and // begins a message with one /"
                )
        except (PacelineError, OSError) as error:
            terminal.report(error_text(error))
            if self._attached and not text.startswith("/"):
                terminal.note(f"still to be sent: {self._attached_names()}; /image - and /audio - leave them out")
        except KeyboardInterrupt:
            terminal.note("interrupted")
        return True

    def say(self, text: str) -> None:
        """Send a message with the attached files, and show the reply.

        Raises as `Conversation.stream`, and `KeyboardInterrupt` after Ctrl-C. Files stay attached until a turn has them.
        """
        if not self._attached:
            self._say(text)
            return
        num_turns = self._num_turns
        try:
            self._say([*(attachment for _, attachment in self._attached), {"type": "text", "text": text}])
        finally:
            if self._num_turns > num_turns:
                self._attached = []

    def attach(self, path: Path, attachment: Attachment) -> None:
        """Send the image or audio of a file with the next message. Raises `Unsupported` if the model takes none."""
        modality = _modality_of(attachment)
        if modality not in self._llm.model.modalities:
            kind = "images" if modality == "image" else modality
            raise Unsupported(
                f"{path}: this model takes no {kind}: it has no projector for them; start with --mmproj FILE"
            )
        self._attached.append((path, attachment))

    def _say(self, content: Content, **options: Any) -> None:
        with option.advising_flags(self._llm.limits):
            run(lambda stop: self._show(self._talk.stream(content, **options), stop))

    def _say_spaced(self, text: str) -> None:
        """Say something, with a blank line after the reply."""
        try:
            self.say(text)
            if self._last is not None:
                used = (self._last.prompt_tokens + self._last.completion_tokens) / self._llm.limits.max_positions
                if _NEARLY_FULL <= used < 1 and not self._num_left_out:
                    terminal.note(
                        f"(the context is {used:.0%} full; once it is full, the oldest messages are left out. "
                        "/clear begins anew)"
                    )
        finally:
            terminal.write("\n")

    @property
    def last_usage(self) -> Usage | None:
        """Counts and times of the last reply."""
        return self._last

    def _show(self, stream: ChatStream, stop: StopSignal) -> None:
        self._stop = stop
        with stream, stop.aborting(stream.cancel):
            try:
                for chunk in stream:
                    for delta in chunk.deltas:
                        if delta.reasoning_content:
                            self._shown().thinking(delta.reasoning_content)
                        if delta.content:
                            self._shown().content(delta.content)
                    if chunk.tool_result is not None:
                        self._end_view()
                        terminal.note(f"{chunk.tool_result.call.name}: {_shortened(chunk.tool_result.content)}")
            finally:
                self._end_view()
            self._count(stream.collect())

    def _shown(self) -> PlainView:
        """Return the view of the message that is being shown."""
        if self._view is None:
            self._view = self._make_view()
        return self._view

    def _end_view(self) -> None:
        if self._view is not None:
            self._view.finish()
            self._view = None

    def _guarded(self, tool: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function with the signature of a tool that shows the call, asks whether it may run, and runs it."""

        @functools.wraps(tool)
        def call(*args: Any, **named: Any) -> Any:
            self._end_view()
            given = [*map(repr, args), *(f"{name}={value!r}" for name, value in named.items())]
            terminal.note(f"calls {tool.__name__}({_shortened(', '.join(given))})")
            if self._allows is not None and not self._allows(self._stop):
                return "Error: the user did not allow this call"
            return _run_unless_stopped(lambda: tool(*args, **named), tool.__name__, self._stop)

        return call

    def _count(self, reply: ChatReply[Any]) -> None:
        self._last = reply.usage
        self._num_turns += 1
        self._num_tokens += reply.usage.completion_tokens
        most, left_out = self._llm.limits.max_positions, self._talk.num_left_out
        num_used = reply.usage.prompt_tokens + reply.usage.completion_tokens
        is_cut_off = reply.finish_reason == "length" and num_used >= most
        if not is_cut_off and reply.finish_reason not in ("stop", "tool_calls", "cancelled"):
            terminal.note(f"({terminal.finish_words(reply.finish_reason)})")
        effects = [f"{terminal.counted(left_out, 'old message')} left out"] if left_out > self._num_left_out else []
        effects += ["reply cut off"] if is_cut_off else []
        if effects:
            terminal.note(f"({', '.join(effects)}: the context of {most} tokens is full; {self._full_advice})")
        self._num_left_out = left_out

    def _system(self, text: str) -> None:
        messages = self._talk.messages
        if not text:
            system = [str(message["content"]) for message in messages if message["role"] == "system"]
            terminal.note("\n".join(system) or "there is no system message; /system TEXT sets one")
            return
        others = [message for message in messages if message["role"] != "system"]
        self._talk = self._conversation(None if text == "-" else text, others)

    def _set(self, text: str) -> None:
        """Set a parameter for the turns to come. "/set parameter" and "/set system" are Ollama's."""
        name, _, value = text.removeprefix("parameter ").lstrip().partition(" ")
        value = value.strip()
        if name == "system":
            self._system(value)
            return
        if not name or not value:
            raise InvalidParams("/set needs a name and a value, as /set temperature 0; /show shows the parameters")
        field, changed = read_sampling(name, value, self._first_params)
        self._params = self._params.replace(**{field: changed})
        self._talk = self._conversation(None, self._talk.messages)
        terminal.note(f"{field} is {_shown_value(changed)}")

    def _show_settings(self, _: str) -> None:
        model = self._llm.model
        system = [str(message["content"]) for message in self._talk.messages if message["role"] == "system"]
        usual = SamplingParams()
        rows = [
            ("model", model.metadata.get("general.name", model.paths[0].name)),
            ("file", str(model.paths[0])),
            ("context", terminal.counted(self._llm.limits.max_positions, "token")),
            ("system", _shortened("\n".join(system)) or "none"),
        ]
        for field in dataclasses.fields(usual):
            value = getattr(self._params, field.name)
            if BY_NAME[field.name].is_shown or value != getattr(usual, field.name):
                rows.append((field.name, _shown_value(value)))
        width = max(len(name) for name, _ in rows)
        for name, shown in rows:
            terminal.note(f"  {name:<{width}}  {shown}")

    def _retry(self, _: str) -> None:
        before = self._talk.fork()
        said = self._talk.undo()
        if said is None:
            terminal.report("there is nothing to retry yet")
            return
        num_turns = self._num_turns
        try:
            self._say(said, seed=secrets.randbits(32))
        finally:
            terminal.write("\n")
            if self._num_turns == num_turns:  # it failed
                self._talk = before

    def _undo(self, _: str) -> None:
        said = self._talk.undo()
        if said is None:
            terminal.report("there is nothing to take back")
            return
        parts = [{"text": said}] if isinstance(said, str) else said
        texts = [str(part["text"]) for part in parts if isinstance(part, Mapping) and "text" in part]
        terminal.note(f"taken back: {_shortened(' '.join(texts))}")

    def _attach_file(self, modality: str, path: str) -> None:
        """Attach a file, drop all files of this modality ("-"), or only list the attached files."""
        if path == "-":
            self._attached = [entry for entry in self._attached if _modality_of(entry[1]) != modality]
        elif path:
            file = Path(path).expanduser()
            self.attach(file, (option.read_image if modality == "image" else option.read_audio)(file, f"/{modality}"))
        waiting = self._attached_names()
        terminal.note(
            f"with the next message: {waiting}"
            if waiting
            else f"no {modality} is attached; /{modality} FILE attaches a file"
        )

    def _attached_names(self) -> str:
        return ", ".join(f"{path} ({_size_of(attachment)})" for path, attachment in self._attached)

    def _save(self, path: str) -> None:
        if not path:
            raise Unsupported("/save needs the name of a file")
        if not self._talk.messages:
            raise Unsupported("there are no messages to save")
        self._talk.save(path)
        terminal.note(f"saved {terminal.counted(len(self._talk.messages), 'message')} to {path}")

    def load(self, path: str | Path) -> None:
        """Go on with a conversation from a file. Raises `StateError` and `OSError`; nothing has changed then."""
        from paceline.chat_client.conversations import Conversation

        self._talk = Conversation.load(self._llm, path, params=self._params, **self._turn)

    def _conversation(self, system: str | None, messages: Sequence[Mapping[str, Any]] = ()) -> Conversation:
        from paceline.chat_client.conversations import Conversation

        return Conversation(self._llm, system, messages=messages, params=self._params, **self._turn)

    def _load(self, path: str) -> None:
        if not path:
            raise Unsupported("/load needs the name of a file")
        self.load(path)
        terminal.note(f"loaded {terminal.counted(len(self._talk.messages), 'message')} from {path}")

    def _stats(self, _: str) -> None:
        if self._last is None:
            terminal.note("there is no reply yet")
            return
        terminal.note(stats_line(self._last))
        replies = "1 reply" if self._num_turns == 1 else f"{self._num_turns} replies"
        terminal.note(f"{replies} with {terminal.counted(self._num_tokens, 'token')} in all")

    def _help(self, _: str) -> None:
        for name, (argument, text, _command) in self._commands.items():
            terminal.note(f"  {f'{name} {argument}':<17}{text}")
        terminal.note(
            'Lines between """ and """ are one message, and so are pasted lines and lines that end with \\. '
            "// begins a message with one /. Ctrl-C stops a reply."
        )


def stats_line(usage: Usage) -> str:
    """Return counts and times of a reply in one line."""
    parts = [
        terminal.counted(usage.completion_tokens, "token") + option.shown_speed(option.decode_speed(usage)),
        f"prompt {terminal.counted(usage.prompt_tokens, 'token')}, {usage.cached_tokens} cached",
    ]
    if usage.ttft_s is not None:
        parts.append(f"first token after {terminal.duration(usage.ttft_s)}")
    return " | ".join(parts)


def _run_unless_stopped(work: Callable[[], Any], name: str, stop: StopSignal) -> Any:
    """Return the result of a function that runs on a thread of its own, or raise its error. Ctrl-C ends only the wait."""
    outcome: Future[Any] = Future()

    def fulfil() -> None:
        try:
            outcome.set_result(work())
        except Exception as error:  # noqa: BLE001 - raised again by the thread that waits
            outcome.set_exception(error)
        except BaseException as error:  # noqa: BLE001 - such as SystemExit, which would end the chat
            outcome.set_exception(RuntimeError(f"the tool ended with {error!r}"))

    threading.Thread(target=fulfil, name="paceline-tool", daemon=True).start()
    while not wait_for([outcome], _POLL_S).done:
        if stop.requested:
            terminal.note(f"{name} is not waited for any more, and may still run")
            raise InterruptedError("interrupted by the user")
    return outcome.result()


def _shown_value(value: object) -> str:
    """Return a value of a sampling parameter for people."""
    if isinstance(value, tuple):
        return ", ".join(map(repr, value)) or "none"
    return "none" if value is None else str(value)


def _modality_of(attachment: Attachment) -> str:
    from paceline.media import Image

    return "image" if isinstance(attachment, Image) else "audio"


def _size_of(attachment: Attachment) -> str:
    from paceline.media import Image

    if isinstance(attachment, Image):
        return f"{attachment.width} x {attachment.height}"
    return f"{attachment.seconds:.1f} s"


_PROMPT = "> "
_GOES_ON = "... "

# Options are laid out by hand, a few lines each.
# fmt: off
Message = Annotated[list[str] | None, typer.Argument(
    metavar="MESSAGE",
    help="One message, whose reply ends the command. A text sent to stdin by a pipe follows it. Without both, a chat.",
    show_default=False,
)]
System = Annotated[str | None, option.reading_text(
    "--system", metavar="TEXT", help="Instructions for the model: the system message.", show_default=False,
)]
ChatFile = Annotated[Path | None, option.reading_text(
    "--load", metavar="FILE", help="Go on with a saved conversation.", show_default=False,
)]
ChatTemplate = Annotated[str | None, option.reading_text(
    "--chat-template", metavar="TEMPLATE", help="Name of another template of the model, or Jinja source.",
    show_default="the model's",
)]
Effort = Annotated[str | None, option.reading_text(
    "--reasoning-effort", metavar="WORD",
    help="How much the model thinks, such as low or high; none for no thinking. Some templates have no effort.",
    show_default=False,
)]
ToolFile = Annotated[Path | None, option.calling_tools(
    "--tools", metavar="FILE", help="Python file whose public functions with docstrings the model may call.",
    show_default=False,
)]
Yes = Annotated[bool, option.calling_tools("--yes", "-y", help="Run each call without asking first.")]
Plain = Annotated[bool, option.showing("--plain", help="Show the text without setting its Markdown.")]
HideThinking = Annotated[bool, option.showing("--hide-thinking", help="Do not show the model's thinking.")]
Quiet = Annotated[bool, option.showing("--quiet", "-q", help="Show no progress bar, no greeting and no statistics.")]
# fmt: on


@option.takes_options(max_tokens=-1)
def chat(
    message: Message = None,
    *,
    prompt_text: option.PromptOption = None,
    file: option.FileOption = None,
    model: option.ModelChoice,
    system: System = None,
    load_file: ChatFile = None,
    chat_template: ChatTemplate = None,
    tools: ToolFile = None,
    yes: Yes = False,
    reasoning_effort: Effort = None,
    images: option.ImageOptions,
    ctx_size: option.ContextSize = None,
    threads: option.ThreadsOption = None,
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
    turn: dict[str, Any] = {"lora": model.lora_scales, "context_overflow": "drop_oldest"}
    if reasoning_effort is not None:
        turn["reasoning_effort"] = text_argument("--reasoning-effort", reasoning_effort)
    only_message = given_text("MESSAGE", message, prompt_text, file)
    if only_message is None and not terminal.can_read_keys():
        raise missing("MESSAGE")
    choice = dataclasses.replace(model, model=images.model_path(model.model), show_progress=not quiet)
    system = None if system is None else text_argument("--system", system)
    functions = [] if tools is None else load_tools(tools)
    allows = None if tools is None or yes else _asking()

    from paceline.llm import LLM

    attachments = images.attachments()
    loaded = run(lambda stop: option.load(choice, stop))
    source, options = option.engine_model(choice, loaded.model)
    options |= images.engine_options(takes_images_later=True)
    options |= {"n_ctx": ctx_size, "n_threads": threads, "chat_template": chat_template}
    with LLM(source, num_slots=1, **options) as llm:
        session = ChatSession(
            llm,
            system,
            params=params,
            turn=turn,
            make_view=lambda: make_view(is_plain=plain, shows_thinking=not hide_thinking),
            full_advice="/clear begins anew" if only_message is None else option.way_to_longer_texts(llm.limits),
            tools=functions,
            allows=allows,
        )
        if load_file is not None:
            session.load(load_file)
        for path, attachment in attachments:
            session.attach(path, attachment)
        if only_message is not None:
            session.say(only_message)
            if not quiet and session.last_usage is not None:
                terminal.note(stats_line(session.last_usage))
            return
        if not quiet:
            name = loaded.model.metadata.get("general.name", "") or "the model"
            terminal.note(f"Chatting with {name}. /help lists commands, Ctrl-C stops a reply, Ctrl-D ends.")
        _converse(session)


def load_tools(path: Path) -> list[Callable[..., Any]]:
    """Return the public functions with a docstring that a Python file defines.

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


def _converse(session: ChatSession) -> None:
    """Read lines until one ends the chat."""

    def complete(text: str, state: int) -> str | None:
        """Return the completion of a command's name, as readline asks for it."""
        found = [name for name in session.commands if text.startswith("/") and name.startswith(text)]
        return found[state] if state < len(found) else None

    with suppress(ImportError):
        import readline  # which gives `input` a history and editing

        readline.set_completer(complete)
        readline.set_completer_delims(" \t\n")  # a command's slash is part of its name
        readline.parse_and_bind("tab: complete")
        readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines are one message
    while True:
        try:
            line = _read()
        except (EOFError, KeyboardInterrupt) as end:
            terminal.write("\n")
            if isinstance(end, EOFError):
                return
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
