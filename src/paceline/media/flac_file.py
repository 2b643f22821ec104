"""FLAC files: what STREAMINFO says (RFC 9639). Standard library only."""

from __future__ import annotations

from paceline.errors import InvalidParams
from paceline.media.audio_header import MAX_CHUNKS, AudioHeader, check_audio, damaged

_INFO_BYTES = 34
_LAST = 0x80  # flag of the last block of metadata
_MAX_BLOCK = 65_535  # samples a channel that a frame can have
_MIN_FRAME_BYTES = 10  # header with its checksum 6, a constant of one channel 2, checksum 2


def read_flac(data: bytes) -> AudioHeader:
    """Return what a FLAC file says, without pictures, tags and seek tables. Raises `InvalidParams`."""
    info = data[8 : 8 + _INFO_BYTES]
    if len(info) < _INFO_BYTES or data[4] & ~_LAST or int.from_bytes(data[5:8]) != _INFO_BYTES:
        raise damaged("a FLAC must begin with STREAMINFO")
    fields = int.from_bytes(info[10:18])
    rate, channels, num_frames = fields >> 44, (fields >> 41 & 7) + 1, fields & (1 << 36) - 1
    if num_frames == 0:
        raise InvalidParams("a FLAC file must say how many samples it has, and this one does not; encode it to a file")
    check_audio(rate, channels, num_frames)
    frames = data[_behind_metadata(data) :]
    if not frames:
        raise damaged("it ends before its sound")
    if len(frames) < -(-num_frames // _MAX_BLOCK) * _MIN_FRAME_BYTES:
        raise damaged(f"it says that it has {num_frames} samples, which its {len(frames)} bytes of frames cannot hold")
    start = b"fLaC" + bytes([_LAST]) + _INFO_BYTES.to_bytes(3) + info
    return AudioHeader("flac", rate, channels, num_frames, start + frames)


def _behind_metadata(data: bytes) -> int:
    at = 4
    for _ in range(MAX_CHUNKS):
        if at + 4 > len(data):
            raise damaged("it ends in the middle of its metadata")
        kind = data[at]
        at += 4 + int.from_bytes(data[at + 1 : at + 4])
        if kind & _LAST:
            return at
    raise damaged(f"a FLAC with more than {MAX_CHUNKS} blocks of metadata")
