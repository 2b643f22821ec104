"""Files of lookup caches: read when an engine is made, proposed from, written when it ends, refused where they cannot be used."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.unit.speculation.test_lookup_cache import contents, written

from paceline.engine import saved_prefixes
from paceline.engine.saved_prefixes import LookupFiles
from paceline.errors import InvalidParams
from paceline.speculation.drafters.lookup_cache import LookupCache
from paceline.speculation.drafters.ngram import NgramDrafter
from paceline.speculation.drafters.shared_ngrams import NgramCacheDrafter

COMMON, OTHER = ((), "", ""), ((), "tenant", "")
N_VOCAB = 100
TEXT = [1, 2, 3, 4, 5, 6, 7, 8]


def loaded(**files: Path) -> tuple[NgramCacheDrafter, LookupFiles]:
    drafter = NgramCacheDrafter(table_mib=1, **{f"lookup_cache_{kind}": str(path) for kind, path in files.items()})
    found = LookupFiles((NgramDrafter(), drafter))
    found.put_in(N_VOCAB)
    return drafter, found


def proposed(drafter: NgramCacheDrafter, tokens: list[int], namespace: Any = COMMON) -> list[int]:
    drafter.begin_shared(99, tokens, namespace)
    found = drafter.propose(99, 4)
    drafter.end(99)
    return found


def said(drafter: NgramCacheDrafter, key: int, tokens: list[int], namespace: Any = COMMON) -> None:
    """A sequence that came in three parts and went."""
    drafter.begin_shared(key, tokens[:3], namespace)
    drafter.observe(key, tokens[3:5])
    drafter.observe(key, tokens[5:])
    drafter.end(key)


def test_what_was_learned_is_written_and_read_again(tmp_path: Path) -> None:
    """A file that is not there yet is made; each end adds to it."""
    path = tmp_path / "dynamic.bin"
    for num_before in range(3):
        drafter, files = loaded(dynamic=path)
        assert proposed(drafter, TEXT[:4]) == (TEXT[4:] if num_before >= 2 else [])
        drafter._sequences.clear()
        said(drafter, 1, TEXT)
        files.save()
        found = contents(LookupCache.parse(path.read_bytes(), "it"))
        assert found[4, 5] == {6: num_before + 1}
        assert found[5, 6, 7] == {8: num_before + 1}
    assert [path.name for path in tmp_path.iterdir()] == ["dynamic.bin"]


def test_what_other_tenants_say_is_neither_written_nor_found(tmp_path: Path) -> None:
    """The file belongs to requests without tenant, salt and adapters."""
    path = tmp_path / "dynamic.bin"
    path.write_bytes(written({(1, 2, 3, 4): {5: 9}}))
    drafter, files = loaded(dynamic=path)
    assert proposed(drafter, [1, 2, 3, 4]) == [5]
    assert proposed(drafter, [1, 2, 3, 4], OTHER) == []
    assert proposed(drafter, [1, 2, 3, 4], None) == []
    for key in range(3):
        said(drafter, key, [11, 12, 13, 14, 15, 16, 17], OTHER)
        said(drafter, 10 + key, [21, 22, 23, 24, 25, 26, 27], None)
    files.save()
    tokens = {token for ngram in contents(LookupCache.parse(path.read_bytes(), "it")) for token in ngram}
    assert tokens <= {1, 2, 3, 4}


def test_a_static_file_is_for_all_and_never_written(tmp_path: Path) -> None:
    """Its n-grams of 2 tokens, seen twice, in half of the cases; what is known otherwise comes first."""
    path = tmp_path / "static.bin"
    data = written(
        {(1, 2): {3: 1, 4: 1}, (2, 4): {5: 1}, (8, 9): {1: 2, 2: 1}, (6, 7): {8: 2000, 9: 1000}, (5,): {6: 99}}
    )
    path.write_bytes(data)
    drafter, files = loaded(static=path)
    for namespace in (COMMON, OTHER):
        assert proposed(drafter, [1, 2], namespace) in ([3], [4])
        assert proposed(drafter, [6, 7], namespace) == [8]
        assert proposed(drafter, [9, 8, 9], namespace) == [1]
        assert proposed(drafter, [2, 4], namespace) == []
        assert proposed(drafter, [3, 5], namespace) == []
        assert proposed(drafter, [2], namespace) == []
    for key in range(4):
        said(drafter, key, [30 + key, 6, 7, 5, 5, 5])
    assert proposed(drafter, [40, 6, 7])[:1] == [5]
    files.save()
    assert path.read_bytes() == data


def test_counts_of_a_file_count_as_if_they_had_been_learned(tmp_path: Path) -> None:
    """The same thresholds; large counts in their proportion, so that what is new can still change them."""
    path = tmp_path / "dynamic.bin"
    path.write_bytes(
        written({(1, 2, 3): {4: 1}, (2, 3, 4): {5: 2}, (5, 6): {7: 2_000_000, 8: 2_000_000}, (7,): {8: 10**9, 1: 5}})
    )
    drafter, _ = loaded(dynamic=path)
    assert proposed(drafter, [1, 2, 3]) == []
    assert proposed(drafter, [2, 3, 4]) == [5]
    assert proposed(drafter, [5, 6]) == []
    assert proposed(drafter, [7]) == [8]
    for key in range(100):
        said(drafter, key, [7, 9] * 100)
    assert proposed(drafter, [7])[:1] == [9]


@pytest.mark.parametrize(
    ("kind", "contents_of", "says"),
    [
        ("static", None, r"lookup_cache_static \S+ cannot be read: No such file"),
        ("static", b"x", r"lookup_cache_static \S+ is damaged"),
        ("dynamic", b"xxxx", r"lookup_cache_dynamic \S+ is damaged"),
        ("static", b"", "has no n-gram of 2 tokens"),
        ("static", written({(1,): {2: 5}}), "has no n-gram of 2 tokens"),
        ("static", written({(1, 2): {100: 5}}), "token 100, and the model's vocabulary has 100"),
        ("dynamic", written({(100,): {2: 5}}), "token 100, and the model's vocabulary has 100"),
    ],
)
def test_files_that_cannot_be_used_are_refused(tmp_path: Path, kind: str, contents_of: bytes | None, says: str) -> None:
    """By name; a dynamic one that is not there is none of them."""
    path = tmp_path / "cache.bin"
    if contents_of is not None:
        path.write_bytes(contents_of)
    with pytest.raises(InvalidParams, match=says):
        loaded(**{kind: path})
    assert [path.read_bytes() for path in tmp_path.iterdir()] == ([] if contents_of is None else [contents_of])


def test_places_that_no_file_can_be_written_to_are_refused(tmp_path: Path) -> None:
    """When the engine is made, not when it ends."""
    with pytest.raises(InvalidParams, match="no folder that can be written to"):
        loaded(dynamic=tmp_path / "none" / "cache.bin")
    with pytest.raises(InvalidParams, match="Is a directory"):
        loaded(dynamic=tmp_path)
    with pytest.raises(InvalidParams, match="lookup_cache_dynamic is empty"):
        NgramCacheDrafter(lookup_cache_dynamic="")


@pytest.mark.skipif(sys.platform == "win32", reason="permissions and pipes of POSIX")
def test_a_file_keeps_its_permissions_and_a_link_to_it_stays(tmp_path: Path) -> None:
    """A new one is its owner's alone: it shows what requests said."""
    new, old, link = tmp_path / "new.bin", tmp_path / "shared" / "old.bin", tmp_path / "link.bin"
    old.parent.mkdir()
    old.write_bytes(b"")
    old.chmod(0o664)
    link.symlink_to(old)
    for path in (new, link):
        drafter, files = loaded(dynamic=path)
        said(drafter, 1, TEXT)
        files.save()
    assert [item.stat().st_mode & 0o777 for item in (new, old)] == [0o600, 0o664]
    assert link.is_symlink()
    assert new.read_bytes() == old.read_bytes() != b""
    assert [path.name for path in old.parent.iterdir()] == ["old.bin"]


def test_where_nothing_was_learned_nothing_is_written(tmp_path: Path) -> None:
    """Neither a new file, nor one in the place of another that somebody has changed since."""
    path = tmp_path / "dynamic.bin"
    _, files = loaded(dynamic=path)
    files.save()
    assert not path.exists()
    path.write_bytes(written({(1, 2): {3: 4}}))
    _, files = loaded(dynamic=path)
    path.write_bytes(written({(5, 6): {7: 8}}))
    files.save()
    assert path.read_bytes() == written({(5, 6): {7: 8}})


@pytest.mark.skipif(sys.platform == "win32", reason="lengths of names are others")
def test_a_long_name_can_be_written_to(tmp_path: Path) -> None:
    """What is written beside it first has a short one."""
    path = tmp_path / ("x" * 255)
    drafter, files = loaded(dynamic=path)
    said(drafter, 1, TEXT)
    files.save()
    assert path.stat().st_size > 0


@pytest.mark.skipif(sys.platform == "win32", reason="lengths of names are others")
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_paths_that_cannot_be_looked_up_are_refused(tmp_path: Path, kind: str) -> None:
    """By the option's name: one that is too long, and one with a NUL."""
    with pytest.raises(InvalidParams, match=rf"lookup_cache_{kind} \S+ cannot be read: File name too long"):
        loaded(**{kind: tmp_path / ("x" * 300)})
    with pytest.raises(InvalidParams, match=rf"lookup_cache_{kind} .* cannot be read: .*null"):
        loaded(**{kind: tmp_path / "a\0b"})


@pytest.mark.skipif(sys.platform == "win32", reason="permissions and pipes of POSIX")
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_what_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    """A folder, and a pipe, whose writer is not waited for."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (tmp_path, pipe):
        with pytest.raises(
            InvalidParams, match=rf"lookup_cache_{kind} \S+ cannot be read: (Is a directory|it is a pipe)"
        ):
            loaded(**{kind: path})


def test_a_file_of_which_not_all_will_be_kept_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """When it is read, before anything is lost."""
    path = tmp_path / "dynamic.bin"
    path.write_bytes(written({(1, 2): {3: 4, 4: 4}, (2, 3): {4: 1}}))
    for most, num_warnings in ((3, 0), (2, 1)):
        monkeypatch.setattr(saved_prefixes, "_MOST_PAIRS", most)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "paceline.engine"):
            loaded(dynamic=path)
        assert len(caplog.messages) == num_warnings
    assert "more than 2 pairs: only the most frequent are kept" in caplog.text


def test_files_beyond_the_most_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before they are read."""
    path = tmp_path / "cache.bin"
    with path.open("wb") as file:
        file.truncate(300 << 20)
    with pytest.raises(InvalidParams, match=f"it has more than {256 << 20} bytes"):
        loaded(static=path)
    path.unlink()
    monkeypatch.setattr(saved_prefixes, "_MOST_PAIRS", 5)
    drafter, files = loaded(dynamic=path)
    said(drafter, 1, [1, 2, 1, 2, 1, 2, 1, 2])
    files.save()
    found = LookupCache.parse(path.read_bytes(), "it")
    assert len(found) == 5
    assert found.counts.min() >= 2


def test_a_file_that_can_no_longer_be_written_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged, and nothing is raised where an engine ends."""
    path = tmp_path / "cache.bin"
    before = written({(1, 2): {3: 4}})
    path.write_bytes(before)
    drafter, files = loaded(dynamic=path)
    said(drafter, 1, TEXT)

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with caplog.at_level(logging.ERROR, "paceline.engine"):
        files.save()
    assert "what was learned is lost: [Errno 28] No space left" in caplog.text
    assert path.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["cache.bin"]


def test_no_more_than_the_newest_tokens_are_kept_to_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory does not grow with the requests; without a file nothing is kept at all."""
    from paceline.speculation.drafters import shared_ngrams

    monkeypatch.setattr(shared_ngrams, "_MOST_TO_SAVE", 40)
    drafter, files = loaded(dynamic=tmp_path / "cache.bin")
    for key in range(50):
        said(drafter, key, [key, key + 1, key, key + 1, key])
    assert drafter._num_to_save <= 40
    files.save()
    found = contents(LookupCache.parse((tmp_path / "cache.bin").read_bytes(), "it"))
    assert (49,) in found
    assert (10,) not in found
    plain = NgramCacheDrafter(table_mib=1)
    said(plain, 1, TEXT)
    assert not plain._to_save
