"""How large an engine's context is: sequence ids, rows of logits, cells. Knows a model by its kind of memory only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from paceline.runtime import MemoryClass

_CTX_PER_SLOT: Final = 4096
_MAX_SCORED: Final = 32  # rows of logits for prompt tokens in a tick: each costs 8 bytes x vocabulary, for ever
_MAX_DRAFTED: Final = 64  # for drafts in a tick, with speculation
_MAX_ROLLBACK: Final = (
    3  # with speculation: each costs another state for every sequence, as far as the architecture has them
)
_MOST_SEQ_IDS: Final = 256
_MOST_DOUBLED_SEQ_IDS: Final = 128  # where a context needs a second id for each sequence


def default_n_ctx(n_ctx_train: int, num_slots: int, sequence_cells: int = 0) -> int:
    """Return the cells that a context has by default if memory is not short.

    Args:
        n_ctx_train: Tokens that the model was trained for; 0 if unknown.
        num_slots: Sequences that run at once.
        sequence_cells: Cells that memory allows for one sequence of full length; the slots share them.
    """
    return max(sequence_cells, min(n_ctx_train if n_ctx_train > 0 else _CTX_PER_SLOT, _CTX_PER_SLOT) * num_slots)


def sized_options(
    memory: MemoryClass, num_slots: int, n_ctx: int, options: Mapping[str, Any], *, drafts: bool
) -> dict[str, Any]:
    """Return the options of the context for generation. drafts: whether there is speculation."""
    num_seqs = num_seq_ids(memory, num_slots, options) + 1
    most = num_slots + _MAX_SCORED
    if drafts and isinstance(n_ctx, int):  # `ContextOptions` names what is wrong
        most = max(most, min(most + _MAX_DRAFTED, n_ctx))
    n_batch = options.get("n_batch")
    outputs = max(num_seqs, min(most, n_batch) if isinstance(n_batch, int) else most)
    sizes = {**options, "n_ctx": n_ctx, "n_seq_max": num_seqs, "n_outputs_max": outputs}
    if drafts and memory in (MemoryClass.RECURRENT, MemoryClass.HYBRID):
        asked = [size for size in (options.get("n_ubatch"), n_batch) if isinstance(size, int)]
        sizes.setdefault("max_rollback", max(0, min([_MAX_ROLLBACK, *[size - 2 for size in asked]])))
    return sizes


def output_shares(num_slots: int, n_outputs_max: int, *, drafts: bool) -> tuple[int, int]:
    """Return how many rows of logits a tick can spend on prompt tokens, and how many on drafts, beside one a slot."""
    num_left = n_outputs_max - num_slots
    num_drafted = min(_MAX_DRAFTED, max(0, num_left - 1)) if drafts else 0
    return max(1, num_left - num_drafted), num_drafted


def has_full_window(memory: MemoryClass, options: Mapping[str, Any]) -> bool:
    """Whether layers with a sliding window keep whole sequences, so that any part of one can be shared."""
    return memory is MemoryClass.SLIDING_WINDOW and options.get("swa_full") is True


def has_doubled_seq_ids(memory: MemoryClass, options: Mapping[str, Any]) -> bool:
    """Whether a context takes a second id for each sequence, for what a failed pass is restored from."""
    return memory in (MemoryClass.RECURRENT, MemoryClass.HYBRID) or has_full_window(memory, options)


def most_seq_ids(memory: MemoryClass, options: Mapping[str, Any]) -> int:
    """Sequence ids that a context with these options can have."""
    return _MOST_DOUBLED_SEQ_IDS if has_doubled_seq_ids(memory, options) else _MOST_SEQ_IDS


def num_seq_ids(memory: MemoryClass, num_slots: int, options: Mapping[str, Any]) -> int:
    """Those of running sequences; where prefixes can stay on the device as they are, as many again and at least four.

    One more is the backend's own. Every id costs memory where windows or states are kept for it, so others have no more.
    """
    if memory is not MemoryClass.ATTENTION and not has_full_window(memory, options):
        return num_slots
    return min(num_slots + max(4, num_slots), most_seq_ids(memory, options) - 1)


def draft_sized_options(
    memory: MemoryClass, num_slots: int, n_ctx: int, n_batch: int | None, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options of a draft model's context. n_batch: the target's, where that is known; options: its own."""
    num_seqs = min(_MOST_SEQ_IDS, num_slots + max(4, num_slots))
    sizes: dict[str, Any] = {"n_ctx": n_ctx, "n_seq_max": num_seqs, "n_outputs_max": num_seqs}
    if memory is MemoryClass.SLIDING_WINDOW:
        sizes["swa_full"] = True  # else wrong drafts could not be cut
    batch = {} if n_batch is None else {"n_batch": min(n_batch, n_ctx)}
    return {**batch, **options, **sizes}
