"""The files of saved prefixes: which adapters a prefix was computed with, versions, damage. Without an engine."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from paceline.engine.saved_prefixes import AppliedAdapters, StateFiles
from paceline.errors import StateError
from paceline.kv_cache import MediaItem, PromptLayout
from paceline.runtime import CellState

ONE, TWO = b"1" * 16, b"2" * 16
IDS = [5, 6, 7]
RANGES = [CellState(0, 3, np.arange(100, dtype=np.uint8))]


@pytest.fixture
def files(tmp_path: Path) -> StateFiles:
    return StateFiles(tmp_path, b"f" * 16)


@pytest.mark.parametrize("adapters", [(), ((ONE, 1.0),), ((ONE, 0.1), (TWO, -2.0)), ((ONE, 1.0), (ONE, 1.0))])
def test_a_prefix_is_read_with_the_adapters_of_which_it_was_written(
    files: StateFiles, tmp_path: Path, adapters: AppliedAdapters
) -> None:
    """The size that is returned is the file's."""
    assert files.write("p", IDS, RANGES, adapters) == (tmp_path / "p").stat().st_size
    ids, (state,), media = files.read("p", adapters)
    assert media == ()
    assert (ids, state.start, state.end, state.payload.tobytes()) == (IDS, 0, 3, RANGES[0].payload.tobytes())


@pytest.mark.parametrize(
    ("written", "wanted", "words"),
    [
        (
            (),
            ((ONE, 1.0),),
            "no LoRA adapter, and is to be loaded for the LoRA adapter 31313131 (scale 1.0); load it for",
        ),
        (
            ((ONE, 1.0),),
            (),
            "the LoRA adapter 31313131 (scale 1.0), and is to be loaded for no LoRA adapter; load it for",
        ),
        (((ONE, 1.0),), ((TWO, 1.0),), "for the LoRA adapter 32323232 (scale 1.0)"),
        (((ONE, 1.0),), ((ONE, 0.5),), "for the LoRA adapter 31313131 (scale 0.5)"),
        (((ONE, 1.0),), ((ONE, 1.0), (TWO, 1.0)), "for the LoRA adapters 31313131 (scale 1.0), 32323232 (scale 1.0)"),
        (((ONE, 1.0),) * 9, (), "31313131 (scale 1.0) and 5 more, and"),
    ],
)
def test_other_adapters_or_scales_are_refused(
    files: StateFiles, written: AppliedAdapters, wanted: AppliedAdapters, words: str
) -> None:
    """The error says with which it was computed and for which it was to be loaded."""
    files.write("p", IDS, RANGES, written)
    with pytest.raises(StateError) as caught:
        files.read("p", wanted)
    assert words in str(caught.value)


def test_a_list_of_adapters_that_was_changed_is_noticed(files: StateFiles, tmp_path: Path) -> None:
    """Whatever is made of it, the ranges belong to the adapters that they were written with."""
    files.write("p", IDS, RANGES, ((ONE, 1.0),))
    data = (tmp_path / "p").read_bytes()
    head = data[:12]
    forged: dict[bytes, AppliedAdapters] = {
        head + struct.pack("<I", 0) + data[40:]: (),
        head + struct.pack("<I16sd", 1, TWO, 1.0) + data[40:]: ((TWO, 1.0),),
        head + struct.pack("<I16sd", 1, ONE, 0.5) + data[40:]: ((ONE, 0.5),),
        head + struct.pack("<I", 2**32 - 1) + data[16:]: ((ONE, 1.0),),
    }
    for content, wanted in forged.items():
        (tmp_path / "p").write_bytes(content)
        with pytest.raises(StateError, match="adapters|is cut"):
            files.read("p", wanted)
    (tmp_path / "p").write_bytes(data)
    assert files.read("p", ((ONE, 1.0),))[0] == IDS


@pytest.mark.parametrize("adapters", [(), ((ONE, 1.0),)])
def test_a_prefix_has_its_media(files: StateFiles, tmp_path: Path, adapters: AppliedAdapters) -> None:
    """It belongs to them and to the projector; a list of them that is damaged or cut is noticed."""
    media = (MediaItem(1, 4, 2, b"picture"), MediaItem(6, 5, 5, b"", is_causal=False))
    ids = PromptLayout(media).keyed([9] * 12)
    ranges = [CellState(0, 5, RANGES[0].payload), CellState(5, 12, RANGES[0].payload)]
    size = files.write("p", ids, ranges, adapters, media)
    found = files.read("p", adapters)
    assert (found[0], found[2]) == (ids, media)
    assert [(part.start, part.end) for part in found[1]] == [(0, 5), (5, 12)]
    with pytest.raises(StateError, match="another model"):
        StateFiles(tmp_path, b"f" * 16, b"another projector").read("p", adapters)
    whole = (tmp_path / "p").read_bytes()
    assert len(whole) == size
    for place in range(16, 150):
        (tmp_path / "p").write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(StateError):
            files.read("p", adapters)
        (tmp_path / "p").write_bytes(whole[:place])
        with pytest.raises(StateError):
            files.read("p", adapters)


def test_files_of_other_versions_are_refused(files: StateFiles, tmp_path: Path) -> None:
    """The first version is any adapter's, so its prefixes are to be saved again."""
    files.write("p", IDS, RANGES)
    data = (tmp_path / "p").read_bytes()
    first = struct.pack("<4sII", b"PLPR", 1, 1) + data[16:]
    for content, words in (
        (first, "version 1, .*adapters; save it again"),
        (data[:4] + b"\x09" + data[5:], "version 9"),
    ):
        (tmp_path / "p").write_bytes(content)
        with pytest.raises(StateError, match=words):
            files.read("p")


def test_a_prefix_that_does_not_fit_into_host_memory_is_not_read(tmp_path: Path) -> None:
    """The file's size is compared before its states are read; one that fits is read."""
    state = CellState(0, 3, np.zeros(4 << 20, dtype=np.uint8))
    for host_bytes in (4 << 20, 2 << 20):
        files = StateFiles(tmp_path, b"f" * 16, host_bytes=host_bytes)
        files.write("p", IDS, [state])
        if host_bytes < state.nbytes:
            with pytest.raises(StateError, match="more than fit into host memory; raise host_cache_bytes"):
                files.read("p")
        else:
            assert files.read("p")[0] == IDS


@pytest.mark.parametrize("promised", [1 << 20, 1 << 40, 2**64 - 1])
def test_lengths_are_compared_with_the_file_before_anything_is_read(
    files: StateFiles, tmp_path: Path, promised: int
) -> None:
    """In a sparse file, with zeros that would be read as the rest of a state."""
    files.write("p", IDS, RANGES)
    data = bytearray((tmp_path / "p").read_bytes())
    data[16:24] = struct.pack("<Q", promised)
    with (tmp_path / "p").open("wb") as file:
        file.write(data)
        file.truncate(2 << 20)
    with pytest.raises(StateError, match="is cut|is damaged: it has"):
        files.read("p")


def test_a_read_only_folder_is_an_error_of_the_save(files: StateFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removing the file that was not written fails there as well, which must not hide the reason."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(StateError, match="cannot write the saved prefix 'p': Read-only file system"):
        files.write("p", IDS, RANGES)
