"""Headers of WAV, MP3 and FLAC files: format, rate, channels and length, checked against the limits. Standard library only.

WAV: RIFF/WAVE with PCM, IEEE floats, A-law or mu-law, plain or as WAVE_FORMAT_EXTENSIBLE. FLAC: STREAMINFO (RFC 9639). MP3:
MPEG-1 and MPEG-2 audio, layer III (ISO 11172-3, 13818-3), with LAME's info frame. The frames of an MP3 are counted from
header to header, and little else may lie between them: a decoder that searches megabytes for the next frame is slow.
"""

from __future__ import annotations

import struct
from typing import Final, Literal

import msgspec

from paceline.errors import InvalidParams

AudioFormat = Literal["wav", "mp3", "flac"]

MIN_SECONDS: Final = 0.1
MAX_SECONDS: Final = 1800
MIN_RATE: Final = 1000
MAX_RATE: Final = 384_000
MAX_CHANNELS: Final = 8
MAX_CHUNKS: Final = 4096
"""Most chunks or metadata blocks of a file. Each takes time, even if it is empty."""


class AudioHeader(msgspec.Struct, frozen=True):
    """The facts in the header of an audio file, and the file without tags and pictures."""

    format: AudioFormat
    rate: int
    channels: int
    num_frames: int
    data: bytes


def check_audio(rate: int, channels: int, num_frames: int) -> None:
    """Raise `InvalidParams` if no model takes audio with this rate, number of channels or duration."""
    if not MIN_RATE <= rate <= MAX_RATE:
        raise InvalidParams(f"audio must have {MIN_RATE} to {MAX_RATE} samples a second, and this one has {rate}")
    if not 1 <= channels <= MAX_CHANNELS:
        raise InvalidParams(f"audio must have 1 to {MAX_CHANNELS} channels, and this one has {channels}")
    if num_frames < MIN_SECONDS * rate:
        raise InvalidParams(f"audio must last {MIN_SECONDS} s at least, and this one lasts {num_frames / rate:.3f} s")
    if num_frames > MAX_SECONDS * rate:
        raise InvalidParams(
            f"audio may last {MAX_SECONDS} s, and this one lasts {num_frames / rate:.0f} s; cut it into parts"
        )


def damaged(reason: str) -> InvalidParams:
    """Return the error for a file that breaks the rules of its format."""
    return InvalidParams(f"the audio file is damaged: {reason}")


PCM, FLOAT = 1, 3
_EXTENSIBLE: Final = 0xFFFE
_BITS: Final = {PCM: (8, 16, 24, 32), FLOAT: (32, 64), 6: (8,), 7: (8,)}
_NAMES: Final = {2: "ADPCM", 0x11: "ADPCM", 0x31: "GSM", 0x50: "MPEG", 0x55: "MP3", 0x2000: "AC-3"}
_TO_THE_END: Final = (0, 0xFFFFFFFF)  # sizes that a writer leaves when it does not know the length yet


def read_wav(data: bytes) -> AudioHeader:
    """Read the header of a WAV file and keep its samples alone. Raises `InvalidParams`."""
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
    """Return a WAV file with these interleaved little-endian samples."""
    frame_bytes = channels * bits // 8
    layout = struct.pack("<HHIIHH", kind, channels, rate, rate * frame_bytes, frame_bytes, bits)
    size = 4 + 8 + len(layout) + 8 + len(samples)
    head = b"RIFF" + struct.pack("<I", size) + b"WAVEfmt " + struct.pack("<I", len(layout)) + layout
    return head + b"data" + struct.pack("<I", len(samples)) + samples


def _chunks(data: bytes) -> tuple[int, int, int, int, int, int, int]:
    """Return format, channels, rate, bytes of a frame, bits, and the begin and end of the samples."""
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
            if size < 16 or at + size > len(data):
                raise damaged("it ends in the middle of its header")
            kind, channels, rate, _, frame_bytes, bits = struct.unpack_from("<HHIIHH", data, at)
            if kind == _EXTENSIBLE:
                if size < 40:
                    raise damaged("it ends in the middle of its header")
                (kind,) = struct.unpack_from("<H", data, at + 24)
            layout = kind, channels, rate, frame_bytes, bits
        at += size + size % 2
    raise damaged(f"a WAV with more than {MAX_CHUNKS} chunks in front of its samples")


_INFO_BYTES = 34
_LAST = 0x80  # flag of the last block of metadata
_MAX_BLOCK = 65_535  # most samples of a channel in a frame
_MIN_FRAME_BYTES = 10  # header with its checksum 6, a constant of one channel 2, checksum 2


def read_flac(data: bytes) -> AudioHeader:
    """Read the header of a FLAC file and drop pictures, tags and seek tables. Raises `InvalidParams`."""
    info = data[8 : 8 + _INFO_BYTES]
    if len(info) < _INFO_BYTES or data[4] & ~_LAST or int.from_bytes(data[5:8]) != _INFO_BYTES:
        raise damaged("a FLAC must begin with STREAMINFO")
    fields = int.from_bytes(info[10:18])
    rate, channels, num_frames = fields >> 44, (fields >> 41 & 7) + 1, fields & (1 << 36) - 1
    if num_frames == 0:
        raise InvalidParams("a FLAC file must say how many samples it has, and this one does not; encode it to a file")
    check_audio(rate, channels, num_frames)
    at = 4
    for _ in range(MAX_CHUNKS):
        if at + 4 > len(data):
            raise damaged("it ends in the middle of its metadata")
        kind = data[at]
        at += 4 + int.from_bytes(data[at + 1 : at + 4])
        if kind & _LAST:
            break
    else:
        raise damaged(f"a FLAC with more than {MAX_CHUNKS} blocks of metadata")
    frames = data[at:]
    if not frames:
        raise damaged("it ends before its sound")
    if len(frames) < -(-num_frames // _MAX_BLOCK) * _MIN_FRAME_BYTES:
        raise damaged(f"it says that it has {num_frames} samples, which its {len(frames)} bytes of frames cannot hold")
    start = b"fLaC" + bytes([_LAST]) + _INFO_BYTES.to_bytes(3) + info
    return AudioHeader("flac", rate, channels, num_frames, start + frames)


_MAX_JUNK: Final = 1 << 14  # bytes outside of frames
_MAX_TAGS: Final = 16  # before the frames
_KBITS: Final = {  # by the index in the header; 0 is "free format"
    1: (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    2: (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_RATES: Final = (44100, 48000, 32000)
_DECODER_DELAY: Final = 529  # samples, of every decoder
_SAME: Final = 0xFFFE0C00  # bits of a header that are equal in all frames: version, layer, rate


class _Frame(msgspec.Struct, frozen=True):
    """The fields of a frame's header; `header` has its four bytes."""

    header: int
    version: int
    rate: int
    channels: int
    num_bytes: int

    @property
    def num_samples(self) -> int:
        return 1152 if self.version == 1 else 576


def read_mp3(data: bytes) -> AudioHeader:
    """Read the headers of an MP3 file and drop its tags. Raises `InvalidParams`."""
    begin, num_tags = 0, 0
    while data[begin : begin + 3] == b"ID3" and len(data) >= begin + 10:
        num_tags += 1
        if num_tags > _MAX_TAGS:
            raise damaged(f"an MP3 with more than {_MAX_TAGS} tags (ID3) in front of its frames")
        size = sum((data[begin + 6 + index] & 0x7F) << 7 * (3 - index) for index in range(4))
        begin += 10 + size + (10 if data[begin + 5] & 0x10 else 0)
    begin = _next_frame(data, begin, _MAX_JUNK, None)
    first = _frame_at(data, begin)
    if first is None:
        raise damaged("an MP3 without frames")
    declared, skipped = _declared_length(data[begin : begin + first.num_bytes], first)
    counted, end = _walk(data, begin, first)
    num_frames = (counted - (declared is not None)) * first.num_samples
    if declared:
        if declared * first.num_samples > num_frames + first.rate:
            raise damaged(f"it says that it has {declared} frames, and it has {counted}")
        num_frames = max(declared * first.num_samples - skipped, 0)
    check_audio(first.rate, first.channels, num_frames)
    return AudioHeader("mp3", first.rate, first.channels, num_frames, data[begin:end])


def _next_frame(data: bytes, at: int, room: int, like: int | None) -> int:
    """Return the offset of the next frame that another frame or the end follows; -1 if there is none within `room` bytes."""
    for place in range(at, min(at + room, len(data))):
        if data[place] == 0xFF and (found := _frame_at(data, place)) is not None:
            if like is not None and (found.header ^ like) & _SAME:
                continue
            end = place + found.num_bytes
            after = _frame_at(data, end)
            if end == len(data) or (after is not None and not (after.header ^ found.header) & _SAME):
                return place
    return -1


def _frame_at(data: bytes, at: int) -> _Frame | None:
    """Return the frame at an offset; None if no whole frame of layer III begins there."""
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


def _declared_length(frame: bytes, first: _Frame) -> tuple[int | None, int]:
    """Return the number of frames and of padding samples that the info tag in the first frame declares.

    The number of frames is None without an info tag, and 0 if the tag does not declare it.
    """
    side = (17 if first.channels == 1 else 32) if first.version == 1 else (9 if first.channels == 1 else 17)
    at = 4 + (0 if first.header & 1 << 16 else 2) + side  # after the header, its checksum and the side information
    if frame[at : at + 4] not in (b"Xing", b"Info") or len(frame) < at + 8:
        return None, 0
    flags = frame[at + 7]
    declared = int.from_bytes(frame[at + 8 : at + 12]) if flags & 1 else 0
    at += 8 + sum(size for bit, size in ((1, 4), (2, 4), (4, 100), (8, 4)) if flags & bit)
    if at + 35 >= len(frame) or not frame[at]:
        return declared, 0
    delay, padding = frame[at + 21] << 4 | frame[at + 22] >> 4, (frame[at + 22] & 15) << 8 | frame[at + 23]
    return declared, delay + _DECODER_DELAY + max(padding - _DECODER_DELAY, 0)


def _walk(data: bytes, begin: int, first: _Frame) -> tuple[int, int]:
    """Return the number of frames, and the end of the last frame."""
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
