"""Audio in a prompt, from a file, its bytes, base64 or NumPy."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import msgspec

from paceline import validation
from paceline.errors import InvalidParams, InvalidType
from paceline.media.audio_formats import (
    FLOAT,
    PCM,
    AudioFormat,
    AudioHeader,
    check_audio,
    read_flac,
    read_mp3,
    read_wav,
    wav_of,
)
from paceline.media.source_bytes import check_bytes, decoded_base64, file_bytes, is_array, kind_of

if TYPE_CHECKING:
    import numpy as np

MAX_AUDIO_BYTES: Final = 1 << 27

_OTHERS: Final = (
    (0, b"RIFF", "another RIFF file"),
    (4, b"ftyp", "M4A, MP4 or another file of that family"),
    (0, b"OggS", "Ogg (Vorbis, Opus or FLAC within it)"),
    (0, b"\x1aE\xdf\xa3", "WebM or Matroska"),
    (0, b"FORM", "AIFF"),
    (0, b"RF64", "RF64"),
    (0, b"#!AMR", "AMR"),
)


class AudioExtent(msgspec.Struct, frozen=True, array_like=True, tag="audio"):
    """The rate and the samples of a channel, which decide how many tokens audio takes."""

    rate: int
    num_frames: int


class Audio:
    """Audio with a known length; its samples are decoded when a model needs them.

    Takes the path of a file, the bytes of a file (WAV, MP3 or FLAC), or a NumPy array with its rate: float32 within -1 to 1 or
    int16, of shape (num_frames,) or (num_frames, channels). Channels are mixed to one, and the rate becomes the model's.
    Immutable: a file is read and an array copied at once.

        llm.generate([Audio("speech.mp3"), "What is said?"])

    Attributes:
        format: "wav", "mp3" or "flac"; an array is "wav".
        rate: Samples a second and channel, in Hz.
        num_frames: Samples a channel.
        data: The bytes of a file with the same sound; tags and pictures are left out.
        name: The name in errors, such as its place in a request; if empty, errors give its number.

    Raises:
        InvalidParams: The file is missing, damaged or of another format, a rate is given without an array, or no model takes
            the rate, duration or number of channels.
        InvalidType: The source has another type, or an array has no rate.
    """

    __slots__ = ("__dict__", "data", "format", "name", "num_frames", "rate")

    def __init__(self, source: object, rate: int | None = None, *, name: str = "") -> None:
        self.name = name
        if is_array(source):
            self._take(_of_array(source, rate))
            return
        if rate is not None:
            raise InvalidParams(
                f"rate is for arrays, and a file has its own, so that it must be left out, not {rate!r}"
            )
        if isinstance(source, (str, os.PathLike)):
            self._take(_read(file_bytes("audio", validation.path("audio", source), MAX_AUDIO_BYTES)))
        elif isinstance(source, (bytes, bytearray, memoryview)):
            self._take(_read(bytes(source)))
        else:
            raise InvalidType(f"audio must be a path, bytes or a NumPy array, not {type(source).__name__}")

    @classmethod
    def from_base64(cls, data: str, kind: str | None = None, *, name: str = "") -> Audio:
        """Return the audio of a file in base64.

        Args:
            data: The file in base64.
            kind: The format that the file must have, "wav", "mp3" or "flac"; None accepts all three.
            name: The name in errors.

        Raises:
            InvalidParams: `data` is not base64, or the constructor raises it.
        """
        found = cls(decoded_base64("data", validation.text("data", data)), name=name)
        if kind is not None and validation.choice("format", kind, tuple(_READERS)) != found.format:
            raise InvalidParams(f"format is {kind!r}, but the data are of {found.format!r}; name that")
        return found

    @classmethod
    def from_part(cls, value: object, *, name: str = "") -> Audio:
        """Return the audio of OpenAI's `input_audio`, which has data in base64 and their format. Raises `InvalidParams`."""
        if not isinstance(value, Mapping):
            raise InvalidType(f"it must be an object with data and format, not {type(value).__name__}")
        unknown = next((key for key in value if key not in ("data", "format")), None)
        if unknown is not None:
            raise InvalidParams(f"{str(unknown)[:80]} is not known; there are data and format")
        return cls.from_base64(validation.text("data", value.get("data")), value.get("format"), name=name)

    def to_base64(self) -> str:
        """Return the file in base64."""
        return base64.b64encode(self.data).decode()

    @property
    def extent(self) -> AudioExtent:
        """The rate and length."""
        return AudioExtent(self.rate, self.num_frames)

    @property
    def seconds(self) -> float:
        """The duration."""
        return self.num_frames / self.rate

    @cached_property
    def content_hash(self) -> bytes:
        """A hash of 32 bytes, the key of this audio in caches."""
        return hashlib.blake2b(self.data, digest_size=32, person=self.format.encode()).digest()

    def _take(self, header: AudioHeader) -> None:
        self.data, self.format = header.data, str(header.format)
        self.rate, self.num_frames = header.rate, header.num_frames

    def __repr__(self) -> str:
        return f"Audio({self.seconds:.1f} s, {self.rate} Hz, {self.format})"


_READERS: Final[dict[str, Callable[[bytes], AudioHeader]]] = {"wav": read_wav, "mp3": read_mp3, "flac": read_flac}


def audio_format(data: bytes) -> AudioFormat | None:
    """Return the format of a file by its first bytes; None if it is unknown."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return "wav"
    if data[:4] == b"fLaC":
        return "flac"
    if data[:3] == b"ID3" or (len(data) > 1 and data[0] == 0xFF and data[1] >> 5 == 7):
        return "mp3"
    return None


def _read(data: bytes) -> AudioHeader:
    check_bytes("audio", len(data), MAX_AUDIO_BYTES)
    kind = audio_format(data)
    if kind is not None:
        return _READERS[kind](data)
    raise InvalidParams(f"audio must be a WAV, MP3 or FLAC file, not {kind_of(data, _OTHERS)}; convert it")


def _of_array(array: np.ndarray[Any, Any], rate: int | None) -> AudioHeader:
    import numpy as np

    if rate is None:
        raise InvalidType("rate must be given with an array, in samples a second, as in Audio(samples, rate=16000)")
    rate = validation.integer("rate", rate)
    if array.dtype not in (np.float32, np.int16):
        raise InvalidType(f"audio must be an array of float32 or int16, not {array.dtype}; convert it")
    if array.ndim not in (1, 2):
        raise InvalidParams(f"audio must have the shape (num_frames,) or (num_frames, channels), not {array.shape}")
    num_frames, channels = array.shape[0], 1 if array.ndim == 1 else array.shape[1]
    check_audio(rate, channels, num_frames)
    check_bytes("audio", array.nbytes, MAX_AUDIO_BYTES)
    is_float = array.dtype == np.float32
    if is_float and not np.isfinite(array).all():
        raise InvalidParams("audio must have finite samples, and some are not")
    samples = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
    data = wav_of(samples, FLOAT if is_float else PCM, channels, rate, array.itemsize * 8)
    return AudioHeader("wav", rate, channels, num_frames, data)
