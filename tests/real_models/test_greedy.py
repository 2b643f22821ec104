"""Greedy text of real models beside llama-server's of the same source: `python -m benchmarks.peers build llama-server`."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from benchmarks.peers.builds import Variant, build_info, find_llama_server
from tests.ports import free_port
from tests.real_models import texts
from tests.real_models.conftest import RealModel

from paceline import LLM

NUM_TOKENS = 96
NEAR_TIE = 0.3  # nats, in llama-server, between its token and the likeliest one here; kernels round differently
MAX_NEAR_TIES = 4  # of the tokens of a text
MODELS = (
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma-3-270m-Q4_K_M.gguf",
    "qwen2.5-coder-0.5b-instruct-Q4_K_M.gguf",
    "qwen2.5-coder-1.5b-instruct-Q4_K_M.gguf",
)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_equals_that_of_llama_server(real_model: RealModel, name: str) -> None:
    """Each token that llama-server draws is the likeliest here, too, but for near ties."""
    program = find_llama_server(build_info(Path(sys.executable)), Variant())
    if program is None:
        pytest.skip("llama-server is not built: python -m benchmarks.peers build llama-server")
    path = real_model(name)
    with _llama_server(program, path) as client:
        replies = [_greedy(client, prompt) for prompt in texts.PROMPTS]
    with LLM(path, num_slots=1, n_ctx=1024, isolation="thread") as llm:
        for prompt, theirs in zip(texts.PROMPTS, replies, strict=True):
            ids, drawn = llm.tokenizer.encode(prompt), [token for token, _ in theirs]
            assert len(drawn) > 10
            scored = llm.generate([*ids, *drawn], max_tokens=1, prompt_logprobs=1).prompt_logprobs
            assert scored is not None
            likeliest = [position.token_ids[0] for position in scored[len(ids) - 1 :]]
            gaps = [
                top[token] - top.get(ours, -math.inf)
                for ours, (token, top) in zip(likeliest, theirs, strict=True)
                if ours != token
            ]
            ours = llm.generate(ids, temperature=0, max_tokens=NUM_TOKENS).token_ids
            num_equal = next(
                (at for at, pair in enumerate(zip(ours, drawn, strict=False)) if pair[0] != pair[1]), len(ours)
            )
            print(
                f"{name}: {num_equal} of {len(drawn)} tokens equal, {len(gaps)} near ties up to {max(gaps, default=0):.3f}"
            )
            assert max(gaps, default=0) <= NEAR_TIE
            assert len(gaps) <= MAX_NEAR_TIES
            assert num_equal >= len(drawn) - 1 or gaps  # llama-server returns the token that ends a text, too


def _greedy(client: httpx.Client, prompt: str) -> list[tuple[int, dict[int, float]]]:
    """Return each token that llama-server draws, with the log-probabilities of the likeliest tokens."""
    body = {"prompt": prompt, "temperature": 0, "n_predict": NUM_TOKENS, "cache_prompt": False, "n_probs": 10}
    reply = client.post("/completion", json=body).raise_for_status().json()
    return [
        (entry["id"], {likely["id"]: likely["logprob"] for likely in entry["top_logprobs"]})
        for entry in reply["completion_probabilities"]
    ]


@contextmanager
def _llama_server(program: Path, model: Path) -> Iterator[httpx.Client]:
    port = free_port()
    command = [program, "-m", model, "--host", "127.0.0.1", "--port", str(port), "-np", "1", "-c", "1024"]
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600) as client:
                _wait_until_ready(client, server)
                yield client
        finally:
            server.terminate()


def _wait_until_ready(client: httpx.Client, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert server.poll() is None, "llama-server has ended"
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise AssertionError("llama-server does not get ready")
