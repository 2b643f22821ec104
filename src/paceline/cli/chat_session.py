"""A chat in the terminal: turns, and the commands between them. Knows no keyboard: it is handed lines."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli import terminal
from paceline.cli.chat_view import ReplyView
from paceline.cli.image_options import read_audio, read_image
from paceline.cli.interrupt import StopSignal
from paceline.errors import PacelineError, Unsupported

if TYPE_CHECKING:
    from paceline.chat_client.chat_reply import ChatReply
    from paceline.chat_client.chat_streams import ChatStream
    from paceline.chat_client.conversations import Content, Conversation
    from paceline.llm import LLM
    from paceline.media import Attachment
    from paceline.params import SamplingParams
    from paceline.streaming import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """How a chat runs.

    params, turn: of every turn; turn has keywords of `LLM.chat`. make_view: of a view for one reply. run: does work that Ctrl-C
    stops.
    """

    params: SamplingParams
    turn: Mapping[str, Any]
    make_view: Callable[[], ReplyView]
    run: Callable[[Callable[[StopSignal], None]], None]


class ChatSession:
    """A conversation and the commands that change it."""

    def __init__(self, llm: LLM, options: SessionOptions, system: str | None = None) -> None:
        self._llm, self._options = llm, options
        self._talk = self._conversation(system)
        self._last: Usage | None = None
        self._num_turns = self._num_tokens = self._num_left_out = 0
        self._attached: list[tuple[Path, Attachment]] = []  # to the next message
        self._commands: dict[str, tuple[str, str, Callable[[str], None]]] = {
            "/system": ("TEXT", "set the system message, or show it; - for none", self._system),
            "/image": ("FILE", "show it an image with the next message; - for none", self._image),
            "/audio": ("FILE", "let it hear audio with the next message; - for none", self._audio),
            "/retry": ("", "take the last reply back and generate another", self._retry),
            "/clear": ("", "begin anew, with the same system message", self._clear),
            "/save": ("FILE", "write the conversation to a file, as JSON", self._save),
            "/load": ("FILE", "go on with a conversation from a file", self._load),
            "/stats": ("", "show counts and times of the last reply", self._stats),
            "/help": ("", "show this", self._help),
            "/exit": ("", "end (also Ctrl-D)", lambda _: None),
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
        if name in ("/exit", "/quit", "/bye"):
            return False
        try:
            if not text.startswith("/"):
                self._say_spaced(line)
            elif text.startswith("//"):
                self._say_spaced(text[1:])
            elif name in self._commands:
                self._commands[name][2](rest.strip())
            else:
                terminal.report(f"there is no command {name}; /help lists them, and // begins a message with one /")
        except (PacelineError, OSError) as error:
            terminal.report(str(error))
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
        self._options.run(lambda stop: self._show(self._talk.stream(content, **options), stop))

    def _say_spaced(self, text: str) -> None:
        """Say something, with a blank line behind the reply."""
        try:
            self.say(text)
        finally:
            terminal.write("\n")

    @property
    def last_usage(self) -> Usage | None:
        """Counts and times of the last reply."""
        return self._last

    def _show(self, stream: ChatStream, stop: StopSignal) -> None:
        view = self._options.make_view()
        with stream, stop.aborting(stream.cancel):
            try:
                for chunk in stream:
                    for delta in chunk.deltas:
                        if delta.reasoning_content:
                            view.thinking(delta.reasoning_content)
                        if delta.content:
                            view.content(delta.content)
            finally:
                view.finish()
            self._count(stream.collect())

    def _count(self, reply: ChatReply[Any]) -> None:
        self._last = reply.usage
        self._num_turns += 1
        self._num_tokens += reply.usage.completion_tokens
        most, left_out = self._llm.limits.max_positions, self._talk.num_left_out
        if reply.finish_reason == "length" and reply.usage.prompt_tokens + reply.usage.completion_tokens >= most:
            terminal.note(f"(cut off: the context of {most} tokens is full; /clear begins anew)")
        elif reply.finish_reason not in ("stop", "tool_calls", "cancelled"):
            terminal.note(f"({terminal.finish_words(reply.finish_reason)})")
        if left_out > self._num_left_out:
            counted = terminal.counted(left_out, "old message")
            terminal.note(f"({counted} left out: the context of {most} tokens is full; /clear begins anew)")
        self._num_left_out = left_out

    def _system(self, text: str) -> None:
        messages = self._talk.messages
        if not text:
            system = [str(one["content"]) for one in messages if one["role"] == "system"]
            terminal.note("\n".join(system) or "there is no system message; /system TEXT sets one")
            return
        others = [one for one in messages if one["role"] != "system"]
        self._talk = self._conversation(None if text == "-" else text, others)

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
            f"with the next message: {waiting}" if waiting else f"no {modality} waits; /{modality} FILE adds one"
        )

    def _attached_names(self) -> str:
        return ", ".join(f"{path} ({_size_of(one)})" for path, one in self._attached)

    def _clear(self, _: str) -> None:
        self._talk.clear()

    def _save(self, path: str) -> None:
        if not path:
            raise Unsupported("/save needs the name of a file")
        self._talk.save(path)
        terminal.note(f"saved {terminal.counted(len(self._talk.messages), 'message')} to {path}")

    def load(self, path: str | Path) -> None:
        """Go on with a conversation from a file. Raises `StateError` and `OSError`; nothing has changed then."""
        from paceline.chat_client.conversations import Conversation

        self._talk = Conversation.load(self._llm, path, params=self._options.params, **self._options.turn)

    def _conversation(self, system: str | None, messages: Sequence[Mapping[str, Any]] = ()) -> Conversation:
        from paceline.chat_client.conversations import Conversation

        options = self._options
        return Conversation(self._llm, system, messages=messages, params=options.params, **options.turn)

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
            terminal.note(f"  {f'{name} {argument}':<14}{text}")
        terminal.note("A line that ends with \\ goes on in the next one. Ctrl-C stops a reply.")


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
        f"first token after {terminal.duration(usage.ttft_s)}",
    ]
    return " | ".join(parts)


def _modality_of(attachment: Attachment) -> str:
    from paceline.media import Image

    return "image" if isinstance(attachment, Image) else "audio"


def _size_of(attachment: Attachment) -> str:
    from paceline.media import Image

    if isinstance(attachment, Image):
        return f"{attachment.width} x {attachment.height}"
    return f"{attachment.seconds:.1f} s"
