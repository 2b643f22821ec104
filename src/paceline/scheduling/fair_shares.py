"""Weighted fair queueing of tenants: each tenant's virtual time, by which slots and prompt tokens are shared.

Start-time fair queueing: a tenant's virtual time grows by the tokens of its rows divided by its weight. The tenant with the
lowest virtual time is next for a slot, and prompt tokens of a tick raise the lowest virtual times to one level. Decoding
sequences have their row in each tick, so they run ahead of a share only for as long as their slots last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from paceline.request import RequestOptions
from paceline.scheduling.strategies import most_urgent_first
from paceline.sequence import Request, Row, Sequence

_LEARNING_RATE = 0.1  # of the mean length of a sequence

Allocations = list[tuple[Sequence, int]]


class FairShares:
    """The virtual times of tenants.

    A tenant that does not wait saves up no credit: its virtual time is at least the lowest among the tenants that wait. Nor is
    it further ahead of that time than by `most_debt` tokens of the lowest weight. The limit is equal for all tenants, so that
    tenants at the limit still share by weight. When no tenant waits, all virtual times are equal again.

    Attributes:
        is_shared: Whether there are virtual times of several tenants. If not, nothing is counted.
    """

    def __init__(self, most_debt: int) -> None:
        self.is_shared = False
        self._most_debt = most_debt
        self._num_open: Counter[str] = Counter()  # requests
        self._weights: dict[str, float] = {}
        self._times: dict[str, float] = {}  # of tenants with open requests, and of tenants in debt
        self._now = 0.0  # the lowest virtual time among the tenants that wait
        self._cut: set[str] = set()  # tenants with prompts that the planned tick does not compute as far as it could
        self._mean_tokens = 0.0  # of a sequence

    def add(self, options: RequestOptions) -> None:
        """Count a request as open. Its weight is its tenant's from now on."""
        tenant = options.tenant
        self._weights[tenant] = options.tenant_weight
        if not self._num_open[tenant]:
            self._times[tenant] = max(self._times.get(tenant, self._now), self._now)
            self.is_shared = len(self._times) > 1
        self._num_open[tenant] += 1

    def remove(self, request: Request) -> None:
        """Count a request as ended."""
        tenant = request.options.tenant
        if request.progress.started_s is not None:
            mean = sum([sequence.num_tokens for sequence in request.sequences]) / len(request.sequences)
            mean -= request.progress.num_cached
            self._mean_tokens += (mean - self._mean_tokens) * (_LEARNING_RATE if self._mean_tokens else 1)
        self._num_open[tenant] -= 1
        if not self._num_open[tenant]:
            del self._num_open[tenant]
            self._forget_idle()

    def turn(self, tenant: str, num_running: int) -> float:
        """Return the key by which waiting tenants get slots, lowest first.

        Running sequences count with the tokens that they are expected to compute.
        """
        return self.time(tenant) + num_running * (self._mean_tokens or 1) / self._weights.get(tenant, 1)

    def time(self, tenant: str) -> float:
        """Return the virtual time of a tenant."""
        return self._times.get(tenant, self._now)

    def weighted(self, tenant: str, number: int) -> float:
        """Return a number of slots or tokens divided by a tenant's weight."""
        return number / self._weights.get(tenant, 1)

    def charge(self, rows: Iterable[Row], waiting: Iterable[str]) -> None:
        """Charge the tenants for the computed rows of a tick.

        waiting: tenants with sequences that wait for slots, or for their row in a later tick.
        """
        for row in rows:
            tenant = row.sequence.request.options.tenant
            self._times[tenant] += len(row.token_ids) / self._weights[tenant]
        all_waiting = self._cut.union(waiting)
        self._cut = set()
        if not all_waiting:
            self._reset()
        else:
            self._now = max(self._now, min([self._times[tenant] for tenant in all_waiting]))
            most = self._now + self._most_debt / min(self._weights.values())
            for tenant, time in self._times.items():
                self._times[tenant] = min(time if tenant in all_waiting else max(time, self._now), most)
        self._forget_idle()

    def _reset(self) -> None:
        """Make the virtual times of tenants with open requests equal, and forget all other tenants."""
        self._now = 0.0
        self._times = dict.fromkeys(self._num_open, 0.0)
        self._weights = {tenant: self._weights[tenant] for tenant in self._num_open}

    def _forget_idle(self) -> None:
        idle = [tenant for tenant, time in self._times.items() if tenant not in self._num_open and time <= self._now]
        for tenant in idle:
            del self._times[tenant], self._weights[tenant]
        self._cut &= self._times.keys()
        self.is_shared = len(self._times) > 1
        if not self.is_shared:
            self._cut.clear()
            self._reset()

    def divide(self, allocations: Allocations, candidates: Iterable[Sequence]) -> Allocations:
        """Return a strategy's plan with its prompt tokens divided among the tenants whose prompts wait.

        The number of prompt tokens and the allocations of decoding sequences stay. The prompts of one tenant come in the order of
        the plan, then by urgency.
        """
        prompts = [sequence for sequence in candidates if not sequence.is_decoding]
        planned = dict.fromkeys([sequence for sequence, _ in allocations if not sequence.is_decoding])
        num_tokens = sum([number for sequence, number in allocations if sequence in planned])
        if num_tokens == sum([sequence.limit for sequence in prompts]):
            return allocations
        of_tenants: dict[str, list[Sequence]] = {}
        for sequence in [*planned, *most_urgent_first([prompt for prompt in prompts if prompt not in planned])]:
            of_tenants.setdefault(sequence.request.options.tenant, []).append(sequence)
        wanted = {tenant: sum([prompt.limit for prompt in own]) for tenant, own in of_tenants.items()}
        given = self._levelled(wanted, num_tokens)
        self._cut = {tenant for tenant, number in wanted.items() if given[tenant] < number}
        if len(of_tenants) == 1:
            return allocations
        divided = [allocation for allocation in allocations if allocation[0] not in planned]
        for tenant, own in of_tenants.items():
            left = given[tenant]
            for sequence in own:
                if number := min(left, sequence.limit):
                    divided.append((sequence, number))
                    left -= number
        return divided

    def _levelled(self, wanted: dict[str, int], num_tokens: int) -> dict[str, int]:
        """Return each tenant's part of `num_tokens`, at most the wanted number, so that the lowest virtual times become equal."""

        def given_at(level: float) -> dict[str, float]:
            return {
                tenant: min(number, max(0.0, level - self._times[tenant]) * self._weights[tenant])
                for tenant, number in wanted.items()
            }

        times, weights = self._times, self._weights
        low = min([times[tenant] for tenant in wanted])
        ends = [times[tenant] + number / weights[tenant] for tenant, number in wanted.items()]
        high = max(ends)
        for level in sorted([*(times[tenant] for tenant in wanted), *ends]):  # the sum is linear between two of these
            if sum(given_at(level).values()) >= num_tokens:
                high = level
                break
            low = level
        at_low, at_high = sum(given_at(low).values()), sum(given_at(high).values())
        part = (num_tokens - at_low) / (at_high - at_low) if at_high > at_low else 0.0
        given = {tenant: int(number) for tenant, number in given_at(low + part * (high - low)).items()}
        while sum(given.values()) < num_tokens:
            short = [tenant for tenant in wanted if given[tenant] < wanted[tenant]]
            first = min(short, key=lambda tenant: self._times[tenant] + (given[tenant] + 1) / self._weights[tenant])
            given[first] += 1
        return given
