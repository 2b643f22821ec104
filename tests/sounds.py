"""Sound for tests: tones, and files of them, written with the standard library and NumPy."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.float32]


def tone(seconds: float = 0.5, rate: int = 16000, pitch: float = 440.0, channels: int = 1) -> Samples:
    """A tone, float32 (num_frames,), or (num_frames, channels) with each channel a fifth higher than the last."""
    times = np.arange(round(seconds * rate)) / rate
    parts = [0.4 * np.sin(2 * np.pi * pitch * 1.5**index * times) for index in range(channels)]
    return np.stack(parts, axis=1).astype(np.float32) if channels > 1 else parts[0].astype(np.float32)


def int16(samples: Samples) -> npt.NDArray[np.int16]:
    """The samples as 16-bit integers."""
    return np.round(samples * 32767).astype(np.int16)


def wav_file(samples: npt.NDArray[Any], rate: int = 16000, extra: bytes = b"", size: int | None = None) -> bytes:
    """A WAV file of int16 or float32 samples; extra: chunks before the samples; size: the stated size of its samples."""
    channels = 1 if samples.ndim == 1 else samples.shape[1]
    kind, width = (3, 4) if samples.dtype == np.float32 else (1, 2)
    return wav_of_bytes(samples.tobytes(), kind, channels, rate, width * 8, extra, size)


def wav_of_bytes(
    data: bytes, kind: int, channels: int, rate: int, bits: int, extra: bytes = b"", size: int | None = None
) -> bytes:
    """A WAV file of any format."""
    width = channels * bits // 8
    layout = struct.pack("<HHIIHH", kind, channels, rate, (rate * width) & 0xFFFFFFFF, width & 0xFFFF, bits)
    body = b"WAVEfmt " + struct.pack("<I", 16) + layout + extra
    body += b"data" + struct.pack("<I", len(data) if size is None else size) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


MP3_HEADER = bytes([0xFF, 0xFB, 0x90, 0xC0])  # MPEG-1, layer III, 128 kbit/s, 44100 Hz, mono
MP3_FRAME_BYTES = 417
MP3_FRAME_SAMPLES = 1152


def mp3_file(num_frames: int, header: bytes = MP3_HEADER, frame_bytes: int = MP3_FRAME_BYTES) -> bytes:
    """An MP3 file of silence: frames with granules without data."""
    return (header + bytes(frame_bytes - 4)) * num_frames


def lame_frame(told: int, delay: int, padding: int) -> bytes:
    """A first frame that says how many follow, and how much of them is none of the sound."""
    tag = b"Info" + struct.pack(">II", 1, told) + b"LAME3.100"
    tag = tag.ljust(12 + 21, b"\0") + bytes([delay >> 4, (delay & 15) << 4 | padding >> 8, padding & 255])
    return (MP3_HEADER + bytes(17) + tag).ljust(MP3_FRAME_BYTES, b"\0")


def flac_file(samples: npt.NDArray[np.int16], rate: int = 16000, extra: bytes = b"", told: int | None = None) -> bytes:
    """A FLAC file of int16 samples as they are, in blocks of 4096; extra: more metadata; told: how long it says that it is."""
    channels = 1 if samples.ndim == 1 else samples.shape[1]
    frames = samples.reshape(len(samples), channels)
    length = len(samples) if told is None else told
    fields = (rate << 44 | (channels - 1) << 41 | 15 << 36 | length).to_bytes(8)
    info = struct.pack(">HH", 4096, 4096) + bytes(6) + fields + bytes(16)
    blocks = [_flac_frame(number, frames[at : at + 4096]) for number, at in enumerate(range(0, len(frames), 4096))]
    head = bytes([0 if extra else 0x80]) + (34).to_bytes(3)
    return b"fLaC" + head + info + extra + b"".join(blocks)


def flac_block(kind: int, data: bytes, *, is_last: bool) -> bytes:
    """A block of metadata."""
    return bytes([kind | (0x80 if is_last else 0)]) + len(data).to_bytes(3) + data


def _flac_frame(number: int, block: npt.NDArray[np.int16]) -> bytes:
    assert number < 128
    head = bytes([0xFF, 0xF8, 0x70, (block.shape[1] - 1) << 4 | 4 << 1, number]) + (len(block) - 1).to_bytes(2)
    head += bytes([_crc(head, 8, 0x07)])
    body = b"".join(b"\x02" + block[:, channel].astype(">i2").tobytes() for channel in range(block.shape[1]))
    return head + body + _crc(head + body, 16, 0x8005).to_bytes(2)


def _crc(data: bytes, bits: int, polynomial: int) -> int:
    value, top, mask = 0, 1 << bits - 1, (1 << bits) - 1
    for byte in data:
        value ^= byte << bits - 8
        for _ in range(8):
            value = (value << 1 ^ polynomial if value & top else value << 1) & mask
    return value
