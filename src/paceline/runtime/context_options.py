"""The options of a context: checked, with defaults, and converted to llama.cpp's numbers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, Unpack

from paceline import _native, validation
from paceline.errors import NotEnoughMemory
from paceline.keywords import ContextKeywords
from paceline.runtime.device import available_memory, physical_cores
from paceline.runtime.model import MemoryClass, Model

Pooling = Literal["none", "mean", "cls", "last", "rank"]

# The numbers are llama.cpp's; None everywhere means "as the model says".
_ROPE_SCALINGS = {"none": 0, "linear": 1, "yarn": 2, "longrope": 3}
_POOLINGS = {"none": 0, "mean": 1, "cls": 2, "last": 3, "rank": 4}
_ATTENTIONS = {"causal": 0, "non_causal": 1}
FLASH_ATTNS = {"auto": -1, "off": 0, "on": 1}
_CACHE_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q5_1": 7, "q5_0": 6, "q4_1": 3, "q4_0": 2, "iq4_nl": 20}

_MAX_CELLS = 2**31 - 256  # llama.cpp rounds up to multiples of 256 in 32 bits
_CELL_BYTES = 64  # of llama.cpp's bookkeeping for a cell, at least
_MAX_THREADS = 512
_MIN_BYTES_PER_THREAD = 16 << 20  # of weights
_SMALL_SHARE = 0.5  # of the free memory: a context that surely takes less is made without a plan


# Resolved options that a KV cell or a recurrent state depends on: a saved sequence fits only if they are the same.
CELL_OPTIONS = (
    "rope_scaling_type",
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
    "attention_type",
    "flash_attn",
    "type_k",
    "type_v",
    "swa_full",
    "kv_unified",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextOptions:
    """Options of a context. Fields named as in llama.cpp have the same meaning. None is the default of every field.

    n_ctx: KV cells, rounded up to a multiple of 256; by default the context of the training, at most 4096.
    n_batch, n_ubatch: most tokens of a call, and of one computation; by default 2048 and 512 or less.
    n_seq_max: most sequences held at once, at most 256 (128 for recurrent models, as each snapshot needs another
    sequence). Each sequence costs memory in models with a sliding window or recurrent state.
    n_outputs_max: most rows of logits of one call, at least n_seq_max. A row costs 4 bytes x vocabulary, twice.
    n_threads, n_threads_batch: threads for single tokens and for more; by default all physical cores, fewer for models
    under 16 MiB a core, as more threads would mostly wait for each other.
    kv_unified: one pool of cells for all sequences, so that they can share prefixes.
    swa_full: keep the whole sequence in sliding window layers too, n_ctx cells each. With kv_unified any part of a sequence
    can then be copied, cut and saved, as with attention over everything; n_seq_max is at most 128.
    max_rollback: wrong drafts that a step cuts from recurrent state instead of taking their row back, at most n_ubatch - 2:
    each costs another state for every sequence. `Context.max_rollback` has the supported number; llama.cpp supports a few
    architectures (Qwen 3.5, LFM2, Nemotron-H and others).
    pooling: how token embeddings become one vector; None takes the model's own way.
    """

    n_ctx: int | None = None
    n_batch: int | None = None
    n_ubatch: int | None = None
    n_seq_max: int = 1
    n_outputs_max: int | None = None
    n_threads: int | None = None
    n_threads_batch: int | None = None
    rope_scaling: Literal["none", "linear", "yarn", "longrope"] | None = None
    rope_freq_base: float | None = None
    rope_freq_scale: float | None = None
    yarn_ext_factor: float | None = None
    yarn_attn_factor: float | None = None
    yarn_beta_fast: float | None = None
    yarn_beta_slow: float | None = None
    yarn_orig_ctx: int | None = None
    attention: Literal["causal", "non_causal"] | None = None
    flash_attn: Literal["auto", "on", "off"] = "auto"
    type_k: str = "f16"
    type_v: str = "f16"
    offload_kqv: bool = True
    op_offload: bool = True
    swa_full: bool = False
    kv_unified: bool = True
    embeddings: bool = False
    pooling: Pooling | None = None
    max_rollback: int = 0

    if TYPE_CHECKING:

        def __init__(self, **options: Unpack[ContextKeywords]) -> None: ...

    def __post_init__(self) -> None:
        validation.set_defaults(self)

    @classmethod
    def names(cls) -> frozenset[str]:
        """Return the names of all options."""
        return frozenset(field.name for field in fields(cls))

    def resolve(self, model: Model, *, is_checked: bool = True) -> dict[str, Any]:
        """Check the options and return the options of the native context.

        is_checked: whether to refuse a context that memory is too short for. Raises `InvalidParams` naming the option, and
        `NotEnoughMemory`.
        """
        sizes = _resolve_sizes(self, model)
        return {
            **sizes,
            **_resolve_threads(self, model),
            **_resolve_rope(self),
            **_resolve_choices(self),
            "max_host_bytes": _memory_limit(sizes, model, with_embeddings=self.embeddings) if is_checked else None,
        }

    def cache_numbers(self) -> dict[str, Any]:
        """Return the fields of `CacheShape`, with defaults. n_ctx and n_seq_max must be set."""
        cells = -(-validation.integer("n_ctx", self.n_ctx, 1, _MAX_CELLS) // 256) * 256
        n_batch = _resolve_size("n_batch", self.n_batch, min(2048, cells), cells, f"n_ctx is {cells}")
        choices = _resolve_choices(self)
        return {
            "n_ctx": cells,
            "n_seq_max": self.n_seq_max,
            "n_ubatch": _resolve_size("n_ubatch", self.n_ubatch, min(512, n_batch), n_batch, f"n_batch is {n_batch}"),
            **{name: choices[name] for name in ("type_k", "type_v", "swa_full", "kv_unified", "offload_kqv")},
        }


def _optional_choice(name: str, value: str | None, numbers: dict[str, int]) -> int:
    return -1 if value is None else numbers[validation.choice(name, value, numbers)]


def _resolve_sizes(options: ContextOptions, model: Model) -> dict[str, int]:
    n_seq_max = validation.integer("n_seq_max", options.n_seq_max, 1, _native.max_sequences())
    trained = model.n_ctx_train if model.n_ctx_train > 0 else 4096
    n_ctx = min(trained, 4096) if options.n_ctx is None else validation.integer("n_ctx", options.n_ctx, 1, _MAX_CELLS)
    cells = -(-n_ctx // 256) * 256
    n_batch = _resolve_size("n_batch", options.n_batch, min(2048, cells), cells, f"n_ctx is {cells}")
    n_ubatch = _resolve_size("n_ubatch", options.n_ubatch, min(512, n_batch), n_batch, f"n_batch is {n_batch}")
    n_outputs_max = n_seq_max if options.n_outputs_max is None else options.n_outputs_max
    validation.integer(
        "n_outputs_max", n_outputs_max, n_seq_max, max(n_batch, n_seq_max), "every sequence may want one"
    )
    return {
        "n_ctx": cells,
        "n_batch": n_batch,
        "n_ubatch": n_ubatch,
        "n_seq_max": n_seq_max,
        "n_outputs_max": n_outputs_max,
        "max_rollback": validation.integer(
            "max_rollback", options.max_rollback, 0, max(0, n_ubatch - 2), f"n_ubatch is {n_ubatch}"
        ),
    }


def _resolve_size(name: str, value: int | None, default: int, high: int, hint: str) -> int:
    return default if value is None else validation.integer(name, value, 1, high, hint)


def default_threads(model: Model) -> int:
    """Return the threads of a context that is given none: the physical cores, or fewer for a small model."""
    return min(physical_cores(), max(1, model.size_bytes // _MIN_BYTES_PER_THREAD))


def _resolve_threads(options: ContextOptions, model: Model) -> dict[str, int]:
    n_threads = options.n_threads if options.n_threads is not None else default_threads(model)
    n_threads_batch = options.n_threads_batch if options.n_threads_batch is not None else n_threads
    return {
        "n_threads": validation.integer("n_threads", n_threads, 1, _MAX_THREADS),
        "n_threads_batch": validation.integer("n_threads_batch", n_threads_batch, 1, _MAX_THREADS),
    }


def _resolve_rope(options: ContextOptions) -> dict[str, float]:
    def positive(name: str, unset: float) -> float:
        value = getattr(options, name)
        return unset if value is None else validation.number(name, value, above=0, high=1e30)

    return {
        "rope_freq_base": positive("rope_freq_base", 0.0),
        "rope_freq_scale": positive("rope_freq_scale", 0.0),
        "yarn_ext_factor": -1.0
        if options.yarn_ext_factor is None
        else validation.number("yarn_ext_factor", options.yarn_ext_factor, 0),
        "yarn_attn_factor": positive("yarn_attn_factor", -1.0),
        "yarn_beta_fast": positive("yarn_beta_fast", -1.0),
        "yarn_beta_slow": positive("yarn_beta_slow", -1.0),
        "yarn_orig_ctx": 0
        if options.yarn_orig_ctx is None
        else validation.integer("yarn_orig_ctx", options.yarn_orig_ctx, 1, _MAX_CELLS),
    }


def _resolve_choices(options: ContextOptions) -> dict[str, int | bool]:
    booleans = ("offload_kqv", "op_offload", "swa_full", "kv_unified", "embeddings")
    return {
        "rope_scaling_type": _optional_choice("rope_scaling", options.rope_scaling, _ROPE_SCALINGS),
        "pooling_type": _optional_choice("pooling", options.pooling, _POOLINGS),
        "attention_type": _optional_choice("attention", options.attention, _ATTENTIONS),
        "flash_attn": FLASH_ATTNS[validation.choice("flash_attn", options.flash_attn, FLASH_ATTNS)],
        "type_k": _CACHE_TYPES[validation.choice("type_k", options.type_k, _CACHE_TYPES)],
        "type_v": _CACHE_TYPES[validation.choice("type_v", options.type_v, _CACHE_TYPES)],
        **{name: validation.boolean(name, getattr(options, name)) for name in booleans},
    }


def _memory_limit(sizes: dict[str, int], model: Model, *, with_embeddings: bool) -> int | None:
    """Return the most bytes of host memory that llama.cpp's plan may need; None if the context surely fits."""
    free = available_memory()
    if free is None:
        return None
    if with_embeddings:  # llama.cpp allocates rows of logits and embeddings for all tokens of a pass when it runs
        rows = 4 * (model.n_vocab + model.n_embd_out) * sizes["n_batch"]
        if rows > free:
            raise NotEnoughMemory(
                f"embedding {sizes['n_batch']} tokens in one pass needs {rows >> 20} MiB for its output rows, and "
                f"{free >> 20} MiB are free; use a smaller n_batch"
            )
        free -= rows
    if sizes["n_ctx"] * _CELL_BYTES > free:
        least = sizes["n_ctx"] * _CELL_BYTES
        raise NotEnoughMemory(
            f"n_ctx {sizes['n_ctx']} needs at least {least >> 20} MiB, and {free >> 20} MiB are free; lower n_ctx"
        )
    return None if _most_bytes(sizes, model) < _SMALL_SHARE * free else free


def _most_bytes(sizes: dict[str, int], model: Model) -> int:
    """Return an upper bound of a context's bytes: full attention in every layer and head, single precision."""
    copies = (
        2 * sizes["n_seq_max"] * (1 + sizes["max_rollback"]) if model.memory_class is not MemoryClass.ATTENTION else 1
    )
    cells = sizes["n_ctx"] * (2 * 4 * model.n_layer * max(model.n_embd, 1) * 2 + _CELL_BYTES)
    scores = 4 * model.n_head * sizes["n_ubatch"] * sizes["n_ctx"]
    outputs = 4 * (model.n_vocab + model.n_embd) * (2 * sizes["n_outputs_max"] + sizes["n_ubatch"])
    return cells * copies + scores + outputs
