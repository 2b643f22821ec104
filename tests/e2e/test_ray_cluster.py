"""A cluster on a local Ray with two replicas of the demo model; `python -m tests.ray_cluster` takes longer."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from tempfile import gettempdir

import pytest
from filelock import FileLock
from tests.ray_cluster import scenarios
from tests.ray_cluster.local_cluster import LocalCluster

pytestmark = [
    pytest.mark.ray,
    pytest.mark.full,
    pytest.mark.native,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'paceline[ray]'"
    ),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with FileLock(Path(gettempdir()) / "paceline-tests-of-ray"), LocalCluster() as found:  # one on a machine at a time
        yield found


def test_the_openai_package_talks_to_a_cluster(cluster: LocalCluster) -> None:
    """Keys, seeds and streams are as on one machine, and a client that hangs up frees the slot wherever it is."""
    assert scenarios.talk(cluster)


def test_streams_survive_a_killed_replica(cluster: LocalCluster) -> None:
    """Under 32 streams a replica is killed: every stream ends, with each token once."""
    assert scenarios.kill_replicas(cluster, num_kills=1, every_s=5)
