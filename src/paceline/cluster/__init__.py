"""One model on several replicas: requests go to the replica that gives the first token soonest, and outlive a replica.

    callers ──> ClusterEngine ──> Dispatcher ──requests, commands──> ReplicaService ──> WorkerEngine      one of several
                                  (one thread) <──parts of ticks───  (each with a worker process)

    replica   LoadMeter, DigestPublisher ──> ReplicaReport ──> Router.observe      router
                                              request ──> hash_prompt ──> Router.rank ──> Router.note_routed

The dispatcher keeps each open request, as the front of a worker does. When a replica dies or is drained, the request continues on
another one, and the client gets each token once. `ReplicaCalls` carries the calls; nothing here imports Ray.

The names below are the routing part, which is pure. A report says what a replica has cached, what waits there, and what its
ticks cost. Reports may be late, lost or doubled: then requests take longer, and nothing else happens.
"""

from paceline.cluster.prefix_digest import BLOCK_TOKENS, DigestPublisher, DigestUpdate, PromptBlocks, hash_prompt
from paceline.cluster.routing import LoadMeter, RankedReplica, ReplicaLoad, ReplicaReport, Router

__all__ = [
    "BLOCK_TOKENS",
    "DigestPublisher",
    "DigestUpdate",
    "LoadMeter",
    "PromptBlocks",
    "RankedReplica",
    "ReplicaLoad",
    "ReplicaReport",
    "Router",
    "hash_prompt",
]
