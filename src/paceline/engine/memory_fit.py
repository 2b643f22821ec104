"""Sizes of contexts, and the choice of cells, slots and GPU layers with which a model fits into memory.

No input or output: a function measures the memory that a choice needs. The planning process (`dry_run`) reads a
`MemoryQuestion` and writes a `MemoryReport`.

If the wanted choice fits, it gets more cells for one long sequence. Otherwise, in this order: fewer cells, down to the least;
fewer slots, if each slot keeps a window or a state of its own; the experts of the first layers, and then whole layers, in host
memory. An option that the caller gave is never changed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from paceline.errors import NotEnoughMemory
from paceline.runtime import Device, DeviceMemory, MemoryClass, MemoryEstimate
from paceline.runtime.memory import HOST, mebibytes

_CTX_PER_SLOT: Final = 4096
_MAX_SCORED: Final = 32  # rows of logits for prompt tokens in a tick: each takes 8 bytes x vocabulary
_MAX_DRAFTED: Final = 64  # for drafts in a tick, with speculation
_MAX_ROLLBACK: Final = 3  # with speculation: each costs another state for every sequence
_MOST_SEQ_IDS: Final = 256
_MOST_DOUBLED_SEQ_IDS: Final = 128  # if a context needs a second id for each sequence


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
    """Return whether layers with a sliding window keep whole sequences, so that any part of a sequence can be shared."""
    return memory is MemoryClass.SLIDING_WINDOW and options.get("swa_full") is True


def has_doubled_seq_ids(memory: MemoryClass, options: Mapping[str, Any]) -> bool:
    """Return whether a context takes a second id for each sequence, from which a failed pass is restored."""
    return memory in (MemoryClass.RECURRENT, MemoryClass.HYBRID) or has_full_window(memory, options)


def most_seq_ids(memory: MemoryClass, options: Mapping[str, Any]) -> int:
    """Return the most sequence ids that a context with these options can have."""
    return _MOST_DOUBLED_SEQ_IDS if has_doubled_seq_ids(memory, options) else _MOST_SEQ_IDS


def num_seq_ids(memory: MemoryClass, num_slots: int, options: Mapping[str, Any]) -> int:
    """Return the number of sequence ids of a model, without the backend's own.

    There is one for each slot. If prefixes can stay on the device, there are as many again, and at least four more. Other
    models keep a window or a state for every id, so they have no more.
    """
    if memory is not MemoryClass.ATTENTION and not has_full_window(memory, options):
        return num_slots
    return min(num_slots + max(4, num_slots), most_seq_ids(memory, options) - 1)


def draft_sized_options(
    memory: MemoryClass, num_slots: int, n_ctx: int, n_batch: int | None, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options of a draft model's context. n_batch: the target's, if known; options: the draft model's own."""
    num_seqs = min(_MOST_SEQ_IDS, num_slots + max(4, num_slots))
    sizes: dict[str, Any] = {"n_ctx": n_ctx, "n_seq_max": num_seqs, "n_outputs_max": num_seqs}
    if memory is MemoryClass.SLIDING_WINDOW:
        sizes["swa_full"] = True  # otherwise wrong drafts could not be cut
    batch = {} if n_batch is None else {"n_batch": min(n_batch, n_ctx)}
    return {**batch, **options, **sizes}


CELL_STEP: Final = 256  # llama.cpp rounds contexts up to it
LEAST_CTX: Final = 512
_GPU_MARGIN: Final = 1 << 30
_HOST_SHARE: Final = 8  # an eighth of the free host memory is left free; at most as much as of a GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryChoice:
    """The choice that decides how much memory a model takes.

    Attributes:
        n_gpu_layers: None for all.
        no_repack: Whether weights stay mapped from the file.
    """

    n_ctx: int
    num_slots: int
    n_gpu_layers: int | None = None
    n_cpu_moe: int = 0
    no_repack: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRules:
    """The options that may be chosen, and the memory that is left free.

    Attributes:
        chooses_ctx, chooses_slots, chooses_layers: Whether cells, slots and GPU layers may be chosen.
        least_ctx: The fewest cells to choose.
        most_ctx: Returns the cells for a number of slots if memory is not short.
        sequence_cells: The cells of one long sequence, chosen if so many cells fit.
        n_layer, n_expert: Of the model.
        targets: Bytes to leave free on each device in order, or one number for all GPUs; of host memory if there is no GPU.
            Empty for the defaults.
        is_alone: Whether all memory counts as free.
        has_draft: Whether a draft model is included.
        chooses_repack: Whether weights that a CPU would repack may stay mapped from the file.
    """

    chooses_ctx: bool
    chooses_slots: bool
    chooses_layers: bool
    least_ctx: int
    most_ctx: Callable[[int], int]
    sequence_cells: int = 0
    n_layer: int = 0
    n_expert: int = 0
    targets: Sequence[int] = ()
    is_alone: bool = False
    has_draft: bool = False
    chooses_repack: bool = False

    def fits(self, estimate: MemoryEstimate) -> bool:
        """Return whether every device keeps its margin."""
        has_gpus = len(estimate.devices) > 1
        return all(device.fits(self._margin(device, place, has_gpus)) for place, device in enumerate(estimate.devices))

    def _margin(self, device: DeviceMemory, place: int, has_gpus: bool) -> int:
        is_host = device.device == HOST
        if self.targets and not (is_host and has_gpus):
            return self.targets[0] if len(self.targets) == 1 else self.targets[min(place, len(self.targets) - 1)]
        return min(_GPU_MARGIN, (device.free_bytes or 0) // _HOST_SHARE) if is_host else _GPU_MARGIN


@dataclass(frozen=True, slots=True)
class FittedMemory:
    """A choice, and the memory that it needs."""

    choice: MemoryChoice
    estimate: MemoryEstimate


def fit_memory(
    measure: Callable[[MemoryChoice], MemoryEstimate], wanted: MemoryChoice, rules: FitRules
) -> FittedMemory:
    """Return the choice nearest to the wanted choice that fits. Raises `NotEnoughMemory` if no choice fits.

    Margins only decide between choices: if no choice keeps them, a choice that fits without a margin is taken.
    """
    known = functools.cache(measure)

    def fits(choice: MemoryChoice) -> bool:
        return rules.fits(known(choice))

    if fits(wanted):
        found = _with_most_cells(wanted, rules.sequence_cells, rules, fits)
        return FittedMemory(found, known(found))
    if rules.chooses_repack and [memory.device for memory in known(wanted).devices] == [HOST]:
        wanted = dataclasses.replace(wanted, no_repack=True)
        if fits(wanted):
            return FittedMemory(wanted, known(wanted))
    least = wanted
    for least in _with_fewest_cells(wanted, rules):
        if fits(least):
            found = _with_most_cells(least, min(wanted.n_ctx, rules.most_ctx(least.num_slots)), rules, fits)
            return FittedMemory(found, known(found))
    moved = _with_layers_moved(least, rules, fits) if rules.chooses_layers else None
    without_gpu = [dataclasses.replace(least, n_gpu_layers=0)] if rules.chooses_layers else []
    tried = [moved] if moved is not None else [least, *without_gpu]
    for choice in tried:
        if known(choice).fits:
            return FittedMemory(choice, known(choice))
    raise NotEnoughMemory(_refusal(known(tried[-1]), _fitting_cells(tried[-1], known, rules), rules))


def _with_fewest_cells(wanted: MemoryChoice, rules: FitRules) -> Iterator[MemoryChoice]:
    """Yield the choices with the fewest cells, in the order of falling numbers of slots."""
    slots = wanted.num_slots
    while True:
        most = min(wanted.n_ctx, rules.most_ctx(slots)) if rules.chooses_ctx else wanted.n_ctx
        n_ctx = min(most, max(rules.least_ctx, CELL_STEP)) if rules.chooses_ctx else most
        yield dataclasses.replace(wanted, n_ctx=n_ctx, num_slots=slots)
        if slots == 1 or not rules.chooses_slots:
            return
        slots //= 2


def _with_most_cells(
    fitting: MemoryChoice, most: int, rules: FitRules, fits: Callable[[MemoryChoice], bool]
) -> MemoryChoice:
    if not rules.chooses_ctx or most <= fitting.n_ctx:
        return fitting
    if fits(whole := dataclasses.replace(fitting, n_ctx=most)):
        return whole
    steps = greatest(
        fitting.n_ctx // CELL_STEP,
        most // CELL_STEP,
        lambda steps: fits(dataclasses.replace(fitting, n_ctx=steps * CELL_STEP)),
    )
    return dataclasses.replace(fitting, n_ctx=max(fitting.n_ctx, steps * CELL_STEP))


def _with_layers_moved(
    choice: MemoryChoice, rules: FitRules, fits: Callable[[MemoryChoice], bool]
) -> MemoryChoice | None:
    """Return the choice with the most layers on GPUs that fits, moving experts first; None if no layers fit."""
    if rules.n_expert:
        without = dataclasses.replace(choice, n_cpu_moe=rules.n_layer)
        if fits(without):
            kept = greatest(
                0, rules.n_layer, lambda kept: fits(dataclasses.replace(choice, n_cpu_moe=rules.n_layer - kept))
            )
            return dataclasses.replace(choice, n_cpu_moe=rules.n_layer - kept)
        choice = without
    if not fits(dataclasses.replace(choice, n_gpu_layers=0)):
        return None
    layers = greatest(0, rules.n_layer + 1, lambda layers: fits(dataclasses.replace(choice, n_gpu_layers=layers)))
    return dataclasses.replace(choice, n_gpu_layers=layers)


def greatest(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """Return the greatest number of [low, high] for which `holds` is true. It is true for `low` and false above that number."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _fitting_cells(
    choice: MemoryChoice, measure: Callable[[MemoryChoice], MemoryEstimate], rules: FitRules
) -> int | None:
    """Return the most cells that fit if the caller gave too many; None if even few cells do not fit."""
    if rules.chooses_ctx or choice.n_ctx <= LEAST_CTX:
        return None

    def fits(steps: int) -> bool:
        return measure(dataclasses.replace(choice, n_ctx=steps * CELL_STEP)).fits

    low = LEAST_CTX // CELL_STEP
    return greatest(low, choice.n_ctx // CELL_STEP, fits) * CELL_STEP if fits(low) else None


def _refusal(estimate: MemoryEstimate, fitting_cells: int | None, rules: FitRules) -> str:
    short = next(device for device in estimate.devices if not device.fits())
    where = "host memory" if short.device == HOST else f"memory of {short.device}"
    weights = short.weights_bytes - short.mapped_bytes
    parts = [
        f"{mebibytes(size)} {name}"
        for size, name in (
            (weights, "weights"),
            (
                short.cache_bytes,
                f"KV cache and states at n_ctx {estimate.n_ctx} and {estimate.num_slots} slot{'s' * (estimate.num_slots != 1)}",
            ),
            (short.compute_bytes or 0, "buffers"),
        )
        if size
    ]
    needing = "the model and its draft model need" if rules.has_draft else "the model needs"
    return (
        f"{needing} {mebibytes(short.needed_bytes)} of {where} ({', '.join(parts)}), and "
        f"{mebibytes(short.free_bytes or 0)} are {'all that there is' if rules.is_alone else 'free'}; "
        f"{'; '.join(_ways_out(short, weights, fitting_cells, rules))}"
    )


def _ways_out(short: DeviceMemory, weights: int, fitting_cells: int | None, rules: FitRules) -> Iterator[str]:
    if fitting_cells is not None:
        yield f"n_ctx {fitting_cells} would fit"
    if short.cache_bytes > weights:
        yield 'lower n_ctx or num_slots, or use a smaller cache, type_k="q8_0" and type_v="q8_0"'
    if weights and short.device == HOST:
        yield 'use a smaller quantisation of the model, or load_mode="mmap", which reads weights when they are needed'
    if weights and short.device != HOST:
        yield "lower n_gpu_layers" + (", set n_cpu_moe" if rules.n_expert else "") + " or use a smaller quantisation"
    if rules.has_draft:
        yield "leave draft_model out, or give it fewer cells by draft_options={'n_ctx': N}"
    yield "fit=False loads it without this check"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftQuestion:
    """A draft model's files and options. n_ctx: cells; None: as many as the target has."""

    paths: tuple[str, ...]
    model: Mapping[str, Any]
    context: Mapping[str, Any]
    n_ctx: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorQuestion:
    """A multimodal projector's file and options, as `plan_projector` takes them."""

    path: str
    use_gpu: bool
    image_min_tokens: int | None
    image_max_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryQuestion:
    """The files and options of a model to plan, and the options that may be chosen to make it fit.

    Attributes:
        sequence_cells: Cells of one sequence of full length if n_ctx is None; 0: no more than 4,096 a slot.
        is_alone: Whether all memory of the machine counts as free, not only the memory that is free now.
        drafts: Whether there is speculation.
        heads_path: A file of draft heads beside the model.
        draft: A draft model that is loaded as well.
        projector: A multimodal projector that is loaded as well.
        gpus: All GPUs, those of RPC servers first.
        rpc, rpc_timeout_s: See `EngineConfig`.
    """

    paths: tuple[str, ...]
    model: Mapping[str, Any]
    context: Mapping[str, Any]
    n_ctx: Any  # as the caller gave it: the plan checks it
    num_slots: int
    chooses_slots: bool
    chooses_layers: bool
    least_ctx: int
    targets: tuple[int, ...]
    sequence_cells: int = 0
    is_alone: bool = False
    drafts: bool = False
    heads_path: str | None = None
    draft: DraftQuestion | None = None
    projector: ProjectorQuestion | None = None
    gpus: tuple[Device, ...] = ()
    rpc: tuple[str, ...] = ()
    rpc_timeout_s: float = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """The memory of the wanted choice, and the fitted choice; if nothing fits, `fitted` is None and `refusal` says why."""

    wanted: MemoryEstimate
    fitted: FittedMemory | None
    refusal: str = ""
