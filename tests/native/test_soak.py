"""A worker process that is killed again and again under all kinds of load: every request ends, and nothing is lost.

PACELINE_SOAK_S: for how many seconds; by default short.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.possessions import Possessions

from paceline import LLM
from paceline.engine.worker.supervisor import RestartLimits
from paceline.engine.worker.worker_engine import WorkerEngine
from paceline.streaming import FinishReason, Stream, StreamChunk

pytestmark = [pytest.mark.native, pytest.mark.full]

SECONDS = float(os.environ.get("PACELINE_SOAK_S", "20"))
LONG_S = 60.0  # no wait of a test that passes takes so long
NUM_CLIENTS = 8
CHECKED = "tests.native.checked_worker:CheckEveryTick"
BY_ITSELF = {FinishReason.STOP, FinishReason.LENGTH}


class Client:
    """Sends requests in a row, and notes how each ended. Each has a thread."""

    def __init__(self, llm: LLM, stems: list[list[int]], seed: int) -> None:
        self.llm, self.stems, self.rng = llm, stems, random.Random(seed)
        self.reasons: Counter[FinishReason] = Counter()
        self.num_texts = 0

    def run(self, is_over: threading.Event) -> None:
        actions = [self.read_all, self.read_all, self.read_all, self.leave_early, self.cancel, self.sleepy, self.embed]
        while not is_over.is_set():
            self.rng.choice(actions)()

    def stream(self, **options: Any) -> Stream:
        rng = self.rng
        stem = rng.choice(self.stems)
        prompt = stem[: rng.randrange(1, len(stem))] + [rng.randrange(5, 200) for _ in range(rng.randrange(4))]
        wanted = {
            "max_tokens": rng.randrange(1, 60),
            "n": rng.choice([1, 1, 1, 2]),
            "seed": rng.randrange(2**32),
            "temperature": rng.choice([0.0, 0.8]),
            "cache_salt": rng.choice(["", "", "a", "b"]),
            "cache_prompt": rng.random() < 0.9,
            "priority": rng.randrange(-1, 2),
            "logprobs": rng.choice([None, None, 1]),
        }
        return self.llm.stream(prompt, **{**wanted, **options})

    def read_all(self) -> None:
        """To the end, which comes by itself."""
        assert self.note(self.stream(), []) <= BY_ITSELF

    def leave_early(self) -> None:
        """Abandons its request after a few chunks, or at once."""
        stream = self.stream(max_tokens=None, ignore_eos=True)
        for _ in range(self.rng.randrange(4)):
            stream.get()
        stream.close()
        assert stream.wait_released(LONG_S)
        reason = stream.finish_reason
        assert reason in {FinishReason.CANCELLED, *BY_ITSELF}
        self.reasons[reason] += 1

    def cancel(self) -> None:
        """Cancel and read to the end."""
        stream = self.stream(max_tokens=None, ignore_eos=True, n=1)
        chunks = [stream.get() for _ in range(self.rng.randrange(1, 10))]
        stream.cancel()
        found = self.note(stream, [chunk for chunk in chunks if isinstance(chunk, StreamChunk)])
        assert found <= {FinishReason.CANCELLED, *BY_ITSELF}

    def sleepy(self) -> None:
        """Read too slowly: the request pauses, or ends."""
        policy = self.rng.choice(["pause", "cancel"])
        stream = self.stream(max_tokens=40, ignore_eos=True, n=1, max_buffered_tokens=4, slow_reader=policy)
        if policy == "cancel":
            assert stream._channel.wait_finished(LONG_S)  # type: ignore[union-attr]
        else:
            self.read_all()
        assert self.note(stream, []) <= {FinishReason.SLOW_READER, *BY_ITSELF}

    def embed(self) -> None:
        """Check that a vector has the right size."""
        texts = [f"text {self.rng.randrange(1000)}" for _ in range(self.rng.randrange(1, 4))]
        assert self.llm.embed(texts).shape == (len(texts), self.llm.model.n_embd_out)
        self.num_texts += 1

    def note(self, stream: Stream, chunks: list[StreamChunk]) -> set[FinishReason]:
        """Read to the end; return the choices' reasons. One terminal chunk, the last; indices without a gap."""
        chunks += list(stream)
        lengths: Counter[int] = Counter()
        reasons: dict[int, FinishReason] = {}
        for chunk in chunks:
            assert chunk.choice not in reasons, "a chunk after the last one of its choice"
            assert chunk.index == lengths[chunk.choice]
            lengths[chunk.choice] += len(chunk.token_ids)
            chunk.text.encode()
            if chunk.finish_reason is not None:
                assert chunk.error is None, chunk.error
                reasons[chunk.choice] = chunk.finish_reason
        assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert chunks[-1].finish_reason is stream.finish_reason is not None
        assert stream.wait_released(LONG_S)
        self.reasons[min(reasons.values(), key=lambda reason: reason.rank)] += 1
        return set(reasons.values())


def kill_now_and_then(llm: LLM, is_over: threading.Event, rng: random.Random) -> int:
    """Whatever the worker is at: computing, idle, loading."""
    engine, kills = llm._engine, 0
    assert isinstance(engine, WorkerEngine)
    while not is_over.wait(rng.uniform(0.3, 3.0)):
        pid = engine.worker_pid
        with contextlib.suppress(ProcessLookupError):  # it was buried just now
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                kills += 1
    return kills


@pytest.mark.timeout(SECONDS + 600)
def test_nothing_is_lost_under_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random prefixes, salts, cancels, slow readers and kills: counts add up, every place is free, no process or file stays."""
    often = RestartLimits(max_restarts=10**6, first_wait_s=0.0, longest_wait_s=0.0)
    monkeypatch.setattr("paceline.engine.worker.worker_engine.RestartLimits", lambda: often)
    before = Possessions.now()
    rng, is_over = random.Random(11), threading.Event()
    options = {"num_slots": 4, "n_ctx": 700, "n_threads": 1, "host_cache_bytes": 2_000_000, "max_queue": 100}
    with LLM(isolation="process", instruments=[CHECKED], **options) as llm:
        stems = [[rng.randrange(5, llm.model.n_vocab) for _ in range(150)] for _ in range(5)]
        clients = [Client(llm, stems, seed) for seed in range(NUM_CLIENTS)]
        with ThreadPoolExecutor(NUM_CLIENTS + 1) as threads:
            killer = threads.submit(kill_now_and_then, llm, is_over, rng)
            running = [threads.submit(client.run, is_over) for client in clients]
            threading.Event().wait(SECONDS)
            is_over.set()
            for future in running:
                future.result()
            num_kills = killer.result()
        check_counts(llm, clients, num_kills)
        llm.generate("the last one", max_tokens=3)
        slots = llm.slots()
        assert (slots.num_processing, slots.num_waiting, len(slots)) == (0, 0, 4)
        assert llm.heartbeat().is_alive
    del llm, clients
    assert Possessions.now().gained_since(before) == []


def check_counts(llm: LLM, clients: list[Client], num_kills: int) -> None:
    """Check that the engine's counts match its readers'."""
    stats = llm.stats()
    reasons = sum((client.reasons for client in clients), Counter[FinishReason]())
    num_embedded = sum(client.num_texts for client in clients)
    assert (stats.resident, stats.queued) == (0, 0)
    assert stats.submitted == stats.completed + stats.cancelled + stats.failed
    assert stats.submitted == reasons.total() + num_embedded
    finished = {reason: stats.number("paceline_requests_finished_total", reason) for reason in FinishReason}
    ended_by_itself = sum(finished[reason] for reason in BY_ITSELF)
    assert ended_by_itself == sum(reasons[reason] for reason in BY_ITSELF) + num_embedded
    assert finished[FinishReason.CANCELLED] == reasons[FinishReason.CANCELLED]
    assert finished[FinishReason.SLOW_READER] == reasons[FinishReason.SLOW_READER]
    assert finished[FinishReason.ERROR] == 0
    assert num_kills > 0
    assert stats.number("paceline_engine_restarts_total") > 0
