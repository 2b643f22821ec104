"""Waits for the results of an engine and turns them into completions, batches, vectors and scores for `LLM` and `AsyncLLM`.

Runs on the threads and event loops of callers. Leaving a wait early, by Ctrl-C, an exception or a cancelled task, cancels the
requests.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from paceline import validation
from paceline.engine.arguments import embedding_options, reranking_options, streamed_arguments
from paceline.engine.prompts import is_single_text
from paceline.errors import BatchError, EngineStopped, InvalidType, PacelineError, Unsupported
from paceline.params import SamplingParams
from paceline.runtime.embedder import Normalization, normalized
from paceline.sequence import Request
from paceline.streaming import FinishReason, StreamChannel, StreamChunk, Usage
from paceline.streaming.chunk import Classification, Completion, Score, completion_of

if TYPE_CHECKING:
    from rich.progress import Progress

    from paceline.engine.client import EngineClient
    from paceline.engine.prompts import Prompt
    from paceline.runtime import Model

Outcome = Completion | PacelineError
_PROBABLE = ("qwen3", "qwen3vl")  # architectures whose scores llama.cpp returns as probabilities
_P = TypeVar("_P")  # a prompt, or what a request is prepared from
_R = TypeVar("_R")


@contextmanager
def cancelled_if_left(cancel: Callable[[], object]) -> Iterator[None]:
    """Call `cancel` if the block raises, also for `KeyboardInterrupt` and the like."""
    try:
        yield
    except BaseException:
        cancel()
        raise


def collect(channel: StreamChannel) -> Completion:
    """Return the completion. Raises the error of the first choice if all choices failed."""
    with cancelled_if_left(channel.cancel):
        return channel.completion_of(channel).unless_failed()


async def collect_async(channel: StreamChannel) -> Completion:
    """As `collect`, for an event loop."""
    return channel.completion_of([chunk async for chunk in channel]).unless_failed()


async def submit_async(submit: Callable[[], Future[list[Any]]]) -> list[Any]:
    """Call `submit` in a thread and wait for its future; cancelling the caller cancels the future, too.

    If the thread has no future yet, it cancels the future that it gets.
    """
    submitted: list[Future[list[Any]]] = []
    left = threading.Event()

    def submit_unless_left() -> Future[list[Any]]:
        future = submit()
        submitted.append(future)
        if left.is_set():  # after the append: the other side sets it before it looks at the list
            future.cancel()
        return future

    try:
        return await asyncio.wrap_future(await asyncio.to_thread(submit_unless_left))
    except BaseException:
        left.set()
        for future in submitted:
            future.cancel()
        raise


def waits(engine: EngineClient) -> bool:
    """Return whether requests of the library wait for room in this engine, by its option `when_full`."""
    return engine.config.when_full == "wait"


class Batch(Generic[_P]):
    """The requests of a call for several prompts: as many are open at once as the engine takes, each with an outcome of its own.

    `QueueFull` is an outcome only with when_full="refuse", if other callers fill the engine and no request of the call is open.

    Args:
        engine: The engine.
        prepare: Makes the request of a prompt, when there is room for it among the requests of the call.
        on_outcome: Called with each prompt and its outcome, while later requests run.
    """

    def __init__(
        self, engine: EngineClient, prepare: Callable[[_P], Request], on_outcome: Callable[[_P, Outcome], object]
    ) -> None:
        self._engine, self._prepare, self._on_outcome = engine, prepare, on_outcome
        self._most = engine.config.num_slots + engine.config.max_queue
        self._running: deque[tuple[int, StreamChannel]] = deque()
        self._prompts: Sequence[_P] = ()
        self._outcomes: dict[int, Outcome] = {}

    def run(self, prompts: Sequence[_P]) -> list[Outcome]:
        """Return the outcomes, in the order of the prompts."""
        self._prompts = prompts

        def cancel() -> None:
            for _, channel in self._running:
                channel.cancel()

        with cancelled_if_left(cancel):
            for index, prompt in enumerate(prompts):
                if len(self._running) >= self._most:
                    self._finish_oldest()
                try:
                    self._start(index, prompt)
                except PacelineError as error:
                    self._end(index, error)
            while self._running:
                self._finish_oldest()
        return [self._outcomes[index] for index in range(len(prompts))]

    def _start(self, index: int, prompt: _P) -> None:
        request = self._prepare(prompt)
        may_wait = bool(self._running) or waits(self._engine)
        self._running.append((index, self._engine.accept(request, index, waits=may_wait)))

    def _finish_oldest(self) -> None:
        index, channel = self._running[0]
        outcome: Outcome
        try:
            outcome = collect(channel)
        except PacelineError as error:
            outcome = error
        channel.wait_released()  # the terminal chunk comes a moment before the engine has a place again
        self._running.popleft()
        self._end(index, outcome)

    def _end(self, index: int, outcome: Outcome) -> None:
        self._outcomes[index] = outcome
        self._on_outcome(self._prompts[index], outcome)


class AsyncBatch(Generic[_P]):
    """A `Batch` for an event loop.

    Args:
        engine: As for `Batch`.
        prepare: As for `Batch`; called in a thread.
        on_outcome: Called with each outcome. If it raises, open requests are cancelled, and `run` raises its error.
        max_open: Most requests that are open at once; None: as many as the engine takes.
    """

    def __init__(
        self,
        engine: EngineClient,
        prepare: Callable[[_P], Request],
        on_outcome: Callable[[Outcome], object] = lambda _: None,
        *,
        max_open: int | None = None,
    ) -> None:
        self._engine, self._prepare, self._on_outcome = engine, prepare, on_outcome
        self._is_bounded = max_open is not None
        self._room = asyncio.Semaphore(max_open or engine.config.num_slots + engine.config.max_queue)
        self._num_open = 0
        self._outcomes: dict[int, Outcome] = {}

    async def run(self, prompts: Sequence[_P]) -> list[Outcome]:
        """Return the outcomes, in the order of the prompts."""
        try:
            async with asyncio.TaskGroup() as group:
                for index, prompt in enumerate(prompts):
                    await self._start(group, index, prompt)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [self._outcomes[index] for index in range(len(prompts))]

    async def _start(self, group: asyncio.TaskGroup, index: int, prompt: _P) -> None:
        await self._room.acquire()
        try:
            request = await asyncio.to_thread(self._prepare, prompt)
            # a bounded call has given a place back that another request may have taken
            may_wait = self._num_open > 0 or (self._is_bounded and index > 0) or waits(self._engine)
            channel = self._engine.accept(request, index, waits=may_wait)
        except PacelineError as error:
            self._room.release()
            self._end(index, error)
        else:
            self._num_open += 1
            group.create_task(self._collect(index, channel))

    async def _collect(self, index: int, channel: StreamChannel) -> None:
        # returns when the engine has a place again, a moment after the terminal chunk
        outcome: Outcome
        try:
            outcome = await collect_async(channel)
        except PacelineError as error:
            outcome = error
        await channel.released()
        self._num_open -= 1
        self._room.release()
        self._end(index, outcome)

    def _end(self, index: int, outcome: Outcome) -> None:
        self._outcomes[index] = outcome
        self._on_outcome(outcome)


def submit_streams(
    engine: EngineClient,
    prompts: Sequence[Prompt],
    entries: Sequence[tuple[SamplingParams | None, StreamChannel | None]],
    options: Mapping[str, Any],
    first_index: int,
) -> list[StreamChannel]:
    """Prepare all prompts, then submit them; return the channel of each. A refused prompt ends its own channel only.

    entries: of `batch_entries`. first_index: number of the first request. Raises `InvalidParams` for the options before
    anything is submitted, and `EngineStopped`.
    """
    defaults = engine.sampling_defaults
    arguments = [streamed_arguments(defaults, params, options, channel) for params, channel in entries]
    prepared = [
        _unless_refused(partial(engine.prepare, prompt, *given))
        for prompt, given in zip(prompts, arguments, strict=True)
    ]
    channels: list[StreamChannel] = []

    def cancel() -> None:
        for channel in channels:
            channel.cancel()

    with cancelled_if_left(cancel):
        for index, (found, (_, given)) in enumerate(zip(prepared, entries, strict=True), first_index):
            accept = partial(engine.accept, request_index=index, channel=given, waits=waits(engine))
            channel = _unless_refused(partial(accept, found)) if isinstance(found, Request) else found
            channels.append(_ended(channel, index, given) if isinstance(channel, PacelineError) else channel)
    return channels


def _unless_refused(submit: Callable[[], _R]) -> _R | PacelineError:
    """Return the result, or the error of this request. Raises `EngineStopped`."""
    try:
        return submit()
    except EngineStopped:
        raise
    except PacelineError as error:
        return error


def _ended(error: PacelineError, index: int, channel: StreamChannel | None) -> StreamChannel:
    channel = StreamChannel.create() if channel is None else channel
    assemble = partial(completion_of, prompt=(), wants_logprobs=False, wants_prompt_logprobs=False, index=index)
    sender = channel.attach(request_index=index, assemble=assemble)
    sender.finish(StreamChunk(index=0, finish_reason=FinishReason.ERROR, usage=Usage(), error=error))
    sender.release()
    return channel


def engine_repr(owner: object, engine: EngineClient | None) -> str:
    """Return the repr of an object with an engine, without asking the engine. None: loading failed."""
    name = type(owner).__name__
    if engine is None:
        return f"{name}(not loaded)"
    limits, closed = engine.limits, ", closed" if engine.is_closed else ""
    n_ctx = limits.max_positions if limits.num_cells is None else limits.num_cells
    return f"{name}({engine.model.paths[0].name!r}, num_slots={limits.num_slots}, n_ctx={n_ctx}{closed})"


def batch_outcome(outcomes: Sequence[_R | PacelineError], unit: str = "prompts") -> list[_R]:
    """Return the results. Raises `BatchError` with every outcome if some are errors. unit: plural noun for the message."""
    errors = [(index, outcome) for index, outcome in enumerate(outcomes) if isinstance(outcome, PacelineError)]
    if errors:
        index, first = errors[0]
        raise BatchError(
            f"{len(errors)} of {len(outcomes)} {unit} failed; the first is outcomes[{index}]: {first}",
            outcomes,
        ) from first
    return [outcome for outcome in outcomes if not isinstance(outcome, PacelineError)]


@dataclass(frozen=True, slots=True)
class VectorCall(Generic[_R]):
    """A call for vectors, classes or scores. submit: starts the request; finish: makes the result of the arrays."""

    submit: Callable[[], Future[list[Any]]]
    finish: Callable[[list[Any]], _R]

    def result(self) -> _R:
        """Return the result. Leaving the wait cancels the request."""
        future = self.submit()
        with cancelled_if_left(future.cancel):
            return self.finish(future.result())

    async def result_async(self) -> _R:
        """Return the result, without blocking the event loop. Cancelling the caller cancels the request."""
        return self.finish(await submit_async(self.submit))


def embedding_call(  # noqa: PLR0913, PLR0917 - the parameters of `LLM.embed`
    engine: EngineClient,
    texts: Any,
    pooling: str | None,
    normalize: bool | Normalization | None,
    dimensions: int | None,
    prompt_name: str | None,
    options: Mapping[str, Any],
) -> VectorCall[npt.NDArray[np.float32]]:
    """Return the call of `LLM.embed`. Raises `Unsupported`, `InvalidParams` and `InvalidType` for the arguments."""
    if pooling == "none":
        raise Unsupported('pooling "none" has a vector for each token; use embed_tokens() of an Embedder of your own')
    check_prompt_name(prompt_name)
    size = None if dimensions is None else checked_dimensions(dimensions, engine.model.n_embd_out)
    is_single, request_options = is_single_text(texts), embedding_options(options)
    inputs = [texts] if is_single else texts

    def finish(rows: list[Any]) -> npt.NDArray[np.float32]:
        found = vectors(rows, normalize, engine.model.n_embd_out, size)
        return found[0] if is_single else found

    return VectorCall(lambda: engine.embed(inputs, pooling, request_options, waits=waits(engine)), finish)


def classifying_call(engine: EngineClient, texts: Any, options: Mapping[str, Any]) -> VectorCall[list[Classification]]:
    """Return the call of `LLM.classify`."""
    request_options = embedding_options(options)
    submit = partial(engine.embed, texts, "rank", request_options, waits=waits(engine))
    return VectorCall(submit, partial(classifications, engine.model))


def reranking_call(
    engine: EngineClient, query: str, documents: Sequence[str], options: Mapping[str, Any]
) -> VectorCall[list[Score]]:
    """Return the call of `LLM.rerank`."""
    request_options = reranking_options(options)
    return VectorCall(partial(engine.rerank, query, documents, request_options, waits=waits(engine)), scores)


def vectors(
    rows: list[Any], normalize: bool | Normalization | None, dimension: int, dimensions: int | None = None
) -> npt.NDArray[np.float32]:
    """Return the rows as float32 (n, dimension), or the first `dimensions` numbers of each, normalised as asked."""
    normalize = True if normalize is None else normalize
    kind = ("l2" if normalize else "none") if isinstance(normalize, bool) else normalize
    if not rows:
        return np.empty((0, dimension if dimensions is None else dimensions), dtype=np.float32)
    found = np.stack(rows).astype(np.float32, copy=False)
    return normalized(found if dimensions is None else np.ascontiguousarray(found[:, :dimensions]), kind)


def checked_dimensions(dimensions: int | None, dimension: int) -> int | None:
    """Return the number of dimensions to keep. Raises `InvalidParams` if it is more than a vector has."""
    if dimensions is None:
        return None
    hint = f"this model's vectors have {dimension} numbers"
    return validation.integer("dimensions", dimensions, 1, dimension, hint)


def check_prompt_name(prompt_name: str | None) -> None:
    """Raise `Unsupported` for the name of a prefix: GGUF files have no prefixes."""
    if prompt_name is not None:
        raise Unsupported(
            f"prompt_name: the model's file has no prompt {prompt_name!r:.80}, since GGUF files carry no prefixes; write what "
            'the model\'s card says in front of the text, such as "query: "'
        )


def probabilities(model: Model, rows: list[Any]) -> npt.NDArray[np.float64]:
    """Return the outputs of a classification head as probabilities, float64 (n, outputs).

    A single output is an independent probability (sigmoid); several outputs exclude each other (softmax). For some
    architectures llama.cpp returns probabilities already.
    """
    found = np.stack(rows).astype(np.float64)
    if model.metadata.get("general.architecture") in _PROBABLE:
        return found
    if found.shape[1] == 1:
        return np.asarray(0.5 + 0.5 * np.tanh(0.5 * found))  # the sigmoid, without overflows
    return softmax(found)


def softmax(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the softmax of each row, (n, values)."""
    powers = np.exp(values - values.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def classifications(model: Model, rows: list[Any]) -> list[Classification]:
    """Return the class of each text."""
    if not rows:
        return []
    labels = model.class_labels
    found = [tuple(row) for row in probabilities(model, rows).tolist()]
    return [Classification(labels[probs.index(max(probs))], probs, labels) for probs in found]


def scores(rows: list[Any]) -> list[Score]:
    """Return a score for each document, best first; of several outputs, the first."""
    found = [Score(index, float(row[0])) for index, row in enumerate(rows)]
    return sorted(found, key=lambda score: -score.score)


_UPDATE_S: Final = 0.1  # between two pictures in a notebook, each of which is a message to the browser


def checked_progress(progress: object) -> bool | Callable[[int, int], object]:
    """Return the option `progress`: False for None. Raises `InvalidType` if it is neither a bool nor a function."""
    if progress is not None and not isinstance(progress, bool) and not callable(progress):
        raise InvalidType(f"progress must be True, False or a function progress(done, total), not {progress!r:.80}")
    return False if progress is None else progress


@contextmanager
def progress_bar(total: int, show: bool | Callable[[int, int], object]) -> Iterator[Callable[[], object]]:
    """Show a bar if stderr is a terminal or this is a notebook, or call a function with the progress.

    Yields a function that advances by one prompt.
    """
    if callable(show):
        done = itertools.count(1)
        yield lambda: show(next(done), total)
        return
    is_terminal = sys.stderr.isatty()
    if not show or not (is_terminal or "IPython" in sys.modules):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True)
    columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(elapsed_when_finished=True)
    if console.is_jupyter:
        with _notebook_bar(Progress(*columns, console=console, auto_refresh=False), total) as advance:
            yield advance
    elif is_terminal:
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=total)
            yield lambda: bar.advance(task)
    else:
        yield lambda: None


@contextmanager
def _notebook_bar(bar: Progress, total: int) -> Iterator[Callable[[], object]]:
    """Show the bar as an output of the cell that changes in place, without ipywidgets. The last picture stays."""
    task, shown_s = bar.add_task("", total=total), time.monotonic()
    picture = importlib.import_module("IPython.display").display(bar, display_id=True)

    def advance() -> None:
        nonlocal shown_s
        bar.advance(task)
        if time.monotonic() - shown_s >= _UPDATE_S:
            picture.update(bar)
            shown_s = time.monotonic()

    try:
        yield advance
    finally:
        picture.update(bar)
