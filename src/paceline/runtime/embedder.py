"""Embeddings of texts, and of prompts with images or audio, in a separate context, where every token is an output.

In the context of generation, outputs for every token would slow it down.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal, Unpack

import numpy as np
import numpy.typing as npt

from paceline import validation
from paceline.errors import Aborted, InvalidParams, InvalidType, NotEnoughMemory, PromptTooLong, Unsupported
from paceline.keywords import EmbedderKeywords, SharedContextKeywords, with_keywords
from paceline.runtime.context import Context
from paceline.runtime.context_options import ContextOptions, Pooling
from paceline.runtime.gguf_file import read_gguf
from paceline.runtime.model import MemoryClass, Model
from paceline.runtime.native_core import Closeable
from paceline.runtime.projector import MediaPart

Normalization = Literal["l2", "max_abs", "none"]
Text = str | Sequence[int]

_FIRST_ROOM = 2048  # tokens of a text or prompt that the first context has memory for
_PIECE = 512  # tokens of a pass: more gain nothing, and each costs two rows of the vocabulary's size

_POOLING_NAMES: tuple[Pooling, ...] = ("none", "mean", "cls", "last", "rank")
# Context options that follow from the arguments of an embedder.
RESERVED = frozenset({"embeddings", "n_batch", "n_ubatch", "n_ctx", "n_seq_max", "n_outputs_max", "pooling"})


class Embedder(Closeable):
    """Embeds texts with an encoder (BERT and similar) or a decoder, many texts in a batch.

    Args:
        model: The model.
        pooling: How the vectors of a text's tokens become one vector: "mean", "cls" (the first token's), "last", or "rank" (the
            scores of a reranker's head); "none" keeps a vector for each token. None takes the pooling of the model's file, or
            "mean".
        max_tokens: The longest text; by default the context that the model was trained with. Memory for texts of up to 2048
            tokens is allocated at once, for longer texts when the first of them comes (see `reserve`). Causal models compute a
            long text in pieces of 512 tokens and need KV cells for all of it; others compute it at once, which takes 4 bytes x
            vocabulary for each token.
        max_texts: Texts of a pass.
        **options: Other fields of `ContextOptions`.

    One call at a time: a second thread waits. `close()` frees the memory; the model stays.
    """

    @with_keywords(ContextOptions)
    def __init__(
        self,
        model: Model,
        *,
        pooling: Pooling | None = None,
        max_tokens: int | None = None,
        max_texts: int = 64,
        **options: Unpack[EmbedderKeywords],
    ) -> None:
        taken = sorted(RESERVED & options.keys())
        if taken:
            raise InvalidParams(f"{taken[0]} follows from max_tokens and max_texts in an Embedder; set those")
        if model.has_encoder and model.has_decoder:
            raise Unsupported("an encoder-decoder model gives no embeddings of texts; use an encoder or a decoder")
        longest = longest_text(model)
        self.max_tokens = longest if max_tokens is None else validation.integer("max_tokens", max_tokens, 1, longest)
        self._model = model
        self._options: dict[str, Any] = {**options, "pooling": _checked_pooling(model, pooling)}
        self._max_texts = validation.integer("max_texts", max_texts, 1, 128)
        self._in_pieces = model.memory_class is not MemoryClass.NONE
        self._growing = threading.Lock()
        self._room = min(self.max_tokens, _FIRST_ROOM)
        self._context = self._make_context(self._room)
        if self._in_pieces and not self._context.native.embeds_in_pieces:
            self._in_pieces = False
            self._context.close()
            self._context = self._make_context(self._room)
        self._running: Context | None = None
        self.pooling: Pooling = _POOLING_NAMES[self._context.native.pooling_type]
        self._tokenizer = model.tokenizer

    def _make_context(self, room: int) -> Context:
        # llama.cpp needs n_batch to be a multiple of its sequences, of which recurrent models have twice as many.
        step = 2 * self._max_texts
        n_batch = -(-max(min(room, _PIECE) if self._in_pieces else room, 256) // step) * step
        sizes: dict[str, Any] = {"n_batch": n_batch, "n_ubatch": n_batch, "n_outputs_max": n_batch}
        sizes["n_seq_max"] = self._max_texts
        return Context(self._model, embeddings=True, n_ctx=max(room, n_batch), **sizes, **self._options)

    def reserve(self, num_tokens: int) -> None:
        """Take the memory for texts of up to `num_tokens` tokens, at most max_tokens, before they come. Any thread.

        A running call continues. Raises `NotEnoughMemory`; shorter texts are then still embedded.
        """
        wanted = validation.integer("num_tokens", num_tokens, 1, self.max_tokens)
        if wanted <= self._room:  # a call never waits while another thread makes a larger context
            return
        with self._growing:
            self._context.native  # noqa: B018 - raises `Closed`
            if wanted > self._room:
                # The previous context is freed when the call that runs on it has ended.
                self._context, self._room = self._larger(wanted)

    def _larger(self, wanted: int) -> tuple[Context, int]:
        """Make a context with twice the room if memory allows, so that growing texts need few new contexts."""
        error: NotEnoughMemory | None = None
        for room in sorted({min(self.max_tokens, 2 * self._room), wanted}, reverse=True):
            if room >= wanted:
                try:
                    return self._make_context(room), room
                except NotEnoughMemory as reason:
                    error = reason
        raise NotEnoughMemory(f"not enough memory to embed a text of {wanted} tokens; split or truncate it: {error}")

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        return int(self._context.native.embedding_dimension)

    def embed(self, texts: Iterable[Text], *, normalize: Normalization = "l2") -> npt.NDArray[np.float32]:
        """Return vectors of texts (str, or token ids as they are), float32 (n_texts, dimension).

        normalize: "l2" gives vectors of length 1, "max_abs" a greatest component of 1, "none" leaves them. Scores of
        pooling "rank" are never normalised. Raises `PromptTooLong` naming the text, before anything is computed.
        """
        if self.pooling == "none":
            raise InvalidParams('pooling "none" has a vector for each token; use embed_tokens()')
        ids = self._all_ids(texts)
        vectors = self._compute(ids)
        return vectors if self.pooling == "rank" else normalized(vectors, normalize)

    def embed_tokens(
        self, texts: Iterable[Text], *, normalize: Normalization = "none"
    ) -> list[npt.NDArray[np.float32]]:
        """Return a vector for each token: for each text float32 (n_tokens, dimension). Needs pooling "none"."""
        if self.pooling != "none":
            raise InvalidParams(f'embed_tokens() needs pooling "none", and this embedder has {self.pooling!r}')
        ids = self._all_ids(texts)
        rows = normalized(self._compute(ids), normalize)
        ends = np.cumsum([len(text_ids) for text_ids in ids])
        return [rows[end - len(text_ids) : end] for text_ids, end in zip(ids, ends, strict=True)]

    def _all_ids(self, texts: Iterable[Text]) -> list[list[int]]:
        if isinstance(texts, (str, bytes)):
            raise InvalidType("texts must be a sequence of texts; put a single one into a list")
        given: object = texts
        if not isinstance(given, Iterable) or getattr(given, "ndim", 1) == 0:
            raise InvalidType(f"texts must be a sequence of texts, not {texts!r:.80}")
        return [self._ids(index, text) for index, text in enumerate(texts)]

    def _ids(self, index: int, text: Text) -> list[int]:
        name = f"texts[{index}]"
        if isinstance(text, str):
            ids = self._tokenizer.encode(validation.text(name, text))
        else:
            ids = validation.token_ids(name, text, self._tokenizer.n_vocab)
        if not ids:
            raise InvalidParams(f"{name} has no tokens; an embedding needs at least one")
        if len(ids) > self.max_tokens:
            raise PromptTooLong(
                f"{name} is too large: it has {len(ids)} tokens, and max_tokens is {self.max_tokens}; split or truncate it"
            )
        return ids

    def _compute(self, ids: list[list[int]]) -> npt.NDArray[np.float32]:
        flat = np.fromiter((token for text_ids in ids for token in text_ids), dtype=np.int32)
        lengths = np.fromiter((len(text_ids) for text_ids in ids), dtype=np.int32)
        if ids:
            self.reserve(int(lengths.max()))
        self._running = context = self._context
        try:
            return context.native.embed(flat, lengths)
        finally:
            self._running = None

    def abort(self) -> None:
        """End the call that is running in another thread, which raises `Aborted`."""
        (self._running or self._context).abort()

    def close(self) -> None:
        """Free the memory; idempotent."""
        with self._growing:
            self._context.close()


def longest_text(model: Model) -> int:
    """Return the tokens of the longest text that a model can embed: the context it was trained with."""
    return model.n_ctx_train if model.n_ctx_train > 0 else 512


def has_head(path: Path) -> bool:
    """Return whether a model's file has a classification head, which scores embeddings."""
    return any(tensor.name.startswith(b"cls.") for tensor in read_gguf(path).tensors)


def own_pooling(model: Model) -> Pooling:
    """Return the pooling that the model's file names, by llama.cpp's number."""
    architecture = model.metadata.get("general.architecture", "")
    number = model.metadata.get(f"{architecture}.pooling_type", "0")
    return _POOLING_NAMES[int(number)] if number in ("1", "2", "3", "4") else "mean"


def _checked_pooling(model: Model, pooling: Pooling | None) -> Pooling:
    if pooling is not None:
        validation.choice("pooling", pooling, _POOLING_NAMES)
    chosen = own_pooling(model) if pooling is None else pooling
    if chosen == "rank" and not any(has_head(path) for path in model.paths):
        raise Unsupported('pooling "rank" needs a model with a classification head (a reranker), and this one has none')
    return chosen


def normalized(vectors: npt.NDArray[np.float32], normalize: Normalization) -> npt.NDArray[np.float32]:
    """Normalise vectors, (n, dimension), as `Embedder.embed` describes."""
    validation.choice("normalize", normalize, ("l2", "max_abs", "none"))
    if normalize == "none":
        return vectors
    if normalize == "l2":
        size = np.linalg.norm(vectors, axis=1, keepdims=True)
    else:
        size = np.abs(vectors).max(axis=1, keepdims=True, initial=0)
    result = np.zeros_like(vectors)  # a vector of zeros stays zero
    np.divide(vectors, size, out=result, where=size > 0)
    return result


_PASS: Final = 512  # tokens of a pass, unless an item that is not causal has more
_SEQ_ID, _SCRATCH = 0, 1  # the scratch sequence is for an item of M-RoPE that takes several passes
# llama.cpp needs n_batch to be a multiple of its sequences, of which recurrent models have twice as many.
_STEP: Final = 4


class MediaEmbedder(Closeable):
    """Embeds prompts of token ids and media with a decoder; the vector of a prompt is the vector of its last token.

    That is pooling "last". Other poolings need all tokens in one pass, and media are passes of their own.

    Args:
        model: The model, with a causal decoder.
        max_tokens: The longest prompt; by default the context that the model was trained with. Memory for prompts of up to 2048
            tokens is allocated at once, for longer prompts when the first of them comes (see `reserve`).
        **options: Other fields of `ContextOptions`.

    One call at a time: a second thread waits. `close()` frees the memory; the model stays.

    Raises `Unsupported` for a model without a causal decoder.
    """

    @with_keywords(ContextOptions)
    def __init__(
        self, model: Model, *, max_tokens: int | None = None, **options: Unpack[SharedContextKeywords]
    ) -> None:
        longest = longest_text(model)
        self.max_tokens = longest if max_tokens is None else validation.integer("max_tokens", max_tokens, 1, longest)
        if model.has_encoder or model.memory_class is MemoryClass.NONE:
            raise Unsupported(
                "images and audio are embedded by decoders alone, and this model has an encoder; leave them out"
            )
        self._model, self._options = model, options
        self._computing, self._growing = threading.Lock(), threading.Lock()
        self._room, self._pass = min(self.max_tokens, _FIRST_ROOM), _PASS
        self._context = self._make_context(self._room, self._pass)
        if not self._context.native.embeds_in_pieces:
            self._context.close()
            raise Unsupported(
                "images and audio are embedded by models with causal attention alone, which this one has not; leave them out"
            )
        self._running: Context | None = None
        self._is_aborted = False

    def _make_context(self, room: int, num_at_once: int) -> Context:
        n_batch = -(-num_at_once // _STEP) * _STEP
        sizes: dict[str, Any] = {"n_batch": n_batch, "n_ubatch": n_batch, "n_outputs_max": n_batch}
        sizes.update(n_seq_max=_SCRATCH + 1, n_ctx=max(room, n_batch), kv_unified=True)
        return Context(self._model, embeddings=True, pooling="none", **sizes, **self._options)

    def reserve(self, num_tokens: int, num_at_once: int = 0) -> None:
        """Take the memory for prompts of up to `num_tokens` tokens, at most max_tokens, before they come. Any thread.

        num_at_once: cells of the largest item with attention that is not causal, which needs a single pass. Raises
        `NotEnoughMemory`; shorter prompts are then still embedded.
        """
        wanted = validation.integer("num_tokens", num_tokens, 1, self.max_tokens)
        at_once = validation.integer("num_at_once", num_at_once, 0, self.max_tokens)
        if wanted <= self._room and at_once <= self._pass:
            return  # a call never waits while another thread makes a larger context
        with self._growing:
            self._context.native  # noqa: B018 - raises `Closed`
            if wanted > self._room or at_once > self._pass:
                # The previous context is freed when the call that runs on it has ended.
                self._context, self._room, self._pass = self._larger(wanted, max(at_once, self._pass))

    def _larger(self, wanted: int, num_at_once: int) -> tuple[Context, int, int]:
        """Make a context with twice the room if memory allows, so that growing prompts need few new contexts."""
        needed = max(wanted, self._room)
        ample = needed if wanted <= self._room else max(wanted, min(self.max_tokens, 2 * self._room))
        with suppress(NotEnoughMemory):
            return self._make_context(ample, num_at_once), ample, num_at_once
        return self._make_context(needed, num_at_once), needed, num_at_once

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        return self._model.n_embd_out

    def embed(self, segments: Sequence[Sequence[int] | MediaPart]) -> npt.NDArray[np.float32]:
        """Return the vector of a prompt, float32 (dimension,), not normalised.

        segments: lists of token ids, the last of which has at least one, and encoded media items in between.

        Raises `InvalidParams`, `PromptTooLong`, `Aborted`, and the errors of `Context.decode`.
        """
        num_tokens, num_at_once = self._sizes(segments)
        self.reserve(num_tokens, num_at_once)
        with self._computing:
            self._is_aborted = False
            self._running = context = self._context
            try:
                context.clear()
                position = 0
                for segment in segments:
                    position = self._add(context, segment, position)
                return context.embeddings((len(segments[-1]) - 1) % context.n_batch)  # type: ignore[arg-type]
            finally:
                self._running = None

    def _sizes(self, segments: Sequence[Sequence[int] | MediaPart]) -> tuple[int, int]:
        """Return the number of tokens and cells, and the cells of the largest item that needs a single pass."""
        media = [segment for segment in segments if isinstance(segment, MediaPart)]
        num_tokens = sum(part.num_cells if isinstance(part, MediaPart) else len(part) for part in segments)
        if not segments or isinstance(segments[-1], MediaPart) or not segments[-1]:
            raise InvalidParams(
                "a prompt must end with a token, which the vector is taken of; put a text behind the last image"
            )
        if num_tokens > self.max_tokens:
            raise PromptTooLong(
                f"the prompt is too large: it has {num_tokens} tokens, and max_tokens is {self.max_tokens}; leave some out",
                num_tokens,
                self.max_tokens,
            )
        return num_tokens, max((item.num_cells for item in media if not item.is_causal), default=0)

    def _add(self, context: Context, segment: Sequence[int] | MediaPart, position: int) -> int:
        """Append a segment to the sequence, in passes, and return the position after it."""
        num_cells = segment.num_cells if isinstance(segment, MediaPart) else len(segment)
        size = context.n_batch
        for start in range(0, num_cells, size):
            if self._is_aborted:
                raise Aborted("the forward pass was aborted")
            end = min(num_cells, start + size)
            if isinstance(segment, MediaPart):
                _decode_part(context, segment, position, slice(start, end))
            else:
                places = range(position + start, position + end)
                context.decode(segment[start:end], seq_ids=_SEQ_ID, positions=places, wants_logits="all")
        return position + (segment.num_positions if isinstance(segment, MediaPart) else num_cells)

    def abort(self) -> None:
        """End the call that is running in another thread, which raises `Aborted`."""
        running = self._running
        if running is not None:
            self._is_aborted = True
            running.abort()

    def close(self) -> None:
        """Free the memory; idempotent."""
        with self._growing:
            self._context.close()


def _decode_part(context: Context, part: MediaPart, position: int, cells: slice) -> None:
    if part.embeddings is None:
        raise InvalidParams("a media item has no embeddings; have it encoded before")
    context.decode_embeddings(
        _SEQ_ID,
        position + (cells.start if part.places is None else 0),
        part.embeddings[cells],
        places=None if part.places is None else part.places[cells],
        is_causal=part.is_causal,
        scratch_seq_id=_SCRATCH,
    )


def media_pooling(model: Model, pooling: str | None) -> str:
    """Return the pooling of prompts with images or audio. Raises `Unsupported` for another than "last"."""
    chosen = own_pooling(model) if pooling is None else pooling
    if chosen != "last":
        actual = "this model's own is" if pooling is None else "not"
        raise Unsupported(
            f'pooling: a prompt with images or audio is embedded with pooling "last", {actual} "{chosen}"; say pooling="last" '
            "(a server: --pooling last), or leave the images and audio out"
        )
    return chosen
