"""An engine over several replicas of one model: to its callers an `EngineClient` as any other.

    callers ──> ClusterEngine ──> Dispatcher ──requests, commands──> ReplicaService ──> WorkerEngine      one of several
                                  (one thread) <──parts of ticks───  (each with a worker process)

The dispatcher keeps what was told of each open request, as the front of a worker does, and continues it on another replica where
one dies or is drained: each token once. What carries calls to replicas and decides which of them gets a request is behind
`ReplicaCalls`; nothing here knows Ray.
"""

from paceline.cluster_engine.cluster_client import ClusterEngine
from paceline.cluster_engine.replica_calls import Call, ReplicaCalls, ReplicaEnded, ReplicaGone
from paceline.cluster_engine.replica_service import ReplicaService, RoutingStats

__all__ = [
    "Call",
    "ClusterEngine",
    "ReplicaCalls",
    "ReplicaEnded",
    "ReplicaGone",
    "ReplicaService",
    "RoutingStats",
]
