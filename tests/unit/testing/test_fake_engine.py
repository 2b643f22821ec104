"""The engine on the fake backend that ships for users' tests: real scheduling, no model, no thread, no real time."""

from __future__ import annotations

import pytest

from paceline.errors import DecodeError, InvalidParams, PromptTooLong, QueueFull
from paceline.observability.metrics import Instrument
from paceline.scheduling.records import TickRecord
from paceline.scheduling.strategies import SchedulerView, TokenAllocation
from paceline.streaming import END, TIMEOUT, FinishReason, StreamChannel
from paceline.testing import FakeBackend, FakeCost, FakeEngine, ManualClock


def text_of(stream: StreamChannel) -> str:
    return "".join(chunk.text for chunk in stream)


def test_a_request_runs_to_its_end() -> None:
    """After run the stream is finished and has all of its tokens."""
    engine = FakeEngine()
    stream = engine.submit("hello", max_tokens=7, ignore_eos=True)
    engine.run()
    tokens = [token for chunk in stream for token in chunk.token_ids]
    assert (len(tokens), stream.finish_reason) == (7, FinishReason.LENGTH)


def test_nothing_happens_between_ticks() -> None:
    """A token comes with a tick and not without one."""
    engine = FakeEngine()
    stream = engine.submit("hello", max_tokens=2, ignore_eos=True)
    assert stream.get(timeout_s=0) is TIMEOUT
    engine.tick()
    chunk = stream.get(timeout_s=0)
    assert chunk is not TIMEOUT
    assert chunk is not END
    assert len(chunk.token_ids) == 1
    assert stream.get(timeout_s=0) is TIMEOUT


def test_what_runs_beside_a_request_does_not_change_its_text() -> None:
    """The same prompt has the same text alone and in a batch."""
    alone, together = FakeEngine(), FakeEngine(num_slots=3)
    expected = alone.submit("one", max_tokens=20)
    others = [together.submit(prompt, max_tokens=20) for prompt in ("two", "one", "three" * 30)]
    alone.run()
    together.run()
    assert text_of(others[1]) == text_of(expected)


def test_time_passes_by_the_cost_of_passes_alone() -> None:
    """The clock shows the cost of the passes, and the usage has these times."""
    clock = ManualClock()
    engine = FakeEngine(backend=FakeBackend(clock=clock, cost=FakeCost(base_s=0.5, token_s=0.25)), clock=clock)
    stream = engine.submit("abcd", max_tokens=1)
    engine.run()
    assert clock.now() == 0.5 + 4 * 0.25
    list(stream)
    assert stream.usage is not None
    assert stream.usage.ttft_s == clock.now()


def test_cancel_frees_the_slot_with_the_next_tick() -> None:
    """The generated text is delivered and the slot is released."""
    engine = FakeEngine(num_slots=1)
    stream = engine.submit("hello", max_tokens=100, ignore_eos=True)
    engine.tick()
    stream.cancel()
    engine.tick()
    assert stream.is_released
    assert stream.finish_reason is FinishReason.CANCELLED


def test_a_failing_pass_ends_its_request_and_no_other() -> None:
    """A backend that fails for one prompt leaves the request beside it whole."""

    def fail(_number: int, rows: object) -> Exception | None:
        poisoned = any(row.sequence.request.prompt[:1] == [ord("!")] for row in rows)  # type: ignore[attr-defined]
        return DecodeError("poison") if poisoned else None

    clock = ManualClock()
    engine = FakeEngine(backend=FakeBackend(clock=clock, fail=fail), clock=clock)
    bad, good = engine.submit("!bad", max_tokens=5), engine.submit("good", max_tokens=5, ignore_eos=True)
    engine.run()
    assert bad.finish_reason is FinishReason.ERROR
    assert good.finish_reason is FinishReason.LENGTH


def test_a_deadline_is_reached_by_advancing_the_clock() -> None:
    """No sleep: the request ends in the tick after its time."""
    engine = FakeEngine(num_slots=1)
    first = engine.submit("first", max_tokens=1000, ignore_eos=True)
    waiting = engine.submit("second", queue_timeout_s=60)
    engine.tick()
    engine.clock.advance(61)
    engine.tick()
    assert waiting.finish_reason is FinishReason.DEADLINE
    assert not first.is_finished


def test_instruments_and_strategies_are_called() -> None:
    """One's own strategy plans the ticks, and an instrument sees them."""

    class OneAtATime:
        def plan(self, view: SchedulerView, _budget: int) -> list[TokenAllocation]:
            return [TokenAllocation(view.sequences[0].key, 1)]

    class Rows(Instrument):
        def __init__(self) -> None:
            self.sizes: list[int] = []

        def tick_finished(self, record: TickRecord) -> None:
            self.sizes += [row.num_tokens for row in record.rows]

    rows = Rows()
    engine = FakeEngine(strategy=OneAtATime(), instruments=[rows])
    streams = [engine.submit(prompt, max_tokens=2, ignore_eos=True) for prompt in ("abc", "de")]
    engine.run()
    assert all(stream.is_finished for stream in streams)
    assert rows.sizes == [1] * 7  # 3 + 2 prompt tokens, and each has one more row for its second token
    assert engine.stats().completed == 2


def test_a_strategy_that_starves_a_request_is_reported() -> None:
    """Running raises after max_ticks instead of turning for ever."""
    engine = FakeEngine()
    stream = engine.submit("hello", max_tokens=1000, ignore_eos=True)
    with pytest.raises(AssertionError, match="after 3 ticks"):
        engine.run(max_ticks=3)
    assert not stream.is_finished


def test_a_wrong_request_is_refused_and_the_next_one_works() -> None:
    """Too long, unknown tokens, too many: the errors of the real engine, and it goes on."""
    engine = FakeEngine(num_slots=1, max_queue=0, backend=FakeBackend(num_cells=64, num_seq_ids=4))
    with pytest.raises(PromptTooLong):
        engine.submit("a" * 65)
    with pytest.raises(InvalidParams, match="999"):
        engine.submit([999])
    stream = engine.submit("hello", max_tokens=3)
    with pytest.raises(QueueFull):
        engine.submit("one more")
    engine.run()
    assert stream.is_finished


@pytest.mark.parametrize("option", ["num_slots", "n_batch", "chunk_size", "itl_target_ms"])
def test_a_wrong_option_names_itself(option: str) -> None:
    """Zero slots, tokens or milliseconds make no engine."""
    with pytest.raises(InvalidParams, match=option):
        FakeEngine(**{option: 0})  # type: ignore[arg-type]
