"""How many replicas a model needs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paceline.ray_serve.cluster_config import LatencyPolicy, wanted_replicas


@pytest.mark.parametrize(
    ("current", "queue_s", "itl_s", "busy", "wanted"),
    [
        (2, 0.5, 0.1, 1.0, 2),  # at the target
        (2, 0.75, 0.1, 1.0, 3),  # requests wait
        (2, 0.0, 0.3, 1.0, 3),  # tokens are slow
        (2, 60.0, 0.1, 1.0, 4),  # never more than twice as many
        (1, 0.0, 0.0, 0.0, 1),
        (4, 0.0, 0.0, 0.0, 3),  # one at a time
        (4, 0.0, 0.05, 0.3, 3),
        (4, 0.0, 0.05, 0.45, 4),  # three would be over half busy
        (2, 0.0, 0.05, 0.3, 2),
    ],
)
def test_replicas_follow_waiting_and_latency(
    current: int, queue_s: float, itl_s: float, busy: float, wanted: float
) -> None:
    """Replicas grow with the worse of both, at most twofold, and shrink by one if the others stay calm."""
    assert wanted_replicas(current, queue_s, itl_s, busy, queue_target_s=0.5, itl_target_s=0.2) == pytest.approx(wanted)


def test_the_policy_reads_the_means_of_what_replicas_report() -> None:
    """Serve's values are averaged over the replicas; without reports nothing changes."""
    policy = LatencyPolicy(queue_time_s=0.5, itl_s=0.2)
    metrics = {"queue_s": {"a": 1.5, "b": 0.0}, "itl_s": {"a": 0.1, "b": 0.1}, "busy": {"a": 1.0, "b": 1.0}}
    context = SimpleNamespace(aggregated_metrics=metrics, current_num_replicas=2, target_num_replicas=2)
    assert policy(context) == (3.0, {})
    none = SimpleNamespace(aggregated_metrics=None, current_num_replicas=1, target_num_replicas=1)
    assert policy(none) == (1, {})
    starting = SimpleNamespace(aggregated_metrics={}, current_num_replicas=0, target_num_replicas=2)
    assert policy(starting) == (2, {})
