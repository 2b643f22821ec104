"""llama-server's `timings` of an answer: counts, milliseconds, and rates that follow from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.streaming import Usage


def timings_of(usage: Usage, num_predicted: int) -> dict[str, Any]:
    """Of an answer that has ended. The first token comes with the prompt, so that rates count one token less."""
    result = shaped(
        cached=usage.cached_tokens,
        prompt=usage.prompt_tokens - usage.cached_tokens,
        prompt_s=usage.prefill_s,
        predicted=num_predicted,
        predicted_s=usage.decode_s,
    )
    if usage.draft_tokens:
        result |= {"draft_n": usage.draft_tokens, "draft_n_accepted": usage.accepted_tokens}
    return result


def shaped(*, cached: int, prompt: int, prompt_s: float, predicted: int, predicted_s: float) -> dict[str, Any]:
    """From counts and seconds."""
    steps = max(0, predicted - 1)
    return {
        "cache_n": cached,
        "prompt_n": prompt,
        "prompt_ms": prompt_s * 1000,
        "prompt_per_token_ms": prompt_s * 1000 / prompt if prompt else 0.0,
        "prompt_per_second": prompt / prompt_s if prompt_s > 0 else 0.0,
        "predicted_n": predicted,
        "predicted_ms": predicted_s * 1000,
        "predicted_per_token_ms": predicted_s * 1000 / steps if steps else 0.0,
        "predicted_per_second": steps / predicted_s if predicted_s > 0 else 0.0,
    }


@dataclass(slots=True)
class TimingsSoFar:
    """Those of an answer that runs, by the clock of who tells it. began_s: when it was asked for.

    What came from the cache is told at the end; until then all of the prompt counts.
    """

    clock: Callable[[], float]
    num_prompt: int
    began_s: float
    _first_s: float | None = None

    def told(self, num_predicted: int) -> dict[str, Any]:
        """With so many tokens."""
        now = self.clock()
        self._first_s = now if self._first_s is None else self._first_s
        return shaped(
            cached=0,
            prompt=self.num_prompt,
            prompt_s=self._first_s - self.began_s,
            predicted=num_predicted,
            predicted_s=now - self._first_s,
        )
