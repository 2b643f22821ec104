"""Ollama's API over the demo model, with the `ollama` package."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import ollama
import pytest
from tests.server.openai_world import OpenAIServer

import paceline
from paceline.streaming import FinishReason

pytestmark = pytest.mark.native

STORY: Any = [{"role": "user", "content": "Tell me a story about a fox."}]
ASKED: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather now.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
GREEDY = {"temperature": 0, "repeat_penalty": 1.0, "num_predict": 12}


@pytest.fixture
def client(world: OpenAIServer) -> Iterator[ollama.Client]:
    with world.ollama() as client:
        yield client


def chat(client: ollama.Client, **options: Any) -> ollama.ChatResponse:
    found = client.chat(**{"model": "tale", "messages": STORY, "options": GREEDY, **options})
    assert isinstance(found, ollama.ChatResponse)
    return found


def streamed(client: ollama.Client, **options: Any) -> list[ollama.ChatResponse]:
    return list(client.chat(**{"model": "tale", "messages": STORY, "options": GREEDY, "stream": True, **options}))


def test_a_chat_has_ollamas_shape(world: OpenAIServer, client: ollama.Client) -> None:
    """Its prompt is that of the same conversation in OpenAI's API."""
    found = chat(client, think=False)
    with world.client() as plain:
        body = {
            "messages": STORY,
            "max_tokens": 12,
            "temperature": 0,
            "chat_template_kwargs": {"enable_thinking": False},
        }
        other = plain.post("/v1/chat/completions", json=body).json()
    assert found.message.content == other["choices"][0]["message"]["content"]
    assert found.prompt_eval_count == other["usage"]["prompt_tokens"]
    assert (found.model, found.done, found.done_reason, found.eval_count) == ("tale", True, "length", 12)
    assert found.message.role == "assistant"
    for duration in (found.total_duration, found.prompt_eval_duration, found.eval_duration):
        assert duration
        assert duration > 0


@pytest.mark.parametrize("think", [False, True, "low"])
def test_a_stream_equals_the_whole_reply(client: ollama.Client, think: Any) -> None:
    """Thinking apart from the text; the last part has the counts and no text."""
    options = {"think": think, "options": {**GREEDY, "num_predict": 40}}
    whole, parts = chat(client, **options), streamed(client, **options)
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    thought = "".join(part.message.thinking or "" for part in parts)
    assert thought == (whole.message.thinking or "")
    assert bool(thought) is bool(think)
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert (parts[-1].message.content, parts[-1].eval_count) == ("", whole.eval_count)


def test_a_tool_is_called_and_its_result_read(client: ollama.Client) -> None:
    """Streamed and whole; results need no id."""
    options = {"messages": ASKED, "tools": [WEATHER], "options": {**GREEDY, "num_predict": 100}}
    whole, parts = chat(client, **options), streamed(client, **options)
    assert whole.message.tool_calls is not None
    (call,) = whole.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Paris"})
    assert [part.message.tool_calls for part in parts if part.message.tool_calls] == [whole.message.tool_calls]
    result = {"role": "tool", "tool_name": "weather", "content": "rain, 12 degrees"}
    second = chat(client, **{**options, "messages": [*ASKED, whole.message, result]})
    assert second.done_reason == "stop"
    assert "12" in (second.message.content or "")


@pytest.mark.parametrize(
    "wanted", ["json", {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}]
)
def test_a_format_holds_the_text_to_json(client: ollama.Client, wanted: Any) -> None:
    """Any object, or an object of a schema."""
    schema = {"additionalProperties": False, **wanted} if isinstance(wanted, dict) else wanted
    found = chat(client, format=schema, think=False, options={**GREEDY, "num_predict": 60})
    if found.done_reason == "length":  # any JSON may be long
        assert wanted == "json"
        assert (found.message.content or "").startswith("{")
    else:
        assert isinstance(json.loads(found.message.content or ""), dict)


def test_an_assistants_last_message_is_continued(client: ollama.Client) -> None:
    """And not repeated."""
    begun = [*STORY, {"role": "assistant", "content": "Once upon"}]
    for text in (
        chat(client, messages=begun).message.content,
        "".join(part.message.content or "" for part in streamed(client, messages=begun)),
    ):
        assert text
        assert "Once" not in text


def test_a_prompt_is_completed_by_the_template_or_as_it_is(world: OpenAIServer, client: ollama.Client) -> None:
    """Streamed and whole; the template's thinking is apart."""
    asked = {"model": "tale", "prompt": "Tell me a story about a fox.", "options": GREEDY}
    found = client.generate(**asked, think=False, system="You tell tales.")
    talk = [{"role": "system", "content": "You tell tales."}, *STORY]
    assert found.response == chat(client, messages=talk, think=False).message.content
    parts = client.generate(**asked, think=False, system="You tell tales.", stream=True)
    assert "".join(part.response or "" for part in parts) == found.response
    raw = {**asked, "prompt": "Once upon a", "raw": True}
    whole = client.generate(**raw, logprobs=True, top_logprobs=2)
    assert whole.prompt_eval_count == len(world.engine.tokenizer.encode("Once upon a"))
    assert "".join(part.response or "" for part in client.generate(**raw, stream=True)) == whole.response
    assert whole.logprobs is not None
    assert "".join(token.token for token in whole.logprobs) == whole.response
    assert all(len(token.top_logprobs or ()) == 2 for token in whole.logprobs)


def test_what_stands_before_a_suffix_is_filled_in(client: ollama.Client) -> None:
    """By the model's tokens for it."""
    found = client.generate(model="tale", prompt="Once upon a", suffix="The end.", options=GREEDY)
    assert found.response
    assert found.prompt_eval_count is not None
    assert found.prompt_eval_count > 6


def test_a_request_without_a_prompt_loads_the_model(client: ollama.Client) -> None:
    """Or unloads it, which changes nothing here."""
    assert client.generate(model="tale").done_reason == "load"
    assert client.generate(model="tale", keep_alive=0).done_reason == "unload"
    assert chat(client, messages=[]).done_reason == "load"
    assert chat(client, keep_alive="5m").done_reason == "length"


def test_texts_are_embedded(client: ollama.Client) -> None:
    """With length 1, and in the older form as they come out of the model."""
    found = client.embed(model="tale", input=["A fox.", "A hen."])
    assert len(found.embeddings) == 2
    for vector in found.embeddings:
        assert sum(x * x for x in vector) == pytest.approx(1, abs=1e-4)
    short = client.embed(model="tale", input="A fox.", dimensions=8).embeddings[0]
    assert len(short) == 8
    assert sum(x * x for x in short) == pytest.approx(1, abs=1e-4)
    older = client.embeddings(model="tale", prompt="A fox.").embedding
    ratio = older[0] / found.embeddings[0][0]
    assert list(older) == pytest.approx([x * ratio for x in found.embeddings[0]], abs=1e-3 * abs(ratio))
    assert client.embed(model="tale", input=[]).embeddings == []
    assert client.embed(model="tale", input="word " * 5000).prompt_eval_count == 1024
    with pytest.raises(ollama.ResponseError):
        client.embed(model="tale", input="word " * 5000, truncate=False)


def test_the_model_is_listed_and_described(world: OpenAIServer, client: ollama.Client) -> None:
    """Under its first name; other names are not found."""
    (listed,), (running,) = client.list().models, client.ps().models
    assert listed.model == running.model == "tale"
    assert listed.digest == running.digest
    assert listed.details is not None
    assert (listed.details.family, listed.details.quantization_level) == ("llama", "Q8_0")
    assert running.context_length == world.engine.limits.max_positions
    for name in ("tale", "tale:latest", "vendor/other"):
        shown = client.show(name)
        assert shown.capabilities == ["completion", "tools", "thinking", "insert", "embedding"]
        assert shown.modelinfo is not None
        assert shown.modelinfo["llama.context_length"] == 1024
        assert not any(key.startswith("tokenizer.") for key in shown.modelinfo)
        assert "<|im_start|>" in (shown.template or "")
    with pytest.raises(ollama.ResponseError, match="not found") as refusal:
        client.show("other")
    assert refusal.value.status_code == 404
    with world.client() as plain:
        assert plain.head("/").status_code == 200
        assert plain.get("/api/version").json()["version"].count(".") == 2
        verbose = plain.post("/api/show", json={"name": "tale", "verbose": True}).json()
    assert "tokenizer.ggml.model" in verbose["model_info"]


def test_the_version_is_one_that_codex_accepts(world: OpenAIServer) -> None:
    """Codex uses no Ollama before 0.13.4; paceline's own version stands beside it."""
    with world.client() as http:
        found = http.get("/api/version").json()
    assert tuple(map(int, found["version"].split("."))) >= (0, 13, 4)
    assert found["paceline"] == paceline.__version__


def test_pulling_the_model_that_is_here_succeeds(world: OpenAIServer, client: ollama.Client) -> None:
    """With lines of which the last one says success, or with one object; with a tag, too."""
    assert client.pull("tale").status == "success"
    assert [step.status for step in client.pull("tale:latest", stream=True)] == ["pulling manifest", "success"]
    with world.client() as http:
        streamed = http.post("/api/pull", json={"name": "tale"})
    assert streamed.headers["content-type"] == "application/x-ndjson"
    assert streamed.text == '{"status":"pulling manifest"}\n{"status":"success"}\n'


@pytest.mark.parametrize("stream", [False, True])
def test_pulling_another_model_is_a_404_that_names_the_one_here(
    world: OpenAIServer, client: ollama.Client, *, stream: bool
) -> None:
    """Nothing is downloaded, and a client that streams reads the reason, too."""
    with pytest.raises(ollama.ResponseError, match="model 'other' not found.*'tale'.*nothing is downloaded") as refusal:
        list(client.pull("other", stream=stream))
    assert refusal.value.status_code == 404
    with world.client() as http:
        unnamed = http.post("/api/pull", json={"stream": stream})
    assert (unnamed.status_code, unnamed.json()) == (400, {"error": "model is required"})


def test_models_are_not_administered(world: OpenAIServer, client: ollama.Client) -> None:
    """With a reason."""
    for refused in (
        lambda: client.push("tale"),
        lambda: client.create("x", from_="tale"),
        lambda: client.copy("tale", "x"),
        lambda: client.delete("tale"),
    ):
        with pytest.raises(ollama.ResponseError, match="GET /api/tags") as refusal:
            refused()
        assert refusal.value.status_code == 501


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role"),
        ({"messages": "x"}, "messages must be a list"),
        ({"messages": STORY, "options": {"top_p": 5}}, "options.top_p"),
        ({"messages": STORY, "format": "xml"}, "format"),
        ({"messages": STORY, "tools": [{"type": "function"}]}, "tools[0].function"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "this model takes no images"),
        ({"messages": [{"role": "user", "content": "x " * 9000}]}, "token"),
    ],
)
def test_a_refusal_is_a_text_that_names_the_field(world: OpenAIServer, body: Any, said: str) -> None:
    """With the status 400, streamed or not."""
    for stream in (False, True):
        with world.client() as plain:
            response = plain.post("/api/chat", json={**body, "stream": stream})
        assert response.status_code == 400
        assert said in response.json()["error"]


def test_an_ignored_field_is_named(world: OpenAIServer) -> None:
    """In the last line."""
    body = {"model": "other", "messages": STORY, "options": {**GREEDY, "num_ctx": 99}, "odd": 1}
    with world.client() as plain:
        lines = plain.post("/api/chat", json=body).text.splitlines()
    warned = [warning.split()[0].rstrip(":") for warning in json.loads(lines[-1])["warnings"]]
    assert warned == ["odd", "options.num_ctx", "model"]


def test_a_failure_after_the_beginning_is_a_line(world: OpenAIServer, client: ollama.Client) -> None:
    """Which the package raises; a server without room is 503."""
    body = {"messages": STORY, "options": {"num_predict": 800}}
    with world.client() as plain, world.client() as other:
        with world.watch.held():
            request = plain.build_request("POST", "/api/chat", json=body, headers={"x-request-id": "ended"})
            response = plain.send(request, stream=True)
            assert other.post("/v1/requests/ended/cancel").json()["cancelled"]
        lines = list(response.iter_lines())
        response.close()
    assert json.loads(lines[-1]) == {"error": "the request was cancelled"}
    with OpenAIServer({"num_slots": 1, "max_queue": 0}) as small, small.client() as plain:
        with small.watch.held(), plain.stream("POST", "/api/chat", json=body):
            full = plain.post("/api/chat", json=body)
    assert full.status_code == 503
    assert isinstance(full.json()["error"], str)


def test_leaving_a_stream_frees_its_slot(world: OpenAIServer) -> None:
    """With the asynchronous client, within a call of a tool."""
    schema = {"type": "object", "properties": {"words": {"type": "array", "minItems": 300}}, "required": ["words"]}
    body = {"messages": ASKED, "format": schema, "think": False, "options": {"num_predict": 2000}}
    ids: list[str] = []

    async def leave() -> None:
        async with world.async_client() as client:
            async with client.stream("POST", "/api/chat", json=body) as response:
                ids.append(response.headers["x-request-id"])
                async for line in response.aiter_lines():
                    if json.loads(line)["message"]["content"]:
                        return

    with world.watch.held(64):
        asyncio.run(leave())
        world.wait_closed(ids[0])
    assert world.watch.ending(ids[0]).reason is FinishReason.CANCELLED
    world.until(lambda: not any(slot.is_processing for slot in world.engine.slots()))


def test_the_asynchronous_package_works_alike(world: OpenAIServer) -> None:
    """Streams too."""

    async def said() -> tuple[str, str]:
        async with world.async_ollama() as client:
            asked: Any = {"model": "tale", "messages": STORY, "options": GREEDY, "think": False}
            whole = await client.chat(**asked)
            parts = [part.message.content or "" async for part in await client.chat(**asked, stream=True)]
            return whole.message.content or "", "".join(parts)

    whole, streamed_text = asyncio.run(said())
    assert whole == streamed_text
