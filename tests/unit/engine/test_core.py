"""The engine ticked by hand: endings, pressure, failures, fairness, on the fake backend and a manual clock."""

from __future__ import annotations

import gc
import tracemalloc
from collections import Counter
from functools import partial

import pytest
from tests.engine_world import Outcome, World

from paceline.engine.core import Ask, Cancel, EndSlow, SetPaused, Submit
from paceline.engine.questions import detach, slots
from paceline.errors import Aborted, DecodeError, EngineError, NoKvSlot, SamplingError, StrategyError
from paceline.scheduling.records import Answered, Delta, Released, Started
from paceline.streaming import FinishReason
from paceline.testing.fake_backend import EOS

KINDS = ("attention", "sliding_window", "hybrid", "recurrent")


def test_an_idle_engine_computes_nothing() -> None:
    """Without requests a tick makes no pass, and the engine reports that it is idle."""
    world = World()
    world.tick(3)
    assert world.engine.is_idle
    assert world.backend.num_passes == 0
    assert world.engine.next_deadline_s() == float("inf")


def test_events_of_one_request_come_in_order() -> None:
    """Started, deltas, one ending, released; then nothing."""
    world = World()
    world.submit("hello", max_tokens=3, ignore_eos=True)
    seen = []
    for _ in range(5):
        seen += world.engine.tick()
    assert [type(event) for event in seen] == [Started, Delta, Delta, Delta, Released]
    assert [event.chunk.index for event in seen if isinstance(event, Delta) and event.chunk] == [0, 1, 2]


def test_one_token_is_reported_like_many() -> None:
    """With max_tokens 1 the chunk after the prefill is the terminal one and has the token."""
    world = World()
    outcome = world.submit("hello", max_tokens=1, ignore_eos=True)
    world.run()
    world.check_done()
    (chunk,) = outcome.chunks
    assert (len(chunk.token_ids), chunk.finish_reason) == (1, FinishReason.LENGTH)
    assert chunk.usage is not None
    assert chunk.usage.completion_tokens == 1


def test_no_tokens_wanted_means_no_pass() -> None:
    """max_tokens 0 ends with LENGTH and no token at once, without computing anything."""
    world = World()
    outcome = world.submit("hello", max_tokens=0, n=2, echo=True)
    world.tick()
    world.check_done()
    assert world.backend.num_passes == 0
    assert [outcome.reason(0), outcome.reason(1)] == [FinishReason.LENGTH] * 2
    assert outcome.text(0) == outcome.text(1) == "hello"


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_is_scored_without_generating(kind: str) -> None:
    """With max_tokens 0 and prompt_logprobs every prompt token but the first has its own, in order, and nothing is drawn."""
    world = World(kind=kind, limits={"max_scored": 3})
    outcome = world.submit("some prompt", max_tokens=0, prompt_logprobs=2, n=2)
    world.run()
    world.check_done()
    scored = [token for chunk in outcome.of_choice(0) for token in chunk.prompt_logprobs]
    assert len(scored) == len("some prompt") - 1
    assert all(len(completion.token_ids) == 2 for completion in scored)
    assert not [token for chunk in outcome.of_choice(1) for token in chunk.prompt_logprobs]
    assert outcome.token_ids(0) == outcome.token_ids(1) == []


def test_logprobs_are_one_a_token_and_none_for_a_stop() -> None:
    """Ids and logprobs are aligned, also if a stop was held back and taken."""
    world = World()
    prompt = "hello"
    whole = world.alone(prompt, max_tokens=20, logprobs=2, ignore_eos=True)
    text = whole.text()
    stop = text[5:7]
    outcome = world.submit(prompt, max_tokens=20, logprobs=2, ignore_eos=True, stop=[stop])
    world.run()
    assert outcome.reason() is FinishReason.STOP
    assert outcome.text() == text[: text.index(stop)]
    assert len(outcome.logprobs()) == len(outcome.token_ids())
    assert outcome.logprobs() == whole.logprobs()[: len(outcome.token_ids())]
    assert outcome.last().stop == stop


@pytest.mark.parametrize(("script", "taken"), [(b"xabc", b"bc"), ([*b"xabc", EOS], [*b"bc", EOS])])
def test_a_stop_that_is_complete_when_the_completion_ends_is_why(script: list[int], taken: list[int]) -> None:
    """A stop that a longer stop might have displaced is the reason if length or the end come first."""
    world = World()
    outcome = world.submit([1], script=script, stop=["bc", "abcd"], max_tokens=max(4, len(script)))
    world.run()
    assert (outcome.text(), outcome.reason(), outcome.last().stop) == ("xa", FinishReason.STOP, "bc")
    assert outcome.last().stop_token_ids == tuple(taken)


def test_a_stop_id_ends_and_is_in_no_token_ids() -> None:
    """The stop token's id is reported by itself; neither its text nor its logprobs appear."""
    world = World()
    outcome = world.submit([1], script=[65, 66, 67], stop_token_ids=[67], logprobs=0)
    world.run()
    assert (outcome.text(), outcome.token_ids(), outcome.reason()) == ("AB", [65, 66], FinishReason.STOP)
    assert (outcome.last().stop, outcome.last().stop_token_ids) == (67, (67,))
    assert len(outcome.logprobs()) == 2


def test_a_stop_string_counts_only_after_min_tokens() -> None:
    """Text generated before min_tokens cannot be part of a stop string."""
    world = World()
    outcome = world.submit([1], script=b"ababab", stop=["ab"], min_tokens=3)
    world.run()
    assert (outcome.text(), outcome.reason()) == ("abab", FinishReason.STOP)
    assert outcome.token_ids() == list(b"abab")


def test_all_ends_of_generation_end() -> None:
    """Every token that the vocabulary names as an end is one, unless the request ignores them."""
    from paceline.output import Vocabulary

    pieces = (b"a", b"b", b"</s>", b"<end>")
    for end in (2, 3):
        world = World(vocabulary=Vocabulary(pieces, pieces, frozenset({2, 3})))
        outcome = world.submit([0], script=[0, end, 1])
        world.run()
        assert (outcome.token_ids(), outcome.reason(), outcome.last().stop) == ([0], FinishReason.STOP, end)
    ignoring = world.submit([0], script=[0, 2, 3, 1], ignore_eos=True, max_tokens=4)
    world.run()
    assert (ignoring.token_ids(), ignoring.reason()) == ([0, 2, 3, 1], FinishReason.LENGTH)


def test_control_tokens_are_ids_and_text_only_where_asked_for() -> None:
    """`special` changes the text and never the ids."""
    world = World()
    plain = world.submit([1], script=[65, 257, 66])
    special = world.submit([1], script=[65, 257, 66], special=True)
    world.run()
    assert plain.token_ids() == special.token_ids() == [65, 257, 66]
    assert (plain.text(), special.text()) == ("AB", "A<bos>B")


def test_cancel_wins_over_a_step_that_finished_the_sequence_anyway() -> None:
    """A cancel that arrives during the last pass is the reason, and the token that came is delivered."""
    world = World()
    outcome = world.submit([1], script=b"abc", max_tokens=3)
    world.tick(2)
    world.backend._fail = lambda number, rows: setattr(outcome.request, "cancelled", True)
    world.tick()
    assert outcome.reason() is FinishReason.CANCELLED
    assert outcome.text() == "abc"
    world.run()
    world.check_done()


def test_a_cancel_is_noticed_before_the_next_pass() -> None:
    """It costs no further token; slot and memory are free one tick later."""
    world = World()
    outcome = world.submit([1], script=b"x" * 100)
    world.tick(5)
    world.cancel(outcome)
    passes = world.backend.num_passes
    world.tick()
    assert (outcome.text(), outcome.reason()) == ("xxxxx", FinishReason.CANCELLED)
    assert outcome.is_released
    assert world.backend.num_passes == passes
    assert world.backend.memory.num_used == 0


def test_commands_for_unknown_requests_are_ignored() -> None:
    """A cancel, pause or slow end of an ended or unknown request changes nothing."""
    world = World()
    outcome = world.submit("hello", max_tokens=2)
    world.run()
    chunks = list(outcome.chunks)
    for key in (outcome.request.key, 999):
        world.commands.queue += [Cancel(key), SetPaused(key, True), EndSlow(key)]
    world.run()
    world.check_done()
    assert outcome.chunks == chunks


def test_reasons_have_their_order_within_a_tick() -> None:
    """ERROR, CANCELLED, DEADLINE, SHUTDOWN, SLOW_READER: of several at once the first of these is reported."""
    wanted = (FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.SHUTDOWN, FinishReason.SLOW_READER)
    for index, reason in enumerate(wanted):
        world = World()
        outcome = world.submit("hello", ignore_eos=True, timeout_s=5)
        world.tick(2)
        world.end_slow(outcome)
        if index < 3:
            world.stop()
        if index < 2:
            world.clock.advance(10)
        if index < 1:
            world.cancel(outcome)
        world.tick()
        assert outcome.reason() is reason
    world = World()
    outcome = world.submit("hello")
    world.faults.undrawable.add(outcome.request.key)
    world.backend._fail = lambda number, rows: setattr(outcome.request, "cancelled", True)
    world.tick()
    assert outcome.reason() is FinishReason.ERROR


def test_each_deadline_ends_in_its_time() -> None:
    """In the queue, before the first token, in all: DEADLINE with the text until then."""
    world = World(limits={"num_slots": 1})
    running = world.submit("running", ignore_eos=True, max_tokens=None, timeout_s=50)
    queued = world.submit("queued", queue_timeout_s=5)
    patient = world.submit("patient", ttft_timeout_s=10)
    world.tick()
    assert world.engine.next_deadline_s() == 5
    world.clock.advance(5)
    world.tick()
    assert queued.reason() is FinishReason.DEADLINE
    assert patient.terminal is None
    world.clock.advance(5)
    world.tick()
    assert (patient.reason(), patient.token_ids(), running.terminal) == (FinishReason.DEADLINE, [], None)
    world.clock.advance(50)
    world.tick()
    assert running.reason() is FinishReason.DEADLINE
    assert len(running.token_ids()) == 3
    world.run()
    world.check_done()


def test_a_deadline_that_was_met_counts_no_more() -> None:
    """queue_timeout_s ends with the slot, ttft_timeout_s with the first token."""
    world = World()
    outcome = world.submit("hello", ignore_eos=True, max_tokens=20, queue_timeout_s=1, ttft_timeout_s=2)
    world.tick()
    world.clock.advance(100)
    world.run()
    assert outcome.reason() is FinishReason.LENGTH


# ---- failures


def test_a_pass_that_fails_once_fails_no_request() -> None:
    """Tried again in halves, it succeeds; no request notices."""
    world = World()
    outcomes = [world.submit(f"hello {index}", max_tokens=10) for index in range(4)]
    world.faults.next_passes.append(DecodeError("once"))
    world.run()
    world.check_done()
    for index, outcome in enumerate(outcomes):
        assert outcome.text() == world.alone(f"hello {index}", max_tokens=10).text()


def test_an_aborted_pass_is_run_again() -> None:
    """`Aborted` is no row's fault: every row is computed in the next tick."""
    world = World()
    outcome = world.submit("hello", max_tokens=10)
    for _ in range(3):
        world.faults.next_passes.append(Aborted("told to"))
        world.tick(2)
    world.run()
    assert outcome.text() == world.alone("hello", max_tokens=10).text()


def test_the_poisonous_request_is_found_among_many() -> None:
    """A request of eight that no pass survives ends with its error, in the same tick; seven read as alone."""
    world = World(limits={"num_slots": 8})
    outcomes = [world.submit(f"hello {index}", max_tokens=10, ignore_eos=True) for index in range(8)]
    world.tick(3)
    bad = outcomes[5]
    world.faults.poisonous.add(bad.request.key)
    world.tick()
    assert bad.reason() is FinishReason.ERROR
    assert isinstance(bad.last().error, DecodeError)
    assert bad.token_ids()
    world.run()
    world.check_done()
    for index, outcome in enumerate(outcomes):
        alone = world.alone(f"hello {index}", max_tokens=10, ignore_eos=True)
        assert alone.text().startswith(outcome.text())
        assert outcome is bad or outcome.text() == alone.text()


def test_a_failed_draw_ends_one_choice_of_several() -> None:
    """The other choices of the same request go on, and the request ends once, as an error."""
    world = World()
    outcome = world.submit("hello", n=3, max_tokens=5, ignore_eos=True)
    world.tick(4)
    world.faults.undrawable.add(outcome.request.key)
    world.run()
    world.check_done()
    reasons = Counter(outcome.reason(choice) for choice in range(3))
    assert reasons == {FinishReason.ERROR: 1, FinishReason.LENGTH: 2}
    assert [isinstance(outcome.last(choice).error, SamplingError) for choice in range(3)].count(True) == 1
    assert world.metrics.snapshot().failed == 1


def test_a_strategy_that_fails_ends_those_it_was_asked_to_plan() -> None:
    """Its name is in the error; waiting requests are served afterwards."""
    world = World(limits={"num_slots": 2})
    first, second, waiting = (world.submit(f"hello {index}", max_tokens=4) for index in range(3))
    world.faults.next_plans.append(KeyError("what"))
    world.tick()
    for outcome in (first, second):
        error = outcome.last().error
        assert isinstance(error, StrategyError)
        assert "FaultyStrategy" in str(error)
        assert "what" in str(error)
    world.run()
    world.check_done()
    assert waiting.last().error is None


@pytest.mark.parametrize("times", [1, 2])
def test_a_memory_operation_that_fails_is_its_sequences_alone(times: int) -> None:
    """If a prompt cannot be shared, that choice computes it itself; no request fails, and every output stays the same."""
    world = World()
    copy, failures = world.backend.copy, [times]

    def broken(*args: int) -> None:
        if failures[0]:
            failures[0] -= 1
            raise RuntimeError("no copy")
        copy(*args)

    world.backend.copy = broken  # type: ignore[method-assign]
    outcome = world.submit("a longer prompt", n=4, max_tokens=4, ignore_eos=True)
    for _ in range(50):  # not `run`: for a moment the scheduler and the memory do not agree
        world.take(world.engine.tick())
    world.check_done()
    assert failures == [0]
    alone = world.alone("a longer prompt", n=4, max_tokens=4, ignore_eos=True)
    for choice in range(4):
        assert outcome.reason(choice) is FinishReason.LENGTH
        assert outcome.token_ids(choice) == alone.token_ids(choice)


def test_a_backend_that_returns_too_little_is_noticed() -> None:
    """Fewer outcomes than rows are a mistake that is raised, not shifted onto other rows."""
    world = World()
    outcomes = [world.submit(f"hello {index}") for index in range(3)]
    step = world.backend.step
    world.backend.step = lambda rows, lora: step(rows, lora)[:-1]  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="shorter"):
        world.engine.tick()
    world.take(world.engine.fail_all(DecodeError("too little"), []))
    assert [outcome.reason() for outcome in outcomes] == [FinishReason.ERROR] * 3


def test_fail_all_ends_everything_once() -> None:
    """Running, waiting and embedding requests all get the error, and the engine can go on."""
    world = World(limits={"num_slots": 1})
    outcomes = [world.submit(f"hello {index}") for index in range(3)]
    key = world.submit_embedding(["text"])
    world.tick()
    world.take(world.engine.fail_all(DecodeError("everything"), []))
    assert [outcome.reason() for outcome in outcomes] == [FinishReason.ERROR] * 3
    assert isinstance(world.embedded[key].error, (DecodeError, type(None)))
    again = world.submit("hello 0", max_tokens=5)
    world.run()
    world.check_done()
    assert again.text() == world.alone("hello 0", max_tokens=5).text()


def test_what_is_done_before_a_tick_is_answered_though_the_tick_fails() -> None:
    """A detached adapter is to be freed; a query about the state after the tick has no answer."""
    world = World()
    world.commands.queue += [Ask(1, partial(detach, "german"), may_change_cache=True), slots.command(2, ())]
    world.executor.run = None  # type: ignore[assignment, method-assign]
    with pytest.raises(TypeError):
        world.engine.tick()
    assert world.engine.fail_all(EngineError("broken"), []) == [Answered(1, None)]


def test_stop_ends_everything_before_the_next_pass() -> None:
    """Running, paused and waiting requests end with SHUTDOWN, later requests too."""
    world = World(limits={"num_slots": 2})
    outcomes = [world.submit(f"hello {index}", ignore_eos=True) for index in range(4)]
    world.tick(2)
    world.pause(outcomes[0])
    world.tick()
    passes = world.backend.num_passes
    world.stop()
    outcomes.append(world.submit("late"))
    world.tick()
    assert [outcome.reason() for outcome in outcomes] == [FinishReason.SHUTDOWN] * 5
    assert world.backend.num_passes == passes
    world.check_done()


# ---- memory


@pytest.mark.parametrize("kind", KINDS)
def test_eight_requests_that_each_need_half_of_the_memory_all_finish(kind: str) -> None:
    """Under pressure one is preempted and goes on later; no request fails, and each output is the same as alone."""
    world = World(kind=kind, num_cells=40, limits={"num_slots": 8, "max_positions": 40})
    outcomes = [world.submit(f"{index} prompt", max_tokens=12, ignore_eos=True) for index in range(8)]
    world.run()
    world.check_done()
    for index, outcome in enumerate(outcomes):
        alone = world.alone(f"{index} prompt", max_tokens=12, ignore_eos=True)
        assert (outcome.token_ids(), outcome.reason()) == (alone.token_ids(), FinishReason.LENGTH)
    assert (world.metrics.snapshot().number("paceline_preemptions_total") > 0) == (kind != "recurrent")


def test_a_lone_sequence_that_fills_the_memory_ends_there() -> None:
    """One that could go on ends with LENGTH at the last position; a prompt that has no room at all ends with NoKvSlot."""
    world = World(num_cells=16)
    outcome = world.submit("hello", ignore_eos=True, max_tokens=None)
    world.run()
    assert (outcome.reason(), len(outcome.token_ids())) == (FinishReason.LENGTH, 16 - 5 + 1)
    cramped = World(num_cells=16, limits={"max_positions": 100})
    outcome = cramped.submit("x" * 20)
    after = cramped.submit("fits", max_tokens=2)
    cramped.run()
    cramped.check_done()
    assert isinstance(outcome.last().error, NoKvSlot)
    assert "raise n_ctx" in str(outcome.last().error)
    assert after.last().error is None


def test_pressure_takes_the_least_important_and_youngest() -> None:
    """Of running sequences, a lower priority is preempted first, then the younger; both finish."""
    world = World(num_cells=30, limits={"num_slots": 3})
    low = world.submit("low", priority=-1, max_tokens=9, ignore_eos=True)
    old = world.submit("old", max_tokens=9, ignore_eos=True)
    young = world.submit("new", max_tokens=9, ignore_eos=True)
    world.run()
    world.check_done()
    ended = sorted((low, old, young), key=lambda item: item.last().usage.decode_s + item.last().usage.ttft_s)  # type: ignore[union-attr,operator]
    assert ended[-1] is low
    assert ended[0] is old


def test_a_paused_reader_blocks_no_other() -> None:
    """If only paused sequences run and others wait for room, one of them gives its slot away and goes on later."""
    world = World(limits={"num_slots": 1})
    paused = world.submit("paused", max_tokens=9, ignore_eos=True)
    world.tick(3)
    world.pause(paused)
    other = world.submit("other", max_tokens=4, ignore_eos=True)
    world.run()
    assert other.reason() is FinishReason.LENGTH
    assert (len(paused.token_ids()), paused.terminal) == (3, None)
    world.pause(paused, is_paused=False)
    world.run()
    world.check_done()
    assert paused.token_ids() == world.alone("paused", max_tokens=9, ignore_eos=True).token_ids()


def test_a_freed_neighbours_cells_count() -> None:
    """The last one that runs is not failed for want of memory in the tick in which its neighbours end."""
    for num_cells in range(20, 64):
        world = World(num_cells=num_cells, eos_every=25)
        outcome = world.submit("bc ", n=4, max_tokens=17)
        world.run()
        world.check_done()
        assert {outcome.reason(choice) for choice in range(4)} == {FinishReason.LENGTH}


# ---- sharing and n


@pytest.mark.parametrize("kind", KINDS)
def test_choices_share_their_prompt_and_read_as_if_they_did_not(kind: str) -> None:
    """N choices compute the prompt once and equal n single requests with these draws."""
    world = World(kind=kind)
    outcome = world.submit("a prompt of some length", n=4, max_tokens=12, temperature=1, seed=7)
    world.run()
    world.check_done()
    prefill = world.metrics.snapshot().number("paceline_prefill_tokens_total")
    assert prefill == len("a prompt of some length") + 3
    assert len({outcome.text(choice) for choice in range(4)}) > 1
    narrow = World(kind=kind, limits={"num_slots": 1})
    one_by_one = narrow.submit("a prompt of some length", n=4, max_tokens=12, temperature=1, seed=7)
    narrow.run()
    assert [one_by_one.text(choice) for choice in range(4)] == [outcome.text(choice) for choice in range(4)]


def test_each_choice_ends_for_itself_and_the_last_is_the_terminal_one() -> None:
    """Every choice has one chunk with a reason, in any order; only the last of all has the usage."""
    world = World()
    outcome = world.submit("hello", n=5, temperature=1, seed=3, max_tokens=60)
    world.run()
    world.check_done()
    ended = [chunk for chunk in outcome.chunks if chunk.finish_reason is not None]
    assert sorted(chunk.choice for chunk in ended) == [0, 1, 2, 3, 4]
    assert [chunk.usage is not None for chunk in ended] == [False] * 4 + [True]
    assert outcome.terminal is ended[-1]


def test_echo_puts_the_prompt_in_front_of_every_choice() -> None:
    """The first text of each choice is the prompt's, its ids are not."""
    world = World()
    outcome = world.submit("prompt", n=2, echo=True, max_tokens=3, ignore_eos=True)
    world.run()
    for choice in range(2):
        assert outcome.text(choice).startswith("prompt")
        assert len(outcome.token_ids(choice)) == 3


# ---- fairness, adapters, embedding


def test_admission_is_first_come_first_served_within_a_priority() -> None:
    """Higher priority first, then arrival; ten seconds of waiting make up for one level."""
    world = World(limits={"num_slots": 1})
    order: list[int] = []

    def started(outcomes: list[Outcome]) -> list[int]:
        return [
            outcomes.index(outcome)
            for outcome in sorted(outcomes, key=lambda outcome: outcome.request.progress.started_s or 0)
        ]

    low = world.submit("low", priority=-1, max_tokens=2)
    world.clock.advance(11)
    outcomes = [low, *(world.submit(f"{index}", priority=index // 2, max_tokens=2) for index in range(4))]
    world.run()
    order = started(outcomes)
    assert order == [3, 4, 0, 1, 2]


def test_a_finished_slot_is_taken_in_the_next_tick() -> None:
    """Admission happens mid-flight, while others decode, as soon as there is room."""
    world = World(limits={"num_slots": 2})
    long = world.submit("long", max_tokens=30, ignore_eos=True)
    short = world.submit("short", max_tokens=2, ignore_eos=True)
    waiting = world.submit("waiting", max_tokens=2, ignore_eos=True)
    world.tick(2)
    assert short.terminal is not None
    world.tick()
    assert waiting.is_started
    assert long.terminal is None
    world.run()


def test_requests_of_all_kinds_share_a_batch() -> None:
    """Different temperatures, stops, lengths and seeds run in one tick; no request waits for others of its kind."""
    world = World(limits={"num_slots": 6})
    options = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 4},
        {"stop": ["e"]},
        {"logprobs": 2},
        {"max_tokens": 3},
        {"n": 2, "max_tokens": 4},
    ]
    outcomes = [world.submit("same prompt", **{"max_tokens": 20, **option}) for option in options[:5]]
    world.tick()
    assert len(world.scheduler.running) == 5
    world.run()
    for outcome, option in zip(outcomes, options, strict=False):
        assert outcome.text() == world.alone("same prompt", **{"max_tokens": 20, **option}).text()


def test_adapters_take_turns_and_no_request_starves() -> None:
    """Sequences with different adapters run side by side, each with its own, which changes the output."""
    world = World(adapters=("one", "two"))
    sets: list[dict[str, float]] = [{}, {"one": 1.0}, {"two": 1.0}, {"one": 0.5, "two": 0.5}]
    outcomes = [world.submit("hello", lora=lora, max_tokens=20, ignore_eos=True) for lora in sets]
    world.tick(30)
    assert all(outcome.token_ids() for outcome in outcomes), "a request waits for the others to finish"
    world.run()
    world.check_done()
    assert len({outcome.text() for outcome in outcomes}) == 4
    for lora, outcome in zip(sets, outcomes, strict=True):
        assert outcome.text() == world.alone("hello", lora=lora, max_tokens=20, ignore_eos=True).text()


def test_embedding_and_generation_take_turns() -> None:
    """While both have work neither waits for the other to finish, and vectors are the same as alone."""
    world = World()
    outcome = world.submit("hello", max_tokens=200, ignore_eos=True)
    world.tick(3)
    texts = [f"text number {index}" for index in range(40)]
    key = world.submit_embedding(texts)
    world.tick(40)
    assert len(outcome.token_ids()) > 10
    done = world.embedding_requests[key].num_done
    assert done > 5
    world.run()
    world.check_done()
    backend = world.backend
    assert world.embedded[key].vectors == [backend.embed([backend.encode(text)], None)[0] for text in texts]
    assert outcome.text() == world.alone("hello", max_tokens=200, ignore_eos=True).text()


def test_usage_has_the_times() -> None:
    """Counts and times of a request that waited, on the manual clock."""
    world = World(limits={"num_slots": 1})
    first = world.submit("12345", max_tokens=3, ignore_eos=True)
    second = world.submit("123", max_tokens=2, ignore_eos=True)
    world.run()
    for outcome, prompt, generated in ((first, 5, 3), (second, 3, 2)):
        usage = outcome.last().usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (prompt, generated)
    one, other = first.last().usage, second.last().usage
    assert one is not None
    assert other is not None
    assert one.queue_s == 0
    assert one.prefill_s == pytest.approx(0.015)
    assert one.decode_s == pytest.approx(0.022)
    assert other.queue_s == pytest.approx(0.037)
    assert other.ttft_s == pytest.approx(0.037 + 0.013)


def test_metrics_account_for_every_request() -> None:
    """Completed, cancelled, failed, timed out and shut down: the counts add up after every tick."""
    world = World(limits={"num_slots": 2})
    outcomes = [world.submit(f"hello {index}", max_tokens=6, timeout_s=500) for index in range(8)]
    world.tick()
    world.cancel(outcomes[7])
    world.faults.poisonous.add(outcomes[0].request.key)
    world.tick(4)
    snapshot = world.metrics.snapshot()
    assert (snapshot.cancelled, snapshot.failed) == (1, 1)
    assert snapshot.submitted == 8
    assert snapshot.resident == len({sequence.request.key for sequence in world.scheduler.running})
    world.run()
    world.check_done()
    assert world.metrics.snapshot().completed == 6


def test_twenty_thousand_finished_requests_leave_nothing() -> None:
    """Neither memory nor objects grow between the first finished requests and the last of many."""
    world = World(limits={"num_slots": 64, "n_batch": 512}, num_seq_ids=64, num_cells=4096)
    template = world.request([65], max_tokens=1)

    def serve(num_requests: int) -> None:
        for _ in range(num_requests // 64):
            for _ in range(64):
                world._next_key += 1
                world.commands.queue.append(Submit(world.fresh(template, world._next_key)))
            world.engine.tick()
        for _ in range(8):  # the last may have waited a tick for room that kept prefixes had
            world.engine.tick()
        gc.collect()

    serve(5_120)
    before = len(gc.get_objects())
    tracemalloc.start()
    serve(1_280)
    early = tracemalloc.get_traced_memory()[0]
    serve(1_280)
    late = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    serve(12_800)
    assert len(gc.get_objects()) - before < 50
    assert late - early < 20_000
    assert world.metrics.snapshot().completed == 5_120 + 1_280 + 1_280 + 12_800
    world.scheduler.check()
    assert world.backend.memory.num_used == 0
    assert not world.scheduler._requests


def test_the_end_token_is_no_token_of_the_completion() -> None:
    """The end-of-generation token is reported by itself, and its number is that of the vocabulary."""
    world = World()
    outcome = world.submit([1], script=[65])
    world.run()
    assert (outcome.token_ids(), outcome.reason()) == ([65], FinishReason.STOP)
    assert (outcome.last().stop, outcome.last().stop_token_ids) == (EOS, (EOS,))


def test_a_paused_reader_gives_its_slot_to_waiting_requests() -> None:
    """Beside a running stream, a stream that waits for its reader blocks no other; later both go on at the same place."""
    world = World(limits={"num_slots": 2})
    paused = world.submit("the first one", max_tokens=60, ignore_eos=True)
    active = world.submit("the second one", max_tokens=60, ignore_eos=True)
    world.tick(4)
    world.pause(paused)
    third = world.submit("the third one", max_tokens=5, ignore_eos=True)
    world.tick(12)
    assert third.reason() is FinishReason.LENGTH
    assert active.terminal is None
    world.pause(paused, is_paused=False)
    world.run()
    world.check_done()
    assert paused.token_ids() == world.alone("the first one", max_tokens=60, ignore_eos=True).token_ids()


@pytest.mark.parametrize("sooner", [{"priority": 0}, {"prompt_logprobs": 0}])
def test_no_request_waits_for_a_prefix_that_may_come_late(sooner: dict[str, int]) -> None:
    """A prompt that a less important request computes, or computes slowly for its scores, is not waited for."""
    world = World(strategy="prefill_priority", limits={"num_slots": 2, "n_batch": 16, "chunk_size": 16}, num_cells=4000)
    prompt = [65 + number % 7 for number in range(400)]
    slow = world.submit(prompt, max_tokens=1, **sooner)
    world.tick(2)
    urgent = world.submit([*prompt, 66], max_tokens=1, priority=100)
    world.tick(30)
    assert urgent.reason() is not None
    assert slow.reason() is None
    world.run()
    world.check_done()


def test_the_interval_may_change_while_a_request_runs() -> None:
    """From the next chunk on each has as many tokens as the interval; held-back tokens that are enough come at once."""
    world = World(eos_every=10**9)
    outcome = world.submit("hello", max_tokens=40, interval=1000)
    other = world.submit("other", max_tokens=40, interval=1000)
    world.tick(10)
    assert outcome.chunks == other.chunks == []
    world.set_interval(outcome, 3)
    world.pause(outcome)
    world.tick()
    (first,) = outcome.chunks
    assert len(first.token_ids) > 3
    world.pause(outcome, is_paused=False)
    world.run()
    assert {len(chunk.token_ids) for chunk in outcome.chunks[1:-1]} == {3}
    assert [len(chunk.token_ids) for chunk in other.chunks] == [40]
    assert outcome.token_ids() == world.alone("hello", max_tokens=40).token_ids()


def test_a_new_interval_of_a_request_that_has_ended_changes_nothing() -> None:
    """A command that comes too late is no error."""
    world = World()
    outcome = world.submit("hello", max_tokens=3)
    world.run()
    world.set_interval(outcome, 9)
    world.run()
    world.check_done()
