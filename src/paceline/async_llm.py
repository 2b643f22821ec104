"""The front door for event loops: `AsyncLLM`, the awaitable `LLM`. Nothing here blocks the loop.

Tokenizing and compiling grammars run in threads of the loop's executor, loading in a thread of its own, forward passes on
the engine's thread. Nothing here belongs to one event loop, except a coroutine while it waits.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack, overload

from paceline import validation
from paceline.chat_client.chat_methods import AsyncChatMethods, is_batch_of_chats
from paceline.chat_client.request_batch import BatchReply, BatchRequest, BatchResult, GivenRequest, run_requests_async
from paceline.config import EngineConfig
from paceline.engine.arguments import (
    GenerateKeywords,
    LLMKeywords,
    ModelPath,
    batch_arguments,
    check_channel,
    collected_arguments,
    given_options,
    prefix_options,
    streamed_arguments,
)
from paceline.engine.in_process_engine import check_options, check_source, local_files, local_options, open_engine
from paceline.engine.prompts import Prompt, Prompts, Segments, is_batch
from paceline.engine.results import (
    AsyncBatch,
    batch_outcome,
    classifying_call,
    collect_async,
    embedding_call,
    engine_repr,
    reranking_call,
    submit_streams,
    waits,
)
from paceline.engine.scoring import checked_normalization, decision, scoring_call
from paceline.errors import InvalidType
from paceline.keywords import (
    EmbedKeywords,
    IntArray,
    PrefixKeywords,
    RerankKeywords,
    ScoreKeywords,
    TokenIds,
    with_keywords,
)
from paceline.llm import StreamEntries, StreamMethods
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.runtime import Model
from paceline.runtime.context_options import ContextOptions
from paceline.streaming import AsyncBatchStream, AsyncStream, StreamChannel
from paceline.streaming.chunk import ChoiceScore, Classification, Completion, LengthNormalization, Score, shortened

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from paceline.engine import EngineClient
    from paceline.media import Attachment
    from paceline.runtime.embedder import Normalization
    from paceline.scheduling.records import SlotsSnapshot


class AsyncLLM(StreamMethods[AsyncStream, AsyncBatchStream], AsyncChatMethods):
    """A model and its engine for event loops: `LLM`, with awaitable methods.

    Unless stated otherwise, a method has the arguments, result and errors of the method of `LLM` that it names. Cancelling a
    task cancels its request.

    The model is loaded in a thread by `async with`, `await llm.start()` or the first request. If loading fails, every
    caller that waits for it gets the error, and the next call tries again. `aclose()`, `close()` or the end of the
    `async with` block stops the engine. Every event loop may use it, also after the loop that started it is closed; a stream
    has one reader. `tokenizer`, `model`, `limits`, `engine`, `stats` and `heartbeat` raise `RuntimeError` before it is loaded.

        async with AsyncLLM("model.gguf") as llm:
            async for chunk in llm.stream("Once upon a time", max_tokens=40):
                print(chunk.text, end="", flush=True)
    """

    @with_keywords(EngineConfig, ContextOptions, Model.load, lora=(), instruments=())
    def __init__(
        self,
        model: Model | ModelPath | None = None,
        *,
        chat_template: str | None = None,
        offline: bool = False,
        hf_token: str | None = None,
        **options: Unpack[LLMKeywords],
    ) -> None:
        """Check the options; nothing is loaded yet.

        Args:
            model: A path to a GGUF file; a name like "hf:user/repo:Q4_K_M" or "ollama:llama3.2", or the URL of a GGUF file, to
                download files that are not there yet; a `Model`; or None for the small demo model of the package.
            chat_template: For `chat`, in place of the model's own; compiled by the first chat.
            offline: Whether a model that is given by name is looked for in the caches alone. HF_HUB_OFFLINE=1 does the same.
            hf_token: A token of the Hugging Face Hub; None: HF_TOKEN, or the token of `hf auth login`.
            **options: Options of the model, its context and its engine; see `LLM`.

        Raises:
            InvalidParams: An option is out of its range, unknown or of the wrong type.
        """
        check_options(model, options)
        check_source(model, offline=offline, hf_token=hf_token)
        self._model, self._options = model, options
        self._offline, self._hf_token = offline, hf_token
        self._chat_template = None if chat_template is None else validation.text("chat_template", chat_template)
        self._starting: Future[EngineClient] | None = None
        self._lock = threading.Lock()  # guards `_starting`

    async def start(self) -> Self:
        """Load the model and start the engine, unless that has been done.

        Returns:
            This object.

        Raises:
            ModelError: The model or an adapter cannot be loaded, or a download is damaged.
            ModelNotFound: There is no repository, file or quantisation of that name.
            AccessDenied: The repository is gated or private, and the token may not read it.
            HubUnavailable: The hub cannot be reached, and the caches do not have the model.
            DiskFull: The disk has no space for the download.
            NotEnoughMemory: The model or its KV cache does not fit into memory.
        """
        await self._engine()
        return self

    @overload
    async def generate(  # type: ignore[overload-overlap] # a str is a sequence of texts, too: the first match counts
        self, prompt: str | TokenIds, params: SamplingParams | None = None, **options: Unpack[GenerateKeywords]
    ) -> Completion: ...
    @overload
    async def generate(  # type: ignore[overload-overlap]
        self,
        prompt: Prompts,
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        **options: Unpack[GenerateKeywords],
    ) -> list[Completion]: ...
    @overload
    async def generate(
        self, prompt: Segments, params: SamplingParams | None = None, **options: Unpack[GenerateKeywords]
    ) -> Completion: ...

    @with_keywords(SamplingParams, RequestOptions)
    async def generate(
        self, prompt: Any, params: Any = None, **options: Unpack[GenerateKeywords]
    ) -> Completion | list[Completion]:
        """Generate as `LLM.generate` does, without a progress bar."""
        engine = await self._engine()
        sort = partial(collected_arguments, engine.sampling_defaults, options=options)
        if is_batch(prompt):
            arguments = batch_arguments(params, len(prompt), sort)
            batch = AsyncBatch[Any](engine, lambda entry: engine.prepare(entry[0], *entry[1]))
            return batch_outcome(await batch.run(list(zip(prompt, arguments, strict=True))))
        request = await asyncio.to_thread(engine.prepare, prompt, *sort(params))
        return await collect_async(engine.accept(request, waits=waits(engine)))

    async def batch(
        self, requests: Iterable[BatchRequest] | AsyncIterable[BatchRequest]
    ) -> AsyncGenerator[BatchResult, None]:
        """Run requests as `LLM.batch` does; they may come from an async iterable.

        A loop that is left early cancels the requests once its iterator is closed: `async with contextlib.aclosing(...)` does
        so at once.
        """

        async def reply_to(request: GivenRequest) -> BatchReply:
            subject, options = request.subject, request.options
            if is_batch_of_chats(subject) if request.is_chat else is_batch(subject):
                raise InvalidType(
                    "a request of a batch has one prompt or conversation; make a request of each of several"
                )
            reply: BatchReply = await (
                self.chat(subject, **options) if request.is_chat else self.generate(subject, **options)
            )
            return reply

        engine = await self._engine()
        async with aclosing(run_requests_async(engine, requests, reply_to)) as results:
            async for result in results:
                yield result

    def _stream_one(
        self, prompt: Any, params: Any, channel: StreamChannel | None, options: Mapping[str, Any], index: int
    ) -> AsyncStream:
        check_channel(channel)

        async def submit() -> StreamChannel:
            engine = await self._engine()
            sampling, rest = streamed_arguments(engine.sampling_defaults, params, options, channel)
            request = await asyncio.to_thread(engine.prepare, prompt, sampling, rest)
            return engine.accept(request, index, channel, waits=waits(engine))

        interval = given_options(options).get("interval", 1) if channel is None else channel.interval
        return AsyncStream(submit, interval=interval, request_index=index, keep_alive=self)

    def _stream_each(
        self, prompts: list[Any], entries: StreamEntries, options: Mapping[str, Any], index: int
    ) -> AsyncBatchStream:
        async def submit_all() -> list[StreamChannel]:
            engine = await self._engine()
            return await asyncio.to_thread(submit_streams, engine, prompts, entries, options, index)

        return AsyncBatchStream(submit_all, keep_alive=self)

    @with_keywords(RequestOptions)
    async def embed(
        self,
        texts: str
        | IntArray
        | Sequence[str | Attachment | int | IntArray | Sequence[str | Attachment | int | Sequence[int]]],
        *,
        pooling: str | None = None,
        normalize: bool | Normalization | None = True,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        **options: Unpack[EmbedKeywords],
    ) -> npt.NDArray[np.float32]:
        """Embed texts, and prompts with images or audio, as `LLM.embed` does."""
        engine = await self._engine()
        call = embedding_call(engine, texts, pooling, normalize, dimensions, prompt_name, options)
        return await call.result_async()

    @with_keywords(RequestOptions)
    async def classify(self, texts: Sequence[str | TokenIds], **options: Unpack[EmbedKeywords]) -> list[Classification]:
        """Classify texts as `LLM.classify` does."""
        return await classifying_call(await self._engine(), texts, options).result_async()

    @with_keywords(RequestOptions)
    async def rerank(self, query: str, documents: Sequence[str], **options: Unpack[RerankKeywords]) -> list[Score]:
        """Score documents as `LLM.rerank` does."""
        return await reranking_call(await self._engine(), query, documents, options).result_async()

    @with_keywords(RequestOptions)
    async def score(
        self, prompt: str | TokenIds, choices: Sequence[str | TokenIds], **options: Unpack[ScoreKeywords]
    ) -> list[ChoiceScore]:
        """Score choices after a prompt as `LLM.score` does."""
        call = await asyncio.to_thread(scoring_call, await self._engine(), prompt, choices, options)
        return await call.result_async()

    @with_keywords(RequestOptions)
    async def decide(
        self,
        prompt: str,
        choices: Sequence[str],
        *,
        length_normalization: LengthNormalization = "none",
        **options: Unpack[ScoreKeywords],
    ) -> Classification:
        """Decide among choices after a prompt as `LLM.decide` does."""
        by = checked_normalization(length_normalization)
        return decision(choices, await self.score(prompt, choices, **options), by)

    async def load_lora(self, name: str, path: str | os.PathLike[str], *, in_place: bool = False) -> None:
        """Load a LoRA adapter as `LLM.load_lora` does."""
        engine = await self._engine()
        await asyncio.to_thread(lambda: engine.load_lora(name, path, in_place=in_place))

    async def unload_lora(self, name: str, *, timeout_s: float | None = 30.0) -> None:
        """Unload a LoRA adapter as `LLM.unload_lora` does."""
        engine = await self._engine()
        await asyncio.to_thread(lambda: engine.unload_lora(name, timeout_s=timeout_s))

    @with_keywords(RequestOptions)
    async def save_prefix(self, name: str, prompt: Prompt, **options: Unpack[PrefixKeywords]) -> int:
        """Save a cached prefix as `LLM.save_prefix` does."""
        engine = await self._engine()
        return await asyncio.to_thread(engine.save_prefix, name, prompt, prefix_options(options))

    @with_keywords(RequestOptions)
    async def load_prefix(self, name: str, **options: Unpack[PrefixKeywords]) -> list[int]:
        """Load a saved prefix as `LLM.load_prefix` does."""
        engine = await self._engine()
        return await asyncio.to_thread(engine.load_prefix, name, prefix_options(options))

    async def erase_prefix(self, name: str) -> None:
        """Delete the file of a saved prefix as `LLM.erase_prefix` does."""
        engine = await self._engine()
        await asyncio.to_thread(engine.erase_prefix, name)

    async def slots(self) -> SlotsSnapshot:
        """Return the activity of each slot as `LLM.slots` does."""
        return await asyncio.wrap_future((await self._engine()).ask_slots())

    async def aclose(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        """Stop the engine as `LLM.close` does, without blocking the loop. Any event loop may call it."""
        if self._starting is not None:
            await asyncio.to_thread(self.close, drain=drain, timeout_s=timeout_s)

    def close(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        """Stop the engine as `LLM.close` does, for callers without an event loop; in a coroutine use `aclose`.

        A load that has begun is waited for.
        """
        starting = self._starting
        if starting is not None and starting.exception() is None:  # a load that failed has nothing to stop
            starting.result().close(drain=drain, timeout_s=timeout_s)

    def __repr__(self) -> str:
        starting = self._starting
        if starting is None or not starting.done():
            model = "demo model" if self._model is None else str(self._model)
            return f"{type(self).__name__}({shortened(model)}, {'not loaded' if starting is None else 'loading'})"
        return engine_repr(self, None if _has_failed(starting) else starting.result())

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def _started(self) -> EngineClient:
        if self._starting is None or not self._starting.done():
            raise RuntimeError("the engine has not been started: use `async with`, or await start()")
        return self._starting.result()

    async def _engine(self) -> EngineClient:
        starting = self._begin_load()
        if starting.done():
            return starting.result()
        return await asyncio.wrap_future(starting)  # the load goes on for other callers if this one is cancelled

    def _begin_load(self) -> Future[EngineClient]:
        """Return the load that has begun and has not failed, or begin another one in a thread of its own."""
        with self._lock:
            if self._starting is None or _has_failed(self._starting):
                starting: Future[EngineClient] = Future()
                starting.set_running_or_notify_cancel()
                context = contextvars.copy_context()
                threading.Thread(target=context.run, args=(self._load, starting), name="paceline-load").start()
                self._starting = starting  # only when its thread runs: `start` raises if there can be no other thread
            return self._starting

    def _load(self, starting: Future[EngineClient]) -> None:
        """Find or download the files and start the engine, in a thread."""
        source: dict[str, Any] = {"offline": self._offline, "hf_token": self._hf_token}
        try:
            files = local_files(self._model, self._options, **source)
            engine = open_engine(files, local_options(self._options, **source))
        except BaseException as error:  # noqa: BLE001 - raised by the callers that wait
            starting.set_exception(error)
        else:
            starting.set_result(engine)


def _has_failed(starting: Future[EngineClient]) -> bool:
    return starting.done() and starting.exception() is not None
