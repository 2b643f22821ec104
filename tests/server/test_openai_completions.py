"""/v1/completions over the demo model, with the `openai` package."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from tests.exact import EXACT
from tests.server.openai_world import FOREVER, OpenAIServer
from tests.server.running import LONG_S

from paceline import LLM
from paceline.params import SamplingParams
from paceline.streaming import FinishReason

pytestmark = pytest.mark.native

# After these the model is sure of every token, so that noise in the kernels changes none.
PROMPT = "abc abc abc abc abc"
OTHER = "1 2 3 4 5 6"


@pytest.fixture
def client(world: OpenAIServer) -> Iterator[openai.OpenAI]:
    with world.openai() as client:
        yield client


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **options: Any) -> openai.types.Completion:
    return client.completions.create(
        **{"model": "tale", "prompt": prompt, "max_tokens": 6, "temperature": 0, **options}
    )


def test_a_completion_is_what_the_library_generates(world: OpenAIServer, client: openai.OpenAI) -> None:
    """With the id of the request, the model's name, and the usage."""
    response = client.completions.with_raw_response.create(model="tale", prompt=PROMPT, temperature=0)
    completion = response.parse()
    ids = world.engine.tokenizer.encode(PROMPT)
    with LLM(**EXACT, num_slots=1, n_ctx=1024) as llm:
        expected = llm.generate(PROMPT, max_tokens=16, temperature=0, parse_special=True)
    (choice,) = completion.choices
    assert (choice.text, choice.index, choice.finish_reason, choice.logprobs) == (expected.text, 0, "length", None)
    assert (completion.object, completion.model) == ("text_completion", "tale")
    assert completion.id == f"cmpl-{response.headers['x-request-id']}"
    assert completion.system_fingerprint is not None
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (len(ids), 16)
    assert completion.usage.total_tokens == len(ids) + 16
    assert completion.model_extra is not None
    assert set(completion.model_extra) == {"timings"}
    timings = completion.model_extra["timings"]
    assert (timings["cache_n"] + timings["prompt_n"], timings["predicted_n"]) == (len(ids), 16)


def test_a_prompt_may_be_text_ids_or_a_list_of_these(world: OpenAIServer, client: openai.OpenAI) -> None:
    """Choices are in the order of the prompts."""
    ids = world.engine.tokenizer.encode(PROMPT)
    alone, other = complete(client).choices[0].text, complete(client, OTHER).choices[0].text
    for prompt, expected in (
        (ids, [alone]),
        ([PROMPT], [alone]),
        ([PROMPT, OTHER], [alone, other]),
        ([ids, ids], [alone, alone]),
    ):
        assert [choice.text for choice in complete(client, prompt).choices] == expected


def test_n_choices_of_each_prompt_are_numbered_through(client: openai.OpenAI) -> None:
    """Prompts are counted once in the usage, and the choices' tokens all."""
    prompts = ["Once upon a time", "The"]
    completion = complete(client, prompts, n=2, seed=1, temperature=1, max_tokens=12, extra_body=FOREVER)
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    assert completion.choices[0].text != completion.choices[1].text
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 4 * 12


@pytest.mark.parametrize("options", [{}, {"n": 2, "temperature": 1, "seed": 5}, {"stop": "bc a"}, {"echo": True}])
def test_streamed_text_joined_is_the_whole_text(client: openai.OpenAI, options: dict[str, Any]) -> None:
    """Each choice has the same text and one finish reason."""
    whole = complete(client, **options)
    with client.completions.create(
        **{"model": "tale", "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "stream": True, **options}
    ) as stream:
        chunks = list(stream)
    for choice in whole.choices:
        parts = [item for chunk in chunks for item in chunk.choices if item.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [part.finish_reason for part in parts if part.finish_reason] == [choice.finish_reason]
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert all(chunk.usage is None for chunk in chunks)


def test_the_usage_of_a_stream_comes_last_and_alone(world: OpenAIServer) -> None:
    """On request, all other events have a null in its place; then [DONE]."""
    body = {"prompt": PROMPT, "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}, **FOREVER}
    with world.client() as client:
        response = client.post("/v1/completions", json=body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 3


def test_echo_with_logprobs_is_what_the_library_gives(client: openai.OpenAI) -> None:
    """The prompt's tokens first, the very first of them without a probability."""
    params = SamplingParams(max_tokens=4, temperature=0, logprobs=2, prompt_logprobs=2, echo=True)
    with LLM(**EXACT, num_slots=1, n_ctx=1024) as llm:
        expected = llm.generate(PROMPT, params)
        tokens = [llm.tokenizer.decode([item]) for item in (*expected.prompt_token_ids, *expected.token_ids)]
    choice = complete(client, max_tokens=4, echo=True, logprobs=2).choices[0]
    assert expected.prompt_logprobs is not None
    assert expected.logprobs is not None
    found = choice.logprobs
    assert found is not None
    assert found.tokens == tokens
    assert choice.text == expected.text == "".join(tokens)
    assert found.token_logprobs is not None
    assert found.token_logprobs[0] is None
    own = [item.own for item in (*expected.prompt_logprobs, *expected.logprobs)]
    assert found.token_logprobs[1:] == pytest.approx(own, abs=0.01)
    assert found.text_offset == [len("".join(tokens[:index])) for index in range(len(tokens))]
    assert found.top_logprobs is not None
    assert all(2 <= len(top) <= 3 for top in found.top_logprobs[1:])


def test_a_prompt_can_be_scored_without_a_completion(client: openai.OpenAI) -> None:
    """As evaluation programs ask: no token generated, all of the prompt's with logprobs."""
    completion = complete(client, max_tokens=0, echo=True, logprobs=1)
    assert (completion.choices[0].text, completion.choices[0].finish_reason) == (PROMPT, "length")
    found = completion.choices[0].logprobs
    assert found is not None
    assert "".join(found.tokens or ()) == PROMPT
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 0


def test_a_suffix_makes_the_model_fill_in_the_middle(world: OpenAIServer, client: openai.OpenAI) -> None:
    """The prompt is the two texts with the vocabulary's tokens for it."""
    choice = complete(client, "a b", suffix=" c d", extra_body={"return_token_ids": True}).choices[0]
    tokenizer = world.engine.tokenizer
    fim, encode = tokenizer.fim, tokenizer.encode
    expected = [fim.prefix, *encode("a b"), fim.suffix, *encode(" c d"), fim.middle]
    assert choice.model_extra is not None
    assert choice.model_extra["prompt_token_ids"] == expected


def test_a_completion_that_a_stop_ended_names_the_stop(client: openai.OpenAI) -> None:
    """The text ends before it."""
    whole = complete(client, max_tokens=12).choices[0].text
    stop = whole[2:5]
    choice = complete(client, max_tokens=12, stop=["@@", stop]).choices[0]
    assert (choice.text, choice.finish_reason) == (whole[: whole.index(stop)], "stop")
    assert choice.model_extra == {"stop_reason": stop}


def test_a_repeated_prompt_reports_its_cached_tokens(client: openai.OpenAI) -> None:
    """The usage has OpenAI's field, and the source."""
    prompt = "A fox and a hen lived by the old mill, and every morning they walked down to the river together."
    complete(client, prompt)
    usage = complete(client, prompt).usage
    assert usage is not None
    details = usage.prompt_tokens_details
    assert details is not None
    assert 0 < (details.cached_tokens or 0) < usage.prompt_tokens
    assert details.model_extra is not None
    assert details.model_extra["cached_from"] in ("running", "device", "host")


def test_own_options_reach_the_engine(client: openai.OpenAI) -> None:
    """For example the allowed tokens, and the ids in the response."""
    extra = {"allowed_token_ids": [300, 301], "return_token_ids": True, "ignore_eos": True}
    choice = complete(client, temperature=1, extra_body=extra).choices[0]
    assert choice.model_extra is not None
    assert set(choice.model_extra["token_ids"]) <= {300, 301}


def test_a_seed_gives_the_same_completion_again(client: openai.OpenAI) -> None:
    """Streamed or not."""
    first, second = (complete(client, temperature=1, seed=3, extra_body=FOREVER).choices[0].text for _ in range(2))
    assert first == second


def test_ignored_fields_are_named_in_the_response(client: openai.OpenAI) -> None:
    """Also an unknown model; the response repeats its name."""
    completion = complete(client, model="gpt-4", user="me")
    assert completion.model == "gpt-4"
    assert completion.model_extra is not None
    assert completion.model_extra["warnings"] == [
        "user has no effect here and was ignored",
        "model: the one model here is 'tale'; it was used",
    ]


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"temperature": -3}, "temperature", "invalid_params"),
        ({"prompt": 5}, "prompt", "invalid_type"),
        ({"prompt": []}, "prompt", "invalid_params"),
        ({"prompt": [[]]}, None, "invalid_params"),
        ({"prompt": ["a", 5]}, "prompt", "invalid_type"),
        ({"prompt": [99999]}, "prompt", "invalid_params"),
        ({"prompt": [True]}, "prompt", "invalid_type"),
        ({"prompt": ["a"] * 300}, "prompt", "invalid_params"),
        ({"prompt": ["a"] * 2, "n": 200}, "n", "invalid_params"),
        ({"prompt": "a " * 2000}, None, "context_length_exceeded"),
        ({"best_of": 2}, "best_of", "unsupported"),
        ({"top_k": "x"}, "top_k", "invalid_type"),
        ({"grammar": "root ::= ("}, "grammar", "grammar_error"),
        ({"lora": {"none": 1}}, "lora", "invalid_params"),
        ({"functions": [{"name": "f"}]}, "functions", "unsupported"),
    ],
)
def test_a_refusal_has_openais_shape_and_comes_before_any_event(
    world: OpenAIServer, body: dict[str, Any], param: str | None, code: str
) -> None:
    """A refused stream has a status and no events."""
    with world.client() as client:
        response = client.post("/v1/completions", json={"prompt": "a", **body, "stream": True})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert set(error) >= {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": NaN}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b"[" * 100_000,
        b"{",
        b"",
        b'{"a\\ud800": 1}',
    ],
)
def test_invalid_json_is_refused(world: OpenAIServer, body: bytes) -> None:
    """Numbers and letters that JSON has not are no JSON."""
    with world.client() as client:
        response = client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_body_of_very_many_fields_is_refused(world: OpenAIServer) -> None:
    """Before the fields are looked at one by one."""
    with world.client() as client:
        response = client.post("/v1/completions", json=dict.fromkeys(map(str, range(2000)), 1))
    assert response.status_code == 400
    assert "2000 fields" in response.json()["error"]["message"]


def test_a_large_body_is_read_like_a_small_one(world: OpenAIServer) -> None:
    """It is decoded in a thread."""
    with world.client() as client:
        response = client.post("/v1/completions", json={"prompt": "a", "stop": ["x"], "bad_words": ["y" * 200_000]})
    assert response.json()["error"]["param"] == "bad_words"


def test_leaving_a_stream_cancels_its_request(world: OpenAIServer, client: openai.OpenAI) -> None:
    """The engine ends it with CANCELLED."""
    with world.watch.held():
        with client.completions.create(
            model="tale", prompt=PROMPT, max_tokens=900, stream=True, extra_body=FOREVER
        ) as stream:
            request_id = next(iter(stream)).id.removeprefix("cmpl-")
        world.wait_closed(request_id)
    assert world.watch.ending(request_id).reason is FinishReason.CANCELLED


def test_leaving_a_stream_of_several_prompts_cancels_them_all(world: OpenAIServer) -> None:
    """With the asynchronous client."""

    async def leave() -> str:
        async with world.async_openai() as client:
            stream = await client.completions.create(
                model="tale", prompt=[PROMPT, OTHER], max_tokens=900, stream=True, extra_body=FOREVER
            )
            async with stream:
                async for chunk in stream:
                    return chunk.id.removeprefix("cmpl-")
        raise AssertionError("the stream had no chunk")

    with world.watch.held():
        request_id = asyncio.run(leave())
        world.wait_closed(request_id)
    assert [world.watch.ending(request_id).reason for _ in range(2)] == [FinishReason.CANCELLED] * 2


def test_cancelling_by_id_ends_a_stream_with_an_error_event(world: OpenAIServer, client: openai.OpenAI) -> None:
    """The stream ends with [DONE]; the openai package raises the error."""
    with world.watch.held():
        stream = client.completions.create(model="tale", prompt=PROMPT, max_tokens=900, stream=True, extra_body=FOREVER)
        request_id = next(iter(stream)).id.removeprefix("cmpl-")
        assert httpx.post(f"{world.url}/v1/requests/{request_id}/cancel", timeout=LONG_S).json()["cancelled"] is True
    with stream, pytest.raises(openai.APIError, match="cancelled") as raised:
        list(stream)
    assert raised.value.code == "cancelled"


def test_a_request_that_runs_out_of_time_is_an_error(world: OpenAIServer) -> None:
    """Streamed or not; the code is the reason's name."""
    body = {"prompt": PROMPT, "max_tokens": 900, "timeout_s": 1e-6, **FOREVER}
    with world.client() as client:
        whole = client.post("/v1/completions", json=body)
        streamed = client.post("/v1/completions", json={**body, "stream": True})
    assert (whole.status_code, whole.json()["error"]["code"]) == (504, "deadline")
    assert streamed.status_code == 200
    events = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line.startswith("data")]
    assert json.loads(events[-2])["error"]["code"] == "deadline"
    assert events[-1] == "[DONE]"


def test_the_asynchronous_client_gets_the_same(world: OpenAIServer, client: openai.OpenAI) -> None:
    """Several at once."""

    async def ask() -> list[str]:
        async with world.async_openai() as client:
            options: dict[str, Any] = {"model": "tale", "prompt": PROMPT, "max_tokens": 6, "temperature": 0}
            completions = await asyncio.gather(*(client.completions.create(**options) for _ in range(6)))
        return [completion.choices[0].text for completion in completions]

    assert set(asyncio.run(ask())) == {complete(client).choices[0].text}
