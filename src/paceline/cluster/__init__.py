"""Routing over replicas: which of several engines with the same model computes a request soonest. Pure.

    replica   LoadMeter, DigestPublisher ──> ReplicaReport ──> Router.observe      router
                                              request ──> hash_prompt ──> Router.rank ──> Router.note_routed

A report says what a replica has cached, what waits there, and what its ticks cost. Reports may be late, lost or doubled: then
requests take longer, and nothing else happens. No module here knows a network, a thread or a clock.
"""

from paceline.cluster.block_hashes import BLOCK_TOKENS, PromptBlocks, hash_prompt
from paceline.cluster.digest_publisher import DigestPublisher
from paceline.cluster.digest_update import DigestUpdate
from paceline.cluster.load_meter import LoadMeter
from paceline.cluster.replica_report import ReplicaLoad, ReplicaReport
from paceline.cluster.routing import RankedReplica, Router

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
