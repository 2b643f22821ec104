"""A request that has ended is freed at once: neither it nor its sequences wait for the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
from tests.engine_world import World
from tests.isolated_world import IsolatedWorld

from paceline.errors import DecodeError
from paceline.sequence import Request, Row, Sequence
from paceline.streaming import FinishReason

Live = Callable[[], list[object]]


@pytest.fixture
def live() -> Iterator[Live]:
    """Lists the requests and sequences that exist and did not before the test, during which the collector is off."""
    gc.collect()
    earlier = _existing()
    gc.disable()
    yield lambda: [item for item in _existing() if not any(item is other for other in earlier)]
    gc.enable()


def _existing() -> list[object]:
    return [obj for obj in gc.get_objects() if type(obj) in (Request, Sequence)]


def run_to_the_end(world: World) -> None:
    world.submit("hello", max_tokens=4)
    world.run()


def run_several_choices(world: World) -> None:
    world.submit("hello", n=3, stop=["xyz"], max_tokens=4)
    world.run()


def run_without_tokens(world: World) -> None:
    world.submit("hello", max_tokens=0)
    world.run()


def cancel_running(world: World) -> None:
    outcome = world.submit("hello", n=2, ignore_eos=True)
    world.tick(3)
    world.cancel(outcome)
    world.run()


def cancel_waiting(world: World) -> None:
    outcomes = [world.submit("hello", ignore_eos=True) for _ in range(5)]  # one more than slots
    world.tick(2)
    for outcome in reversed(outcomes):
        world.cancel(outcome)
    world.run()


def pass_a_deadline(world: World) -> None:
    world.submit("hello", timeout_s=1, ignore_eos=True)
    world.tick(2)
    world.clock.advance(2)
    world.run()


def fail_in_the_engine(world: World) -> None:
    world.submit("hello", ignore_eos=True)
    world.tick(2)
    failures: list[Exception] = []
    world.take(world.scheduler.fail_all(DecodeError("broken"), failures))
    assert not failures


def never_submit(world: World) -> None:
    world.request("hello", n=2)


@pytest.mark.parametrize(
    "use",
    [
        run_to_the_end, run_several_choices, run_without_tokens, cancel_running, cancel_waiting, pass_a_deadline,
        fail_in_the_engine, never_submit,
    ],
)  # fmt: skip
def test_an_engine_frees_requests_by_reference_counting(use: Callable[[World], None], live: Live) -> None:
    """However a request ends, nothing of it is left once its caller has dropped it."""
    world = World()
    run_to_the_end(world)
    use(world)
    world.outcomes.clear()
    assert live() == []


def test_a_watched_engine_frees_requests_too(live: Live) -> None:
    """The log of ticks that someone watches keeps no sequence."""
    world = World()
    world.scheduler._telemetry.log.ask(world.clock.now())
    world.submit("hello", tenant="a", n=2, max_tokens=3)
    world.run()
    assert world.scheduler._telemetry.log.ticks(0)[-1].tenants[0] == "a"
    world.outcomes.clear()
    assert live() == []


def test_an_engine_keeps_no_request_that_its_strategy_could_not_plan(live: Live) -> None:
    """The error has frames with its sequences, and is the caller's alone after the next tick."""
    world = World()
    run_to_the_end(world)
    world.faults.next_plans.append(KeyError("what"))
    run_to_the_end(world)
    world.outcomes.clear()
    gc.collect()  # the error and its frames refer to each other
    assert live() == []


@pytest.mark.parametrize("deaths", [0, 2])
def test_front_and_worker_free_requests_by_reference_counting(deaths: int, live: Live) -> None:
    """A finished, a cancelled and a replayed request leave nothing in the front and in the worker that runs."""
    world = IsolatedWorld()
    world.submit([1, 2, 3], n=2, max_tokens=20, ignore_eos=True)
    cancelled = world.submit([4, 5], ignore_eos=True).request.key

    def before_tick(number: int) -> None:
        if number in (3, 6)[:deaths]:
            world.die()
            gc.collect()  # the open requests of the worker that died, whose process would be gone
        if number == 8:
            world.cancel(cancelled)

    world.run(before_tick)
    assert all(outcome.is_released for outcome in world.outcomes.values())
    world.requests.clear()
    world.outcomes.clear()
    assert live() == []


def test_a_worker_frees_a_request_whose_pass_failed(live: Live) -> None:
    """The error that is sent keeps no frame of the pass, and so no row."""

    def fail(number: int, rows: list[Row]) -> Exception | None:
        return DecodeError("cannot be computed") if number > 2 else None

    world = IsolatedWorld(fail=fail)
    world.submit([1, 2, 3], ignore_eos=True)
    world.run()
    assert [outcome.terminal.finish_reason for outcome in world.outcomes.values()] == [FinishReason.ERROR]
    world.requests.clear()
    world.outcomes.clear()
    assert live() == []
