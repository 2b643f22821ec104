"""Serve's request router for the replicas of a model: `paceline.cluster.Router` decides by their reports.

Serve pickles this module by value and makes the router on its own event loop, in every process that has a handle.
"""

from __future__ import annotations

import time
from random import Random
from typing import Any

import msgspec
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from paceline.cluster import PromptBlocks, ReplicaReport, Router
from paceline.ray_serve.ray_calls import RoutedPrompt, membership_of

STATS_KEY = "paceline"
"""The key of a replica's report in its routing stats."""


class PrefixRequestRouter(RequestRouter):  # type: ignore[misc]  # of Ray
    """Sends a request to the replica that probably gives it its first token soonest."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Make the state. Serve calls this after the constructor, without options."""
        del kwargs
        deployment = self._deployment_id
        self._membership = membership_of(deployment.app_name, deployment.name)
        self._ranking = Router(Random())  # noqa: S311 - of ties
        self._seen: dict[str, float] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the present replicas and their reports."""
        super().update_replicas(replicas)
        named = {replica.replica_id.unique_id: replica for replica in replicas}
        for name in self._seen.keys() - named.keys():
            self._ranking.remove(name)
            del self._seen[name]
        for name, replica in named.items():
            self._seen.setdefault(name, 0.0)
            self._observe(name, replica.routing_stats.get(STATS_KEY))
        self._membership.set(named)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Remove a replica that has died, before the controller reports it."""
        super().on_replica_actor_died(replica_id)
        self._ranking.remove(replica_id.unique_id)
        self._membership.remove(replica_id.unique_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas for a request, best first, each as a rank of its own; a single rank for a call without a prompt."""
        if pending_request is None:
            return [candidate_replicas]
        self._membership.sample = pending_request
        routed = pending_request.args[0] if pending_request.args else None
        if not isinstance(routed, RoutedPrompt):
            return [candidate_replicas]
        named = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        candidates = [name for name in named if name not in routed.avoid] or list(named)
        return [[named[name]] for name in self._ranked(routed.prompt, candidates)]

    def _ranked(self, prompt: PromptBlocks, candidates: list[str]) -> list[str]:
        now_s = time.monotonic()
        ranked = self._ranking.rank(prompt, candidates, now_s)
        if ranked:
            self._ranking.note_routed(ranked[0], prompt, now_s)
        return [
            replica.replica_id for replica in ranked
        ] or candidates  # all are unhealthy: they recover, or Serve ends them

    def _observe(self, name: str, data: bytes | None) -> None:
        """Take a report, once. The report of a replica of another version is ignored; that costs time only."""
        if data is None:
            return
        try:
            report = msgspec.msgpack.decode(data, type=ReplicaReport)
        except msgspec.MsgspecError:
            return
        if report.made_at == self._seen[name]:
            return
        self._seen[name] = report.made_at
        age_s = max(0.0, time.time() - report.made_at)
        # The clocks of machines differ.
        self._ranking.observe(name, report, time.monotonic(), age_s=age_s if age_s < 60 else 0.0)
