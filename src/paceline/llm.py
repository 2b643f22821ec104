"""The front door for programs that wait: `LLM`. Thin: it starts requests on an engine and puts their answers together."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, overload

from paceline import validation
from paceline.completion import Completion, Score
from paceline.engine.arguments import collected_arguments, request_arguments
from paceline.engine.collecting import Batch, cancelled_if_left, collect
from paceline.engine.opening import open_engine
from paceline.engine.prompts import Prompt, is_batch
from paceline.engine.results import (
    batch_outcome,
    embedding_options,
    prefix_options,
    reranking_options,
    scores,
    vectors,
)
from paceline.errors import InvalidType
from paceline.params import SamplingParams
from paceline.streaming import Stream

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from paceline.engine.heartbeat import Heartbeat
    from paceline.engine.metrics_snapshot import MetricsSnapshot
    from paceline.runtime import Model, Tokenizer
    from paceline.runtime.embedder import Normalization
    from paceline.scheduling.limits import Limits
    from paceline.scheduling.slots_snapshot import SlotsSnapshot


class LLM:
    """A model and its engine: many requests, from many threads, share one forward pass a tick.

    model: a path to a GGUF file, a `Model`, or None for the small demo model that comes along. Options: those of
    `EngineConfig` (num_slots, strategy, max_queue ...), of `Model.load` (n_gpu_layers ...) and of `ContextOptions` (n_ctx,
    n_batch, type_k, flash_attn ...), `lora` (paths, named by their stems, or names to paths) and `instruments`. Unknown ones
    raise `TypeError`. isolation="process" computes in a process of its own, whose death the requests survive; what is an
    object then goes by name (docs/guide/isolation.md).

    Any thread may call. `close()`, the end of a `with` block or the collector end it and its requests.
    """

    def __init__(self, model: Model | str | os.PathLike[str] | None = None, **options: Any) -> None:
        self._engine = open_engine(model, options)

    @overload
    def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **options: Any
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompt: Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | None = None,
        *,
        progress: bool = False,
        **options: Any,
    ) -> list[Completion]: ...

    def generate(
        self, prompt: Any, params: SamplingParams | None = None, *, progress: bool = False, **options: Any
    ) -> Completion | list[Completion]:
        """The answer to a prompt, text or token ids; to a list of prompts, one for each, computed together.

        Options: fields of `SamplingParams` and of `RequestOptions`, but for interval, max_buffered_tokens and slow_reader,
        which are about reading. progress: shows a bar on a terminal while a list runs.

        Raises what is wrong with the request, `QueueFull`, `EngineStopped`, and the error that ended it; where n > 1 only if
        all choices failed, else the `Completion` has the good ones, and of the others the `error`. Of a list every
        prompt has its own outcome: where some failed, `BatchError` with all of them is raised after the others ended. A
        list may be longer than the queue; a prompt's outcome is `QueueFull` only where none of the list runs and other
        callers fill the queue.
        """
        validation.boolean("progress", progress)
        sampling, rest = collected_arguments(self._engine.sampling_defaults, params, options)
        if is_batch(prompt):
            with _progress_bar(len(prompt), progress) as advance:
                return batch_outcome(Batch(self._engine, sampling, rest, advance).run(prompt))
        request = self._engine.prepare(prompt, sampling, rest)
        return collect(request, self._engine.accept(request))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Stream:
        """The answer to a prompt as it comes. Options as for `generate`; leaving the stream cancels the request.

        Raises at once what is wrong with the request, `QueueFull` and `EngineStopped`.
        """
        if is_batch(prompt):
            raise InvalidType("stream takes one prompt, a str or token ids; make a stream for each of several")
        sampling, rest = request_arguments(self._engine.sampling_defaults, params, options)
        return Stream(self._engine.accept(self._engine.prepare(prompt, sampling, rest)), keep_alive=self)

    def embed(
        self,
        texts: str | Sequence[str] | Sequence[Sequence[int]],
        *,
        pooling: str | None = None,
        normalize: bool | Normalization = True,
        **options: Any,
    ) -> npt.NDArray[np.float32]:
        """Vectors of texts, float32 (n_texts, n_embd); of one text, (n_embd,).

        pooling: None as the model was made for. normalize: True or "l2" gives length 1, "max_abs" a greatest component of
        1, False or "none" leaves them. Options: queue_timeout_s, timeout_s, request_id, add_special and parse_special, see
        `RequestOptions`.
        """
        is_one = isinstance(texts, str)
        future = self._engine.embed([texts] if isinstance(texts, str) else texts, pooling, embedding_options(options))
        with cancelled_if_left(future.cancel):
            found = vectors(future.result(), normalize, self._engine.model.n_embd_out)
        return found[0] if is_one else found

    def rerank(self, query: str, documents: Sequence[str], **options: Any) -> list[Score]:
        """How well each document fits the query, best first, by a reranking model.

        Options: queue_timeout_s, timeout_s and request_id, see `RequestOptions`.
        """
        future = self._engine.rerank(query, documents, reranking_options(options))
        with cancelled_if_left(future.cancel):
            return scores(future.result())

    def save_prefix(self, name: str, prompt: Prompt, **options: Any) -> int:
        """Writes what memory has of a prompt to a file in `state_folder`; answers how many of its tokens that is.

        name: letters, digits, ".", "_" and "-". Options: tenant, cache_salt and how text becomes tokens, as of the requests
        that computed it. Raises `StateError` where nothing is in memory or the file cannot be written.
        """
        return self._engine.save_prefix(name, prompt, prefix_options(options))

    def load_prefix(self, name: str, **options: Any) -> list[int]:
        """Puts a saved prefix into memory, where requests that begin with its tokens find it; answers those tokens.

        Options: tenant and cache_salt. Raises `StateError` where there is none, or one that is damaged or another model's.
        """
        return self._engine.load_prefix(name, prefix_options(options))

    def erase_prefix(self, name: str) -> None:
        """Deletes a saved prefix's file. Raises `StateError` where there is none."""
        self._engine.erase_prefix(name)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._engine.tokenizer

    @property
    def model(self) -> Model:
        """The model."""
        return self._engine.model

    @property
    def limits(self) -> Limits:
        """What follows from the options, the model and this machine: slots, cells, sequence ids, budgets."""
        return self._engine.limits

    def stats(self) -> MetricsSnapshot:
        """Counters and histograms of everything so far; docs/metrics.md lists them."""
        return self._engine.stats()

    def slots(self) -> SlotsSnapshot:
        """What each slot does, and how many wait; answered after the tick that runs."""
        return self._engine.slots()

    def heartbeat(self) -> Heartbeat:
        """Whether the engine lives, and what it is at; answered at once."""
        return self._engine.heartbeat()

    def close(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        """Ends the engine and frees its memory; idempotent. Requests end with SHUTDOWN.

        drain: lets those that were accepted finish first, for at most timeout_s.
        """
        self._engine.close(drain=drain, timeout_s=timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def _progress_bar(total: int, wanted: bool) -> Iterator[Callable[[], object]]:
    """A bar on stderr, where that is a terminal, and a function that moves it on by one prompt."""
    if not wanted or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True)
    with Progress(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)
