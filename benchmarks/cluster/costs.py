"""The cost of routing: a request at the router, a report at the router, a digest on the engine's thread.

python -m benchmarks.cluster.costs

Medians of 200 calls. Every replica has 8,184 hashes, all that fit into 64 KiB, half of them common to all replicas; a prompt
has 4,096 tokens, of which replicas have different parts. The engine's tree has 100 sequences of 2,000 tokens with the first 1,000
in common.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from random import Random

from paceline.cluster import BLOCK_TOKENS, DigestPublisher, ReplicaLoad, ReplicaReport, Router, hash_prompt
from paceline.kv_cache import HashedPrefix, PrefixDigest, pack_tokens
from paceline.kv_cache.radix_tree import RadixTree
from paceline.request import RequestOptions

LOAD = ReplicaLoad(
    num_slots=8,
    num_running=4,
    num_waiting=0,
    waiting_tokens=500,
    free_cells=20_000,
    prefill_token_s=0.001,
    tick_s=0.02,
    slot_s=1.0,
)


class Sequence:
    """The owner of a path in the tree."""

    seq_id = 1
    num_computed_tokens = 1 << 30


def median_ms(do: Callable[[], object]) -> float:
    """Return the median time of 200 calls."""
    times = []
    for _ in range(200):
        start_s = time.perf_counter()
        do()
        times.append(time.perf_counter() - start_s)
    return 1000 * statistics.median(times)


def digest_of(hashes: list[int]) -> PrefixDigest:
    """Return a digest of these hashes."""
    return PrefixDigest(tuple(HashedPrefix(f"{value:016x}{0:016x}", BLOCK_TOKENS) for value in hashes))


def route(num_replicas: int) -> None:
    """Print the cost of a request and of a report by the number of replicas."""
    random = Random(1)
    token_ids = [random.randrange(150_000) for _ in range(4096)]
    prompt = hash_prompt(token_ids, RequestOptions())
    common = [random.getrandbits(64) for _ in range(4092)]
    router, names, publishers = Router(random), [f"r{place}" for place in range(num_replicas)], []
    for place, name in enumerate(names):
        part = list(prompt.hashes[: place % 64])
        own = [random.getrandbits(64) for _ in range(4092 - len(part))]
        publisher = DigestPublisher(1)
        update = publisher.publish(digest_of(part + common + own))
        publishers.append((publisher, part + common + own))
        router.observe(name, ReplicaReport(state="ready", load=LOAD, updates=(update,)), 0.0)

    def one_request() -> None:
        blocks = hash_prompt(token_ids, RequestOptions())
        router.note_routed(router.rank(blocks, names, 1.0)[0], blocks, 1.0)

    now_s = [1.0]

    def one_report() -> None:
        publisher, hashes = publishers[0]
        hashes[-100:] = [random.getrandbits(64) for _ in range(100)]
        now_s[0] += 1
        report = ReplicaReport(state="ready", load=LOAD, updates=(publisher.publish(digest_of(hashes)),))
        start_s = time.perf_counter()
        router.observe("r0", report, now_s[0])
        observed.append(1000 * (time.perf_counter() - start_s))

    observed: list[float] = []
    hashing_ms = median_ms(lambda: hash_prompt(token_ids, RequestOptions()))
    request_ms = median_ms(one_request)
    median_ms(one_report)
    print(
        f"{num_replicas:3} replicas: {request_ms:.2f} ms a request, {hashing_ms:.2f} ms of it hashing; "
        f"{statistics.median(observed):.2f} ms a report of 100 new hashes"
    )


def digest() -> None:
    """Print the cost of a digest on the engine's thread."""
    random, tree = Random(1), RadixTree()
    head = [random.randrange(150_000) for _ in range(1000)]
    for _ in range(100):
        path = pack_tokens(head + [random.randrange(150_000) for _ in range(1000)])
        tree.add_owner(Sequence(), tree.insert(((), "", ""), path))

    def digest_of_tree(max_prefixes: int) -> PrefixDigest:
        return tree.block_digest(max_prefixes, BLOCK_TOKENS, needs_cells=True, needs_state=False)

    for size in (1024, 8184):
        took_ms = median_ms(partial(digest_of_tree, size))
        num_blocks = len(digest_of_tree(size).prefixes)
        print(f"digest of at most {size}: {num_blocks} blocks, {took_ms:.2f} ms on the engine's thread")


if __name__ == "__main__":
    for number in (4, 16, 64):
        route(number)
    digest()
