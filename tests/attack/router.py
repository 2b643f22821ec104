"""Attacks on a server with several models: models that stay after they are unloaded, and web pages that load them."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from tests.attack.harness import MB, Attack, figure, memory_kb
from tests.e2e.served import LONG_S, Served

from paceline.demo import demo_model_path

FLAGS = ("-np", "1", "-c", "512", "-t", "1", "--no-spare-worker")
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
)
