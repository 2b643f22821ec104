"""The KV cache: which tokens lie where, prefix caching, eviction, offload to host memory. Pure; knows no llama.cpp.

                match, allocate                      release                     offload, evict
    waiting ───────────────────────> running ──────────────────> cached prefix ──────────────────> host block ──> gone
                                        │ ^                          │                                │
                                        │ └──── shared (Copy) ───────┘          loaded (Load)         │
                                        └────────────── preempt, eager offload ──────────────────> ───┘

    place              content                                freed when
    running            cells under a sequence id of its own   its request ends, or it is preempted
    cached prefix      the same cells, without a sequence     idle ones cost speed, or cells or ids are needed
    host block         a range of cells, in bytes             the capacity is spent, least recently used first
    checkpoint         a state, in bytes                      as host blocks
    disk               copies of host blocks and checkpoints  the store decides; what is read again is a host block

The memory of some models (sliding window, recurrent, hybrid) cannot be cut: beside cells, it has a state that is valid at one
place. A sequence then starts from a checkpoint and the cells before it, or from a running sequence at its current place. This
kind of memory has no cached prefixes on the device: cells and checkpoints go to host memory. `KVCache` is the entry; the other
modules are private.
"""

from paceline.kv_cache.cache import KVCache
from paceline.kv_cache.device_cells import (
    CacheSequence,
    Copy,
    DiskLookup,
    KVCacheLimits,
    Load,
    LoadState,
    Operation,
    PendingPrefix,
    Remove,
    Save,
    SaveState,
    SequenceGroup,
    TransferOutput,
    Truncate,
)
from paceline.kv_cache.disk_lookups import DiskBlocks, DiskStore
from paceline.kv_cache.offload import BLOCK_TOKENS, MIN_CACHED_TOKENS, CacheTelemetry, ComputeCost
from paceline.kv_cache.prefix_match import NotAdmitted, PrefixMatch
from paceline.kv_cache.prompt_layout import TEXT_LAYOUT, MediaItem, PromptLayout
from paceline.kv_cache.radix_tree import (
    MAX_DIGEST_PREFIXES,
    TOKEN_BYTES,
    HashedPrefix,
    Namespace,
    PrefixDigest,
    SavedState,
    TenantTree,
    TreeNode,
    hash_blocks,
    hash_prefix,
    pack_tokens,
)

__all__ = [
    "BLOCK_TOKENS",
    "MAX_DIGEST_PREFIXES",
    "MIN_CACHED_TOKENS",
    "TEXT_LAYOUT",
    "TOKEN_BYTES",
    "CacheSequence",
    "CacheTelemetry",
    "ComputeCost",
    "Copy",
    "DiskBlocks",
    "DiskLookup",
    "DiskStore",
    "HashedPrefix",
    "KVCache",
    "KVCacheLimits",
    "Load",
    "LoadState",
    "MediaItem",
    "Namespace",
    "NotAdmitted",
    "Operation",
    "PendingPrefix",
    "PrefixDigest",
    "PrefixMatch",
    "PromptLayout",
    "Remove",
    "Save",
    "SaveState",
    "SavedState",
    "SequenceGroup",
    "TenantTree",
    "TransferOutput",
    "TreeNode",
    "Truncate",
    "hash_blocks",
    "hash_prefix",
    "pack_tokens",
]
