"""What every engine is to those who call it: requests and questions in, channels and futures out. Any thread may call.

Tokenising, grammars and checks happen on the caller's thread; what `accept`, `embed` and `rerank` answer fills up from the
engine's. Which process the passes run in is the business of those that are derived from it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from paceline.config import EngineConfig
from paceline.engine.delivery import Delivery
from paceline.engine.heartbeat import Heartbeat
from paceline.engine.inbox import Inbox
from paceline.engine.metrics import Metrics
from paceline.engine.metrics_snapshot import MetricsSnapshot
from paceline.engine.pairs import all_pairs
from paceline.engine.prompts import Prompt, embedding_texts
from paceline.engine.text_requests import TextRequests
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.runtime import Model, Tokenizer
from paceline.scheduling.clock import Clock
from paceline.scheduling.embedding import EmbeddingRequest
from paceline.scheduling.limits import Limits
from paceline.scheduling.sequence import Request
from paceline.scheduling.slots_snapshot import SlotsSnapshot
from paceline.streaming import StreamChannel


class Loop(Protocol):
    """The one thread of an engine, as its callers need it: a `Runner`, or a `Supervisor`."""

    def check_process(self) -> None:
        """Raises `EngineStopped` in a forked child, which has no such thread."""

    def heartbeat(self) -> Heartbeat:
        """Whether it turns; waits for nothing."""

    def close(self, *, drain: bool, timeout_s: float | None) -> None:
        """Ends it; returns when everything is given back."""


class AnyEngine(ABC):
    """A model and whatever computes with it. `close` ends it; so does the collector, and the end of the process."""

    model: Model
    tokenizer: Tokenizer
    config: EngineConfig
    limits: Limits
    metrics: Metrics
    sampling_defaults: SamplingParams
    _clock: Clock
    _inbox: Inbox
    _delivery: Delivery
    _text_requests: TextRequests
    _loop: Loop

    # ---- requests

    def prepare(self, prompt: Prompt, params: SamplingParams, options: RequestOptions) -> Request:
        """A request for text, checked and tokenised; `accept` starts it. Raises `RequestError`s."""
        self._check_usable()
        return self._text_requests.prepare(prompt, params, options)

    def accept(self, request: Request, request_index: int = 0) -> StreamChannel:
        """Starts a prepared request, once; its channel fills up. Raises `QueueFull` or `EngineStopped`: then nothing began.

        Its times begin here: what is accepted later, because there was no place, has as long as everybody.
        """
        request.submitted_s = self._clock.now()
        return self._delivery.submit(request, request_index)

    def embed(self, texts: Sequence[Prompt], pooling: str | None, options: RequestOptions) -> Future[list[Any]]:
        """Accepts texts to be embedded: a future of a vector each, not normalised.

        Raises as `prepare` and `accept`; what only a worker finds wrong fails the future.
        """
        return self._embed_ids(embedding_texts(texts, self.tokenizer, options), pooling, options)

    def rerank(self, query: str, documents: Sequence[str], options: RequestOptions) -> Future[list[Any]]:
        """Accepts documents to be scored for a query: a future of one score each, as arrays of one number."""
        return self._embed_ids(all_pairs(self.model, query, documents), "rank", options)

    def _embed_ids(self, ids: list[list[int]], pooling: str | None, options: RequestOptions) -> Future[list[Any]]:
        self._check_usable()
        if not ids:
            done: Future[list[Any]] = Future()
            done.set_result([])
            return done
        request = EmbeddingRequest(
            key=self._inbox.next_key(),
            texts=ids,
            pooling=self._checked_pooling(ids, pooling),
            options=options,
            submitted_s=self._clock.now(),
        )
        return self._delivery.submit_embedding(request)

    @abstractmethod
    def _checked_pooling(self, ids: list[list[int]], pooling: str | None) -> str | None:
        """The way of pooling for these texts; raises what can be said here to be wrong with it or them."""

    # ---- prefixes in files

    @abstractmethod
    def save_prefix(self, name: str, prompt: Prompt, options: RequestOptions) -> int:
        """Writes what memory has of a prompt to a file; answers how many of its tokens that is. Raises `StateError`."""

    @abstractmethod
    def load_prefix(self, name: str, options: RequestOptions) -> list[int]:
        """Puts a saved prefix into host memory, where requests find it; answers its tokens. Raises `StateError`.

        A worker's death forgets it.
        """

    @abstractmethod
    def erase_prefix(self, name: str) -> None:
        """Deletes a saved prefix. Raises `StateError` where there is none."""

    # ---- questions

    @abstractmethod
    def stats(self) -> MetricsSnapshot:
        """What the engine has done and holds; see docs/metrics.md. What a worker did after its last report dies with it."""

    @abstractmethod
    def ask_slots(self) -> Future[SlotsSnapshot]:
        """What each slot does after the tick that runs; waits for nothing. While there is no worker, all are idle.

        `EngineStopped` where there is no engine any more.
        """

    def slots(self) -> SlotsSnapshot:
        """The answer to `ask_slots`; waits for the tick that runs, so never call it on an event loop."""
        return self.ask_slots().result()

    def heartbeat(self) -> Heartbeat:
        """Whether the engine turns, or another worker is on its way; asks nobody anything."""
        return self._loop.heartbeat()

    @property
    def num_open(self) -> int:
        """Requests that were accepted and have not ended."""
        return self._inbox.num_open

    # ---- the end

    def close(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        """Ends the engine: cancels what runs or, with drain, lets it finish first, at most timeout_s. Idempotent."""
        self._loop.close(drain=drain, timeout_s=timeout_s)

    @property
    def is_closed(self) -> bool:
        """Whether it takes no requests any more."""
        return self._inbox.is_closed

    def _check_usable(self) -> None:
        self._loop.check_process()
        self._inbox.check_open()
