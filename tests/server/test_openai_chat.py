"""/v1/chat/completions over the demo model, with the `openai` package."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tests.server.openai_world import FOREVER, OpenAIServer

from paceline.streaming import FinishReason

pytestmark = pytest.mark.native

# Its reply to these has a clear winner for each token, so that noise in the kernels changes no token.
MESSAGES: Any = [
    {"role": "system", "content": "You tell tales."},
    {"role": "user", "content": "Tell me a story about a fox."},
]


@pytest.fixture
def client(world: OpenAIServer) -> Iterator[openai.OpenAI]:
    with world.openai() as client:
        yield client


def chat(client: openai.OpenAI, messages: Any = MESSAGES, **options: Any) -> openai.types.chat.ChatCompletion:
    options = {"model": "tale", "max_completion_tokens": 8, "temperature": 0, **options}
    return client.chat.completions.create(messages=messages, **options)


def streamed(client: openai.OpenAI, **options: Any) -> list[openai.types.chat.ChatCompletionChunk]:
    options = {"model": "tale", "max_completion_tokens": 8, "temperature": 0, **options}
    with client.chat.completions.create(messages=MESSAGES, stream=True, **options) as stream:
        return list(stream)


def test_a_conversation_is_rendered_by_its_template(world: OpenAIServer, client: openai.OpenAI) -> None:
    """By the engine's output after the prompt of the model's own template."""
    completion = chat(client, extra_body={"return_token_ids": True, "reasoning_format": "none"})
    chat_template = world.service.chat_format()
    ids = chat_template.encode(chat_template.render(MESSAGES))
    (choice,) = completion.choices
    assert choice.model_extra is not None
    assert choice.model_extra["prompt_token_ids"] == ids
    assert world.engine.tokenizer.decode(choice.model_extra["token_ids"]) == choice.message.content
    assert (choice.message.role, choice.finish_reason, choice.logprobs) == ("assistant", "length", None)
    assert (completion.object, completion.model, completion.id[:9]) == ("chat.completion", "tale", "chatcmpl-")
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (len(ids), 8)


def test_an_assistant_message_that_has_begun_is_continued_on_request(
    world: OpenAIServer, client: openai.OpenAI
) -> None:
    """As OpenAI has it, an assistant's message is whole by itself."""
    begun = [*MESSAGES, {"role": "assistant", "content": "Once"}]
    chat_template = world.service.chat_format()
    for asked, expected in (
        ({"continue_final_message": True}, {"continue_final_message": True}),
        ({}, {}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
    ):
        completion = chat(client, begun, extra_body={"return_token_ids": True, **asked})
        rendered = chat_template.render(begun, **expected)
        assert completion.choices[0].model_extra["prompt_token_ids"] == chat_template.encode(rendered)  # type: ignore[index]


def test_the_route_without_a_version_is_the_same(world: OpenAIServer) -> None:
    """As llama-server has it; its errors have OpenAI's shape, too."""
    body = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0}
    with world.client() as client:
        responses = [client.post(route, json=body).json() for route in ("/v1/chat/completions", "/chat/completions")]
        refused = client.post("/chat/completions", json={**body, "n": 0})
    first, second = (response["choices"] for response in responses)
    assert first == second
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")


def test_a_content_may_be_a_list_of_text_parts(client: openai.OpenAI) -> None:
    """It reads as the text does."""
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in MESSAGES]
    assert chat(client, parts).choices[0].message.content == chat(client).choices[0].message.content


def test_without_a_limit_a_completion_ends_where_the_model_or_the_context_does(client: openai.OpenAI) -> None:
    """It does not end after the library's default number of tokens."""
    completion = chat(client, max_completion_tokens=None, extra_body={**FOREVER, "temperature": 0})
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage is not None
    assert completion.usage.total_tokens >= 1024


@pytest.mark.parametrize("options", [{}, {"n": 2, "temperature": 1, "seed": 4}])
def test_streamed_deltas_joined_are_the_whole_message(client: openai.OpenAI, options: dict[str, Any]) -> None:
    """The first has the role, the last the reason."""
    whole, chunks = chat(client, **options), streamed(client, **options)
    assert {(chunk.object, chunk.id) for chunk in chunks} == {("chat.completion.chunk", chunks[0].id)}
    for choice in whole.choices:
        parts = [item for chunk in chunks for item in chunk.choices if item.index == choice.index]
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        assert [part.delta.role for part in parts] == ["assistant", *[None] * (len(parts) - 1)]
        assert [part.finish_reason for part in parts] == [*[None] * (len(parts) - 1), choice.finish_reason]


def test_the_usage_of_a_stream_comes_last_and_alone(client: openai.OpenAI) -> None:
    """On request."""
    *others, last = streamed(client, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 8
    assert all(chunk.usage is None for chunk in others)
    assert all(chunk.usage is None for chunk in streamed(client))


def test_logprobs_of_a_stream_match_the_whole(client: openai.OpenAI) -> None:
    """One record a token, with the bytes of each."""
    raw = {"reasoning_format": "none"}
    whole = chat(client, logprobs=True, top_logprobs=2, extra_body=raw).choices[0]
    assert whole.logprobs is not None
    content = whole.logprobs.content
    assert content is not None
    assert b"".join(bytes(part.bytes or ()) for part in content).decode() == whole.message.content
    assert all(len(part.top_logprobs) == 2 for part in content)
    assert all(part.top_logprobs[0].token == part.token for part in content)  # greedy
    parts = [part for chunk in streamed(client, logprobs=True, top_logprobs=2) for part in chunk.choices]
    entries = [item for part in parts if part.logprobs for item in part.logprobs.content or ()]
    assert [entry.token for entry in entries] == [part.token for part in content]
    assert [entry.logprob for entry in entries] == pytest.approx([part.logprob for part in content], abs=0.01)


def test_a_json_schema_holds_the_output_to_its_shape(client: openai.OpenAI) -> None:
    """The schema of response_format constrains the output."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    content = chat(client, response_format=wanted, max_completion_tokens=60).choices[0].message.content
    assert content is not None
    assert json.loads(content)["a"] in (1, 2)


@pytest.mark.parametrize("stream", [False, True])
def test_a_keyword_of_a_schema_that_is_not_enforced_is_refused(client: openai.OpenAI, stream: bool) -> None:
    """With a status and the keyword's path, and not with output that ignores it."""
    schema = {"type": "object", "properties": {"a": {"type": "object", "patternProperties": {"^(?=x)": {}}}}}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match="#/properties/a/patternProperties") as refusal:
        chat(client, response_format=wanted, stream=stream)
    assert refusal.value.code == "grammar_error"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "tool", "content": 5, "tool_call_id": "1"}]}, "messages"),
        ({"messages": [{"role": "Robot", "content": "x"}, *MESSAGES]}, "messages"),
        ({"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
        ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": MESSAGES, "response_format": {"type": "xml"}}, "response_format"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"messages": MESSAGES, "functions": [{"name": "f"}]}, "functions"),
        ({"messages": MESSAGES, "max_tokens": 100.5}, "max_tokens"),
    ],
)
def test_a_refusal_names_the_field(world: OpenAIServer, body: dict[str, Any], param: str) -> None:
    """In OpenAI's shape, streamed or not."""
    for stream in (False, True):
        with world.client() as client:
            response = client.post("/v1/chat/completions", json={**body, "stream": stream})
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param)


def test_leaving_a_stream_cancels_its_request(world: OpenAIServer) -> None:
    """With the asynchronous client."""

    async def leave() -> str:
        async with world.async_openai() as client:
            stream = await client.chat.completions.create(
                model="tale", messages=MESSAGES, max_tokens=800, stream=True, extra_body=FOREVER
            )
            async with stream:
                async for chunk in stream:
                    return chunk.id.removeprefix("chatcmpl-")
        raise AssertionError("the stream had no chunk")

    with world.watch.held():
        request_id = asyncio.run(leave())
        world.wait_closed(request_id)
    assert world.watch.ending(request_id).reason is FinishReason.CANCELLED


def test_giving_up_on_a_whole_completion_cancels_its_request(world: OpenAIServer) -> None:
    """A client that disconnects before the response begins."""

    async def leave() -> None:
        async with world.async_openai() as client:
            call = asyncio.create_task(
                client.chat.completions.create(
                    model="tale",
                    messages=MESSAGES,
                    max_tokens=800,
                    extra_body=FOREVER,
                    extra_headers={"x-request-id": "given-up"},
                )
            )
            await asyncio.to_thread(world.watch.wait_queued, "given-up")
            call.cancel()
            await asyncio.wait([call])

    with world.watch.held():
        asyncio.run(leave())
        world.wait_closed("given-up")
    assert world.watch.ending("given-up").reason is FinishReason.CANCELLED


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather now.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASKED: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.mark.parametrize(
    "choice",
    ["auto", "required", {"type": "function", "function": {"name": "weather"}}],
    ids=["auto", "required", "named"],
)
def test_tool_calls_are_streamed_as_they_are_returned_whole(client: openai.OpenAI, choice: Any) -> None:
    """Name and id in the first part, arguments in pieces, thinking apart."""
    options: Any = {"model": "tale", "tools": [WEATHER], "tool_choice": choice, "temperature": 0, "max_tokens": 100}
    whole = client.chat.completions.create(messages=ASKED, **options).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.tool_calls is not None
    (call,) = whole.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Paris"})
    assert call.id
    with client.chat.completions.create(messages=ASKED, stream=True, **options) as stream:
        parts = [part for chunk in stream for part in chunk.choices]
    assert parts[-1].finish_reason == "tool_calls"
    deltas = [delta for part in parts for delta in part.delta.tool_calls or ()]
    assert {delta.index for delta in deltas} == {0}
    assert [delta.id is not None for delta in deltas] == [True, *[False] * (len(deltas) - 1)]
    assert deltas[0].function is not None
    assert (deltas[0].type, deltas[0].function.name) == ("function", "weather")
    assert "".join((delta.function and delta.function.arguments) or "" for delta in deltas) == call.function.arguments
    thought = "".join((part.delta.model_extra or {}).get("reasoning_content", "") for part in parts)
    assert thought == (whole.message.model_extra or {}).get("reasoning_content", "")
    assert thought.strip()


def test_a_result_of_a_tool_is_read(client: openai.OpenAI) -> None:
    """The conversation goes on behind the call."""
    options: Any = {"model": "tale", "tools": [WEATHER], "temperature": 0, "max_tokens": 100}
    first = client.chat.completions.create(messages=ASKED, **options).choices[0].message
    assert first.tool_calls is not None
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "rain, 12 degrees"}
    second = client.chat.completions.create(messages=[*ASKED, first, result], **options).choices[0]
    assert second.finish_reason == "stop"
    assert "12" in (second.message.content or "")


def test_replies_go_back_into_a_conversation_as_sdks_have_them(client: openai.OpenAI) -> None:
    """As objects and as dictionaries, with nulls and members of other providers, without a warning."""
    options: Any = {"model": "tale", "tools": [WEATHER], "temperature": 0, "max_tokens": 100}
    first = client.chat.completions.create(messages=ASKED, **options).choices[0].message
    assert first.tool_calls is not None
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "rain, 12 degrees"}
    dumped = {**first.model_dump(), "parsed": None, "reasoning_details": [{"type": "reasoning.text", "text": "x"}]}
    calls = dumped.pop("tool_calls")
    older = {**dumped, "tool_calls": None, "function_call": calls[0]["function"]}
    found = [
        client.chat.completions.create(messages=[*ASKED, reply, result], **options)
        for reply in (first, {**dumped, "tool_calls": calls}, older)
    ]
    assert [completion.choices[0].message.content for completion in found] == [found[0].choices[0].message.content] * 3
    assert "12" in (found[0].choices[0].message.content or "")
    assert [(completion.model_extra or {}).get("warnings") for completion in found] == [None] * 3


PIXEL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def test_a_model_that_cannot_see_goes_on_behind_an_image(world: OpenAIServer) -> None:
    """The prompt of a later turn has a text in its place, and a warning says so; nothing is fetched for it."""
    for url in (PIXEL, "http://127.0.0.1:9/x.png", "no image"):
        seen = {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}],
        }
        earlier = [seen, {"role": "assistant", "content": "A fox."}, *MESSAGES[1:]]
        with world.client() as raw:
            prompt = raw.post("/apply-template", json={"messages": earlier}).json()["prompt"]
            assert "[image omitted: this model cannot see]\n?" in prompt
            body = raw.post("/v1/chat/completions", json={"messages": earlier, "max_tokens": 1}).json()
            (warning,) = body["warnings"]
            assert warning.startswith("messages[0].content[0].image_url: this model takes no images; the prompt has")
            refused = raw.post("/v1/chat/completions", json={"messages": [*earlier, seen], "max_tokens": 1})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
            assert "messages[3].content[0].image_url: this model takes no images" in refused.json()["error"]["message"]


def test_other_apis_go_on_behind_an_image_of_a_tool(world: OpenAIServer) -> None:
    """As agents send it: Claude Code and Codex in a result, Ollama's clients in an earlier message."""
    data, reply = PIXEL.partition(",")[2], {"role": "assistant", "content": "A fox."}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    use = {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {}}
    answer = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [image]}
    call = {"type": "function_call", "call_id": "c1", "name": "read", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_image", "image_url": PIXEL}]}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/messages": {
            "max_tokens": 1,
            "messages": [ASKED[0], {"role": "assistant", "content": [use]}, {"role": "user", "content": [answer]}],
        },
        "/v1/responses": {"max_output_tokens": 1, "input": [ASKED[0], call, output]},
        "/api/chat": {
            "stream": False,
            "options": {"num_predict": 1},
            "messages": [{**ASKED[0], "images": [data]}, reply, ASKED[0]],
        },
    }
    for path, body in bodies.items():
        with world.client() as raw:
            response = raw.post(path, json=body)
        assert response.status_code == 200, (path, response.text)
        assert "this model takes no images; the prompt has '[image omitted" in str(response.json()["warnings"]), path


def test_unknown_members_of_messages_are_warnings(world: OpenAIServer) -> None:
    """One for each kind, in whole responses and in streams."""
    messages = [{**message, "colour": "red"} for message in MESSAGES]
    wanted = ["messages[0].colour has no effect here and was ignored"]
    with world.client() as raw:
        body = {"messages": messages, "max_tokens": 1}
        assert raw.post("/v1/chat/completions", json=body).json()["warnings"] == wanted
        events = raw.post("/v1/chat/completions", json={**body, "stream": True}).text
        assert json.dumps(wanted, separators=(",", ":")) in events


def test_a_call_that_is_cut_off_is_no_content(client: openai.OpenAI) -> None:
    """And the reason is the length."""
    options: Any = {"model": "tale", "tools": [WEATHER], "temperature": 0}
    for limit in range(8, 26, 3):
        choice = client.chat.completions.create(messages=ASKED, max_tokens=limit, **options).choices[0]
        assert choice.finish_reason == "length"
        assert "weather" not in (choice.message.content or "")


def test_tokens_of_a_conversation_are_counted_without_generating(world: OpenAIServer, client: openai.OpenAI) -> None:
    """As many as a completion of the same body has in its prompt; a body that could not be generated is refused."""
    body = {"messages": ASKED, "tools": [WEATHER], "max_tokens": 1}
    usage = client.chat.completions.create(model="tale", **body).usage  # type: ignore[call-overload]
    with world.client() as raw:
        for route in ("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"):
            response = raw.post(route, json=body)
            expected = {"object": "response.input_tokens", "input_tokens": usage.prompt_tokens}
            assert (response.status_code, response.json()) == (200, expected)
            refused = raw.post(route, json={**body, "tools": [{"type": "function"}]})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")


def test_logprobs_of_calls_and_thinking_come_once(client: openai.OpenAI) -> None:
    """Streamed as in the whole: every generated token, marks and control tokens among them."""
    options: Any = {"model": "tale", "tools": [WEATHER], "temperature": 0, "max_tokens": 100, "logprobs": True}
    whole = client.chat.completions.create(messages=ASKED, **options)
    assert whole.usage is not None
    scores = whole.choices[0].logprobs
    assert scores is not None and scores.content is not None
    assert len(scores.content) in (whole.usage.completion_tokens, whole.usage.completion_tokens - 1)  # without the end
    assert "weather" in "".join(part.token for part in scores.content)
    with client.chat.completions.create(messages=ASKED, stream=True, **options) as stream:
        parts = [part for chunk in stream for part in chunk.choices]
    streamed = [item.token for part in parts if part.logprobs for item in part.logprobs.content or ()]
    assert streamed == [part.token for part in scores.content]


def test_several_choices_have_calls_of_their_own(client: openai.OpenAI) -> None:
    """Each with its ids."""
    options: Any = {"model": "tale", "tools": [WEATHER], "temperature": 0, "max_tokens": 100, "n": 3}
    whole = client.chat.completions.create(messages=ASKED, **options)
    calls = [call for choice in whole.choices for call in choice.message.tool_calls or ()]
    assert [call.function.name for call in calls if call.type == "function"] == ["weather"] * 3
    assert len({call.id for call in calls}) == 3
    with client.chat.completions.create(messages=ASKED, stream=True, **options) as stream:
        parts = [part for chunk in stream for part in chunk.choices]
    for index in range(3):
        mine = [part for part in parts if part.index == index]
        pieces = [call.function for part in mine for call in part.delta.tool_calls or ()]
        assert json.loads("".join((piece and piece.arguments) or "" for piece in pieces)) == {"city": "Paris"}
        assert mine[-1].finish_reason == "tool_calls"


def test_a_stop_string_counts_in_the_raw_text(client: openai.OpenAI) -> None:
    """As in llama-server: within thinking and calls, too; the text until then is the message."""
    options: Any = {"model": "tale", "tools": [WEATHER], "temperature": 0, "max_tokens": 100}
    choice = client.chat.completions.create(messages=ASKED, stop=["weather"], **options).choices[0]
    assert choice.model_extra is not None
    assert (choice.finish_reason, choice.model_extra["stop_reason"]) == ("stop", "weather")
    assert not choice.message.tool_calls
    assert "weather" not in (choice.message.content or "") + choice.message.model_extra.get("reasoning_content", "")  # type: ignore[union-attr]


def test_a_developers_message_is_the_systems(client: openai.OpenAI) -> None:
    """In templates that know no other role for it."""
    told = [chat(client, [{**MESSAGES[0], "role": role}, MESSAGES[1]]) for role in ("system", "developer")]
    assert told[0].usage is not None and told[1].usage is not None
    assert told[0].usage.prompt_tokens == told[1].usage.prompt_tokens


def test_thinking_can_be_left_out_of_a_response(client: openai.OpenAI) -> None:
    """Streamed or not; it is generated all the same."""
    options: Any = {"model": "tale", "messages": ASKED, "tools": [WEATHER], "temperature": 0, "max_tokens": 100}
    hidden: Any = {"extra_body": {"include_reasoning": False}}
    shown, without = (client.chat.completions.create(**options, **more) for more in ({}, hidden))
    assert shown.choices[0].message.model_extra["reasoning_content"].strip()
    assert "reasoning_content" not in (without.choices[0].message.model_extra or {})
    assert without.usage.completion_tokens == shown.usage.completion_tokens
    with client.chat.completions.create(stream=True, **options, **hidden) as stream:
        parts = [part for chunk in stream for part in chunk.choices]
    assert not any("reasoning_content" in (part.delta.model_extra or {}) for part in parts)
    assert parts[-1].finish_reason == "tool_calls"


def test_tokens_of_thinking_are_counted(world: OpenAIServer, client: openai.OpenAI) -> None:
    """Streamed or not, and shown or not: the number of its text's tokens; none without thinking."""
    options: Any = {"model": "tale", "messages": ASKED, "tools": [WEATHER], "temperature": 0, "max_tokens": 100}
    hidden: Any = {"extra_body": {"include_reasoning": False}}
    shown, without = (client.chat.completions.create(**options, **more) for more in ({}, hidden))
    num_tokens = len(world.engine.tokenizer.encode(shown.choices[0].message.model_extra["reasoning_content"]))  # type: ignore[index]
    options["stream_options"] = {"include_usage": True}
    with client.chat.completions.create(stream=True, **options) as stream:
        (streamed_usage,) = [chunk.usage for chunk in stream if chunk.usage is not None]
    counts = [
        usage.completion_tokens_details.reasoning_tokens
        for usage in (shown.usage, without.usage, streamed_usage)
        if usage is not None and usage.completion_tokens_details is not None
    ]
    assert len(set(counts)) == 1
    assert abs(counts[0] - num_tokens) <= 3  # they need not be those of an encoder
    plain = chat(client, extra_body={"reasoning_format": "none"}).usage
    assert plain is not None
    assert plain.completion_tokens_details is not None
    assert plain.completion_tokens_details.reasoning_tokens == 0


def test_a_client_that_hangs_up_in_the_middle_of_a_call_frees_its_slot(world: OpenAIServer) -> None:
    """Between two parts of arguments that would go on for long."""
    note = {"type": "object", "properties": {"text": {"type": "string", "minLength": 600}}, "required": ["text"]}
    tool: Any = {"type": "function", "function": {"name": "note", "parameters": note}}

    async def leave() -> str:
        options: Any = {"model": "tale", "tools": [tool], "tool_choice": "required", "temperature": 0}
        async with world.async_openai() as client:
            stream = await client.chat.completions.create(messages=ASKED, stream=True, max_tokens=800, **options)
            async with stream:
                async for chunk in stream:
                    if any(part.delta.tool_calls for part in chunk.choices):
                        return chunk.id.removeprefix("chatcmpl-")
        raise AssertionError("the stream had no call")

    with world.watch.held(64):
        request_id = asyncio.run(leave())
        world.wait_closed(request_id)
    assert world.watch.ending(request_id).reason is FinishReason.CANCELLED
    world.until(lambda: not any(slot.is_processing for slot in world.engine.slots()))


BUDGETS = ("reasoning_budget_tokens", "thinking_budget_tokens")


def thought_and_calls(client: openai.OpenAI, **body: Any) -> tuple[str, list[str]]:
    """Return the thinking of a message with tools, and the names of its calls."""
    options: Any = {"model": "tale", "messages": ASKED, "tools": [WEATHER], "temperature": 0, "max_tokens": 100}
    message = client.chat.completions.create(**options, extra_body=body).choices[0].message
    calls = [call.function.name for call in message.tool_calls or () if call.type == "function"]
    return (message.model_extra or {}).get("reasoning_content", ""), calls


@pytest.mark.parametrize("name", BUDGETS)
def test_thinking_ends_at_its_budget(world: OpenAIServer, client: openai.OpenAI, name: str) -> None:
    """At that many tokens, with the message in front of its end; 0 is none at all, -1 the server's."""
    free, calls = thought_and_calls(client)
    assert calls == ["weather"]
    encode = world.engine.tokenizer.encode
    assert len(encode(free)) > 4
    assert thought_and_calls(client, **{name: -1}) == (free, calls)
    short, _ = thought_and_calls(client, **{name: 3})
    assert free.startswith(short.rstrip())
    assert 0 < len(encode(short, add_special=False)) <= 4
    told, _ = thought_and_calls(client, **{name: 3}, reasoning_budget_message=" Enough.")
    assert told.rstrip().endswith("Enough.")
    assert thought_and_calls(client, **{name: 0})[0].strip() == ""


def test_a_schema_holds_for_the_content_and_not_for_thinking(client: openai.OpenAI) -> None:
    """Whether or not thinking has a budget."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for more in ({}, {"reasoning_budget_tokens": 4}, {"reasoning_budget_tokens": 0}):
        options: Any = {"response_format": wanted, "max_completion_tokens": 300, "extra_body": more}
        message = chat(client, ASKED, **options).choices[0].message
        assert json.loads(message.content or "")["a"] in (1, 2)


def test_the_server_has_a_budget_of_its_own() -> None:
    """For requests that have none; a request's own wins."""
    settings: Any = {"reasoning_budget": 0, "reasoning_budget_message": "", "skip_chat_parsing": False}
    with OpenAIServer(**settings) as other, other.openai() as client:
        assert thought_and_calls(client)[0].strip() == ""
        assert thought_and_calls(client, reasoning_budget_tokens=50)[0].strip()


def test_a_server_that_does_not_parse_leaves_all_in_the_content() -> None:
    """Thinking and calls, as the model spells them; none can be required."""
    with OpenAIServer(skip_chat_parsing=True) as other, other.openai() as client:
        options: Any = {"model": "tale", "messages": ASKED, "tools": [WEATHER], "temperature": 0, "max_tokens": 100}
        message = client.chat.completions.create(**options).choices[0].message
        assert not message.tool_calls
        assert "weather" in (message.content or "")
        with pytest.raises(openai.APIStatusError, match="tool_choice"):
            client.chat.completions.create(**options, tool_choice="required")


def test_progress_of_the_prompt_is_reported_where_asked(client: openai.OpenAI) -> None:
    """From the cached tokens up to the whole prompt, in events without text before the first token; only in streams."""
    long: Any = [{"role": "user", "content": "This is a test of it. " * 40}]
    options: Any = {"model": "tale", "messages": long, "max_tokens": 4, "temperature": 0, "stream": True}
    for timings in (False, True):
        more = {"return_progress": True, "timings_per_token": timings, "cache_salt": "progress"}
        with client.chat.completions.create(**options, extra_body=more) as stream:
            events = [chunk.model_dump() for chunk in stream]
        progress = [event["prompt_progress"] for event in events if "prompt_progress" in event]
        first = events[: len(progress)]
        deltas = [event["choices"][0]["delta"] for event in first]
        assert {(delta["role"], delta["content"]) for delta in deltas} == {("assistant", None)}
        assert (progress[0]["processed"], progress[-1]["processed"]) == (progress[0]["cache"], progress[0]["total"])
        assert [update["processed"] for update in progress] == sorted({update["processed"] for update in progress})
        assert (progress[0]["cache"] > 0) is timings  # the second time, the prompt is known
        assert ("timings" in first[0]) is timings
    assert not any("prompt_progress" in (chunk.model_extra or {}) for chunk in streamed(client))
    chat(client, extra_body={"return_progress": True})
