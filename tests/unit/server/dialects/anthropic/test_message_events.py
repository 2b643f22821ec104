"""Anthropic's messages, whole and as events; both say the same."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import msgspec
import pytest

from paceline.chat import ChatChoice, ChatChunk, ChatCompletion, MessageDelta, ParsedMessage, ToolCall, ToolCallDelta
from paceline.errors import ChatParseError
from paceline.server.dialects.anthropic.anthropic_routes import MessageReply
from paceline.streaming import FinishReason, Usage

USAGE = Usage(prompt_tokens=20, cached_tokens=15, completion_tokens=7)
COUNTS = {"input_tokens": 5, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 15, "output_tokens": 7}


def reply(**options: Any) -> MessageReply:
    return MessageReply(**{"id": "msg_1", "model": "m", "num_prompt": 20, "max_tokens": 7, **options})


def events(replying: MessageReply, *chunks: ChatChunk) -> list[dict[str, Any]]:
    """The data of all events; each has its type as its name."""
    stream = replying.events()
    found = []
    for event in [stream.opening(), *(event for chunk in chunks for event in stream(0, chunk))]:
        name, _, data = event.removesuffix(b"\n\n").partition(b"\ndata: ")
        decoded = msgspec.json.decode(data)
        assert name == b"event: " + decoded["type"].encode()
        found.append(decoded)
    return found


def whole(replying: MessageReply, message: ParsedMessage, reason: FinishReason, **ending: Any) -> dict[str, Any]:
    choice = ChatChoice(index=0, message=message, finish_reason=reason, text="", token_ids=(), **ending)
    completion = ChatCompletion(choices=(choice,), prompt_token_ids=(), usage=USAGE)
    decoded: dict[str, Any] = msgspec.json.decode(replying.whole(completion))
    return decoded


def accumulated(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a client's message from the events. Blocks come in order."""
    found = deepcopy(found)
    message: dict[str, Any] = found[0]["message"]
    assert [event["type"] for event in found[-2:]] == ["message_delta", "message_stop"]
    is_open = False
    for event in found[1:-2]:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(message["content"])
            is_open, block, json = True, event["content_block"], ""
            message["content"].append(block)
            continue
        assert is_open
        assert event["index"] == len(message["content"]) - 1
        if event["type"] == "content_block_stop":
            is_open = False
            if json:
                block["input"] = msgspec.json.decode(json)
            continue
        delta = event["delta"]
        if delta["type"] == "input_json_delta":
            json += delta["partial_json"]
            continue
        name = delta["type"].removesuffix("_delta")
        assert delta[name] or name == "signature"
        block[name] += delta[name]
    assert not is_open
    return message | found[-2]["delta"] | {"usage": found[-2]["usage"]}


def test_thinking_text_and_calls_are_blocks_in_order() -> None:
    """Streamed as whole; the thinking is signed before it ends."""
    calls = (ToolCall("weather", '{"city": "Oslo"}', "c1"), ToolCall("time", "{}", "c2"))
    message = ParsedMessage("Let me see.", "Hm, hm.", calls)
    deltas = (
        MessageDelta(reasoning_content="Hm, "),
        MessageDelta(reasoning_content="hm."),
        MessageDelta(content="Let "),
        MessageDelta(content="me see."),
        MessageDelta(tool_call=ToolCallDelta(0, "weather", '{"city"', "c1")),
        MessageDelta(tool_call=ToolCallDelta(0, arguments=': "Oslo"}')),
        MessageDelta(tool_call=ToolCallDelta(1, "time", "{}", "c2")),
    )
    end = ChatChunk(choice=0, finish_reason=FinishReason.STOP, message=message, usage=USAGE)
    found = events(reply(), *(ChatChunk(choice=0, deltas=(delta,)) for delta in deltas), end)
    assert accumulated(found) == whole(reply(), message, FinishReason.STOP)
    assert accumulated(events(reply(), ChatChunk(choice=0, deltas=deltas), end)) == accumulated(found)
    assert accumulated(found)["content"] == [
        {"type": "thinking", "thinking": "Hm, hm.", "signature": ""},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Oslo"}},
        {"type": "tool_use", "id": "c2", "name": "time", "input": {}},
    ]
    signed = next(index for index, event in enumerate(found) if event.get("delta", {}).get("type") == "signature_delta")
    assert found[signed + 1] == {"type": "content_block_stop", "index": 0}


def test_a_stream_begins_with_the_message_and_counts_at_its_end() -> None:
    """Cached tokens are known then."""
    end = ChatChunk(choice=0, finish_reason=FinishReason.STOP, message=ParsedMessage(), usage=USAGE)
    first, delta, last = events(reply(warnings=("w",)), end)
    assert first["message"]["usage"] == {**dict.fromkeys(COUNTS, 0), "input_tokens": 20}
    assert (first["message"]["content"], first["message"]["warnings"]) == ([], ["w"])
    assert delta["usage"] == COUNTS
    assert last == {"type": "message_stop"}
    assert whole(reply(), ParsedMessage(), FinishReason.STOP)["usage"] == COUNTS


@pytest.mark.parametrize(
    ("reason", "stop", "max_tokens", "calls", "expected"),
    [
        (FinishReason.STOP, None, 7, False, ("end_turn", None)),
        (FinishReason.STOP, "<end>", 7, False, ("end_turn", None)),
        (FinishReason.TOOL_CALLS, 17, 7, True, ("tool_use", None)),
        (FinishReason.TOOL_CALLS, None, 7, True, ("tool_use", None)),
        (FinishReason.TOOL_CALLS, "mine", 7, True, ("stop_sequence", "mine")),
        (FinishReason.LENGTH, None, 7, True, ("max_tokens", None)),
        (FinishReason.LENGTH, None, 8, False, ("model_context_window_exceeded", None)),
    ],
)
def test_the_stop_reason_is_anthropics(
    reason: FinishReason, stop: Any, max_tokens: int, calls: bool, expected: tuple[str, str | None]
) -> None:
    """Streamed and whole; a stop of the chat format is no stop sequence of the request."""
    message = ParsedMessage("", "", (ToolCall("a", "{}", "c"),) if calls else ())
    replying = reply(max_tokens=max_tokens, stops=("mine",))
    end = ChatChunk(choice=0, finish_reason=reason, stop=stop, message=message, usage=USAGE)
    for found in (events(replying, end)[-2]["delta"], whole(replying, message, reason, stop=stop)):
        assert (found["stop_reason"], found["stop_sequence"]) == expected


def test_omitted_thinking_is_a_block_without_text() -> None:
    """Whole and streamed."""
    message = ParsedMessage("Yes.", "Hm.")
    deltas = (MessageDelta(reasoning_content="Hm."), MessageDelta(content="Yes."))
    end = ChatChunk(choice=0, deltas=deltas, finish_reason=FinishReason.STOP, message=message, usage=USAGE)
    replying = reply(shows_thinking=False)
    found = events(replying, end)
    assert accumulated(found) == whole(replying, message, FinishReason.STOP)
    assert "thinking_delta" not in str(found)
    assert accumulated(found)["content"][0] == {"type": "thinking", "thinking": "", "signature": ""}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 1, "b": "x', {"a": 1}),
        ('{"a"', {}),
        ("", {}),
        ("[1]", {}),
        ("nonsense", {}),
        ('{"a": [1, 2', {"a": [1, 2]}),
    ],
)
def test_arguments_that_were_cut_off_are_as_far_as_they_are_whole(arguments: str, expected: dict[str, Any]) -> None:
    """As Anthropic's package reads the same pieces of a stream."""
    message = ParsedMessage("", "", (ToolCall("a", arguments, "c"),))
    assert whole(reply(), message, FinishReason.LENGTH)["content"][0]["input"] == expected


def test_a_text_that_is_no_message_of_the_format_is_warned_of() -> None:
    """Beside the warnings about the request."""
    warning, message = ChatParseError("odd"), ParsedMessage("raw")
    end = ChatChunk(
        choice=0,
        finish_reason=FinishReason.STOP,
        message=message,
        usage=USAGE,
        warning=warning,  # type: ignore[arg-type]
    )
    replying = reply(warnings=("first",))
    assert events(replying, end)[-2]["warnings"] == ["first", "odd"]
    whole_one = whole(replying, message, FinishReason.STOP, warning=warning)
    assert whole_one["warnings"] == ["first", "odd"]


def test_a_heartbeat_is_a_ping() -> None:
    """And never anything else for most clients."""
    stream = reply().events()
    assert {stream.heartbeat() for _ in range(20)} == {b'event: ping\ndata: {"type":"ping"}\n\n'}


def test_a_client_that_counts_no_pings_gets_an_event_that_changes_nothing() -> None:
    """With every fourth ping, until the message has a block."""
    stream = reply(counts_pings=False).events()
    beats = [stream.heartbeat() for _ in range(8)]
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'
    assert [beat == ping for beat in beats] == [True, True, True, False] * 2
    name, _, data = beats[3].removeprefix(ping).removesuffix(b"\n\n").partition(b"\ndata: ")
    assert name == b"event: message_delta"
    start = msgspec.json.decode(stream.opening().partition(b"data: ")[2])
    assert msgspec.json.decode(data) == {
        "type": "message_delta",
        "delta": {"stop_reason": None, "stop_sequence": None},
        "usage": start["message"]["usage"],
    }
    stream(0, ChatChunk(choice=0, deltas=(MessageDelta(content="Hi"),)))
    assert {stream.heartbeat() for _ in range(20)} == {ping}
