"""Hashes of prompts, by which routers and replicas name the same prefix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.running_engine import LONG_S

from paceline.cluster import BLOCK_TOKENS, hash_prompt
from paceline.cluster.prefix_digest import shortened
from paceline.engine import EngineClient
from paceline.errors import InvalidParams, InvalidType
from paceline.kv_cache import PrefixDigest
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.testing.fake_engine_client import FakeEngineClient, fake_worker_engine

PROMPT = [7 * number % 250 for number in range(3 * BLOCK_TOKENS + 5)]


def test_a_prompt_has_a_hash_for_each_whole_block() -> None:
    """A prefix of whole blocks has the same hashes, whatever follows it."""
    blocks = hash_prompt(PROMPT, RequestOptions())
    assert (blocks.num_tokens, len(blocks.hashes)) == (len(PROMPT), 3)
    assert hash_prompt(PROMPT[: 2 * BLOCK_TOKENS], RequestOptions()).hashes == blocks.hashes[:2]
    changed = [PROMPT[0] + 1, *PROMPT[1:]]
    assert not set(hash_prompt(changed, RequestOptions()).hashes) & set(blocks.hashes)


@pytest.mark.parametrize("other", [{"tenant": "b"}, {"cache_salt": "b"}, {"lora": {"style": 1.0}}])
def test_tenant_salt_and_adapters_are_part_of_the_hash(other: dict[str, Any]) -> None:
    """A router cannot find one namespace's prefix for a request of another."""
    mine = hash_prompt(PROMPT, RequestOptions())
    assert not set(hash_prompt(PROMPT, RequestOptions(**other)).hashes) & set(mine.hashes)


def test_a_request_without_the_cache_has_no_hashes() -> None:
    """Nothing of it is cached, so no replica is better for it."""
    assert hash_prompt(PROMPT, RequestOptions(cache_prompt=False)).hashes == ()


def test_invalid_prompt_is_refused() -> None:
    """By the place of the error; NumPy's integers are right."""
    with pytest.raises(InvalidType, match="token_ids must be a sequence of token ids, not str"):
        hash_prompt("text", RequestOptions())  # type: ignore[arg-type]
    with pytest.raises(InvalidParams, match="the number of token_ids must be an integer >= 1, not 0"):
        hash_prompt([], RequestOptions())
    for wrong in (-1, 2**31, 1.5, True):
        with pytest.raises(InvalidParams, match=r"token_ids\[1\] must be "):
            hash_prompt([1, wrong], RequestOptions())  # type: ignore[list-item]
    ids = np.array(PROMPT, dtype=np.int32)
    assert hash_prompt(ids, RequestOptions()) == hash_prompt(PROMPT, RequestOptions())  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [FakeEngineClient, fake_worker_engine])
def test_an_engine_reports_the_hashes_that_a_router_computes(make: Any) -> None:
    """With a thread and with a worker, for the whole blocks of a prompt that was generated from."""
    engine: EngineClient = make()
    try:
        channel = engine.accept(engine.prepare(PROMPT, SamplingParams(max_tokens=1), RequestOptions()))
        assert channel.wait_released(LONG_S)
        found: PrefixDigest = engine.prefix_digest(block_tokens=BLOCK_TOKENS).result(LONG_S)
        assert (
            tuple(shortened(prefix.hash) for prefix in found.prefixes) == hash_prompt(PROMPT, RequestOptions()).hashes
        )
        for wrong in (0, -1, 2**31):
            with pytest.raises(InvalidParams, match="block_tokens"):
                engine.prefix_digest(block_tokens=wrong)
    finally:
        engine.close()
