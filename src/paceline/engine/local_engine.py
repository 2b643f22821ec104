"""An engine in this process: everything that `LLM` and `AsyncLLM` need, whatever thread they call from.

`prepare`, `embed` and `rerank` tokenise, compile grammars and make contexts on the caller's thread; what `accept`, `embed`
and `rerank` answer fills up from the engine's.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from paceline.engine.arguments import engine_arguments
from paceline.engine.assembly import assemble
from paceline.engine.commands import Inspect
from paceline.engine.core import Engine
from paceline.engine.delivery import Delivery
from paceline.engine.executor import Executor
from paceline.engine.heartbeat import Heartbeat
from paceline.engine.inbox import Inbox
from paceline.engine.instruments import Instruments
from paceline.engine.mapped import mapped
from paceline.engine.metrics import Metrics
from paceline.engine.metrics_snapshot import MetricsSnapshot
from paceline.engine.monotonic_clock import MonotonicClock
from paceline.engine.pairs import all_pairs
from paceline.engine.prompts import Prompt, embedding_texts, prompt_ids
from paceline.engine.runner import Runner
from paceline.engine.sampling_defaults import sampling_defaults
from paceline.engine.saved_prefixes import SavedPrefixes
from paceline.engine.state_files import StateFiles
from paceline.engine.text_requests import TextRequests, check_embeddable
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.runtime import Model
from paceline.scheduling.embedding import EmbeddingRequest
from paceline.scheduling.sequence import Request
from paceline.scheduling.slots_snapshot import SlotsSnapshot
from paceline.streaming import StreamChannel


class LocalEngine:
    """A model, its contexts and the thread that computes on them. Options as `LLM` takes them.

    Any thread may call. `close` ends it; so does the collector, and the end of the process.
    """

    def __init__(self, model: Model | str | os.PathLike[str] | None, options: Mapping[str, Any]) -> None:
        arguments = engine_arguments(options)
        config = arguments.config
        self.metrics = Metrics(config.num_slots)
        self.instruments = Instruments(arguments.instruments, own=self.metrics)
        self._clock = MonotonicClock()
        parts = assemble(model, arguments, self._clock, self.instruments)
        self.model, self.limits, self.config = parts.model, parts.limits, config
        self.tokenizer = parts.model.tokenizer
        self.sampling_defaults = sampling_defaults(parts.model.metadata)
        self._backend = parts.backend
        self._inbox = Inbox(config.num_slots + config.max_queue, config.max_queue_tokens)
        self._delivery = Delivery(self._inbox)
        self._text_requests = TextRequests(
            tokenizer=self.tokenizer,
            vocabulary=self._backend.vocabulary,
            limits=self.limits,
            shares=config.cache_prompt,
            adapters=parts.adapters,
            next_key=self._inbox.next_key,
            make_samplers=self._backend.make_samplers,
            clock=self._clock,
        )
        files = StateFiles(config.state_folder, parts.fingerprint)
        self._prefixes = SavedPrefixes(files, self._delivery.ask, self._inbox.next_key)
        engine = Engine(self._inbox, parts.scheduler, Executor(self._backend, self._clock))
        self._runner = Runner(engine, self._inbox, self._delivery, self._clock, self._backend.abort, parts.at_end)
        # Nothing that the thread holds refers to this object, so that losing it ends the thread.
        weakref.finalize(self, self._runner.abandon).atexit = False

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
        """Accepts texts to be embedded: a future of a vector each, not normalised. Raises as `prepare` and `accept`."""
        return self._embed_ids(embedding_texts(texts, self.tokenizer, options), pooling, options)

    def rerank(self, query: str, documents: Sequence[str], options: RequestOptions) -> Future[list[Any]]:
        """Accepts documents to be scored for a query: a future of one score each, as arrays of one number."""
        return self._embed_ids(all_pairs(self.model, query, documents), "rank", options)

    def save_prefix(self, name: str, prompt: Prompt, options: RequestOptions) -> int:
        """Writes what memory has of a prompt to a file; answers how many of its tokens that is. Raises `StateError`."""
        self._check_usable()
        return self._prefixes.save(name, prompt_ids(prompt, self.tokenizer, options), options)

    def load_prefix(self, name: str, options: RequestOptions) -> list[int]:
        """Puts a saved prefix into host memory, where requests find it; answers its tokens. Raises `StateError`."""
        self._check_usable()
        return self._prefixes.load(name, options)

    def erase_prefix(self, name: str) -> None:
        """Deletes a saved prefix. Raises `StateError` where there is none."""
        self._prefixes.erase(name)

    def _embed_ids(self, ids: list[list[int]], pooling: str | None, options: RequestOptions) -> Future[list[Any]]:
        self._check_usable()
        if not ids:
            done: Future[list[Any]] = Future()
            done.set_result([])
            return done
        kind = self._backend.prepare_embedding(pooling)
        check_embeddable(ids, self._backend.max_embedding_tokens(kind))
        request = EmbeddingRequest(
            key=self._inbox.next_key(), texts=ids, pooling=kind, options=options, submitted_s=self._clock.now()
        )
        return self._delivery.submit_embedding(request)

    def _check_usable(self) -> None:
        self._runner.check_process()
        self._inbox.check_open()

    def stats(self) -> MetricsSnapshot:
        """What the engine has done and holds; see docs/metrics.md."""
        return self.metrics.snapshot()

    def ask_slots(self) -> Future[SlotsSnapshot]:
        """What each slot does after the tick that runs; waits for nothing. `EngineStopped` where there is no engine any more."""
        self._runner.check_process()
        return mapped(self._delivery.ask(Inspect(self._inbox.next_key())), _only)

    def slots(self) -> SlotsSnapshot:
        """The answer to `ask_slots`; waits for the tick that runs, so never call it on an event loop."""
        return self.ask_slots().result()

    def heartbeat(self) -> Heartbeat:
        """Whether the engine's thread turns; asks it nothing."""
        return self._runner.heartbeat()

    def close(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        """Ends the engine: cancels what runs or, with drain, lets it finish first, at most timeout_s. Idempotent."""
        self._runner.close(drain=drain, timeout_s=timeout_s)

    @property
    def num_open(self) -> int:
        """Requests that were accepted and have not ended."""
        return self._inbox.num_open

    @property
    def is_closed(self) -> bool:
        """Whether it takes no requests any more."""
        return self._inbox.is_closed


def _only(answers: list[Any]) -> SlotsSnapshot:
    (snapshot,) = answers
    assert isinstance(snapshot, SlotsSnapshot)  # noqa: S101 - what this was asked for
    return snapshot
