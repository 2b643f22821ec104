"""The fake backend: its draws depend on the contents of its memory, and on nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import DecodeError, InvalidParams, NoKvSlot, Unsupported
from paceline.params import SamplingParams
from paceline.sequence import Row
from paceline.testing.fake_backend import BOS, EOS, FakeBackend, FakeCost, ManualClock


class Placed:
    """As much of a sequence as a row needs."""

    def __init__(self, backend: FakeBackend, seq_id: int, **params: Any) -> None:
        self.seq_id = seq_id
        (self.sampler,) = backend.make_samplers(SamplingParams(**{"temperature": 0, **params}), [])


def row(sequence: Any, position: int, token_ids: list[int], *, draws: bool = True, **rest: Any) -> Row:
    return Row(sequence, position, token_ids, draws, rest.get("targets", []), rest.get("num_logprobs"))


def draws(
    backend: FakeBackend, prompt: list[int], count: int, *, chunk: int = 100, lora: Any = (), **params: Any
) -> list[int]:
    """Generate alone on sequence id 0, prefilling in chunks, and leave the memory empty."""
    sequence = Placed(backend, 0, **params)
    position, tokens = 0, list[int]()
    todo = list(prompt)
    while len(tokens) < count:
        part, todo = todo[:chunk], todo[chunk:]
        (output,) = backend.step([row(sequence, position, part, draws=not todo)], lora)
        position += len(part)
        tokens += output.token_ids
        todo = todo or list(output.token_ids)
    backend.remove(0)
    return tokens


def test_draws_depend_on_the_whole_history_and_not_on_chunks() -> None:
    """However the prompt is cut the tokens are the same; another first token changes all of them."""
    backend = FakeBackend()
    whole = draws(backend, [1, 2, 3, 4, 5], 20)
    assert all(draws(backend, [1, 2, 3, 4, 5], 20, chunk=chunk) == whole for chunk in (1, 2, 4))
    assert draws(backend, [9, 2, 3, 4, 5], 20) != whole
    assert len(set(whole)) > 5


def test_rows_do_not_disturb_each_other() -> None:
    """Two sequences in one pass draw the same as alone."""
    backend = FakeBackend()
    one, other = Placed(backend, 0), Placed(backend, 1)
    together = backend.step([row(one, 0, [1, 2]), row(other, 0, [3])], ())
    assert [list(output.token_ids) for output in together] == [draws(FakeBackend(), p, 1) for p in ([1, 2], [3])]


def test_a_copied_prefix_reads_like_a_computed_one() -> None:
    """After a copy the other sequence goes on as if it had computed the tokens itself."""
    backend = FakeBackend()
    one, other = Placed(backend, 0), Placed(backend, 1)
    backend.step([row(one, 0, [1, 2, 3], draws=False)], ())
    backend.copy(0, 1, 2)
    (output,) = backend.step([row(other, 2, [7])], ())
    assert list(output.token_ids) == draws(FakeBackend(), [1, 2, 7], 1)


def test_parameters_are_obeyed() -> None:
    """Seed, choice, ignore_eos, min_tokens and allowed tokens decide as they should."""
    backend = FakeBackend(eos_every=2)
    assert EOS not in draws(backend, [1], 50, ignore_eos=True)
    assert EOS not in draws(backend, [1], 10, min_tokens=10)
    assert set(draws(backend, [1], 30, allowed_token_ids=[65, 66])) == {65, 66}
    seeds = [draws(backend, [1], 10, temperature=1, seed=seed) for seed in (1, 1, 2)]
    assert seeds[0] == seeds[1] != seeds[2]
    one, other = backend.make_samplers(SamplingParams(n=2, seed=1), [])
    assert [one.draw(5) for _ in range(3)] != [other.draw(6) for _ in range(3)] or one.draw(9) != other.draw(9)


def test_adapters_change_what_is_drawn() -> None:
    """Names and scales both matter; unknown names are refused."""
    backend = FakeBackend(adapters=("one", "two"))
    texts = [draws(backend, [1], 12, lora=lora) for lora in ((), (("one", 1.0),), (("two", 1.0),), (("one", 0.5),))]
    assert len(set(map(tuple, texts))) == 4
    with pytest.raises(InvalidParams, match="no adapter 'three'"):
        draws(backend, [1], 1, lora=(("three", 1.0),))


def test_scores_do_not_depend_on_chunks() -> None:
    """A prompt token's logprob follows from the tokens before it."""

    def scored(chunk: int) -> list[Any]:
        backend, found, prompt = FakeBackend(), list[Any](), [1, 2, 3, 4, 5, 6]
        sequence = Placed(backend, 0)
        for start in range(0, 5, chunk):
            part = prompt[start : min(start + chunk, 5)]
            targets = prompt[start + 1 : start + 1 + len(part)]
            (output,) = backend.step([row(sequence, start, part, draws=False, targets=targets, num_logprobs=2)], ())
            found += output.scored
        return found

    assert scored(1) == scored(2) == scored(5)
    assert len(scored(5)) == 5


def test_a_failing_pass_keeps_nothing() -> None:
    """The exception from `fail` is raised and no row was computed; the exception from `fail_row` is that row's alone."""
    errors: list[Exception | None] = [DecodeError("no"), None]
    backend = FakeBackend(fail=lambda number, rows: errors[number - 1], fail_row=lambda row: DecodeError("row"))
    one = Placed(backend, 0)
    with pytest.raises(DecodeError, match="no"):
        backend.step([row(one, 0, [1])], ())
    assert backend.positions(0) == 0
    (output,) = backend.step([row(one, 0, [1])], ())
    assert (str(output.error), output.computed, backend.positions(0)) == ("row", True, 1)


def test_a_pass_without_room_keeps_nothing() -> None:
    """If the rows together do not fit, none of them is computed."""
    backend = FakeBackend(num_cells=5)
    with pytest.raises(NoKvSlot):
        backend.step([row(Placed(backend, 0), 0, [1, 2, 3]), row(Placed(backend, 1), 0, [1, 2, 3])], ())
    assert backend.memory.num_used == 0


def test_a_row_at_a_wrong_place_is_refused() -> None:
    """Positions are contiguous, or nothing is computed."""
    backend = FakeBackend()
    with pytest.raises(InvalidParams, match="does not continue at 3"):
        backend.step([row(Placed(backend, 0), 3, [1])], ())


def test_passes_take_their_time_on_the_clock() -> None:
    """base_s and token_s of each pass, failed passes and embeddings as well."""
    clock = ManualClock()
    backend = FakeBackend(clock=clock, cost=FakeCost(1.0, 0.5))
    backend.step([row(Placed(backend, 0), 0, [1, 2])], ())
    assert clock.now() == 2.0
    backend.embed([[1], [2, 3]], None)
    assert clock.now() == 4.5
    assert backend.num_passes == 2


def test_what_it_cannot_do_raises_unsupported() -> None:
    """GBNF is refused; text is bytes; embeddings depend on text and pooling."""
    backend = FakeBackend()
    with pytest.raises(Unsupported, match="no GBNF grammars"):
        backend.make_samplers(SamplingParams(grammar='root ::= "a"'), [])
    assert backend.encode("\u00e9") == [0xC3, 0xA9]
    assert backend.vocabulary.pieces[BOS] == b""
    one, other = backend.embed([[1, 2], [2, 1]], None)
    assert one != other
    assert backend.embed([[1, 2]], "cls") != [one]
    assert backend.prepare_embedding(None, 3) == "mean"
    backend.abort()
    backend.close()
    assert backend.is_closed
