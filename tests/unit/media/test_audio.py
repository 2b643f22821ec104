"""Audio of prompts: facts from headers, and refusals before anything is decoded."""

from __future__ import annotations

import base64
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sounds import (
    MP3_FRAME_BYTES,
    MP3_FRAME_SAMPLES,
    MP3_HEADER,
    flac_block,
    flac_file,
    int16,
    lame_frame,
    mp3_file,
    tone,
    wav_file,
    wav_of_bytes,
)

from paceline.errors import InvalidParams, InvalidType
from paceline.media import MAX_AUDIO_BYTES, MAX_SECONDS, Audio, AudioExtent, restored
from paceline.media.audio_formats import MAX_CHUNKS

TONE = tone()
WAV, FLAC, MP3 = wav_file(int16(TONE)), flac_file(int16(TONE)), mp3_file(40)


@pytest.mark.parametrize(
    ("data", "kind", "rate", "num_frames"),
    [
        (WAV, "wav", 16000, 8000),
        (wav_file(TONE, 8000), "wav", 8000, 8000),
        (wav_file(int16(tone(channels=2)), 16000), "wav", 16000, 8000),
        (wav_of_bytes(bytes(16000), 7, 1, 8000, 8), "wav", 8000, 16000),
        (wav_of_bytes(bytes(24000), 1, 1, 8000, 24), "wav", 8000, 8000),
        (FLAC, "flac", 16000, 8000),
        (flac_file(int16(tone(channels=2)), 44100), "flac", 44100, 8000),
        (MP3, "mp3", 44100, 40 * MP3_FRAME_SAMPLES),
        (mp3_file(40, bytes([0xFF, 0xE3, 0x48, 0xC0]), 288), "mp3", 8000, 40 * 576),  # MPEG-2.5
        (mp3_file(40, bytes([0xFF, 0xFA, 0x92, 0x00]), 418), "mp3", 44100, 40 * MP3_FRAME_SAMPLES),  # padded, stereo
    ],
)
def test_format_rate_and_length_come_from_the_header(data: bytes, kind: str, rate: int, num_frames: int) -> None:
    """Of each format."""
    found = Audio(data)
    assert (found.format, found.rate, found.num_frames) == (kind, rate, num_frames)
    assert found.extent == AudioExtent(rate, num_frames)
    assert found.seconds == num_frames / rate
    assert repr(found) == f"Audio({num_frames / rate:.1f} s, {rate} Hz, {kind})"


def test_invalid_sound_is_left_out() -> None:
    """Tags and pictures, so that the same sound is found in caches whatever stands around it."""
    chunk = b"LIST" + struct.pack("<I", 5) + b"INFO!\0"
    assert Audio(wav_file(int16(TONE), extra=chunk)).data == Audio(WAV).data
    tagged = b"ID3\x03\0\0\0\0\x01\x00" + bytes(128) + MP3 + b"TAG".ljust(128, b" ")
    assert Audio(tagged).data == MP3
    picture = flac_block(6, bytes(5000), is_last=False) + flac_block(4, b"", is_last=True)
    assert Audio(flac_file(int16(TONE), extra=picture)).data == Audio(FLAC).data


def test_a_wav_that_was_written_to_a_pipe_goes_on_to_its_end() -> None:
    """Its header does not say how long it is."""
    for size in (0, 0xFFFFFFFF):
        assert Audio(wav_file(int16(TONE), size=size)).data == Audio(WAV).data


def test_an_mp3_may_say_how_much_of_it_is_sound() -> None:
    """LAME's first frame counts the others, and the padding of encoder and decoder at both ends."""
    found = Audio(lame_frame(39, 576, 1000) + mp3_file(39))
    assert found.num_frames == 39 * MP3_FRAME_SAMPLES - (576 + 529) - (1000 - 529)
    with pytest.raises(InvalidParams, match="says that it has 3900 frames, and it has 40"):
        Audio(lame_frame(3900, 576, 1000) + mp3_file(39))


def test_a_little_between_the_frames_of_an_mp3_is_skipped() -> None:
    """As decoders do; bytes that are no MP3 beyond that are not searched for frames."""
    assert Audio(mp3_file(20) + bytes(500) + mp3_file(20)).num_frames == 40 * MP3_FRAME_SAMPLES
    assert Audio(mp3_file(40)[:-100]).num_frames == 39 * MP3_FRAME_SAMPLES
    for data in (mp3_file(20) + bytes(100_000) + mp3_file(20), b"ID3\x03\0\0\0\0\0\0" + bytes(100_000)):
        with pytest.raises(InvalidParams, match="damaged"):
            Audio(data)


@pytest.mark.parametrize("whole", [WAV, FLAC, MP3])
def test_a_file_that_is_cut_in_its_header_is_refused(whole: bytes) -> None:
    """Wherever it is cut, and never with another error."""
    for end in range(42):
        with pytest.raises(InvalidParams, match="audio"):
            Audio(whole[:end])


def test_a_wav_without_all_of_its_samples_is_refused() -> None:
    """It says how many there are."""
    with pytest.raises(InvalidParams, match="damaged: it ends in the middle of its samples, 15990 bytes of 16000"):
        Audio(WAV[:-10])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "an empty file"),
        (b"RIFF\x10\0\0\0WEBPVP8 ", "another RIFF file"),
        (b"\0\0\0\x20ftypM4A ", "M4A"),
        (b"OggS\0\2", "Ogg"),
        (b"\x1aE\xdf\xa3", "WebM"),
        (b"hello world", "begins with b'hello wo'"),
        (b"\xff\xfd\x90\xc0" + bytes(5000), "damaged"),  # layer II
        (wav_of_bytes(bytes(8000), 2, 1, 8000, 4), "not ADPCM"),
        (wav_of_bytes(bytes(8000), 1, 1, 8000, 12), "12 bits a sample"),
        (wav_of_bytes(bytes(8000), 0x1234, 1, 8000, 8), "format 0x1234"),
        (
            wav_of_bytes(bytes(80000), 1, 3, 8000, 8).replace(b"\x03\0\x08\0", b"\x04\0\x08\0"),
            "3 channels.*frames have 4",
        ),
        (wav_of_bytes(bytes(80000), 1, 9, 8000, 16), "9"),
        (wav_of_bytes(bytes(80000), 1, 1, 500, 16), "500"),
        (wav_of_bytes(bytes(80000), 1, 1, 1_000_000, 16), "1000000"),
        (wav_of_bytes(bytes(100), 1, 1, 8000, 16), "0.1 s at least.*0.006 s"),
        (wav_of_bytes(bytes(80000), 1, 0, 8000, 16), "0"),
        (wav_of_bytes(bytes((MAX_SECONDS + 1) * 1000), 7, 1, 1000, 8), "1800 s.*1801 s"),
        (b"RIFF\0\0\0\0WAVEdata\x04\0\0\0abcd", "before their format"),
        (b"RIFF\0\0\0\0WAVE", "without samples"),
        (wav_file(int16(TONE), extra=bytes(8) * MAX_CHUNKS), "more than 4096 chunks"),
        (flac_file(int16(TONE), extra=flac_block(1, b"", is_last=False) * MAX_CHUNKS), "more than 4096 blocks"),
        (b"ID3\x03\0\0\0\0\0\0" * 17 + MP3, "more than 16 tags"),
        (flac_file(int16(TONE), told=0), "must say how many samples"),
        (flac_file(int16(TONE), told=1 << 35), "1800 s"),
        (flac_file(int16(TONE))[:42], "ends before its sound"),
        (flac_file(int16(TONE), told=MAX_SECONDS * 16000)[:43], "28800000 samples, which its 1 bytes of frames cannot"),
        (flac_file(int16(TONE), told=65_536)[:61], "65536 samples, which its 19 bytes"),
        (b"fLaC\x04\0\0\x22" + bytes(100), "STREAMINFO"),
        (flac_file(int16(TONE), extra=b"\x04\xff\xff\xff"), "middle of its metadata"),
        (mp3_file(80_000, bytes([0xFF, 0xF3, 0x14, 0xC0]), 24), "MP3 is longer"),
    ],
)
def test_what_no_model_takes_is_refused(data: bytes, words: str) -> None:
    """With its kind, or the bound it breaks."""
    with pytest.raises(InvalidParams, match=words):
        Audio(data)


def test_metadata_within_the_bounds_are_passed_over() -> None:
    """Many chunks, and some tags."""
    assert Audio(wav_file(int16(TONE), extra=bytes(8) * 4000)).data == Audio(WAV).data
    last = flac_block(1, b"", is_last=True)
    assert Audio(flac_file(int16(TONE), extra=flac_block(1, b"", is_last=False) * 4000 + last)).data == Audio(FLAC).data
    assert Audio(b"ID3\x03\0\0\0\0\0\0" * 16 + MP3).data == MP3


def test_base64_may_be_broken_into_lines() -> None:
    """As MIME and command lines write it."""
    assert Audio.from_base64(base64.encodebytes(WAV).decode().replace("\n", "\r\n")).data == Audio(WAV).data
    with pytest.raises(InvalidParams, match="not valid base64"):
        Audio.from_base64(base64.b64encode(WAV).decode().replace("A", " ", 1))


def test_a_flac_may_be_as_short_as_its_frames_can_be() -> None:
    """A block of silence takes ten bytes."""
    assert Audio(flac_file(int16(TONE), told=65_535)[:52]).num_frames == 65_535


def test_sources_are_equal_where_the_sound_is(tmp_path: Path) -> None:
    """A file by its path, its bytes and base64, and an array of its samples, have one hash; other sound has another."""
    path = tmp_path / "one.wav"
    path.write_bytes(WAV)
    encoded = base64.b64encode(WAV).decode()
    same = [Audio(path), Audio(str(path)), Audio(WAV), Audio.from_base64(encoded, "wav"), Audio.from_base64(encoded)]
    same.append(Audio(int16(TONE), 16000))
    assert len({item.content_hash for item in same}) == 1
    again = restored(same[0].format, same[0].extent, same[0].data, "")
    assert isinstance(again, Audio)
    assert (again.content_hash, again.extent) == (same[0].content_hash, same[0].extent)
    others = [Audio(TONE, 16000), Audio(int16(TONE), 8000), Audio(FLAC), Audio(int16(tone(pitch=300)), 16000)]
    assert len({item.content_hash for item in (*others, same[0])}) == 5


def test_an_array_is_copied() -> None:
    """It may change afterwards; views and channels are taken as they are."""
    samples = TONE.copy()
    audio = Audio(samples, 16000)
    samples[:] = 0
    assert audio.content_hash == Audio(TONE, 16000).content_hash
    assert Audio(tone(1.0)[::2], 8000).num_frames == 8000
    assert Audio(TONE[:, None], 16000).content_hash == audio.content_hash


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((TONE,), InvalidType, "rate must be given"),
        ((TONE, "16000"), InvalidType, "rate"),
        ((TONE, 0), InvalidParams, "0"),
        ((TONE.astype(np.float64), 16000), InvalidType, "not float64"),
        ((TONE[:100], 16000), InvalidParams, "0.006 s"),
        ((np.zeros((2, 2, 2), np.float32), 16000), InvalidParams, "shape"),
        ((np.zeros((8000, 9), np.float32), 16000), InvalidParams, "9"),
        ((np.zeros((8000, 0), np.float32), 16000), InvalidParams, "0"),
        ((np.full(8000, np.nan, np.float32), 16000), InvalidParams, "finite"),
        ((WAV, 16000), InvalidParams, "rate is for arrays"),
        ((17,), InvalidType, "not int"),
        ((None,), InvalidType, "not NoneType"),
        (("/no/such/file.wav",), InvalidParams, "/no/such/file.wav"),
    ],
)
def test_invalid_audio_is_refused(arguments: tuple[Any, ...], error: type[Exception], words: str) -> None:
    """With its kind."""
    with pytest.raises(error, match=words):
        Audio(*arguments)


def test_base64_is_checked() -> None:
    """And a format that is named has to be right."""
    encoded = base64.b64encode(WAV).decode()
    for arguments, words in (
        (("%%%",), "base64"),
        ((encoded, "mp3"), "format is 'mp3', but the data are of 'wav'"),
        ((encoded, "ogg"), "format"),
        ((17,), "data"),
    ):
        with pytest.raises(InvalidParams, match=words):
            Audio.from_base64(*arguments)  # type: ignore[arg-type]


def test_a_file_that_is_too_long_is_refused(tmp_path: Path) -> None:
    """Before it is read."""
    path = tmp_path / "long.wav"
    with path.open("wb") as file:
        file.truncate(MAX_AUDIO_BYTES + 1)
    with pytest.raises(InvalidParams, match=str(MAX_AUDIO_BYTES)):
        Audio(path)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([WAV[:200], FLAC[:200], MP3[: 3 * MP3_FRAME_BYTES], MP3_HEADER * 60]), st.data())
def test_damaged_headers_raise_nothing_else(whole: bytes, data: st.DataObject) -> None:
    """Whatever a byte becomes, and wherever the file is cut."""
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 6))):
        damaged[data.draw(st.integers(0, min(80, len(damaged) - 1)))] = data.draw(st.integers(0, 255))
    try:
        found = Audio(bytes(damaged[: data.draw(st.integers(0, len(damaged)))]) + bytes(9000))
    except InvalidParams:
        return
    assert 0.1 <= found.seconds <= MAX_SECONDS
