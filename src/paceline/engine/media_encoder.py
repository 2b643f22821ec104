"""Encodes the images and audio of requests in turn, and keeps their embeddings for later requests with the same files.

any thread         measure: the parts of an image or audio in a prompt, by its extent
encoding thread    encode: the embeddings of a request's attachments, from the cache or computed, one after another
any thread         cancel: end the encoding of a request
"""

from __future__ import annotations

import logging
import math
import os
import queue
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, Generic, TypeVar

from paceline.clock import Clock
from paceline.engine.backend import as_paceline_error
from paceline.engine.core import Cancel, Command, EndSlow, SetInterval, SetPaused, Stop, Submit
from paceline.engine.inbox import Inbox
from paceline.errors import Aborted, Cancelled, EngineError, PacelineError, Unsupported
from paceline.kv_cache import MediaItem
from paceline.media import Attachment, AudioExtent, Image, MediaExtent
from paceline.request import turn_s
from paceline.runtime import MediaPart, MediaProjector, decoded_pixels, decoded_samples, num_samples
from paceline.scheduling.records import EmbeddingRequest
from paceline.sequence import Request

_log = logging.getLogger("paceline.engine")

_MAX_EXTENTS: Final = 1024  # with remembered parts
_MAX_GROUP_PIXELS: Final = 1 << 24  # of images that are encoded at once

Parts = tuple[MediaPart, ...]
Namespace = tuple[Hashable, ...]


class EmbeddingCache:
    """The parts of attachments by namespaces and content hashes; the least recently used is dropped first. Any thread.

    max_bytes: of their embeddings. Requests hold the parts that they need, so dropping parts only costs time.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._found: OrderedDict[tuple[Namespace, bytes], Parts] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[Namespace, bytes]) -> Parts | None:
        """Return the parts of an attachment; None if they are not cached."""
        with self._lock:
            found = self._found.get(key)
            if found is not None:
                self._found.move_to_end(key)
            return found

    def __contains__(self, key: tuple[Namespace, bytes]) -> bool:
        with self._lock:
            return key in self._found

    def put(self, key: tuple[Namespace, bytes], parts: Parts) -> None:
        """Add the parts of an attachment, unless they exceed the cache by themselves."""
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
    """A projector with its cache. `close` frees both."""

    def __init__(self, projector: MediaProjector, cache_bytes: int) -> None:
        self._projector = projector
        self._cache = EmbeddingCache(cache_bytes)
        self._measured: dict[MediaExtent, Parts] = {}
        self._encoding: int | None = None  # key of the request that is being encoded
        self._is_cancelled: Callable[[], bool] = _never
        self._cancelled: int | None = None
        self._is_closed = False

    @property
    def modalities(self) -> frozenset[str]:
        """The kinds of input that prompts may have: "text" and kinds of media."""
        return self._projector.modalities

    @property
    def fingerprint(self) -> bytes:
        """Identifies the projector's file by samples, and its limits."""
        return self._projector.fingerprint

    @property
    def written_ns(self) -> int:
        """When the projector's file was written."""
        return self._projector.written_ns

    def measure(self, extent: MediaExtent) -> Parts:
        """Return the parts of an image or audio of this extent, without embeddings. Raises `InvalidParams`, `Unsupported`."""
        found = self._measured.get(extent)
        if found is None:
            if isinstance(extent, AudioExtent):
                count = num_samples(extent.num_frames, extent.rate, self._sample_rate)
                found = tuple(self._projector.measure_audio(count))
            else:
                found = tuple(self._projector.measure_image(extent.width, extent.height))
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
        """Return the embeddings of a request's items by their first cells.

        Args:
            key: Of the request.
            attachments: Its images and audio.
            media: The items of the attachments, in order.
            namespace: Of the requests that share cached embeddings.
            is_cancelled: Asked often; knows of cancels from before this call too.

        Raises:
            InvalidParams: An attachment cannot be decoded.
            Cancelled: The request was cancelled.
            PacelineError: The projector failed.
        """
        self._cancelled = None
        self._is_cancelled = is_cancelled or _never
        self._encoding = key
        try:
            found = self._all_parts(key, attachments, namespace)
            items = [part for parts in found for part in parts if not part.tokens]
        finally:
            self._encoding, self._is_cancelled = None, _never
        if [(part.num_cells, part.num_positions) for part in items] != [
            (item.num_cells, item.num_positions) for item in media
        ]:
            raise EngineError("an image or audio was encoded to other sizes than were measured for it")
        return {item.start: part for item, part in zip(media, items, strict=True)}

    def cancel(self, key: int) -> None:
        """End the encoding of a request. Takes no lock: it may be called by a finalizer."""
        if key == self._encoding:
            self._cancelled = key
            self._projector.abort()

    def stop(self) -> None:
        """End all encoding: the running call and later calls raise `Aborted`. Takes no lock."""
        self._is_closed = True
        self._projector.abort()

    def close(self) -> None:
        """Abort running encodings, and free the projector and the cache."""
        self.stop()
        self._projector.close()
        self._cache.clear()

    @property
    def _sample_rate(self) -> int:
        rate = self._projector.sample_rate
        if rate is None:
            raise Unsupported("this model's projector takes no audio; leave it out, or load a model that hears")
        return rate

    def _all_parts(self, key: int, attachments: Sequence[Attachment], namespace: Namespace) -> list[Parts]:
        """Return the parts of each attachment. Consecutive images of the same size are encoded together."""
        found: list[Parts] = []
        while (number := len(found)) < len(attachments):
            cached = self._cache.get((namespace, attachments[number].content_hash))
            group = [attachments[number]] if cached is not None else self._group(attachments[number:], namespace)
            made = [cached] if cached is not None else self._named(key, number, group)
            for attachment, parts in zip(group, made, strict=True):
                self._cache.put((namespace, attachment.content_hash), parts)
            found += made
        return found

    def _group(self, attachments: Sequence[Attachment], namespace: Namespace) -> list[Attachment]:
        """Return the first attachment and the images after it that are encoded with it."""
        first, hashes = attachments[0], {attachments[0].content_hash}
        group = [first]
        if not isinstance(first, Image):
            return group
        size = first.extent.width * first.extent.height
        for image in attachments[1:]:
            is_known = image.content_hash in hashes or (namespace, image.content_hash) in self._cache
            if is_known or image.extent != first.extent or size * (len(group) + 1) > _MAX_GROUP_PIXELS:
                break
            group.append(image)
            hashes.add(image.content_hash)
        return group

    def _named(self, key: int, number: int, group: Sequence[Attachment]) -> list[Parts]:
        """Return the parts of a group of attachments from this number on. Errors name the attachment."""
        try:
            return self._encoded(key, group)
        except (Cancelled, Aborted):
            raise
        except PacelineError as error:
            if len(group) > 1:
                return [self._named(key, number + index, [attachment])[0] for index, attachment in enumerate(group)]
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
                self._check_wanted(key)  # otherwise the abort was meant for the previous request
                continue
            self._check_wanted(key)
            for embeddings in (part.embeddings for parts in found for part in parts):
                if embeddings is not None:
                    embeddings.flags.writeable = False
            return found

    def _decoded(self, key: int, group: Sequence[Attachment]) -> Callable[[], list[list[MediaPart]]]:
        """Decode a group of images, or one audio; return the function that encodes it."""

        def check() -> None:
            self._check_wanted(key)

        first = group[0]
        if isinstance(first, Image):
            images = [decoded_pixels(image, check) for image in group if isinstance(image, Image)]
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
    """Return the size of the embeddings of parts in bytes."""
    return sum(part.embeddings.nbytes for part in parts if part.embeddings is not None)


Job = TypeVar("Job")

MAX_HELD_BYTES: Final = 256 << 20
"""Bytes of the embeddings of waiting requests, above which no further request is encoded. A single request may exceed it."""

_NICE: Final = 10  # beside a thread of the engine on the same core: a tenth of the processor time


@dataclass(slots=True, eq=False)
class _Entry(Generic[Job]):
    """A request that waits or is being encoded. is_given_up: whether it was cancelled, or is past its deadline."""

    key: int
    job: Job
    deadline_s: float
    turn_s: float
    tenant: str
    is_given_up: bool = False


class EncodingQueue(Generic[Job]):
    """Encodes requests in the order of their turns; tenants alternate.

    Its threads begin with the first request, and end with `close`.
    """

    def __init__(
        self,
        *,
        encode: Callable[[Job, Callable[[], bool]], object],
        give_up: Callable[[Job], object],
        abort: Callable[[int], object],
        clock: Clock,
        max_held_bytes: int = MAX_HELD_BYTES,
    ) -> None:
        """Begin empty.

        Args: encode: Called on the encoding thread with a request and a function that tells whether it was given up; never
            raises. give_up: Called with a request that was cancelled or reached its deadline before it was encoded; never
            raises. abort: Called with the key of the request that is being encoded, to end its encoding early. clock: Of the
            deadlines. max_held_bytes: See `hold`.
        """
        self._max_held_bytes = max_held_bytes
        self._held: dict[int, int] = {}
        self._encode, self._give_up, self._abort, self._clock = encode, give_up, abort, clock
        self._events: queue.SimpleQueue[Callable[[], object] | None] = (
            queue.SimpleQueue()
        )  # calls of the watching thread
        self._handed: queue.SimpleQueue[_Entry[Job] | None] = queue.SimpleQueue()
        self._waiting: dict[int, _Entry[Job]] = {}
        self._tenants: list[str] = []  # of the last waiting requests; the first has the turn
        self._encoding: _Entry[Job] | None = None
        self._has_begun = False

    def put(self, key: int, job: Job, deadline_s: float, turn_s: float, tenant: str = "") -> None:
        """Add a request. One thread at a time.

        Args:
            key: Of the request.
            job: For `encode`.
            deadline_s: On the clock; infinite without a deadline.
            turn_s: The request with the lowest value is the tenant's next.
            tenant: The owner of the request.
        """
        self._events.put(partial(self._waiting.__setitem__, key, _Entry(key, job, deadline_s, turn_s, tenant)))
        if not self._has_begun:
            self._has_begun = True
            for name, work in (("watching", self._watch), ("encoding", self._encode_all)):
                threading.Thread(target=work, name=f"paceline-{name}", daemon=True).start()

    def release(self, key: int) -> None:
        """End the encoding of a cancelled request; does nothing for an unknown key."""
        self._events.put(partial(self._drop_all, lambda entry: entry.key == key))

    def hold(self, key: int, num_bytes: int) -> None:
        """Record the embeddings that a waiting request holds, until `let_go`. Encoding thread.

        While waiting requests hold more than max_held_bytes, no further request is encoded.
        """
        self._held[key] = num_bytes

    def let_go(self, key: int) -> None:
        """Record that a request waits no longer; does nothing for a request that holds nothing."""
        if self._held.pop(key, None) is not None:
            self._events.put(lambda: None)  # there may be room for the next request

    def close(self) -> None:
        """End the threads: the running encoding ends first, and waiting requests are never encoded."""
        self._events.put(None)

    # ---- the watching thread

    def _watch(self) -> None:
        while self._watch_once():
            pass

    def _watch_once(self) -> bool:
        """Handle an event or a deadline; return whether the queue is open. No request is kept alive by a local variable."""
        with suppress(queue.Empty):
            first_s = min((entry.deadline_s for entry in self._open()), default=math.inf)
            left_s = None if first_s == math.inf else max(0.0, first_s - self._clock.now())
            event = self._events.get(timeout=left_s and min(left_s, threading.TIMEOUT_MAX))
            if event is None:
                self._handed.put(None)
                return False
            event()
        now_s = self._clock.now()
        self._drop_all(lambda entry: entry.deadline_s <= now_s)
        has_room = sum(list(self._held.values())) <= self._max_held_bytes
        if self._encoding is None and self._waiting and has_room:
            self._encoding = self._waiting.pop(self._following().key)
            self._handed.put(self._encoding)
        return True

    def _forget_encoded(self) -> None:
        self._encoding = None

    def _drop_all(self, is_over: Callable[[_Entry[Job]], bool]) -> None:
        for entry in filter(is_over, self._open()):
            self._drop(entry)

    def _open(self) -> list[_Entry[Job]]:
        running = [] if self._encoding is None or self._encoding.is_given_up else [self._encoding]
        return [*self._waiting.values(), *running]

    def _drop(self, entry: _Entry[Job]) -> None:
        entry.is_given_up = True
        if entry is self._encoding:
            self._abort(entry.key)
        else:
            del self._waiting[entry.key]
            self._give_up(entry.job)

    def _following(self) -> _Entry[Job]:
        """Return the next request of the tenant that has the turn."""
        entries = sorted(self._waiting.values(), key=lambda entry: entry.turn_s)
        waiting = dict.fromkeys(entry.tenant for entry in entries)
        tenants = [
            *[tenant for tenant in self._tenants if tenant in waiting],
            *[tenant for tenant in waiting if tenant not in self._tenants],
        ]
        self._tenants = tenants[1:] + tenants[:1]
        return next(entry for entry in entries if entry.tenant == tenants[0])

    # ---- the encoding thread

    def _encode_all(self) -> None:
        if sys.platform == "linux":  # also for the threads that this thread starts
            with suppress(OSError):  # a sandbox may forbid it
                priority = os.getpriority(os.PRIO_PROCESS, 0) + _NICE
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), priority)
        while self._encode_next():
            self._events.put(self._forget_encoded)

    def _encode_next(self) -> bool:
        """Wait for a request and encode it; return whether the queue is open."""
        entry = self._handed.get()  # while it waits, the last request is not kept alive
        if entry is None:
            return False
        self._encode(entry.job, lambda: entry.is_given_up)
        return True


class EncodingInbox(Inbox):
    """An inbox that encodes the images and audio of a request before the engine's thread gets it. Bounds as `Inbox`."""

    def __init__(self, max_requests: int, max_queue_tokens: int | None, encoder: MediaEncoder, clock: Clock) -> None:
        super().__init__(max_requests, max_queue_tokens)
        self._encoder = encoder
        self._early: dict[int, list[Command]] = {}  # commands for requests that are not encoded yet
        self._queue = EncodingQueue(encode=self._encode, give_up=self._give_up, abort=encoder.cancel, clock=clock)
        self.on_left = self._queue.let_go

    def _begin(self, request: Request | EmbeddingRequest) -> None:
        if not request.attachments:
            super()._begin(request)
            return
        self._early[request.key] = []
        turn = turn_s(request.submitted_s, request.options.priority)
        self._queue.put(request.key, request, request.deadline_s(), turn, request.options.tenant)

    def put(self, command: Command) -> None:
        """Add a command, after the request that it is for. `Stop` also ends running and waiting encodings."""
        if isinstance(command, Stop):
            self._encoder.stop()
        if isinstance(command, (Cancel, SetPaused, SetInterval, EndSlow)):
            early = self._early.get(command.key)
            if early is not None:
                early.append(command)
                if isinstance(command, Cancel):
                    self._queue.release(command.key)
                if command.key in self._early:
                    return  # otherwise the list may have been read before; a second cancel does no harm
        super().put(command)

    def close_encoder(self) -> None:
        """End the threads, then free the projector; waiting requests are never encoded."""
        self._encoder.close()
        self._queue.close()

    def _encode(self, request: Request | EmbeddingRequest, is_given_up: Callable[[], bool]) -> None:
        namespace = request.options.tenant, request.options.cache_salt
        try:
            request.embeddings = self._encoder.encode(
                request.key, request.attachments, request.media, namespace, lambda: request.cancelled or is_given_up()
            )
            self._queue.hold(request.key, num_bytes(request.embeddings.values()))
        except Exception as error:  # noqa: BLE001 - of this request alone
            request.embeddings = as_paceline_error(error)
        self._pass_on(request)
        if not self.is_open(request.key):  # it has ended meanwhile
            self._queue.let_go(request.key)

    def _give_up(self, request: Request | EmbeddingRequest) -> None:
        request.embeddings = Cancelled("the request ended before its images or audio were encoded")
        self._pass_on(request)

    def _pass_on(self, request: Request | EmbeddingRequest) -> None:
        request.attachments = ()  # they may be large, and only the embeddings are needed now
        self._commands.put(Submit(request))
        for command in self._early.pop(request.key, ()):
            self._commands.put(command)
