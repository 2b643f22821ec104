"""The engine's thread: endings on every path, shutdown in all its races, and threads that come from anywhere."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from contextlib import suppress
from typing import Any

import pytest
from tests.running_engine import LONG_S, Running, in_threads

from paceline.engine.core import Ask, Cancel, Stop
from paceline.errors import Cancelled, DecodeError, EngineError, EngineStopped, QueueFull, SamplingError
from paceline.observability.metrics import Instrument
from paceline.scheduling.records import TickRecord
from paceline.streaming import FinishReason, StreamChannel, StreamChunk

Ended = FinishReason.STOP, FinishReason.LENGTH


def reason_of(channel: StreamChannel) -> FinishReason | None:
    assert channel.wait_finished(LONG_S)
    return channel.finish_reason


def text_of(channel: StreamChannel) -> str:
    return "".join(chunk.text for chunk in channel)


def test_submit_returns_while_the_engine_is_busy() -> None:
    """A request is accepted while a pass runs, and its result comes when there is one."""
    with Running() as engine:
        engine.hold()
        first = engine.submit("one", max_tokens=5)
        engine.wait_for_pass()
        second = engine.submit("two", max_tokens=5)
        assert not first.is_finished
        assert not second.is_finished
        engine.backend.gate.set()
        assert reason_of(first) in Ended
        assert reason_of(second) in Ended


def test_streams_are_the_same_as_alone() -> None:
    """Twenty requests at once on four slots read as each does by itself."""
    with Running() as engine:
        prompts = [f"prompt {index}" for index in range(20)]
        together = [text_of(channel) for channel in [engine.submit(prompt, max_tokens=20) for prompt in prompts]]
        alone = [text_of(engine.submit(prompt, max_tokens=20)) for prompt in prompts]
    assert together == alone


def test_many_threads_submit_at_the_same_time() -> None:
    """Eight threads with twenty-five requests each: all complete, nothing is queued or resident then."""
    with Running() as engine:
        reasons: list[FinishReason | None] = []

        def work() -> None:
            channels = [engine.submit("hi", max_tokens=3) for _ in range(25)]
            reasons.extend(reason_of(channel) for channel in channels)

        in_threads(*[work] * 8)
        assert len(reasons) == 200
        assert set(reasons) <= set(Ended)
        engine.close()
        snapshot = engine.metrics.snapshot()
        engine.metrics.check()
        assert (snapshot.submitted, snapshot.completed) == (200, 200)
        assert (snapshot.queued, snapshot.resident) == (0, 0)


def test_a_cancel_from_another_thread_frees_the_slot_in_one_tick() -> None:
    """The pass that runs is the last one; then the terminal chunk and the release are there."""
    with Running(num_slots=1, eos_every=10**9) as engine:
        engine.hold()
        channel = engine.submit("on and on", max_tokens=None)
        engine.wait_for_pass()
        passes = engine.backend.num_passes
        threading.Thread(target=channel.cancel).start()
        while not channel.is_cancelled:
            pass
        engine.backend.gate.set()
        assert channel.wait_released(LONG_S)
        assert channel.finish_reason is FinishReason.CANCELLED
        assert engine.backend.num_passes == passes + 1


def test_consume_delivers_everything_and_the_terminal_chunk_after_a_cancel() -> None:
    """A thread that cancels while another consumes loses nothing that was queued, and sees CANCELLED."""
    with Running(eos_every=10**9) as engine:
        channel = engine.submit("on and on", max_tokens=None)
        seen: list[StreamChunk] = []

        def look(chunk: StreamChunk) -> None:
            seen.append(chunk)
            if len(seen) == 3:
                channel.cancel()

        assert channel.consume(look) is FinishReason.CANCELLED
        assert seen[-1].finish_reason is FinishReason.CANCELLED
        assert seen[-1].usage is not None
        assert sum(len(chunk.token_ids) for chunk in seen) == seen[-1].usage.completion_tokens


def test_a_cancelled_request_in_the_queue_is_retired_without_a_pass() -> None:
    """A request that is cancelled before it has a slot ends without being computed."""
    with Running(num_slots=1) as engine:
        engine.hold()
        first = engine.submit("first", max_tokens=3)
        engine.wait_for_pass()
        queued = engine.submit("never computed", max_tokens=3)
        queued.cancel()
        engine.backend.gate.set()
        (last,) = list(queued)
        assert last.finish_reason is FinishReason.CANCELLED
        assert reason_of(first) in Ended
        engine.close()
        assert engine.metrics.snapshot().number("paceline_prefill_tokens_total") == len("first")


def test_a_pass_for_cancelled_texts_alone_is_aborted() -> None:
    """It holds up nothing that comes after it, and its text is not computed again."""
    passes: list[int] = []
    with Running() as engine:
        embed = engine.backend.embed

        def counted(texts: list[list[int]], pooling: str | None) -> list[Any]:
            passes.append(len(texts))
            return embed(texts, pooling)

        engine.backend.embed = counted  # type: ignore[method-assign]
        engine.hold()
        left = engine.embed("a long text")
        engine.wait_for_pass()
        stream = engine.submit("next", max_tokens=3)
        assert left.cancel()
        assert [chunk.finish_reason for chunk in stream][-1] in Ended
        assert engine.backend.num_aborts == 1
        engine.close()
        assert passes == [1]


def test_leaving_a_stream_frees_the_slot_for_the_next() -> None:
    """A caller that goes away does not keep others waiting until its completion is done."""
    with Running(num_slots=1, eos_every=10**9) as engine:
        left = engine.submit("a long one", max_tokens=None)
        waiting = engine.submit("next", max_tokens=3, ignore_eos=True)
        for _ in left:
            break
        assert len([chunk for chunk in waiting if chunk.token_ids]) >= 1
        released = left.wait_released(LONG_S)
        assert released
        assert left.finish_reason is FinishReason.CANCELLED


def test_a_forgotten_stream_frees_its_slot() -> None:
    """The garbage collector cancels a stream that has no reader any more."""
    with Running(num_slots=1, eos_every=10**9) as engine:
        channel = engine.submit("a long one", max_tokens=None)
        channel.get(LONG_S)
        del channel
        gc.collect()
        assert reason_of(engine.submit("next", max_tokens=3, ignore_eos=True)) is FinishReason.LENGTH


def test_the_backlog_is_bounded() -> None:
    """As many as may be open are accepted and complete, the next is refused at once."""
    with Running(max_requests=6, num_slots=2) as engine:
        engine.hold()
        accepted = [engine.submit("hello", max_tokens=4) for _ in range(6)]
        for submit in (engine.submit, engine.embed):
            with pytest.raises(QueueFull, match="the engine has 6 requests"):
                submit("one too many")
        engine.backend.gate.set()
        assert {reason_of(channel) for channel in accepted} <= set(Ended)


def test_a_failed_pass_ends_the_culprit_alone() -> None:
    """Every pass with the poisonous request fails; the others read as they do alone."""
    with Running(num_slots=4) as engine:
        alone = [text_of(engine.submit(f"sound {index}", max_tokens=15)) for index in range(3)]
        engine.hold()
        blocker = engine.submit("blocker", max_tokens=1)
        engine.wait_for_pass()
        bad = engine.request("bad", max_tokens=15)
        engine.faults.poisonous.add(bad.key)
        good = [engine.submit(f"sound {index}", max_tokens=15) for index in range(3)]
        channel = engine.router.submit(bad, 0)
        engine.backend.gate.set()
        assert [text_of(item) for item in good] == alone
        *_, last = channel
        assert last.finish_reason is FinishReason.ERROR
        assert isinstance(last.error, DecodeError)
        assert reason_of(blocker) in Ended


def test_an_error_that_is_not_ours_ends_a_stream_and_not_the_thread() -> None:
    """A pass that raises anything becomes an `EngineError` that carries it, and the next request works."""
    with Running() as engine:
        engine.faults.next_passes.append(ZeroDivisionError("a bug"))
        *_, last = engine.submit("hello")
        assert isinstance(last.error, EngineError)
        assert isinstance(last.error.__cause__, ZeroDivisionError)
        assert reason_of(engine.submit("hello")) in Ended
        engine.close()
        snapshot = engine.metrics.snapshot()
        assert (snapshot.failed, snapshot.completed) == (1, 1)


def test_a_row_that_cannot_be_drawn_ends_alone() -> None:
    """An error of one draw ends that stream with its text until then."""
    with Running() as engine:
        bad = engine.request("bad", max_tokens=30, ignore_eos=True)
        engine.faults.undrawable.add(bad.key)
        channel, other = engine.router.submit(bad, 0), engine.submit("good", max_tokens=5, ignore_eos=True)
        *_, last = channel
        assert isinstance(last.error, SamplingError)
        assert reason_of(other) is FinishReason.LENGTH


def test_a_tick_that_raises_ends_all_and_the_thread_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """A mistake of the engine's own is logged, everything open ends with an error, the next request works."""
    with Running() as engine:

        def broken(plan: Any, output: Any) -> Any:
            del engine.scheduler.apply  # type: ignore[method-assign]
            raise AssertionError("our own mistake")

        engine.hold()
        first = engine.submit("hello")
        engine.wait_for_pass()
        second, vectors = engine.submit("queued"), engine.embed("text")
        engine.scheduler.apply = broken  # type: ignore[method-assign]
        engine.backend.gate.set()
        for channel in (first, second):
            assert reason_of(channel) in (FinishReason.ERROR, *Ended)
        assert reason_of(first) is FinishReason.ERROR
        vectors.exception(LONG_S)
        assert reason_of(engine.submit("again")) in Ended
    assert "a tick failed" in caplog.text


def test_what_ended_before_its_turn_is_not_computed() -> None:
    """A request that the engine had not taken in when a tick of its own failed has ended: no caller waits for it."""
    with Running(eos_every=10**9) as engine:

        def broken(plan: Any, output: Any) -> Any:
            del engine.scheduler.apply  # type: ignore[method-assign]
            raise AssertionError("our own mistake")

        engine.hold()
        first = engine.submit("hello")
        engine.wait_for_pass()
        early, vectors = engine.submit("in the inbox", max_tokens=None), engine.embed("text")
        engine.scheduler.apply = broken  # type: ignore[method-assign]
        engine.backend.gate.set()
        assert reason_of(first) is reason_of(early) is FinishReason.ERROR
        assert isinstance(vectors.exception(LONG_S), EngineError)
        assert reason_of(engine.submit("again", max_tokens=3)) is FinishReason.LENGTH
        engine.close()
        snapshot = engine.metrics.snapshot()
        assert snapshot.submitted == len(["hello", "again"])
        assert snapshot.number("paceline_prefill_tokens_total") == len("again")
        engine.metrics.check()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_end_of_the_thread_ends_every_stream() -> None:
    """If even failing fails, readers still get their terminal chunk, and submit is refused."""
    engine = Running()
    engine.hold()
    channel, vectors = engine.submit("hello"), engine.embed("text")
    engine.wait_for_pass()

    def broken(*_: Any) -> Any:
        raise SystemExit

    engine.scheduler.apply = broken  # type: ignore[method-assign]
    engine.backend.gate.set()
    *_, last = channel
    assert last.finish_reason is FinishReason.ERROR
    assert isinstance(last.error, EngineStopped)
    assert isinstance(vectors.exception(LONG_S), EngineStopped)
    with pytest.raises(EngineStopped):
        engine.submit("again")
    engine.close()
    assert engine.backend.is_closed


def test_shutdown_that_drains_lets_everything_finish() -> None:
    """Running and queued requests complete; then the memory is given back."""
    engine = Running(num_slots=1)
    channels = [engine.submit(f"request {index}", max_tokens=10) for index in range(6)]
    vectors = engine.embed("one", "two")
    engine.close(drain=True)
    assert {channel.finish_reason for channel in channels} <= set(Ended)
    assert len(vectors.result(0)) == 2
    assert engine.backend.is_closed


def test_shutdown_ends_running_and_waiting_requests() -> None:
    """Without drain streams end with SHUTDOWN, futures with an error, though a pass was in the way."""
    engine = Running(num_slots=2, max_requests=8, eos_every=10**9)
    engine.hold()
    channels = [engine.submit("for ever", max_tokens=None) for _ in range(7)]
    vectors = engine.embed("text")
    engine.wait_for_pass()
    with pytest.raises(QueueFull):
        engine.submit("no room")
    engine.close()
    assert [channel.finish_reason for channel in channels] == [FinishReason.SHUTDOWN] * 7
    assert isinstance(vectors.exception(0), EngineStopped)
    assert all(channel.is_released for channel in channels)
    assert engine.backend.num_aborts >= 1
    engine.metrics.check()
    assert engine.metrics.snapshot().completed == 0


def test_shutdown_wakes_readers_that_are_parked() -> None:
    """A thread that waits for a chunk gets the terminal one."""
    engine = Running(num_slots=1, eos_every=10**9)
    engine.hold()
    channel = engine.submit("for ever")
    engine.wait_for_pass()
    seen: list[StreamChunk] = []
    reader = threading.Thread(target=lambda: channel.consume(seen.append))
    reader.start()
    engine.close()
    reader.join(LONG_S)
    assert not reader.is_alive()
    assert seen[-1].finish_reason is FinishReason.SHUTDOWN


def test_a_drain_that_takes_too_long_ends_the_rest() -> None:
    """After timeout_s remaining requests end with SHUTDOWN; no caller waits for ever."""
    engine = Running(num_slots=1, eos_every=10**9)
    engine.hold()
    channel = engine.submit("for ever", max_tokens=None)
    engine.wait_for_pass()
    engine.close(drain=True, timeout_s=0)
    assert channel.finish_reason is FinishReason.SHUTDOWN


def test_submit_after_shutdown_is_refused() -> None:
    """Every call that would start something is refused."""
    engine = Running()
    engine.close()
    for start in (engine.submit, engine.embed):
        with pytest.raises(EngineStopped, match="make a new one"):
            start("hello")


def test_shutdown_joins_once_under_contention() -> None:
    """Four threads close in different ways at the same time, and once more afterwards."""
    engine = Running()
    channels = [engine.submit("hello", max_tokens=5) for _ in range(8)]
    in_threads(*(lambda drain=drain: engine.close(drain=drain) for drain in (True, False, True, False)))
    engine.close()
    assert all(channel.is_finished and channel.is_released for channel in channels)


def test_submit_racing_shutdown_never_strands_an_accepted_request() -> None:
    """In two hundred rounds, every channel got a terminal chunk, and with drain a completed one."""
    for round_number in range(200):
        engine = Running(num_slots=2, num_cells=100)
        drain = round_number % 2 == 0
        channels: list[StreamChannel] = []

        def submit(engine: Running = engine, channels: list[StreamChannel] = channels) -> None:
            with suppress(EngineStopped):
                channels.extend(engine.submit("hi", max_tokens=1) for _ in range(3))

        in_threads(submit, lambda engine=engine, drain=drain: engine.close(drain=drain))
        for channel in channels:
            assert channel.is_finished
            assert channel.is_released
            assert channel.finish_reason in (*Ended, FinishReason.SHUTDOWN)
            assert not drain or channel.finish_reason in Ended


def test_a_stream_outlives_its_engine() -> None:
    """Chunks can be read, waited for and cancelled after the engine is gone."""
    engine = Running()
    channel, vectors = engine.submit("hello", max_tokens=4, ignore_eos=True), engine.embed("text")
    engine.close(drain=True)
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    channel.cancel()
    assert channel.wait_released(0)
    assert sum(len(chunk.token_ids) for chunk in channel) == 4
    assert channel.finish_reason is FinishReason.LENGTH
    assert len(vectors.result(0)) == 1


def test_the_outcome_of_one_request_is_not_that_of_another() -> None:
    """A cancelled stream beside one that goes on, an embedding beside both: each has its own ending."""
    with Running(eos_every=10**9) as engine:
        engine.hold()
        left, other = engine.submit("leave", max_tokens=None), engine.submit("stay", max_tokens=6)
        vectors, dropped = engine.embed("text"), engine.embed("dropped")
        engine.wait_for_pass()
        left.cancel()
        assert dropped.cancel()
        engine.backend.gate.set()
        assert (reason_of(left), reason_of(other)) == (FinishReason.CANCELLED, FinishReason.LENGTH)
        assert len(vectors.result(LONG_S)) == 1


def test_a_deadline_wakes_an_idle_engine() -> None:
    """A request that is paused ends when its time is over, though nothing else happens."""
    with Running(eos_every=10**9) as engine:
        channel = engine.submit("hello", max_tokens=None, max_buffered_tokens=1, timeout_s=0.2)
        assert channel.wait_finished(LONG_S)
        assert channel.finish_reason is FinishReason.DEADLINE


def test_a_slow_reader_stops_its_own_stream_and_no_other() -> None:
    """The engine waits for no reader, keeps little for a slow one, and goes on when he is back."""
    with Running(num_slots=2, eos_every=10**9) as engine:
        slow = engine.submit("slow", max_tokens=200, max_buffered_tokens=10)
        assert reason_of(engine.submit("quick", max_tokens=100)) is FinishReason.LENGTH
        assert slow.num_buffered <= 11
        assert sum(len(chunk.token_ids) for chunk in slow) == 200
        assert slow.finish_reason is FinishReason.LENGTH


def test_a_slow_reader_that_was_to_be_cut_off_is() -> None:
    """With slow_reader="cancel" the stream ends with SLOW_READER and all that was generated."""
    with Running(eos_every=10**9) as engine:
        channel = engine.submit("slow", max_tokens=None, max_buffered_tokens=3, slow_reader="cancel")
        assert reason_of(channel) is FinishReason.SLOW_READER
        assert sum(len(chunk.token_ids) for chunk in channel) > 3


def test_a_thread_ends_that_took_the_last_command_in_a_tick_that_began_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the engine still saves prefixes after its last request: no further command would wake it."""
    engine = Running()
    take, closings = engine.inbox.take, iter([True])

    def take_after_close() -> list[Any]:
        if next(closings, False):
            engine.inbox.close()
            engine.inbox.put(Stop())
        return take()

    monkeypatch.setattr(engine.inbox, "take", take_after_close)
    engine.inbox.put(Cancel(5))  # of no request: a tick begins
    try:
        assert engine.runner.ended.result(LONG_S) is None
    finally:
        engine.close()


def test_close_may_come_from_the_engines_own_thread() -> None:
    """An instrument that closes the engine does not wait for itself."""
    closing: list[Running] = []

    class Closer(Instrument):
        def tick_finished(self, record: TickRecord) -> None:
            closing[0].runner.close(drain=True, timeout_s=None)

    engine = Running(instruments=(Closer(),), eos_every=10**9)
    engine.hold()
    closing.append(engine)
    channel = engine.submit("hello", max_tokens=None)
    engine.backend.gate.set()
    assert reason_of(channel) is FinishReason.SHUTDOWN
    engine.close()


def test_commands_do_not_wait_while_ticks_follow_each_other() -> None:
    """Submits and cancels are looked at in every tick, however busy the engine is."""
    with Running(eos_every=10**9, num_cells=200_000) as engine:
        busy = engine.submit("busy", max_tokens=None)
        for _ in range(20):
            channel = engine.submit("short", max_tokens=None)
            channel.cancel()
            assert reason_of(channel) is FinishReason.CANCELLED
        assert not busy.is_finished
        busy.cancel()


def test_a_forked_child_is_refused_and_lets_the_engine_be() -> None:
    """A child process has none of its parent's threads: using the engine there raises at once, closing it does nothing."""
    with Running() as engine:
        child = os.fork()
        if child == 0:  # pragma: no cover - in the child
            code = 1
            try:
                engine.runner.close(drain=True, timeout_s=None)
                engine.runner.check_process()
            except EngineStopped:
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert reason_of(engine.submit("hello")) in Ended


def test_an_embedding_that_is_cancelled_raises_nothing_anywhere() -> None:
    """Cancelled before its turn, its future is cancelled and the engine goes on."""
    with Running() as engine:
        engine.hold()
        blocker = engine.embed("first")
        engine.wait_for_pass()
        vectors = engine.embed("second")
        assert vectors.cancel()
        engine.backend.gate.set()
        assert len(blocker.result(LONG_S)) == 1
        assert len(engine.embed("third").result(LONG_S)) == 1
        engine.close()
        assert engine.metrics.snapshot().cancelled == 1
    assert issubclass(Cancelled, EngineError)


def test_an_error_within_an_ending_leaves_no_request_behind(caplog: pytest.LogCaptureFixture) -> None:
    """Even if requests cannot be ended in order, every stream ends, memory is emptied, and the engine goes on."""
    with Running() as engine:

        def broken(*_: Any, **__: Any) -> Any:
            raise AssertionError("our own mistake")

        def broken_once(*_: Any) -> Any:
            del engine.scheduler.apply  # type: ignore[method-assign]
            raise AssertionError("our own mistake")

        engine.hold()
        first = engine.submit("hello")
        engine.wait_for_pass()
        second = engine.submit("queued")
        engine.scheduler._finisher.finish = broken  # type: ignore[method-assign]
        engine.scheduler.apply = broken_once  # type: ignore[method-assign]
        engine.backend.gate.set()
        assert reason_of(first) is FinishReason.ERROR
        assert reason_of(second) is FinishReason.ERROR
        assert first.wait_released(LONG_S)
        assert second.wait_released(LONG_S)
        for _ in range(3):
            again = engine.submit("again", ignore_eos=True, max_tokens=20)
            assert reason_of(again) is FinishReason.LENGTH
            assert again.wait_released(LONG_S)  # the engine closes a request after its reader has the end
        assert engine.inbox.num_open == 0
    assert "could not be ended in order" in caplog.text


def test_an_engine_that_only_fails_stops(caplog: pytest.LogCaptureFixture) -> None:
    """After three ticks in a row that failed it takes no requests any more, and close returns."""
    engine = Running()

    def broken(*_: Any, **__: Any) -> Any:
        raise AssertionError("our own mistake")

    engine.scheduler.plan = broken  # type: ignore[method-assign]
    with suppress(EngineStopped):
        for _ in range(50):
            assert reason_of(engine.submit("hello")) is FinishReason.ERROR
    with pytest.raises(EngineStopped):
        engine.submit("hello")
    engine.close()
    assert "3 ticks in a row failed" in caplog.text


def test_draining_waits_for_no_reader() -> None:
    """A request that paused for a reader who never comes gets to its end all the same."""
    engine = Running()
    channel = engine.submit("hello", max_tokens=300, ignore_eos=True, max_buffered_tokens=4)
    assert channel.get(LONG_S) is not None
    engine.close(drain=True)
    assert channel.finish_reason is FinishReason.LENGTH


def test_a_query_to_an_engine_that_has_ended_gets_a_result() -> None:
    """No caller waits for a result that cannot come."""
    engine = Running()
    engine.close()
    future = engine.router.ask(Ask(1, lambda _: None))
    with pytest.raises(EngineStopped):
        future.result(LONG_S)
