"""Encodes the images and audio of requests, and keeps what was made of them for the next request with the same.

any thread         measure: what an image or audio becomes in a prompt, by its extent
encoding thread    encode: the embeddings of a request's attachments, from the cache or computed, one after another
any thread         cancel: a request is to be encoded no further
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Final

from paceline.errors import Aborted, Cancelled, EngineError, PacelineError, Unsupported
from paceline.kv_cache import MediaItem
from paceline.media import Attachment, AudioExtent, Image, MediaExtent
from paceline.runtime import MediaPart, MediaProjector, decoded_pixels, decoded_samples, num_samples

_log = logging.getLogger("paceline.engine")

_MAX_EXTENTS: Final = 1024  # of which the parts are remembered

Parts = tuple[MediaPart, ...]
Namespace = tuple[Hashable, ...]


class EmbeddingCache:
    """The parts of attachments by namespaces and content hashes, least recently used first out. Any thread.

    max_bytes: of their embeddings. Requests hold those that they need themselves, so that dropping some costs time alone.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._found: OrderedDict[tuple[Namespace, bytes], Parts] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[Namespace, bytes]) -> Parts | None:
        """Return the parts of an attachment; None if they are not there."""
        with self._lock:
            found = self._found.get(key)
            if found is not None:
                self._found.move_to_end(key)
            return found

    def put(self, key: tuple[Namespace, bytes], parts: Parts) -> None:
        """Add the parts of an attachment, unless they alone are more than the cache may have."""
        size = _num_bytes(parts)
        with self._lock:
            if size > self._max_bytes or key in self._found:
                return
            self._found[key] = parts
            self._num_bytes += size
            while self._num_bytes > self._max_bytes:
                _, dropped = self._found.popitem(last=False)
                self._num_bytes -= _num_bytes(dropped)


class MediaEncoder:
    """A projector with its cache. `close` frees the projector, which belongs to it."""

    def __init__(self, projector: MediaProjector, cache_bytes: int) -> None:
        self._projector = projector
        self._cache = EmbeddingCache(cache_bytes)
        self._measured: dict[MediaExtent, Parts] = {}
        self._encoding: int | None = None  # the request that is being encoded
        self._is_cancelled: Callable[[], bool] = _never
        self._cancelled: int | None = None
        self._is_closed = False

    @property
    def modalities(self) -> frozenset[str]:
        """What prompts may have beside text."""
        return self._projector.modalities

    def measure(self, extent: MediaExtent) -> Parts:
        """Return the parts of an image or audio of this extent, without embeddings. Raises `InvalidParams`, `Unsupported`."""
        found = self._measured.get(extent)
        if found is None:
            found = tuple(self._measure(extent))
            if len(self._measured) >= _MAX_EXTENTS:
                self._measured.clear()
            self._measured[extent] = found
        return found

    def encode(
        self,
        key: int,
        attachments: Sequence[Attachment],
        media: Sequence[MediaItem],
        namespace: Namespace = (),
        is_cancelled: Callable[[], bool] | None = None,
    ) -> dict[int, MediaPart]:
        """Return the embeddings of a request's items by their first cells; media: those items, in order.

        namespace: of the requests that share what is kept. is_cancelled: asked often; knows of cancels from before this call too.

        Raises `InvalidParams` for an attachment that cannot be decoded, `Cancelled`, and what the projector raises.
        """
        self._cancelled = None
        self._is_cancelled = is_cancelled or _never
        self._encoding = key
        try:
            items = [
                part
                for number, one in enumerate(attachments)
                for part in self._items(key, number, one, (namespace, one.content_hash))
            ]
        finally:
            self._encoding, self._is_cancelled = None, _never
        if [(one.num_cells, one.num_positions) for one in items] != [
            (one.num_cells, one.num_positions) for one in media
        ]:
            raise EngineError("an image or audio was encoded to other sizes than were measured for it")
        return {item.start: part for item, part in zip(media, items, strict=True)}

    def cancel(self, key: int) -> None:
        """Encode nothing more of a request. Takes no lock: it may come from a finalizer."""
        if key == self._encoding:
            self._cancelled = key
            self._projector.abort()

    def stop(self) -> None:
        """Encode nothing more: what is being encoded and what would be raises `Aborted`. Takes no lock."""
        self._is_closed = True
        self._projector.abort()

    def close(self) -> None:
        """End what is being encoded, and free the projector."""
        self.stop()
        self._projector.close()

    def _measure(self, extent: MediaExtent) -> list[MediaPart]:
        if isinstance(extent, AudioExtent):
            return self._projector.measure_audio(num_samples(extent.num_frames, extent.rate, self._sample_rate))
        return self._projector.measure_image(extent.width, extent.height)

    @property
    def _sample_rate(self) -> int:
        rate = self._projector.sample_rate
        if rate is None:
            raise Unsupported("this model's projector takes no audio; leave it out, or load a model that hears")
        return rate

    def _items(self, key: int, number: int, attachment: Attachment, kept: tuple[Namespace, bytes]) -> list[MediaPart]:
        parts = self._cache.get(kept)
        if parts is None:
            try:
                parts = self._encoded(key, attachment)
            except PacelineError as error:
                if isinstance(error, (Cancelled, Aborted)):
                    raise
                kind = "image" if isinstance(attachment, Image) else "audio"
                raise type(error)(f"{attachment.name or f'{kind} {number}'}: {error}") from error
            self._cache.put(kept, parts)
        return [part for part in parts if not part.tokens]

    def _encoded(self, key: int, attachment: Attachment) -> Parts:
        self._check_wanted(key)
        encode = self._decoded(key, attachment)
        while True:
            self._check_wanted(key)
            try:
                parts = tuple(encode())
            except Aborted:
                self._check_wanted(key)  # else the abort was meant for the request before this one
                continue
            self._check_wanted(key)
            for part in parts:
                if part.embeddings is not None:
                    part.embeddings.flags.writeable = False
            return parts

    def _decoded(self, key: int, attachment: Attachment) -> Callable[[], list[MediaPart]]:
        """Decode an attachment; return what encodes it."""

        def check() -> None:
            self._check_wanted(key)

        if isinstance(attachment, Image):
            return partial(self._projector.encode_image, decoded_pixels(attachment, check))
        return partial(self._projector.encode_audio, decoded_samples(attachment, self._sample_rate, check))

    def _check_wanted(self, key: int) -> None:
        if self._is_closed:
            raise Aborted("the engine is being shut down")
        if self._cancelled == key or self._is_cancelled():
            raise Cancelled("the request was cancelled while its images or audio were encoded")


def _never() -> bool:
    return False


def _num_bytes(parts: Parts) -> int:
    return sum(part.embeddings.nbytes for part in parts if part.embeddings is not None)
