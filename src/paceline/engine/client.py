"""What a caller has of an engine, wherever it runs: requests and questions in, channels and futures out. Any thread may call.

The server, `LLM` and `AsyncLLM` depend on this protocol and on nothing else of an engine. Tokenising, grammars and checks
happen on the caller's thread; the results of `accept`, `embed` and `rerank` come from the engine's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, TypeVarTuple

if TYPE_CHECKING:
    from paceline.config import EngineConfig
    from paceline.engine.adapters import LoraAdapter
    from paceline.engine.prompts import EmbeddingPrompt, KeyedPrompt, Prompt
    from paceline.engine.questions import Question
    from paceline.errors import EngineStopped
    from paceline.kv_cache import PrefixDigest
    from paceline.observability.heartbeat import Heartbeat
    from paceline.observability.metric_table import MetricsSnapshot
    from paceline.params import SamplingParams
    from paceline.request import RequestOptions
    from paceline.runtime import Model, Tokenizer
    from paceline.scheduling.records import EngineActivity, SlotsSnapshot
    from paceline.sequence import Limits, Request
    from paceline.streaming import StreamChannel

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class EngineClient(Protocol):
    """A model and what computes with it. `close` ends it; so do the garbage collector and the end of the process."""

    # ---- facts

    @property
    def model(self) -> Model:
        """The model; in front of a worker its vocabulary and metadata alone."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    @property
    def config(self) -> EngineConfig:
        """The options that the engine was made with."""

    @property
    def limits(self) -> Limits:
        """Numbers of slots, cells and tokens that follow from model, options and machine."""

    @property
    def sampling_defaults(self) -> SamplingParams:
        """The model's own defaults for what a request leaves open."""

    # ---- requests

    def prepare(self, prompt: Prompt, params: SamplingParams, options: RequestOptions) -> Request:
        """Check and tokenise a request for text; `accept` starts it. Raises `RequestError`s."""

    def accept(
        self, request: Request, request_index: int = 0, channel: StreamChannel | None = None, *, waits: bool = False
    ) -> StreamChannel:
        """Start a prepared request, once, and return its channel: the given one, or else a new one.

        waits: whether a request for which there is no room waits in line until requests before it have ended; it never raises
        `QueueFull` then, and `EngineStopped` ends its channel if the engine is closed before its turn.

        Cancelling the channel cancels the request. The request's times begin here. It runs with the adapters that its names
        have now, where one was replaced since it was prepared. Raises `QueueFull`, `EngineStopped`, or `InvalidParams` for a
        channel that has served before and for adapters that were unloaded; then nothing began.
        """

    def embed(
        self,
        texts: Sequence[Prompt | EmbeddingPrompt],
        pooling: str | None,
        options: RequestOptions,
        *,
        waits: bool = False,
    ) -> Future[list[Any]]:
        """Accept texts to embed and return a future of one vector each, not normalised; cancelling it cancels the request.

        waits: as for `accept`; the future fails with `EngineStopped`.

        A text may be segments with images or audio, which are embedded with pooling "last" alone.

        Raises as `prepare` and `accept`; what only a worker finds wrong fails the future.
        """

    def embeddable(self, texts: Sequence[Prompt | EmbeddingPrompt], options: RequestOptions) -> list[EmbeddingPrompt]:
        """Return the token ids of texts as they will be embedded, cut where they are too long and options.truncate is set.

        Of segments with media it returns what they were put together to; the length of that is their number of tokens. `embed`
        takes the result. Raises `InvalidParams`, `PromptTooLong` without truncate, and `Unsupported` for media that the model
        does not take.
        """

    def rerank(
        self, query: str, documents: Sequence[str], options: RequestOptions, *, waits: bool = False
    ) -> Future[list[Any]]:
        """Accept documents to score for a query and return a future of one score each: the first number of an array.

        Raises as `pairs` and `embed`.
        """

    def pairs(self, query: str, documents: Iterable[str], options: RequestOptions) -> list[list[int]]:
        """Return the token ids of a query with each document; options.truncate cuts documents, never the query.

        Raises `InvalidParams`, `PromptTooLong` where a pair does not fit, and `Unsupported` for a classification model of several
        classes.
        """

    def expect_tenants(self, tenants: Iterable[str]) -> None:
        """Set the tenants that may send requests, "" among them for requests without one. None may take the whole queue alone.

        Without this call a tenant may use the whole queue until a second tenant sends a request.
        """

    def most_requests(self, tenant: str) -> int:
        """Return the most requests that a tenant may have open at once, while other tenants have none."""

    # ---- LoRA adapters

    def load_lora(self, name: str, path: str | os.PathLike[str], *, in_place: bool = False) -> None:
        """Load an adapter, which requests may use by its name from then on.

        in_place: whether it may replace an adapter of this name, which is freed when the last request that uses it has ended.
        Takes as long as reading the file: not for an event loop. Raises `AdapterError`, and `InvalidParams` for a name that is
        taken.
        """

    def unload_lora(self, name: str, *, timeout_s: float | None = 30.0) -> None:
        """Refuse new requests with an adapter, wait until the open ones have ended, and free it with all that is cached of it.

        Not for an event loop. Raises `AdapterNotFound`, and `AdapterInUse` where requests are still open after timeout_s; then
        the adapter stays.
        """

    def loras(self) -> tuple[LoraAdapter, ...]:
        """Return the adapters that requests may use, in the order of loading; one in place of another has its place."""

    def was_lora_unloaded(self, name: str) -> bool:
        """Return whether an adapter of this name was unloaded, from when it is missing in `loras`; there may be one again."""

    # ---- saved prefixes

    def save_prefix(self, name: str, prompt: Prompt | KeyedPrompt, options: RequestOptions) -> int:
        """Write what the KV cache has of a prompt to a file and return how many tokens that is. Raises `StateError`."""

    def load_prefix(self, name: str, options: RequestOptions) -> list[int]:
        """Load a saved prefix into the host cache and return its token ids; a worker that dies forgets it.

        Raises `StateError`.
        """

    def erase_prefix(self, name: str) -> None:
        """Delete a saved prefix. Raises `StateError` if there is none."""

    # ---- state

    def ask(self, question: Question[R, *Ts], *args: *Ts) -> Future[R]:
        """Return a future of the answer to a question, one of the module `questions`.

        A question that reads files may be answered before this returns. Raises as `ask_slots`.
        """

    def stats(self) -> MetricsSnapshot:
        """Return all metrics, see docs/metrics.md. What a worker did after its last report is lost with it."""

    def reported_stats(self, max_age_s: float) -> MetricsSnapshot | None:
        """Return all metrics, those of ticks as of a worker's last report; None where that is older than max_age_s.

        Waits for nothing. A worker reports once a second while it ticks.
        """

    def ask_slots(self) -> Future[SlotsSnapshot]:
        """Return a future of what each slot does after the current tick; while there is no worker, all slots are idle.

        Raises `EngineStopped`, here or in the future, after the engine has ended. The future fails with `WorkerUnresponsive`
        if a worker does not reply in time.
        """

    def slots(self) -> SlotsSnapshot:
        """Return the result of `ask_slots`. Waits for the current tick, so never call it on an event loop."""

    def prefix_digest(self, max_prefixes: int = 1024, *, block_tokens: int | None = None) -> Future[PrefixDigest]:
        """Return a future of hashes of the cached prefixes after the current tick, for routing requests to where theirs are.

        At most max_prefixes (up to 65,536), those with the fewest branches before them first; they end where cached
        sequences branch or end, without prompts that are still being computed and what a running sequence has generated
        lately. With block_tokens they end at whole blocks of so many tokens instead, the shortest first: that finds how far
        a prompt follows a cached one to within a block, also where none has branched before.

        Compare with `prefix_hash` of a prompt's first num_tokens token ids; hashes say nothing of the model. While there is no
        worker nothing is cached. Making a digest takes a part of a tick. It confirms a guessed prompt, so it is for trusted
        callers.

        Raises as `ask_slots`, and `InvalidParams`.
        """

    def ask_activity(
        self, after: int = 0, *, max_nodes: int | None = None, delay_s: float = 0.0
    ) -> Future[EngineActivity]:
        """Return a future of what the engine does after the current tick, and of the ticks behind a number.

        after: `EngineActivity.last_number` of the last reply, 0 at first; the engine records ticks from the first question on,
        until none has come for five seconds. max_nodes: of the radix tree, for each tenant, up to 4096; None: no tree. While
        there is no worker nothing is done. Looking at the tree takes a part of a tick.

        delay_s: seconds, up to 1: the result is of the first tick that ends so much later, or finds nothing to do. A worker
        sends it in one write with what that tick generated, so that the supervising thread wakes up once for both.

        Raises as `ask_slots`, and `InvalidParams`.
        """

    def heartbeat(self) -> Heartbeat:
        """Return whether the engine turns, or a worker is being started. Waits for nothing."""

    def wake(self) -> None:
        """Start the worker again if `sleep_idle_s` ended it, and count as use of it. Waits for nothing."""

    @property
    def ended(self) -> Future[EngineStopped | None]:
        """A future that is done when every request has ended for good and no new one is accepted.

        Its result is the reason if the engine gave up by itself, None if it was closed. It cannot be cancelled.
        """

    @property
    def num_open(self) -> int:
        """Number of requests that were accepted and have not ended."""

    # ---- the end

    def close(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        """End the engine: cancel what runs or, with drain, let it finish first, at most timeout_s. Idempotent."""

    @property
    def is_closed(self) -> bool:
        """Whether new requests are refused for good."""
