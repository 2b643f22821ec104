"""A chat in the terminal: turns, and the commands between them. Knows no keyboard: it is handed lines."""

from __future__ import annotations

import dataclasses
import functools
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import validation
from paceline.cli import terminal
from paceline.cli.chat_view import ReplyView
from paceline.cli.exit_codes import error_text
from paceline.cli.image_options import read_audio, read_image
from paceline.cli.interrupt import StopSignal
from paceline.cli.options import advising_flags, read_sampling
from paceline.errors import InvalidParams, PacelineError, Unsupported
from paceline.params import SamplingParams

if TYPE_CHECKING:
    from paceline.chat_client.chat_call import ChatReply
    from paceline.chat_client.chat_streams import ChatStream
    from paceline.chat_client.conversations import Content, Conversation
    from paceline.llm import LLM
    from paceline.media import Attachment
    from paceline.streaming import Usage

_NEARLY_FULL = 0.8  # share of the context
_POLL_S = 0.1
_MAX_SHOWN_CHARS = 400
QUOTES = '"""'  # around a message of several lines
_ALIASES = {"/?": "/help", "/bye": "/exit", "/quit": "/exit"}
_ALWAYS_SHOWN = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed")  # by /show


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """How a chat runs.

    Attributes:
        params: Sampling parameters of every turn.
        turn: Keywords of `LLM.chat` for every turn.
        make_view: Makes the view of a message.
        run: Does work that Ctrl-C stops.
        full_advice: The advice of a note that the context is full.
        tools: Functions that the model may call.
        allows: Asks whether a call may run, on the thread that reads the reply; None runs all calls.
    """

    params: SamplingParams
    turn: Mapping[str, Any]
    make_view: Callable[[], ReplyView]
    run: Callable[[Callable[[StopSignal], None]], None]
    full_advice: str
    tools: Sequence[Callable[..., Any]] = ()
    allows: Callable[[StopSignal], bool] | None = None


class ChatSession:
    """A conversation and the commands that change it."""

    def __init__(self, llm: LLM, options: SessionOptions, system: str | None = None) -> None:
        self._llm, self._options = llm, options
        self._params, self._turn = options.params, dict(options.turn)
        if options.tools:
            self._turn |= {"tools": [self._guarded(tool) for tool in options.tools], "run_tools": True}
        self._view: ReplyView | None = None  # of the message that is being shown
        self._stop = StopSignal()  # of the turn that runs
        self._talk = self._conversation(system)
        self._last: Usage | None = None
        self._num_turns = self._num_tokens = self._num_left_out = 0
        self._attached: list[tuple[Path, Attachment]] = []  # to the next message
        self._commands: dict[str, tuple[str, str, Callable[[str], None]]] = {
            "/system": ("TEXT", "set the system message, or show it; - for none", self._system),
            "/set": (
                "NAME VALUE",
                "set a sampling parameter; - for its value at the start",
                self._set,
            ),
            "/show": ("", "show the model, the system message and parameters", self._show_settings),
            "/image": ("FILE", "attach an image to the next message; - for none", self._image),
            "/audio": ("FILE", "attach audio to the next message; - for none", self._audio),
            "/retry": ("", "take the last reply back and generate another", self._retry),
            "/undo": ("", "take the last message and its reply back", self._undo),
            "/clear": ("", "forget all but the system message, which frees the context", self._clear),
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
        """Do what a line says; return whether the chat goes on. Errors are reported, and change nothing."""
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
        """Say something, with what is attached, and show the reply.

        Raises what generating raises, `KeyboardInterrupt` after Ctrl-C. What is attached stays so until a turn has it.
        """
        if not self._attached:
            self._say(text)
            return
        num_turns = self._num_turns
        try:
            self._say([*(one for _, one in self._attached), {"type": "text", "text": text}])
        finally:
            if self._num_turns > num_turns:
                self._attached = []

    def attach(self, path: Path, attachment: Attachment) -> None:
        """Send the image or audio of a file with the next message. Raises `Unsupported` where the model takes none."""
        modality = _modality_of(attachment)
        if modality not in self._llm.model.modalities:
            kind = "images" if modality == "image" else modality
            raise Unsupported(
                f"{path}: this model takes no {kind}: it has no projector for them; start with --mmproj FILE"
            )
        self._attached.append((path, attachment))

    def _say(self, content: Content, **options: Any) -> None:
        with advising_flags(self._llm.limits):
            self._options.run(lambda stop: self._show(self._talk.stream(content, **options), stop))

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

    def _shown(self) -> ReplyView:
        """Return the view of the message that is being shown."""
        if self._view is None:
            self._view = self._options.make_view()
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
            if self._options.allows is not None and not self._options.allows(self._stop):
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
            terminal.note(f"({', '.join(effects)}: the context of {most} tokens is full; {self._options.full_advice})")
        self._num_left_out = left_out

    def _system(self, text: str) -> None:
        messages = self._talk.messages
        if not text:
            system = [str(one["content"]) for one in messages if one["role"] == "system"]
            terminal.note("\n".join(system) or "there is no system message; /system TEXT sets one")
            return
        others = [one for one in messages if one["role"] != "system"]
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
        field, changed = read_sampling(name, value, self._options.params)
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
            if field.name in _ALWAYS_SHOWN or value != getattr(usual, field.name):
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

    def _image(self, path: str) -> None:
        self._change_attached("image", path, read_image)

    def _audio(self, path: str) -> None:
        self._change_attached("audio", path, read_audio)

    def _change_attached(self, modality: str, path: str, read: Callable[[Path, str], Attachment]) -> None:
        """Add a file, drop all of this modality ("-"), or only show what waits."""
        if path == "-":
            self._attached = [one for one in self._attached if _modality_of(one[1]) != modality]
        elif path:
            self.attach(Path(path).expanduser(), read(Path(path).expanduser(), f"/{modality}"))
        waiting = self._attached_names()
        terminal.note(
            f"with the next message: {waiting}"
            if waiting
            else f"no {modality} is attached; /{modality} FILE attaches a file"
        )

    def _attached_names(self) -> str:
        return ", ".join(f"{path} ({_size_of(one)})" for path, one in self._attached)

    def _clear(self, _: str) -> None:
        self._talk.clear()

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
    count, decode_s = usage.completion_tokens, usage.decode_s
    speed = (
        f", {(count - 1) / decode_s:.{0 if (count - 1) / decode_s >= 100 else 1}f} tok/s"
        if count > 1 and decode_s
        else ""
    )
    parts = [
        terminal.counted(count, "token") + speed,
        f"prompt {terminal.counted(usage.prompt_tokens, 'token')}, {usage.cached_tokens} cached",
    ]
    if usage.ttft_s is not None:
        parts.append(f"first token after {terminal.duration(usage.ttft_s)}")
    return " | ".join(parts)


def _run_unless_stopped(work: Callable[[], Any], name: str, stop: StopSignal) -> Any:
    """Return the result of a function that runs on a thread of its own, which Ctrl-C leaves behind. Raises its error."""
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


def _shortened(text: str) -> str:
    """Return a text on one line, cut to what a person reads."""
    line = " ".join(text.split())
    return line if len(line) <= _MAX_SHOWN_CHARS else f"{line[: _MAX_SHOWN_CHARS - 3]}..."


def _modality_of(attachment: Attachment) -> str:
    from paceline.media import Image

    return "image" if isinstance(attachment, Image) else "audio"


def _size_of(attachment: Attachment) -> str:
    from paceline.media import Image

    if isinstance(attachment, Image):
        return f"{attachment.width} x {attachment.height}"
    return f"{attachment.seconds:.1f} s"
