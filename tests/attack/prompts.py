"""Long prompts of accepted clients: texts that cannot fit, and texts that have to be tokenised to be cut."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
from tests.attack.harness import Attack, Poller, bound_memory, bystander, figure, measured, post
from tests.e2e.served import Served

FLAGS = ("-np", "4", "-c", "8192", "-t", "1", "--embeddings")
MIB = 1 << 20
ALLOWED_MB = 2500
"""For server and worker. Much of it is address space: the tokenizer reserves a stack of a kilobyte for each byte of a text."""


def _texts() -> dict[str, str]:
    """Return texts of a mebibyte, each of a kind that costs a tokenizer much."""
    chosen = random.Random(1)
    letters = [chr(code) for block in (range(0xA1, 0x2000), range(0x1F300, 0x1F700)) for code in block]
    return {
        "blanks": " " * MIB,
        "letters": "a" * MIB,
        "line breaks": "\n" * MIB,
        "emoji": "🚀" * (MIB // 4),
        "Chinese": "".join(chr(chosen.randrange(0x4E00, 0xA000)) for _ in range(MIB // 3)),
        "characters": "".join(chosen.choices(letters, k=MIB // 3)),
    }


def _flood(server: Served, path: str, bodies: Sequence[dict[str, Any]]) -> Counter[int]:
    """Send requests at the same time; return how often each status came."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        return Counter(response.status_code for response in pool.map(lambda body: post(server, path, body), bodies))


def _attacked(path: str, bodies: Sequence[dict[str, Any]], expected: int, most_mb: float, most_s: float) -> str:
    """Flood a server with bounded memory, beside a client that requests two tokens again and again."""
    with Served(*FLAGS) as server:
        bound_memory(server, ALLOWED_MB)
        with measured(server) as now, Poller(server.url, bystander()) as other:
            statuses = _flood(server, path, bodies)
    held = (
        set(statuses) == {expected}
        and set(other.statuses) == {200}
        and now.server_mb < most_mb
        and other.longest_s < most_s
    )
    told = f"{dict(statuses)}; two tokens for another client took at most {other.longest_s:.2f} s; {now}"
    return figure(told, held=held)


def refused(number: int, *texts: str) -> str:
    """Send prompts of a mebibyte that cannot fit."""
    bodies = [{"prompt": texts[index % len(texts)], "max_tokens": 2} for index in range(number)]
    return _attacked("/v1/completions", bodies, 400, 300, 3)


def cut(number: int, texts: Sequence[str]) -> str:
    """Send prompts of a mebibyte that are to be cut, each of another kind."""
    bodies = [
        {"prompt": texts[index % len(texts)], "max_tokens": 2, "truncate": "left", "timeout_s": 120}
        for index in range(number)
    ]
    return _attacked("/v1/completions", bodies, 200, 600, 3)


def counted(number: int) -> str:
    """Ask for the tokens of a mebibyte with their texts."""
    return _attacked("/tokenize", [{"content": " " * MIB, "with_pieces": True}] * number, 200, 700, 3)


def left() -> str:
    """Send 40 prompts that are to be cut, leave after half a second, and send one more."""
    body = {"prompt": " " * MIB, "max_tokens": 2, "truncate": "left"}

    def leave(_: int) -> None:
        with suppress(httpx.TimeoutException):
            httpx.post(server.url + "/v1/completions", json=body, timeout=0.5)

    with Served(*FLAGS) as server:
        bound_memory(server, ALLOWED_MB)
        with measured(server) as now:
            with ThreadPoolExecutor(40) as pool:
                list(pool.map(leave, range(40)))
            begin = time.monotonic()
            status = post(server, "/v1/completions", body).status_code
            took_s = time.monotonic() - begin
    return figure(f"{status}; it took {took_s:.2f} s; {now}", held=status == 200 and took_s < 6)


ATTACKS = (
    Attack(
        "refused",
        "24 prompts of 1 MiB of blanks that cannot fit are refused without being tokenised.",
        "server +1,488 MB, 11.4 s, another client's two tokens took 1.7 s; a server in 1,200 MB was killed within 2 s",
        lambda: refused(24, " " * MIB),
        sample=True,
    ),
    Attack(
        "refused-40",
        "40 prompts of 1 MiB that cannot fit, of all kinds, are refused without being tokenised.",
        "4.85 GB, and another client waited 93 s for two tokens",
        lambda: refused(40, *_texts().values()),
    ),
    Attack(
        "cut",
        "24 prompts of 1 MiB of blanks that are tokenised to be cut wait for each other, and no other request waits for them.",
        "server +1,540 MB, another client's two tokens took 5.9 s",
        lambda: cut(24, [" " * MIB]),
    ),
    Attack(
        "cut-kinds", "The same with 12 prompts of six kinds of text.", "as above", lambda: cut(12, [*_texts().values()])
    ),
    Attack(
        "tokenize",
        "24 requests for the tokens of 1 MiB wait for each other, and no other request waits for them.",
        "server +5,424 MB, another client's two tokens took 8.5 s, /health 4 s",
        lambda: counted(24),
    ),
    Attack(
        "left",
        "A prompt does not wait for 40 others of 1 MiB whose clients have left.",
        "it took 11.1 s; server +1,602 MB",
        left,
    ),
)
