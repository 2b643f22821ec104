"""/v1/responses over the demo model, with the `openai` package."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import (
    Response,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseReasoningItem,
)
from tests.media_requests import URL
from tests.server.openai_world import FOREVER, OpenAIServer

from paceline.server.response_store import EncodedItems
from paceline.server.settings import ApiKey
from paceline.streaming import FinishReason

pytestmark = pytest.mark.native

STORY = "Tell me a story about a fox."
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
QUESTION = "What is the weather in Paris?"


@pytest.fixture(scope="module")
def world() -> Iterator[OpenAIServer]:
    with OpenAIServer(responses_store=8) as world:
        yield world


@pytest.fixture(scope="module")
def bare() -> Iterator[OpenAIServer]:
    """A server without a store."""
    with OpenAIServer() as world:
        yield world


@pytest.fixture
def client(world: OpenAIServer) -> Iterator[openai.OpenAI]:
    with world.openai() as client:
        yield client


def respond(client: openai.OpenAI, given: Any = STORY, **options: Any) -> Response:
    options = {"model": "tale", "max_output_tokens": 24, "temperature": 0, **options}
    response: Response = client.responses.create(input=given, **options)
    return response


def streamed(client: openai.OpenAI, given: Any = STORY, **options: Any) -> list[Any]:
    options = {"model": "tale", "max_output_tokens": 24, "temperature": 0, **options}
    with client.responses.create(input=given, stream=True, **options) as stream:
        return list(stream)


def texts_of(item: Any) -> list[str]:
    return [part.text for part in item.content or ()]


def starts_of(item: Any) -> list[str]:
    """Return the first words of an item: later words may differ between passes of another size."""
    return [text[: 12 if item.type == "function_call" else 20] for text in words_of(item)]


def words_of(item: Any) -> list[str]:
    """Return all words of an item; equal words have an equal number of tokens."""
    return [item.arguments] if item.type == "function_call" else texts_of(item)


def test_a_response_has_thinking_and_text_as_items(client: openai.OpenAI) -> None:
    """Cut off here by its limit, and counted."""
    response = respond(client)
    thinking, message = response.output
    assert isinstance(thinking, ResponseReasoningItem)
    assert isinstance(message, ResponseOutputMessage)
    assert (response.object, response.model, response.id[:5]) == ("response", "tale", "resp_")
    assert (response.status, message.status, thinking.status) == ("incomplete", "incomplete", "completed")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text == "".join(texts_of(message)) != ""
    assert "".join(texts_of(thinking)) != ""
    assert "think>" not in response.output_text
    usage = response.usage
    assert usage is not None
    assert (usage.output_tokens, usage.total_tokens) == (24, usage.input_tokens + 24)
    assert 0 < usage.output_tokens_details.reasoning_tokens < 24


def test_a_response_that_ends_by_itself_is_completed(client: openai.OpenAI) -> None:
    """All its items are."""
    response = respond(client, "Hello.", max_output_tokens=400)
    assert (response.status, response.incomplete_details, response.error) == ("completed", None, None)
    assert {item.status for item in response.output} == {"completed"}  # type: ignore[union-attr]
    assert response.completed_at is not None
    assert response.completed_at >= response.created_at


def test_the_request_is_repeated_in_the_response(client: openai.OpenAI) -> None:
    """As OpenAI's API does."""
    response = respond(
        client,
        instructions="You tell tales.",
        metadata={"kind": "test"},
        tools=[WEATHER],
        tool_choice="none",
        parallel_tool_calls=False,
        reasoning={"effort": "low"},
        top_p=0.5,
    )
    assert (response.instructions, response.metadata) == ("You tell tales.", {"kind": "test"})
    assert (response.temperature, response.top_p, response.max_output_tokens) == (0, 0.5, 24)
    assert (response.tool_choice, response.parallel_tool_calls) == ("none", False)
    assert response.reasoning is not None
    assert (response.tools[0].name, response.reasoning.effort) == ("weather", "low")  # type: ignore[union-attr]
    assert response.truncation == "disabled"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_output_tokens": 400},
        {"given": QUESTION, "tools": [WEATHER], "max_output_tokens": 200},
        {"given": QUESTION, "tools": [WEATHER], "tool_choice": "required", "max_output_tokens": 200},
        {"given": QUESTION, "tools": [WEATHER], "tool_choice": "required", "max_output_tokens": 12},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    ],
)
def test_streamed_equals_whole(client: openai.OpenAI, options: dict[str, Any]) -> None:
    """Item by item: the sum of the deltas, the done events, and the response without a stream."""
    options = {"extra_body": {"cache_prompt": False}, **options}
    whole, events = respond(client, **options), streamed(client, **options)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last.type == ("response.completed" if whole.status == "completed" else "response.incomplete")
    assert [item.type for item in last.response.output] == [item.type for item in whole.output]
    assert [item.status for item in last.response.output] == [item.status for item in whole.output]
    first, second = (
        [item for entry in some for item in starts_of(entry)] for some in (last.response.output, whole.output)
    )
    assert first == second
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == last.response.output
    for index, item in enumerate(last.response.output):
        mine = [event for event in events if getattr(event, "output_index", None) == index]
        assert {event.item_id for event in mine if hasattr(event, "item_id")} == {item.id}
        deltas = "".join(event.delta for event in mine if event.type.endswith(".delta"))
        assert deltas == (item.arguments if item.type == "function_call" else "".join(texts_of(item)))
        assert (mine[0].type, mine[-1].type) == ("response.output_item.added", "response.output_item.done")
    if all(words_of(item) == words_of(two) for item, two in zip(last.response.output, whole.output, strict=True)):
        assert last.response.usage.output_tokens == whole.usage.output_tokens  # type: ignore[union-attr]


def test_the_stream_helper_of_the_package_accumulates_the_response(client: openai.OpenAI) -> None:
    """With its own checks of identities and order."""
    with client.responses.stream(model="tale", input="Hello.", temperature=0, max_output_tokens=400) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert final.status == "completed"
    assert final.output_text == deltas != ""


class Person(pydantic.BaseModel):
    """The type that `parse` gets, bounded so that it ends within the tokens of a response."""

    name: str = pydantic.Field(max_length=60)
    age: int = pydantic.Field(ge=0, le=150)


def test_structured_output_is_parsed_by_the_package(client: openai.OpenAI) -> None:
    """The schema goes through text.format."""
    response = client.responses.parse(
        model="tale", input="Who is the fox?", text_format=Person, temperature=0, max_output_tokens=400
    )
    assert response.status == "completed"
    assert isinstance(response.output_parsed, Person)
    assert Person.model_validate_json(response.output_text) == response.output_parsed


def test_any_json_object_may_be_asked_for(client: openai.OpenAI) -> None:
    """text.format of the type json_object."""
    response = respond(
        client, text={"format": {"type": "json_object"}}, max_output_tokens=400, extra_body={"max_tokens": None}
    )
    if response.status == "completed":
        assert isinstance(json.loads(response.output_text), dict)
    else:
        assert response.output_text.lstrip().startswith("{")


def test_a_call_goes_round_by_items(client: openai.OpenAI) -> None:
    """The model calls, the client sends the output of the response and the result back, the model says something."""
    first = respond(client, QUESTION, tools=[WEATHER], max_output_tokens=200)
    (call,) = [item for item in first.output if isinstance(item, ResponseFunctionToolCall)]
    assert (call.name, json.loads(call.arguments), first.status) == ("weather", {"city": "Paris"}, "completed")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny, 21 degrees"}
    conversation: list[Any] = [{"role": "user", "content": QUESTION}]
    conversation += [item.model_dump(exclude_none=True) for item in first.output]
    second = respond(client, [*conversation, result], tools=[WEATHER], max_output_tokens=200)
    assert second.output_text.strip()
    by_id = respond(client, [result], previous_response_id=first.id, tools=[WEATHER], max_output_tokens=200)
    assert by_id.usage is not None
    assert second.usage is not None
    assert by_id.usage.input_tokens == second.usage.input_tokens
    assert by_id.previous_response_id == first.id


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
    ],
)
def test_a_call_can_be_required(client: openai.OpenAI, choice: Any) -> None:
    """Of any tool, or of one: then others are not offered."""
    other = {**WEATHER, "name": "other"}
    response = respond(client, QUESTION, tools=[other, WEATHER], tool_choice=choice, max_output_tokens=300)
    calls = [item for item in response.output if isinstance(item, ResponseFunctionToolCall)]
    assert calls
    if choice != "required":
        assert {call.name for call in calls} == {"weather"}


def test_logprobs_match_the_tokens_of_the_text(client: openai.OpenAI) -> None:
    """Not of thinking, in a stream as without one."""
    options: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response, events = respond(client, **options), streamed(client, **options)
    part = response.output[-1].content[0]  # type: ignore[union-attr, index]
    assert isinstance(part, ResponseOutputText)
    assert part.logprobs
    assert b"".join(bytes(token.bytes) for token in part.logprobs).decode().strip() == part.text.strip()
    assert all(len(token.top_logprobs) == 2 for token in part.logprobs)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    entries = [token.token for event in deltas for token in event.logprobs]
    last = events[-1].response.output[-1].content[0]
    assert entries == [token.token for token in last.logprobs]
    assert entries[:3] == [
        token.token for token in part.logprobs[:3]
    ]  # later ones may differ between passes of another size
    assert all(event.logprobs == [] for event in streamed(client) if event.type == "response.output_text.delta")


def test_thinking_has_a_budget(client: openai.OpenAI) -> None:
    """Of llama-server's name; 0 is no thinking."""
    budgets: list[Any] = [{"extra_body": {"reasoning_budget_tokens": number}} for number in (0, 2)]
    none, some = (respond(client, **options) for options in budgets)
    assert [item.type for item in none.output] == ["message"]
    for response, most in ((none, 0), (some, 3)):
        assert response.usage is not None
        assert response.usage.output_tokens_details.reasoning_tokens <= most


def test_instructions_are_a_system_message_and_count(client: openai.OpenAI) -> None:
    """As `input_tokens` counts them."""
    messages: Any = [{"role": "system", "content": "You tell tales."}, {"role": "user", "content": STORY}]
    counts = [
        client.responses.input_tokens.count(model="tale", **given).input_tokens
        for given in (
            {"input": STORY},
            {"input": STORY, "instructions": "You tell tales."},
            {"input": messages},
            {"input": STORY, "tools": [WEATHER]},
        )
    ]
    assert counts[0] < counts[1] == counts[2]
    assert counts[0] < counts[3]
    for given, count in (({}, counts[0]), ({"instructions": "You tell tales."}, counts[1])):
        usage = respond(client, max_output_tokens=1, **given).usage
        assert usage is not None
        assert usage.input_tokens == count


def test_the_routes_without_a_version_are_the_same(world: OpenAIServer) -> None:
    """As llama-server has them, errors included."""
    with world.client() as client:
        made = client.post("/responses", json={"input": STORY, "max_output_tokens": 4}).json()
        counted = client.post("/responses/input_tokens", json={"input": STORY}).json()
        refused = client.post("/responses", json={"input": STORY, "max_output_tokens": 0})
    assert made["usage"]["input_tokens"] == counted["input_tokens"]
    assert counted["object"] == "response.input_tokens"
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_output_tokens")


def test_a_stream_is_read_again_by_its_conversation(world: OpenAIServer) -> None:
    """With the header X-Conversation-Id, from any byte; its numbers are as without."""
    body = {"input": STORY, "max_output_tokens": 8, "stream": True}
    with world.client() as client:
        sent = client.post("/v1/responses", json=body, headers={"X-Conversation-Id": "talk"}).content
        again = client.get("/v1/stream", params={"conv_id": "talk", "from": 7}).content
        client.delete("/v1/stream", params={"conv_id": "talk"})
    assert again == sent[7:]
    lines = [line for line in sent.decode().splitlines() if line.startswith("data: ")]
    numbers = [json.loads(line.removeprefix("data: "))["sequence_number"] for line in lines]
    assert numbers == list(range(len(numbers)))


def test_timings_come_with_deltas_on_request(world: OpenAIServer) -> None:
    """As llama-server has them: beside the delta, and beside the last response."""
    body = {"input": STORY, "max_output_tokens": 8, "stream": True, "timings_per_token": True}
    with world.client() as client:
        text = client.post("/v1/responses", json=body).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    names = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
    assert names == [event["type"] for event in events]
    assert all("predicted_per_second" in event["timings"] for event in events if event["type"].endswith(".delta"))
    assert events[-1]["timings"]["predicted_n"] == 8
    assert "[DONE]" not in text


def test_the_python_of_the_guide_prints_two_responses(world: OpenAIServer, capsys: pytest.CaptureFixture[str]) -> None:
    """Whole and as a stream, with the URL of the tests' server in place of the guide's."""
    page, address = Path(__file__).parents[2] / "docs" / "guide" / "responses.md", "http://127.0.0.1:8080"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert address in block
    names: dict[str, Any] = {}
    exec(compile(block.replace(address, world.url), str(page), "exec"), names)
    names["client"].close()
    whole, _, streamed_text = capsys.readouterr().out.partition("\n")
    assert whole.strip()
    assert streamed_text.strip()


# ---- the store


def test_a_stored_response_is_handed_out_until_it_is_deleted(client: openai.OpenAI) -> None:
    """As it was made, whether streamed or not."""
    whole, last = respond(client), streamed(client)[-1].response
    for made in (whole, last):
        found = client.responses.retrieve(made.id)
        assert (found.id, found.output, found.usage) == (made.id, made.output, made.usage)
        client.responses.delete(made.id)
        for use in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                use(made.id)


def test_a_response_is_not_stored_where_the_request_says_so(client: openai.OpenAI) -> None:
    """By store: false."""
    response = respond(client, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    assert response.model_extra is not None
    assert response.model_extra["store"] is False


def test_input_items_match_the_conversation(client: openai.OpenAI) -> None:
    """By pages, the latest first; with ids for items that had none."""
    first = respond(
        client,
        [
            {"role": "user", "content": STORY},
            {"role": "assistant", "content": "No."},
            {"role": "user", "content": "Please."},
        ],
    )
    second = respond(client, "Go on.", previous_response_id=first.id)
    items = list(client.responses.input_items.list(second.id, order="asc", limit=2))
    assert len(items) == 4 + len(first.output)
    assert [item.id for item in items[3:-1]] == [item.id for item in first.output]
    assert all(item.id for item in items)
    assert [item.id for item in client.responses.input_items.list(second.id)] == [item.id for item in items][::-1]
    page = client.responses.input_items.list(second.id, order="asc", limit=2, after=items[0].id or "")
    assert ([item.id for item in page.data], page.has_more) == ([item.id for item in items[1:3]], True)
    with pytest.raises(openai.BadRequestError, match="after"):
        client.responses.input_items.list(second.id, after="nothing")


def test_an_item_can_be_named_in_place_of_itself(client: openai.OpenAI) -> None:
    """While a response that has it is stored."""
    first = respond(client)
    named: list[Any] = [{"type": "item_reference", "id": first.output[-1].id}, {"role": "user", "content": "Go on."}]
    sent: list[Any] = [first.output[-1].model_dump(exclude_none=True), named[1]]
    counts = [client.responses.input_tokens.count(model="tale", input=item).input_tokens for item in (named, sent)]
    assert counts[0] == counts[1]
    with pytest.raises(openai.BadRequestError, match=r"input\[0\]\.id"):
        respond(client, [{"type": "item_reference", "id": "msg_unknown"}, named[1]])


def test_a_conversation_goes_on_by_its_last_response(client: openai.OpenAI) -> None:
    """Its instructions do not; its prefix is cached; an earlier response may be gone."""
    first = respond(client, instructions="You tell tales.")
    second = respond(client, "Go on.", previous_response_id=first.id)
    client.responses.delete(first.id)
    third = respond(client, "And then?", previous_response_id=second.id)
    assert second.instructions is None
    assert third.usage is not None
    assert second.usage is not None
    assert third.usage.input_tokens > second.usage.input_tokens
    assert third.usage.input_tokens_details.cached_tokens > 0
    with pytest.raises(openai.BadRequestError, match="previous_response_id") as caught:
        respond(client, "Go on.", previous_response_id=first.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


def test_tenants_have_stores_of_their_own() -> None:
    """Responses, items and pages of another tenant are not there."""
    keys = tuple(ApiKey(secret=name, tenant=name) for name in ("one", "two"))
    with OpenAIServer(responses_store=4, api_keys=keys) as world:
        mine, other = (
            openai.OpenAI(base_url=f"{world.url}/v1", api_key=key.secret, max_retries=0, timeout=60) for key in keys
        )
        with mine, other:
            made = respond(mine)
            assert mine.responses.retrieve(made.id).id == made.id
            for use in (other.responses.retrieve, other.responses.delete, other.responses.input_items.list):
                with pytest.raises(openai.NotFoundError):
                    use(made.id)
            with pytest.raises(openai.BadRequestError):
                respond(other, "Go on.", previous_response_id=made.id)
            with pytest.raises(openai.BadRequestError):
                respond(other, [{"type": "item_reference", "id": made.output[0].id}])
            keyless = httpx.get(f"{world.url}/v1/responses/{made.id}")
            assert keyless.status_code == 401
            assert mine.responses.retrieve(made.id).id == made.id


def test_only_the_output_is_encoded_on_the_event_loop(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """The input is encoded in the thread that parses it, and the conversation before not again."""
    encoded: list[tuple[bool, int]] = []
    encode = EncodedItems.of

    def recorded(items: list[Any]) -> EncodedItems:
        is_on_loop = asyncio._get_running_loop() is not None
        encoded.append((is_on_loop, sum(item.get("role") == "user" for item in items)))
        return encode(items)

    monkeypatch.setattr(EncodedItems, "of", recorded)
    first = streamed(client, [{"role": "user", "content": "One."}] * 3)[-1].response
    second = streamed(client, "Two.", previous_response_id=first.id)[-1].response
    assert encoded == [(False, 3), (True, 0), (False, 1), (True, 0)]
    assert len(client.responses.input_items.list(second.id, limit=100).data) == 4 + len(first.output)
    encoded.clear()
    streamed(client, store=False)
    assert encoded == []


def test_without_a_store_the_flag_is_named(bare: OpenAIServer) -> None:
    """store: true is accepted with a warning, as in llama-server; fields that need a store are refused."""
    with bare.openai() as client:
        response = respond(client, store=True)
        assert response.model_extra is not None
        assert response.model_extra["store"] is False
        assert any("--responses-store" in warning for warning in response.model_extra["warnings"])
        assert "warnings" not in (respond(client).model_extra or {})
        with pytest.raises(openai.BadRequestError, match="--responses-store"):
            respond(client, previous_response_id=response.id)
        with pytest.raises(openai.NotFoundError, match="--responses-store"):
            client.responses.retrieve(response.id)


def test_a_conversation_that_grows_beyond_the_bounds_is_answered_and_not_stored() -> None:
    """With a warning that has the flag."""
    with OpenAIServer(responses_store=4, responses_store_bytes=2000) as world, world.openai() as client:
        small = respond(client, "Hi.", max_output_tokens=1)
        assert client.responses.retrieve(small.id).id == small.id
        large = respond(client, "Hi. " * 300, max_output_tokens=1)
        assert large.model_extra is not None
        assert large.model_extra["store"] is False
        assert any("--responses-store-bytes" in warning for warning in large.model_extra["warnings"])
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(large.id)
        assert client.responses.retrieve(small.id).id == small.id


# ---- limits and failures


def test_truncation_leaves_out_the_first_messages(world: OpenAIServer, client: openai.OpenAI) -> None:
    """With the instructions kept; "disabled", the default, refuses prompts that are too long."""
    long: list[Any] = [{"role": "user", "content": f"Number {number}. " + "A fox ran. " * 30} for number in range(40)]
    long.append({"role": "user", "content": "Hello."})
    with pytest.raises(openai.BadRequestError) as caught:
        respond(client, long)
    assert caught.value.code == "context_length_exceeded"
    response = respond(client, long, truncation="auto", instructions="You tell tales.", max_output_tokens=8)
    assert response.usage is not None
    assert response.usage.input_tokens + 8 <= world.engine.limits.max_positions
    assert response.usage.input_tokens > world.engine.limits.max_positions // 2
    assert response.model_extra is not None
    assert any(warning.startswith("truncation: the first") for warning in response.model_extra["warnings"])
    assert "warnings" not in (respond(client, truncation="auto").model_extra or {})


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "must be given"),
        ({"input": []}, "input", "at least one"),
        ({"input": 5}, "input", "text or a list"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input", "images"),
        ({"input": [{"role": "user", "content": 5}]}, "input", "input[0].content"),
        ({"input": [{"type": "computer_call", "call_id": 5}]}, "input", "input[0].call_id"),
        ({"input": "x", "tools": [{"name": "f"}]}, "tools", "tools[0].type"),
        ({"input": "x", "tools": [{"type": "web_search"}], "tool_choice": "any"}, "tool_choice", "'web_search' are left out"),
({"input": "x", "tools": [{**WEATHER, "parameters": 5}]}, "tools", "tools[0].parameters"),
        ({"input": "x", "tools": [WEATHER], "tool_choice": {"type": "file_search"}}, "tool_choice", "file_search"),
        ({"input": "x", "tools": [WEATHER], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "'g'"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text", "json_schema"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "x"}}}, "text", "schema"),
        ({"input": "x", "conversation": "conv_1"}, "conversation", "previous_response_id"),
        ({"input": "x", "prompt": {"id": "p"}}, "prompt", "instructions"),
        ({"input": "x", "include": [5]}, "include", ""),
        ({"input": "x", "truncation": "left"}, "truncation", "auto"),
        ({"input": "x", "metadata": {"a": 1}}, "metadata", "text"),
        ({"input": "x", "n": 2}, "n", ""),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens", ""),
        ({"input": "x", "reasoning": {"effort": 3}}, "reasoning", ""),
        ({"input": "x", "max_output_tokens": 2.5}, "max_output_tokens", "integer"),
        ({"input": "x", "previous_response_id": "resp_x"}, "previous_response_id", "resp_x"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_refused_by_the_field(world: OpenAIServer, body: Any, param: str, words: str) -> None:
    """In OpenAI's shape, also for a stream; the server goes on."""
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        with world.client() as client:
            response = client.post(path, json={"max_output_tokens": 4, "stream": True, **body})
        error = response.json()["error"]
        assert (response.status_code, error["type"]) == (400, "invalid_request_error")
        assert error["param"] == param
        assert words in error["message"]
    with world.openai() as fine:
        assert respond(fine, max_output_tokens=1).id


def test_fields_without_a_meaning_are_named_in_warnings(client: openai.OpenAI) -> None:
    """And repeated in OpenAI's places."""
    response = respond(
        client,
        user="me",
        prompt_cache_key="k",
        service_tier="flex",
        max_tool_calls=3,
        reasoning={"summary": "auto"},
        include=["reasoning.encrypted_content"],
        extra_body={"top_logprobs": 3, "return_progress": False},
    )
    assert (response.user, response.prompt_cache_key) == ("me", "k")
    assert response.model_extra is not None
    words = " ".join(response.model_extra["warnings"])
    for name in (
        "user",
        "prompt_cache_key",
        "service_tier",
        "max_tool_calls",
        "reasoning.summary",
        "include",
        "top_logprobs",
    ):
        assert name in words


def test_a_failure_in_the_middle_of_a_stream_is_an_error_and_a_failed_response(world: OpenAIServer) -> None:
    """Here by a deadline: an error event with our code, then response.failed with the text so far."""
    body = {"input": STORY, "stream": True, "timeout_s": 0.3, **FOREVER}
    with world.client() as client:
        text = client.post("/v1/responses", json=body).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    error, failed = events[-2:]
    assert (error["type"], error["code"]) == ("error", "deadline")
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"]["code"] == "server_error"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    with world.client() as client:
        whole = client.post("/v1/responses", json={**body, "stream": False})
        assert (whole.status_code, whole.json()["error"]["code"]) == (504, "deadline")
        assert client.get(f"/v1/responses/{failed['response']['id']}").status_code == 404


LONG_CITY = {"type": "object", "properties": {"city": {"type": "string", "minLength": 500, "maxLength": 900}}}


@pytest.mark.parametrize("tools", [[], [{**WEATHER, "parameters": {**LONG_CITY, "required": ["city"]}}]])
def test_leaving_a_stream_frees_its_slot(world: OpenAIServer, tools: Any) -> None:
    """In the middle of a text or of a call."""
    options: dict[str, Any] = {"tools": tools} if tools else {}
    request_id = f"left-{len(tools)}"
    forever = {"timeout_s": 60, "temperature": 0} if tools else {**FOREVER, "timeout_s": 60}
    wanted = "response.function_call_arguments.delta" if tools else "response.output_text.delta"

    async def leave() -> None:
        async with world.async_openai() as client:
            stream = await client.responses.create(
                model="tale",
                input=QUESTION if tools else STORY,
                stream=True,
                extra_headers={"x-request-id": request_id},
                extra_body=forever,
                **options,
            )
            async for event in stream:
                if event.type == wanted:
                    break
            await stream.close()

    with world.watch.held(64):  # fewer than the call has tokens, more than come before its arguments
        asyncio.run(leave())
        world.wait_closed(request_id)
    assert world.watch.ending(request_id).reason == FinishReason.CANCELLED
    world.until(lambda: not any(slot.is_processing for slot in world.engine.slots()))


# ---- what agents send

AGENT: dict[str, Any] = {
    "tools": [
        {**WEATHER, "strict": False},
        {
            "type": "namespace",
            "name": "agents",
            "description": "Agents at work.",
            "tools": [{**WEATHER, "name": "spawn"}, {**WEATHER, "name": "wait"}],
        },
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Edits files.",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: patch"},
        },
        {"type": "tool_search", "execution": "client", "parameters": {"type": "object", "properties": {}}},
        {"type": "web_search", "external_web_access": True},
    ],
    "parallel_tool_calls": True,
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "client_metadata": {"turn_id": "t1", "session_id": "s1"},
    "text": {"verbosity": "low"},
}


def agent_input(*more: dict[str, Any]) -> list[dict[str, Any]]:
    parts = [{"type": "input_text", "text": "You are an agent."}, {"type": "input_text", "text": "Be brief."}]
    return [
        {"type": "message", "id": "msg_1", "role": "developer", "content": parts},
        {"type": "message", "id": "msg_2", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
        *more,
    ]


def events_of(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream, numbered without a gap."""
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_an_agents_request_is_served_and_says_what_is_left_out(world: OpenAIServer) -> None:
    """Its namespace, its custom tool, tools that OpenAI runs, and its notes about itself."""
    with world.client() as client:
        response = client.post("/v1/responses", json={"input": agent_input(), "max_output_tokens": 4, **AGENT})
    assert response.status_code == 200
    body = response.json()
    assert body["tools"][1] == AGENT["tools"][1]
    words = " ".join(body["warnings"])
    for name in ("'tool_search'", "'web_search'", "Lark", "reasoning.encrypted_content"):
        assert name in words
    assert "client_metadata" not in words


def test_a_call_of_a_namespace_goes_round(world: OpenAIServer) -> None:
    """It has name and namespace, and is the same function when it is sent back."""
    choice = {"type": "function", "name": "spawn", "namespace": "agents"}
    body = {"input": agent_input(), "max_output_tokens": 300, "temperature": 0, "tool_choice": choice, **AGENT}
    with world.client() as client:
        events = events_of(client.post("/v1/responses", json={**body, "stream": True}).text)
        (call,) = [item for item in events[-1]["response"]["output"] if item["type"] == "function_call"]
        assert (call["name"], call["namespace"]) == ("spawn", "agents")
        assert set(json.loads(call["arguments"])) == {"city"}
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "started"}
        counts = [
            client.post("/v1/responses/input_tokens", json={"input": agent_input(item, result), **AGENT}).json()
            for item in (call, {**call, "name": "agents__spawn", "namespace": None})
        ]
    assert counts[0]["input_tokens"] == counts[1]["input_tokens"]


def test_a_call_of_a_custom_tool_goes_round(world: OpenAIServer) -> None:
    """As an item with an input, streamed piece by piece."""
    pattern = {"type": "grammar", "syntax": "regex", "definition": "[a-f]{3,6}"}
    tools = [{**AGENT["tools"][2], "format": pattern}, WEATHER]
    choice = {"type": "custom", "name": "apply_patch"}
    body = {"input": agent_input(), "max_output_tokens": 300, "temperature": 0, **AGENT, "tools": tools}
    with world.client() as client:
        response = client.post("/v1/responses", json={**body, "stream": True, "tool_choice": choice})
        events = events_of(response.text)
        (call,) = [item for item in events[-1]["response"]["output"] if item["type"] == "custom_tool_call"]
        assert (call["name"], call["status"]) == ("apply_patch", "completed")
        deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
        (done,) = [event for event in events if event["type"] == "response.custom_tool_call_input.done"]
        assert "".join(deltas) == call["input"] == done["input"] != ""
        assert '"input"' not in call["input"]
        result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "Done."}
        second = client.post("/v1/responses", json={**body, "input": agent_input(call, result), "max_output_tokens": 4})
    assert second.status_code == 200
    assert second.json()["usage"]["input_tokens"] > events[-1]["response"]["usage"]["input_tokens"]


def test_an_idle_stream_gets_events_that_clients_count() -> None:
    """The response as it is, with numbers that the events after it continue; its beginning comes before the first token."""
    body = {"input": STORY, "max_output_tokens": 30, "stream": True}
    with OpenAIServer(heartbeat_s=0.01) as world, world.client() as client:
        holding = ExitStack()
        holding.enter_context(world.watch.held(1))
        with holding, client.stream("POST", "/v1/responses", json=body) as response:
            lines, text = response.iter_lines(), ""
            while text.count("event: response.in_progress") < 4:
                text += next(lines) + "\n"
            assert "delta" not in text
            holding.close()
            text += "\n".join(lines)
    events = events_of(text)
    assert ": ping" not in text
    assert [event["type"] for event in events[:5]] == ["response.created", *["response.in_progress"] * 4]
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1
    assert events[-1]["type"] in ("response.completed", "response.incomplete")


def test_the_stream_helper_of_the_package_takes_heartbeats() -> None:
    """Before and in the middle of items."""
    with OpenAIServer(heartbeat_s=0.001) as beating, beating.openai() as client:
        with client.responses.stream(model="tale", input="Hello.", temperature=0, max_output_tokens=400) as stream:
            types = [event.type for event in stream]
            final = stream.get_final_response()
    assert types.count("response.in_progress") > 1
    assert final.output_text


def test_an_image_in_a_result_is_a_text_for_a_model_that_cannot_see(world: OpenAIServer) -> None:
    """As agents send screenshots; in the user's last message it is refused."""
    image = {"type": "input_image", "image_url": URL}
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"}
    output = {
        "type": "function_call_output",
        "call_id": "c1",
        "output": [{"type": "input_text", "text": "See:"}, image],
    }
    made = {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": URL.partition("base64,")[2]}
    with world.client() as client:
        served = client.post("/v1/responses", json={"input": agent_input(call, output, made), "max_output_tokens": 2})
        refused = client.post("/v1/responses", json={"input": [{"role": "user", "content": [image]}]})
    assert served.status_code == 200
    (warning,) = [text for text in served.json()["warnings"] if "image" in text]
    assert "and for 1 more" in warning
    assert refused.status_code == 400


def test_what_may_be_included_is_no_reason_to_refuse(client: openai.OpenAI) -> None:
    """Names that are not known are warnings."""
    response = respond(client, include=["x", "y", "x"], max_output_tokens=1)
    assert response.model_extra is not None
    assert [warning.split()[1] for warning in response.model_extra["warnings"] if "include: " in warning] == ["x", "y"]
