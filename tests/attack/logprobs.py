"""Requests of one accepted client with responses or grammars far larger than their bodies."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.attack.harness import MB, Attack, bound_memory, figure, measured, post
from tests.e2e.served import Served

FLAGS = ("-np", "8", "-c", "8192", "-t", "1")


def refused_logprobs() -> str:
    """Ask for 1,000 alternatives of each token of four prompts, and of 16 choices, within 150 MB."""
    prompts = {"prompt": [[5] * 1000] * 4, "max_tokens": 1, "prompt_logprobs": 1000}
    choices = {"prompt": "a", "max_tokens": 100, "n": 16, "logprobs": 1000}
    with Served(*FLAGS) as server:
        bound_memory(server, 150)
        with measured(server) as now:
            statuses = {post(server, "/v1/completions", body).status_code for body in (prompts, choices) * 5}
    held = statuses == {400} and now.server_mb < 30 and now.stood_s < 0.5
    return figure(f"status {statuses}; {now}", held=held)


def largest_responses() -> str:
    """Ask for as many log-probabilities as a response may have, in each shape."""
    text = {"prompt": [5] * 260, "max_tokens": 1}
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "prompt_logprobs": ("/v1/completions", {**text, "prompt_logprobs": 1000}),
        "echo": ("/v1/completions", {**text, "echo": True, "logprobs": 1000}),
        "logprobs": (
            "/v1/completions",
            {"prompt": "a", "max_tokens": 32, "n": 8, "logprobs": 1000, "ignore_eos": True},
        ),
        "n_probs": ("/completion", {"prompt": "a", "n_predict": 32, "n_cmpl": 8, "n_probs": 1000, "ignore_eos": True}),
        "stream": (
            "/v1/completions",
            {"prompt": "a", "max_tokens": 64, "n": 16, "logprobs": 1000, "ignore_eos": True, "stream": True},
        ),
    }
    figures, held = [], True
    with Served(*FLAGS) as server:
        post(server, "/v1/completions", {"prompt": "a", "max_tokens": 1, "logprobs": 1})
        bound_memory(server, 600)
        for name, (path, body) in bodies.items():
            with measured(server) as now:
                response = post(server, path, body)
            figures.append(f"{name}: {len(response.content) / MB:.0f} MB, {now}")
            held = held and response.status_code == 200 and now.server_mb < 300 and now.stood_s < 0.6
    return figure("; ".join(figures), held=held)


def doubled_terminals() -> str:
    """Send Lark grammars and patterns with a compiled size that grows with the square of their text."""
    doubled = "start: T15\nT0: /a?/\n" + "\n".join(f"T{i + 1}: T{i} T{i}" for i in range(15))
    bodies: list[dict[str, Any]] = [{"lark": doubled}, {"regex": "(a|bc)?" * 40_000}, {"regex": "(a|)" * 32_768}]
    with Served(*FLAGS) as server:
        bound_memory(server, 300)
        with measured(server) as now:
            statuses = {
                post(server, "/v1/completions", {"prompt": "a", "max_tokens": 1, **body}).status_code for body in bodies
            }
    held = statuses == {400} and now.server_mb < 60 and now.stood_s < 1
    return figure(f"status {statuses}; {now}", held=held)


def flood_of_grammars() -> str:
    """Send 60 distinct grammars of 40,000 characters, each of which compiles to about 16 MB."""
    with Served(*FLAGS) as server:
        bound_memory(server, 600)
        with measured(server) as now:
            statuses = {
                post(
                    server,
                    "/v1/completions",
                    {"prompt": "a", "max_tokens": 1, "lark": f'start: "{turn}{"a" * 40_000}"'},
                ).status_code
                for turn in range(60)
            }
    held = statuses == {200} and now.server_mb < 300 and now.worker_mb is not None and now.worker_mb < 300
    return figure(f"status {statuses}; {now}", held=held)


def timing_of_grammars() -> str:
    """Compare how long another tenant's schema takes with how long an unused one takes."""
    headers = [{"Authorization": f"Bearer {key}"} for key in ("first-key", "second-key")]

    def seconds(schema: dict[str, Any], who: dict[str, str]) -> float:
        begin = time.monotonic()
        body = {"prompt": "a", "max_tokens": 1, "json_schema": schema}
        assert post(server, "/v1/completions", body, **who).status_code == 200
        return time.monotonic() - begin

    unused, others, own = [], [], []
    with TemporaryDirectory() as folder:
        keys = Path(folder, "keys")
        keys.write_text("one:first-key\ntwo:second-key\n")
        server = Served(*FLAGS, "--tenant-key-file", str(keys))
    with server:
        for turn in range(7):
            schemas = [
                {"type": "object", "properties": {f"{name}{turn}x{i}": {"type": "string"} for i in range(800)}}
                for name in "ab"
            ]
            seconds(schemas[0], headers[0])
            others.append(seconds(schemas[0], headers[1]))
            unused.append(seconds(schemas[1], headers[1]))
            own.append(seconds(schemas[1], headers[1]))
    medians = [1000 * statistics.median(times) for times in (others, unused, own)]
    held = medians[0] > 0.6 * medians[1]
    return figure(
        f"another tenant's schema {medians[0]:.0f} ms, an unused one {medians[1]:.0f} ms, an own one {medians[2]:.0f} ms",
        held=held,
    )


ATTACKS = (
    Attack(
        "refused",
        "More log-probabilities than a response may have are refused before a token is computed.",
        "20 kB of body made 255 MB of response and 1,985 MB of memory, and the event loop stood 2 s",
        refused_logprobs,
        sample=True,
    ),
    Attack(
        "largest",
        "The largest accepted responses are encoded off the event loop, within a bounded memory.",
        "90 MB of response, and the event loop stood 1.1 s, for 1,000 alternatives of many choices",
        largest_responses,
    ),
    Attack(
        "doubled",
        "Grammars that are small and compile to gigabytes are refused.",
        "185 characters took 3.2 GB and 17 s, and 280,000 characters 7.9 GB and 57 s",
        doubled_terminals,
        sample=True,
    ),
    Attack(
        "flood",
        "Compiled grammars take a bounded memory, however many there are.",
        "64 grammars, or 1.6 GB at the limit of 4 million characters, stayed in memory",
        flood_of_grammars,
    ),
    Attack(
        "timing",
        "How long a schema takes does not tell whether another tenant has used it.",
        "another tenant's schema 139 ms, an unused one 815 ms, an own one 118 ms",
        timing_of_grammars,
    ),
)
