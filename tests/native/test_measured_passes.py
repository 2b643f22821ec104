"""Passes that are timed before the first request: what they hold, and that they leave nothing behind."""

from __future__ import annotations

import pytest

from paceline.demo import demo_model_path
from paceline.engine.arguments import engine_arguments
from paceline.engine.engine_factory import build
from paceline.engine.llama_backend import LlamaBackend


@pytest.mark.parametrize(("num_slots", "most_rows"), [(1, 1), (3, 3), (16, 8)])
def test_passes_are_measured_and_leave_the_context_empty(num_slots: int, most_rows: int) -> None:
    """One row that decodes, then as many as slots up to eight, then pieces of a prompt, none smaller than the one before."""
    built = build(demo_model_path(), engine_arguments({"num_slots": num_slots, "n_ctx": 4096}))
    assert built.context is not None
    backend = LlamaBackend(built.model, built.context, built.adapters, built.embedder_options)
    try:
        measured = backend.measure_passes(num_slots)
        rows = [one.num_tokens for one in measured if one.num_outputs]
        pieces = [one.num_tokens for one in measured if not one.num_outputs]
        assert rows == sorted({1, most_rows})
        assert [one.num_outputs for one in measured] == rows + [0] * len(pieces)
        assert pieces == sorted(pieces)
        assert pieces
        assert all(one.seconds > 0 and one.num_cells == one.num_tokens for one in measured)
        assert all(built.context.positions(seq_id) is None for seq_id in range(built.context.n_seq_max))
    finally:
        backend.close()
        built.model.close()
