"""MP3 files: their frames, counted from header to header. Standard library only.

The format: MPEG-1 and MPEG-2 audio, layer III (ISO 11172-3, 13818-3), and what LAME's first frame says of the others. Frames of
one kind have to follow one another with little between them: a decoder that searches megabytes for the next frame is slow.
"""

from __future__ import annotations

from typing import Final

import msgspec

from paceline.errors import InvalidParams
from paceline.media.audio_header import MAX_SECONDS, AudioHeader, check_audio, damaged

_MAX_JUNK: Final = 1 << 14  # bytes that are no frames
_MAX_TAGS: Final = 16  # in front of them
_KBITS: Final = {  # by the index in the header; 0 is "free format"
    1: (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    2: (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_RATES: Final = (44100, 48000, 32000)
_DECODER_DELAY: Final = 529  # samples, of every decoder
_SAME: Final = 0xFFFE0C00  # bits of a header that are equal in all frames: version, layer, rate


class _Frame(msgspec.Struct, frozen=True):
    """What the four bytes of a frame's header say. header: themselves."""

    header: int
    version: int
    rate: int
    channels: int
    num_bytes: int

    @property
    def num_samples(self) -> int:
        return 1152 if self.version == 1 else 576

    @property
    def tag_offset(self) -> int:
        """Where LAME and others put what they say of the file, behind the header, its checksum and the side information."""
        side = (17 if self.channels == 1 else 32) if self.version == 1 else (9 if self.channels == 1 else 17)
        return 4 + (0 if self.header & 1 << 16 else 2) + side


def read_mp3(data: bytes) -> AudioHeader:
    """Return what an MP3 file says, without its tags. Raises `InvalidParams`."""
    begin = _first_frame(data)
    first = _frame_at(data, begin)
    if first is None:
        raise damaged("an MP3 without frames")
    told, skipped = _told_length(data[begin : begin + first.num_bytes], first)
    counted, end = _walk(data, begin, first)
    num_frames = (counted - (told is not None)) * first.num_samples
    if told:
        if told * first.num_samples > num_frames + first.rate:
            raise damaged(f"it says that it has {told} frames, and it has {counted}")
        num_frames = max(told * first.num_samples - skipped, 0)
    check_audio(first.rate, first.channels, num_frames)
    return AudioHeader("mp3", first.rate, first.channels, num_frames, data[begin:end])


def _first_frame(data: bytes) -> int:
    """Return where frames begin: behind tags (ID3v2), at a header that another one follows."""
    at, num_tags = 0, 0
    while data[at : at + 3] == b"ID3" and len(data) >= at + 10:
        num_tags += 1
        if num_tags > _MAX_TAGS:
            raise damaged(f"an MP3 with more than {_MAX_TAGS} tags (ID3) in front of its frames")
        size = sum((data[at + 6 + index] & 0x7F) << 7 * (3 - index) for index in range(4))
        at += 10 + size + (10 if data[at + 5] & 0x10 else 0)
    return _next_frame(data, at, _MAX_JUNK, None)


def _next_frame(data: bytes, at: int, room: int, like: int | None) -> int:
    """Return where the next frame begins that another one or the end follows; -1 for none in as many bytes."""
    for place in range(at, min(at + room, len(data))):
        if data[place] == 0xFF and (found := _frame_at(data, place)) is not None:
            if like is not None and (found.header ^ like) & _SAME:
                continue
            behind = place + found.num_bytes
            after = _frame_at(data, behind)
            if behind == len(data) or (after is not None and not (after.header ^ found.header) & _SAME):
                return place
    return -1


def _frame_at(data: bytes, at: int) -> _Frame | None:
    """Return the frame that begins there; None where no whole frame of layer III does."""
    if at < 0 or at + 4 > len(data):
        return None
    header = int.from_bytes(data[at : at + 4])
    kind, layer, bitrate, rate = header >> 19 & 3, header >> 17 & 3, header >> 12 & 15, header >> 10 & 3
    if header >> 21 != 0x7FF or kind == 1 or layer != 1 or bitrate in (0, 15) or rate == 3:
        return None
    version = 1 if kind == 3 else 2
    hertz = _RATES[rate] >> (0 if kind == 3 else 1 if kind == 2 else 2)
    num_bytes = (144 if version == 1 else 72) * _KBITS[version][bitrate] * 1000 // hertz + (header >> 9 & 1)
    if at + num_bytes > len(data):
        return None
    return _Frame(header, version, hertz, 1 if header >> 6 & 3 == 3 else 2, num_bytes)


def _told_length(frame: bytes, first: _Frame) -> tuple[int | None, int]:
    """Return how many frames the first one says follow it, and how many samples of theirs are none of the sound.

    None for a frame that says nothing; 0 for one that does not say how many.
    """
    at = first.tag_offset
    if frame[at : at + 4] not in (b"Xing", b"Info") or len(frame) < at + 8:
        return None, 0
    flags = frame[at + 7]
    told = int.from_bytes(frame[at + 8 : at + 12]) if flags & 1 else 0
    at += 8 + sum(size for bit, size in ((1, 4), (2, 4), (4, 100), (8, 4)) if flags & bit)
    if at + 35 >= len(frame) or not frame[at]:
        return told, 0
    delay, padding = frame[at + 21] << 4 | frame[at + 22] >> 4, (frame[at + 22] & 15) << 8 | frame[at + 23]
    return told, delay + _DECODER_DELAY + max(padding - _DECODER_DELAY, 0)


def _walk(data: bytes, begin: int, first: _Frame) -> tuple[int, int]:
    """Return how many frames there are, and where the last one ends."""
    at, count, junk = begin, 0, 0
    most = MAX_SECONDS * first.rate // first.num_samples + 16
    while count <= most:
        frame = _frame_at(data, at)
        if frame is not None and not (frame.header ^ first.header) & _SAME:
            count, at = count + 1, at + frame.num_bytes
            continue
        found = _next_frame(data, at, _MAX_JUNK - junk, first.header)
        if found < 0:
            break
        junk, at = junk + found - at, found
    else:
        raise InvalidParams(f"audio may last {MAX_SECONDS} s, and this MP3 is longer; cut it into parts")
    if len(data) - at > _MAX_JUNK and data[at : at + 3] not in (b"TAG", b"APE", b"ID3", b"LYR"):
        raise damaged(f"no frame of an MP3 within {_MAX_JUNK} bytes from byte {at} on")
    return count, at
