"""WAV files: what their chunks say, and how samples become one. Standard library only.

The format: RIFF/WAVE with PCM, IEEE floats, A-law or mu-law; also as WAVE_FORMAT_EXTENSIBLE.
"""

from __future__ import annotations

import struct
from typing import Final

from paceline.errors import InvalidParams
from paceline.media.audio_header import MAX_CHUNKS, AudioHeader, check_audio, damaged

PCM, FLOAT = 1, 3
_EXTENSIBLE: Final = 0xFFFE
_BITS: Final = {PCM: (8, 16, 24, 32), FLOAT: (32, 64), 6: (8,), 7: (8,)}
_NAMES: Final = {2: "ADPCM", 0x11: "ADPCM", 0x31: "GSM", 0x50: "MPEG", 0x55: "MP3", 0x2000: "AC-3"}
_TO_THE_END: Final = (0, 0xFFFFFFFF)  # sizes of data that were written before it was known how many there would be


def read_wav(data: bytes) -> AudioHeader:
    """Return what a WAV file says, with the samples alone as its data. Raises `InvalidParams`."""
    kind, channels, rate, frame_bytes, bits, begin, end = _chunks(data)
    if bits not in _BITS.get(kind, ()):
        name = _NAMES.get(kind, f"format {kind:#x}") if kind not in _BITS else f"{bits} bits a sample"
        raise InvalidParams(
            f"a WAV file must have PCM of 8, 16, 24 or 32 bits, floats of 32 or 64, A-law or mu-law, not {name}; convert it"
        )
    if frame_bytes * 8 != channels * bits:
        raise damaged(f"a WAV of {channels} channels with {bits} bits whose frames have {frame_bytes} bytes")
    num_frames = (end - begin) // frame_bytes if frame_bytes else 0
    check_audio(rate, channels, num_frames)
    samples = data[begin : begin + num_frames * frame_bytes]
    return AudioHeader("wav", rate, channels, num_frames, wav_of(samples, kind, channels, rate, bits))


def wav_of(samples: bytes, kind: int, channels: int, rate: int, bits: int) -> bytes:
    """Return a WAV file of interleaved samples, little-endian."""
    frame_bytes = channels * bits // 8
    layout = struct.pack("<HHIIHH", kind, channels, rate, rate * frame_bytes, frame_bytes, bits)
    size = 4 + 8 + len(layout) + 8 + len(samples)
    head = b"RIFF" + struct.pack("<I", size) + b"WAVEfmt " + struct.pack("<I", len(layout)) + layout
    return head + b"data" + struct.pack("<I", len(samples)) + samples


def _chunks(data: bytes) -> tuple[int, int, int, int, int, int, int]:
    """Return format, channels, rate, bytes of a frame, bits, and where the samples begin and end."""
    layout: tuple[int, int, int, int, int] | None = None
    at = 12
    for _ in range(MAX_CHUNKS):
        if at + 8 > len(data):
            raise damaged("a WAV without samples")
        name, size = struct.unpack_from("<4sI", data, at)
        at += 8
        if name == b"data":
            if layout is None:
                raise damaged("a WAV whose samples stand before their format")
            end = len(data) if size in _TO_THE_END else at + size
            if end > len(data):
                raise damaged(f"it ends in the middle of its samples, {len(data) - at} bytes of {size}")
            return (*layout, at, end)
        if name == b"fmt ":
            layout = _layout(data, at, size)
        at += size + size % 2
    raise damaged(f"a WAV with more than {MAX_CHUNKS} chunks in front of its samples")


def _layout(data: bytes, at: int, size: int) -> tuple[int, int, int, int, int]:
    if size < 16 or at + size > len(data):
        raise damaged("it ends in the middle of its header")
    kind, channels, rate, _, frame_bytes, bits = struct.unpack_from("<HHIIHH", data, at)
    if kind == _EXTENSIBLE:
        if size < 40:
            raise damaged("it ends in the middle of its header")
        (kind,) = struct.unpack_from("<H", data, at + 24)
    return kind, channels, rate, frame_bytes, bits
