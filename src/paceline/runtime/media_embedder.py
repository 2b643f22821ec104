"""Embeddings of prompts with images or audio, whose tokens and media are computed one after another."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, Unpack

import numpy as np
import numpy.typing as npt

from paceline import validation
from paceline.errors import Aborted, InvalidParams, NotEnoughMemory, PromptTooLong, Unsupported
from paceline.keywords import SharedContextKeywords, with_keywords
from paceline.runtime.context import Context
from paceline.runtime.context_options import ContextOptions
from paceline.runtime.embedder import longest_text, own_pooling
from paceline.runtime.media_projector import MediaPart
from paceline.runtime.model import MemoryClass, Model
from paceline.runtime.native_core import Closeable

_FIRST_ROOM: Final = 2048  # tokens of a prompt that there is memory for from the beginning
_PASS: Final = 512  # tokens of a pass, unless an item has more that attend to one another
_SEQ_ID, _SCRATCH = 0, 1  # the scratch sequence is for an item of M-RoPE that takes several passes
# llama.cpp needs n_batch to be a multiple of its sequences, of which recurrent models have twice as many.
_STEP: Final = 4


class MediaEmbedder(Closeable):
    """Embeds prompts of token ids and media with a decoder; the vector of a prompt is that of its last token.

    That is pooling "last". Other poolings need all tokens in one pass, and media are passes of their own.

    max_tokens: the longest prompt; by default the context that the model was trained with. Memory for prompts of up to 2048
    tokens is allocated at once, for longer ones when the first comes (see `reserve`). Other options as in `ContextOptions`.

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
        """Make a context for prompts of up to `room` tokens, and items of which so many are computed at once."""
        n_batch = -(-num_at_once // _STEP) * _STEP
        sizes: dict[str, Any] = {"n_batch": n_batch, "n_ubatch": n_batch, "n_outputs_max": n_batch}
        sizes.update(n_seq_max=_SCRATCH + 1, n_ctx=max(room, n_batch), kv_unified=True)
        return Context(self._model, embeddings=True, pooling="none", **sizes, **self._options)

    def reserve(self, num_tokens: int, num_at_once: int = 0) -> None:
        """Take the memory for prompts of up to `num_tokens` tokens, at most max_tokens, before they come. Any thread.

        num_at_once: cells of the largest item whose attention is not causal, all of which a pass computes. Raises
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

        Raises `InvalidParams`, `PromptTooLong`, `Aborted`, and what a pass raises.
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
        """Return the number of tokens and cells, and that of the largest item that is computed at once."""
        media = [one for one in segments if isinstance(one, MediaPart)]
        num_tokens = sum(one.num_cells if isinstance(one, MediaPart) else len(one) for one in segments)
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
        return num_tokens, max((one.num_cells for one in media if not one.is_causal), default=0)

    def _add(self, context: Context, segment: Sequence[int] | MediaPart, position: int) -> int:
        """Compute a segment behind what the sequence holds, in passes, and return the position behind it."""
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
    """Compute cells of an item that begins at a position."""
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
        whose = "this model's own is" if pooling is None else "not"
        raise Unsupported(
            f'pooling: a prompt with images or audio is embedded with pooling "last", {whose} "{chosen}"; say pooling="last" '
            "(a server: --pooling last), or leave the images and audio out"
        )
    return chosen
