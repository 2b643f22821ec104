"""Fronts and workers on the fake backend: real processes, real signals, no model."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from tests.engine_world import World
from tests.faulty_backend import HIDDEN_POISON, POISON
from tests.possessions import Possessions, is_gone
from tests.running_engine import LONG_S

from paceline.cli.trace import stays_of
from paceline.engine.worker import worker_engine
from paceline.engine.worker.supervisor import RestartLimits, Supervisor
from paceline.engine.worker.worker_engine import WorkerEngine
from paceline.errors import (
    EngineDied,
    EngineStopped,
    InvalidParams,
    ModelLoadError,
    PromptTooLong,
    QueueFull,
    RpcServerUnavailable,
    Unsupported,
)
from paceline.observability.trace_file import hook_name, read_trace
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.scheduling.records import TickRecord
from paceline.streaming import FinishReason, StreamChannel, StreamChunk
from paceline.testing.fake_engine_client import fake_worker_engine

FAULTY = "tests.faulty_backend:make"
OFTEN = RestartLimits(max_restarts=1000, first_wait_s=0.0)
LONG = {"num_cells": 200_000, "eos_every": 10**9}


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker on a busy machine has time to report its work."""
    monkeypatch.setattr(worker_engine, "_STATS_S", 60.0)


@contextmanager
def engine(**options: Any) -> Iterator[WorkerEngine]:
    """An engine with a worker that may die often."""
    options.setdefault("restarts", OFTEN)
    options["backend_options"] = {**LONG, **options.get("backend_options", {})}
    made = fake_worker_engine(**options)
    try:
        yield made
    finally:
        made.close()


def start(
    engine: WorkerEngine, prompt: str | list[int], *, options: RequestOptions | None = None, **params: Any
) -> StreamChannel:
    prepared = engine.prepare(prompt, SamplingParams(**{"seed": 1, **params}), options or RequestOptions())
    return engine.accept(prepared)


def kill(engine: WorkerEngine, number: int = signal.SIGKILL) -> None:
    """The worker that was started by this very engine."""
    pid = engine.worker_pid
    if pid is not None:
        os.kill(pid, number)


def first_of(channel: StreamChannel) -> StreamChunk:
    """Return the first chunk; the worker is computing its stream then."""
    first = channel.get()
    assert isinstance(first, StreamChunk)
    return first


def read(channel: StreamChannel, *taken: StreamChunk) -> tuple[list[int], str, StreamChunk]:
    """Ids, text and the terminal chunk of earlier and later chunks; every chunk goes on at the end of the last."""
    ids: list[int] = []
    texts: list[str] = []
    last = None
    for chunk in chain(taken, channel):
        assert chunk.index == len(ids)
        ids += chunk.token_ids
        texts.append(chunk.text)
        last = chunk
    assert last is not None
    return ids, "".join(texts), last


def test_tokens_of_a_stream_take_short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn looks at everything that may be due only if a deadline has come, or something else than a token."""
    turn_whole, num_whole = Supervisor._turn_whole, 0

    def counted(self: Supervisor, ready: list[object]) -> None:
        nonlocal num_whole
        num_whole += 1
        turn_whole(self, ready)

    with engine() as made:
        channel = start(made, "abc", max_tokens=500)
        first = first_of(channel)
        monkeypatch.setattr(Supervisor, "_turn_whole", counted)
        ids, _, _ = read(channel, first)
    assert len(ids) == 500
    assert 1 <= num_whole < 60  # at the end, and one for each second


def read_error(channel: StreamChannel, *taken: StreamChunk) -> BaseException | None:
    return read(channel, *taken)[2].error


def undisturbed(prompt: str | list[int], **params: Any) -> tuple[list[int], str]:
    """Return the output of the same request in an engine of this thread."""
    world = World(num_cells=LONG["num_cells"], eos_every=LONG["eos_every"])
    outcome = world.submit(prompt, **{"temperature": 0.8, "seed": 1, **params})
    world.run()
    return outcome.token_ids(), outcome.text()


# ---- what any engine does


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_a_worker_is_this_interpreter_and_aborts_at_once() -> None:
    """llama.cpp would look for a debugger first, and let it write to the terminal."""
    with engine() as one:
        process = Path(f"/proc/{one.worker_pid}")
        assert b"\0-m\0paceline.engine.worker\0" in (process / "cmdline").read_bytes()
        assert (process / "cmdline").read_bytes().startswith(os.fsencode(sys.executable))
        assert b"GGML_NO_BACKTRACE=1\0" in (process / "environ").read_bytes()


def test_streams_equal_an_engine_in_this_process() -> None:
    """Ids and text are the same, with stops, several choices and logprobs among the options."""
    with engine() as one:
        ids, text, last = read(start(one, "hello", max_tokens=50))
        assert (ids, text) == undisturbed("hello", max_tokens=50)
        assert last.finish_reason is FinishReason.LENGTH
        assert last.usage is not None
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (5, 50)
        ids, text, last = read(start(one, "hello", max_tokens=2000, stop=["th"], logprobs=1))
        assert (ids, text) == undisturbed("hello", max_tokens=2000, stop=["th"])
        assert last.stop == "th"


def test_an_error_in_a_request_is_raised_at_submit() -> None:
    """On the caller's thread, before anything is sent."""
    with engine() as one:
        with pytest.raises(Unsupported, match="grammars"):
            start(one, "hello", grammar="root ::= [a-z]+")
        with pytest.raises(InvalidParams, match="adapter 'x'"):
            start(one, "hello", options=RequestOptions(lora={"x": 1.0}))
        with pytest.raises(InvalidParams, match="no tokens"):
            start(one, "")


def test_a_request_that_cannot_go_to_another_process_ends_alone() -> None:
    """Options are plain values; should one not be, its request fails, and no other request notices."""
    with engine() as one:
        other = start(one, "hello", max_tokens=200)
        options = RequestOptions()
        object.__setattr__(options, "request_id", object())
        last = read(start(one, "hello", options=options))[2]
        assert last.finish_reason is FinishReason.ERROR
        assert "does not go between processes" in str(last.error)
        assert read(other)[:2] == undisturbed("hello", max_tokens=200)


def test_an_error_in_an_engine_is_raised_by_its_constructor() -> None:
    """With the error that the worker met; nothing is left of it."""
    with pytest.raises(ModelLoadError, match="no model 'x'"):
        fake_worker_engine(backend="tests.faulty_backend:refuse", backend_options={"name": "x"})
    with pytest.raises(
        Unsupported, match=r"draft heads \(MtpDrafter\) needs a model that has them, and FakeBackend has none"
    ):
        fake_worker_engine(speculation="ngram,mtp")
    with pytest.raises(InvalidParams, match=r"strategy 'nobody:knows' cannot be loaded"):
        fake_worker_engine(strategy="nobody:knows")


def test_a_strategy_goes_to_the_worker_by_name_with_its_options() -> None:
    """As text or as a mapping; the constructor raises errors in them, before there is a worker."""
    for strategy in ("decode_maximal:patience=3", {"name": "decode_maximal", "patience": 3}):
        with engine(strategy=strategy) as one:
            assert read(start(one, "hello", max_tokens=20))[:2] == undisturbed("hello", max_tokens=20)
    with pytest.raises(InvalidParams, match="unknown option 'patienc'; did you mean 'patience'"):
        fake_worker_engine(strategy="decode_maximal:patienc=3")


def test_a_queue_that_is_full_refuses_in_the_front() -> None:
    """The front counts accepted requests that have not ended."""
    with engine(max_queue=1, backend_options={"num_seq_ids": 2}) as one:  # one slot
        running = [start(one, "hello", max_tokens=None) for _ in range(2)]
        with pytest.raises(QueueFull, match="2 requests"):
            start(one, "hello")
        for channel in running:
            channel.cancel()
            assert read(channel)[2].finish_reason is FinishReason.CANCELLED
            assert channel.wait_released()
        assert len(read(start(one, "hello", max_tokens=3))[0]) == 3


def test_a_reader_that_falls_behind_pauses_its_request_and_goes_on() -> None:
    """Pause and resume go over the socket; nothing is lost."""
    with engine() as one:
        slow = start(one, "hello", max_tokens=None, options=RequestOptions(max_buffered_tokens=5))
        while [slot.state for slot in one.slots() if slot.is_processing] != ["paused"]:
            pass  # each look waits for the worker's tick
        assert read(start(one, "other", max_tokens=100))[:2] == undisturbed("other", max_tokens=100)
        num_behind = slow.num_buffered
        assert num_behind > 5
        ids: list[int] = []
        while len(ids) < num_behind + 100:
            chunk = slow.get()
            assert isinstance(chunk, StreamChunk)
            assert chunk.index == len(ids)
            ids += chunk.token_ids
        slow.cancel()
        assert ids[:400] == undisturbed("hello", max_tokens=400)[0][: len(ids)]


def test_embeddings_come_back_as_numbers() -> None:
    """A vector for each text, the same for the same."""
    with engine() as one:
        vectors = one.embed(["one", "two", "one"], None, RequestOptions()).result()
        assert [len(vector) for vector in vectors] == [3, 3, 3]
        assert list(vectors[0]) == list(vectors[2]) != list(vectors[1])
        assert one.embed([], None, RequestOptions()).result() == []


ENDLESS = RequestOptions(interval=1_000_000)  # no chunk before the end


def test_a_new_interval_reaches_the_worker() -> None:
    """A stream with a worker that keeps everything back brings chunks of the new length, without end or death between."""
    with engine() as one:
        channel = start(one, "hello", max_tokens=None, options=ENDLESS)
        channel.interval = 5
        chunks = [first_of(channel) for _ in range(20)]
        assert min(len(chunk.token_ids) for chunk in chunks) >= 5
        channel.interval = 1
        chunks += [first_of(channel) for _ in range(20)]
        channel.cancel()
        ids, text, last = read(channel, *chunks)
        assert (ids, text) == undisturbed("hello", max_tokens=len(ids))
        assert last.finish_reason is FinishReason.CANCELLED


def test_a_new_worker_has_the_interval_that_holds() -> None:
    """Set while a worker runs, and again while there is none: the next worker goes on by it."""
    with engine() as one:
        channel = start(one, "hello", max_tokens=None, options=ENDLESS)
        channel.interval = 5
        chunks = [first_of(channel)]
        first = one.worker_pid
        kill(one)
        chunks += up_to_the_next_worker(one, first, channel, chunks)
        assert min(len(chunk.token_ids) for chunk in chunks) >= 5
        channel.interval = 1_000_000
        second = one.worker_pid
        kill(one)
        channel.interval = 3
        chunks += up_to_the_next_worker(one, second, channel, chunks)
        channel.cancel()
        read(channel, *chunks)


def up_to_the_next_worker(
    engine: WorkerEngine, dead: int | None, channel: StreamChannel, taken: list[StreamChunk]
) -> list[StreamChunk]:
    """The chunks of a stream to the first chunk with tokens of the next worker after the killed worker."""
    chunks: list[StreamChunk] = []
    while engine.worker_pid in (None, dead):
        if isinstance(chunk := channel.get(0.01), StreamChunk):
            chunks.append(chunk)
    num_tokens = sum(len(chunk.token_ids) for chunk in (*taken, *chunks)) + channel.num_buffered
    while sum(len(chunk.token_ids) for chunk in (*taken, *chunks)) <= num_tokens:
        chunks.append(first_of(channel))
    return chunks


def test_scores_of_the_prompt_come_with_any_interval() -> None:
    """A request for them, with a worker that keeps nothing back, takes a new interval as well."""
    options = RequestOptions(interval=1_000_000)
    with engine() as one:
        channel = start(one, "hello", max_tokens=50, prompt_logprobs=1, options=options)
        channel.interval = 20
        chunks = list(channel)
        assert sum(len(chunk.prompt_logprobs) for chunk in chunks) == 4
        assert [token for chunk in chunks for token in chunk.token_ids] == undisturbed("hello", max_tokens=50)[0]
        assert all(len(chunk.token_ids) >= 20 for chunk in chunks[:-1])


def test_a_channel_of_the_callers_is_filled_by_a_worker() -> None:
    """A reader may wait for it before there is a request."""
    with engine() as one, ThreadPoolExecutor(1) as threads:
        channel = StreamChannel.create()
        reading = threads.submit(list, channel)
        request = one.prepare("hello", SamplingParams(seed=1, max_tokens=50), RequestOptions())
        assert one.accept(request, 3, channel) is channel
        assert [token for chunk in reading.result(LONG_S) for token in chunk.token_ids] == undisturbed(
            "hello", max_tokens=50
        )[0]
        with pytest.raises(InvalidParams, match="this channel is finished"):
            one.accept(one.prepare("hello", SamplingParams(), RequestOptions()), 0, channel)
        assert channel.request_index == 3


def test_the_metrics_are_of_front_and_worker_together() -> None:
    """Requests are counted here, tokens there; after a death nothing is counted twice."""
    with engine(num_slots=2) as one:
        channel = start(one, "hello", max_tokens=300)
        for _ in zip(range(50), channel, strict=False):
            pass
        one.stats()
        kill(one)
        read(start(one, "hello", max_tokens=30))
        assert channel.wait_finished()
        stats = one.stats()
        assert (stats.submitted, stats.resident, stats.queued) == (2, 0, 0)
        assert stats.number("paceline_engine_restarts_total") == 1
        assert 30 <= stats.number("paceline_tokens_generated_total") <= 330
        one.metrics.check()


def test_what_a_worker_reported_is_there_without_asking() -> None:
    """As long as it is new enough."""
    with engine(num_slots=2) as one:
        assert one.reported_stats(LONG_S) is None
        channel = start(one, "hello", max_tokens=300)
        while (reported := one.reported_stats(LONG_S)) is None:
            assert isinstance(channel.get(), StreamChunk)
        assert reported.submitted == 1
        assert reported.number("paceline_tokens_generated_total") > 0
        assert one.reported_stats(0.0) is None


def test_logs_of_the_worker_come_out_of_the_loggers_here(caplog: pytest.LogCaptureFixture) -> None:
    """An instrument that fails there is a log record here."""
    with engine(instruments=["tests.faulty_backend:Broken"]) as one:
        read(start(one, "hello", max_tokens=3))
    assert "Broken failed in request_queued" in caplog.text
    assert {record.name for record in caplog.records} == {"paceline.engine"}


def test_instruments_of_a_new_worker_get_engine_restarted(caplog: pytest.LogCaptureFixture) -> None:
    """They are new objects, and know nothing of the first worker."""
    with engine(instruments=["tests.faulty_backend:Restarted"]) as one:
        channel = start(one, "hello", max_tokens=300)
        first = first_of(channel)
        assert "the second" not in caplog.text
        kill(one)
        read(channel, first)
        read(start(one, "again", max_tokens=1))  # the stream may have been complete: this one needs the next worker
    assert "I am the second" in caplog.text


# ---- traces


def test_a_trace_is_whole_over_a_death_of_the_worker(tmp_path: Path) -> None:
    """Each request once, ticks and slots of both workers, the restart between them; every token is in a tick."""
    path = tmp_path / "trace.jsonl"
    with engine(trace=path, num_slots=2) as one:
        channel, other = start(one, "hello", max_tokens=3000), start(one, "other", max_tokens=3000)
        firsts = first_of(channel), first_of(other)
        kill(one)
        assert read(channel, firsts[0])[:2] == undisturbed("hello", max_tokens=3000)
        assert read(other, firsts[1])[:2] == undisturbed("other", max_tokens=3000)
        assert one.embed(["text"], None, RequestOptions()).result()
    trace = read_trace(path)
    kinds = [hook_name(event) for event in trace.events]
    assert not trace.is_truncated
    assert [kinds.count(f"request_{what}") for what in ("queued", "ended")] == [3, 3]
    restart = kinds.index("engine_restarted")
    assert "tick_finished" in kinds[:restart]
    assert "tick_finished" in kinds[restart:]
    assert kinds[restart:].count("slot_freed") == 2
    ticks = [event for event in trace.events if isinstance(event, TickRecord)]
    assert sum(row.num_new for tick in ticks for row in tick.rows) >= 6000
    assert [tick.start_s for tick in ticks] == sorted(tick.start_s for tick in ticks)
    assert 0 < ticks[0].start_s < ticks[-1].start_s < LONG_S
    assert {stay.ending for stay in stays_of(trace)} == {"preempted", "ended"}


def test_a_trace_ends_with_what_ended_last(tmp_path: Path) -> None:
    """Closing writes the ends of running requests, and gives the slots back."""
    path = tmp_path / "trace.jsonl"
    with engine(trace=str(path), num_slots=2) as one:
        first_of(start(one, "hello", max_tokens=None))
    # A sequence that ran for long leaves cells that are evicted as it ends.
    names = [name for event in read_trace(path).events if (name := hook_name(event)) != "evicted"]
    assert set(names[-2:]) == {"request_ended", "slot_freed"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_trace_that_cannot_be_written_harms_no_request(caplog: pytest.LogCaptureFixture) -> None:
    """It ends with a line in the log; a file that cannot be opened is refused at once."""
    with engine(trace="/dev/full") as one:
        assert read(start(one, "hello", max_tokens=500))[:2] == undisturbed("hello", max_tokens=500)
    assert "No space left on device" in caplog.text
    with pytest.raises(InvalidParams, match="trace /no/where/trace.jsonl cannot be written: No such file"):
        fake_worker_engine(trace="/no/where/trace.jsonl")


# ---- deaths from outside


@pytest.mark.full
@pytest.mark.timeout(600)
def test_thirty_kills_under_load_lose_and_double_nothing() -> None:
    """Every stream is complete and equals the undisturbed run, whatever moment the worker was killed at."""
    rng = random.Random(7)
    wanted = [(f"prompt {index}", {"seed": index, "max_tokens": 1500, "stop": ["the o"]}) for index in range(12)]
    wanted += [(f"many {index}", {"seed": index, "max_tokens": 300, "logprobs": 1}) for index in range(6)]
    with engine(backend_options={"num_seq_ids": 8}, num_slots=8) as one:
        done = threading.Event()

        def kill_on() -> int:
            """After each restart, when some stream has got so many chunks further."""
            kills = 0
            while not done.is_set() and kills < 30:
                stream = start(one, f"clock {kills}", max_tokens=rng.randrange(1, 40))
                for _ in stream:
                    pass
                kill(one)
                kills += 1
            return kills

        with ThreadPoolExecutor(32) as threads:
            killer = threads.submit(kill_on)
            found = []
            while not killer.done():
                reading = [threads.submit(read, start(one, prompt, **params)) for prompt, params in wanted]
                found.append([future.result() for future in reading])
            done.set()
            assert killer.result() == 30
        expected = [undisturbed(prompt, **params) for prompt, params in wanted]
        for round_of in found:
            assert [(ids, text) for ids, text, _ in round_of] == expected
        assert one.stats().number("paceline_engine_restarts_total") >= 29
        one.metrics.check()


def read_and_kill(engine: WorkerEngine, **params: Any) -> tuple[list[StreamChunk], bool]:
    """All tokens of a stream with a worker killed after 150 tokens, and whether it was still open then."""
    slowly = RequestOptions(max_buffered_tokens=30)
    channel = start(engine, "hello", options=slowly, **params)
    chunks, was_open = [], None
    for chunk in channel:
        chunks.append(chunk)
        if was_open is None and sum(len(each.token_ids) for each in chunks) >= 150:
            was_open = not channel.is_finished
            kill(engine)
    assert was_open is not None
    return chunks, was_open


def test_a_kill_in_mid_stream_is_not_seen_by_the_reader() -> None:
    """Several choices, a finished choice among them; usage counts every token once, and the queue of the first life."""
    wanted: dict[str, Any] = {"max_tokens": 800, "n": 3, "stop": ["ta"], "seed": 11}
    with engine() as one:
        was_open = False
        while not was_open:  # on a busy machine the worker may be far ahead
            chunks, was_open = read_and_kill(one, **wanted)
        world = World(num_cells=LONG["num_cells"], eos_every=LONG["eos_every"])
        outcome = world.submit("hello", temperature=0.8, **wanted)
        world.run()
        assert len(outcome.token_ids(1)) < 50 < 600 < len(outcome.token_ids(0))
        for choice in range(3):
            mine = [chunk for chunk in chunks if chunk.choice == choice]
            assert [t for chunk in mine for t in chunk.token_ids] == outcome.token_ids(choice)
            assert "".join(chunk.text for chunk in mine) == outcome.text(choice)
            assert [chunk.finish_reason for chunk in mine if chunk.finish_reason] == [outcome.reason(choice)]
        assert chunks[-1].usage is not None
        assert outcome.terminal is not None
        assert outcome.terminal.usage is not None
        assert chunks[-1].usage.completion_tokens == outcome.terminal.usage.completion_tokens


def test_fail_ends_every_stream_with_what_happened_and_takes_new_requests() -> None:
    """on_engine_death="fail": ERROR and EngineDied with the signal; embeddings too; the next request has a new worker."""
    with engine(on_engine_death="fail", num_slots=2) as one:
        channels = [start(one, f"hello {index}", max_tokens=None) for index in range(3)]
        firsts = [first_of(channels[0])]
        kill(one)
        for channel in channels:
            last = read(channel, *firsts)[2]
            firsts.clear()
            assert last.finish_reason is FinishReason.ERROR
            assert isinstance(last.error, EngineDied)
            assert last.error.signal == "SIGKILL"
            assert last.error.code == "engine_died"
            assert channel.wait_released()
        assert read(start(one, "hello", max_tokens=20))[:2] == undisturbed("hello", max_tokens=20)


def test_cancel_deadline_and_stop_end_what_waits_for_a_worker() -> None:
    """While there is none, the front does it, with all that had been reported."""
    limits = RestartLimits(max_restarts=3, first_wait_s=3600.0, longest_wait_s=3600.0)
    one = fake_worker_engine(restarts=limits, backend_options=LONG)
    cancelled = start(one, "hello", max_tokens=None)
    late = start(one, "hello", max_tokens=None, options=RequestOptions(timeout_s=1.0))
    stopped = start(one, "hello", max_tokens=None)
    firsts = [first_of(channel) for channel in (cancelled, late, stopped)]
    kill(one)
    assert read(late, firsts[1])[2].finish_reason is FinishReason.DEADLINE
    cancelled.cancel()
    assert read(cancelled, firsts[0])[2].finish_reason is FinishReason.CANCELLED
    one.close()
    last = read(stopped, firsts[2])[2]
    assert last.finish_reason is FinishReason.SHUTDOWN
    assert last.usage is not None
    assert stopped.is_released


def test_ten_kills_in_a_row_lose_no_request_of_those_that_run_or_wait() -> None:
    """By default no number of crashes is the last: requests accepted before, between and after them end as undisturbed."""
    restarts, wanted = RestartLimits(longest_wait_s=0.2), 500
    with engine(restarts=restarts, backend_options={"num_seq_ids": 64}, num_slots=32) as one:
        channels = {index: start(one, f"good {index}", max_tokens=wanted, seed=index) for index in range(12)}
        for number in range(12, 22):
            read(start(one, "clock", max_tokens=3))  # by a worker that is ready
            kill(one)
            channels[number] = start(one, f"good {number}", max_tokens=wanted, seed=number)
        for index, channel in channels.items():
            assert read(channel)[:2] == undisturbed(f"good {index}", max_tokens=wanted, seed=index)
        assert one.stats().number("paceline_engine_restarts_total") == 10
        one.metrics.check()


def test_the_front_has_the_slots_that_the_worker_has() -> None:
    """A fit to memory, which the worker makes, may have lowered their number: configuration, queue and metrics have that."""
    with engine(num_slots=8, max_queue=0, backend_options={"num_seq_ids": 4}) as one:
        assert one.limits.num_slots == one.config.num_slots == 2
        assert one.stats().number("paceline_slots") == 2
        running = [start(one, "hello", max_tokens=None) for _ in range(2)]
        with pytest.raises(QueueFull, match="2 requests"):
            start(one, "hello")
        assert one.stats().number("paceline_slots") == 2
        for channel in running:
            channel.cancel()


def test_the_front_has_the_slots_of_the_worker_that_runs_now(tmp_path: Path) -> None:
    """Memory may be shorter when a worker is replaced, or wakes."""
    options = {"first": str(tmp_path / "first"), "num_cells": 4096}
    with engine(max_queue=0, backend="tests.faulty_backend:make_shrinking", backend_options=options) as one:
        assert (one.limits.num_slots, one.config.num_slots, one.limits.max_positions) == (4, 4, 4096)
        kill(one)
        while one.stats().number("paceline_engine_restarts_total") < 1:
            threading.Event().wait(0.01)
        assert (one.limits.num_slots, one.config.num_slots, one.limits.max_positions) == (1, 1, 2048)
        assert one.stats().number("paceline_slots") == 1
        with pytest.raises(PromptTooLong):
            start(one, [5] * 3000, max_tokens=1)
        running = start(one, "hello", max_tokens=None)
        with pytest.raises(QueueFull, match="1 requests"):
            start(one, "hello")
        running.cancel()


def test_what_waits_for_a_worker_counts_in_the_queue() -> None:
    """Between two workers requests are accepted up to the limit, refused beyond it, and served by the next one."""
    limits = RestartLimits(first_wait_s=3600.0, longest_wait_s=3600.0)
    one = fake_worker_engine(restarts=limits, backend_options={**LONG, "num_seq_ids": 2}, max_queue=1)
    try:
        kill(one)
        while one.heartbeat().restart_in_s is None:
            threading.Event().wait(0.01)
        waiting = [start(one, "hello", max_tokens=5) for _ in range(2)]
        with pytest.raises(QueueFull, match="2 requests"):
            start(one, "hello")
        assert not any(channel.is_finished for channel in waiting)
        one._supervisor._start_at = 0.0  # as if the hour were over
        one._inbox.wake()
        assert [read(channel)[:2] for channel in waiting] == [undisturbed("hello", max_tokens=5)] * 2
    finally:
        one.close()


def test_a_worker_that_cannot_load_any_more_is_tried_until_it_can(tmp_path: Path) -> None:
    """A file that is missing for a while is a crash loop, shown as a crash loop; waiting requests go on when it is back."""
    switch = tmp_path / "switch"
    switch.touch()
    options = {"needs": str(switch)}
    with engine(backend=FAULTY, backend_options=options, restarts=RestartLimits(longest_wait_s=0.1)) as one:
        channel = start(one, "hello", max_tokens=3000)
        first = first_of(channel)
        switch.unlink()
        kill(one)
        patience = threading.Event()
        while one.heartbeat().state != "crash_loop":
            patience.wait(0.01)  # lets the supervisor's thread run
        heart = one.heartbeat()
        assert heart.is_alive
        assert heart.num_crashes >= 3
        switch.touch()
        assert read(channel, first)[:2] == undisturbed("hello", max_tokens=3000)
        assert one.heartbeat().state in ("idle", "ticking")
        assert one.heartbeat().num_crashes >= 3  # of one that has run for less than a minute


def test_a_server_that_is_back_is_no_reason_any_more(tmp_path: Path) -> None:
    """While it is away requests end with its address; if then the worker fails for another reason, they wait again."""
    needs, away = tmp_path / "needs", tmp_path / "away"
    needs.touch()
    options = {"needs": str(needs), "away": str(away)}
    with engine(
        backend=FAULTY, backend_options=options, restarts=RestartLimits(longest_wait_s=0.1), rpc_timeout_s=1
    ) as one:
        channel = start(one, "hello", max_tokens=None)
        first = first_of(channel)
        away.touch()
        kill(one)
        assert isinstance(read_error(channel, first), RpcServerUnavailable)
        assert isinstance(read_error(start(one, "hello", max_tokens=3)), RpcServerUnavailable)
        needs.unlink()
        away.unlink()
        past, patience = one.heartbeat().num_crashes, threading.Event()
        while one.heartbeat().num_crashes < past + 2:  # the first of them may have looked before
            patience.wait(0.01)
        waiting = start(one, "hello", max_tokens=3)
        past = one.heartbeat().num_crashes
        while one.heartbeat().num_crashes < past + 2:
            patience.wait(0.01)
        needs.touch()
        assert read(waiting)[:2] == undisturbed("hello", max_tokens=3)


def test_a_refusal_is_that_of_one_worker(tmp_path: Path) -> None:
    """The next one ends for its own reason, not again for that of the last one."""
    away, patience = tmp_path / "away", threading.Event()
    limits = RestartLimits(first_wait_s=3600.0, longest_wait_s=3600.0)
    with engine(backend=FAULTY, backend_options={"away": str(away)}, restarts=limits, max_restarts=2) as one:
        kill(one)
        for num_crashes, what in ((1, "refuse"), (2, "die")):
            while (one.heartbeat().num_crashes, one.heartbeat().restart_in_s is None) != (num_crashes, False):
                patience.wait(0.01)
            away.write_text(what, encoding="utf-8")
            one._supervisor._start_at = 0.0  # as if the hour were over
            one._inbox.wake()
        assert "SIGABRT" in str(one.ended.result(LONG_S))


def test_a_crash_beyond_max_restarts_ends_the_engine_for_good() -> None:
    """Open requests end with EngineStopped, and so does every later submit; both have the reason, and so has `ended`."""
    with engine(restarts=RestartLimits(first_wait_s=0.0), max_restarts=1) as one:
        channel = start(one, "hello", max_tokens=None)
        taken = [first_of(channel)]
        first = one.worker_pid
        kill(one)
        while one.worker_pid in (first, None):
            taken.append(first_of(channel))
        kill(one)
        last = read(channel, *taken)[2]
        assert isinstance(last.error, EngineStopped)
        reason = one.ended.result(LONG_S)
        with pytest.raises(EngineStopped, match=r"crashed once more after max_restarts=1 restarts.*SIGKILL") as refused:
            start(one, "hello")
        assert str(reason) == str(refused.value) == str(last.error)
        assert one.is_closed


def test_an_engine_that_is_closed_has_not_given_up() -> None:
    """`ended` is done then, without a reason."""
    with engine(max_restarts=0) as one:
        assert not one.ended.cancel()
        assert not one.ended.done()
    assert one.ended.result(LONG_S) is None


@pytest.mark.parametrize("babble", [b"\x00\x00\x00\x02\xff\xff", b"\xff\xff\xff\xff"], ids=["message", "length"])
def test_a_worker_that_stops_speaking_sense_is_replaced(babble: bytes, tmp_path: Path) -> None:
    """Bytes that are no message, or no length of one, end the worker, and no request."""
    options = {"once": str(tmp_path / "babbled"), "babble": babble.hex()}
    with engine(backend=FAULTY, backend_options=options) as one:
        assert read(start(one, "hello", max_tokens=200))[:2] == undisturbed("hello", max_tokens=200)
        assert one.stats().number("paceline_engine_restarts_total") == 1


def test_a_worker_whose_engine_gives_up_is_replaced() -> None:
    """It exits by itself, after it has reported the requests that failed; later requests have a new one."""
    with engine(backend="tests.faulty_backend:make_forgetful", num_slots=2) as one:
        first = one.worker_pid
        while one.worker_pid == first:
            read(start(one, "hello", max_tokens=3))
        while one.stats().number("paceline_engine_restarts_total") < 1:
            read(start(one, "hello", max_tokens=3))
        assert one.worker_pid != first
        assert not one.is_closed


def test_a_drain_waits_for_no_reader() -> None:
    """A reader that fell behind is paused no longer; a death does not change that."""
    with engine() as one:
        slow = start(one, "hello", max_tokens=3000, options=RequestOptions(max_buffered_tokens=5))
        read(start(one, "other", max_tokens=100))
        kill(one)
        one.close(drain=True)
        assert read(slow)[:2] == undisturbed("hello", max_tokens=3000)


# ---- deaths by a request


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSEGV])
def test_a_poisonous_request_is_named_and_the_others_go_on(number: int) -> None:
    """It is tried twice, then it fails with the signal and llama.cpp's last words."""
    with engine(backend=FAULTY, backend_options={"poison_signal": int(number)}) as one:
        channels = [start(one, f"good {index}", max_tokens=300, seed=index) for index in range(6)]
        firsts = [first_of(channel) for channel in channels]
        bad = start(one, [65, POISON, 66], max_tokens=10)
        last = read(bad)[2]
        assert isinstance(last.error, EngineDied)
        assert last.error.signal == signal.Signals(number).name
        assert "the poison was computed" in last.error.last_words
        assert "the poison was computed" in str(last.error)
        assert bad.wait_released()
        for index, (channel, first) in enumerate(zip(channels, firsts, strict=True)):
            assert read(channel, first)[:2] == undisturbed(f"good {index}", max_tokens=300, seed=index)
        read(start(one, "again", max_tokens=1))  # the others may have ended before the last worker was there
        assert one.stats().number("paceline_engine_restarts_total") == 2


def test_a_request_that_kills_while_it_is_made_ready_is_named_too() -> None:
    """In the preparing thread no request is in a pass; the black box names the request in preparation."""
    with engine(backend=FAULTY) as one:
        good = start(one, "good", max_tokens=300)
        bad = start(one, [65, HIDDEN_POISON], max_tokens=10)
        assert isinstance(read(bad)[2].error, EngineDied)
        assert read(good)[:2] == undisturbed("good", max_tokens=300)


LOST = "the RPC server 10.0.0.2:50052 was lost: it closed the connection"


def test_a_server_that_is_restarted_twice_costs_no_request(tmp_path: Path) -> None:
    """The second time is on the probation of the only stream, which is not to blame, and goes on."""
    once = tmp_path / "lost"
    with engine(backend=FAULTY, backend_options={"once": str(once), "again": 1, "words": LOST}) as one:
        assert read(start(one, "hello", max_tokens=200))[:2] == undisturbed("hello", max_tokens=200)
        assert once.stat().st_size == 1
        assert one.stats().number("paceline_engine_restarts_total") == 2


def test_a_request_that_loses_its_server_each_time_is_named(tmp_path: Path) -> None:
    """It ends with the third loss, and the error has the server; others go on."""
    with engine(backend=FAULTY, backend_options={"words": LOST}) as one:
        good = start(one, "good", max_tokens=300)
        first = first_of(good)
        error = read_error(start(one, [65, POISON, 66], max_tokens=10))
        assert isinstance(error, EngineDied) and LOST in str(error) and "this request lost RPC servers" in str(error)
        assert isinstance(error.__cause__, RpcServerUnavailable) and str(error.__cause__) == LOST
        assert read(good, first)[:2] == undisturbed("good", max_tokens=300)
        read(start(one, "again", max_tokens=1))
        assert one.stats().number("paceline_engine_restarts_total") == 3


def test_suspects_that_are_beyond_the_crash_run_together_again(tmp_path: Path) -> None:
    """Streams without an end: each is tried for a few tokens, and then all go on, new streams too."""
    with engine(backend=FAULTY, backend_options={"once": str(tmp_path / "died")}) as one:
        channels = [start(one, f"good {index}", max_tokens=None, seed=index) for index in range(3)]
        nums = [0] * len(channels)
        while not (tmp_path / "died").exists():
            nums[0] += len(first_of(channels[0]).token_ids)
        channels.append(start(one, "new", max_tokens=None))
        nums.append(0)
        for index, channel in enumerate(channels):  # more than there can have been before the crash
            while nums[index] < 500:
                nums[index] += len(first_of(channel).token_ids)
        assert one.stats().number("paceline_engine_restarts_total") == 1


def test_poisonous_texts_fail_alone() -> None:
    """An embedding request is tried again and named like any other."""
    with engine(backend=FAULTY) as one:
        bad = one.embed([[65], [POISON]], None, RequestOptions())
        good = one.embed(["good"], None, RequestOptions())
        assert isinstance(bad.exception(), EngineDied)
        assert len(good.result()) == 1


def test_a_crash_that_does_not_come_again_fails_no_request(tmp_path: Path) -> None:
    """All suspects get through their probation, and their streams equal the undisturbed."""
    with engine(backend=FAULTY, backend_options={"once": str(tmp_path / "died")}) as one:
        channels = [start(one, f"good {index}", max_tokens=200, seed=index) for index in range(8)]
        for index, channel in enumerate(channels):
            assert read(channel)[:2] == undisturbed(f"good {index}", max_tokens=200, seed=index)
        assert (tmp_path / "died").exists()
        assert one.stats().number("paceline_engine_restarts_total") == 1


# ---- ends


def test_nothing_is_left_of_an_engine_that_was_closed() -> None:
    """No process, no thread, no file descriptor, also after deaths."""
    before = Possessions.now()
    for _ in range(3):
        with engine() as one:
            channel = start(one, "hello", max_tokens=None)
            first_of(channel)
            pids = {one.worker_pid}
            kill(one)
            while one.worker_pid in (None, *pids):
                first_of(channel)
            pids.add(one.worker_pid)
        del one, channel
        gc.collect()
        assert all(pid is not None and is_gone(pid) for pid in pids)
    assert Possessions.now().gained_since(before) == []


def test_losing_an_engine_ends_its_worker() -> None:
    """The worker ends without a call of close."""
    one = fake_worker_engine(backend_options=LONG)
    pid, thread = one.worker_pid, one._supervisor._thread
    assert pid is not None
    del one
    gc.collect()
    thread.join(LONG_S)
    assert is_gone(pid)


def test_close_drains_when_asked_to() -> None:
    """Accepted requests end by themselves, over a death as well; later submits are refused."""
    with engine() as one:
        channels = [start(one, f"good {index}", max_tokens=200, seed=index) for index in range(4)]
        channels[0].get()
        kill(one)
        one.close(drain=True)
        for index, channel in enumerate(channels[1:], 1):
            assert read(channel)[:2] == undisturbed(f"good {index}", max_tokens=200, seed=index)
        with pytest.raises(EngineStopped, match="shut down"):
            start(one, "hello")


def test_close_ends_everything_that_runs_and_waits() -> None:
    """With SHUTDOWN, and their text until then."""
    with engine(num_slots=2) as one:
        channels = [start(one, "hello", max_tokens=None) for _ in range(5)]
        future = one.embed(["a" * 1000] * 500, None, RequestOptions())
        firsts = [first_of(channels[0])]
        one.close()
        for channel in channels:
            assert read(channel, *firsts)[2].finish_reason is FinishReason.SHUTDOWN
            firsts.clear()
        assert future.done()
        one.close()


def run_apart(code: str) -> subprocess.Popen[str]:
    script = f"from tests.unit.engine.worker.test_worker_engine import *\n{code}"
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)


def wait_until_gone(pid: int) -> bool:
    """The process is not a child of this one, so there is nothing to wait on: its end is watched."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    import select

    ready, _, _ = select.select([watched], [], [], LONG_S)
    os.close(watched)
    return bool(ready)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfds")
@pytest.mark.parametrize(("forks", "is_stopped"), [(False, False), (True, False), (False, True)])
def test_a_worker_goes_with_a_front_that_is_killed(forks: bool, is_stopped: bool) -> None:
    """Also if a forked child of the front lives on with copies of its descriptors, or the worker does nothing any more."""
    code = f"""
one = fake_worker_engine(backend_options=LONG)
channel = start(one, "hello", max_tokens=None)
channel.get()
child = os.fork() if {forks} else 1
if child == 0:
    signal.pause()
if {is_stopped}:
    os.kill(one.worker_pid, signal.SIGSTOP)
print(one.worker_pid, child, flush=True)
signal.pause()
"""
    front = run_apart(code)
    assert front.stdout is not None
    worker, child = map(int, front.stdout.readline().split())
    front.kill()
    front.wait()
    front.stdout.close()
    try:
        assert wait_until_gone(worker)
    finally:
        if forks:
            os.kill(child, signal.SIGKILL)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")  # the fork is the point
def test_a_forked_child_has_no_engine_and_leaves_the_worker_alone() -> None:
    """There every call raises; closing does nothing; the parent goes on."""
    with engine() as one:
        channel = start(one, "hello", max_tokens=None)  # it cannot be over before the fork
        num_tokens = len(first_of(channel).token_ids)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                for call in (
                    lambda: start(one, "hello"),
                    one.slots,
                    channel.get,
                    channel.wait_finished,
                    channel.wait_released,
                ):
                    with pytest.raises(EngineStopped, match="forked"):
                        call()
                child = one._supervisor._worker
                assert child is not None
                assert child.link.fileno() < 0, "else the worker would not see the end of its own front"
                one.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        while num_tokens < 300:
            num_tokens += len(first_of(channel).token_ids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_whole_group_does_not_reach_the_worker(number: int) -> None:
    """Ctrl-C, and signals of a service manager, go to every process; the front alone decides about them."""
    with engine() as one:
        channel = start(one, "hello", max_tokens=5000)
        first = first_of(channel)
        pid = one.worker_pid
        kill(one, number)
        assert len(read(channel, first)[0]) == 5000
        assert one.worker_pid == pid
        assert one.stats().number("paceline_engine_restarts_total") == 0
