"""Lookup caches: counted as a plain counter counts, written and read in llama.cpp's format, refused where they are damaged."""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np
import pytest

from paceline.errors import InvalidParams
from paceline.speculation.drafters.lookup_cache import LookupCache

Counts = Mapping[tuple[int, ...], Mapping[int, int]]


def written(counts: Counts) -> bytes:
    """The format by its definition, record after record."""
    data = b""
    for ngram, followers in counts.items():
        data += struct.pack("4i", *[*ngram, -1, -1, -1][:4]) + struct.pack("i", len(followers))
        data += b"".join(struct.pack("2i", *pair) for pair in followers.items())
    return data


def contents(cache: LookupCache) -> dict[tuple[int, ...], dict[int, int]]:
    found: dict[tuple[int, ...], dict[int, int]] = {}
    for ngram, token, count in zip(cache.ngrams.tolist(), cache.tokens.tolist(), cache.counts.tolist(), strict=True):
        found.setdefault(tuple(item for item in ngram if item >= 0), {})[token] = count
    return found


def counted(pieces: Iterable[list[int]]) -> LookupCache:
    """Of sequences all of whose tokens are new, each behind a separator."""
    tokens = [token for piece in pieces for token in (-1, *piece)]
    return LookupCache.counted(np.array(tokens, np.int32), np.array([token >= 0 for token in tokens]))


def oracle(pieces: Iterable[list[int]]) -> dict[tuple[int, ...], Counter[int]]:
    found: dict[tuple[int, ...], Counter[int]] = {}
    for piece in pieces:
        for size in (1, 2, 3, 4):
            for at in range(size, len(piece)):
                found.setdefault(tuple(piece[at - size : at]), Counter())[piece[at]] += 1
    return found


@pytest.mark.parametrize("seed", range(4))
def test_counts_are_those_of_a_counter(seed: int) -> None:
    """Also after they were written, read and added up."""
    source = random.Random(seed)
    pieces = [[source.randrange(5) for _ in range(source.randrange(30))] for _ in range(20)]
    cache = counted(pieces)
    assert contents(cache) == oracle(pieces)
    assert contents(LookupCache.parse(cache.to_bytes(), "it")) == oracle(pieces)
    halves = counted(pieces[:7]).merged(counted(pieces[7:]))
    assert contents(halves) == oracle(pieces)
    assert halves.to_bytes() == cache.to_bytes()


def test_only_what_is_new_is_counted() -> None:
    """What was before is context; what a separator or an image stands between did not follow each other."""
    tokens = np.array([-1, 1, 2, 3, 4, -1, 5, 6, -9, 7], np.int32)
    is_new = np.array([False, False, False, True, True, False, True, True, True, True])
    assert contents(LookupCache.counted(tokens, is_new)) == {
        (2,): {3: 1}, (1, 2): {3: 1}, (3,): {4: 1}, (2, 3): {4: 1}, (1, 2, 3): {4: 1}, (5,): {6: 1},
    }  # fmt: skip
    for few in ([], [3], [3, -1]):
        cache = LookupCache.counted(np.array(few, np.int32), np.ones(len(few), np.bool_))
        assert len(cache) == 0
        assert cache.to_bytes() == b""


FILE: Counts = {(5,): {6: 3, 7: 1}, (1, 2): {3: 70_000}, (1, 2, 3, 4): {5: 1, 6: 2, 0: 9}, (1, 3): {4: 2, 5: 2}}


def test_files_are_llama_cpps() -> None:
    """In whatever order their records are; a pair that is there twice counts twice."""
    cache = LookupCache.parse(written(FILE), "it")
    assert contents(cache) == FILE
    assert contents(LookupCache.parse(written(FILE) * 2, "it"))[5,] == {6: 6, 7: 2}
    assert len(LookupCache.parse(b"", "it")) == 0
    records = cache.to_bytes()
    assert contents(LookupCache.parse(records, "it")) == FILE
    assert len(records) == len(written(FILE))


def test_the_most_frequent_follower_of_each_ngram() -> None:
    """With the count of all of them."""
    found = LookupCache.parse(written(FILE), "it").followers(4)
    assert found.ngrams.tolist() == [[1, 2, 3, 4]]
    assert (found.tokens.tolist(), found.best.tolist(), found.total.tolist()) == ([0], [9], [12])
    pairs = LookupCache.parse(written(FILE), "it").followers(2)
    assert pairs.ngrams.tolist() == [[1, 2], [1, 3]]
    assert (pairs.best.tolist(), pairs.total.tolist()) == ([70_000, 2], [70_000, 4])
    assert len(LookupCache.empty().followers(1).tokens) == 0


def test_the_most_frequent_pairs_are_kept() -> None:
    """Where more were there than may be written."""
    cache = LookupCache.parse(written(FILE), "it")
    assert contents(cache.most_frequent(3)) == {(5,): {6: 3}, (1, 2): {3: 70_000}, (1, 2, 3, 4): {0: 9}}
    assert cache.most_frequent(100) is cache


def test_counts_beyond_32_bits_stay_the_most_that_there_is() -> None:
    """The format has no room for more."""
    cache = LookupCache.parse(written({(1,): {2: 2**31 - 1}}), "it")
    assert contents(cache.merged(cache)) == {(1,): {2: 2**31 - 1}}


GOOD = written({(1, 2): {3: 4}})


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (GOOD[:-1], "at byte 24 it ends within a number"),
        (GOOD[:-4], "at byte 0 it ends before the 1 followers"),
        (GOOD + GOOD[:8], "at byte 28 it ends within an n-gram"),
        (GOOD + GOOD[:16], "at byte 28 it ends within an n-gram"),
        (GOOD + written({(1, 2): {}}), "at byte 28 an n-gram is said to have 0 followers"),
        (struct.pack("7i", 1, 2, -1, -1, 2**31 - 1, 3, 4), "it ends before the 2147483647 followers"),
        (struct.pack("7i", 1, 2, -1, -1, -5, 3, 4), "-5 followers"),
        (struct.pack("7i", -1, -1, -1, -1, 1, 3, 4), r"\[-1, -1, -1, -1\] is no n-gram"),
        (struct.pack("7i", 1, -1, 2, -1, 1, 3, 4), r"\[1, -1, 2, -1\] is no n-gram"),
        (GOOD + struct.pack("7i", 1, 2, -7, -1, 1, 3, 4), r"at byte 28 \[1, 2, -7, -1\] is no n-gram"),
        (GOOD + struct.pack("7i", 1, 2, -1, -1, 1, -3, 4), "at byte 48 token -3 is said to have followed 4 times"),
        (struct.pack("9i", 1, 2, -1, -1, 2, 3, 4, 5, 0), "at byte 28 token 5 is said to have followed 0 times"),
        (b"GGUF" + bytes(60), "is damaged, or no lookup cache"),
    ],
)
def test_damaged_files_are_refused_with_the_place(data: bytes, says: str) -> None:
    """And the name, and the way out."""
    with pytest.raises(InvalidParams, match=says) as raised:
        LookupCache.parse(data, "the file")
    assert str(raised.value).startswith("the file is damaged")
    assert str(raised.value).endswith("leave it out")


@pytest.mark.parametrize("seed", range(20))
def test_random_damage_is_refused_or_read(seed: int) -> None:
    """No other error comes of it, and what is read has tokens and counts in range."""
    source = random.Random(seed)
    data = bytearray(written(FILE))
    for _ in range(source.randrange(1, 4)):
        data[source.randrange(len(data))] = source.randrange(256)
    try:
        cache = LookupCache.parse(bytes(data[: source.randrange(len(data) + 1)]), "it")
    except InvalidParams:
        return
    assert (cache.counts >= 1).all()
    assert (cache.tokens >= 0).all()


def test_tokens_of_another_vocabulary_are_refused() -> None:
    """Whether they are in n-grams or behind them."""
    cache = LookupCache.parse(written(FILE), "the file")
    cache.check_fits(8, "the file")
    with pytest.raises(
        InvalidParams, match=r"the file has token 7, and the model's vocabulary has 7: .* another model"
    ):
        cache.check_fits(7, "the file")
    LookupCache.empty().check_fits(1, "it")
