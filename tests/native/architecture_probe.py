"""Tries one model file as a user would, and writes what came of it as JSON: run by test_architectures.py, a process a file."""

from __future__ import annotations

import json
import sys
from typing import Any

from paceline import LLM
from paceline.errors import PacelineError, Unsupported

# The files know 256 positions, have windows of 32 and compress 128 tokens to one.
_PROMPTS = [[(7 * place * place + 11 * length) % 128 for place in range(length)] for length in (1, 5, 40, 150)]
_SAMPLING = {"max_tokens": 24, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 5, "ignore_eos": True}
# The logits of random weights lie within a few tenths. Too cold, one token may win everywhere; too warm, the seed alone
# decides. The first of these at which texts differ is taken.
_TEMPERATURES = (0.03, 0.1, 0.3)


def probe(path: str, **options: Any) -> dict[str, Any]:
    """Return what was generated in each way; "refused" where the engine or the request was."""
    try:
        with LLM(path, n_threads=1, **options) as llm:
            return {**generated(llm), "embedded": embedded(llm)}
    except PacelineError as error:
        return {"refused": f"{type(error).__name__}: {error}"}


def generated(llm: LLM) -> dict[str, Any]:
    """Token ids of four prompts: one after the other and together without a cache, then with one, twice."""
    for temperature in _TEMPERATURES:
        options: dict[str, Any] = {**_SAMPLING, "temperature": temperature}
        alone = [llm.generate(prompt, cache_prompt=False, **options).token_ids for prompt in _PROMPTS]
        if len(set(alone)) > 1:
            break
    together = [done.token_ids for done in llm.generate(_PROMPTS, cache_prompt=False, **options)]
    first = [llm.generate(prompt, **options) for prompt in _PROMPTS]
    again = [llm.generate(prompt, **options) for prompt in _PROMPTS]
    return {
        "alone": alone,
        "together": together,
        "first": [done.token_ids for done in first],
        "again": [done.token_ids for done in again],
        "cached": [done.usage.cached_tokens for done in again],
    }


def embedded(llm: LLM) -> str:
    """How wide the vectors of two texts are, or why there are none."""
    try:
        return str(llm.embed(_PROMPTS[:2], normalize=False).shape)
    except Unsupported as error:
        return str(error)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe(sys.argv[1], **json.loads(sys.argv[2]))))
