"""Texts to vectors, in a context of its own: computing embeddings makes every token an output, which generation must not pay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from paceline import validation
from paceline.errors import InvalidParams, InvalidType, PromptTooLong, Unsupported
from paceline.runtime.closing import Closing
from paceline.runtime.context import Context
from paceline.runtime.context_options import Pooling
from paceline.runtime.gguf_file import read_gguf
from paceline.runtime.model import Model

Normalization = Literal["l2", "max_abs", "none"]
Text = str | Sequence[int]

_POOLING_NAMES: tuple[Pooling, ...] = ("none", "mean", "cls", "last", "rank")


class Embedder(Closing):
    """Embeds texts with an encoder (BERT and its kind) or a decoder, many texts to a batch.

    pooling: how the tokens' vectors become one: "mean", "cls" (the first token's), "last", or "rank" (the scores of a
    reranker's head); "none" keeps one vector a token. None takes what the model was made for, "mean" where it does not say.
    max_tokens: the longest text; as many tokens are computed at once. By default what the model was trained with, at most
    2048. Other options as in `ContextOptions`.

    One call at a time: a second thread waits. `close()` frees the memory; the model stays.
    """

    def __init__(
        self,
        model: Model,
        *,
        pooling: Pooling | None = None,
        max_tokens: int | None = None,
        max_texts: int = 64,
        **options: Any,
    ) -> None:
        reserved = {"embeddings", "n_batch", "n_ubatch", "n_ctx", "n_seq_max", "n_outputs_max"}
        taken = sorted(reserved & options.keys())
        if taken:
            raise InvalidParams(f"{taken[0]} follows from max_tokens and max_texts in an Embedder; set those")
        if model.has_encoder and model.has_decoder:
            raise Unsupported("an encoder-decoder model gives no embeddings of texts; use an encoder or a decoder")
        trained = model.n_ctx_train if model.n_ctx_train > 0 else 512
        self.max_tokens = (
            min(trained, 2048) if max_tokens is None else validation.integer("max_tokens", max_tokens, 1, trained)
        )
        max_texts = validation.integer("max_texts", max_texts, 1, 128)
        # llama.cpp wants batches that its sequences divide; twice as many of them where state is recurrent.
        n_batch = -(-max(self.max_tokens, 256) // (2 * max_texts)) * 2 * max_texts
        sizes = {
            "n_ctx": n_batch,
            "n_batch": n_batch,
            "n_ubatch": n_batch,
            "n_outputs_max": n_batch,
            "n_seq_max": max_texts,
        }
        self._context = Context(model, embeddings=True, pooling=_checked_pooling(model, pooling), **sizes, **options)
        self.pooling: Pooling = _POOLING_NAMES[self._context.native.pooling_type]
        self._tokenizer = model.tokenizer

    @property
    def dimension(self) -> int:
        """Numbers in a vector."""
        return int(self._context.native.embedding_dimension)

    def embed(self, texts: Iterable[Text], *, normalize: Normalization = "l2") -> npt.NDArray[np.float32]:
        """Vectors of texts (str, or token ids as they are), float32 (n_texts, dimension).

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
        """With pooling "none": for each text float32 (n_tokens, dimension)."""
        if self.pooling != "none":
            raise InvalidParams(f'embed_tokens() needs pooling "none", and this embedder has {self.pooling!r}')
        ids = self._all_ids(texts)
        rows = normalized(self._compute(ids), normalize)
        ends = np.cumsum([len(one) for one in ids])
        return [rows[end - len(one) : end] for one, end in zip(ids, ends, strict=True)]

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
            raise InvalidParams(f"{name} has no tokens, and nothing has no embedding")
        if len(ids) > self.max_tokens:
            raise PromptTooLong(
                f"{name} has {len(ids)} tokens, and max_tokens is {self.max_tokens}; split it or cut it"
            )
        return ids

    def _compute(self, ids: list[list[int]]) -> npt.NDArray[np.float32]:
        flat = np.fromiter((token for one in ids for token in one), dtype=np.int32)
        lengths = np.fromiter((len(one) for one in ids), dtype=np.int32)
        return self._context.native.embed(flat, lengths)

    def abort(self) -> None:
        """Ends the call that is running in another thread, which raises `Aborted`."""
        self._context.abort()

    def close(self) -> None:
        """Frees the memory; idempotent."""
        self._context.close()


def has_head(path: Path) -> bool:
    """Whether a model's file has the tensors that make a score of an embedding."""
    return any(tensor.name.startswith(b"cls.") for tensor in read_gguf(path).tensors)


def _own_pooling(model: Model) -> Pooling:
    """The pooling that the model's file names, by llama.cpp's number."""
    architecture = model.metadata.get("general.architecture", "")
    number = model.metadata.get(f"{architecture}.pooling_type", "0")
    return _POOLING_NAMES[int(number)] if number in ("1", "2", "3", "4") else "mean"


def _checked_pooling(model: Model, pooling: Pooling | None) -> Pooling:
    if pooling is not None:
        validation.choice("pooling", pooling, _POOLING_NAMES)
    chosen = _own_pooling(model) if pooling is None else pooling
    if chosen == "rank" and not any(has_head(path) for path in model.paths):
        raise Unsupported('pooling "rank" needs a model with a classification head (a reranker), and this one has none')
    return chosen


def normalized(vectors: npt.NDArray[np.float32], normalize: Normalization) -> npt.NDArray[np.float32]:
    """Vectors, (n, dimension), with the length that `Embedder.embed` says of each kind of normalisation."""
    validation.choice("normalize", normalize, ("l2", "max_abs", "none"))
    if normalize == "none":
        return vectors
    if normalize == "l2":
        size = np.linalg.norm(vectors, axis=1, keepdims=True)
    else:
        size = np.abs(vectors).max(axis=1, keepdims=True, initial=0)
    result = np.zeros_like(vectors)  # a vector of zeros stays one
    np.divide(vectors, size, out=result, where=size > 0)
    return result
