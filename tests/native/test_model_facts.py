"""The facts that `paceline info` reads from a file, against the same model with its weights loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.cli.model_commands import model_facts
from paceline.runtime import Model
from paceline.testing.models import KINDS

pytestmark = pytest.mark.native

SHAPE = ("n_ctx_train", "n_layer", "n_embd", "n_head", "n_head_kv")


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_facts_without_weights_are_those_with_weights(kind: str, tiny_models: Callable[..., Path]) -> None:
    """Whatever the architecture, each fact present is that of llama.cpp; memory and sizes are always present."""
    path = tiny_models(kind)
    facts, model = model_facts(Model.load(path, vocab_only=True)), Model.load(path)
    assert (facts["memory_class"], facts["n_swa"]) == (model.memory_class.value, model.n_swa)
    assert (facts["size_bytes"], facts["n_params"]) == (model.size_bytes, model.n_params)
    assert facts["quantisation"] is not None and facts["quantisation"] in model.ftype
    given = {name: facts[name] for name in SHAPE if facts[name] is not None}
    assert given == {name: getattr(model, name) for name in given} and len(given) >= 3
