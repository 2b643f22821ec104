"""Attacks through the models of a server: models that stay when unloaded, pages that load them, files that are replaced."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from tests.attack.harness import MB, Attack, figure, memory_kb
from tests.e2e.served import LONG_S, Served

from paceline.demo import demo_model_path
from paceline.testing.models import LlamaSpec, numbered, write_model

FLAGS = ("-np", "1", "-c", "512", "-t", "1", "--no-spare-worker")
TINY = LlamaSpec(n_ctx_train=2048)
WORDS = LlamaSpec(n_ctx_train=2048, vocabulary=numbered(200))
NUM_LOADS = 20
NUM_FIRST = 4  # loads before the memory is compared
PAGE = {"sec-fetch-site": "cross-site", "user-agent": "Mozilla/5.0"}
READS = ("/props?model=demo", "/slots?model=demo&autoload=true", "/metrics?model=demo&autoload=1", "/models?reload=1")


@contextmanager
def _router() -> Iterator[tuple[Served, httpx.Client]]:
    """Yield a server of one folder with the demo model, which it has not loaded, and a client."""
    with tempfile.TemporaryDirectory() as name:
        models = Path(name) / "models"
        models.mkdir()
        shutil.copy(demo_model_path(), models / "demo.gguf")
        caches = dict.fromkeys(("HF_HUB_CACHE", "LLAMA_CACHE", "OLLAMA_MODELS"), name)
        with (
            Served("--models-dir", str(models), *FLAGS, is_ready=False, **caches) as server,
            httpx.Client(base_url=server.url, timeout=LONG_S) as client,
        ):
            yield server, client


def _state(client: httpx.Client) -> str:
    return str(client.get("/v1/models/demo").json()["status"]["state"])


def _num_descriptors(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def loads_and_unloads() -> str:
    """Load and unload one model 20 times, and compare with the server after the fourth time."""
    kilobytes, descriptors = [], []
    with _router() as (server, client):
        for _ in range(NUM_LOADS):
            client.post("/completion", json={"model": "demo", "prompt": "Once", "n_predict": 1}).raise_for_status()
            client.post("/models/unload", json={"model": "demo"}).raise_for_status()
            while _state(client) != "unloaded":
                time.sleep(0.02)
            kilobytes.append(memory_kb(server.pid, "VmRSS"))
            descriptors.append(_num_descriptors(server.pid))
    loads = NUM_LOADS - NUM_FIRST
    grown = (kilobytes[-1] - kilobytes[NUM_FIRST - 1]) * 1024 / MB / loads
    opened = (descriptors[-1] - descriptors[NUM_FIRST - 1]) / loads
    return figure(f"{grown:.2f} MB and {opened:.2f} descriptors a load", held=grown < 0.3 and opened < 0.3)


def _replaced(spec: LlamaSpec) -> tuple[bool, set[int], int]:
    """Replace the model's file by another one within a stream, and kill the worker.

    Returns:
        Whether the stream ended with an error about that, the statuses of ten later requests, and the vocabulary's size.
    """
    with tempfile.TemporaryDirectory() as name:
        path = write_model(Path(name) / "tiny.gguf", TINY)
        with (
            Served("-m", str(path), *FLAGS[:-1]) as server,
            httpx.Client(base_url=server.url, timeout=LONG_S) as client,
        ):
            body = {"prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/completions", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                write_model(path.with_suffix(".new"), spec, seed=1).replace(path)
                os.kill(server.children()[0], signal.SIGKILL)
                ended = any("model_changed" in line for line in lines)
            end = time.monotonic() + LONG_S
            while client.get("/health").status_code != 200 and time.monotonic() < end:
                time.sleep(0.1)
            short = {"prompt": "<7><12>", "max_tokens": 2}
            statuses = {client.post("/v1/completions", json=short).status_code for _ in range(10)}
            return ended, statuses, int(client.get("/v1/models").json()["data"][0]["meta"]["n_vocab"])


def replaced_files() -> str:
    """Replace a model by another one with the same vocabulary, and by one with another vocabulary."""
    same, other = _replaced(TINY), _replaced(WORDS)
    held = (same[:2], other[:2]) == ((True, {200}), (True, {200}))
    held = held and (same[2], other[2]) == (TINY.vocabulary.size, WORDS.vocabulary.size)
    told = {True: "ended with model_changed", False: "went on"}
    return figure(
        f"the stream {told[same[0]]}, later ones {same[1]}; with another vocabulary it {told[other[0]]}, later ones {other[1]}",
        held=held,
    )


def page_that_loads() -> str:
    """Read routes as an image on a page of another origin would, then the same with the header of a program's consent."""
    with _router() as (_, client):
        statuses = {path: client.get(path, headers=PAGE).status_code for path in READS}
        time.sleep(1.0)  # a load would have begun
        state = _state(client)
        allowed = client.get(READS[0], headers={**PAGE, "x-requested-with": "test"}).status_code
    held = set(statuses.values()) == {400, 403} and state == "unloaded" and allowed == 200
    return figure(f"{statuses}, the model is {state}; {allowed} with X-Requested-With", held=held)


ATTACKS = (
    Attack(
        "unloads",
        "A model that is loaded and unloaded leaves nothing in the server's process.",
        "1.54 MB and 2 descriptors a load; 47 MB with a vocabulary of 150,000 tokens",
        loads_and_unloads,
    ),
    Attack(
        "page",
        "A web page of another origin neither loads a model nor has the list of models read again.",
        "200 for each route, and the model was loaded",
        page_that_loads,
        sample=True,
    ),
    Attack(
        "replaced",
        "A worker that would load a file that replaced the model's continues no request, and later ones are the new model's.",
        "the stream went on with the other model's tokens; with another vocabulary every later request got 400",
        replaced_files,
    ),
)
