"""Tool calls that a model writes as JSON, without the tags of its chat format: read as calls, or delivered as content."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.native.chat_templates import demo
from tests.native.test_chat_completion import TOOLS, USAGE, chunks_of, read
from tests.native.test_message_stream import joined, pieces

from paceline import LLM, AsyncLLM, Conversation, FinishReason
from paceline.chat import (
    ChatChunk,
    ChatFormat,
    ChatOptions,
    ChatReader,
    MessageStream,
    ParsedMessage,
    RenderedPrompt,
    ToolCall,
    is_thinking_open,
    next_turn,
    prepare_chat,
)
from paceline.params import SamplingParams
from paceline.runtime import Tokenizer
from paceline.streaming import StreamChunk

ASKED = [{"role": "user", "content": "How is the weather?"}]
FORECAST = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["c", "f"]},
        "days": {"type": "integer", "minimum": 1},
        "at": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {
        "place": {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}, "required": ["x"]}
    },
}
MORE_TOOLS = [*TOOLS, {"type": "function", "function": {"name": "forecast", "parameters": FORECAST}}]
BONN = ToolCall("weather", '{"city": "Bonn"}')
BARE = '{"name": "weather", "arguments": {"city": "Bonn"}}'
CALLS: dict[str, tuple[str, Sequence[ToolCall]]] = {
    "bare": (BARE, [BONN]),
    "blanks": (f"\n {BARE}\n\n", [BONN]),
    "fence": (f"```json\n{BARE}\n```", [BONN]),
    "fence without a word": (f"```\n{BARE}\n```\n", [BONN]),
    "fence without an end": (f"```json\n{BARE}", [BONN]),
    "indented": ('{\n  "name": "weather",\n  "arguments": {\n    "city": "Bonn"\n  }\n}', [BONN]),
    "one after another": (f"{BARE}\n{BARE}", [BONN, BONN]),
    "several in a fence": (f"```json\n{BARE}\n{BARE}\n```", [BONN, BONN]),
    "list": (f"[{BARE}, {BARE}]", [BONN, BONN]),
    "parameters": (BARE.replace("arguments", "parameters"), [BONN]),
    "type": (BARE.replace("{", '{"type": "function", ', 1), [BONN]),
    "function": (f'{{"type": "function", "function": {BARE}}}', [BONN]),
    "name as function": (BARE.replace("name", "function"), [BONN]),
    "arguments as text": ('{"name": "weather", "arguments": "{\\"city\\": \\"Bonn\\"}"}', [BONN]),
    "arguments first": ('{"arguments": {"city": "Bonn"}, "name": "weather"}', [BONN]),
    "id": (BARE.replace("{", '{"id": "c7", ', 1), [replace(BONN, id="c7")]),
    "doubled braces": ("{" + BARE + "}", [BONN]),
    "doubled braces, one end": ("{" + BARE, [BONN]),
    "doubled braces and blanks": ("{\n  {" + BARE[1:-1] + "}\n}\n", [BONN]),
    "doubled braces in a list": (f"```json\n[{{{BARE}}}, {BARE}]\n```", [BONN, BONN]),
    "doubled braces one after another": (f"{{{BARE}}}\n{{{BARE}}}", [BONN, BONN]),
    "brackets in texts": (BARE.replace("Bonn", '}]\\"{'), [ToolCall("weather", '{"city": "}]\\"{"}')]),
    "other order": (
        '{"name": "forecast", "arguments": {"days": 2, "at": {"y": 1, "x": 2.5}, "unit": "c", "city": "Ulm"}}',
        [ToolCall("forecast", '{"days": 2, "at": {"y": 1, "x": 2.5}, "unit": "c", "city": "Ulm"}')],
    ),
}
# Contents that are no calls: how many characters may be held back, and a part of the warning; without it there is none.
CONTENTS: dict[str, tuple[str, int, str]] = {
    "prose": ("It rains.", 0, ""),
    "JSON of an answer": ('{"answer": 1, "b": 2}', len('{"answer'), ""),
    "list of numbers": ("[1, 2]", 1, ""),
    "code": ("```python\nprint()\n```", len("```python\n"), ""),
    "unknown tool": (
        '{"name": "clock", "arguments": {}}',
        len('{"name": "clock'),
        "'clock' and was not read as one: there is no tool of this name",
    ),
    "name alone": ('{"name": "weather"}', 100, "it has no object of arguments"),
    "text before": (f"I will call {BARE}", 0, "'weather' and was not read as one: it has more than the JSON"),
    "text after": (f"{BARE} is it.", len(BARE) + 1, "'weather' and was not read as one: it has more than the JSON"),
    "text after a fence": (f"```\n{BARE}\n```\nDone.", len(BARE) + 9, "it has more than the JSON of calls"),
    "another member": (BARE.replace("{", '{"why": "", ', 1), len('{"why'), "it has more than the JSON of calls"),
    "doubled braces and a member": ("{" + BARE + ', "a": 1}', len(BARE) + 1, "it has more than the JSON of calls"),
    "three braces": ("{{" + BARE + "}}", 2, "it has more than the JSON of calls"),
    "list without an end": (f"[{BARE}", 100, "it is no valid JSON"),
    "missing argument": ('{"name": "weather", "arguments": {}}', 100, "its arguments have no 'city'"),
    "unknown argument": (
        '{"name": "forecast", "arguments": {"city": "Ulm", "type": "object"}}',
        100,
        "'forecast' and was not read as one: the tool has no argument 'type'",
    ),
    "wrong type": ('{"name": "weather", "arguments": {"city": 3}}', 100, "does not allow '3}' after '{\"city\":'"),
    "out of range": ('{"name": "forecast", "arguments": {"city": "Ulm", "days": 0}}', 100, "does not allow '0}'"),
    "one of two does not fit": (f"{BARE}\n{BARE.replace('city', 'town')}", 200, "no 'city'"),
    "half": (BARE[:-1], 100, "it is no valid JSON"),
    "text that is no JSON": ('{"name": "weather", "arguments": "Bonn"}', 100, "it is no valid JSON"),
    "number without end": ('{"name": "forecast", "arguments": {"city": "a", "days": 1e999}}', 100, "no valid JSON"),
}


def prepared(format_: ChatFormat | None = None, messages: object = ASKED, **options: Any) -> RenderedPrompt:
    """Return the question with the tools, as it is generated from."""
    turn, given = next_turn(messages), {"tools": MORE_TOOLS, **options}
    params = SamplingParams(json_schema=given.pop("schema", None))
    return prepare_chat(format_ or ChatFormat(demo()), turn, ChatOptions(**given), params).rendered


def whole(prompt: RenderedPrompt, text: str, *, is_cut: bool = False) -> tuple[ParsedMessage, str]:
    stream = MessageStream(prompt, is_whole=True)
    stream.feed(text)
    message = stream.finish(is_cut=is_cut)[1]
    return message, "" if stream.warning is None else str(stream.warning)


@pytest.mark.parametrize("longest", [1, 7, 1000])
@pytest.mark.parametrize("case", CALLS)
def test_json_of_calls_alone_is_read_as_calls(case: str, longest: int) -> None:
    """Whole and streamed, wherever the text is cut: no content is delivered, and each call comes at the end."""
    text, calls = CALLS[case]
    expected, prompt = ParsedMessage(tool_calls=tuple(calls)), prepared()
    assert whole(prompt, text) == (expected, "")
    stream = MessageStream(prompt)
    assert [delta for piece in pieces(text, longest, 1) for delta in stream.feed(piece)] == []
    deltas, message = stream.finish()
    assert (joined(deltas), message, stream.warning) == (expected, expected, None)


@pytest.mark.parametrize("case", CONTENTS)
def test_other_contents_are_delivered_at_once(case: str) -> None:
    """As they were generated, from the character on that no call can have; a content that is almost a call has a warning."""
    text, most_held, warning = CONTENTS[case]
    stream, received = MessageStream(prepared()), ""
    for number, char in enumerate(text, 1):
        received += joined(stream.feed(char)).content
        if number > most_held + 1:
            assert text[:number].startswith(received) and len(received) >= len(text[:number].rstrip()) - 1, number
    rest, message = stream.finish()
    assert received + joined(rest).content == message.content == text
    assert message.tool_calls == ()
    assert whole(prepared(), text) == (message, str(stream.warning or ""))
    assert (warning in str(stream.warning)) if warning else stream.warning is None


@pytest.mark.parametrize("is_thought", [False, True])
def test_thinking_comes_before_an_untagged_call(is_thought: bool) -> None:
    """It is delivered as it comes, and the content after it is held back."""
    thought = "<think>\nHm.\n</think>\n\n" if is_thought else ""
    prompt = prepared()
    stream = MessageStream(prompt)
    early = joined([delta for piece in pieces(thought + BARE, 5, 2) for delta in stream.feed(piece)])
    assert (early.content, early.tool_calls) == ("", ())
    assert early.reasoning_content.strip() == ("Hm." if is_thought else "")
    assert stream.finish()[1].tool_calls == (BONN,)


def test_a_tagged_call_is_read_as_before() -> None:
    """Also after text that could have become an untagged call."""
    tagged = f"<tool_call>\n{BARE}\n</tool_call>"
    prompt = prepared()
    for text, content in ((tagged, ""), (f"[{tagged}", "["), (f"Wait. {tagged}", "Wait.")):
        stream = MessageStream(prompt)
        deltas = [delta for piece in pieces(text, 3, 1) for delta in stream.feed(piece)]
        message = joined([*deltas, *stream.finish()[0]])
        assert (message.content.rstrip(), message.tool_calls) == (content, (BONN,))
        assert whole(prompt, text)[0] == message
        assert whole(replace(prompt, untagged_tools=()), text)[0] == message


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.CANCELLED, FinishReason.ERROR])
def test_a_message_that_is_cut_off_delivers_held_back_text(reason: FinishReason) -> None:
    """All of its text is content on the terminal chunk, which has the usage; the JSON may have been whole."""
    chunks = list(chunks_of([BARE], reason=reason))
    *before, last = read(ChatReader(prepared()), chunks)
    assert not any(chunk.deltas or chunk.finish_reason or chunk.usage for chunk in before)
    assert (last.finish_reason, last.usage) == (reason, USAGE)
    assert joined(last.deltas) == last.message == ParsedMessage(BARE)
    assert "'weather' and was not read as one: the message was cut off" in str(last.warning)
    assert whole(prepared(), BARE[:20], is_cut=True) == (ParsedMessage(BARE[:20]), "")


def test_a_call_is_decided_beside_the_event_loop() -> None:
    """Its schema may have to be compiled. Calls get ids, and the terminal chunk has them."""
    reader = ChatReader(prepared(), make_call_id=lambda: "id")
    assert not reader.needs_parser(StreamChunk(index=0, text=BARE))
    assert reader.read(StreamChunk(index=0, text=BARE))[0].deltas == ()
    end = StreamChunk(index=0, finish_reason=FinishReason.STOP, usage=USAGE)
    assert reader.needs_parser(end)
    (last,) = reader.read(end)
    assert last.message == joined(last.deltas) == ParsedMessage(tool_calls=(replace(BONN, id="id"),))
    assert last.finish_reason is FinishReason.TOOL_CALLS
    prose = ChatReader(prepared(), 2)
    prose.read(StreamChunk(index=0, text="It rains."))
    assert not prose.needs_parser(StreamChunk(index=0, finish_reason=FinishReason.STOP))


@pytest.mark.parametrize(
    "options",
    [
        {"tool_choice": "none"},
        {"untagged_calls": False},
        {"skip_parsing": True},
        {"schema": {"type": "object"}},
        {"tool_choice": {"type": "function", "function": {"name": "forecast"}}},
    ],
    ids=str,
)
def test_json_is_the_answer_if_it_cannot_be_a_call(options: dict[str, Any]) -> None:
    """With tools that may not be called, an option against it, a schema of the content, or without the named tool."""
    prompt = prepared(**options)
    text = BARE if not is_thinking_open(prompt) else f"</think>\n{BARE}"
    message, warning = whole(prompt, text)
    assert (message.content, message.tool_calls) == (BARE, ())
    assert bool(warning) == ("tool_choice" in options and options["tool_choice"] != "none")


def test_a_content_that_the_prompt_has_begun_is_no_call() -> None:
    """The JSON is not all of the content then."""
    begun = [*ASKED, {"role": "assistant", "content": "See:", "prefix": True}]
    assert whole(prepared(messages=begun), BARE)[0] == ParsedMessage(BARE)


def test_one_call_counts_if_one_is_wanted() -> None:
    """The first one, as of tagged calls."""
    assert whole(prepared(parallel_tool_calls=False), f"{BARE}\n{BARE}")[0] == ParsedMessage(tool_calls=(BONN,))


def test_long_arguments_take_time_in_proportion() -> None:
    """Each character is looked at once while it is held back."""
    text = BARE.replace("Bonn", "a" * 300_000)
    stream = MessageStream(prepared())
    for start in range(0, len(text), 3):
        stream.feed(text[start : start + 3])
    assert len(stream.finish()[1].tool_calls[0].arguments) > 300_000


def test_untagged_calls_are_read_in_every_format(llama_cpp_source: Path) -> None:
    """If calls are bare JSON themselves, as in Llama 3, the format's own parser reads them."""
    num_read = 0
    for path in sorted((llama_cpp_source / "models" / "templates").glob("*.jinja")):
        chat = ChatFormat(demo(), path.read_text())
        if not (chat.capabilities["supports_tools"] or chat.capabilities["supports_tool_calls"]):
            continue
        prompt = prepared(chat, tools=TOOLS)
        if "Llama-3." in path.stem and path.stem.startswith("meta"):
            assert prompt.untagged_tools == ()
            continue
        lead = f"Hm.{prompt.thinking_ends[0]}\n" if is_thinking_open(prompt) else ""
        streamed = MessageStream(prompt)
        deltas = [delta for piece in pieces(f"{lead}```json\n{BARE}\n```", 6, 4) for delta in streamed.feed(piece)]
        message = joined([*deltas, *streamed.finish()[0]])
        assert message.tool_calls in ((BONN,), ()), path.stem
        num_read += message.tool_calls == (BONN,)
    assert num_read >= 60


class Written:
    """A logits processor that makes a model write texts, one in each message, and end."""

    def __init__(self, tokenizer: Tokenizer, *texts: str) -> None:
        (end,) = tokenizer.encode("<|im_end|>", add_special=False, parse_special=True)
        self._left = [[*tokenizer.encode(text, add_special=False, parse_special=True), end] for text in texts]
        self._now: list[int] = []

    def __call__(self, token_ids: list[int], logits: Any) -> Any:
        if not token_ids:
            self._now = self._left.pop(0)
        row = np.full_like(logits, -100.0)
        row[self._now[len(token_ids)]] = 100.0
        return row


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_slots=2, n_ctx=4096, n_threads=1) as made:
        yield made


def weather(city: str) -> str:
    """Current weather of a city."""
    return f"sunny in {city}"


def chatted(llm: LLM, **options: Any) -> Any:
    return llm.chat(ASKED, **options)


def streamed(llm: LLM, **options: Any) -> Any:
    with llm.stream_chat(ASKED, **options) as stream:
        chunks = list(stream)
        assert [chunk for chunk in chunks if chunk.usage is not None] == chunks[-1:]
        results = [chunk.tool_result.content for chunk in chunks if chunk.tool_result is not None]
        reply = stream.collect()
    assert len(results) == sum(len(round_.tool_calls) for round_ in reply.rounds)
    return reply


def said(llm: LLM, **options: Any) -> Any:
    return Conversation(llm).say(ASKED[0]["content"], **options)


@pytest.mark.parametrize("ask", [chatted, streamed, said])
def test_run_tools_runs_untagged_calls(llm: LLM, ask: Callable[..., Any]) -> None:
    """Their results are in the next prompt, in the conversation the call is as one with tags."""
    written = Written(llm.tokenizer, f"```json\n{BARE}\n```", "Fine.")
    reply = ask(llm, tools=[weather], run_tools=True, logits_processors=[written], temperature=0)
    assert [message["role"] for message in reply.messages] == ["user", "assistant", "tool", "assistant"]
    assert reply.messages[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Bonn"}'}
    assert (reply.messages[1]["content"], reply.messages[2]["content"]) == ("", "sunny in Bonn")
    assert (reply.content, reply.tool_calls, len(reply.rounds)) == ("Fine.", (), 1)
    assert (reply.rounds[0].finish_reason, reply.finish_reason) == (FinishReason.TOOL_CALLS, FinishReason.STOP)


@pytest.mark.parametrize("ask", [chatted, streamed, said])
def test_run_tools_logs_why_it_ran_no_tool(llm: LLM, ask: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    """Once, and the choice has it as its warning."""
    text = BARE.replace("city", "town")
    written = Written(llm.tokenizer, text)
    with caplog.at_level(logging.WARNING, "paceline.chat"):
        reply = ask(llm, tools=[weather], run_tools=True, logits_processors=[written], temperature=0)
    assert (reply.content, reply.rounds) == (text, ())
    (logged,) = [record.message for record in caplog.records]
    assert logged == str(reply.choices[0].warning)
    assert "'weather' and was not read as one: its arguments have no 'city'" in logged


def test_a_stream_that_is_cancelled_delivers_held_back_text(llm: LLM) -> None:
    """On its terminal chunk, which is the only one with a finish reason and usage."""
    long = BARE.replace("Bonn", "Bonn " * 300)
    written = Written(llm.tokenizer, long)
    options: dict[str, Any] = {"tools": [weather], "run_tools": True, "logits_processors": [written], "temperature": 0}
    with llm.stream_chat(ASKED, **options) as stream:
        chunks = list[ChatChunk]()
        while sum(len(chunk.token_ids) for chunk in chunks) < len('{"name": "'):  # each has a character or more
            chunk = stream.get()
            assert isinstance(chunk, ChatChunk)
            chunks.append(chunk)
        stream.cancel()
        chunks += stream
    deltas = [chunk.deltas for chunk in chunks]
    assert not any(deltas[:-1])
    last = chunks[-1]
    assert last.message is not None and last.usage is not None
    assert last.finish_reason is FinishReason.CANCELLED
    assert joined(deltas[-1]) == last.message == ParsedMessage(last.message.content)
    assert len(last.message.content) > len('{"name":') and long.startswith(last.message.content)


def test_an_event_loop_runs_untagged_calls(llm: LLM) -> None:
    """The end of the message is read in a thread; the rest is as in a stream of threads."""

    async def run() -> list[str]:
        async with AsyncLLM(num_slots=2, n_ctx=4096, n_threads=1) as other:
            written = Written(llm.tokenizer, f"[{BARE}, {BARE}]", "Fine.")
            options: dict[str, Any] = {"tools": [weather], "run_tools": True, "logits_processors": [written]}
            async with other.stream_chat(ASKED, temperature=0, **options) as stream:
                chunks = [chunk async for chunk in stream]
            results = [chunk.tool_result.content for chunk in chunks if chunk.tool_result is not None]
            return [*results, (await stream.collect()).content]

    assert asyncio.run(run()) == ["sunny in Bonn", "sunny in Bonn", "Fine."]
