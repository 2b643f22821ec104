"""/v1/messages over the demo model, with the `anthropic` package."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import anthropic
import pytest
from tests.media_requests import DATA
from tests.server.conftest import DEMO_ENGINE
from tests.server.openai_world import OpenAIServer
from tests.server.running import RunningServer

from paceline.server.settings import ApiKey, ServerSettings
from paceline.streaming import FinishReason

pytestmark = pytest.mark.native

STORY: Any = [{"role": "user", "content": "Tell me a story about a fox."}]
ASKED: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER: Any = {
    "name": "weather",
    "description": "The weather now.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
PLAIN: Any = {"type": "disabled"}
WEB_SEARCH: Any = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}


@pytest.fixture
def client(world: OpenAIServer) -> Iterator[anthropic.Anthropic]:
    with world.anthropic() as client:
        yield client


def options_of(more: dict[str, Any]) -> dict[str, Any]:
    """Greedy, which newer versions of the package have no parameter for."""
    extra = {"temperature": 0, **more.pop("extra_body", {})}
    return {"model": "tale", "max_tokens": 8, "messages": STORY, "extra_body": extra, **more}


def create(client: anthropic.Anthropic, **more: Any) -> anthropic.types.Message:
    message = client.messages.create(**options_of(more))
    assert isinstance(message, anthropic.types.Message)
    return message


def streamed(client: anthropic.Anthropic, **more: Any) -> tuple[list[Any], anthropic.types.Message]:
    """The events, and the message that the package makes of them."""
    with client.messages.stream(**options_of(more)) as stream:
        events = list(stream)
        return events, stream.get_final_message()


def contents(message: anthropic.types.Message) -> list[dict[str, Any]]:
    """The blocks, without the ids of calls, which are new every time, and without unset members."""
    blocks = [block.model_dump(exclude_none=True) for block in message.content]
    return [{name: value for name, value in block.items() if name not in ("id", "parsed_output")} for block in blocks]


def test_models_are_listed_as_anthropics(client: anthropic.Anthropic) -> None:
    """With a name to show and the time of creation, in a page that is the last."""
    page = client.models.list()
    (listed,) = page.data
    assert (listed.id, listed.display_name, listed.type, page.has_more) == ("tale", "tale", "model", False)
    assert listed.created_at.year > 2000
    assert client.models.retrieve("tale") == listed


def test_a_message_has_anthropics_shape(world: OpenAIServer, client: anthropic.Anthropic) -> None:
    """Its prompt is that of the same conversation in OpenAI's API."""
    message = create(client, thinking=PLAIN, system="You tell tales.")
    assert (message.type, message.role, message.model) == ("message", "assistant", "tale")
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert [block.type for block in message.content] == ["text"]
    assert message.id == f"msg_{message._request_id}"
    messages = [{"role": "system", "content": "You tell tales."}, *STORY]
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, "chat_template_kwargs": {"enable_thinking": False}}
    with world.client() as plain:
        other = plain.post("/v1/chat/completions", json=body).json()
    usage = message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == other["usage"]["prompt_tokens"]
    assert usage.output_tokens == 8
    assert contents(message) == [{"type": "text", "text": other["choices"][0]["message"]["content"]}]


def test_a_prompt_is_read_from_the_cache_the_second_time(client: anthropic.Anthropic) -> None:
    """As the usage reports, whole and streamed."""
    words = [{"role": "user", "content": "Tell me a story about a hen, a goose, a duck and a very old owl."}]
    first = create(client, messages=words).usage
    (second, third) = (create(client, messages=words).usage, streamed(client, messages=words)[1].usage)
    for usage in (second, third):
        assert usage.cache_read_input_tokens
        assert usage.input_tokens + usage.cache_read_input_tokens == first.input_tokens + (
            first.cache_read_input_tokens or 0
        )


@pytest.mark.parametrize("thinking", [PLAIN, {"type": "enabled", "budget_tokens": 1024}], ids=["plain", "thinking"])
def test_a_stream_makes_the_message_that_is_returned_whole(client: anthropic.Anthropic, thinking: Any) -> None:
    """Text and thinking, each in a block of its own."""
    options = {"thinking": thinking, "max_tokens": 40}
    whole = create(client, **options)
    events, message = streamed(client, **options)
    assert contents(message) == contents(whole)
    assert message.stop_reason == whole.stop_reason
    assert message.usage.output_tokens == whole.usage.output_tokens
    kinds = [event.type for event in events if event.type not in ("text", "thinking", "signature")]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    expected = ["text"] if thinking is PLAIN else ["thinking", "text"]
    assert [block.type for block in message.content] == expected[: len(message.content)]
    assert message.content[0].type == expected[0]


@pytest.mark.parametrize(
    "choice",
    [None, {"type": "auto", "disable_parallel_tool_use": True}, {"type": "any"}, {"type": "tool", "name": "weather"}],
    ids=["default", "auto", "any", "named"],
)
def test_a_tool_is_used(client: anthropic.Anthropic, choice: Any) -> None:
    """Whole and streamed alike; the result is read in the next turn."""
    options: dict[str, Any] = {"tools": [WEATHER], "max_tokens": 100, "messages": ASKED}
    if choice is not None:
        options["tool_choice"] = choice
    whole = create(client, **options)
    assert whole.stop_reason == "tool_use"
    use = whole.content[-1]
    assert isinstance(use, anthropic.types.ToolUseBlock)
    assert (use.name, use.input) == ("weather", {"city": "Paris"})
    events, message = streamed(client, **options)
    assert contents(message) == contents(whole)
    assert message.stop_reason == "tool_use"
    pieces = [event.partial_json for event in events if event.type == "input_json"]
    assert json.loads("".join(pieces)) == {"city": "Paris"}

    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "rain, 12 degrees"}]}
    turns = [*ASKED, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    second = create(client, tools=[WEATHER], max_tokens=100, messages=turns)
    assert second.stop_reason == "end_turn"
    text = second.content[-1]
    assert isinstance(text, anthropic.types.TextBlock)
    assert "12" in text.text


def test_no_tool_is_used_where_none_may_be(client: anthropic.Anthropic) -> None:
    """With the tools in the request all the same."""
    message = create(client, tools=[WEATHER], tool_choice={"type": "none"}, max_tokens=60, messages=ASKED)
    assert all(block.type != "tool_use" for block in message.content)


def test_tools_of_anthropics_servers_are_left_out(client: anthropic.Anthropic) -> None:
    """The message has a warning, whole and streamed; the other tools are used."""
    for tools in ([WEB_SEARCH], [WEB_SEARCH, WEATHER]):
        options: dict[str, Any] = {"tools": tools, "tool_choice": {"type": "auto"}, "max_tokens": 60, "messages": ASKED}
        whole, (events, message) = create(client, **options), streamed(client, **options)
        for found in (whole, events[0].message):
            (warning,) = found.model_extra["warnings"]
            assert warning.startswith("tools[0]: tools of the type 'web_search_20250305'")
        expected = "tool_use" if len(tools) > 1 else "end_turn"
        assert (whole.stop_reason, message.stop_reason) == (expected, expected)


def test_anthropics_tool_runner_runs_tools_to_the_end(world: OpenAIServer) -> None:
    """It asks for a kept conversation, and sends all of it when it hears that there is none."""
    cities: list[str] = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """The weather now."""
        cities.append(city)
        return "rain, 12 degrees"

    with world.anthropic() as client:
        runner = client.beta.messages.tool_runner(model="tale", max_tokens=100, tools=[weather], messages=ASKED)
        replies = list(runner)
    assert [reply.stop_reason for reply in replies] == ["tool_use", "end_turn"]
    assert cities == ["Paris"]
    assert replies[-1].content[-1].text  # type: ignore[union-attr]


def test_blocks_without_a_place_in_templates_are_read_as_text(client: anthropic.Anthropic) -> None:
    """A document costs the tokens of its text, and a result of a server's tool its own."""
    document: Any = {"type": "document", "title": "Foxes", "source": {"type": "content", "content": "Foxes dig dens."}}
    search: Any = {
        "type": "web_search_tool_result",
        "tool_use_id": "s1",
        "content": [
            {"type": "web_search_result", "title": "Owls", "url": "https://a.example", "encrypted_content": "AAAA"}
        ],
    }

    def count(*blocks: Any) -> int:
        turns: Any = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": blocks}, *STORY]
        return client.messages.count_tokens(model="tale", messages=turns).input_tokens

    texts = (
        "<document>\ntitle: Foxes\nFoxes dig dens.\n</document>",
        "<web_search_tool_result>\ntitle: Owls\nurl: https://a.example\n</web_search_tool_result>",
    )
    assert count(document, search) == count(*({"type": "text", "text": text} for text in texts))


IMAGE: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
USE: Any = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Paris"}}
RESULT: Any = {"type": "tool_result", "tool_use_id": "t1", "content": "rain"}


@pytest.mark.parametrize(
    "turns",
    [
        [{"role": "user", "content": [IMAGE]}, {"role": "assistant", "content": "A fox."}, *STORY],
        [
            *ASKED,
            {"role": "assistant", "content": [USE]},
            {"role": "user", "content": [{**RESULT, "content": [IMAGE]}]},
        ],
        [*ASKED, {"role": "assistant", "content": [IMAGE]}, *STORY],
    ],
    ids=["earlier turn", "result", "assistant"],
)
def test_a_model_without_eyes_goes_on_after_an_image(client: anthropic.Anthropic, turns: Any) -> None:
    """The message says that it was not seen. In the last message of the user it is refused."""
    assert "image" in create(client, messages=turns).model_extra["warnings"][0]  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError, match="takes no images"):
        create(client, messages=[*turns, {"role": "user", "content": [IMAGE]}])


@pytest.mark.parametrize(
    "turns",
    [
        [{"role": "user", "content": [RESULT, {"type": "text", "text": "So?"}]}],
        [*ASKED, {"role": "assistant", "content": [USE]}, *STORY],
        [*ASKED, {"role": "assistant", "content": [USE]}],
        [
            *ASKED,
            {"role": "assistant", "content": [{**USE, "input": '{"city": "Pa'}]},
            {"role": "user", "content": [RESULT]},
        ],
        [*ASKED, {"role": "assistant", "content": None}, {"role": "user", "content": []}],
        [*ASKED, {"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "Hm."}, *STORY],
    ],
    ids=["no call", "no result", "ends with a call", "broken input", "empty", "system"],
)
def test_conversations_are_taken_as_clients_cut_them(client: anthropic.Anthropic, turns: Any) -> None:
    """With tools and without."""
    for tools in ([], [WEATHER]):
        message = create(client, messages=turns, tools=tools)
        assert message.usage.output_tokens > 0


def test_a_clients_stamp_keeps_no_prefix_from_being_shared(client: anthropic.Anthropic) -> None:
    """A new session finds the tools and the system prompt of the last session."""
    prompt = [{"type": "text", "text": "You are an agent that reads tales of foxes, hens, owls and geese. " * 5}]

    def usage(stamp: str, words: str) -> anthropic.types.Usage:
        system = [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.{stamp}; cc_entrypoint=cli;"},
            *prompt,
        ]
        return create(client, system=system, tools=[WEATHER], messages=[{"role": "user", "content": words}]).usage

    first, second = usage("197.c40", "Tell me of foxes."), usage("332.e8f", "What do owls eat?")
    assert first.cache_read_input_tokens is not None
    assert second.cache_read_input_tokens is not None
    num_prompt = second.input_tokens + second.cache_read_input_tokens
    assert second.cache_read_input_tokens > 0.8 * num_prompt


def test_more_tokens_than_the_context_has_may_be_asked_for(client: anthropic.Anthropic) -> None:
    """As agents do with every model."""
    message = create(client, max_tokens=32_000, messages=ASKED)
    assert message.stop_reason == "end_turn"


def test_a_stop_sequence_ends_the_message(client: anthropic.Anthropic) -> None:
    """It is named, and no part of the text."""
    whole = create(client, thinking=PLAIN, max_tokens=20).content[0]
    assert isinstance(whole, anthropic.types.TextBlock)
    word = whole.text.split()[3]
    for message in (
        create(client, thinking=PLAIN, max_tokens=20, stop_sequences=["never", word]),
        streamed(client, thinking=PLAIN, max_tokens=20, stop_sequences=["never", word])[1],
    ):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", word)
        assert contents(message) == [{"type": "text", "text": whole.text[: whole.text.index(word)]}]


def test_an_assistants_last_message_is_continued(client: anthropic.Anthropic) -> None:
    """And not repeated."""
    turns = [*STORY, {"role": "assistant", "content": "Once upon"}]
    for message in (create(client, messages=turns), streamed(client, messages=turns)[1]):
        assert [block.type for block in message.content] == ["text"]
        text = message.content[0]
        assert isinstance(text, anthropic.types.TextBlock)
        assert "Once" not in text.text
        assert message.usage.output_tokens == 8


def test_a_budget_ends_thinking(client: anthropic.Anthropic) -> None:
    """The text follows."""
    thinking = {"type": "enabled", "budget_tokens": 3}
    for message in (
        create(client, thinking=thinking, max_tokens=40),
        streamed(client, thinking=thinking, max_tokens=40)[1],
    ):
        thought, text = message.content
        assert isinstance(thought, anthropic.types.ThinkingBlock)
        assert isinstance(text, anthropic.types.TextBlock)
        assert 0 < len(thought.thinking.split()) <= 3
        assert text.text.strip()


def test_omitted_thinking_is_not_shown(client: anthropic.Anthropic) -> None:
    """Its block is there."""
    thinking = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    for message in (
        create(client, thinking=thinking, max_tokens=40),
        streamed(client, thinking=thinking, max_tokens=40)[1],
    ):
        assert contents(message)[0] == {"type": "thinking", "thinking": "", "signature": ""}


def test_a_schema_holds_the_text_to_its_shape(client: anthropic.Anthropic) -> None:
    """As output_config asks for it."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    wanted: Any = {"format": {"type": "json_schema", "schema": schema}}
    message = create(client, output_config=wanted, thinking=PLAIN, max_tokens=60)
    text = message.content[-1]
    assert isinstance(text, anthropic.types.TextBlock)
    assert json.loads(text.text)["a"] in (1, 2)


def test_tokens_are_counted_as_a_message_costs_them(client: anthropic.Anthropic) -> None:
    """With system prompt and tools; nothing is generated."""
    asked: Any = {"messages": ASKED, "tools": [WEATHER], "system": "Be brief."}
    counted = client.messages.count_tokens(model="tale", **asked).input_tokens
    usage = create(client, max_tokens=1, **asked).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert client.messages.count_tokens(model="tale", messages=ASKED).input_tokens < counted


def test_tokens_are_counted_with_the_servers_settings() -> None:
    """Without thinking the prompt is another one."""
    with OpenAIServer(reasoning_budget=0) as world, world.anthropic() as client:
        counted = client.messages.count_tokens(model="tale", messages=ASKED).input_tokens
        message = create(client, messages=ASKED)
        assert counted == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
        assert [block.type for block in message.content] == ["text"]
        thinking: Any = {"type": "enabled", "budget_tokens": 1024}
        assert client.messages.count_tokens(model="tale", messages=ASKED, thinking=thinking).input_tokens != counted


def test_no_tokens_fill_the_cache_alone(client: anthropic.Anthropic) -> None:
    """The message is empty."""
    message = create(client, max_tokens=0)
    assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "max_tokens", 0)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": []}, "messages"),
        ({"messages": STORY, "max_tokens": None}, "max_tokens"),
        ({"messages": STORY, "max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 5}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "content[0].source.type must be"),
        ({"messages": STORY, "tools": [WEB_SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}, "web_search_2025"),
        ({"messages": STORY, "tools": [WEB_SEARCH], "tool_choice": {"type": "any"}}, "all of tools were left out"),
        ({"messages": STORY, "tools": [{"type": 5, "name": "x"}]}, "tools[0].type"),
        ({"messages": STORY, "temperature": -3}, "temperature"),
        ({"messages": STORY, "top_k": 40.5}, "top_k"),
        ({"messages": [{"role": "user", "content": "x " * 9000}]}, "prompt is too long: "),
    ],
)  # fmt: skip
def test_a_refusal_has_anthropics_shape_and_names_the_field(world: OpenAIServer, body: Any, said: str) -> None:
    """Streamed or not."""
    for stream in (False, True):
        with world.client() as plain:
            response = plain.post("/v1/messages", json={"max_tokens": 5, **body, "stream": stream})
        assert response.status_code == 400
        found = response.json()
        assert (found["type"], found["error"]["type"]) == ("error", "invalid_request_error")
        assert said in found["error"]["message"]
        assert response.headers["request-id"] == response.headers["x-request-id"]


def test_the_package_raises_its_own_errors(client: anthropic.Anthropic) -> None:
    """With the request's id."""
    with pytest.raises(anthropic.BadRequestError, match="stop_sequences") as refusal:
        create(client, stop_sequences=["x" * 5000])
    assert refusal.value.request_id
    with pytest.raises(anthropic.NotFoundError):
        client.post("/v1/messages/batches", cast_to=object, body={})


def test_an_unknown_model_is_the_served_model(client: anthropic.Anthropic) -> None:
    """With a warning in the message, streamed or not."""
    message, (events, _) = create(client, model="claude-next"), streamed(client, model="claude-next")
    for found in (message, events[0].message):
        assert found.model == "claude-next"
        assert found.model_extra["warnings"] == ["model: the one model here is 'tale'; it was used"]


def test_a_key_is_sent_in_either_header() -> None:
    """Without one the error is Anthropic's."""
    settings = ServerSettings(engine_options=DEMO_ENGINE, api_keys=(ApiKey(secret="s3cret"),))
    with RunningServer(settings) as running:
        asked: Any = {"model": "m", "max_tokens": 1, "messages": STORY}
        for keys in ({"api_key": "s3cret"}, {"auth_token": "s3cret", "api_key": None}):
            with anthropic.Anthropic(base_url=running.url, max_retries=0, **keys) as client:
                assert client.messages.create(**asked).usage.output_tokens == 1
        with anthropic.Anthropic(base_url=running.url, max_retries=0, api_key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError) as refusal:
                client.messages.create(**asked)
        assert refusal.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]


def test_a_server_without_room_is_overloaded() -> None:
    """529 with the time to wait, and 413 for a body that is too large."""
    body = {"max_tokens": 500, "messages": STORY, "stream": True}
    with OpenAIServer({"num_slots": 1, "max_queue": 0}, max_body_bytes=2000) as world, world.client() as plain:
        with world.watch.held(), plain.stream("POST", "/v1/messages", json=body):
            full = plain.post("/v1/messages", json=body)
        large = plain.post("/v1/messages", content=b"x" * 3000)
    assert (full.status_code, full.json()["error"]["type"]) == (529, "overloaded_error")
    assert int(full.headers["retry-after"]) >= 1
    assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")


def test_a_failure_after_the_beginning_is_an_event(world: OpenAIServer) -> None:
    """The last one, with Anthropic's error object."""
    headers, body = {"x-request-id": "ended"}, {"max_tokens": 800, "messages": STORY, "stream": True}
    with world.client() as plain, world.client() as other:
        with world.watch.held():
            response = plain.send(plain.build_request("POST", "/v1/messages", json=body, headers=headers), stream=True)
            assert other.post("/v1/requests/ended/cancel").json()["cancelled"]
        lines = [line for line in response.iter_lines() if line]
        response.close()
    assert lines[0] == "event: message_start"
    assert lines[-2] == "event: error"
    error = json.loads(lines[-1].removeprefix("data: "))
    assert (error["type"], error["error"]["message"]) == ("error", "the request was cancelled")


def test_leaving_a_stream_within_a_tool_call_frees_its_slot(world: OpenAIServer) -> None:
    """With the asynchronous client."""
    schema = {"type": "object", "properties": {"words": {"type": "array", "minItems": 300}}, "required": ["words"]}
    asked: Any = {"messages": ASKED, "tools": [{"name": "say", "input_schema": schema}], "max_tokens": 2000}

    async def leave() -> str:
        async with world.async_anthropic() as client:
            options = options_of({**asked, "tool_choice": {"type": "any"}})
            async with client.messages.stream(**options) as stream:
                async for event in stream:
                    if event.type == "input_json":
                        return stream.current_message_snapshot.id.removeprefix("msg_")
        raise AssertionError("the stream had no tool call")

    with world.watch.held(64):
        request_id = asyncio.run(leave())
        world.wait_closed(request_id)
    assert world.watch.ending(request_id).reason is FinishReason.CANCELLED
    world.until(lambda: not any(slot.is_processing for slot in world.engine.slots()))


def test_pings_keep_an_idle_stream_alive() -> None:
    """As events, which the package skips."""
    with OpenAIServer(heartbeat_s=0.01) as world, world.watch.held(), world.client() as plain:
        body = {"max_tokens": 50, "messages": STORY, "stream": True}
        with plain.stream("POST", "/v1/messages", json=body) as response:
            for line in response.iter_lines():
                if line == "event: ping":
                    break
            else:
                pytest.fail("no ping")


def test_claude_code_gets_a_heartbeat_that_it_counts() -> None:
    """It leaves a stream that has only pings for five minutes. The message is the same as without."""
    headers = {"user-agent": "claude-cli/2.1.197 (external, sdk-cli)"}
    with OpenAIServer(heartbeat_s=0.01) as world, world.anthropic() as client, ExitStack() as stack:
        with world.watch.held(0):
            events = stack.enter_context(client.messages.stream(**options_of({"extra_headers": headers})))
            beat = next(event for event in events if event.type == "message_delta")
        message = events.get_final_message()
        assert beat.delta.stop_reason is None
        assert message.stop_reason == "max_tokens"
        assert contents(message) == contents(create(client))
