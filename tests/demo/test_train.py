"""Training: a run that was stopped and resumed is the same as one that was not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")

from demo_model import train  # noqa: E402 - needs PyTorch
from demo_model.model import Config  # noqa: E402

TINY = Config(dim=32, layers=1, heads=2, kv_heads=1, head_dim=16, hidden=32, vocab=64)


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> train.Plan:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    random = np.random.default_rng(1)
    data = tmp_path / "corpus.npz"
    np.savez(data, tokens=random.integers(0, 64, (32, 512), dtype=np.uint16), learned=np.ones((32, 512), bool))
    return train.Plan(data=data, out=tmp_path / "a.pt", draft=False, steps=8, decay=4, rows=2, rate=0.01, workers=1)


def run(plan: train.Plan, **changes: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    plan = train.Plan(**(vars(plan) | changes))
    train.Trainer(plan, 0, TINY).run(save_every=3)
    weights: dict[str, Any] = torch.load(plan.out, weights_only=True)["weights"]
    return weights


def test_a_resumed_training_equals_one_that_was_not_stopped(plan: train.Plan) -> None:
    whole = run(plan)
    other = plan.out.with_name("b.pt")
    stopped = run(plan, out=other, steps=8)
    for path in train.checkpoints(other)[1:]:
        path.unlink()
    assert train.checkpoints(other)[-1].name == "b.3.pt"
    other.unlink()
    resumed = run(plan, out=other, resume=True)
    assert stopped.keys() == whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_more_steps_can_be_asked_for_before_the_rate_falls(plan: train.Plan) -> None:
    longer = train.Plan(**(vars(plan) | {"steps": 12}))
    assert [plan.factor(n) for n in range(4)] == [longer.factor(n) for n in range(4)]
    assert [plan.factor(n, warm=1) for n in (4, 5, 7)] == [1.0, 0.75, 0.25]


def test_only_the_last_two_checkpoints_are_kept(plan: train.Plan) -> None:
    run(plan, steps=12)
    assert [p.name for p in train.checkpoints(plan.out)] == ["a.9.pt", "a.12.pt"]


def test_a_resumed_training_has_the_same_settings(plan: train.Plan) -> None:
    run(plan)
    with pytest.raises(SystemExit, match=r"a\.6\.pt was trained with .*'rows': 2"):
        run(plan, resume=True, rows=4)
