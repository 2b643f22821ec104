"""Packed weights in files: later loads map them, and a file that is not exactly right is never used."""

from __future__ import annotations

import fcntl
import os
import re
import resource
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from paceline import LLM
from paceline.errors import InvalidType
from paceline.runtime import Context, Model, build_info
from paceline.runtime.matmul import kernel, kernels, use_kernel
from paceline.testing.models import LlamaSpec, Qwen2MoeSpec, write_model

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not build_info().own_matmul, reason="built without it: another tree or compiler"),
    pytest.mark.skipif(not kernels(), reason="this processor runs none of the kernels"),
]
HEAD = struct.Struct("8sQ32sQQQQQ")  # magic, version, key, layouts, tensors, offset and bytes of the data, checksum
TENSOR = struct.Struct("64sQ4qQ")
Logits = npt.NDArray[np.floating[Any]]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = kernel()
    use_kernel("paceline")
    yield
    use_kernel(before)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A model whose weights are packed."""
    return write_model(tmp_path / "model.gguf", LlamaSpec(n_embd=128, n_ff=224), weights="Q8_0")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "packed"


def logits_of(model: Model) -> Logits:
    with Context(model, n_ctx=64, n_batch=32, n_threads=2) as context:
        context.decode(list(range(7, 17)))
        return context.logits(9).copy()


def loaded(path: Path, folder: Path | None = None, **options: Any) -> tuple[bool, Logits]:
    """Load a model and close it; return whether a file of packed weights was used, and logits."""
    with Model.load(path, packed_cache=folder, **options) as model:
        return model.is_packed_cache_used, logits_of(model)


def file_in(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


@pytest.mark.parametrize(
    "spec", [LlamaSpec(n_embd=128, n_ff=224), Qwen2MoeSpec(n_embd=128)], ids=lambda spec: type(spec).__name__
)
def test_the_second_load_maps_what_the_first_one_packed(tmp_path: Path, folder: Path, spec: Any) -> None:
    """The first load writes one file, for its owner alone; the second uses it and computes the same bits."""
    path = write_model(tmp_path / "model.gguf", spec, weights="Q8_0")
    _, expected = loaded(path)
    for is_used in (False, True, True):
        assert loaded(path, folder)[0] is is_used
        assert np.array_equal(loaded(path, folder)[1], expected)
        assert file_in(folder).suffix == ".packed"
        assert file_in(folder).stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_the_weights_are_those_of_the_file(path: Path, folder: Path) -> None:
    """A mapped file is read-only and no memory of the process; it is unmapped with the model."""
    loaded(path, folder)
    mapping = re.compile(rf"r--p .*{re.escape(str(file_in(folder)))}$", re.MULTILINE)
    with Model.load(path, packed_cache=folder) as model:
        logits_of(model)
        assert mapping.search(Path("/proc/self/maps").read_text(encoding="utf-8"))
    del model
    assert not mapping.search(Path("/proc/self/maps").read_text(encoding="utf-8"))


def flipped(at: int) -> Callable[[bytearray], None]:
    def flip(data: bytearray) -> None:
        data[at] ^= 0x10

    return flip


def cut_to(share: float) -> Callable[[bytearray], None]:
    def cut(data: bytearray) -> None:
        del data[int(len(data) * share) :]

    return cut


DAMAGES: dict[str, Callable[[bytearray], None]] = {
    "empty": cut_to(0),
    "a part of the head": cut_to(0.00001),
    "without data": cut_to(0.5),
    "without its end": lambda data: data.__delitem__(slice(len(data) - 1, None)),
    "longer": lambda data: data.append(0),
    "foreign": lambda data: data.__setitem__(slice(None), b"GGUF" + os.urandom(100_000)),
    "zeros instead of data": lambda data: data.__setitem__(slice(2 << 20, None), bytes(len(data) - (2 << 20))),
    "another version": flipped(8),
    "another key": flipped(20),
    "another layout": flipped(50),
    "number of tensors": flipped(57),
    "very many tensors": flipped(62),
    "offset": flipped(64),
    "size": flipped(72),
    "checksum of the head": flipped(80),
    "a tensor's name": flipped(HEAD.size + 3),
    "a tensor's offset": flipped(HEAD.size + TENSOR.size - 8),
    "first byte of the data": flipped(2 << 20),
    "a bit of the data": flipped((2 << 20) + 12_345),
    "last byte of the data": flipped(-1),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_written_anew(
    path: Path, folder: Path, damage: Callable[[bytearray], None], caplog: pytest.LogCaptureFixture
) -> None:
    """It is not used, the log says so, the outputs are right, and the next load has a right file again."""
    _, expected = loaded(path, folder)
    file = file_in(folder)
    before = file.read_bytes()
    data = bytearray(before)
    damage(data)
    assert data != before
    file.write_bytes(data)
    is_used, logits = loaded(path, folder)
    assert not is_used
    assert "are not used" in caplog.text
    assert np.array_equal(logits, expected)
    assert file_in(folder).read_bytes() == before
    is_used, logits = loaded(path, folder)
    assert is_used
    assert np.array_equal(logits, expected)


def checksum(*parts: bytes) -> int:
    """Return the checksum of bytes that are added one after the other, as packed_file.cpp computes it."""
    mask, multiplier = 2**64 - 1, 0x9E3779B97F4A7C15

    def rotated(value: int, bits: int) -> int:
        return (value << bits | value >> (64 - bits)) & mask

    def step(state: int, word: int) -> int:
        return rotated(state ^ word, 27) * multiplier & mask

    lanes = [1, 2, 3, 4]
    for part in parts:
        whole = len(part) // 32 * 32
        for index, word in enumerate(struct.unpack(f"<{whole // 8}Q", part[:whole])):
            lanes[index % 4] = step(lanes[index % 4], word)
        for byte in part[whole:]:
            lanes[0] = step(lanes[0], byte)
    total = 0
    for lane in lanes:
        total = step(rotated(total, 17), lane ^ lane >> 32)
    return total ^ total >> 29


def test_tensors_that_a_file_has_elsewhere_are_packed(path: Path, folder: Path) -> None:
    """If a file is intact but lists another tensor, this tensor alone is packed, into a copy of its pages."""
    _, expected = loaded(path, folder)
    file = file_in(folder)
    data = bytearray(file.read_bytes())
    *facts, found = HEAD.unpack_from(data)
    num_tensors, data_offset, data_bytes = facts[4:7]
    tensors = slice(HEAD.size, HEAD.size + num_tensors * TENSOR.size)
    sums = slice(tensors.stop, tensors.stop + 8)
    assert data_bytes <= 4 << 20, "there is a single chunk"

    def head_checksum() -> int:
        return checksum(HEAD.pack(*facts, 0), bytes(data[tensors]), bytes(data[sums]))

    assert head_checksum() == found
    second = HEAD.size + TENSOR.size
    data[second : second + 4] = b"none"
    data[data_offset + TENSOR.unpack_from(data, second)[-1]] ^= (
        0xFF  # wrong weights of the tensor, with right checksums
    )
    data[sums] = checksum(bytes(data[data_offset:])).to_bytes(8, "little")
    data[: HEAD.size] = HEAD.pack(*facts, head_checksum())
    file.write_bytes(data)
    is_used, logits = loaded(path, folder)
    assert is_used
    assert np.array_equal(logits, expected)
    assert file_in(folder).read_bytes() != bytes(data)  # it was written anew
    assert np.array_equal(loaded(path, folder)[1], expected)


def test_another_model_in_the_place_of_the_file_is_packed(tmp_path: Path, path: Path, folder: Path) -> None:
    """A model's file with other weights, of the same length and the same time of change, does not get the old weights."""
    _, old = loaded(path, folder)
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[-2000:] = bytes(byte ^ 1 for byte in data[-2000:])
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    _, expected = loaded(path)
    is_used, logits = loaded(path, folder)
    assert not is_used
    assert np.array_equal(logits, expected)
    assert not np.array_equal(logits, old)
    assert loaded(path, folder)[0]
    assert len(list(folder.iterdir())) == 1


def test_other_options_have_a_file_of_their_own(path: Path, folder: Path) -> None:
    """Overrides of metadata and of places do not share a file, so that two servers do not write in turns."""
    for options in ({}, {"kv_overrides": {"general.name": "other"}}, {"tensor_overrides": {"ffn_up": "CPU"}}):
        assert not loaded(path, folder, **options)[0]
    assert len(list(folder.iterdir())) == 3
    assert loaded(path, folder)[0]


def test_nothing_is_written_if_nothing_is_packed(path: Path, folder: Path) -> None:
    """Neither with llama.cpp's products, nor without repacking, nor if no weights are loaded."""
    for options in ({"use_extra_bufts": False}, {"vocab_only": True}, {"no_alloc": True}):
        with Model.load(path, packed_cache=folder, **options) as model:
            assert not model.is_packed_cache_used
    use_kernel("llama.cpp")
    assert not loaded(path, folder)[0]
    assert not folder.exists()


def test_a_file_that_another_process_writes_is_left_to_it(
    path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The load goes on without a file."""
    _, expected = loaded(path)
    loaded(path, folder)
    part = file_in(folder)
    part = part.rename(f"{part}.part")
    with part.open("r+b") as writing:
        fcntl.flock(writing, fcntl.LOCK_EX)
        is_used, logits = loaded(path, folder)
        assert not is_used
        assert np.array_equal(logits, expected)
        assert "another process writes it" in caplog.text
        assert file_in(folder) == part
    assert not loaded(path, folder)[0]  # what a killed process left behind
    assert loaded(path, folder)[0]
    assert not part.exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_no_error(
    path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file there is used all the same."""
    folder.mkdir(mode=0o500)
    assert not loaded(path, folder)[0]
    assert "were not written" in caplog.text
    folder.chmod(0o700)
    loaded(path, folder)
    folder.chmod(0o500)
    assert loaded(path, folder)[0]
    folder.chmod(0o700)


def test_a_folder_that_cannot_be_made_is_no_error(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log says so, and weights are packed."""
    _, expected = loaded(path)
    is_used, logits = loaded(path, path / "packed")
    assert not is_used
    assert np.array_equal(logits, expected)
    assert "cannot be made" in caplog.text


def test_a_disk_that_is_full_leaves_no_file(path: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the file cannot be written whole, none is left, and the model is loaded."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    _, expected = loaded(path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # writes beyond it fail
    try:
        _, logits = loaded(path, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert np.array_equal(logits, expected)
    assert "were not written" in caplog.text
    assert list(folder.iterdir()) == []


def test_a_wrong_type_is_refused(path: Path) -> None:
    """The folder is a path."""
    with pytest.raises(InvalidType, match="packed_cache must be a path"):
        Model.load(path, packed_cache=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_an_engine_uses_the_file(tmp_path: Path, path: Path, folder: Path, isolation: Any) -> None:
    """The tokens are the same, and the model says that the file was used."""
    tokens = []
    for options in ({}, {"packed_cache": folder}, {"packed_cache": folder}):
        with LLM(path, n_ctx=128, num_slots=1, isolation=isolation, **options) as llm:
            tokens.append(llm.generate([7, 8, 9], max_tokens=12, temperature=0.0, ignore_eos=True).token_ids)
            is_used = llm.model.is_packed_cache_used
    assert is_used
    assert tokens[0] == tokens[1] == tokens[2]
