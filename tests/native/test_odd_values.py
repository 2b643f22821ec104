"""Every public call of the low-level API with every kind of value that no caller should pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.native.conftest import TinyModels

from paceline.errors import PacelineError
from paceline.params import FIELDS, SamplingParams
from paceline.runtime import Context, Embedder, MaskSlots, Model, Sampler, StepRow, Tokenizer
from paceline.runtime.context_options import ContextOptions

pytestmark = pytest.mark.native

ODD: list[Any] = [
    *(None, True, False, -1, 0, 2, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, -(2**63) - 1, 10**30),
    *(0.5, -0.0, 1e308, float("nan"), float("inf"), -float("inf"), 1j, np.float32("nan"), np.int64(5), np.bool_(True)),
    *("", "x", "\udc80", "a\0b", "x" * 70_000, b"", b"\xff" * 100, bytearray(b"abc"), memoryview(b"abcd")),
    *(
        [],
        [0],
        [-1],
        [2**31],
        [2**70],
        ["a"],
        [None],
        [True],
        [1.5],
        [[1]],
        (1, 2),
        (1, 2, 3),
        [0] * 5000,
        range(100_000),
    ),
    *({}, {"a": 1}, {1: 2}, {1}, object(), int, id, ..., slice(1)),
    *(np.zeros(0, np.int32), np.zeros(3, np.int64), np.full(3, 2**40), np.zeros((2, 2), np.int32)),
    *(np.zeros(3, np.float32), np.array(5), np.zeros(10, np.uint8)[::2], np.zeros(10, np.int32)[::-1]),
]


def outcome(call: Callable[[], Any]) -> str | None:
    """Return the raised exception that is no error of ours; iterators are advanced a little."""
    try:
        result = call()
        if isinstance(result, Iterator):
            list(islice(result, 3))
    except PacelineError:
        return None
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def odd_calls(function: Callable[..., Any], good: dict[str, Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """One call a parameter and odd value, the other parameters valid or left out."""
    parameters = inspect.signature(function).parameters.values()
    needed = {
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    }
    for parameter in parameters:
        for value in ODD:
            given = {name: good[name] for name in needed} | {parameter.name: value}
            yield f"{parameter.name}={value!r:.60}", lambda given=given: function(**given)


def wrong_outcomes(name: str, calls: Iterator[tuple[str, Callable[[], Any]]]) -> list[str]:
    return [f"{name}({arguments}): {wrong}" for arguments, call in calls if (wrong := outcome(call)) is not None]


def public(kind: type) -> list[str]:
    left_out = {"close", "native", "load"}
    return [name for name in dir(kind) if name[0] != "_" and name not in left_out and callable(getattr(kind, name))]


def goes_on(model: Model, context: Context) -> None:
    context.clear()
    context.decode([1, 2, 3])
    assert Sampler(SamplingParams(temperature=0), model).sample(context.logits(2)) >= 0


@pytest.fixture
def model(tiny_models: TinyModels) -> Iterator[Model]:
    with Model.load(tiny_models("llama")) as loaded:
        yield loaded


@pytest.fixture
def context(model: Model) -> Iterator[Context]:
    with Context(model, n_ctx=128, n_batch=32, n_seq_max=3, n_outputs_max=8) as made:
        made.decode([1, 2, 3])
        yield made


COLUMNS: dict[str, Any] = {
    "seq_ids": [0], "positions": [0], "token_ids": [[5]], "num_drafts": [0], "targets": [[]], "num_logprobs": [None],
    "mask_slots": [()],
}  # fmt: skip


def test_methods_of_a_context_refuse_or_take_anything(
    model: Model, context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of ours or a result, and the context goes on after each method."""
    monkeypatch.chdir(tmp_path)  # a text is a good name of a file
    sampler = Sampler(SamplingParams(), model)
    row = StepRow(seq_id=0, position=3, token_ids=[5])
    good = {"token_ids": [4], "seq_id": 0, "index": 2, "from_seq_id": 0, "to_seq_id": 1, "n_threads": 1, "rows": [row]}
    good |= {"sampler": sampler, "path": tmp_path / "state", "scratch_seq_id": 2, "start": 0, "end": 1, "adapters": {}}
    good |= {"seq_ids": [0], "positions": [3], "samplers": [None], "num_tokens": 1}
    good |= {"wishes": [(0, 3, 5, 2)], "position": 3, "embeddings": np.zeros((1, 64), np.float32)}
    good |= {"data": context.save_sequence(0), "state": context.save_cells(0, 0, 1, scratch_seq_id=2)}
    for name in public(Context):
        assert wrong_outcomes(name, odd_calls(getattr(context, name), good)) == []
        goes_on(model, context)


def test_rows_of_a_step_refuse_or_take_anything(model: Model, context: Context) -> None:
    """Each field of a row, and masks."""
    sampler = Sampler(SamplingParams(), model)

    def step(**fields: Any) -> Any:
        context.clear()
        return context.step(
            [StepRow(**{"seq_id": 0, "position": 0, "token_ids": [5], "samplers": (sampler,), **fields})]
        )

    calls = (
        (f"{name}={value!r:.60}", lambda name=name, value=value: step(**{name: value}))
        for name in StepRow.__struct_fields__
        for value in ODD
    )
    assert wrong_outcomes("StepRow", calls) == []
    good = COLUMNS | {"samplers": [[sampler]]}

    def step_columns(**columns: Any) -> Any:
        context.clear()
        return context.step_columns(**good | columns)

    columns = ((f"{name}={value!r:.60}", partial(step_columns, **{name: value})) for name in good for value in ODD)
    assert wrong_outcomes("columns", columns) == []
    assert wrong_outcomes("MaskSlots", odd_calls(MaskSlots, {"num_slots": 1, "n_vocab": model.n_vocab})) == []
    goes_on(model, context)


def test_methods_of_a_sampler_refuse_or_take_anything(model: Model, context: Context) -> None:
    """An error of ours or a result."""
    sampler = Sampler(SamplingParams(), model)
    good = {"logits": context.logits(2), "token_id": 3, "token_ids": [3], "chosen": 1, "k": 3, "state": sampler.state()}
    good["asleep"] = True
    for name in public(Sampler):
        assert wrong_outcomes(name, odd_calls(getattr(sampler, name), good)) == []
    goes_on(model, context)


def test_methods_of_a_tokenizer_refuse_or_take_anything(llama_cpp_source: Path) -> None:
    """An error of ours or a result."""
    with Model.load(llama_cpp_source / "models" / "ggml-vocab-gpt-2.gguf", vocab_only=True) as model:
        tokenizer = model.tokenizer
        good = {"text": "hello", "ids": [1, 2, 3], "token": 5, "special": True, "inputs": [(0, 2)]}
        for name in public(Tokenizer):
            assert wrong_outcomes(name, odd_calls(getattr(tokenizer, name), good)) == []
        assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


def test_options_refuse_or_take_anything(model: Model, context: Context) -> None:
    """Each option of contexts, embedders, models and samplers alone."""

    def made_and_closed(make: Callable[..., Any], *fixed: Any, **options: Any) -> None:
        make(*fixed, **options).close()

    def calls(make: Callable[..., Any], names: Any, *fixed: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
        for name in names:
            for value in ODD:
                yield (
                    f"{name}={value!r:.60}",
                    lambda name=name, value=value: made_and_closed(make, *fixed, **{name: value}),
                )

    loading = [name for name in inspect.signature(Model.load).parameters if name != "path"]
    assert wrong_outcomes("Model.load", calls(Model.load, loading, model.paths[0])) == []
    assert wrong_outcomes("Model.load", calls(Model.load, ["path"])) == []
    assert wrong_outcomes("Context", calls(Context, ContextOptions.names(), model)) == []
    assert wrong_outcomes("Embedder", calls(Embedder, ["pooling", "max_tokens", "max_texts", "n_ctx"], model)) == []
    with Embedder(model, max_tokens=64, max_texts=2) as embedder:
        assert wrong_outcomes("embed", odd_calls(embedder.embed, {"texts": ["a"]})) == []

    def sampler(**options: Any) -> Sampler:
        return Sampler(SamplingParams(**options), model)

    assert wrong_outcomes("SamplingParams", calls(sampler, sorted(FIELDS))) == []
    goes_on(model, context)
