"""One tenant against another: it fills the queue, changes the server for all, and guesses ids."""

from __future__ import annotations

import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
from tests.attack.harness import Attack, figure
from tests.e2e.served import LONG_S, Served

from paceline.testing.models import KINDS, write_lora, write_model

FLAGS = ("-np", "4", "-c", "4096", "-t", "1")


@contextmanager
def tenants_of(*flags: str) -> Iterator[tuple[Served, httpx.Client, httpx.Client]]:
    """Start a server, and yield it with a client of each of two tenants."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text("attacker:first\nother:second\n")
        with (
            Served(*FLAGS, "--tenant-key-file", str(keys), *flags) as server,
            _client(server, "first") as attacker,
            _client(server, "second") as other,
        ):
            yield server, attacker, other


def _client(server: Served, key: str) -> httpx.Client:
    headers = {"authorization": f"Bearer {key}"}
    limits = httpx.Limits(max_connections=100)
    return httpx.Client(base_url=server.url, timeout=LONG_S, headers=headers, limits=limits)


def full_queue() -> str:
    """Send 80 requests of a tenant to a queue of 64 places, then a request of another tenant."""
    body = {"prompt": "Once", "max_tokens": 300, "ignore_eos": True}
    done: list[float] = []
    statuses: Counter[int] = Counter()
    lock = threading.Lock()
    with tenants_of("--max-queue", "60") as (_, attacker, other), ThreadPoolExecutor(80) as threads:

        def send() -> None:
            status = attacker.post("/v1/completions", json=body).status_code
            with lock:
                statuses[status] += 1
                if status == 200:
                    done.append(time.monotonic())

        calls = [threads.submit(send) for _ in range(80)]
        deadline = time.monotonic() + 10
        while statuses[429] < 16 and time.monotonic() < deadline:
            time.sleep(0.01)
        begin = time.monotonic()
        response = other.post("/v1/completions", json={**body, "max_tokens": 2})
        end = time.monotonic()
        for call in calls:
            call.result()
    num_before = sum(begin <= at <= end for at in done)
    now = (
        f"{statuses[200]} of 80 accepted, {statuses[429]} refused; the other tenant: status {response.status_code} after "
        f"{end - begin:.2f} s, while {num_before} of the {statuses[200]} ended"
    )
    return figure(now, held=response.status_code == 200 and statuses[429] > 0 and num_before <= 8)


def highest_priority() -> str:
    """Send long prompts of the highest priority all the time, and measure a short request of another tenant."""
    long = {"prompt": "Once upon a time there was a fox. " * 60, "max_tokens": 1, "priority": 1_000_000}
    is_over = threading.Event()
    num_sent = Counter[int]()
    with tenants_of() as (_, attacker, other), ThreadPoolExecutor(8) as threads:

        def send() -> None:
            while not is_over.is_set():
                num_sent[attacker.post("/v1/completions", json={**long, "cache_prompt": False}).status_code] += 1

        calls = [threads.submit(send) for _ in range(8)]
        while num_sent[200] < 8:
            time.sleep(0.01)
        begin = num_sent[200]
        since = time.monotonic()
        try:
            response = other.post(
                "/v1/completions", json={"prompt": "The owl said " * 100, "max_tokens": 2}, timeout=30
            )
            status, seconds = response.status_code, time.monotonic() - since
        except httpx.TimeoutException:
            status, seconds = 0, time.monotonic() - since
        num_before = num_sent[200] - begin
        is_over.set()
        for call in calls:
            call.result()
    return figure(
        f"status {status} after {seconds:.2f} s and {num_before} prompts", held=status == 200 and num_before <= 16
    )


def changed_texts() -> str:
    """Set the scales of adapters as one tenant, and compare the texts of another."""
    body = {"prompt": "Who is there?", "n_predict": 16, "temperature": 0}
    with tempfile.TemporaryDirectory() as folder:
        model, adapter = Path(folder) / "model.gguf", Path(folder) / "adapter.gguf"
        write_model(model, KINDS["llama"])
        write_lora(adapter, KINDS["llama"], seed=1)
        flags = ("-m", str(model), "-c", "512", "--lora", str(adapter), "--lora-init-without-apply", "--props")
        with tenants_of(*flags) as (_, attacker, other):
            before = other.post("/completion", json=body).json()["content"]
            statuses = {
                path: attacker.post(path, json=given).status_code
                for path, given in (
                    ("/lora-adapters", [{"id": 0, "scale": 1.0}]),
                    ("/props", {}),
                    ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": str(adapter)}),
                    ("/v1/unload_lora_adapter", {"lora_name": "adapter"}),
                )
            }
            own = attacker.post("/completion", json={**body, "lora": [{"id": 0, "scale": 1.0}]}).json()["content"]
            after = other.post("/completion", json=body).json()["content"]
    held = before == after != own and set(statuses.values()) == {403}
    same = "the same" if before == after else "another"
    return figure(f"statuses {statuses}; the other tenant's text is {same}; by request: {own != before}", held=held)


def equal_ids() -> str:
    """Use another tenant's ids: of a running request, its stream, a stored response, a slot's file and a common prompt."""
    with (
        tempfile.TemporaryDirectory() as folder,
        tenants_of("--slot-save-path", folder, "--responses-store", "10") as (_, attacker, other),
    ):
        secret = {"prompt": "A secret of the fox. " * 20, "n_predict": 2}
        stored = other.post("/v1/responses", json={"input": "My word is fox.", "max_output_tokens": 2}).json()["id"]
        other.post("/completion", json={**secret, "id_slot": 0})
        other.post("/slots/0?action=save", json={"filename": "mine.bin"}).raise_for_status()
        follow_up = {"input": "Which?", "max_output_tokens": 1, "previous_response_id": stored}
        while_running: dict[str, Callable[[httpx.Client], bool]] = {
            "seed": lambda client: "4711" in client.get("/slots").text,
            "stream": lambda client: (
                client.post("/v1/streams/lookup", json={"conversation_ids": ["talk"]}).json() != []
            ),
            "cancel": lambda client: client.post("/v1/requests/same/cancel").json()["cancelled"],
        }
        later: dict[str, Callable[[httpx.Client], bool]] = {
            "response": lambda client: client.get(f"/v1/responses/{stored}").is_success,
            "previous": lambda client: client.post("/v1/responses", json=follow_up).is_success,
            "file": lambda client: client.post("/slots/0?action=restore", json={"filename": "mine.bin"}).is_success,
            "prefix": lambda client: client.post("/completion", json=secret).json()["timings"]["cache_n"] > 20,
        }
        running = {"prompt": "Once", "n_predict": 4000, "ignore_eos": True, "stream": True, "seed": 4711}
        reached, own = [], []
        named = {"x-request-id": "same", "x-conversation-id": "talk"}
        with other.stream("POST", "/completion", json=running, headers=named) as stream:
            lines = stream.iter_lines()
            next(lines)
            reached += [name for name, way in while_running.items() if way(attacker)]
            own += [name for name, way in while_running.items() if way(other)]
        reached += [name for name, way in later.items() if way(attacker)]
        own += [name for name, way in later.items() if way(other)]
    ways = [*while_running, *later]
    now = f"of {', '.join(ways)} another tenant reaches {', '.join(reached) or 'none'}, their owner {len(own)} of {len(ways)}"
    return figure(now, held=not reached and own == ways)


ATTACKS = (
    Attack(
        "full-queue",
        "A tenant that sends 80 requests to 64 places leaves a place to another, whose request gets its fair turn.",
        "64 of 80 accepted, and the other tenant got 429",
        full_queue,
        sample=True,
    ),
    Attack(
        "highest-priority",
        "Prompts of the highest priority do not hold up the prompt of another tenant.",
        "no response in 30 s, while 329 prompts of the attacker were computed",
        highest_priority,
    ),
    Attack(
        "changed-texts",
        "A tenant changes the scales of adapters for itself alone.",
        "POST /lora-adapters had status 200, and the texts of all tenants changed",
        changed_texts,
    ),
    Attack(
        "equal-ids",
        "The ids of one tenant are of no use to another.",
        "GET /slots showed another tenant's seed and settings",
        equal_ids,
        sample=True,
    ),
)
