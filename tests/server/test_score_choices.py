"""/v1/score_choices: the log-likelihood of choices after a prompt, and their distribution."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from tests.exact import EXACT
from tests.server.running import RunningServer

from paceline import LLM
from paceline.errors import DecodeError
from paceline.server.settings import ServerSettings

pytestmark = pytest.mark.native

ENGINE: dict[str, Any] = {**EXACT, "isolation": "thread", "num_slots": 2, "n_ctx": 1024, "max_queue": 2}
PROMPT = "Once upon a time there was a little girl. She liked to play with her"
CHOICES = [" dog.", " cat", " ball and her friends"]


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with RunningServer(ServerSettings(engine_options=ENGINE)) as server, server.client() as client:
        yield client


def test_figures_are_those_of_the_library(client: httpx.Client) -> None:
    """Log-likelihoods and probabilities, of more choices than the queue has places."""
    choices = [*CHOICES, " a", " b", " c", " d", " e"]
    response = client.post(
        "/v1/score_choices", json={"prompt": PROMPT, "choices": choices, "length_normalization": "bytes"}
    )
    assert response.status_code == 200, response.text
    body = response.json()
    with LLM(**ENGINE) as llm:
        scores = llm.score(PROMPT, choices)
        decision = llm.decide(PROMPT, choices, length_normalization="bytes")
        num_prompt = len(llm.tokenizer.encode(PROMPT))
    assert [entry["index"] for entry in body["data"]] == list(range(len(choices)))
    for entry, score, prob in zip(body["data"], scores, decision.probs, strict=True):
        assert entry["logprob"] == pytest.approx(score.logprob, abs=1e-4)
        assert entry["logprobs"] == pytest.approx(score.logprobs, abs=1e-4)
        assert entry["prob"] == pytest.approx(prob, abs=1e-4)
        assert entry["token_ids"] == list(score.token_ids)
        assert (entry["num_bytes"], entry["is_greedy"]) == (score.num_bytes, score.is_greedy)
    num_tokens = num_prompt + sum(len(score.token_ids) for score in scores)
    assert body["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def test_figures_are_those_of_a_completion_with_echo(client: httpx.Client) -> None:
    """As programs for OpenAI's API compute them."""
    api = openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0)
    (entry, *_) = client.post("/v1/score_choices", json={"prompt": PROMPT, "choices": CHOICES}).json()["data"]
    whole = api.completions.create(model="m", prompt=PROMPT + CHOICES[0], max_tokens=0, logprobs=1, echo=True)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert sum(logprobs.token_logprobs[-len(entry["token_ids"]) :]) == pytest.approx(entry["logprob"], abs=1e-4)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"choices": [" a", ""]}, "choices"),
        ({"choices": []}, "choices"),
        ({"choices": [" a", [5]]}, "prompt"),
        ({"choices": [" a"] * 8193}, "choices"),
        ({"choices": [" a"], "length_normalization": "words"}, "length_normalization"),
        ({"choices": [" a" * 3000]}, None),
        ({"choices": [" a"], "prompt": ""}, "prompt"),
        ({"choices": ["a"] * 8000, "prompt": "a" * 5000}, "choices"),
    ],
)
def test_wrong_bodies_are_refused(client: httpx.Client, body: dict[str, Any], param: str | None) -> None:
    """With 400 and the field; choices that do not fit the context as prompts that do not."""
    response = client.post("/v1/score_choices", json={"prompt": PROMPT, **body})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param, response.text


def test_a_long_call_leaves_room_to_others(worlds: Any) -> None:
    """It has as many open choices as there are slots, and the queue is for other clients meanwhile."""
    world = worlds(num_slots=2, max_queue=4)
    engine = world.engine
    accept, num_open = engine.accept, []

    def counted(*arguments: Any, **options: Any) -> Any:
        channel = accept(*arguments, **options)
        num_open.append(engine.num_open)
        return channel

    engine.accept = counted
    engine.backend.hold()
    with ThreadPoolExecutor() as pool:
        call = pool.submit(
            world.client.post,
            "/v1/score_choices",
            json={"prompt": "one", "choices": [f" {number}" for number in range(40)]},
        )
        world.server.until(lambda: engine.num_open == 2)
        other = pool.submit(world.post, prompts=["two"])
        world.server.until(lambda: engine.num_open == 3)
        assert world.client.get("/health/ready").status_code == 200
        engine.backend.gate.set()
        assert (call.result().status_code, other.result().status_code) == (200, 200)
    assert len(num_open) == 41
    assert max(num_open) == 3


def test_a_choice_that_fails_ends_the_call(worlds: Any) -> None:
    """No other choice is begun after it."""
    world = worlds(num_slots=2, max_queue=4)
    accept, accepted = world.engine.accept, []

    def counted(*arguments: Any, **options: Any) -> Any:
        accepted.append(arguments)
        return accept(*arguments, **options)

    world.engine.accept = counted
    world.engine.faults.next_passes.extend(DecodeError("broken") for _ in range(8))
    response = world.client.post("/v1/score_choices", json={"prompt": "one", "choices": [" a"] * 40})
    assert response.status_code == 500, response.text
    assert len(accepted) < 10
    world.server.until(lambda: world.engine.num_open == 0)
