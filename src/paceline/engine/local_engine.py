"""An engine in this process: everything that `LLM` and `AsyncLLM` need, whatever thread they call from."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from paceline.engine.any_engine import AnyEngine
from paceline.engine.arguments import engine_arguments
from paceline.engine.assembly import assemble
from paceline.engine.commands import Inspect
from paceline.engine.core import Engine
from paceline.engine.delivery import Delivery
from paceline.engine.executor import Executor
from paceline.engine.inbox import Inbox
from paceline.engine.instruments import Instruments
from paceline.engine.mapped import mapped
from paceline.engine.metrics import Metrics
from paceline.engine.metrics_snapshot import MetricsSnapshot
from paceline.engine.monotonic_clock import MonotonicClock
from paceline.engine.prompts import Prompt, prompt_ids
from paceline.engine.runner import Runner
from paceline.engine.sampling_defaults import sampling_defaults
from paceline.engine.saved_prefixes import SavedPrefixes
from paceline.engine.state_files import StateFiles
from paceline.engine.text_requests import TextRequests, check_embeddable
from paceline.request import RequestOptions
from paceline.runtime import Model
from paceline.scheduling.slots_snapshot import SlotsSnapshot


class LocalEngine(AnyEngine):
    """A model, its contexts and the thread that computes on them. Options as `LLM` takes them."""

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
        self._loop = self._runner
        # Nothing that the thread holds refers to this object, so that losing it ends the thread.
        weakref.finalize(self, self._runner.abandon).atexit = False

    def _checked_pooling(self, ids: list[list[int]], pooling: str | None) -> str:
        kind = self._backend.prepare_embedding(pooling)
        check_embeddable(ids, self._backend.max_embedding_tokens(kind))
        return kind

    def save_prefix(self, name: str, prompt: Prompt, options: RequestOptions) -> int:
        """See `AnyEngine`."""
        self._check_usable()
        return self._prefixes.save(name, prompt_ids(prompt, self.tokenizer, options), options)

    def load_prefix(self, name: str, options: RequestOptions) -> list[int]:
        """See `AnyEngine`."""
        self._check_usable()
        return self._prefixes.load(name, options)

    def erase_prefix(self, name: str) -> None:
        """See `AnyEngine`."""
        self._check_usable()
        self._prefixes.erase(name)

    def stats(self) -> MetricsSnapshot:
        """See `AnyEngine`."""
        return self.metrics.snapshot()

    def ask_slots(self) -> Future[SlotsSnapshot]:
        """See `AnyEngine`."""
        self._runner.check_process()
        return mapped(self._delivery.ask(Inspect(self._inbox.next_key())), _only)


def _only(answers: list[Any]) -> SlotsSnapshot:
    (snapshot,) = answers
    assert isinstance(snapshot, SlotsSnapshot)  # noqa: S101 - what this was asked for
    return snapshot
