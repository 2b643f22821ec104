"""Encodes the images and audio of requests, and keeps what was made of them for the next request with the same.

any thread         measure: what an image or audio becomes in a prompt, by its extent
encoding thread    encode: the embeddings of a request's attachments, from the cache or computed, one after another
any thread         cancel: a request is to be encoded no further
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Final

from paceline.errors import Aborted, Cancelled, EngineError, PacelineError, Unsupported
from paceline.kv_cache import MediaItem
from paceline.media import Attachment, AudioExtent, Image, MediaExtent
from paceline.runtime import MediaPart, MediaProjector, decoded_pixels, decoded_samples, num_samples

_log = logging.getLogger("paceline.engine")

_MAX_EXTENTS: Final = 1024  # of which the parts are remembered
_MAX_GROUP_PIXELS: Final = 1 << 24  # of images that are encoded at once

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

    def __contains__(self, key: tuple[Namespace, bytes]) -> bool:
        """Return whether the parts of an attachment are there."""
        with self._lock:
            return key in self._found

    def put(self, key: tuple[Namespace, bytes], parts: Parts) -> None:
        """Add the parts of an attachment, unless they alone are more than the cache may have."""
        size = num_bytes(parts)
        with self._lock:
            if size > self._max_bytes or key in self._found:
                return
            self._found[key] = parts
            self._num_bytes += size
            while self._num_bytes > self._max_bytes:
                _, dropped = self._found.popitem(last=False)
                self._num_bytes -= num_bytes(dropped)

    def clear(self) -> None:
        """Drop all parts."""
        with self._lock:
            self._found.clear()
            self._num_bytes = 0


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

    @property
    def fingerprint(self) -> bytes:
        """What identifies the projector's file."""
        return self._projector.fingerprint

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
            found = self._all_parts(key, attachments, namespace)
            items = [part for parts in found for part in parts if not part.tokens]
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
        """Abort running encodings, and free the projector and the cache."""
        self.stop()
        self._projector.close()
        self._cache.clear()

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

    def _all_parts(self, key: int, attachments: Sequence[Attachment], namespace: Namespace) -> list[Parts]:
        """Return the parts of each attachment; images of one size that follow one another are encoded at once."""
        found: list[Parts] = []
        while (number := len(found)) < len(attachments):
            cached = self._cache.get((namespace, attachments[number].content_hash))
            group = [attachments[number]] if cached is not None else self._group(attachments[number:], namespace)
            made = [cached] if cached is not None else self._named(key, number, group)
            for one, parts in zip(group, made, strict=True):
                self._cache.put((namespace, one.content_hash), parts)
            found += made
        return found

    def _group(self, attachments: Sequence[Attachment], namespace: Namespace) -> list[Attachment]:
        """Return the first of these, and the images behind it that are encoded with it."""
        first, hashes = attachments[0], {attachments[0].content_hash}
        group = [first]
        if not isinstance(first, Image):
            return group
        size = first.extent.width * first.extent.height
        for one in attachments[1:]:
            is_known = one.content_hash in hashes or (namespace, one.content_hash) in self._cache
            if is_known or one.extent != first.extent or size * (len(group) + 1) > _MAX_GROUP_PIXELS:
                break
            group.append(one)
            hashes.add(one.content_hash)
        return group

    def _named(self, key: int, number: int, group: Sequence[Attachment]) -> list[Parts]:
        """Return the parts of a group, the first of which has this number; what is raised names what is wrong."""
        try:
            return self._encoded(key, group)
        except (Cancelled, Aborted):
            raise
        except PacelineError as error:
            if len(group) > 1:
                return [self._named(key, number + index, [one])[0] for index, one in enumerate(group)]
            kind = "image" if isinstance(group[0], Image) else "audio"
            raise type(error)(f"{group[0].name or f'{kind} {number}'}: {error}") from error

    def _encoded(self, key: int, group: Sequence[Attachment]) -> list[Parts]:
        self._check_wanted(key)
        encode = self._decoded(key, group)
        while True:
            self._check_wanted(key)
            try:
                found = [tuple(parts) for parts in encode()]
            except Aborted:
                self._check_wanted(key)  # else the abort was meant for the request before this one
                continue
            self._check_wanted(key)
            for embeddings in (part.embeddings for parts in found for part in parts):
                if embeddings is not None:
                    embeddings.flags.writeable = False
            return found

    def _decoded(self, key: int, group: Sequence[Attachment]) -> Callable[[], list[list[MediaPart]]]:
        """Decode attachments, of which several are images; return what encodes them."""

        def check() -> None:
            self._check_wanted(key)

        first = group[0]
        if isinstance(first, Image):
            images = [decoded_pixels(one, check) for one in group if isinstance(one, Image)]
            return partial(self._projector.encode_images, images)
        samples = decoded_samples(first, self._sample_rate, check)
        return lambda: [self._projector.encode_audio(samples)]

    def _check_wanted(self, key: int) -> None:
        if self._is_closed:
            raise Aborted("the engine is being shut down")
        if self._cancelled == key or self._is_cancelled():
            raise Cancelled("the request was cancelled while its images or audio were encoded")


def _never() -> bool:
    return False


def num_bytes(parts: Iterable[MediaPart]) -> int:
    """Return the bytes of the embeddings of parts."""
    return sum(part.embeddings.nbytes for part in parts if part.embeddings is not None)
