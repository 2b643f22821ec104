"""Headers on the network that promise too much, and servers with impossible claims: an error, soon and in little memory."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
from tests.hub.stand_in_hub import StandInHub
from tests.hub.test_commands import invoke

from paceline.errors import HubUnavailable, ModelLoadError
from paceline.hub import remote_header
from paceline.hub.network import content_range, whole_number
from paceline.hub.remote_header import model_headers
from paceline.runtime.gguf_file import read_gguf_start
from paceline.testing.models import LlamaSpec, write_model

HUGE = 1 << 60
LARGE = 1 << 38  # of what a file of 16 TiB could hold
STRING, ARRAY, UINT8, FLOAT64 = 8, 9, 0, 12


def head(n_tensors: int, n_values: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_values)


def array(item: int, count: int) -> bytes:
    return head(0, 1) + struct.pack("<Q1sIIQ", 1, b"k", ARRAY, item, count)


ABSURD = {
    "tensors": lambda count: head(count, 0),
    "values": lambda count: head(0, count),
    "length of a key": lambda count: head(0, 1) + struct.pack("<Q", count),
    "length of a text": lambda count: head(0, 1) + struct.pack("<Q1sIQ", 1, b"k", STRING, count),
    "texts": lambda count: array(STRING, count),
    "length of a text in a list": lambda count: array(STRING, 2) + struct.pack("<Q", count),
    "bytes": lambda count: array(UINT8, count),
    "numbers": lambda count: array(FLOAT64, count),
    "length of a tensor's name": lambda count: head(1, 0) + struct.pack("<Q", count),
}


@pytest.mark.parametrize("what", ABSURD)
@pytest.mark.parametrize("filler", [b"\0", b"\xff", b"\1"])
@pytest.mark.parametrize("file_bytes", [None, 1 << 20, 1 << 44])
def test_a_header_that_promises_too_much_takes_little_memory(what: str, filler: bytes, file_bytes: int | None) -> None:
    """With any later bytes it is refused, or reported to go on after the available bytes; too short files are refused."""
    for count in (LARGE, HUGE, 2**64 - 1):
        data = ABSURD[what](count)
        data += filler * ((1 << 20) - len(data))
        tracemalloc.start()
        try:
            refused = file_bytes is not None and count > file_bytes
            if refused:
                with pytest.raises(ModelLoadError, match=r"x\.gguf: "):
                    read_gguf_start(data, "x.gguf", file_bytes)
            else:
                assert read_gguf_start(data, "x.gguf", file_bytes) is None
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 16 << 20


def test_names_in_errors_are_short() -> None:
    """A name may be as long as the file."""
    name = b"n" * 500_000
    tensor = head(1, 0) + struct.pack("<Q", len(name)) + name + struct.pack("<I", 99) + bytes(100)
    with pytest.raises(ModelLoadError, match="99 dimensions") as caught:
        read_gguf_start(tensor, "x.gguf", None)
    assert len(str(caught.value)) < 300


def test_the_beginning_of_a_file_has_its_header_or_not_yet(tmp_path: object) -> None:
    """Cut anywhere, it is never an error; with all of the header it is the header, whatever the file's length."""
    whole = write_model(f"{tmp_path}/whole.gguf", LlamaSpec()).read_bytes()
    found = read_gguf_start(whole, "x", len(whole))
    assert found is not None
    size = found.header_bytes
    for length in (*range(4, size, 97), size - 1):
        assert read_gguf_start(whole[:length], "x", len(whole)) is None
        assert read_gguf_start(whole[:length], "x", None) is None
        with pytest.raises(ModelLoadError):
            read_gguf_start(whole[:length], "x", length)
    for file_bytes in (None, size, len(whole)):
        assert read_gguf_start(whole[:size], "x", file_bytes) == found


# ---- what is requested


def served(monkeypatch: pytest.MonkeyPatch, begin: bytes, total: int | None, *, most: int = 1 << 62) -> list[int]:
    """Have a server send this, filled up with zeros, and return how many bytes were asked for."""
    asked: list[int] = []

    def first_bytes(_file: object, count: int, *_: object) -> tuple[bytes, int | None]:
        asked.append(count)
        return begin.ljust(min(count, most), b"\0"), total

    monkeypatch.setattr(remote_header, "first_bytes", first_bytes)
    return asked


@pytest.mark.parametrize("total", [None, 1 << 40])
@pytest.mark.parametrize("what", ABSURD)
def test_absurd_headers_end_after_a_few_requests(monkeypatch: pytest.MonkeyPatch, what: str, total: int | None) -> None:
    """By the first if the file is too short for them, else by the third."""
    for count in (1 << 30, HUGE):
        asked = served(monkeypatch, ABSURD[what](count), total)
        with pytest.raises(ModelLoadError, match=r"m\.gguf: "), model_headers("https://host.invalid/m.gguf"):
            pass
        assert asked[:3] == [1 << 20, 8 << 20, 64 << 20][: len(asked)]
        assert len(asked) == 1 or count < HUGE or total is None


def test_lengths_that_no_model_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sparse file of that length is made."""
    served(monkeypatch, head(0, 0), 1 << 50)
    with pytest.raises(ModelLoadError, match="more than any model"), model_headers("https://host.invalid/m.gguf"):
        pass


def test_a_server_that_sends_less_than_it_has_is_named_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else missing bytes would be read as zeros."""
    served(monkeypatch, array(STRING, 1 << 30), 1 << 40, most=1000)
    with pytest.raises(HubUnavailable, match="sent 1000 of the first"), model_headers("https://host.invalid/m.gguf"):
        pass


def test_a_server_that_sends_all_of_the_header_has_sent_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers may send less than a range has; the sparse file has the length of the whole all the same."""
    begin = head(0, 1) + struct.pack("<Q1sIB", 1, b"k", UINT8, 7)
    served(monkeypatch, begin, 1 << 30, most=1 << 18)
    with model_headers("https://host.invalid/m.gguf") as found:
        assert found.size == found.paths[0].stat().st_size == 1 << 30


@pytest.mark.parametrize("length", ["²", "٣", "+3", "-3", "1_0", " 3", "0x3", "", "9" * 19, "9" * 5000])
def test_lengths_are_ascii_digits(length: str) -> None:
    """The largest accepted length is a thousand petabytes."""
    assert whole_number(length) is None
    assert content_range(f"bytes {length}-9/10") == (None, None)
    assert content_range(f"bytes 0-9/{length}") == (0, None)
    assert whole_number("9" * 18) == 10**18 - 1
    assert content_range("bytes 5-9/10") == (5, 10)


@pytest.mark.native
def test_show_ends_with_an_error_of_one_line(hub: StandInHub) -> None:
    """As for any file that is no model."""
    hub.files["m.gguf"] = array(STRING, HUGE).ljust(1000, b"\0")
    result = invoke("show", f"{hub.url}/files/m.gguf")
    assert result.exit_code != 0
    assert "promises" in result.stderr
