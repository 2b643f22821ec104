"""A server with the spec types of draft heads: responses equal those without heads, and drafts are counted."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import httpx
import pytest
from tests.exact import EXACT, EXACT_FLAGS, assert_same_but_for_near_ties
from tests.native.conftest import TinyModels
from tests.server.running import RunningServer

from paceline import LLM
from paceline.server.flags import DiskFiles, resolve
from paceline.speculation.depth_chooser import DepthChooser
from paceline.testing.models import DFlashSpec, Eagle3Spec, HunYuan3Spec, LlamaSpec

pytestmark = pytest.mark.native

PROMPT = "The quick brown fox"
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "cache_prompt": False, "n_predict": 100}
SCHEMA = {
    "type": "object",
    "properties": {
        "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 8, "maxItems": 8},
        "text": {"type": "string", "minLength": 60, "maxLength": 80},
    },
    "required": ["flags", "text"],
    "additionalProperties": False,
}


class Served:
    """A model and its heads, and the flags of a server that drafts with them."""

    def __init__(self, tiny_models: TinyModels, spec_type: str) -> None:
        self.spec_type = spec_type
        flags: list[str] = []
        if spec_type == "draft-eagle3":
            self.path = tiny_models(LlamaSpec(n_layer=3, layer_gain=0.4))
            flags = ["-md", str(tiny_models(Eagle3Spec(agrees=True)))]
        elif spec_type == "draft-dflash":
            self.path = tiny_models(LlamaSpec(n_layer=3, layer_gain=0.4))
            flags = ["-md", str(tiny_models(DFlashSpec(markov_rank=16, layer_gain=0.1)))]
        else:
            self.path = tiny_models(HunYuan3Spec(layer_gain=0.4, agrees=True))
        sizes = ("-np", "2", "-c", "1024", "--slots", "--props", *EXACT_FLAGS)
        self._flags = ("-m", str(self.path), "--spec-type", spec_type, *flags, *sizes)

    def plain(self) -> LLM:
        return LLM(self.path, num_slots=1, n_ctx=1024, **EXACT)

    @contextmanager
    def server(self, isolation: str) -> Iterator[RunningServer]:
        settings = resolve([*self._flags, "--isolation", isolation], {}, DiskFiles(print)).settings
        with RunningServer(settings) as running:
            yield running


@pytest.fixture(scope="module", params=["draft-mtp", "draft-eagle3", "draft-dflash"])
def served(request: pytest.FixtureRequest, tiny_models: TinyModels) -> Served:
    return Served(tiny_models, request.param)


@pytest.fixture
def running(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    """A server in which every sequence gets as many drafts as there is room for, whatever they cost."""

    def choose(
        self: Any, candidates: Sequence[tuple[Any, int]], rows: Any, num_cells: int, most: int, num_ticks: int
    ) -> list[int]:
        return [min(cap, 4, most // len(candidates)) for _, cap in candidates]

    monkeypatch.setattr(DepthChooser, "choose", choose)
    with served.server("thread") as running:
        yield running


@pytest.fixture
def client(running: RunningServer) -> Iterator[httpx.Client]:
    with running.client() as client:
        yield client


def complete(client: httpx.Client, prompt: str, **body: Any) -> Any:
    response = client.post("/completion", json={"prompt": prompt, "return_tokens": True, **GREEDY, **body})
    assert response.status_code == 200, response.text
    return response.json()


def number(client: httpx.Client, name: str) -> float:
    (line,) = [line for line in client.get("/metrics").text.splitlines() if line.startswith(f"{name} ")]
    return float(line.split()[-1])


def test_text_is_the_same_and_drafts_are_counted_everywhere(served: Served, client: httpx.Client) -> None:
    """In timings, in OpenAI's usage, in the metrics, and by name among the slots and settings."""
    num_drafts = num_accepted = 0
    with served.plain() as plain:
        for prompt in (PROMPT, "Hello"):
            found = complete(client, prompt)
            alone = plain.generate(prompt, max_tokens=100, temperature=0, ignore_eos=True, cache_prompt=False)
            assert_same_but_for_near_ties(plain, plain.tokenizer.encode(prompt), alone.token_ids, found["tokens"])
            assert found["generation_settings"]["speculative.types"] == served.spec_type
            timings = found["timings"]
            assert timings["draft_n"] >= 40
            assert 0 < timings["draft_n_accepted"] < timings["draft_n"]
            num_drafts, num_accepted = num_drafts + timings["draft_n"], num_accepted + timings["draft_n_accepted"]
    assert all(slot["speculative"] for slot in client.get("/slots").json())
    assert number(client, "paceline_draft_tokens_total") == num_drafts
    assert number(client, "paceline_draft_tokens_accepted_total") == num_accepted
    body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    details = response.json()["usage"]["completion_tokens_details"]
    assert 0 < details["accepted_draft_tokens"] < details["draft_tokens"]
    without = complete(client, PROMPT, speculation=False)
    assert "draft_n" not in without["timings"]
    assert without["generation_settings"]["speculative.types"] == "none"


def test_a_stop_in_the_middle_of_accepted_drafts_ends_the_text_there(served: Served, client: httpx.Client) -> None:
    """Also for the next request, which goes on from the cached prefix of the first."""
    with served.plain() as plain:
        whole = plain.generate(PROMPT, max_tokens=100, temperature=0, ignore_eos=True, cache_prompt=False).text
    stops = [pair for pair in map("".join, pairwise(whole)) if pair.isascii() and pair.isprintable()]
    assert len(stops) > 3
    for stop in stops[:4]:
        for cached in (False, True):
            found = complete(client, PROMPT, stop=[stop], cache_prompt=cached)
            assert found["content"] == whole[: whole.index(stop)]
            assert (found["stop_type"], found["stopping_word"]) == ("word", stop)


def test_a_schema_is_followed_along_drafts(served: Served, client: httpx.Client) -> None:
    """The JSON is valid, and the same as without drafts."""
    spaces = [[byte, False] for byte in b" \t\r\n"]  # a random model might write nothing else
    body = {"json_schema": SCHEMA, "n_predict": 300, "ignore_eos": False, "logit_bias": spaces}
    found = complete(client, PROMPT, **body)
    without = complete(client, PROMPT, **body, speculation=False)
    value = json.loads(found["content"])
    assert len(value["flags"]) == 8
    assert 60 <= len(value["text"]) <= 80
    assert found["content"] == without["content"]
    assert found["timings"]["draft_n"] > 0


def test_a_stream_outlives_the_worker_that_drafted_for_it(served: Served) -> None:
    """The next worker loads the heads again; the text goes on as if nothing had been."""
    body = {
        "prompt": PROMPT,
        "stream": True,
        "return_tokens": True,
        "max_buffered_tokens": 4,
        "slow_reader": "pause",
        **GREEDY,
        "n_predict": 400,
    }
    with served.plain() as plain:
        alone = plain.generate(PROMPT, max_tokens=400, temperature=0, ignore_eos=True, cache_prompt=False)
        with served.server("process") as running, running.client() as client:
            tokens: list[int] = []
            last: dict[str, Any] = {}
            with client.stream("POST", "/completion", json=body) as response:
                for line in response.iter_lines():
                    if not line.startswith("data: "):
                        continue
                    last = json.loads(line.removeprefix("data: "))
                    assert "error" not in last, last
                    if not last["stop"]:
                        is_first = not tokens
                        tokens += last["tokens"]
                        if is_first:
                            os.kill(running.engine.worker_pid, signal.SIGKILL)
            assert_same_but_for_near_ties(plain, plain.tokenizer.encode(PROMPT), alone.token_ids, tokens)
            assert last["timings"]["draft_n"] > 0
            assert number(client, "paceline_engine_restarts_total") == 1
            assert all(slot["speculative"] for slot in client.get("/slots").json())
