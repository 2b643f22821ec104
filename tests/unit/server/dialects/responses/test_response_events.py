"""Responses and their events, from hand-made chunks of a chat."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.chat import ChatChoice, ChatChunk, ChatCompletion, MessageDelta, ParsedMessage, ToolCall, ToolCallDelta
from paceline.errors import ChatParseError
from paceline.params import SamplingParams
from paceline.server.api_errors import ApiError
from paceline.server.dialects.responses.response_output import ResponseEvents, ResponseHead, early_events, echo_of
from paceline.server.dialects.responses.response_tools import ToolNames, ToolOrigin
from paceline.server.dialects.responses.responses_request import ResponsesBody
from paceline.streaming import FinishReason, Usage

USAGE = Usage(prompt_tokens=5, cached_tokens=2, completion_tokens=9)
PIECES = tuple(bytes([byte]) for byte in range(128))
ECHO = echo_of(ResponsesBody.model_validate({"input": "x"}), SamplingParams(), "m", stored=False)


def head(**options: Any) -> ResponseHead:
    return ResponseHead(**{"id": "resp_1", "created_at": 5, "echo": ECHO, "pieces": PIECES, **options})


def thought(text: str) -> MessageDelta:
    return MessageDelta(reasoning_content=text)


def said(text: str) -> MessageDelta:
    return MessageDelta(content=text)


def called(index: int, arguments: str = "", name: str = "") -> MessageDelta:
    call_id = f"call_{index}" if name else ""
    return MessageDelta(tool_call=ToolCallDelta(index, name, arguments, call_id))


def of(*deltas: MessageDelta, **options: Any) -> ChatChunk:
    text = "".join(delta.content + delta.reasoning_content for delta in deltas)
    return ChatChunk(choice=0, deltas=deltas, token_ids=tuple(text.encode()), **options)


def end(reason: FinishReason = FinishReason.STOP, **options: Any) -> ChatChunk:
    return of(finish_reason=reason, usage=USAGE, **options)


def decoded(data: bytes) -> list[dict[str, Any]]:
    events = []
    for block in filter(None, data.decode().split("\n\n")):
        name, _, payload = block.partition("\n")
        event = json.loads(payload.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def streamed(chunks: Iterable[ChatChunk], **options: Any) -> list[dict[str, Any]]:
    """The events of the chunks, numbered as they have to be."""
    render = ResponseEvents(head(**options))
    data = render.opening() + b"".join(event for chunk in chunks for event in render(0, chunk))
    events = decoded(data)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def outline(events: Iterable[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def joined(events: Iterable[dict[str, Any]]) -> list[str]:
    """Return the sum of each item's deltas, by its index."""
    texts: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["output_index"]] = texts.get(event["output_index"], "") + event["delta"]
    return [text for _, text in sorted(texts.items())]


def text_of(item: dict[str, Any]) -> str:
    return item["arguments"] if item["type"] == "function_call" else "".join(part["text"] for part in item["content"])


def whole(
    message: ParsedMessage, reason: FinishReason = FinishReason.STOP, names: ToolNames | None = None, **options: Any
) -> dict[str, Any]:
    text = message.reasoning_content + message.content
    choice = ChatChoice(
        index=0, message=message, finish_reason=reason, text=text, token_ids=tuple(text.encode()), **options
    )
    body: dict[str, Any] = json.loads(
        head(names=names or ToolNames()).whole(ChatCompletion(choices=(choice,), prompt_token_ids=(1,), usage=USAGE))
    )
    return body


def test_items_are_added_grow_and_are_done_one_after_the_other() -> None:
    """Thinking, text, a call."""
    events = streamed(
        [
            of(thought("Hm")),
            of(thought("."), said("Yes")),
            of(said("!"), called(0, "{", "f")),
            of(called(0, "}")),
            end(),
        ]
    )
    part = ["content_part.done", "output_item.done"]
    assert outline(events) == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done", *part,
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta", "output_text.done", *part,
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]  # fmt: skip
    assert joined(events) == ["Hm.", "Yes!", "{}"]
    response = events[-1]["response"]
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call"]
    assert response["output"] == [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert {item["status"] for item in response["output"]} == {"completed"}
    assert response["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 14,
    }


def test_the_last_item_of_a_response_that_was_cut_is_incomplete() -> None:
    """And the event has another name."""
    events = streamed([of(thought("Hm"), said("Ye")), end(FinishReason.LENGTH)])
    response = events[-1]["response"]
    assert (events[-1]["type"], response["status"]) == ("response.incomplete", "incomplete")
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    assert response["completed_at"] is None
    message = ParsedMessage(content="Ye", reasoning_content="Hm")
    assert [item["status"] for item in whole(message, FinishReason.LENGTH)["output"]] == ["completed", "incomplete"]


def test_blanks_around_calls_are_no_message() -> None:
    """Neither before nor behind, streamed or not."""
    events = streamed([of(thought("Hm"), said("\n")), of(called(0, "{}", "f")), of(said("\n")), end()])
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["reasoning", "function_call"]
    message = ParsedMessage(content="\n\n", reasoning_content="Hm", tool_calls=(ToolCall("f", "{}", "call_0"),))
    assert [item["type"] for item in whole(message)["output"]] == ["reasoning", "function_call"]


def test_text_behind_a_call_is_a_message_of_its_own() -> None:
    """Earlier items are done already."""
    events = streamed([of(said("One.")), of(called(0, "{}", "f")), of(said("\n"), said("Two.")), end()])
    output = events[-1]["response"]["output"]
    assert [(item["type"], text_of(item)) for item in output] == [
        ("message", "One."),
        ("function_call", "{}"),
        ("message", "\nTwo."),
    ]
    assert len({item["id"] for item in output}) == 3


@pytest.mark.parametrize("text", ["", "\n"])
def test_a_response_without_text_has_an_empty_message(text: str) -> None:
    """So that no client finds an output without items."""
    (item,) = streamed([*([of(said(text))] if text else []), end()])[-1]["response"]["output"]
    assert (item["type"], text_of(item)) == ("message", text)
    (item,) = whole(ParsedMessage(content=text))["output"]
    assert (item["type"], text_of(item)) == ("message", text)


def test_parallel_calls_are_items_of_their_own() -> None:
    """Also calls without arguments."""
    events = streamed(
        [of(called(0, "{}", "f"), called(1, "", "g")), of(called(2, '{"a":', "f")), of(called(2, "1}")), end()]
    )
    calls = events[-1]["response"]["output"]
    assert [(call["name"], call["arguments"], call["call_id"]) for call in calls] == [
        ("f", "{}", "call_0"),
        ("g", "", "call_1"),
        ("f", '{"a":1}', "call_2"),
    ]
    done = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert [(event["name"], event["arguments"]) for event in done] == [("f", "{}"), ("g", ""), ("f", '{"a":1}')]


def test_the_end_of_a_call_comes_before_text_behind_it() -> None:
    """If one chunk has both, text first."""
    events = streamed([of(called(0, '{"a":', "f")), of(said("Done."), called(0, "1}")), end()])
    assert [text_of(item) for item in events[-1]["response"]["output"]] == ['{"a":1}', "Done."]


def test_a_failure_reports_what_there_was() -> None:
    """As an error event, then as a response; it may be made in advance."""
    render = ResponseEvents(head())
    error = ApiError(504, "timeout_error", "deadline", "out of time")
    data = render.opening()
    early = render.failure(error)
    data += b"".join([*render(0, of(thought("Hm"))), *render(0, of(said("Ye")))])
    *_, first, last = events = decoded(data + render.failure(error))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert (first["type"], first["code"], first["message"], first["param"]) == (
        "error",
        "deadline",
        "out of time",
        None,
    )
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "server_error", "message": "out of time"}
    assert [text_of(item) for item in last["response"]["output"]] == ["Hm", "Ye"]
    assert decoded(early)[-1]["response"]["output"] == []
    full = decoded(render.failure(ApiError(429, "rate_limit_error", "queue_full", "later")))[-1]
    assert full["response"]["error"]["code"] == "rate_limit_exceeded"


def test_only_whole_responses_are_kept() -> None:
    """With their output; the reason why one could not be is a warning."""
    kept: list[Any] = []

    def keep(response: Any, output: Any) -> str | None:
        kept.append((response["id"], [item["type"] for item in output]))
        return None if len(kept) == 1 else "store: too large"

    first = streamed([of(said("Yes")), end()], keep=keep)[-1]["response"]
    second = streamed([of(said("Yes")), end(FinishReason.LENGTH)], keep=keep, warnings=("user: x",))[-1]["response"]
    assert kept == [("resp_1", ["message"])] * 2
    assert "warnings" not in first
    assert (second["warnings"], second["store"], second["status"]) == (
        ["user: x", "store: too large"],
        False,
        "incomplete",
    )
    streamed([of(said("Yes"))], keep=keep)
    assert len(kept) == 2


def test_a_message_that_cannot_be_read_is_its_text_with_a_warning() -> None:
    """Streamed or not."""
    warning = ChatParseError("no message of this format")
    last = streamed([of(said("<x>")), end(warning=warning)])[-1]["response"]
    body = whole(ParsedMessage(content="<x>"), warning=warning)
    for item in (last, body):
        assert item["warnings"] == [str(warning)]
        assert text_of(item["output"][0]) == "<x>"


def test_timings_come_with_every_delta_on_request() -> None:
    """And with the last event in any case."""
    ticks = iter(range(100))
    events = streamed(
        [of(thought("a")), of(said("b")), of(called(0, "{}", "f")), end()], clock=lambda: float(next(ticks))
    )
    assert all("timings" in event for event in events if event["type"].endswith(".delta"))
    plain = streamed([of(said("b")), end()])
    assert [event["type"] for event in plain if "timings" in event] == ["response.completed"]


PIECE = st.sampled_from(["a", " ", "\n", "b c", "é"])
DELTAS = st.lists(
    st.builds(thought, PIECE) | st.builds(said, PIECE) | st.just("call") | st.just("more"), max_size=8
)  # fmt: skip


@given(DELTAS, st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
def test_any_order_of_deltas_makes_whole_items(parts: list[Any], reason: FinishReason) -> None:
    """Every item is added before it grows and done once; the response has the sums of the deltas."""
    chunks, calls = [], -1
    for part in parts:
        if part == "call":
            calls += 1
            chunks.append(of(called(calls, "{", "f")))
        elif part == "more" and calls >= 0:
            chunks.append(of(called(calls, "1")))
        elif isinstance(part, MessageDelta):
            chunks.append(ChatChunk(choice=0, deltas=(part,), token_ids=(65,)))
    mended = [chunk for index, chunk in enumerate(chunks) if not _goes_on_late(chunks, index)]
    events = streamed([*mended, end(reason)])
    output = events[-1]["response"]["output"]
    assert output
    for index, item in enumerate(output):
        mine = [event for event in events if event.get("output_index") == index]
        assert (mine[0]["type"], mine[-1]["type"]) == ("response.output_item.added", "response.output_item.done")
        assert mine[-1]["item"] == item
        assert "".join(event["delta"] for event in mine if event["type"].endswith(".delta")) in (text_of(item), "")
    for kind, field in (("reasoning", "reasoning_content"), ("message", "content")):
        given_text = "".join(getattr(delta, field) for chunk in mended for delta in chunk.deltas)
        shown = "".join(text_of(item) for item in output if item["type"] == kind)
        assert shown.split() == given_text.split() or shown == given_text.rstrip()


def _goes_on_late(chunks: list[ChatChunk], index: int) -> bool:
    """Whether a delta goes on with a call that another item has ended, which a `MessageStream` never sends."""
    call = chunks[index].deltas[0].tool_call
    if call is None or call.name:
        return False
    before = chunks[index - 1].deltas[0].tool_call
    return before is None or before.index != call.index or _goes_on_late(chunks, index - 1)


def test_half_a_call_is_incomplete() -> None:
    """If a caller's stop text ended it: a client would run a completed call."""
    message = ParsedMessage(tool_calls=(ToolCall("weather", '{"ci', "call_0"),))
    choice = ChatChoice(index=0, message=message, finish_reason=FinishReason.STOP, text="", token_ids=())
    whole = json.loads(head().whole(ChatCompletion(choices=(choice,), prompt_token_ids=(), usage=USAGE)))
    assert [item["status"] for item in whole["output"]] == ["incomplete"]
    events = ResponseEvents(head())
    last = ChatChunk(
        choice=0, deltas=(called(0, '{"ci', "weather"),), finish_reason=FinishReason.STOP, message=message, usage=USAGE
    )
    body = b"".join(events(0, last)).decode().rsplit("data: ", 1)[1]
    assert [item["status"] for item in json.loads(body)["response"]["output"]] == ["incomplete"]


TOOLS = ToolNames(
    [ToolOrigin("spawn", "agents"), ToolOrigin("patch", is_custom=True), ToolOrigin("plan", "agents", is_custom=True)]
)


def test_a_call_of_a_namespace_has_its_own_name_and_the_namespace() -> None:
    """From the first event on, streamed or not."""
    events = streamed([of(called(0, '{"a":', "agents__spawn")), of(called(0, "1}")), end()], names=TOOLS)
    (item,) = events[-1]["response"]["output"]
    assert (item["type"], item["name"], item["namespace"], item["arguments"]) == (
        "function_call",
        "spawn",
        "agents",
        '{"a":1}',
    )
    (added,) = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert added == {**item, "status": "in_progress", "arguments": ""}
    (done,) = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert (done["name"], done["arguments"]) == ("spawn", '{"a":1}')
    call = ToolCall("agents__spawn", '{"a":1}', "call_0")
    (same,) = whole(ParsedMessage(tool_calls=(call,)), names=TOOLS)["output"]
    assert {**same, "id": item["id"]} == item


def test_a_call_of_a_custom_tool_is_its_text() -> None:
    """Streamed by events of its own, piece by piece; also in a namespace."""
    chunks = [
        of(called(0, '{"inp', "patch")),
        of(called(0, 'ut": "a\\')),
        of(called(0, 'n\\"b\\"')),
        of(called(0, '"}')),
    ]
    events = streamed([*chunks, of(called(1, '{"input": ""}', "agents__plan")), end()], names=TOOLS)
    assert outline(events)[2:-1] == [
        "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.delta", "custom_tool_call_input.done",
        "output_item.done", "output_item.added", "custom_tool_call_input.done", "output_item.done",
    ]  # fmt: skip
    assert [event["delta"] for event in events if event["type"].endswith(".delta")] == ["a", '\n"b"']
    assert [event["input"] for event in events if event["type"].endswith("input.done")] == ['a\n"b"', ""]
    first, second = events[-1]["response"]["output"]
    assert first == {
        "id": first["id"],
        "type": "custom_tool_call",
        "status": "completed",
        "call_id": "call_0",
        "name": "patch",
        "input": 'a\n"b"',
    }
    assert first["id"].startswith("ctc_")
    assert (second["name"], second["namespace"], second["input"]) == ("plan", "agents", "")
    call = ToolCall("patch", '{"input": "a\\n\\"b\\""}', "call_0")
    (same,) = whole(ParsedMessage(tool_calls=(call,)), names=TOOLS)["output"]
    assert {**same, "id": first["id"]} == first


def test_a_custom_call_that_is_cut_or_of_another_shape_is_not_lost() -> None:
    """It has the generated text; a cut item is incomplete."""
    cut = streamed([of(called(0, '{"input": "ab', "patch")), end(FinishReason.LENGTH)], names=TOOLS)[-1]
    assert [(item["input"], item["status"]) for item in cut["response"]["output"]] == [("ab", "incomplete")]
    events = streamed([of(called(0, '{"diff": ', "patch")), of(called(0, "1}")), end()], names=TOOLS)
    assert events[-1]["response"]["output"][0]["input"] == '{"diff": 1}'
    assert [event["delta"] for event in events if event["type"].endswith(".delta")] == ['{"diff": 1}']


def test_a_response_goes_on_from_what_was_sent_before_its_model_was_loaded() -> None:
    """It is created once, and its numbers go on; before that it has the name of the model and no output."""
    early = early_events("large")
    data = early.opening() + early.heartbeat()
    events = ResponseEvents(head(id=early.head.id), early)
    data += events.opening() + b"".join([*events(0, of(said("Yes"))), *events(0, end())])
    found = decoded(data)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert outline(found)[:4] == ["created", "in_progress", "in_progress", "in_progress"]
    assert outline(found).count("created") == 1
    assert (found[0]["response"]["model"], found[0]["response"]["output"]) == ("large", [])
    assert {event["response"]["id"] for event in found if "response" in event} == {early.head.id}


def test_a_heartbeat_has_the_items_so_far_and_none_follows_the_end() -> None:
    """The open item among them."""
    events = ResponseEvents(head())
    data = events.opening() + b"".join([*events(0, of(thought("Hm"), said("Ye"))), events.heartbeat()])
    data += b"".join([*events(0, of(said("s"))), *events(0, end())])
    found = decoded(data)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    (beat,) = [event for event in found[2:] if event["type"] == "response.in_progress"]
    assert [(text_of(item), item["status"]) for item in beat["response"]["output"]] == [
        ("Hm", "completed"),
        ("Ye", "in_progress"),
    ]
    assert found[-1]["response"]["output"][1]["content"][0]["text"] == "Yes"
    assert events.heartbeat() == b""


def test_no_response_repeats_the_keys_of_tools() -> None:
    """Keys for other servers are left out of tools, wherever the tool has them; parameters of functions stay."""
    named = {"authorization": {"type": "string"}, "headers": {"type": "object"}}
    function = {"type": "function", "name": "fetch", "parameters": {"type": "object", "properties": named}}
    server = {"type": "mcp", "server_label": "x", "server_url": "https://mcp.example"}
    keys = {"authorization": "key 1", "headers": {"X-Key": "key 2"}}
    policy = {"type": "allowlist", "domain_secrets": [{"domain": "a.example", "name": "X", "value": "key 3"}]}
    shell = {"type": "shell", "environment": {"type": "container_auto", "network_policy": policy}}
    space = {"type": "namespace", "name": "n", "tools": [function, {**server, **keys}]}
    body = ResponsesBody.model_validate({"input": "x", "tools": [function, {**server, **keys}, shell, space]})
    echo = echo_of(body, SamplingParams(), "m", stored=True)["tools"]
    assert "key " not in json.dumps(echo)
    assert echo[0]["parameters"]["properties"] == named
    assert echo[1] == server
    assert echo[2]["environment"] == {"type": "container_auto", "network_policy": {"type": "allowlist"}}
    assert echo[3] == {**space, "tools": [function, server]}
    assert body.tools[1]["headers"] == keys["headers"]  # the request is as it was
