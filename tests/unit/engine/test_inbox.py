"""The inbox: order, bounds, closing; commands that always pass."""

from __future__ import annotations

import gc
import itertools
import math
import threading
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine_world import make_request
from tests.running_engine import LONG_S, in_threads

from paceline.engine.core import Cancel, EndSlow, SetPaused, Stop, Submit
from paceline.engine.inbox import Inbox, Wait
from paceline.errors import EngineStopped, QueueFull
from paceline.sequence import Request
from paceline.testing.fake_backend import FakeBackend, ManualClock

BACKEND, CLOCK = FakeBackend(), ManualClock()


def request_of(inbox: Inbox, prompt: str = "hello") -> Request:
    return make_request(BACKEND, CLOCK, inbox.next_key(), prompt)


def submit(inbox: Inbox, prompt: str = "hello") -> Request:
    request = request_of(inbox, prompt)
    inbox.submit(request, len(request.prompt))
    return request


def test_commands_come_out_in_order_and_once() -> None:
    """Requests and other commands keep their order; taken commands are not taken again."""
    inbox = Inbox(10)
    first = submit(inbox)
    inbox.put(Cancel(first.key))
    second = submit(inbox)
    assert inbox.take() == [Submit(first), Cancel(first.key), Submit(second)]
    assert inbox.take() == []


def test_keys_are_unique_grow_and_are_never_zero() -> None:
    """No two requests have the same key, whatever thread asks for it."""
    inbox, taken = Inbox(1), [list[int]() for _ in range(4)]
    in_threads(*(lambda keys=keys: keys.extend(inbox.next_key() for _ in range(200)) for keys in taken))
    assert all(keys == sorted(keys) for keys in taken)
    assert sorted(itertools.chain(*taken)) == list(range(1, 801))


def test_what_is_waited_for_is_not_lost() -> None:
    """The command that ends the waiting comes first out of the next take."""
    inbox = Inbox(10)
    request = submit(inbox)
    inbox.put(Stop())
    inbox.wait(None)
    assert inbox.take() == [Submit(request), Stop()]
    inbox.wait(0)
    assert inbox.take() == []


def test_a_command_wakes_a_waiting_thread() -> None:
    """Waiting without a limit ends with a command from another thread."""
    inbox = Inbox(10)
    waiter = threading.Thread(target=inbox.wait, args=(None,))
    waiter.start()
    inbox.put(EndSlow(7))
    waiter.join(LONG_S)
    assert not waiter.is_alive()
    assert inbox.take() == [EndSlow(7)]


def test_the_backlog_is_bounded_and_an_ending_makes_room() -> None:
    """As many requests as may be open are accepted, the next is refused at once, until one ends."""
    inbox = Inbox(3)
    accepted = [submit(inbox) for _ in range(3)]
    with pytest.raises(QueueFull, match="the queue is full: the engine has 3 requests"):
        submit(inbox)
    assert (inbox.num_refused, inbox.num_open) == (1, 3)
    inbox.take()
    inbox.started(accepted[0].key)
    with pytest.raises(QueueFull):
        submit(inbox)
    inbox.ended(accepted[0].key)
    submit(inbox)
    assert inbox.num_open == 3


def test_prompt_tokens_that_wait_are_bounded() -> None:
    """Prompts beyond max_queue_tokens are refused while others wait; one alone is always taken; starting makes room."""
    inbox = Inbox(100, 10)
    first = submit(inbox, "x" * 50)
    with pytest.raises(
        QueueFull,
        match=r"the queue is full: 50 prompt tokens are queued, and 3 more would exceed max_queue_tokens \(10\)",
    ):
        submit(inbox, "abc")
    inbox.started(first.key)
    submit(inbox, "x" * 7)
    submit(inbox, "abc")
    with pytest.raises(QueueFull):
        submit(inbox, "a")
    assert inbox.num_open == 3


def test_a_refused_request_reserves_nothing() -> None:
    """Refused requests count neither a place nor prompt tokens."""
    inbox = Inbox(2, 10)
    kept = submit(inbox, "x" * 9)
    for _ in range(3):
        with pytest.raises(QueueFull):
            submit(inbox, "x" * 9)
    assert inbox.num_open == 1
    assert inbox.take() == [Submit(kept)]
    inbox.ended(kept.key)
    inbox.close()
    assert inbox.wait_until_empty(0)


def test_a_request_that_has_ended_is_not_taken_any_more() -> None:
    """Its reader has the end; other commands for it may still come."""
    inbox = Inbox(10)
    ended, other = submit(inbox), submit(inbox)
    inbox.put(Cancel(ended.key))
    inbox.ended(ended.key)
    assert inbox.take() == [Submit(other), Cancel(ended.key)]


def test_a_closed_inbox_refuses_requests_and_nothing_else() -> None:
    """After closing submit raises, while cancels, pauses and stops pass."""
    inbox = Inbox(10)
    kept = submit(inbox)
    inbox.close()
    inbox.close()
    with pytest.raises(EngineStopped, match="make a new one"):
        submit(inbox)
    with pytest.raises(EngineStopped):
        inbox.check_open()
    commands = [Cancel(kept.key), SetPaused(kept.key, True), EndSlow(kept.key), Stop()]
    for command in commands:
        inbox.put(command)
    assert inbox.take() == [Submit(kept), *commands]


def test_commands_are_never_lost_to_a_full_queue() -> None:
    """If no request has room, cancels and stops still get through."""
    inbox = Inbox(1)
    kept = submit(inbox)
    with pytest.raises(QueueFull):
        submit(inbox)
    inbox.put(Cancel(kept.key))
    inbox.put(Stop())
    assert inbox.take() == [Submit(kept), Cancel(kept.key), Stop()]


def test_waiting_for_the_last_request() -> None:
    """`wait_until_empty` says whether all have ended in time, and wakes with the last ending."""
    inbox = Inbox(10)
    requests = [submit(inbox) for _ in range(3)]
    assert not inbox.wait_until_empty(0)
    results: list[bool] = []
    waiter = threading.Thread(target=lambda: results.append(inbox.wait_until_empty(LONG_S)))
    waiter.start()
    for request in requests:
        inbox.ended(request.key)
    waiter.join(LONG_S)
    assert results == [True]


def test_accepting_and_closing_exclude_each_other() -> None:
    """Whatever was accepted beside a close is in the queue; whatever was not has raised."""
    for _ in range(200):
        inbox, accepted = Inbox(100), [0, 0]

        def submit_until_refused(index: int) -> None:
            try:
                for _ in range(3):
                    submit(inbox)
                    accepted[index] += 1
            except EngineStopped:
                return

        closer = threading.Thread(target=inbox.close)
        submitter = threading.Thread(target=submit_until_refused, args=(1,))
        submitter.start()
        closer.start()
        submit_until_refused(0)
        closer.join()
        submitter.join()
        assert sum(accepted) == len(inbox.take()) == inbox.num_open


def test_a_cancel_out_of_a_garbage_collection_takes_no_lock() -> None:
    """A command may be put while the same thread is in the middle of accepting."""
    inbox = Inbox(10)

    class Dropped:
        def __del__(self) -> None:
            inbox.put(Cancel(1))

    with inbox._changed:
        one = [Dropped()]
        one.append(one)  # type: ignore[arg-type]
        del one
        gc.collect()
    assert inbox.take() == [Cancel(1)]


def test_what_another_front_has_accepted_finds_room() -> None:
    """Its bounds were kept there; a full inbox takes it, and refuses others as before."""
    inbox = Inbox(1, max_queue_tokens=5)
    submit(inbox)
    accepted = request_of(inbox, "a long prompt")
    inbox.submit(accepted, len(accepted.prompt), is_accepted=True)
    assert Submit(accepted) in inbox.take()
    with pytest.raises(QueueFull):
        submit(inbox)
    inbox.close()
    with pytest.raises(EngineStopped):
        inbox.submit(request_of(inbox), 1, is_accepted=True)


class Line:
    """An inbox with room for one request, the requests that wait in its line, and the outcomes of their waits."""

    def __init__(self, inbox: Inbox | None = None) -> None:
        self.inbox = Inbox(1) if inbox is None else inbox
        self.accepted: list[int] = []
        self.refused: list[tuple[int, str]] = []
        self.first = self.submit()

    def submit(self, prompt: str = "hello", **options: Any) -> Request:
        request = make_request(BACKEND, CLOCK, self.inbox.next_key(), prompt, **options)
        key = request.key
        wait = Wait(lambda: self.accepted.append(key), lambda error: self.refused.append((key, str(error))))
        self.inbox.submit(request, len(request.prompt), wait=wait)
        return request


def test_requests_wait_in_line_in_order_of_arrival() -> None:
    """The engine gets each of them when one before it has ended; nothing polls."""
    line = Line()
    inbox, requests = line.inbox, [line.submit() for _ in range(3)]
    assert inbox.take() == [Submit(line.first)]
    assert (inbox.num_open, [inbox.is_in_line(request.key) for request in requests]) == (1, [True] * 3)
    for before, request in itertools.pairwise([line.first, *requests]):
        inbox.started(before.key)
        assert inbox.take() == []
        inbox.ended(before.key)
        assert inbox.take() == [Submit(request)]
        assert line.accepted[-1] == request.key
    inbox.ended(requests[-1].key)
    assert (inbox.num_open, line.refused) == (0, [])


def test_no_request_overtakes_the_line() -> None:
    """While a long prompt waits for its tokens, a short one is refused, or waits after it."""
    line = Line(Inbox(10, max_queue_tokens=8))
    long, short = line.submit("0123456789"), line.submit("a")
    with pytest.raises(QueueFull, match="the queue is full: 2 requests wait for room in it; try again later"):
        submit(line.inbox, "a")
    assert line.inbox.num_refused == 1
    assert line.inbox.take() == [Submit(line.first)]
    line.inbox.started(line.first.key)  # its tokens wait no more
    assert line.inbox.take() == [Submit(long)]
    line.inbox.started(long.key)
    assert line.inbox.take() == [Submit(short)]


def test_a_cancelled_wait_ends_out_of_turn() -> None:
    """The scheduler gets the request and its cancel, in this order; the line goes on without it."""
    line = Line()
    one, other = line.submit(), line.submit()
    line.inbox.take()
    other.cancelled = True
    line.inbox.put(Cancel(other.key))
    assert line.inbox.take() == [Cancel(other.key)]
    assert line.inbox.take() == [Submit(other), Cancel(other.key)]
    line.inbox.ended(other.key)
    assert line.inbox.take() == []
    one.cancelled = True
    line.inbox.put(Cancel(one.key))
    line.inbox.ended(line.first.key)  # its turn comes before its cancel is taken
    assert line.inbox.take() == [Cancel(one.key), Submit(one), Cancel(one.key)]


def test_a_request_that_was_cancelled_before_it_was_in_line_does_not_wait() -> None:
    """Its cancel may have been taken before the inbox knew the request."""
    line = Line()
    inbox, request = line.inbox, make_request(BACKEND, CLOCK, line.inbox.next_key(), "hello")
    inbox.take()
    request.cancelled = True
    inbox.put(Cancel(request.key))
    assert inbox.take() == [Cancel(request.key)]
    inbox.submit(request, 1, wait=Wait(lambda: None, lambda _: None))
    assert inbox.take() == [Cancel(request.key)]
    assert inbox.take() == [Submit(request), Cancel(request.key)]


def test_a_wait_ends_at_its_deadline() -> None:
    """The engine's thread is woken to note the deadline, and accepts the request then."""
    line = Line()
    patient, hasty = line.submit(timeout_s=60), line.submit(queue_timeout_s=5)
    line.submit()
    assert line.inbox.take() == [Submit(line.first)]
    assert line.inbox.next_deadline_s() == hasty.submitted_s + 5
    line.inbox.end_overdue_waits(hasty.submitted_s + 4.9)
    assert line.inbox.take() == []
    line.inbox.end_overdue_waits(hasty.submitted_s + 5)
    assert line.inbox.take() == [Submit(hasty)]
    assert line.inbox.next_deadline_s() == patient.submitted_s + 60
    line.inbox.ended(hasty.key)
    line.inbox.ended(line.first.key)
    assert line.inbox.take() == [Submit(patient)]
    assert line.inbox.next_deadline_s() == math.inf


def test_a_new_deadline_wakes_the_thread_that_waits() -> None:
    """Also if it waits without a limit, since all open requests are paused."""
    line = Line()
    line.inbox.take()
    in_threads(lambda: line.inbox.wait(LONG_S), lambda: line.submit(timeout_s=60))
    assert line.inbox.take() == []


def test_closing_refuses_the_line() -> None:
    """With `EngineStopped`, at once, and for good; accepted requests stay."""
    line = Line()
    requests = [line.submit(timeout_s=5) for _ in range(2)]
    line.inbox.close()
    assert line.refused == [
        (request.key, "the engine was shut down and takes no requests; make a new one") for request in requests
    ]
    line.inbox.ended(line.first.key)
    line.inbox.end_overdue_waits(math.inf)
    assert (line.inbox.take(), line.accepted, line.inbox.num_open) == ([], [], 0)


def test_larger_bounds_serve_the_line() -> None:
    """Of a worker or of replicas with more slots than before."""
    line = Line()
    requests = [line.submit() for _ in range(3)]
    line.inbox.set_bounds(3, None)
    assert line.inbox.take() == [Submit(line.first), Submit(requests[0]), Submit(requests[1])]


def submit_of(inbox: Inbox, tenant: str, prompt: str = "hello") -> Request:
    request = make_request(BACKEND, CLOCK, inbox.next_key(), prompt, tenant=tenant)
    inbox.submit(request, len(request.prompt))
    return request


def fill(inbox: Inbox, tenant: str, prompt: str = "hello") -> tuple[int, str]:
    """Return how many requests of a tenant are accepted, and why the next one is refused."""
    for number in range(1000):
        try:
            submit_of(inbox, tenant, prompt)
        except QueueFull as error:
            return number, str(error)
    raise AssertionError("no request was refused")


def test_a_tenant_leaves_a_part_of_the_queue_to_the_others() -> None:
    """A tenant alone has three quarters of the places; the others find room, and a refusal names the full share."""
    inbox = Inbox(80)
    inbox.expect_tenants(["a", "b", "c"])
    num_accepted, why = fill(inbox, "a")
    assert num_accepted == 60
    assert why == (
        "the share of tenant 'a' in the queue is full: it has 60 of 80 places (num_slots + max_queue), and the 20 free places "
        "are kept for other tenants; try again later"
    )
    assert fill(inbox, "b")[0] == 15
    assert fill(inbox, "c")[0] == 4


def test_a_place_that_becomes_free_goes_to_the_tenant_below_its_share() -> None:
    """While one tenant holds more than its share, its ended requests make room for others alone."""
    inbox = Inbox(16)
    inbox.expect_tenants(["a", "b"])
    held = [submit_of(inbox, "a") for _ in range(12)]
    assert fill(inbox, "b")[0] == 3
    for request in held[:3]:
        inbox.ended(request.key)
        with pytest.raises(QueueFull, match="tenant 'a'"):
            submit_of(inbox, "a")
        submit_of(inbox, "b")


@pytest.mark.parametrize("tenant", ["", "a"])
def test_a_tenant_without_others_uses_the_whole_queue(tenant: str) -> None:
    """Requests without a tenant, and a single tenant, are bounded by the queue alone."""
    inbox = Inbox(8)
    inbox.expect_tenants([tenant])
    assert fill(inbox, tenant) == (
        8,
        "the queue is full: the engine has 8 requests (num_slots + max_queue); try again later",
    )


@pytest.mark.parametrize("tenant", ["", "a"])
def test_without_expected_tenants_a_queue_is_shared_from_the_second_tenant_on(tenant: str) -> None:
    """The library expects no tenants: one alone has all places, until another has been refused, and again when none is open."""
    inbox = Inbox(8, 1000)
    held = [submit_of(inbox, tenant) for _ in range(8)]
    with pytest.raises(QueueFull, match="the queue is full"):
        submit_of(inbox, "b")
    for request in held[:2]:
        inbox.ended(request.key)
        with pytest.raises(QueueFull, match="the share of"):
            submit_of(inbox, tenant)
    last = submit_of(inbox, "b")
    for request in (*held[2:], last):
        inbox.ended(request.key)
    assert inbox.most_requests(tenant) == 8
    assert fill(inbox, tenant)[0] == 8


def test_an_idle_tenant_counts_once_after_it_had_requests() -> None:
    """The places that are kept for tenants without a request are the same before and after they had some."""
    inbox = Inbox(16)
    inbox.expect_tenants(["a", "b", "c"])
    for _ in range(3):
        for request in [submit_of(inbox, tenant) for tenant in ("b", "c", "b")]:
            inbox.ended(request.key)
            inbox.ended(request.key)
    inbox.expect_tenants(["a", "b", "c", "d", "e", "f"])
    assert fill(inbox, "a")[0] == inbox.most_requests("a") == 12
    assert [fill(inbox, tenant)[0] for tenant in ("b", "c", "d", "e")] == [1, 1, 1, 1]


def test_every_known_tenant_without_a_request_has_a_place() -> None:
    """Nine tenants and two requests each fill no queue of 32 places before the last one has its first."""
    inbox, tenants = Inbox(32), [f"t{number}" for number in range(9)]
    inbox.expect_tenants(tenants)
    for tenant in tenants:
        assert fill(inbox, tenant)[0] >= 1


@pytest.mark.parametrize("num_places", [1, 2, 3, 4, 8, 64, 65])
@pytest.mark.parametrize("tenants", [(), ("",), ("a",), ("a", "b"), ("a", "b", "c", "d", "e")])
def test_the_most_requests_of_a_tenant_are_all_accepted(num_places: int, tenants: tuple[str, ...]) -> None:
    """As many as the inbox reports beforehand, and not one more, while other tenants have none."""
    for tenant in ("", "a"):
        inbox = Inbox(num_places)
        inbox.expect_tenants(tenants)
        most = inbox.most_requests(tenant)
        assert fill(inbox, tenant)[0] == most >= 1


def test_queued_tokens_are_shared_by_tenants() -> None:
    """A tenant alone queues three quarters of the tokens; another's first prompt is accepted, whatever its length."""
    inbox = Inbox(1000, 400)
    inbox.expect_tenants(["a", "b"])
    num_accepted, why = fill(inbox, "a", "0123456789")
    assert num_accepted == 30
    assert why == (
        "the share of tenant 'a' in the queue is full: 300 of its prompt tokens are queued, and 10 more would leave too few of "
        "max_queue_tokens (400) to other tenants; try again later"
    )
    submit_of(inbox, "b", "x" * 150)
    with pytest.raises(QueueFull, match="450 prompt tokens are queued, and 10 more would exceed max_queue_tokens"):
        submit_of(inbox, "b", "0123456789")


def test_tenants_in_the_line_take_turns() -> None:
    """Three earlier requests of one tenant are not all accepted before a request of another tenant."""
    line = Line()
    waiting = [line.submit(tenant=tenant) for tenant in ("a", "a", "a", "b", "", "b")]
    keys = [request.key for request in waiting]
    running = line.first
    for _ in waiting:
        line.inbox.ended(running.key)
        running = next(request for request in waiting if request.key == line.accepted[-1])
    assert [keys.index(key) for key in line.accepted] == [0, 3, 4, 1, 5, 2]


@settings(deadline=None, max_examples=200)
@given(
    num_places=st.integers(1, 40),
    tenants=st.integers(2, 8),
    steps=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 2), st.integers(1, 60)), max_size=120),
)
def test_no_tenant_is_refused_its_first_request_for_the_requests_of_others(
    num_places: int, tenants: int, steps: list[tuple[int, int, int]]
) -> None:
    """Whatever tenants send, and whatever starts and ends: a tenant without a request is accepted."""
    num_places = max(num_places, 4 * (tenants - 1))
    inbox = Inbox(num_places, 100)
    inbox.expect_tenants([str(number) for number in range(tenants)])
    is_open: dict[int, str] = {}
    for number, action, size in steps:
        tenant = str(number % tenants)
        if action == 0 or not is_open:
            if tenant not in is_open.values():
                is_open[submit_of(inbox, tenant, "x" * size).key] = tenant
            else:
                with suppress(QueueFull):
                    is_open[submit_of(inbox, tenant, "x" * size).key] = tenant
        else:
            key = sorted(is_open)[size % len(is_open)]
            inbox.started(key)
            if action == 2:
                inbox.ended(key)
                del is_open[key]
        assert inbox.num_open == len(is_open) <= num_places
