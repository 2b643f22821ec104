"""Single attention operations for tests, and their results by the formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.runtime.attention import SingleAttention

Array = npt.NDArray[np.floating[Any]]
LARGE = {"tokens": 9, "cells": 4500, "kv_heads": 2, "group": 7, "dim_k": 64, "dim_v": 64}
LATENT = {"tokens": 2, "cells": 300, "kv_heads": 1, "group": 128, "dim_k": 576, "dim_v": 512}


def reference(one: SingleAttention) -> Array:
    """Softmax of scaled scores by the formula, in double precision."""
    num_heads, num_kv_heads = one.queries.shape[2], one.keys.shape[2]
    keys, values = (np.repeat(a.astype(np.float64), num_heads // num_kv_heads, 2) for a in (one.keys, one.values))
    scores = np.einsum("sthd,schd->shtc", one.queries.astype(np.float64), keys) * one.scale
    if one.softcap:
        scores = one.softcap * np.tanh(scores / one.softcap)
    if one.mask is not None:
        slopes = np.array([slope(head, num_heads, one.max_bias) for head in range(num_heads)])
        scores = scores + slopes[None, :, None, None] * one.mask.astype(np.float64)[:, None]
    largest = scores.max(-1, keepdims=True)
    if one.sinks is not None:
        largest = np.maximum(largest, one.sinks[None, :, None, None])
    largest = np.where(np.isinf(largest), 0, largest)
    weights = np.exp(scores - largest)
    total = weights.sum(-1, keepdims=True)
    if one.sinks is not None:
        total = total + np.exp(one.sinks[None, :, None, None] - largest)
    weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    return np.einsum("shtc,schd->sthd", weights, values)


def slope(head: int, num_heads: int, max_bias: float) -> float:
    """ALiBi (Press et al. 2022), for numbers of heads that are no power of two as well."""
    if max_bias <= 0:
        return 1.0
    power = 2 ** int(np.log2(num_heads))
    if head < power:
        return float((2.0 ** (-max_bias / power)) ** (head + 1))
    return float((2.0 ** (-max_bias / 2 / power)) ** (2 * (head - power) + 1))


MASKS = [
    "none", "causal", "sequences", "interleaved", "window", "random", "nothing", "numbers", "drafts", "mixed", "hidden",
]  # fmt: skip


def mask_of(kind: str, shape: tuple[int, int, int], rng: np.random.Generator) -> npt.NDArray[np.float16] | None:
    _, tokens, cells = shape
    token, cell = np.arange(tokens)[:, None], np.arange(cells)[None, :]
    if kind == "none":
        return None
    if kind == "numbers":
        return rng.normal(size=shape).astype(np.float16)
    seen = {
        "causal": cell <= cells - tokens + token,
        "sequences": cell * tokens // cells == token,
        "interleaved": cell % tokens == token,  # as streams that decode beside each other leave them
        "window": (cell > token) & (cell <= token + cells // 3),
        "random": rng.random((tokens, cells)) < 0.4,
        "nothing": (token % 3 == 1) & (cell > 70),
        "drafts": cell % 4 == token // 4,  # four tokens of each stream
        # streams, a prompt, and streams again
        "mixed": np.where((token < 8) | (token > tokens - 4), cell % tokens == token, cell <= cells - tokens + token),
        "hidden": np.zeros((tokens, cells), bool),
    }[kind]
    return np.broadcast_to(np.where(seen, np.float16(0), np.float16(-np.inf)), shape)


def make(
    shape: dict[str, int], kind: str, cell_type: type[np.floating[Any]] = np.float16, seed: int = 0, **options: Any
) -> SingleAttention:
    rng = np.random.default_rng(seed)
    streams, tokens, cells = shape.get("streams", 1), shape["tokens"], shape["cells"]
    kv_heads, group, dim_k, dim_v = shape["kv_heads"], shape["group"], shape["dim_k"], shape["dim_v"]
    with_sinks = options.pop("with_sinks", False)
    spread = options.pop("spread", 1.0)
    return SingleAttention(
        queries=(spread * rng.normal(size=(streams, tokens, kv_heads * group, dim_k))).astype(np.float32),
        keys=rng.normal(size=(streams, cells, kv_heads, dim_k)).astype(cell_type),
        values=rng.normal(size=(streams, cells, kv_heads, dim_v)).astype(cell_type),
        mask=mask_of(kind, (streams, tokens, cells), rng),
        sinks=rng.normal(size=kv_heads * group).astype(np.float32) if with_sinks else None,
        scale=dim_k**-0.5,
        **options,
    )
