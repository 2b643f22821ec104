"""A draft model's sequences: they catch up, follow by key, share prefixes, and go without drafts if there is no room."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.draft_world import FakeDraftBackend, check_drafter, model_drafter
from tests.engine_world import World
from tests.unit.speculation.test_speculation import futures, speculative, told, usage

from paceline.speculation.drafters.model_drafter import ModelDrafter
from paceline.testing.fake_backend import EOS

LONG: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}


def going_on(prompt: list[int], num_tokens: int) -> list[int]:
    """Return the fake backend's tokens after a prompt."""
    return futures(prompt, max_tokens=num_tokens, ignore_eos=True)[0][len(prompt) :]


def tokens(seed: int, num_tokens: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(97, 123) for _ in range(num_tokens)]


def test_drafts_are_what_the_draft_model_generates() -> None:
    """A pass for missing tokens gives the first draft, then a pass for each further draft; rejected drafts are forgotten."""
    backend = FakeDraftBackend()
    drafter, prompt = model_drafter(backend), tokens(1, 10)
    future = going_on(prompt, 30)
    drafter.begin(1, prompt)
    assert drafter.propose(1, 4) == future[:4]
    assert [len(rows[0].token_ids) for rows in backend.passes] == [10, 1, 1, 1]
    drafter.rollback(1, 2)
    check_drafter(drafter, backend)
    drafter.observe(1, [*future[:2], 65])
    assert drafter.propose(1, 3) == going_on([*prompt, *future[:2], 65], 3)
    check_drafter(drafter, backend)
    assert [len(rows[0].token_ids) for rows in backend.passes[4:]] == [1, 1, 1]
    drafter.observe(1, [*going_on([*prompt, *future[:2], 65], 4)])  # all right: the last was not computed
    drafter.propose(1, 1)
    assert len(backend.passes[-1][0].token_ids) == 2
    check_drafter(drafter, backend)


def test_what_is_only_to_be_caught_up_with_gets_no_drafts() -> None:
    """Asked for with 0 tokens: missing tokens are computed, in parts, and then drafts come at once."""
    backend = FakeDraftBackend()
    drafter, prompt = model_drafter(backend, chunk_size=30), tokens(1, 50)
    future = going_on(prompt, 3)
    drafter.begin(1, prompt)
    assert drafter.limit_catch_up(1000) == 30
    assert drafter.limit_catch_up(20) == 20
    while drafter.lag(1):
        num_before = backend.num_computed
        assert drafter.propose_all([(1, 0)]) == [[]]
        assert backend.num_computed - num_before <= 22
        check_drafter(drafter, backend)
    num_before = backend.num_computed
    assert drafter.propose_all([(1, 3)]) == [future]
    assert backend.num_computed - num_before <= 2 + 2
    check_drafter(drafter, backend)


def test_a_proposal_that_no_pass_verified_is_made_again() -> None:
    """After a failed pass nothing was observed, and the same comes of it."""
    backend = FakeDraftBackend()
    drafter, prompt = model_drafter(backend), tokens(1, 10)
    drafter.begin(1, prompt)
    first = drafter.propose(1, 3)
    drafter.rollback(1, 3)
    check_drafter(drafter, backend)
    assert drafter.propose(1, 3) == first
    assert len(backend.passes[3][0].token_ids) == 1


def test_all_sequences_share_each_step() -> None:
    """The pass of a step has a row for each that still drafts."""
    backend = FakeDraftBackend()
    drafter = model_drafter(backend)
    prompts = [tokens(seed, 5 + seed) for seed in range(3)]
    for key, prompt in enumerate(prompts):
        drafter.begin(key, prompt)
    found = drafter.propose_all([(0, 3), (1, 1), (2, 2)])
    assert found == [going_on(prompt, depth) for prompt, depth in zip(prompts, (3, 1, 2), strict=True)]
    assert [len(rows) for rows in backend.passes] == [3, 2, 1]


def test_a_long_prompt_is_caught_up_with_in_parts_while_others_draft() -> None:
    """No tick computes more than the chunk beside the usual token or two, and nothing is proposed before it is done."""
    backend = FakeDraftBackend(num_cells=2000)
    drafter = model_drafter(backend, n_batch=256, chunk_size=100)
    short, long = tokens(1, 4), tokens(2, 330)
    drafter.begin(1, short)
    drafter.begin(2, long)
    assert drafter.lag(2) == 328
    caught_up, future = [], going_on(short, 40)
    for tick in range(4):
        found = drafter.propose_all([(1, 2), (2, 2)])
        assert found[0] == future[3 * tick : 3 * tick + 2]
        assert bool(found[1]) == (tick == 3)
        caught_up.append(drafter.num_caught_up)
        drafter.observe(1, future[3 * tick : 3 * tick + 3])
        check_drafter(drafter, backend)
    assert caught_up[0] == 100
    assert sum(caught_up) == 328 - 3 * 2 + 2  # each tick takes the usual two beside
    assert max(sum(len(row.token_ids) for row in rows) for rows in backend.passes) <= 104
    drafter.limit_catch_up(7)
    drafter.observe(2, tokens(3, 50))
    drafter.propose_all([(2, 2)])
    assert drafter.num_caught_up == 7


def test_a_sequence_that_was_not_asked_for_leaves_no_gap() -> None:
    """Tokens that came meanwhile are computed before it drafts again."""
    backend = FakeDraftBackend()
    drafter, prompt = model_drafter(backend), tokens(1, 10)
    future = going_on(prompt, 90)
    drafter.begin(1, prompt)
    drafter.propose(1, 2)
    drafter.rollback(1, 2)
    for start in range(0, 60, 3):
        drafter.observe(1, future[start : start + 3])
    assert drafter.lag(1) == 60 - 2
    assert drafter.propose(1, 4) == future[60:64]
    check_drafter(drafter, backend)


def test_a_sequence_starts_from_what_earlier_ones_left() -> None:
    """Also the same sequence, after it was preempted; not from another namespace, nor from a request without caching."""
    backend = FakeDraftBackend()
    drafter, prompt = model_drafter(backend), tokens(1, 50)
    future = going_on(prompt, 20)
    drafter.begin_shared(1, prompt, "a")
    drafter.propose(1, 2)
    drafter.rollback(1, 2)
    drafter.end(1)
    for key, namespace, lag in ((2, "a", 0), (3, None, 50), (4, None, 50), (5, "b", 50)):
        drafter.begin_shared(key, [*prompt, *future[:2]], namespace)
        assert drafter.lag(key) == lag
        num_before = backend.num_computed
        assert drafter.propose(key, 1) == future[2:3]
        assert backend.num_computed - num_before == lag + 2
        drafter.rollback(key, 1)
        drafter.end(key)
        check_drafter(drafter, backend)


def test_choices_of_one_prompt_compute_it_once() -> None:
    """Later sequences wait for the first, as long as that is asked for."""
    backend = FakeDraftBackend(num_cells=2000)
    drafter, prompt = model_drafter(backend, n_batch=256, chunk_size=60), tokens(1, 100)
    for key in (1, 2, 3):
        drafter.begin(key, [*prompt, 65 + key])
    for _ in range(5):
        found = drafter.propose_all([(1, 2), (2, 2), (3, 2)])
        for key, drafts in enumerate(found, 1):
            if drafts:
                drafter.rollback(key, len(drafts))
        check_drafter(drafter, backend)
    assert all(found)
    assert backend.num_computed < 100 + 5 * 3 * 4
    drafter.begin(4, tokens(2, 100))
    drafter.begin(5, tokens(2, 100))
    drafter.propose_all([(4, 1)])
    assert [bool(drafter.propose_all([(5, 1)])[0]) for _ in range(3)][-1]  # 4 stopped half-way


def test_without_room_there_are_no_drafts_and_no_error() -> None:
    """Idle prefixes are evicted first, then sequences that were not asked for; returning sequences compute anew."""
    backend = FakeDraftBackend(num_cells=120, num_seq_ids=3)
    drafter = model_drafter(backend)
    for key in range(1, 8):
        drafter.begin(key, tokens(key, 30))
        assert drafter.propose(key, 2)
        drafter.rollback(key, 2)
        check_drafter(drafter, backend)
    found = drafter.propose_all([(key, 2) for key in range(1, 8)])
    assert 0 < sum(map(bool, found)) <= 3
    check_drafter(drafter, backend)
    drafter.begin(9, tokens(9, 119))
    assert drafter.propose_all([(9, 8)]) == [[]]
    assert len([drafter.propose(9, 8) for _ in range(3)][-1]) == 1  # one cell behind it
    drafter.begin(10, tokens(10, 130))
    assert drafter.lag(10) == float("inf")
    assert drafter.propose(10, 2) == []
    check_drafter(drafter, backend)


def long_future(prompt: list[int], num_tokens: int) -> list[int]:
    """As `going_on`, for more than its world has cells for."""
    drafter = model_drafter(FakeDraftBackend(num_cells=2000), n_batch=2000, chunk_size=2000, eog_ids=frozenset())
    drafter.begin(1, prompt)
    return drafter.propose(1, num_tokens)


def follow(drafter: ModelDrafter, futures: dict[int, list[int]], found: list[list[int]]) -> None:
    """Verify proposals of all keys against their futures, and take the tokens from the futures."""
    for (key, future), drafts in zip(futures.items(), found, strict=True):
        num_right = next((at for at, draft in enumerate(drafts) if draft != future[at]), len(drafts))
        if num_right < len(drafts):
            drafter.rollback(key, len(drafts) - num_right)
        drafter.observe(key, future[: num_right + 1])
        del future[: num_right + 1]


@pytest.mark.parametrize("sizes", [(200, 200, 400), (290, 290), (30, 200, 330)])
def test_sequences_that_fill_the_cells_together_do_not_wait_for_each_other(sizes: tuple[int, ...]) -> None:
    """The shortest backlog goes on, with the cells of a longer backlog; when it ends, another has them."""
    backend = FakeDraftBackend(num_cells=600)
    drafter = model_drafter(backend, n_batch=256)
    futures = {}
    for key, size in enumerate(sizes):
        drafter.begin(key, tokens(key, size))
        futures[key] = long_future(tokens(key, size), 300)
    for tick in range(45):
        found = drafter.propose_all([(key, 4) for key in futures])
        assert any(found) or tick < 8
        follow(drafter, futures, found)
        check_drafter(drafter, backend)
    assert not all(found)
    num_computed = backend.num_computed
    drafter.end(next(key for key, drafts in zip(list(futures), found, strict=True) if drafts and futures.pop(key)))
    late = [drafter.propose_all([(key, 1) for key in futures]) for _ in range(8)][-1]
    assert any(late)
    assert backend.num_computed > num_computed
    check_drafter(drafter, backend)


def test_a_sequence_that_has_no_room_costs_the_others_nothing_for_a_while() -> None:
    """It is tried again every 16 ticks, and as soon as another ends: each try takes the cells of idle sequences."""
    backend = FakeDraftBackend(num_cells=300)
    drafter = model_drafter(backend)
    futures = {1: long_future(tokens(1, 100), 100), 2: long_future(tokens(2, 50), 100)}
    drafter.begin(1, tokens(1, 100))
    drafter.begin(2, tokens(2, 50))
    drafter.begin(3, tokens(3, 250))
    for _ in range(4):
        follow(drafter, futures, drafter.propose_all([(1, 2), (2, 2)]))
    num_before = backend.num_computed
    for tick in range(10):
        wanted = [(1, 2), (3, 2)] if tick % 2 else [(1, 2), (2, 2)]
        found = drafter.propose_all(wanted)
        for (key, _), drafts in zip(wanted, found, strict=True):
            assert bool(drafts) is (key != 3)
            drafter.rollback(key, len(drafts))
        check_drafter(drafter, backend)
    assert backend.num_computed - num_before < 50 + 64 + 10 * 4  # 2 lost its cells once
    drafter.end(1)
    assert any(drafter.propose(3, 1) for _ in range(8))


def test_cells_that_another_sequence_shares_are_not_cut() -> None:
    """A failed pass leaves a sequence with nothing to compute, and another has copied its last cell meanwhile."""
    backend = FakeDraftBackend()
    drafter, prompt = model_drafter(backend), tokens(1, 20)
    drafter.begin(1, prompt)
    first = drafter.propose(1, 3)
    drafter.rollback(1, 3)
    drafter.begin(2, prompt + tokens(2, 10))
    assert drafter.propose(2, 3)
    num_before = backend.num_computed
    again, other = drafter.propose_all([(1, 3), (2, 1)])
    assert again == first
    assert len(other) <= 4
    assert backend.num_computed - num_before <= 1 + 2 + 1  # from the cells of the other, and nothing anew
    check_drafter(drafter, backend)


def test_a_prefix_stays_until_a_sequence_has_started_from_it() -> None:
    """If running sequences have nearly all ids, none is taken from the one prefix that the next sequence begins with."""
    backend, prompt = FakeDraftBackend(num_seq_ids=4), tokens(1, 40)
    drafter = model_drafter(backend)
    drafter.begin(1, prompt)
    drafter.propose(1, 2)
    drafter.end(1)
    for key in (2, 3, 4):
        drafter.begin(key, tokens(key, 10))
    drafter.begin(5, [*prompt, 99])
    found = drafter.propose_all([(2, 1), (3, 1), (4, 1)])
    assert sum(map(bool, found)) == 3
    for key in (2, 3, 4):
        drafter.rollback(key, 1)
    found = drafter.propose_all([(2, 1), (3, 1), (4, 1), (5, 1)])
    assert [bool(item) for item in found] == [True, True, True, False]
    drafter.end(2)
    assert drafter.propose_all([(3, 1), (4, 1), (5, 1)])[2]
    check_drafter(drafter, backend)


def test_unsure_and_foreign_tokens_are_not_proposed() -> None:
    """A draft ends before a token below p_min, or beyond the target's vocabulary, and behind an end of generation."""
    prompt = tokens(4, 10)
    right = going_on(prompt, 12)
    lengths = {}
    for name, options in {"all": {}, "p_min": {"p_min": 0.5}, "vocabulary": {"target_n_vocab": EOS}}.items():
        drafter = model_drafter(FakeDraftBackend(wrong_every=6), **options)
        drafter.begin(1, prompt)
        lengths[name] = drafter.propose(1, 12)
    assert lengths["all"][-1] == EOS
    assert 1 < len(lengths["all"]) < 12
    assert lengths["p_min"] == lengths["vocabulary"] == lengths["all"][:-1] == right[: len(lengths["all"]) - 1]


def test_tokens_that_the_draft_model_does_not_have_end_its_drafts() -> None:
    """A sequence with images has none; others have."""
    backend = FakeDraftBackend()
    drafter = model_drafter(backend, n_vocab=200)
    drafter.begin(1, tokens(1, 10))
    drafter.begin(2, [*tokens(1, 10), 201])
    drafter.begin(3, [-5, *tokens(1, 10)])
    assert [bool(item) for item in drafter.propose_all([(1, 2), (2, 2), (3, 2)])] == [True, False, False]
    drafter.observe(1, [230])
    assert drafter.lag(1) == float("inf")
    assert drafter.propose_all([(1, 2)]) == [[]]
    check_drafter(drafter, backend)


def test_a_failed_pass_is_raised_and_everything_is_computed_anew() -> None:
    """No cell is taken for forbidden drafts."""
    backend = FakeDraftBackend()
    drafter, prompt = model_drafter(backend), tokens(1, 10)
    drafter.begin(1, prompt)
    first = drafter.propose(1, 2)
    drafter.rollback(1, 2)
    backend.failures.append(ValueError("no device"))
    with pytest.raises(ValueError, match="no device"):
        drafter.propose(1, 2)
    assert drafter.propose(1, 2) == first
    assert len(backend.passes[-2][0].token_ids) == 10
    check_drafter(drafter, backend)


class Checked(ModelDrafter):
    """Checks its memory after each proposal."""

    backend: FakeDraftBackend

    def propose_all(self, wanted: Any) -> Any:
        found = super().propose_all(wanted)
        check_drafter(self, self.backend)
        return found


@pytest.mark.parametrize("seed", range(6))
def test_the_output_is_that_without_drafts_whatever_happens(seed: int) -> None:
    """Preemption, cancellation, failures of both models, prompts that begin alike, too few cells and ids."""
    source = random.Random(seed)
    backend = FakeDraftBackend(
        num_cells=source.choice([100, 300]), num_seq_ids=source.choice([4, 6]), wrong_every=source.choice([0, 5])
    )
    made = model_drafter(backend, n_batch=32, chunk_size=source.choice([8, 20]))
    made.__class__, made.backend = Checked, backend  # type: ignore[attr-defined, assignment]
    world = speculative(made, depth=source.choice([2, 5]), num_cells=110, limits={"num_slots": 3, "host_bytes": 2000})
    asked = []
    for _ in range(25):
        prompt = [*tokens(source.randrange(3), source.randrange(3, 30)), source.randrange(65, 70)]
        options = {"max_tokens": source.randrange(1, 30), "n": source.choice([1, 1, 2]), "ignore_eos": True}
        asked.append((prompt, options, world.submit(prompt, **options)))
        world.tick(source.randrange(1, 8))
        if source.random() < 0.1:
            world.cancel(asked[-1][2])
        if source.random() < 0.1:
            backend.failures.append(ValueError("no device"))
    world.run()
    world.check_done()
    num_accepted = 0
    for prompt, options, outcome in asked:
        if outcome.request.cancelled:
            continue
        alone = World(num_cells=400).alone(prompt, **options)
        for choice in range(options["n"]):
            assert told(outcome, choice) == told(alone, choice)
        num_accepted += usage(outcome).accepted_tokens
    assert num_accepted > 100
    assert not made._sequences
