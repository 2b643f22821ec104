"""Greedy text that two runs can be compared by.

With flash attention or f16 caches, sums over cells are rounded in the order of the cells, and passes of other sizes always
round differently: a prompt that is computed at once, of which only the last token is computed, or that is computed anew with
later tokens. A trained model has near ties that fall either way then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline import LLM

# With these, and passes of one size (cache_prompt=False, no other sequence in the batch), the text is the same.
EXACT: dict[str, Any] = {"n_threads": 1, "flash_attn": "off", "type_k": "f32", "type_v": "f32"}
EXACT_FLAGS = ("-t", "1", "-fa", "off", "-ctk", "f32", "-ctv", "f32")

_NEAR_TIE = 0.1  # of log-probability


def assert_same_but_for_near_ties(
    llm: LLM, prompt: Sequence[int], expected: Sequence[int], found: Sequence[int]
) -> None:
    """Assert that greedy tokens are the same up to their end, or up to two tokens that are as likely as each other."""
    index = next((i for i, (item, other) in enumerate(zip(expected, found, strict=False)) if item != other), None)
    if index is None:
        assert list(found) == list(expected)
        return
    next_token = llm.generate([*prompt, *expected[:index]], max_tokens=1, temperature=0, logprobs=2, ignore_eos=True)
    assert next_token.logprobs is not None
    (likeliest,) = next_token.logprobs
    assert {expected[index], found[index]} == set(likeliest.token_ids), index
    assert abs(likeliest.values[0] - likeliest.values[1]) < _NEAR_TIE, index
