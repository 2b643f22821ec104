"""`Context.plain_step`: the same as `Context.step`, for rows that only want their next token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.native.conftest import TinyModels

from paceline.errors import InvalidParams, InvalidType, NoKvSlot, SamplingError
from paceline.params import SamplingParams
from paceline.runtime import Context, Model, Sampler, StepRow

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def model(tiny_models: TinyModels) -> Iterator[Model]:
    with Model.load(tiny_models("llama")) as loaded:
        yield loaded


@pytest.fixture
def context(model: Model) -> Iterator[Context]:
    with Context(model, n_ctx=256, n_batch=128, n_seq_max=4, n_outputs_max=8, n_threads=1) as made:
        yield made


def seeded(model: Model, seed: int, **options: Any) -> Sampler:
    return Sampler(SamplingParams(seed=seed, **options), model)


def test_it_draws_what_a_step_draws(model: Model, context: Context) -> None:
    """Three prompts, one without a sampler, and ten tokens after them: the same ids, the same memory."""
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    plain: list[list[int]] = []
    stepped: list[list[int]] = []
    samplers: list[Sampler | None] = [seeded(model, 1), None, seeded(model, 3)]
    drawn = context.plain_step([0, 1, 2], [0, 0, 0], prompts, samplers)
    for tick in range(10):
        assert drawn[1] is None
        plain.append([token for token in drawn if isinstance(token, int)])
        known = [[token] if isinstance(token, int) else [9] for token in drawn]
        drawn = context.plain_step([0, 1, 2], [len(prompt) + tick for prompt in prompts], known, samplers)
    held = [context.positions(seq_id) for seq_id in range(3)]
    context.clear()
    with_records = ((seeded(model, 1),), (), (seeded(model, 3),))
    tokens = prompts
    for tick in range(10):
        rows = [
            StepRow(
                seq_id=index,
                position=0 if tick == 0 else len(prompts[index]) + tick - 1,
                token_ids=tokens[index],
                samplers=with_records[index],
            )
            for index in range(3)
        ]
        draws = [row.draws[0].token_ids if row.draws else () for row in context.step(rows).rows]
        stepped.append([token_id for ids in draws for token_id in ids])
        tokens = [list(ids) or [9] for ids in draws]
    assert plain == stepped
    assert held == [(0, 12), (0, 11), (0, 13)]


def test_a_sampler_that_cannot_draw_fails_alone(model: Model, context: Context) -> None:
    """Its place has the error, and the rows before and after it have their tokens."""
    stuck = Sampler(SamplingParams(grammar='root ::= "x"', allowed_token_ids=[5]), model)
    samplers: list[Sampler | None] = [seeded(model, 1), None, stuck, seeded(model, 2)]
    first, none, error, last = context.plain_step([0, 1, 2, 3], [0] * 4, [[1, 2]] * 4, samplers)
    assert isinstance(first, int) and isinstance(last, int)
    assert none is None
    assert isinstance(error, SamplingError)
    assert (stuck.num_generated, context.positions(2)) == (0, (0, 1))


@pytest.mark.parametrize("value", [True, 1.5, "1", 2**31])
@pytest.mark.parametrize("field", ["seq_id", "position", "token_ids"])
def test_numbers_that_are_none_are_refused_by_name(context: Context, field: str, value: Any) -> None:
    """Whatever is no integer of 32 bits; the context works on."""
    lists: dict[str, Any] = {"seq_id": [0], "position": [0], "token_ids": [[1]]}
    lists[field] = [[value]] if field == "token_ids" else [value]
    with pytest.raises(InvalidType, match=field):
        context.plain_step(lists["seq_id"], lists["position"], lists["token_ids"], [None])
    assert context.plain_step([0], [0], [[1]], [None]) == [None]


def test_rows_that_contradict_each_other_are_refused(context: Context) -> None:
    """Lists of different lengths, a row without tokens, and a token that is none: nothing is computed."""
    for seq_ids, token_ids in (([0, 1], [[1]]), ([0], [[]]), ([0], [[10**6]])):
        with pytest.raises(InvalidParams):
            context.plain_step(seq_ids, [0] * len(seq_ids), token_ids, [None] * len(seq_ids))
    assert context.positions(0) is None


def test_a_pass_without_room_changes_nothing(model: Model, context: Context) -> None:
    """NoKvSlot comes as it does from a step."""
    for start in (0, 128):
        context.plain_step([0], [start], [[1] * 128], [None])
    with pytest.raises(NoKvSlot):
        context.plain_step([1], [0], [[1]], [seeded(model, 1)])
    assert context.positions(1) is None
