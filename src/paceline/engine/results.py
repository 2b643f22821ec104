"""From what the engine brings to what callers get: outcomes of lists, vectors, scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline import validation
from paceline.completion import Completion, Score
from paceline.errors import BatchError, PacelineError, Unsupported
from paceline.request import RequestOptions
from paceline.runtime.embedder import Normalization, normalized

# What a request without a stream of tokens can be asked. A reranker's pairs are put together as its model wants them.
_RERANKING_OPTIONS = frozenset({"queue_timeout_s", "timeout_s", "request_id", "truncate"})
_EMBEDDING_OPTIONS = _RERANKING_OPTIONS | {"add_special", "parse_special"}
_PREFIX_OPTIONS = frozenset({"tenant", "cache_salt", "add_special", "parse_special"})


def batch_outcome(outcomes: Sequence[Completion | PacelineError]) -> list[Completion]:
    """All completions. Raises `BatchError` with every outcome where some are errors."""
    errors = [(index, one) for index, one in enumerate(outcomes) if isinstance(one, PacelineError)]
    if errors:
        index, first = errors[0]
        raise BatchError(
            f"{len(errors)} of {len(outcomes)} prompts failed, the first is number {index}: {first}; `outcomes` has all",
            outcomes,
        ) from first
    return [one for one in outcomes if isinstance(one, Completion)]


def embedding_options(options: Mapping[str, Any]) -> RequestOptions:
    """Return the request options of an embedding. Raises `InvalidType` for one that means nothing there."""
    validation.reject_unknown(options, _EMBEDDING_OPTIONS)
    return RequestOptions(**options)


def reranking_options(options: Mapping[str, Any]) -> RequestOptions:
    """Return the request options of reranking. Raises `InvalidType` for one that means nothing there."""
    validation.reject_unknown(options, _RERANKING_OPTIONS)
    return RequestOptions(**options)


def prefix_options(options: Mapping[str, Any]) -> RequestOptions:
    """Return the request options of saving and loading prefixes. Raises `InvalidType` for one that means nothing there."""
    validation.reject_unknown(options, _PREFIX_OPTIONS)
    return RequestOptions(**options)


def one_vector_pooling(pooling: str | None) -> str | None:
    """Return the pooling, which makes one vector of a text. Raises `Unsupported` for "none", which makes one of each token."""
    if pooling == "none":
        raise Unsupported('pooling "none" has a vector for each token; use embed_tokens() of an Embedder of your own')
    return pooling


def vectors(rows: list[Any], normalize: bool | Normalization, dimension: int) -> npt.NDArray[np.float32]:
    """Return the rows as float32 (n, dimension), normalised as asked."""
    kind = ("l2" if normalize else "none") if isinstance(normalize, bool) else normalize
    if not rows:
        return np.empty((0, dimension), dtype=np.float32)
    return normalized(np.stack(rows).astype(np.float32, copy=False), kind)


def scores(rows: list[Any]) -> list[Score]:
    """One score a document, best first; of a classifier with several outputs, the first."""
    found = [Score(index, float(row[0])) for index, row in enumerate(rows)]
    return sorted(found, key=lambda one: -one.score)
