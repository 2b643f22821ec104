"""Chats that are read from an engine's output: whole, and while they are generated."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
import pytest
from tests.native.chat_templates import demo
from tests.native.test_message_stream import joined

from paceline.chat import (
    ChatChunk,
    ChatFormat,
    ChatOptions,
    ChatReader,
    ParsedMessage,
    RenderedPrompt,
    ToolCall,
    chat_completion_of,
    new_call_id,
    next_turn,
)
from paceline.errors import ChatParseError, EngineError
from paceline.streaming import FinishReason, StreamChunk, TokenLogprobs, Usage
from paceline.streaming.chunk import completion_of

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
ASKED = [{"role": "user", "content": "How is the weather?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
TEXTS = {
    "content": "It rains.",
    "thinking": "<think>\nHm.\n</think>\n\nIt rains.",
    "call": f"<think>\nHm.\n</think>\n\n{CALL}",
    "calls": f"Wait. {CALL}\n{CALL.replace('Bonn', 'Ulm')}",
}
NO_CALL = '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>'  # of no tool that was offered
USAGE = Usage(prompt_tokens=4, completion_tokens=3)


@cache
def rendered(**options: Any) -> RenderedPrompt:
    """Return the question with the tool, in the demo model's format."""
    return ChatFormat(demo()).render(ASKED, options=ChatOptions(tools=TOOLS, **options))


def counted_ids() -> Any:
    """Return a maker of ids that counts."""
    numbers = iter(range(100))
    return lambda: f"id-{next(numbers)}"


def chunks_of(
    texts: list[str], *, reason: FinishReason = FinishReason.STOP, seed: int = 0, longest: int = 5
) -> Iterator[StreamChunk]:
    """Yield the chunks of choices with texts cut anywhere, in any order, the last chunk with the usage."""
    draw, rests = random.Random(seed), dict(enumerate(texts))
    while rests:
        choice = draw.choice(sorted(rests))
        length = draw.randint(1, longest)
        piece, rests[choice] = rests[choice][:length], rests[choice][length:]
        is_last = not rests[choice]
        if is_last:
            del rests[choice]
        yield StreamChunk(
            index=0,
            choice=choice,
            text=piece,
            token_ids=tuple(piece.encode()),
            logprobs=tuple(TokenLogprobs(-float(byte), (), ()) for byte in piece.encode()),
            finish_reason=reason if is_last else None,
            usage=None if rests else USAGE,
        )


def read(reader: ChatReader, chunks: Iterator[StreamChunk] | list[StreamChunk]) -> list[ChatChunk]:
    return [part for chunk in chunks for part in reader.read(chunk)]


def message_of(chunks: list[ChatChunk], choice: int = 0) -> ParsedMessage:
    return joined(delta for chunk in chunks if chunk.choice == choice for delta in chunk.deltas)


@pytest.mark.parametrize("seed", range(6))
def test_streamed_messages_are_the_whole_ones_for_every_choice(seed: int) -> None:
    """Contents, thinking, calls and their ids; the last chunk of a choice has all of it."""
    texts = list(TEXTS.values())
    chunks = list(chunks_of(texts, seed=seed))
    streamed = read(ChatReader(rendered(), len(texts), counted_ids()), chunks)
    completion = completion_of(chunks, prompt=(1,), wants_logprobs=True, wants_prompt_logprobs=False, index=0)
    whole = chat_completion_of(completion, rendered(), counted_ids())
    for index, choice in enumerate(whole.choices):
        (last,) = [part for part in streamed if part.choice == index and part.finish_reason is not None]
        assert last.message == message_of(streamed, index)
        plain = [(call.name, call.arguments) for call in choice.message.tool_calls]
        assert [(call.name, call.arguments) for call in last.message.tool_calls] == plain
        assert (last.message.content, last.message.reasoning_content) == (
            choice.message.content,
            choice.message.reasoning_content,
        )
        assert all(call.id for call in (*choice.message.tool_calls, *last.message.tool_calls))
        assert (choice.text, choice.warning, last.warning) == (texts[index], None, None)
    assert [len(choice.message.tool_calls) for choice in whole.choices] == [0, 0, 1, 2]
    ids = [call.id for choice in whole.choices for call in choice.message.tool_calls]
    assert len(set(ids)) == len(ids) == 3
    assert streamed[-1].usage == whole.usage == USAGE
    assert [part for part in streamed if part.usage is not None] == [streamed[-1]]


def test_every_token_and_its_logprob_comes_once() -> None:
    """Including tokens of marks and of thinking, which are no content."""
    text = TEXTS["call"]
    streamed = read(ChatReader(rendered()), chunks_of([text]))
    assert bytes(token for part in streamed for token in part.token_ids).decode() == text
    assert [score.own for part in streamed for score in part.logprobs] == [-float(byte) for byte in text.encode()]


def test_the_first_choice_is_at_hand() -> None:
    """Its parts are properties of the completion."""
    chunks = list(chunks_of([TEXTS["call"]]))
    completion = completion_of(chunks, prompt=(1,), wants_logprobs=False, wants_prompt_logprobs=False, index=0)
    whole = chat_completion_of(completion, rendered())
    assert (whole.content, whole.reasoning_content.strip()) == ("", "Hm.")
    assert [call.name for call in whole.tool_calls] == ["weather"]
    assert (whole.message, whole.finish_reason) == (whole.choices[0].message, FinishReason.TOOL_CALLS)


@pytest.mark.parametrize(
    ("text", "reason", "expected"),
    [
        (TEXTS["call"], FinishReason.STOP, "tool_calls"),
        (TEXTS["calls"], FinishReason.STOP, "tool_calls"),
        (TEXTS["content"], FinishReason.STOP, "stop"),
        (TEXTS["call"], FinishReason.LENGTH, "length"),
        (TEXTS["call"][:-20], FinishReason.CANCELLED, "cancelled"),
    ],
)
def test_whole_tool_calls_are_a_reason(text: str, reason: FinishReason, expected: str) -> None:
    """In place of STOP; streamed and whole."""
    chunks = list(chunks_of([text], reason=reason))
    completion = completion_of(chunks, prompt=(1,), wants_logprobs=False, wants_prompt_logprobs=False, index=0)
    assert chat_completion_of(completion, rendered()).finish_reason == expected
    assert [part.finish_reason for part in read(ChatReader(rendered()), chunks) if part.finish_reason] == [expected]


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.CANCELLED, FinishReason.DEADLINE])
def test_a_call_that_is_cut_off_is_the_beginning_of_one(reason: FinishReason) -> None:
    """Wherever it is cut: no part of it is content, and nothing is warned of."""
    text = TEXTS["call"]
    for end in range(text.index(CALL) + len("<tool_call>\n"), len(text)):
        streamed = read(ChatReader(rendered()), chunks_of([text[:end]], reason=reason))
        (last,) = [part for part in streamed if part.finish_reason is not None]
        assert last.message == message_of(streamed)
        assert (last.message.content, last.warning) == ("", None), text[:end]
        assert all('{"city":"Bonn"}'.startswith(call.arguments) for call in last.message.tool_calls) or (
            '{"city": "Bonn"}'.startswith(last.message.tool_calls[0].arguments)
        )


def test_text_that_is_not_of_the_format_is_the_content_with_a_warning() -> None:
    """It can be told from a message that is in order by its type, whole and streamed."""
    chunks = list(chunks_of([NO_CALL, TEXTS["call"]]))
    completion = completion_of(chunks, prompt=(1,), wants_logprobs=False, wants_prompt_logprobs=False, index=0)
    whole = chat_completion_of(completion, rendered())
    assert isinstance(whole.choices[0].warning, ChatParseError)
    assert whole.choices[0].message == ParsedMessage(content=NO_CALL)
    assert whole.choices[1].warning is None
    streamed = read(ChatReader(rendered(), 2), chunks)
    first, second = sorted((part for part in streamed if part.finish_reason is not None), key=lambda item: item.choice)
    assert isinstance(first.warning, ChatParseError)
    assert first.message == message_of(streamed) == ParsedMessage(content=NO_CALL)
    assert second.warning is None


def test_a_terminal_chunk_ends_every_choice_that_is_open() -> None:
    """Each with a chunk of its own, for the same reason; the terminal one comes last and alone has the usage."""
    failure = EngineError("broken")
    reader = ChatReader(rendered(), 3)
    begun = [
        StreamChunk(index=0, choice=0, text="It ra", token_ids=(1,)),
        StreamChunk(index=0, choice=2, text="<think>\nH", token_ids=(1,)),
        StreamChunk(index=0, choice=2, text="m", token_ids=(1,), finish_reason=FinishReason.LENGTH),
    ]
    last = StreamChunk(index=0, choice=1, finish_reason=FinishReason.ERROR, usage=USAGE, error=failure)
    streamed = read(reader, [*begun, last])
    ends = [part for part in streamed if part.finish_reason is not None]
    assert [(end.choice, end.finish_reason, end.usage) for end in ends] == [
        (2, FinishReason.LENGTH, None),
        (0, FinishReason.ERROR, None),
        (1, FinishReason.ERROR, USAGE),
    ]
    assert [end.error for end in ends] == [None, failure, failure]
    assert [end.message for end in ends] == [message_of(streamed, choice) for choice in (2, 0, 1)]
    assert message_of(streamed).content == "It ra"


def test_a_choice_ends_once() -> None:
    """One that has ended is not ended again by the terminal chunk, and has one message."""
    reader = ChatReader(rendered(), 2)
    first = StreamChunk(index=0, choice=0, text="a", token_ids=(1,), finish_reason=FinishReason.STOP)
    second = StreamChunk(index=0, choice=1, text="b", token_ids=(1,), finish_reason=FinishReason.STOP, usage=USAGE)
    streamed = read(reader, [first, second])
    assert [part.choice for part in streamed if part.message is not None] == [0, 1]


@pytest.mark.parametrize("is_one_call", [False, True])
def test_only_the_first_call_counts_where_one_is_wanted(is_one_call: bool) -> None:
    """Whatever the model writes; whole and streamed."""
    prompt = rendered(parallel_tool_calls=not is_one_call)
    chunks = list(chunks_of([TEXTS["calls"]]))
    streamed = message_of(read(ChatReader(prompt, 1, counted_ids()), chunks))
    completion = completion_of(chunks, prompt=(1,), wants_logprobs=False, wants_prompt_logprobs=False, index=0)
    assert chat_completion_of(completion, prompt, counted_ids()).message == streamed
    assert [call.arguments.replace(" ", "") for call in streamed.tool_calls] == (
        ['{"city":"Bonn"}'] if is_one_call else ['{"city":"Bonn"}', '{"city":"Ulm"}']
    )


def test_content_passes_without_the_parser() -> None:
    """The parser takes time for a long text: chunks in between need no thread, and neither do chunks of a short text."""
    reader = ChatReader(rendered())
    assert not reader.needs_parser(StreamChunk(index=0, text="It", token_ids=(1,)))
    pieces = ["It rains. " * 200, " rains", " in", " Bonn", "."]
    needs = []
    for piece in pieces:
        chunk = StreamChunk(index=0, text=piece, token_ids=(1,))
        needs.append(reader.needs_parser(chunk))
        reader.read(chunk)
    assert needs == [True, False, False, False, False]
    assert reader.needs_parser(StreamChunk(index=0, text="<tool_call>\n", token_ids=(1,)))
    assert reader.needs_parser(StreamChunk(index=0, finish_reason=FinishReason.STOP, usage=USAGE))


def test_ids_of_calls_differ() -> None:
    """They are random, and OpenAI's in form."""
    ids = {new_call_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(token_id.startswith("call_") and token_id[5:].isalnum() for token_id in ids)


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_a_stop_of_the_caller_cuts_a_call_off(reason: FinishReason) -> None:
    """A call without the rest of its arguments is incomplete; the format's own calls come when the message has ended."""
    half = CALL[: CALL.index("Bonn")]
    prompt = replace(rendered(), stops=("<END>",), stop_token_ids=(7,), eog_ids=frozenset({2}))
    for stop, is_content in (('"arguments"', False), (5, False), ("<END>", True), (7, True), (2, True), (None, True)):
        if reason is FinishReason.LENGTH and is_content:
            continue
        chunk = StreamChunk(index=0, choice=0, text=half, token_ids=(1,), finish_reason=reason, stop=stop, usage=USAGE)
        (last,) = ChatReader(prompt).read(chunk)
        completion = completion_of([chunk], prompt=(1,), wants_logprobs=False, wants_prompt_logprobs=False, index=0)
        whole = chat_completion_of(completion, prompt).choices[0]
        for message, warning in ((last.message, last.warning), (whole.message, whole.warning)):
            assert message is not None
            assert (message.content == half, warning is not None) == (is_content, is_content), stop
            assert (message.has_whole_calls, bool(message.tool_calls) or is_content) == (False, True)


def test_calls_are_whole_where_all_arguments_are() -> None:
    """No call is not a whole one."""
    whole, half = ToolCall("f", '{"a": 1}'), ToolCall("f", '{"a')
    messages = [ParsedMessage(tool_calls=calls) for calls in ((), (whole,), (half,), (whole, half), (whole, whole))]
    assert [message.has_whole_calls for message in messages] == [False, True, False, False, True]
    assert not ToolCall("f", "[" * 100_000).is_whole


def test_a_prompt_knows_the_tokens_that_end_a_message() -> None:
    """For any rendering: a message that ends with such a token was not cut off."""
    prompt = ChatFormat(demo()).render_turn(next_turn(ASKED), ChatOptions(tools=TOOLS), has_call_grammar=True)
    text = '{"name": "weather", "arguments": {"city": "Bonn"}}'
    for stop, num_calls in ((min(demo().tokenizer.eog_ids), 1), ("Bonn", 0)):
        (chunk,) = chunks_of([text], longest=1000)
        ended = msgspec.structs.replace(chunk, stop=stop)
        completion = completion_of([ended], prompt=(), wants_logprobs=False, wants_prompt_logprobs=False, index=0)
        assert len(chat_completion_of(completion, prompt).tool_calls) == num_calls
