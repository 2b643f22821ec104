"""Drafters that know the next tokens, as far as a test tells them."""

from __future__ import annotations

import math
import os
import random
import signal
from collections.abc import Sequence
from typing import Any

import pytest

from paceline import LLM, StreamChunk
from paceline.observability.metrics import Instrument
from paceline.speculation.depth_chooser import DepthChooser

DEEP = "tests.drafters:Deep"


def force_depths(monkeypatch: pytest.MonkeyPatch, most_each: int) -> None:
    """Let each sequence have a number of drafts if there is room, at any cost."""

    def choose(
        self: Any, candidates: Sequence[tuple[float, int]], rows: Any, num_cells: int, most: int, num_ticks: int
    ) -> list[int]:
        return [min(cap, most_each, most // len(candidates)) for _, cap in candidates]

    monkeypatch.setattr(DepthChooser, "choose", choose)
    monkeypatch.setattr(DepthChooser, "trial", lambda *_, **__: 0)
    monkeypatch.setattr(DepthChooser, "saved_s", lambda _: math.inf)


class Deep(Instrument):
    """Forces the depths of drafts in a worker, for as long as it lives."""

    def __init__(self) -> None:
        force_depths(pytest.MonkeyPatch(), 6)


def read_beside_a_kill(llm: LLM, prompt: str, options: dict[str, Any]) -> tuple[list[int], StreamChunk]:
    """Return the tokens of a stream whose worker is killed after the first twenty, and the last chunk."""
    token_ids: list[int] = []
    with llm.stream(prompt, max_buffered_tokens=4, **options) as stream:
        while len(token_ids) < 20:
            token_ids += stream.get().token_ids
        engine: Any = llm._engine
        os.kill(engine.worker_pid, signal.SIGKILL)
        for chunk in stream:
            token_ids += chunk.token_ids
    return token_ids, chunk


class Oracle:
    """Proposes the continuations in `futures`, each token wrong with some probability. Checks its calls.

    futures: prompts with all generated tokens. num_proposals: non-empty proposals.
    """

    def __init__(self, futures: Sequence[Sequence[int]] = (), *, error_rate: float = 0.0, seed: int = 0) -> None:
        self.futures = [list(future) for future in futures]
        self.known: dict[int, list[int]] = {}
        self.proposed: dict[int, list[int]] = {}
        self.num_proposals = 0
        self._error_rate, self._random = error_rate, random.Random(seed)

    def begin(self, key: int, token_ids: Sequence[int]) -> None:
        assert key not in self.known, "begun twice"
        self.known[key] = list(token_ids)

    def propose(self, key: int, max_tokens: int) -> list[int]:
        assert max_tokens >= 1
        assert not self.proposed.get(key), "the last proposal was neither observed nor rolled back"
        known = self.known[key]
        future = next(
            (future for future in self.futures if len(future) > len(known) and future[: len(known)] == known), known
        )
        right = future[len(known) : len(known) + max_tokens]
        drafts = [self._random.randrange(258) if self._random.random() < self._error_rate else item for item in right]
        self.proposed[key] = drafts
        self.num_proposals += bool(drafts)
        return drafts

    def rollback(self, key: int, num_tokens: int) -> None:
        assert 1 <= num_tokens <= len(self.proposed[key])
        del self.proposed[key][-num_tokens:]

    def observe(self, key: int, token_ids: Sequence[int]) -> None:
        right = self.proposed.pop(key, [])
        assert list(token_ids[: len(right)]) == right, "an accepted draft is no token of the sequence"
        self.known[key] += token_ids

    def end(self, key: int) -> None:
        del self.known[key]
        self.proposed.pop(key, None)


class BatchOracle(Oracle):
    """An oracle that is asked for all sequences of a tick at once, and not one by one. batches: the keys of each call."""

    def __init__(self, futures: Sequence[Sequence[int]] = (), *, error_rate: float = 0.0, seed: int = 0) -> None:
        super().__init__(futures, error_rate=error_rate, seed=seed)
        self.batches: list[list[int]] = []

    def propose_all(self, wanted: Sequence[tuple[int, int]]) -> list[list[int]]:
        keys = [key for key, _ in wanted]
        assert len(set(keys)) == len(keys) > 0
        self.batches.append(keys)
        return [super(BatchOracle, self).propose(key, max_tokens) for key, max_tokens in wanted]

    def propose(self, key: int, max_tokens: int) -> list[int]:
        raise AssertionError("asked one by one")


class LastAgain:
    """Proposes the last token of a sequence again and again, whatever comes of it."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}

    def begin(self, key: int, token_ids: Sequence[int]) -> None:
        self._last[key] = token_ids[-1]

    def propose(self, key: int, max_tokens: int) -> list[int]:
        return [self._last[key]] * max_tokens

    def observe(self, key: int, token_ids: Sequence[int]) -> None:
        self._last[key] = token_ids[-1]

    def rollback(self, key: int, num_tokens: int) -> None:
        pass

    def end(self, key: int) -> None:
        del self._last[key]
