"""The front door for event loops: `AsyncLLM`. As `LLM`, awaitable; nothing here blocks the loop.

Tokenising and compiling grammars happen in threads of the loop's executor, the passes on the engine's.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, overload

from paceline.completion import Completion, Score
from paceline.engine.arguments import collected_arguments, request_arguments
from paceline.engine.collecting import AsyncBatch, answered, collect_async
from paceline.engine.opening import check_options, open_engine
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
from paceline.streaming import AsyncStream, StreamChannel

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from paceline.engine.any_engine import AnyEngine
    from paceline.engine.heartbeat import Heartbeat
    from paceline.engine.metrics_snapshot import MetricsSnapshot
    from paceline.runtime import Model, Tokenizer
    from paceline.runtime.embedder import Normalization
    from paceline.scheduling.limits import Limits
    from paceline.scheduling.slots_snapshot import SlotsSnapshot


class AsyncLLM:
    """A model and its engine for an event loop; arguments as for `LLM`.

    The model is loaded by `async with`, by `await llm.start()`, or by the first request, in a thread. Where that fails, all
    that wait for it are told, and the next one tries again. One event loop uses it; `aclose()` or the end of the
    `async with` block ends it.
    """

    def __init__(self, model: Model | str | os.PathLike[str] | None = None, **options: Any) -> None:
        check_options(model, options)  # what is wrong with them is said here
        self._model, self._options = model, options
        self._starting: asyncio.Future[AnyEngine] | None = None

    async def start(self) -> Self:
        """Loads the model and starts the engine, once."""
        await self._engine()
        return self

    @overload
    async def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **options: Any
    ) -> Completion: ...
    @overload
    async def generate(
        self, prompt: Sequence[str] | Sequence[Sequence[int]], params: SamplingParams | None = None, **options: Any
    ) -> list[Completion]: ...

    async def generate(
        self, prompt: Any, params: SamplingParams | None = None, **options: Any
    ) -> Completion | list[Completion]:
        """As `LLM.generate`, but for its progress bar, which there is none of. Cancelling the task cancels the request."""
        engine = await self._engine()
        sampling, rest = collected_arguments(engine.sampling_defaults, params, options)
        if is_batch(prompt):
            return batch_outcome(await AsyncBatch(engine, sampling, rest).run(prompt))
        request = await asyncio.to_thread(engine.prepare, prompt, sampling, rest)
        return await collect_async(request, engine.accept(request))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> AsyncStream:
        """As `LLM.stream`: an async context manager and iterator. What is wrong with the request is raised on entering."""
        if is_batch(prompt):
            raise InvalidType("stream takes one prompt, a str or token ids; make a stream for each of several")

        async def submit() -> StreamChannel:
            engine = await self._engine()
            sampling, rest = request_arguments(engine.sampling_defaults, params, options)
            request = await asyncio.to_thread(engine.prepare, prompt, sampling, rest)
            return engine.accept(request)

        return AsyncStream(submit, keep_alive=self)

    async def embed(
        self,
        texts: str | Sequence[str] | Sequence[Sequence[int]],
        *,
        pooling: str | None = None,
        normalize: bool | Normalization = True,
        **options: Any,
    ) -> npt.NDArray[np.float32]:
        """As `LLM.embed`."""
        engine = await self._engine()
        many, rest = [texts] if isinstance(texts, str) else texts, embedding_options(options)
        rows = await answered(lambda: engine.embed(many, pooling, rest))
        found = vectors(rows, normalize, engine.model.n_embd_out)
        return found[0] if isinstance(texts, str) else found

    async def rerank(self, query: str, documents: Sequence[str], **options: Any) -> list[Score]:
        """As `LLM.rerank`."""
        engine = await self._engine()
        rest = reranking_options(options)
        return scores(await answered(lambda: engine.rerank(query, documents, rest)))

    async def save_prefix(self, name: str, prompt: Prompt, **options: Any) -> int:
        """As `LLM.save_prefix`."""
        engine = await self._engine()
        return await asyncio.to_thread(engine.save_prefix, name, prompt, prefix_options(options))

    async def load_prefix(self, name: str, **options: Any) -> list[int]:
        """As `LLM.load_prefix`."""
        engine = await self._engine()
        return await asyncio.to_thread(engine.load_prefix, name, prefix_options(options))

    async def erase_prefix(self, name: str) -> None:
        """As `LLM.erase_prefix`."""
        engine = await self._engine()
        await asyncio.to_thread(engine.erase_prefix, name)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; the engine must have been started."""
        return self._started.tokenizer

    @property
    def model(self) -> Model:
        """The model; the engine must have been started."""
        return self._started.model

    @property
    def limits(self) -> Limits:
        """As `LLM.limits`; the engine must have been started."""
        return self._started.limits

    @property
    def engine(self) -> AnyEngine:
        """What computes, for applications that read streams in their own way; it must have been started."""
        return self._started

    def stats(self) -> MetricsSnapshot:
        """As `LLM.stats`; the engine must have been started."""
        return self._started.stats()

    async def slots(self) -> SlotsSnapshot:
        """As `LLM.slots`."""
        return await asyncio.wrap_future((await self._engine()).ask_slots())

    def heartbeat(self) -> Heartbeat:
        """As `LLM.heartbeat`; the engine must have been started."""
        return self._started.heartbeat()

    async def aclose(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        """As `LLM.close`, without blocking the loop."""
        if self._starting is None:
            return
        await asyncio.wait((self._starting,))
        if not _has_failed(self._starting):  # else nothing was started, and whoever wanted it was told
            engine = self._starting.result()
            await asyncio.to_thread(lambda: engine.close(drain=drain, timeout_s=timeout_s))

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def _started(self) -> AnyEngine:
        if self._starting is None or not self._starting.done():
            raise RuntimeError("the engine has not been started: use `async with`, or await start()")
        return self._starting.result()

    async def _engine(self) -> AnyEngine:
        if self._starting is None or _has_failed(self._starting):
            load = asyncio.to_thread(open_engine, self._model, self._options)
            self._starting = asyncio.ensure_future(load)
        return await asyncio.shield(self._starting)  # a cancelled request does not cancel the load that others wait for


def _has_failed(starting: asyncio.Future[AnyEngine]) -> bool:
    return starting.done() and (starting.cancelled() or starting.exception() is not None)
