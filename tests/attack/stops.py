"""Requests of one accepted client that are small to send and wide or slow to look after: stop texts first."""

from __future__ import annotations

import json

from tests.attack.harness import Attack, bound_memory, figure, measured, post
from tests.e2e.served import Served

FLAGS = ("-np", "4", "-c", "2048", "-t", "1")


def _texts(number: int, length: int) -> list[str]:
    """Return texts of four bytes a character that share no beginning."""
    return [chr(0x1F300 + index) * length for index in range(number)]


def refused_stops() -> str:
    """Send 20 sets of 256 texts of 4,080 characters within 300 MB."""
    texts = _texts(256, 4080)
    body = json.dumps({"prompt": "Once", "max_tokens": 2, "stop": texts}, ensure_ascii=False).encode()
    with Served(*FLAGS) as server:
        bound_memory(server, 300)
        with measured(server) as now:
            statuses = {post(server, "/v1/completions", body).status_code for _ in range(20)}
    held = statuses == {400} and now.server_mb < 60
    return figure(f"status {statuses}; {now}", held=held)


def widest_stops() -> str:
    """Send the largest set that is accepted 50 times within 300 MB."""
    stops = [text[:-2] for text in _texts(256, 64)]
    with Served(*FLAGS) as server:
        bound_memory(server, 300)
        with measured(server) as now:
            statuses = {
                post(
                    server,
                    "/v1/completions",
                    {"prompt": "Once", "max_tokens": 2, "stop": [f"{turn:02d}{text}" for text in stops]},
                ).status_code
                for turn in range(50)
            }
    held = statuses == {200} and now.server_mb < 60 and now.worker_mb is not None and now.worker_mb < 60
    return figure(f"status {statuses}; {now}", held=held)


ATTACKS = (
    Attack(
        "refused",
        "256 stop texts of 4,080 characters are refused, and 20 such requests leave no memory behind.",
        "320 MB in the server and as much in the worker a request, 4 to 5 s each; the fifth in 3 GB killed the server",
        refused_stops,
    ),
    Attack(
        "largest",
        "The largest accepted set of stop texts, 50 times with other texts, is served within a small memory.",
        "the same automaton took 300 bytes for each byte of the texts, and stayed until a full collection",
        widest_stops,
        sample=True,
    ),
)
