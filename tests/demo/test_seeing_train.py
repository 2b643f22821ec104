"""Training of the demo vision model: the predictions for patches, and a run that was stopped and resumed."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from demo_vision.encoder import EncoderConfig  # noqa: E402 - needs PyTorch
from demo_vision.pretrain import SightTrainer  # noqa: E402
from demo_vision.scenes import Figure, Scene  # noqa: E402
from demo_vision.sight import covering, sights  # noqa: E402


def run(out: Path, **changes: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    plan = {"steps": 6, "decay": 2, "rows": 2, "rate": 0.01, "workers": 1, "resume": False} | changes
    SightTrainer(argparse.Namespace(out=out, **plan), 0).run(save_every=2)
    weights: dict[str, Any] = torch.load(out, weights_only=True)["weights"]
    return weights


def test_a_resumed_training_equals_one_that_was_not_stopped(tmp_path: Path) -> None:
    """Also if its end was chosen when it was resumed, before the rate fell."""
    whole = run(tmp_path / "whole.pt")
    run(tmp_path / "parts.pt", steps=4, decay=0.5)
    resumed = run(tmp_path / "parts.pt", resume=True)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_another_plan_is_not_resumed(tmp_path: Path) -> None:
    """It says with which the checkpoint was made."""
    run(tmp_path / "a.pt")
    with pytest.raises(SystemExit, match="was trained with"):
        run(tmp_path / "a.pt", rows=3, resume=True)


def test_a_patch_is_covered_by_the_figure_whose_square_has_its_middle() -> None:
    """And their own places; other patches are covered by none."""
    scene = Scene((Figure("circle", "red", 0.25, 0.5, 0.1),), seed=1)
    names, middles = covering(scene, 8)
    rows = names.reshape(8, 8)
    assert {(row, column) for row, column in zip(*rows.nonzero(), strict=True)} == {
        (r, c) for r in (3, 4) for c in (1, 2)
    }
    assert middles.reshape(8, 8, 2)[3, 1].tolist() == [-0.5, 0.0]
    pixels, told, counts, places = sights(range(5), EncoderConfig())
    assert pixels.shape == (5, 64, 64, 3)
    assert told.shape == (5, 64)
    assert places.shape == (5, 64, 2)
    assert counts.min() >= 0
    assert counts.max() <= 3
