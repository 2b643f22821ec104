"""The samplers once more, slowly and in float64, from their definitions: the reference for the native samplers.

A distribution is a dict from token id to logit. `Reference.margin` is how close any decision came to falling the other
way, so that a test can leave out cases that rounding decides.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

from paceline.params import SamplingParams

Logits = dict[int, float]


def softmax(logits: Logits) -> dict[int, float]:
    highest = max(logits.values())
    weights = {token: math.exp(logit - highest) for token, logit in logits.items()}
    total = math.fsum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def ranked(logits: Logits) -> list[int]:
    return sorted(logits, key=lambda token: (-logits[token], token))


def philox(counter: Sequence[int], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32-10, written from the paper's description of a round."""
    low = 0xFFFFFFFF
    c, k = list(counter), list(key)
    for _ in range(10):
        left, right = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(right >> 32) ^ c[1] ^ k[0], right & low, (left >> 32) ^ c[3] ^ k[1], left & low]
        k = [(k[0] + 0x9E3779B9) & low, (k[1] + 0xBB67AE85) & low]
    return tuple(c)


def uniform(seed: int, choice: int, k: int, index: int, lane: int, stream: int) -> float:
    bits = philox((index, k, choice, stream), (seed & 0xFFFFFFFF, seed >> 32))[lane]
    return (bits + 0.5) / 2**32


def draw(logits: Logits, seed: int, choice: int, k: int) -> int:
    """Return the token with the highest sum of logit and Gumbel noise."""
    noisy = {
        token: logit - math.log(-math.log(uniform(seed, choice, k, token // 4, token % 4, 0)))
        for token, logit in logits.items()
    }
    return ranked(noisy)[0]


class Reference:
    """Applies the samplers of some params to a distribution."""

    def __init__(self, params: SamplingParams, history: Sequence[int] = (), k: int = 0, choice: int = 0) -> None:
        self.params, self.history, self.k, self.choice = params, list(history), k, choice
        self.margin = math.inf

    def apply(self, logits: Logits) -> Logits:
        for name in self.params.samplers:
            logits = getattr(self, name)(logits)
        return logits

    def token(self, logits: Logits) -> int:
        assert self.params.seed is not None
        return draw(self.apply(logits), self.params.seed, self.choice, self.k)

    def _close(self, distance: float) -> None:
        self.margin = min(self.margin, abs(distance))

    def penalties(self, logits: Logits) -> Logits:
        p = self.params
        window = self.history if p.penalty_last_n < 0 else self.history[max(0, len(self.history) - p.penalty_last_n) :]
        counts = Counter(window if p.penalty_last_n else [])
        result = dict(logits)
        for token in counts.keys() & logits.keys():
            logit = logits[token]
            logit = logit * p.repeat_penalty if logit <= 0 else logit / p.repeat_penalty
            result[token] = logit - counts[token] * p.frequency_penalty - p.presence_penalty
        return result

    def dry(self, logits: Logits) -> Logits:
        """Without breakers: the longest earlier match of the end of the history, for each token that followed."""
        p = self.params
        last_n = p.dry_penalty_last_n
        seen = self.history[-last_n:] if last_n > 0 else self.history
        result = dict(logits)
        if p.dry_multiplier == 0 or last_n == 0:
            return result
        longest: dict[int, int] = {}
        for end in range(len(seen) - 1):
            length = 0
            while length <= end and seen[end - length] == seen[-1 - length]:
                length += 1
            longest[seen[end + 1]] = max(longest.get(seen[end + 1], 0), length)
        for token, length in longest.items():
            if length >= p.dry_allowed_length and token in result:
                result[token] -= p.dry_multiplier * p.dry_base ** (length - p.dry_allowed_length)
        return result

    def top_n_sigma(self, logits: Logits) -> Logits:
        n = self.params.top_n_sigma
        if n <= 0 or len(logits) < 2:
            return logits
        mean = math.fsum(logits.values()) / len(logits)
        sigma = math.sqrt(math.fsum((logit - mean) ** 2 for logit in logits.values()) / len(logits))
        limit = max(logits.values()) - n * sigma
        for logit in logits.values():
            self._close(logit - limit)
        return {token: logit for token, logit in logits.items() if logit >= limit}

    def top_k(self, logits: Logits) -> Logits:
        k = self.params.top_k
        order = ranked(logits)
        if 0 < k < len(order):
            self._cut(order, k, logits)
            order = order[:k]
        return {token: logits[token] for token in order}

    def typ_p(self, logits: Logits) -> Logits:
        if self.params.typical_p >= 1:
            return logits
        p = softmax(logits)
        entropy = -math.fsum(value * math.log(value) for value in p.values() if value > 0)
        distance = {token: abs(-math.log(value) - entropy) for token, value in p.items() if value > 0}
        order = sorted(distance, key=lambda token: (distance[token], token))
        for a, b in itertools.pairwise(order):
            self._close(distance[b] - distance[a])
        return self._until(order, p, self.params.typical_p, logits)

    def top_p(self, logits: Logits) -> Logits:
        if self.params.top_p >= 1:
            return logits
        return self._until(ranked(logits), softmax(logits), self.params.top_p, logits)

    def _until(self, order: list[int], p: dict[int, float], limit: float, logits: Logits) -> Logits:
        kept, total = {}, 0.0
        for token in order:
            kept[token] = logits[token]
            total += p[token]
            self._close(total - limit)
            if total >= limit:
                break
        self._cut(order, len(kept), logits)
        return kept

    def _cut(self, order: list[int], count: int, logits: Logits) -> None:
        """Record the distance of the last kept token to the first cut token; equal tokens are ordered by id."""
        if count < len(order) and logits[order[count - 1]] != logits[order[count]]:
            self._close(logits[order[count - 1]] - logits[order[count]])

    def min_p(self, logits: Logits) -> Logits:
        if self.params.min_p <= 0:
            return logits
        limit = max(logits.values()) + math.log(self.params.min_p)
        for logit in logits.values():
            self._close(logit - limit)
        return {token: logit for token, logit in logits.items() if logit >= limit}

    def xtc(self, logits: Logits) -> Logits:
        params = self.params
        assert params.seed is not None
        coin = uniform(params.seed, self.choice, self.k, 0, 0, 1)
        if params.xtc_probability <= 0 or params.xtc_threshold > 0.5 or coin > params.xtc_probability:
            return logits
        p = softmax(logits)
        order = ranked(logits)
        for value in p.values():
            self._close(value - params.xtc_threshold)
        likely = [token for token in order if p[token] >= params.xtc_threshold]
        return {token: logits[token] for token in order if token not in likely[:-1]}

    def temperature(self, logits: Logits) -> Logits:
        params = self.params
        temperature = params.temperature
        if params.dynatemp_range > 0 and len(logits) > 1:
            p = softmax(logits)
            entropy = -math.fsum(value * math.log(value) for value in p.values() if value > 0)
            low = max(0.0, temperature - params.dynatemp_range)
            high = temperature + params.dynatemp_range
            temperature = low + (high - low) * (entropy / math.log(len(logits))) ** params.dynatemp_exponent
        return {token: logit / temperature for token, logit in logits.items()}
