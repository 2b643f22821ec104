"""Digests that travel: their contents, their size, and a router's index after late, lost or doubled updates."""

from __future__ import annotations

import msgspec
import pytest

from paceline.cluster import DigestPublisher, DigestUpdate
from paceline.cluster.prefix_digest import PrefixIndex, shortened
from paceline.errors import InvalidParams
from paceline.kv_cache import MAX_DIGEST_PREFIXES, HashedPrefix, PrefixDigest

BYTES = 64 + 8 * 4  # four hashes
TOO_MANY = b"".join(number.to_bytes(8, "little") for number in range(MAX_DIGEST_PREFIXES + 1))


def hash_of(number: int) -> str:
    return f"{number:016x}{0:016x}"


def digest(*numbers: int) -> PrefixDigest:
    """A digest of prefixes with these hashes."""
    return PrefixDigest(tuple(HashedPrefix(hash_of(number), 64) for number in numbers))


def cached(index: PrefixIndex, numbers: range = range(1, 20), replica_id: str = "a") -> set[int]:
    """Return the cached hashes that the index has of a replica."""
    return {number for number in numbers if index.matched_blocks([number], [replica_id])}


def test_only_what_changed_travels() -> None:
    """First all, then the changes; nothing without a change."""
    publisher = DigestPublisher(1)
    first = publisher.publish(digest(1, 2, 3, 4))
    assert (first.is_snapshot, len(first.added), first.removed) == (True, 32, b"")
    second = publisher.publish(digest(1, 2, 3, 5))
    assert (second.base, second.version, len(second.added), len(second.removed)) == (first.version, 2, 8, 8)
    same = publisher.publish(digest(1, 2, 3, 5))
    assert (same.version, same.added, same.removed) == (second.version, b"", b"")
    assert shortened(hash_of(5)) == int.from_bytes(second.added, "little") == 5


def test_an_empty_cache_is_a_digest_as_well() -> None:
    """A router that knows nothing can go on from it."""
    publisher, index = DigestPublisher(1), PrefixIndex(100)
    assert index.apply("a", publisher.publish(digest()))
    assert index.apply("a", publisher.publish(digest()))
    assert index.apply("a", publisher.publish(digest(1)))
    assert cached(index) == {1}


def test_what_changed_wholly_travels_as_a_snapshot() -> None:
    """If all is different, naming the removed hashes would cost more."""
    publisher = DigestPublisher(1)
    publisher.publish(digest(1, 2))
    assert publisher.publish(digest(3, 4)).is_snapshot
    assert publisher.publish(digest()).is_snapshot


def test_the_longest_prefixes_are_left_out_where_not_all_fit() -> None:
    """No update is larger than it may be, encoded, and the index has the first hashes."""
    publisher, index = DigestPublisher(2**62, BYTES), PrefixIndex(100)
    assert publisher.max_prefixes == 4
    for numbers in ((1, 2, 3, 4, 5, 6), (1, 2, 7, 8, 9), (10, 11, 12, 13, 14, 15)):
        update = publisher.publish(digest(*numbers))
        assert len(msgspec.msgpack.encode(update)) <= BYTES
        assert index.apply("a", update)
        assert cached(index) == set(numbers[:4])


def test_an_update_is_the_same_after_its_way_over_the_wire() -> None:
    """In msgpack."""
    update = DigestPublisher(3).publish(digest(1, 2**64 - 1))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(update), type=DigestUpdate) == update


def test_after_a_gap_the_old_digest_stays_until_a_snapshot_comes() -> None:
    """A missing update makes later updates useless, and nothing else."""
    publisher, index = DigestPublisher(1), PrefixIndex(100)
    assert index.apply("a", publisher.publish(digest(1, 2, 3, 4)))
    publisher.publish(digest(1, 2, 3, 5))  # lost
    assert not index.apply("a", publisher.publish(digest(1, 2, 3, 6)))
    assert cached(index) == {1, 2, 3, 4}
    assert index.apply("a", publisher.snapshot())
    assert cached(index) == {1, 2, 3, 6}
    assert index.apply("a", publisher.publish(digest(1, 2, 3, 7)))
    assert cached(index) == {1, 2, 3, 7}


def test_what_comes_twice_or_too_late_changes_nothing() -> None:
    """Older versions of the same life are known already."""
    publisher, index = DigestPublisher(1), PrefixIndex(100)
    updates = [publisher.publish(digest(1, 2, 3, 4, number)) for number in (5, 6, 7)]
    for update in [*updates, *updates, *reversed(updates)]:
        assert index.apply("a", update)
    assert index.apply("a", updates[0])
    assert cached(index) == {1, 2, 3, 4, 7}


def test_a_restarted_replica_has_nothing_of_its_former_life() -> None:
    """Neither its reports nor its expected prefixes; its updates need a snapshot first."""
    index = PrefixIndex(100)
    assert index.apply("a", DigestPublisher(1).publish(digest(1, 2, 3)))
    index.expect("a", [9], 100.0)
    restarted = DigestPublisher(2)
    assert index.apply("a", restarted.publish(digest(4)))
    assert cached(index) == {4}
    assert not index.apply("a", DigestUpdate(3, 5, 4, b"", b""))
    assert cached(index) == {4}


def test_replicas_are_apart_and_one_that_is_removed_leaves_nothing() -> None:
    """A later one may take its place."""
    index = PrefixIndex(100)
    for place, replica_id in enumerate("abc"):
        assert index.apply(replica_id, DigestPublisher(1).publish(digest(1, 2 + place)))
    index.expect("b", [1, 9], 100.0)
    index.remove("b")
    index.remove("never seen")
    assert [cached(index, replica_id=item) for item in "abc"] == [{1, 2}, set(), {1, 4}]
    assert index.apply("d", DigestPublisher(1).publish(digest(5)))
    assert [cached(index, replica_id=item) for item in "abcd"] == [{1, 2}, set(), {1, 4}, {5}]
    for replica_id in "acd":
        index.remove(replica_id)
    assert not index._holders


def test_the_longest_known_prefix_counts() -> None:
    """Of each replica; even if the blocks before it are not known, as with checkpoints."""
    index = PrefixIndex(100)
    assert index.apply("a", DigestPublisher(1).publish(digest(1, 2)))
    assert index.apply("b", DigestPublisher(1).publish(digest(3)))
    assert index.matched_blocks([1, 2, 3, 4], ["a", "b", "c"]) == {"a": 2, "b": 3}
    assert index.matched_blocks([1, 2, 3, 4], ["a"]) == {"a": 2}
    assert index.matched_blocks([], ["a"]) == index.matched_blocks([1], []) == {}


def test_what_is_expected_counts_until_a_report_can_have_it() -> None:
    """Then the digest alone says."""
    index = PrefixIndex(100)
    assert index.apply("a", DigestPublisher(1).publish(digest(1)))
    index.expect("a", [1, 2, 3], 5.0)
    assert cached(index) == {1, 2, 3}
    index.expect("a", [3], 7.0)
    index.settle("a", 5.0)
    assert cached(index) == {1, 3}
    index.settle("a", 7.0)
    assert cached(index) == {1}


def test_what_is_expected_stays_where_a_digest_lost_it() -> None:
    """A request that is on its way computes it again."""
    publisher, index = DigestPublisher(1), PrefixIndex(100)
    assert index.apply("a", publisher.publish(digest(1, 2, 3)))
    index.expect("a", [3], 5.0)
    assert index.apply("a", publisher.publish(digest(1, 2)))
    assert cached(index) == {1, 2, 3}
    index.settle("a", 5.0)
    assert cached(index) == {1, 2}


def test_what_is_expected_is_bounded() -> None:
    """The oldest is forgotten, if no report comes."""
    index = PrefixIndex(3)
    for number in range(1, 10):
        index.expect("a", [number], float(number))
        assert len(index._holders) <= 3
    assert cached(index) == {7, 8, 9}
    index.expect("a", [1, 2, 3, 4, 5], 20.0)
    assert cached(index) == {3, 4, 5}


@pytest.mark.parametrize(
    ("update", "named"),
    [
        (DigestUpdate(1, 9, None, b"1234567"), "added must have 8 bytes a hash, not 7 bytes"),
        (DigestUpdate(1, 9, 2, b"", b"1"), "removed must have 8 bytes"),
        (DigestUpdate(1, 0, None), "version"),
        (DigestUpdate(-1, 1, None), "epoch"),
        (DigestUpdate(1, 3, 4), "base"),
        (DigestUpdate(1, 9, None, TOO_MANY), "more than 65536 prefixes"),
    ],
)
def test_what_no_publisher_makes_is_refused_and_changes_nothing(update: DigestUpdate, named: str) -> None:
    """The error names the field; the next update is applied as if nothing had been."""
    publisher, index = DigestPublisher(1), PrefixIndex(100)
    assert index.apply("a", publisher.publish(digest(1, 2, 3)))
    with pytest.raises(InvalidParams, match=named):
        index.apply("a", update)
    assert cached(index) == {1, 2, 3}
    assert index.apply("a", publisher.publish(digest(1, 2, 4)))
    assert cached(index) == {1, 2, 4}


def test_sizes_that_hold_no_hash_are_refused() -> None:
    """And more than an engine's digest can have."""
    for wrong in (0, 71, 64 + 8 * MAX_DIGEST_PREFIXES + 1, 1.5):
        with pytest.raises(InvalidParams, match="max_bytes"):
            DigestPublisher(1, wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidParams, match="epoch"):
        DigestPublisher(-1)
    assert DigestPublisher(1, 72).max_prefixes == 1
