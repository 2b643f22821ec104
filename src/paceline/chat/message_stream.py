"""Reads a message while it is generated: what is new of its content, its thinking and its tool calls.

llama.cpp's parser reads the whole text each time, so it is called where the format may change: at the beginning, where a text
that ends content or thinking has come, and within tool calls as often as the work stays in proportion to the text. Between,
content and thinking go through as they come, without any part of a text that may end them. Content that may be the JSON of
untagged calls is held back until it cannot be, or until the end.

Pure but for the parser; one thread at a time, not the event loop's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from paceline import validation
from paceline.chat.chat_format import RenderedPrompt
from paceline.chat.message_parser import MAX_KEPT_CHARS, MessageParser, ParsedMessage, ToolCall, UntaggedCalls
from paceline.errors import ChatParseError, Closed
from paceline.request import cached_in_scope

_FREE_CHARS = 1 << 18  # that may be parsed in all, beside ...
_CHARS_PER_CHAR = 64  # ... so many for each that was generated
_PROBE = "x"
_MAX_LOOKS_BACK = 4  # for a call that the whole text has lost
_MAX_HELD_BLANKS = 256  # that are looked through with every piece


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """What is new of a tool call.

    Attributes:
        index: Which of the message's calls.
        name: The whole name, in the first delta of the call; otherwise empty.
        arguments: The next piece of the arguments' JSON.
        id: As the model wrote it, in the first delta, or in the last one where the format has it behind the arguments.
    """

    index: int
    name: str = ""
    arguments: str = ""
    id: str = ""


@dataclass(frozen=True, slots=True)
class MessageDelta:
    """What is new of a message: one of content, reasoning_content and tool_call."""

    content: str = ""
    reasoning_content: str = ""
    tool_call: ToolCallDelta | None = None


class MessageStream:
    """One message that is being generated after a rendered prompt."""

    def __init__(self, prompt: RenderedPrompt, *, is_whole: bool = False) -> None:
        """Begin a message.

        Args:
            prompt: What it follows.
            is_whole: Whether only the end is of interest, where the message was generated before: `feed` returns nothing.
        """
        self._is_whole = is_whole
        self._is_one_call = prompt.is_one_call
        self._parser = MessageParser(prompt)
        self._ends, self._beginnings, self._first_characters = _ends_of_text(prompt.parser)
        self._longest_end = max(map(len, self._ends), default=0)
        self._text = ""
        self._prefill = _message_so_far(self._parser) if prompt.is_continued else ParsedMessage()
        self._sent = self._prefill
        self._passing: Literal["content", "reasoning_content"] | None = None
        self._blanks: list[str] = []  # what has not been passed on: blanks, and ...
        self._held = ""  # ... the end of the text behind them
        self._num_passed = 0  # characters of the text up to there
        self._num_read = 0  # characters of the text that the parser had read when something was sent last
        self._num_parsed = 0
        self._untagged = UntaggedCalls(prompt.untagged_tools) if prompt.untagged_tools else None
        self._is_holding = self._untagged is not None and not self._prefill.content.strip()
        self._held_content: list[str] = []  # which may be untagged calls
        self._has_ended = False
        self.warning: ChatParseError | None = None

    @property
    def text(self) -> str:
        """The text so far, as the model generated it."""
        return self._text

    @property
    def is_holding_content(self) -> bool:
        """Whether the end decides if the content is untagged calls, which takes time."""
        return self._is_holding

    def needs_parser(self, text: str) -> bool:
        """Return whether feeding this text would call the parser, which takes time, instead of passing the text on."""
        if self._passing is None:
            return bool(text) and not self._is_whole
        recent = self._held[-self._longest_end :] + text if self._longest_end else text
        return any(end in recent for end in self._ends)

    def feed(self, text: str) -> list[MessageDelta]:
        """Take the next piece of generated text and return what is new of the message.

        Raises:
            InvalidParams: The piece is no text, or has a lone surrogate; the message goes on without it.
            Closed: The message has ended.
        """
        if self._has_ended:
            raise Closed("the message has ended; make a new MessageStream")
        if not validation.text("text", text):
            return []
        self._text += text
        if self._is_whole:
            return []
        return self._with_content_held(self._parse_some() if self._passing is None else self._pass_on(text))

    def finish(self, *, is_cut: bool = False) -> tuple[list[MessageDelta], ParsedMessage]:
        """End the message and return what was still missing, and the whole message.

        Where the text is not of the format, `warning` is the error that says so, and what was not passed on before is content,
        as it was generated: nothing is lost.

        Args:
            is_cut: Whether the message was cut off, by a limit on its length for example. What its end leaves open, such as a
                tool call's arguments, is then the beginning of what it would have been.

        Raises:
            Closed: The message has ended before.
        """
        if self._has_ended:
            raise Closed("the message has ended; make a new MessageStream")
        self._has_ended = True
        deltas, whole = self._finished(is_cut=is_cut)
        deltas = self._with_content_held(deltas)
        if self._untagged is not None and not whole.tool_calls:
            calls, reason = self._untagged.read(whole.content, is_cut=is_cut)
            if calls and self._is_holding:
                self.warning = None
                whole = self._limited(replace(whole, content="", tool_calls=calls))
                return [*deltas, *_call_deltas(whole.tool_calls)], whole
            if reason and self.warning is None:
                self.warning = ChatParseError(reason)
        return [*deltas, *self._released()], whole

    def _with_content_held(self, deltas: list[MessageDelta]) -> list[MessageDelta]:
        """Return the deltas without content that may be untagged calls. Content held before comes first once it is none."""
        found: list[MessageDelta] = []
        for delta in deltas:
            if self._untagged is None or not self._is_holding:
                found.append(delta)
            elif delta.content:
                self._held_content.append(delta.content)
                found += [] if self._untagged.feed(delta.content) else self._released()
            else:
                found += [*(self._released() if self._held_content or delta.tool_call else ()), delta]
        return found

    def _released(self) -> list[MessageDelta]:
        """Return the content that was held, and hold no more."""
        held, self._held_content, self._is_holding = "".join(self._held_content), [], False
        return [MessageDelta(content=held)] if held else []

    def _finished(self, *, is_cut: bool) -> tuple[list[MessageDelta], ParsedMessage]:
        try:
            # Not as a part: the parser would leave out what is not of the format. It reads what is cut all the same.
            whole = self._limited(self._parser.parse(self._text))
        except ChatParseError as error:
            return self._with_the_rest(error)
        reason = self._reason_against(whole, is_cut=is_cut)
        if reason:
            return self._with_the_rest(ChatParseError(reason))
        return list(self._deltas(whole, is_final=True)), self._without_prefill(whole)

    def _reason_against(self, whole: ParsedMessage, *, is_cut: bool) -> str:
        """Return why the message that the parser found is not what was generated; empty if it is."""
        if not _continues(self._sent, whole) or self._has_lost_calls(whole):
            return "a part of the text that began as one of the chat format did not go on as one"
        if is_cut:
            return ""
        if whole == ParsedMessage() and self._text.strip():
            return "the parser of the chat format found no message in the text"
        if whole.tool_calls and not whole.has_whole_calls:
            return "the text ends within the arguments of a tool call"
        return ""

    def _has_lost_calls(self, whole: ParsedMessage) -> bool:
        """Return whether a beginning of the text has calls that the whole has not."""
        ends: list[int] = []
        until = len(self._text)
        while self._ends and len(ends) < _MAX_LOOKS_BACK:
            until = max(self._text.rfind(end, 0, until) for end in self._ends)
            if until <= 0:
                break
            ends.append(until)
        return any(len(self._begun(end).tool_calls) > len(whole.tool_calls) for end in ends)

    def _begun(self, length: int) -> ParsedMessage:
        """Return the message in so much of the text."""
        try:
            return self._limited(self._parser.parse(self._text[:length], is_partial=True))
        except ChatParseError:
            return ParsedMessage()

    def _with_the_rest(self, warning: ChatParseError) -> tuple[list[MessageDelta], ParsedMessage]:
        self.warning = warning
        rest, sent = self._text[self._num_covered() :], self._sent
        self._sent = ParsedMessage(sent.content + rest, sent.reasoning_content, sent.tool_calls)
        return [MessageDelta(content=rest)] if rest else [], self._without_prefill(self._sent)

    def _num_covered(self) -> int:
        """Return how much of the text has been sent: what the parser needs for it. A call that is no whole one does not count."""
        sent = self._sent
        num_calls = next((n for n, call in enumerate(sent.tool_calls) if not call.is_whole), len(sent.tool_calls))
        wanted = replace(sent, tool_calls=sent.tool_calls[:num_calls])
        low, high = self._num_passed, self._num_read
        while low < high:
            middle = (low + high) // 2
            if _continues(wanted, self._begun(middle)):
                high = middle
            else:
                low = middle + 1
        return low

    def _without_prefill(self, whole: ParsedMessage) -> ParsedMessage:
        """Return what was generated of a message that the prompt had begun."""
        before = self._prefill
        return replace(
            whole,
            content=_behind(before.content, whole.content),
            reasoning_content=_behind(before.reasoning_content, whole.reasoning_content),
        )

    def _pass_on(self, text: str) -> list[MessageDelta]:
        """Pass content or thinking on up to where it may end."""
        assert self._passing is not None  # noqa: S101 - our own invariant
        self._held += text
        recent = self._held[-(len(text) + self._longest_end) :]
        if any(end in recent for end in self._ends):
            self._passing = None
            return self._parse_some()
        length = self._length_without_beginnings(self._held)
        if not length:
            self._put_blanks_aside()
            return []
        passed = "".join((*self._blanks, self._held[:length]))
        self._begin_holding(self._held[length:])
        if self._passing == "content":
            self._sent = ParsedMessage(self._sent.content + passed, self._sent.reasoning_content, self._sent.tool_calls)
            return [MessageDelta(content=passed)]
        self._sent = ParsedMessage(self._sent.content, self._sent.reasoning_content + passed, self._sent.tool_calls)
        return [MessageDelta(reasoning_content=passed)]

    def _begin_holding(self, held: str) -> None:
        self._blanks, self._held = [], held
        self._num_passed = len(self._text) - len(held)

    def _put_blanks_aside(self) -> None:
        """Move blanks from what is held, where nothing but the last characters can be the beginning of an end."""
        num_aside = len(self._held) - self._longest_end
        if num_aside > _MAX_HELD_BLANKS:
            self._blanks.append(self._held[:num_aside])
            self._held = self._held[num_aside:]

    def _length_without_beginnings(self, text: str) -> int:
        """Return how much of a text comes before a beginning of one of the ends, and before blanks at its end."""
        first, beginnings = self._first_characters, self._beginnings
        for start in range(max(0, len(text) - self._longest_end), len(text)):
            if text[start] in first and text[start:] in beginnings:
                return len(text[:start].rstrip())
        return len(text.rstrip())

    def _parse_some(self) -> list[MessageDelta]:
        """Parse the text so far, unless that would be out of proportion, and find out whether text can go through."""
        if self._num_parsed + len(self._text) > _FREE_CHARS + _CHARS_PER_CHAR * len(self._text):
            return []
        try:
            now = self._parsed(self._text)
            after = self._parsed(self._text + _PROBE)
        except ChatParseError:  # the end will tell
            return []
        deltas = list(self._deltas(now))
        if deltas:
            self._num_read = len(self._text)
        if after.tool_calls == now.tool_calls:
            if after.reasoning_content == now.reasoning_content:
                self._begin_passing("content", self._sent.content, after.content)
            elif after.content == now.content:
                self._begin_passing("reasoning_content", self._sent.reasoning_content, after.reasoning_content)
        return deltas

    def _begin_passing(self, field: Literal["content", "reasoning_content"], sent: str, probed: str) -> None:
        """Pass text on from here if the probe came behind what was sent, after nothing but blanks."""
        added = probed[len(sent) :]
        if sent and probed.startswith(sent) and added.endswith(_PROBE) and not added[:-1].strip():
            self._passing = field
            self._begin_holding(added[:-1])

    def _parsed(self, text: str) -> ParsedMessage:
        self._num_parsed += len(text)
        return self._limited(self._parser.parse(text, is_partial=True))

    def _limited(self, message: ParsedMessage) -> ParsedMessage:
        return replace(message, tool_calls=message.tool_calls[:1]) if self._is_one_call else message

    def _deltas(self, now: ParsedMessage, *, is_final: bool = False) -> Iterator[MessageDelta]:
        """Yield what `now` has more than was sent. What was sent stays, also where the parser reads it otherwise now.

        A call is sent once it has arguments, since its name may be the beginning of a longer one before.
        """
        reasoning = _added(self._sent.reasoning_content, now.reasoning_content)
        content = _added(self._sent.content, now.content)
        calls = list(self._sent.tool_calls)
        if reasoning:
            yield MessageDelta(reasoning_content=reasoning)
        if content:
            yield MessageDelta(content=content)
        for index, call in enumerate(now.tool_calls):
            if index < len(calls):
                sent = calls[index]
                arguments = _added(sent.arguments, call.arguments)
                late_id = call.id if is_final and not sent.id else ""
                if arguments or late_id:
                    yield MessageDelta(tool_call=ToolCallDelta(index, arguments=arguments, id=late_id))
                calls[index] = ToolCall(sent.name, sent.arguments + arguments, sent.id or late_id)
            elif call.name and (call.arguments or is_final):
                yield MessageDelta(tool_call=ToolCallDelta(index, call.name, call.arguments, call.id))
                calls.append(call)
            else:
                break
        self._sent = ParsedMessage(self._sent.content + content, self._sent.reasoning_content + reasoning, tuple(calls))


def _message_so_far(parser: MessageParser) -> ParsedMessage:
    """Return what a prompt has of the message that it continues: what is in front of a probe, with blanks at its end."""
    try:
        probed = parser.parse(_PROBE, is_partial=True)
    except ChatParseError:  # the end will tell
        return ParsedMessage()
    if probed.content:
        return ParsedMessage(probed.content.removesuffix(_PROBE), probed.reasoning_content)
    return ParsedMessage("", probed.reasoning_content.removesuffix(_PROBE))


def _behind(prefix: str, text: str) -> str:
    """Return a text without the prefix; nothing where it is the prefix without the blanks at its end."""
    return "" if prefix.startswith(text) else text.removeprefix(prefix)


def _continues(sent: ParsedMessage, now: ParsedMessage) -> bool:
    """Return whether a message is what was sent of it, and maybe more."""
    return (
        now.content.startswith(sent.content)
        and now.reasoning_content.startswith(sent.reasoning_content)
        and len(now.tool_calls) >= len(sent.tool_calls)
        and all(
            after.name == before.name and after.arguments.startswith(before.arguments)
            for before, after in zip(sent.tool_calls, now.tool_calls, strict=False)
        )
    )


def _call_deltas(calls: Sequence[ToolCall]) -> list[MessageDelta]:
    """Return each of the calls as one delta."""
    return [
        MessageDelta(tool_call=ToolCallDelta(index, call.name, call.arguments, call.id))
        for index, call in enumerate(calls)
    ]


def _added(sent: str, now: str) -> str:
    return now[len(sent) :] if now.startswith(sent) else ""


def _ends_of_text(parser: str) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Return the texts that may end content or thinking by a serialised parser, their beginnings and first characters."""
    return _kept_ends(parser) if len(parser) <= MAX_KEPT_CHARS else _kept_ends.__wrapped__(parser)


@cached_in_scope(maxsize=32)
def _kept_ends(parser: str) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    arena: dict[str, Any] = json.loads(parser) if parser else {}
    nodes: list[dict[str, Any]] = arena.get("parsers", [])
    untils = (node["delimiters"] for node in nodes if node["type"] == "until")
    ends = frozenset(delimiter for delimiters in untils for delimiter in delimiters if delimiter)
    beginnings = frozenset(end[:length] for end in ends for length in range(1, len(end) + 1))
    return ends, beginnings, frozenset(end[0] for end in ends)
