"""`python -m tests.ray_cluster [MINUTES]`: all scenarios on a local Ray, replicas killed every 20 s for so long."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tests.ray_cluster import scenarios
from tests.ray_cluster.local_cluster import LocalCluster

_KILL_EVERY_S = 20.0


def main(minutes: float) -> None:
    """Run all scenarios in turn, and print their results."""
    num_kills = max(1, round(minutes * 60 / _KILL_EVERY_S))
    with LocalCluster() as cluster:
        steps: list[Callable[[], str]] = [
            lambda: scenarios.talk(cluster),
            lambda: scenarios.kill_replicas(cluster, num_kills, _KILL_EVERY_S),
            lambda: scenarios.restart_the_router(cluster),
            lambda: scenarios.update_under_load(cluster),
        ]
        for step in steps:
            sys.stdout.write(f"{step()}\n")
            sys.stdout.flush()
    with LocalCluster(options="max_restarts = 0") as cluster:
        sys.stdout.write(f"{scenarios.end_an_engine(cluster)}\n")
        sys.stdout.flush()
    with LocalCluster(replicas=1, num_slots=4, most_replicas=2) as cluster:
        sys.stdout.write(f"{scenarios.scale_with_load(cluster)}\n")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 3.0)
