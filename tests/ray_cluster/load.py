"""Streams against a cluster, each of which is checked: one end, each token once, and the tokens that were to come."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
from tests.ray_cluster.local_cluster import KEY, LocalCluster

_HEADERS = {"authorization": f"Bearer {KEY}"}
_TIMEOUT = httpx.Timeout(120.0)


@dataclass(slots=True)
class Tally:
    """The outcomes of all streams."""

    num_done: int = 0
    num_tokens: int = 0
    num_as_undisturbed: int = 0
    longest_gap_s: float = 0.0
    failures: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, tokens: list[int], expected: list[int], gap_s: float) -> None:
        with self._lock:
            self.num_done += 1
            self.num_tokens += len(tokens)
            self.num_as_undisturbed += tokens == expected
            self.longest_gap_s = max(self.longest_gap_s, gap_s)

    def fail(self, why: str) -> None:
        with self._lock:
            self.failures.append(why)


def body(prompt: str, num_tokens: int) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "n_predict": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_tokens": True,
    }


def stream(client: httpx.Client, url: str, prompt: str, num_tokens: int) -> tuple[list[int], float]:
    """Return the tokens of one stream, and its longest pause. Raises `AssertionError` for one without a proper end."""
    tokens: list[int] = []
    end: dict[str, Any] | None = None
    last_s, gap_s = time.monotonic(), 0.0
    with client.stream("POST", f"{url}/completion", json=body(prompt, num_tokens)) as response:
        assert response.status_code == 200, f"{response.status_code}: {response.read()[:300]!r}"
        for line in response.iter_lines():
            if not line.startswith("data: "):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, f"it ended with {event['error']}"
            assert end is None, "something came after its end"
            now_s = time.monotonic()
            gap_s, last_s = max(gap_s, now_s - last_s), now_s
            tokens += event["tokens"]
            if event["stop"]:
                end = event
    assert end is not None, f"it has no end after {len(tokens)} tokens"
    assert len(tokens) == num_tokens == end["tokens_predicted"], f"{len(tokens)} tokens came, not {num_tokens}"
    return tokens, gap_s


class Load:
    """A number of concurrent streams, each followed by another, until `stop`."""

    def __init__(self, cluster: LocalCluster, num_streams: int, num_tokens: int) -> None:
        self.tally = Tally()
        self._cluster, self._num_tokens = cluster, num_tokens
        self._over = threading.Event()
        self._prompts = [f"The {name} went to the" for name in ("fox", "bear", "hare", "bird")]
        with httpx.Client(headers=_HEADERS, timeout=_TIMEOUT) as client:
            self._expected = {prompt: stream(client, cluster.url, prompt, num_tokens)[0] for prompt in self._prompts}
        self._threads = [threading.Thread(target=self._run, args=(index,), daemon=True) for index in range(num_streams)]
        for thread in self._threads:
            thread.start()

    def _run(self, index: int) -> None:
        with httpx.Client(headers=_HEADERS, timeout=_TIMEOUT) as client:
            while not self._over.is_set():
                prompt = self._prompts[index % len(self._prompts)]
                try:
                    tokens, gap_s = stream(client, self._cluster.url, prompt, self._num_tokens)
                except (AssertionError, httpx.HTTPError) as failure:
                    self.tally.fail(f"{type(failure).__name__}: {failure}")
                    time.sleep(0.1)
                else:
                    self.tally.add(tokens, self._expected[prompt], gap_s)

    def stop(self) -> Tally:
        """Let open streams end, and return the outcomes of all."""
        self._over.set()
        for thread in self._threads:
            thread.join(180)
        assert not any(thread.is_alive() for thread in self._threads), "a stream has no end"
        return self.tally
