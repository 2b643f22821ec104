"""Serve's request router for replicas of a model: `paceline.cluster` decides, by what replicas report.

Serve pickles this module by value and makes the router on its own event loop, in every process that has a handle.
"""

from __future__ import annotations

import time
from random import Random
from typing import Any

import msgspec
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from paceline.cluster import PromptBlocks, ReplicaReport, Router
from paceline.ray_serve.membership import membership_of
from paceline.ray_serve.routed_prompt import RoutedPrompt

STATS_KEY = "paceline"
"""The key of a replica's report in its routing stats."""


class PrefixRequestRouter(RequestRouter):  # type: ignore[misc]  # of Ray
    """Sends a request to the replica that is expected to give it its first token soonest."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Make the state; Serve calls this after the constructor. There are no options."""
        del kwargs
        deployment = self._deployment_id
        self._membership = membership_of(deployment.app_name, deployment.name)
        self._ranking = Router(Random())  # noqa: S311 - of ties
        self._seen: dict[str, float] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take in which replicas there are, and their reports."""
        super().update_replicas(replicas)
        named = {one.replica_id.unique_id: one for one in replicas}
        for name in self._seen.keys() - named.keys():
            self._ranking.remove(name)
            del self._seen[name]
        for name, replica in named.items():
            self._seen.setdefault(name, 0.0)
            self._observe(name, replica.routing_stats.get(STATS_KEY))
        self._membership.set(named)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Take out a replica that has died, before the controller says so."""
        super().on_replica_actor_died(replica_id)
        self._ranking.remove(replica_id.unique_id)
        self._membership.remove(replica_id.unique_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas for a request, the best first, each by itself; all at once for one that says nothing."""
        if pending_request is None:
            return [candidate_replicas]
        self._membership.sample = pending_request
        routed = pending_request.args[0] if pending_request.args else None
        if not isinstance(routed, RoutedPrompt):
            return [candidate_replicas]
        named = {one.replica_id.unique_id: one for one in candidate_replicas}
        candidates = [name for name in named if name not in routed.avoid] or list(named)
        return [[named[name]] for name in self._ranked(routed.prompt, candidates)]

    def _ranked(self, prompt: PromptBlocks, candidates: list[str]) -> list[str]:
        now_s = time.monotonic()
        ranked = self._ranking.rank(prompt, candidates, now_s)
        if ranked:
            self._ranking.note_routed(ranked[0], prompt, now_s)
        return [one.replica_id for one in ranked] or candidates  # all are unhealthy: Serve ends them, or they recover

    def _observe(self, name: str, data: bytes | None) -> None:
        """Take in a report, once. What a replica of another version reports is left out: that costs time alone."""
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
