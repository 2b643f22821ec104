"""The blocking front door, `LLM`: starts requests on an engine and assembles their results."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeAlias, TypeVar, Unpack, overload

from paceline import validation
from paceline.chat_client.chat_arguments import ChatFormats
from paceline.chat_client.chat_methods import ChatMethods
from paceline.chat_client.request_batch import BatchCall, BatchRequest, BatchResult, GivenRequest, run_requests
from paceline.config import EngineConfig
from paceline.engine.arguments import (
    METHODS_ELSEWHERE,
    GenerateKeywords,
    LLMKeywords,
    ModelPath,
    StreamKeywords,
    batch_arguments,
    batch_entries,
    checked_index,
    collected_arguments,
    prefix_options,
    streamed_arguments,
)
from paceline.engine.in_process_engine import check_options, local_files, local_options, open_engine
from paceline.engine.prompts import Prompt, Prompts, Segments, is_batch
from paceline.engine.results import (
    Batch,
    batch_outcome,
    checked_progress,
    classifying_call,
    collect,
    embedding_call,
    engine_repr,
    progress_bar,
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
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.runtime import Model
from paceline.runtime.context_options import ContextOptions
from paceline.streaming import BatchStream, Stream, StreamChannel
from paceline.streaming.chunk import ChoiceScore, Classification, Completion, LengthNormalization, Score

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from paceline.engine import EngineClient
    from paceline.engine.adapters import LoraAdapter
    from paceline.media import Attachment
    from paceline.observability.heartbeat import Heartbeat
    from paceline.observability.metric_table import MetricsSnapshot
    from paceline.runtime import Tokenizer
    from paceline.runtime.embedder import Normalization
    from paceline.scheduling.records import SlotsSnapshot
    from paceline.sequence import Limits


AnyStream = TypeVar("AnyStream")
AnyBatchStream = TypeVar("AnyBatchStream")
StreamEntries: TypeAlias = Sequence[tuple[SamplingParams | None, StreamChannel | None]]
"""The params and the channel of each prompt of a list."""


class StreamMethods(ABC, Generic[AnyStream, AnyBatchStream]):
    """The methods of `LLM` and `AsyncLLM` that wait for nothing."""

    @overload
    def stream(
        self,
        prompt: str | TokenIds,
        params: SamplingParams | None = None,
        *,
        channel: StreamChannel | None = None,
        request_index: int | None = 0,
        **options: Unpack[StreamKeywords],
    ) -> AnyStream: ...
    @overload
    def stream(
        self,
        prompt: Prompts,
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        channel: Sequence[StreamChannel | None] | None = None,
        request_index: int | None = 0,
        **options: Unpack[StreamKeywords],
    ) -> AnyBatchStream: ...
    @overload
    def stream(
        self,
        prompt: Segments,
        params: SamplingParams | None = None,
        *,
        channel: StreamChannel | None = None,
        request_index: int | None = 0,
        **options: Unpack[StreamKeywords],
    ) -> AnyStream: ...

    @with_keywords(SamplingParams, RequestOptions)
    def stream(
        self,
        prompt: Any,
        params: Any = None,
        *,
        channel: Any = None,
        request_index: int | None = 0,
        **options: Unpack[StreamKeywords],
    ) -> AnyStream | AnyBatchStream:
        """Stream the completion of a prompt, or of each prompt of a list, as it is generated. Leaving it cancels the requests.

        Args:
            prompt: A text, token ids, segments with images, or a list of prompts of any of these kinds, as in `generate`.
            params: The sampling parameters; for a list of prompts also a list with one for each; None: the defaults.
            channel: A new channel made by `StreamChannel.create()`, to read elsewhere; None: one is made. A channel serves
                one request; if that is refused, it can serve another. For a list of prompts a list with one for each.
            request_index: A number of the caller's for this request, at least 0; the engine does not use it. The prompts of
                a list are numbered from it.
            **options: Fields of `SamplingParams`, which override `params`, and of `RequestOptions`. For their defaults see
                `generate`.

        Returns:
            The stream, with the request already queued, or waiting for room in the queue. For a list a `BatchStream`, in which
                a prompt that is refused, for example because it is too long, ends with the error. The stream of an `AsyncLLM`
                is an async context manager and iterator. It submits its requests, and raises, when it is entered or first read.

        Raises:
            RequestError: The prompt, an option or the channel is invalid. For a list: `params`, `channel` or an option is
                invalid, or has not one entry for each prompt; nothing is submitted then.
            QueueFull: The queue is full, and `when_full` is "refuse"; not for a list.
            EngineStopped: The engine accepts no requests any more.
        """
        index = checked_index(request_index)
        if is_batch(prompt):
            return self._stream_each(list(prompt), batch_entries(params, channel, len(prompt)), options, index)
        return self._stream_one(prompt, params, channel, options, index)

    @property
    @abstractmethod
    def _started(self) -> EngineClient: ...

    @abstractmethod
    def _stream_one(
        self, prompt: Any, params: Any, channel: StreamChannel | None, options: Mapping[str, Any], index: int
    ) -> AnyStream: ...

    @abstractmethod
    def _stream_each(
        self, prompts: list[Any], entries: StreamEntries, options: Mapping[str, Any], index: int
    ) -> AnyBatchStream: ...

    def loras(self) -> tuple[LoraAdapter, ...]:
        """Return the LoRA adapters that requests may use.

        Returns:
            One record per adapter, with name and path, in the order of loading; one in place of another has its place.
        """
        return self._started.loras()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._started.tokenizer

    @property
    def model(self) -> Model:
        """The model."""
        return self._started.model

    @property
    def limits(self) -> Limits:
        """The resolved limits: slots, KV cells, seq ids, token budgets."""
        return self._started.limits

    @property
    def engine(self) -> EngineClient:
        """The engine, for applications that read its streams themselves."""
        return self._started

    def stats(self) -> MetricsSnapshot:
        """Return a snapshot of all metrics.

        Returns:
            Counters and histograms since the start; docs/metrics.md lists them.
        """
        return self._started.stats()

    def heartbeat(self) -> Heartbeat:
        """Return whether the engine is alive, and its activity, without waiting for it.

        Returns:
            The heartbeat at this moment.
        """
        return self._started.heartbeat()

    if not TYPE_CHECKING:  # type checkers refuse unknown names

        def __getattr__(self, name: str) -> object:
            raise validation.no_attribute(self, name, METHODS_ELSEWHERE)


class LLM(StreamMethods[Stream, BatchStream], ChatMethods):
    """A model and its engine: many requests, from many threads, share one forward pass a tick.

    Any thread may call its methods. `close()`, the end of a `with` block or the garbage collector ends the engine and its
    requests.

        with LLM("model.gguf", num_slots=8, n_ctx=32768) as llm:
            print(llm.generate("Once upon a time", max_tokens=40).text)
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
        """Load a model and start its engine.

        Args:
            model: A path to a GGUF file; a name like "hf:user/repo:Q4_K_M" or "ollama:llama3.2", or the URL of a GGUF file, to
                download files that are not there yet; a `Model`; or None for the small demo model of the package.
            chat_template: For `chat`, in place of the model's own: the name of another one that the file has, "chatml", or
                Jinja source.
            offline: Whether a model that is given by name is looked for in the caches alone. HF_HUB_OFFLINE=1 does the same.
            hf_token: A token of the Hugging Face Hub; None: HF_TOKEN, or the token of `hf auth login`.
            **options: Options of `EngineConfig` (num_slots, strategy, max_queue ...), of `Model.load` (n_gpu_layers ...) and
                of the llama.cpp context (n_ctx, n_batch, type_k, flash_attn ...); `lora`, paths of adapters, named by their
                stems, or a mapping of names to paths; `draft_model`, a path, name or `Model` that proposes tokens, and
                `draft_options`, a mapping of options of its loading and its context, `p_min` and `chunk_size`; and
                `instruments`. With isolation="process" the model runs in a worker
                process that requests survive, and the objects among the options are given by name (see the guide).

        Raises:
            InvalidParams: An option is out of its range, unknown or of the wrong type.
            ModelError: The model or an adapter cannot be loaded, or a download is damaged.
            ModelNotFound: There is no repository, file or quantisation of that name.
            AccessDenied: The repository is gated or private, and the token may not read it.
            HubUnavailable: The hub cannot be reached, and the caches do not have the model.
            DiskFull: The disk has no space for the download.
            NotEnoughMemory: The model or its KV cache does not fit into memory.
            TemplateError: The chat template does not parse.
        """
        check_options(model, options)  # before a download
        files = local_files(model, options, offline=offline, hf_token=hf_token)
        self._engine = open_engine(files, local_options(options, offline=offline, hf_token=hf_token))
        try:
            self._formats = ChatFormats(self._engine.model, chat_template)
            if chat_template is not None:
                self._formats.get()
        except BaseException:
            self._engine.close()
            raise

    @overload
    def generate(  # type: ignore[overload-overlap] # a str is a sequence of texts, too: the first match counts
        self, prompt: str | TokenIds, params: SamplingParams | None = None, **options: Unpack[GenerateKeywords]
    ) -> Completion: ...
    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompt: Prompts,
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        progress: bool | Callable[[int, int], object] | None = False,
        **options: Unpack[GenerateKeywords],
    ) -> list[Completion]: ...
    @overload
    def generate(
        self, prompt: Segments, params: SamplingParams | None = None, **options: Unpack[GenerateKeywords]
    ) -> Completion: ...

    @with_keywords(SamplingParams, RequestOptions)
    def generate(
        self,
        prompt: Any,
        params: Any = None,
        *,
        progress: bool | Callable[[int, int], object] | None = False,
        **options: Unpack[GenerateKeywords],
    ) -> Completion | list[Completion]:
        """Generate the completion of a prompt, or of each prompt of a list, all in one batch.

        Args:
            prompt: A text, token ids, a list of segments (texts, lists of token ids, and at least one `Image` or `Audio`), or
                a list of prompts of any of these kinds. A list may be longer than the queue.
            params: The sampling parameters; for a list of prompts also a list with one for each; None: the defaults.
            progress: True shows a progress bar on a terminal or in a notebook while a list runs. A function
                `progress(done, total)` is called in this thread after each prompt of the list; an exception of it ends the call.
            **options: Fields of `SamplingParams`, which override `params`, and of `RequestOptions`, like `suffix` for filling
                in the middle, except interval, max_buffered_tokens and slow_reader, which concern streams. `params` and the
                model's file replace the defaults that `help` shows, which are the defaults of `SamplingParams`.

        Returns:
            The completion; for a list one `Completion` per prompt, in order. If n > 1 and some choices failed, they have
                an `error`.

        Raises:
            RequestError: The prompt or an option is invalid.
            QueueFull: The queue is full, and `when_full` is "refuse". For a list, only if none of its prompts is running.
            EngineError: The engine has stopped, or the request failed in all its choices.
            BatchError: Some prompts of a list failed; `outcomes` has the completion or the error of each.
        """
        wanted = checked_progress(progress)
        engine = self._engine
        sort = partial(collected_arguments, engine.sampling_defaults, options=options)
        if is_batch(prompt):
            arguments = batch_arguments(params, len(prompt), sort)
            with progress_bar(len(prompt), wanted) as advance:
                batch = Batch[Any](engine, lambda entry: engine.prepare(entry[0], *entry[1]), lambda *_: advance())
                return batch_outcome(batch.run(list(zip(prompt, arguments, strict=True))))
        request = engine.prepare(prompt, *sort(params))
        return collect(engine.accept(request, waits=waits(engine)))

    def batch(self, requests: Iterable[BatchRequest]) -> Iterator[BatchResult]:
        """Run requests of any number, and yield the result of each when it is there.

        The iterable is read as far as keeps the slots busy, so it may be a generator over a file of any size. Leaving the loop
        cancels the requests that run. Put requests with a common prefix side by side.

            for result in llm.batch({"custom_id": line, "prompt": line, "max_tokens": 20} for line in file):
                print(result.custom_id, result.unless_failed().text)

        Args:
            requests: Prompts, as `generate` takes one; or mappings with `prompt` and keywords of `generate`, or with
                `messages` and keywords of `chat`, and perhaps a `custom_id`, a text that the result has, too.

        Returns:
            An iterator over a result for each request, with its place, in the order in which they end. A request that is refused
                or fails has an `error`, and the others go on.

        Raises:
            EngineStopped: The engine accepts no requests any more; as the errors of the iterable, by the iterator.
        """
        engine = self._engine

        def begin(request: GivenRequest) -> BatchCall:
            options = request.options
            params = options.pop("params", None)
            if request.is_chat:
                return self._open_chat(request.subject, params, options)
            if is_batch(request.subject):
                raise InvalidType("prompt: a request of a batch has one prompt; make a request of each of several")
            arguments = collected_arguments(engine.sampling_defaults, params, options)
            return BatchCall(lambda engine: engine.prepare(request.subject, *arguments), lambda completion: completion)

        return run_requests(engine, requests, begin)

    def _stream_one(
        self, prompt: Any, params: Any, channel: StreamChannel | None, options: Mapping[str, Any], index: int
    ) -> Stream:
        sampling, rest = streamed_arguments(self._engine.sampling_defaults, params, options, channel)
        request = self._engine.prepare(prompt, sampling, rest)
        return Stream(self._engine.accept(request, index, channel, waits=waits(self._engine)), keep_alive=self)

    def _stream_each(
        self, prompts: list[Any], entries: StreamEntries, options: Mapping[str, Any], index: int
    ) -> BatchStream:
        return BatchStream(submit_streams(self._engine, prompts, entries, options, index), keep_alive=self)

    @with_keywords(RequestOptions)
    def embed(
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
        """Embed texts, and prompts with images or audio, as vectors.

        Args:
            texts: A text, its token ids, or segments of which at least one is an `Image` or `Audio`, as in `generate`; or a
                list of these. A list of texts alone is a text for each vector.
            pooling: How token vectors become one: "mean", "cls" or "last"; None: set by the model's file, else "mean". Prompts
                with images or audio have "last" alone, as their tokens and media are computed one after another.
            normalize: True or "l2" scales to length 1, "max_abs" to a greatest component of 1; False or "none" does not scale.
            dimensions: Only the first so many numbers of each vector, normalised after that, for models that were trained for
                it (Matryoshka); None: all.
            prompt_name: A prefix of the model's file by its name. GGUF files carry none, so any name raises `Unsupported`.
            **options: queue_timeout_s, timeout_s, request_id, truncate, add_special, parse_special, tenant and cache_salt of
                `RequestOptions`; the last two say who shares images and audio that were encoded.

        Returns:
            float32 of shape (n_texts, n_embd), or (n_texts, dimensions); for a single text without the first axis.

        Raises:
            InvalidParams: `dimensions` is more than a vector has, or an image or audio cannot be decoded, or nothing follows it.
            PromptTooLong: A text has more than max_embedding_tokens tokens, and truncate is not set.
            Unsupported: The model cannot embed, or not with this pooling, or takes no images or audio.
            QueueFull: The queue is full, and `when_full` is "refuse".
            EngineError: The engine has stopped, or the request failed, was cancelled or ran out of time.
        """
        call = embedding_call(self._engine, texts, pooling, normalize, dimensions, prompt_name, options)
        return call.result()

    @with_keywords(RequestOptions)
    def classify(self, texts: Sequence[str | TokenIds], **options: Unpack[EmbedKeywords]) -> list[Classification]:
        """Classify texts. Needs a model with a classification head.

        Args:
            texts: The texts, or token ids of each.
            **options: queue_timeout_s, timeout_s, request_id, truncate, add_special and parse_special of `RequestOptions`.

        Returns:
            One classification per text, in order, with the probabilities of all classes.

        Raises:
            PromptTooLong: A text has more than max_embedding_tokens tokens, and truncate is not set.
            Unsupported: The model has no classification head.
            QueueFull: The queue is full, and `when_full` is "refuse".
            EngineError: The engine has stopped, or the request failed, was cancelled or ran out of time.
        """
        return classifying_call(self._engine, texts, options).result()

    @with_keywords(RequestOptions)
    def rerank(self, query: str, documents: Sequence[str], **options: Unpack[RerankKeywords]) -> list[Score]:
        """Score how well documents match a query. Needs a reranking model.

        Args:
            query: The query.
            documents: The documents.
            **options: queue_timeout_s, timeout_s, request_id and truncate (which cuts documents) of `RequestOptions`.

        Returns:
            One score per document, best first.

        Raises:
            PromptTooLong: Query and document have more than max_embedding_tokens tokens, and truncate is not set.
            Unsupported: The model is no reranker, but for instance a classification model of several classes.
            QueueFull: The queue is full, and `when_full` is "refuse".
            EngineError: The engine has stopped, or the request failed, was cancelled or ran out of time.
        """
        return reranking_call(self._engine, query, documents, options).result()

    @with_keywords(RequestOptions)
    def score(
        self, prompt: str | TokenIds, choices: Sequence[str | TokenIds], **options: Unpack[ScoreKeywords]
    ) -> list[ChoiceScore]:
        """Return the log-likelihood of each of several choices after a prompt, from one shared prefix.

        Prompt and choice are encoded as one text. The prefix that all choices share is computed once, or with each choice if
        cache_prompt is off. If a choice's first token begins with the end of the prompt, this end is part of every score.

        Args:
            prompt: A text, or token ids.
            choices: Continuations, texts or token ids as the prompt is; none of them is empty.
            **options: priority, queue_timeout_s, timeout_s (of the whole call), request_id, lora, add_special, parse_special,
                cache_prompt, tenant and cache_salt of `RequestOptions`.

        Returns:
            One score per choice, in order.

        Raises:
            InvalidParams: A choice is empty, or the prompt has no token before the first choice.
            PromptTooLong: The prompt with the longest choice does not fit the context; nothing is computed then.
            EngineStopped: The engine accepts no requests any more.
            BatchError: Some choices failed, ran out of time or, if `when_full` is "refuse", found the queue full; `outcomes`
                has the completion or the error of each.
        """
        return scoring_call(self._engine, prompt, choices, options).result()

    @with_keywords(RequestOptions)
    def decide(
        self,
        prompt: str,
        choices: Sequence[str],
        *,
        length_normalization: LengthNormalization = "none",
        **options: Unpack[ScoreKeywords],
    ) -> Classification:
        """Decide among choices after a prompt: their log-likelihoods, as `score` has them, as a distribution.

        Args:
            prompt: A text.
            choices: The texts to choose from; none of them is empty.
            length_normalization: The length by which log-likelihoods are divided first, "tokens" or "bytes", so that long
                choices do not lose by their length; "none": they are not divided.
            **options: As in `score`.

        Returns:
            The likeliest choice as `label`, and the probability of each choice; they add up to 1.

        Raises:
            InvalidParams: As in `score`, or length_normalization is unknown.
            PromptTooLong: The prompt with the longest choice does not fit the context; nothing is computed then.
            EngineStopped: The engine accepts no requests any more.
            BatchError: Some choices failed, ran out of time or, if `when_full` is "refuse", found the queue full; `outcomes`
                has the completion or the error of each.
        """
        by = checked_normalization(length_normalization)
        return decision(choices, scoring_call(self._engine, prompt, choices, options).result(), by)

    def load_lora(self, name: str, path: str | os.PathLike[str], *, in_place: bool = False) -> None:
        """Load a LoRA adapter while requests run; later requests use it with `lora={name: scale}`.

        Args:
            name: The name that requests use.
            path: A GGUF file with an adapter for this model.
            in_place: Whether it may replace an adapter of this name. Requests that use the replaced one finish with it.

        Raises:
            AdapterError: There is no such file, it is no LoRA adapter, or it does not fit the model.
            InvalidParams: The name is taken.
            EngineStopped: The engine has stopped.
            WorkerUnresponsive: The worker process did not reply in time.
        """
        self._engine.load_lora(name, path, in_place=in_place)

    def unload_lora(self, name: str, *, timeout_s: float | None = 30.0) -> None:
        """Unload a LoRA adapter: refuse new requests with it, wait for the open ones, and free its memory and cached prefixes.

        Args:
            name: The adapter's name.
            timeout_s: How long open requests with it may take to end, in seconds; None: no limit.

        Raises:
            AdapterNotFound: There is no adapter of that name.
            AdapterInUse: Requests did not end in time. The adapter stays, and may be used again.
            EngineStopped: The engine has stopped.
            WorkerUnresponsive: The worker process did not reply in time.
        """
        self._engine.unload_lora(name, timeout_s=timeout_s)

    @with_keywords(RequestOptions)
    def save_prefix(self, name: str, prompt: Prompt, **options: Unpack[PrefixKeywords]) -> int:
        """Save the cached prefix of a prompt to a file in `state_folder`.

        Args:
            name: The prefix's name: letters, digits, ".", "_" and "-".
            prompt: A text, token ids, or a list with images and audio, as `generate` takes them.
            **options: lora, tenant, cache_salt, add_special and parse_special, as in the requests that computed the prefix.

        Returns:
            The number of the prompt's tokens that were saved.

        Raises:
            StateError: Nothing of the prompt is cached, or the file cannot be written.
            InvalidParams: The name is invalid, or there is no adapter of a name in lora.
            Unsupported: The engine has no state_folder.
            WorkerUnresponsive: The worker process did not reply in time.
        """
        return self._engine.save_prefix(name, prompt, prefix_options(options))

    @with_keywords(RequestOptions)
    def load_prefix(self, name: str, **options: Unpack[PrefixKeywords]) -> list[int]:
        """Load a saved prefix into the cache, for requests that begin with its tokens.

        Args:
            name: The prefix's name.
            **options: tenant, cache_salt and lora of the requests that may use it.

        Returns:
            The token ids of the prefix.

        Raises:
            StateError: There is no such prefix, it is damaged, of another model or computed with other LoRA adapters or
                scales, or host memory has no room for it.
            InvalidParams: There is no adapter of a name in lora.
            Unsupported: The engine has no state_folder.
            WorkerUnresponsive: The worker process did not reply in time.
        """
        return self._engine.load_prefix(name, prefix_options(options))

    def erase_prefix(self, name: str) -> None:
        """Delete the file of a saved prefix.

        Args:
            name: The prefix's name.

        Raises:
            StateError: There is no such prefix.
            Unsupported: The engine has no state_folder.
            WorkerUnresponsive: The worker process did not reply in time.
        """
        self._engine.erase_prefix(name)

    def slots(self) -> SlotsSnapshot:
        """Return the activity of each slot and the number of waiting sequences, after the running tick.

        Returns:
            One record per slot, and the queue's length.

        Raises:
            EngineStopped: The engine has stopped.
            WorkerUnresponsive: The worker process did not reply within 10 s: a tick takes longer, or it hangs.
        """
        return self._engine.slots()

    def close(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        """Stop the engine and free its memory, weights included. Idempotent. Open requests end with the finish reason SHUTDOWN.

        The memory is free when this returns, whatever of the engine the caller still holds. Requests then raise
        `EngineStopped`; `tokenizer` still decodes, and `model` has its metadata. A `Model` of the caller stays open.

        Args:
            drain: Whether accepted requests may finish first. Requests that wait for room in the queue end with `EngineStopped`.
            timeout_s: How long they may take, in seconds; None: no limit.
        """
        self._engine.close(drain=drain, timeout_s=timeout_s)

    @property
    def _started(self) -> EngineClient:
        return self._engine

    def __repr__(self) -> str:
        return engine_repr(self, vars(self).get("_engine"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
