"""Chooses cells, slots and GPU layers so that a model fits into memory. Pure: what a choice needs is measured by a function.

If the wanted choice fits, it gets more cells for one long sequence. Otherwise in this order: fewer cells, down to the least;
fewer slots, if each keeps a window or a state of its own; the experts of the first layers, and then whole layers, in host
memory. An option that the caller gave is never changed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from paceline.errors import NotEnoughMemory
from paceline.runtime import DeviceMemory, MemoryEstimate
from paceline.runtime.memory_estimate import HOST, mebibytes

CELL_STEP: Final = 256  # llama.cpp rounds contexts up to it
LEAST_CTX: Final = 512
_GPU_MARGIN: Final = 1 << 30
_HOST_SHARE: Final = 8  # of what is free in host memory, the part that is left free; at most as much as of a GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryChoice:
    """What decides how much memory a model takes. n_gpu_layers: None for all. no_repack: weights stay mapped from the file."""

    n_ctx: int
    num_slots: int
    n_gpu_layers: int | None = None
    n_cpu_moe: int = 0
    no_repack: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRules:
    """The options that may be chosen, and how much memory is left free.

    least_ctx: the fewest cells to choose. most_ctx: the cells that a number of slots has if memory is not short.
    sequence_cells: the cells of one long sequence, chosen if so many cells fit.
    n_layer, n_expert: of the model. targets: bytes to leave free, of each device in order or one number for all GPUs, for
    host memory where there is no GPU; empty for the defaults. is_alone: whether all memory counts as free. has_draft: whether
    a draft model is part of it. chooses_repack: weights that a CPU would have packed may stay mapped from the file.
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
        """Whether every device keeps its margin."""
        has_gpus = len(estimate.devices) > 1
        return all(device.fits(self._margin(device, place, has_gpus)) for place, device in enumerate(estimate.devices))

    def _margin(self, device: DeviceMemory, place: int, has_gpus: bool) -> int:
        is_host = device.device == HOST
        if self.targets and not (is_host and has_gpus):
            return self.targets[0] if len(self.targets) == 1 else self.targets[min(place, len(self.targets) - 1)]
        return min(_GPU_MARGIN, (device.free_bytes or 0) // _HOST_SHARE) if is_host else _GPU_MARGIN


@dataclass(frozen=True, slots=True)
class FittedMemory:
    """A choice, and what it needs."""

    choice: MemoryChoice
    estimate: MemoryEstimate


def fit_memory(
    measure: Callable[[MemoryChoice], MemoryEstimate], wanted: MemoryChoice, rules: FitRules
) -> FittedMemory:
    """Return the choice nearest to what is wanted that fits. Raises `NotEnoughMemory` where none does.

    A margin only decides what is chosen: where nothing keeps it, what fits without one is taken.
    """
    known = functools.cache(measure)

    def fits(choice: MemoryChoice) -> bool:
        return rules.fits(known(choice))

    if fits(wanted):
        found = _with_most_cells(wanted, rules.sequence_cells, rules, fits)
        return FittedMemory(found, known(found))
    if rules.chooses_repack and [one.device for one in known(wanted).devices] == [HOST]:
        wanted = dataclasses.replace(wanted, no_repack=True)
        if fits(wanted):
            return FittedMemory(wanted, known(wanted))
    least = wanted
    for least in _with_fewest_cells(wanted, rules):
        if fits(least):
            found = _with_most_cells(least, min(wanted.n_ctx, rules.most_ctx(least.num_slots)), rules, fits)
            return FittedMemory(found, known(found))
    moved = _with_layers_moved(least, rules, fits) if rules.chooses_layers else None
    tried = [moved] if moved is not None else [least, *_without_gpu(least, rules)]
    for choice in tried:
        if known(choice).fits:
            return FittedMemory(choice, known(choice))
    raise NotEnoughMemory(_refusal(known(tried[-1]), _fitting_cells(tried[-1], known, rules), rules))


def _with_fewest_cells(wanted: MemoryChoice, rules: FitRules) -> Iterator[MemoryChoice]:
    """Yield the choices with the fewest cells, each with fewer slots than the one before."""
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
    """Return the choice with as much of the model on GPUs as fits, experts first to move; None where nothing does."""
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


def _without_gpu(choice: MemoryChoice, rules: FitRules) -> list[MemoryChoice]:
    return [dataclasses.replace(choice, n_gpu_layers=0)] if rules.chooses_layers else []


def greatest(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """Return the greatest number of [low, high] for which it holds; it holds for `low`, and for none beyond one that fails."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _fitting_cells(
    choice: MemoryChoice, measure: Callable[[MemoryChoice], MemoryEstimate], rules: FitRules
) -> int | None:
    """Return the cells with which it would fit, where those were given; None where even few do not."""
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
            (short.cache_bytes, f"KV cache and states at n_ctx {estimate.n_ctx} and {_slots(estimate.num_slots)}"),
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


def _slots(count: int) -> str:
    return f"{count} slot" + "s" * (count != 1)


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
