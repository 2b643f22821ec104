"""LoRA adapters: loading, applying with a scale, listing, removing, lifetimes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.native.conftest import TinyModels

from paceline.errors import AdapterError, Closed, InvalidParams, Unsupported
from paceline.runtime import Adapter, Context, Model
from paceline.testing.models import KINDS, LlamaSpec, write_lora

pytestmark = pytest.mark.native


@pytest.fixture
def model(tiny_models: TinyModels) -> Iterator[Model]:
    with Model.load(tiny_models("llama")) as loaded:
        yield loaded


@pytest.fixture
def adapter(model: Model, tmp_path: Path) -> Adapter:
    return model.load_adapter(write_lora(tmp_path / "lora.gguf", KINDS["llama"]))


def logits(context: Context) -> np.ndarray:
    context.clear()
    context.decode([1, 2, 3])
    return context.logits(2)


def test_an_adapter_changes_what_comes_out_and_removing_it_changes_it_back(model: Model, adapter: Adapter) -> None:
    """Scale 1 differs, half the scale lies between, none is the model itself; the list has the applied scales."""
    with Context(model, n_ctx=256, n_threads=1) as context:
        plain = logits(context)
        context.set_adapters({adapter: 1.0})
        full = logits(context)
        context.set_adapters({adapter: 0.5})
        half = logits(context)
        assert dict(context.adapters) == {adapter: 0.5}
        context.set_adapters({})
        assert dict(context.adapters) == {}
        assert np.array_equal(logits(context), plain)
    assert np.abs(full - plain).max() > 0.1
    assert 0.05 < np.abs(half - plain).max() < np.abs(full - plain).max() * 1.5


def test_scale_zero_is_no_adapter(model: Model, adapter: Adapter) -> None:
    """With scale 0 the model computes the same as without."""
    with Context(model, n_ctx=256, n_threads=1) as context:
        plain = logits(context)
        context.set_adapters({adapter: 0.0})
        assert np.allclose(logits(context), plain, atol=1e-5)


def test_two_adapters_apply_together(model: Model, tmp_path: Path, adapter: Adapter) -> None:
    """Both count, in any order."""
    other = model.load_adapter(write_lora(tmp_path / "other.gguf", KINDS["llama"], seed=9))
    with Context(model, n_ctx=256, n_threads=1) as context:
        context.set_adapters({adapter: 1.0})
        one = logits(context)
        context.set_adapters({adapter: 1.0, other: 1.0})
        both = logits(context)
        context.set_adapters({other: 1.0, adapter: 1.0})
        assert np.allclose(logits(context), both, atol=1e-4)
    assert np.abs(both - one).max() > 0.05


def test_a_closed_adapter_goes_on_where_it_applies(model: Model, adapter: Adapter) -> None:
    """The context holds its share until it lets go; a closed adapter cannot be applied anew."""
    with Context(model, n_ctx=256, n_threads=1) as context:
        context.set_adapters({adapter: 1.0})
        before = logits(context)
        adapter.close()
        gc.collect()
        assert np.array_equal(logits(context), before)
        with pytest.raises(Closed, match="lora"):
            context.set_adapters({adapter: 1.0})
        assert np.array_equal(logits(context), before)


def test_an_adapter_outlives_its_model_object(tiny_models: TinyModels, tmp_path: Path) -> None:
    """Model closed first, adapter last: nothing is freed under it."""
    model = Model.load(tiny_models("llama"))
    adapter = model.load_adapter(write_lora(tmp_path / "lora.gguf", KINDS["llama"]))
    model.close()
    del model
    gc.collect()
    assert adapter.metadata["adapter.type"] == "lora"
    adapter.close()


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), True, "1"], ids=str)
def test_a_bad_scale_is_refused(model: Model, adapter: Adapter, scale: float) -> None:
    """The scale is named, and the adapters before stay."""
    with Context(model, n_ctx=256, n_threads=1) as context:
        context.set_adapters({adapter: 0.5})
        with pytest.raises(InvalidParams, match="scale"):
            context.set_adapters({adapter: scale})
        assert dict(context.adapters) == {adapter: 0.5}
        assert np.isfinite(logits(context)).all()


def test_files_that_are_no_adapter_are_refused(model: Model, tmp_path: Path, tiny_models: TinyModels) -> None:
    """Missing, garbage, a model, and an adapter for other sizes each raise AdapterError with the file's name."""
    garbage = tmp_path / "garbage.gguf"
    garbage.write_bytes(b"GGUF" + b"\xff" * 200)
    text = tmp_path / "text.txt"
    text.write_text("k3y-of-the-house")
    with pytest.raises(AdapterError, match=r"text.txt: not a GGUF file: it does not begin with b'GGUF'$"):
        model.load_adapter(text)
    other = write_lora(tmp_path / "other.gguf", LlamaSpec(n_embd=32, n_head=2, n_head_kv=1))
    for path in (tmp_path / "missing.gguf", garbage, tiny_models("llama"), other):
        with pytest.raises(AdapterError, match=path.name):
            model.load_adapter(path)
    with Context(model, n_ctx=256, n_threads=1) as context:
        assert np.isfinite(logits(context)).all()


def test_an_adapter_belongs_to_its_model(model: Model, adapter: Adapter, tiny_models: TinyModels) -> None:
    """Another model of the same file is another model."""
    with Model.load(tiny_models("llama")) as second, Context(second, n_ctx=256, n_threads=1) as context:
        with pytest.raises(AdapterError, match="another model"):
            context.set_adapters({adapter: 1.0})
        assert np.isfinite(logits(context)).all()


def test_a_model_without_weights_takes_no_adapter(tiny_models: TinyModels, tmp_path: Path) -> None:
    """vocab_only is named."""
    path = write_lora(tmp_path / "lora.gguf", KINDS["llama"])
    with Model.load(tiny_models("llama"), vocab_only=True) as model, pytest.raises(Unsupported, match="vocab_only"):
        model.load_adapter(path)
