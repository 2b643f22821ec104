"""What a response reports of its cost: OpenAI's `usage` and llama-server's `timings`. Pure; any thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.streaming import Usage


def final_timings(usage: Usage, num_predicted: int) -> dict[str, Any]:
    """Return the timings of a finished request. The first token comes with the prompt, so rates count one less."""
    result = timings_body(
        cached=usage.cached_tokens,
        prompt=usage.prompt_tokens - usage.cached_tokens,
        prompt_s=usage.prefill_s,
        predicted=num_predicted,
        predicted_s=usage.decode_s,
    )
    if usage.draft_tokens:
        result |= {"draft_n": usage.draft_tokens, "draft_n_accepted": usage.accepted_tokens}
    return result


def timings_body(*, cached: int, prompt: int, prompt_s: float, predicted: int, predicted_s: float) -> dict[str, Any]:
    """Return llama-server's `timings` from counts and seconds."""
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
class RunningTimings:
    """Timings of a running request by the server's clock. began_s: when it was submitted.

    Until `during_prefill` has the number of cached tokens, all of the prompt counts as computed.
    """

    clock: Callable[[], float]
    num_prompt: int
    began_s: float
    _cached: int = 0
    _first_s: float | None = None

    def during_prefill(self, processed: int, cached: int, elapsed_s: float) -> dict[str, Any]:
        """Return the timings during prefill: `processed` prompt tokens are in memory, `cached` of them were before."""
        self._cached, self.began_s = cached, self.clock() - elapsed_s
        return timings_body(cached=cached, prompt=processed - cached, prompt_s=elapsed_s, predicted=0, predicted_s=0.0)

    def during_decode(self, num_predicted: int) -> dict[str, Any]:
        """Return the timings after `num_predicted` tokens."""
        now = self.clock()
        self._first_s = now if self._first_s is None else self._first_s
        return timings_body(
            cached=self._cached,
            prompt=self.num_prompt - self._cached,
            prompt_s=self._first_s - self.began_s,
            predicted=num_predicted,
            predicted_s=now - self._first_s,
        )


def usage_body(usages: Sequence[Usage], num_reasoning: int | None = None) -> dict[str, Any]:
    """Return the `usage` of one HTTP request from those of its prompts.

    `cached_from` is included if it is the same for all prompts that had cached tokens. num_reasoning: tokens of thinking, in
    chats.
    """
    prompt = sum(one.prompt_tokens for one in usages)
    completion = sum(one.completion_tokens for one in usages)
    sources = {one.cached_from for one in usages if one.cached_from is not None}
    details: dict[str, Any] = {"cached_tokens": sum(one.cached_tokens for one in usages)}
    if len(sources) == 1:
        details["cached_from"] = sources.pop()
    body: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": details,
    }
    of_completion = {} if num_reasoning is None else {"reasoning_tokens": num_reasoning}
    drafts = sum(one.draft_tokens for one in usages)
    if drafts:
        of_completion |= {"draft_tokens": drafts, "accepted_draft_tokens": sum(one.accepted_tokens for one in usages)}
    return body | ({"completion_tokens_details": of_completion} if of_completion else {})
