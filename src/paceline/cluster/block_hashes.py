"""Hashes of prompts in blocks, by which routers and replicas name the same prefix.

A block's hash is that of the whole prefix up to its end, with the adapters, tenant and cache salt: the first half of what
`EngineClient.prefix_digest` returns for blocks of this size. 64 bits are enough where a collision costs time alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from paceline import validation
from paceline.errors import InvalidType
from paceline.kv_cache import PrefixDigest, hash_blocks, pack_tokens
from paceline.request import RequestOptions
from paceline.scheduling.sequence import prefix_namespace

BLOCK_TOKENS: Final = 64
"""Tokens of a block. A prefix is found to within as many; a tick computes no fewer of a prompt at little less cost."""

HASH_BYTES: Final = 8
_HEX_DIGITS = 2 * HASH_BYTES
_MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """What a router needs to know of a request.

    Attributes:
        num_tokens: Tokens of its prompt.
        hashes: Those of its prefixes of whole blocks, the shortest first; none where it does not use the cache.
    """

    num_tokens: int
    hashes: tuple[int, ...] = ()


def hash_prompt(token_ids: Sequence[int], options: RequestOptions) -> PromptBlocks:
    """Return a prompt's blocks.

    Args:
        token_ids: The ids of the prompt, at least one.
        options: The request's; adapters, tenant and cache_salt are part of each hash, and without cache_prompt there is none.

    Raises:
        InvalidParams: token_ids are not token ids, or there are none.
    """
    ids = _checked(token_ids)
    if not options.cache_prompt:
        return PromptBlocks(len(ids))
    hashes = hash_blocks(prefix_namespace(options), pack_tokens(ids), BLOCK_TOKENS)
    return PromptBlocks(len(ids), tuple(map(shortened, hashes)))


def shortened(hash_: str) -> int:
    """Return the 64 bits of a prefix's hash that travel."""
    return int(hash_[:_HEX_DIGITS], 16)


def digest_hashes(digest: PrefixDigest) -> list[int]:
    """Return the hashes of a digest of blocks, the shortest prefixes first."""
    return [shortened(one.hash) for one in digest.prefixes]


def _checked(token_ids: Sequence[int]) -> list[int]:
    if isinstance(token_ids, (str, bytes, bytearray)):
        raise InvalidType(f"token_ids must be a sequence of token ids, not {type(token_ids).__name__}")
    ids = list(token_ids)
    validation.integer("the number of token_ids", len(ids), 1)
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= _MAX_TOKEN_ID:
        return ids  # a prompt has thousands: no look at each where all are right
    return [validation.integer(f"token_ids[{index}]", one, 0, _MAX_TOKEN_ID) for index, one in enumerate(ids)]
