"""The choices that make a model fit, on devices with made-up memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.engine.memory_fit import FitRules, MemoryChoice, fit_memory
from paceline.errors import NotEnoughMemory
from paceline.runtime import DeviceMemory, MemoryEstimate

GIB = 1 << 30
MIB = 1 << 20
LAYERS = 32


def host(free: int, *, weights: int = 4 * GIB, mapped: bool = True, cell: int = 64 << 10, slot: int = 0) -> Any:
    """Return a measure of a model in host memory: bytes by cell and by slot, 100 MiB of buffers."""

    def measure(choice: MemoryChoice) -> MemoryEstimate:
        device = DeviceMemory(
            device="CPU",
            weights_bytes=weights,
            mapped_bytes=weights if mapped else 0,
            cache_bytes=choice.n_ctx * cell + choice.num_slots * slot,
            compute_bytes=100 * MIB,
            free_bytes=free,
        )
        return MemoryEstimate(n_ctx=choice.n_ctx, num_slots=choice.num_slots, devices=(device,), is_measured=True)

    return measure


def gpu(free: int, *, experts: int = 0, dense: int = 8 * GIB, host_free: int = 64 * GIB) -> Any:
    """Return a measure of a model on one GPU: its layers share the weights evenly, and 4 KiB of each cell."""

    def measure(choice: MemoryChoice) -> MemoryEstimate:
        layers = LAYERS if choice.n_gpu_layers is None else min(choice.n_gpu_layers, LAYERS)
        on_gpu = dense * layers // LAYERS + experts * max(0, min(layers, LAYERS - choice.n_cpu_moe)) // LAYERS
        cache = choice.n_ctx * 4096 * layers
        of_host = dense + experts - on_gpu
        devices = (
            DeviceMemory(
                device="CUDA0", weights_bytes=on_gpu, cache_bytes=cache, compute_bytes=300 * MIB, free_bytes=free
            ),
            DeviceMemory(
                device="CPU",
                weights_bytes=of_host,
                mapped_bytes=of_host,
                cache_bytes=choice.n_ctx * 4096 * (LAYERS - layers),
                compute_bytes=20 * MIB,
                free_bytes=host_free,
            ),
        )
        return MemoryEstimate(n_ctx=choice.n_ctx, num_slots=choice.num_slots, devices=devices, is_measured=True)

    return measure


WANTED = MemoryChoice(n_ctx=32768, num_slots=8)
FREE_CHOICE = FitRules(
    chooses_ctx=True,
    chooses_slots=True,
    chooses_layers=True,
    least_ctx=512,
    most_ctx=lambda slots: 4096 * slots,
    n_layer=LAYERS,
)
FIXED = replace(FREE_CHOICE, chooses_ctx=False, chooses_slots=False, chooses_layers=False)


def test_what_fits_is_left_as_it_is() -> None:
    """Plenty of memory: the requested values."""
    assert fit_memory(host(64 * GIB), WANTED, FREE_CHOICE).choice == WANTED


def test_one_long_sequence_gets_cells_if_what_was_wanted_fits() -> None:
    """As many as keep the margin; nothing else is chosen for them, and not if cells were given or memory is short."""
    rules = replace(FREE_CHOICE, sequence_cells=100_000, chooses_repack=True)
    assert fit_memory(host(64 * GIB), WANTED, rules).choice == replace(WANTED, n_ctx=100_000)
    found = fit_memory(host(4 * GIB), WANTED, rules).choice
    room = 3 * GIB + GIB // 2 - 100 * MIB
    assert found == replace(WANTED, n_ctx=room // (64 << 10) // 256 * 256)
    assert fit_memory(host(64 * GIB), WANTED, replace(rules, chooses_ctx=False)).choice == WANTED
    short = fit_memory(host(2 * GIB), WANTED, rules).choice
    assert short == replace(fit_memory(host(2 * GIB), WANTED, FREE_CHOICE).choice, no_repack=short.no_repack)


def test_mapped_weights_may_exceed_the_memory() -> None:
    """They are read again: the model loads, and the estimate says so."""
    found = fit_memory(host(3 * GIB), WANTED, FREE_CHOICE)
    assert found.choice == WANTED
    assert found.estimate.fits
    assert found.estimate.short_of_cache


def packed(free: int) -> Any:
    """Return a measure of a model on the CPU with packed weights, unless they stay mapped."""

    def measure(choice: MemoryChoice) -> MemoryEstimate:
        return host(free, mapped=choice.no_repack)(choice)

    return measure


def test_weights_that_do_not_fit_packed_stay_mapped() -> None:
    """If it may be chosen: rather than fewer cells, or a refusal."""
    rules = replace(FREE_CHOICE, chooses_repack=True)
    assert fit_memory(packed(64 * GIB), WANTED, rules).choice == WANTED
    found = fit_memory(packed(6 * GIB), WANTED, rules)
    assert found.choice == replace(WANTED, no_repack=True)
    assert found.estimate.fits
    assert not fit_memory(packed(11 * GIB), WANTED, FREE_CHOICE).choice.no_repack
    with pytest.raises(NotEnoughMemory):
        fit_memory(packed(4 * GIB), WANTED, FREE_CHOICE)
    short = fit_memory(packed(2 * GIB), WANTED, rules).choice
    assert short.no_repack
    assert short.n_ctx < WANTED.n_ctx


def test_cells_are_the_most_that_leave_the_margin_free() -> None:
    """A multiple of 256, and 256 more would not fit."""
    free = 2 * GIB
    found = fit_memory(host(free), WANTED, FREE_CHOICE)
    assert found.choice.num_slots == 8
    assert found.choice.n_ctx % 256 == 0
    room = free - free // 8 - 100 * MIB
    assert found.choice.n_ctx * (64 << 10) <= room < (found.choice.n_ctx + 256) * (64 << 10)


def test_a_target_replaces_the_margin() -> None:
    """The memory that it names stays free."""
    found = fit_memory(host(2 * GIB), WANTED, replace(FREE_CHOICE, targets=(GIB,)))
    assert found.choice.n_ctx == (924 * MIB // (64 << 10)) // 256 * 256


def test_no_fewer_cells_than_the_least_are_chosen() -> None:
    """If these do not keep the margin, they are taken without a margin."""
    found = fit_memory(host(400 * MIB), WANTED, replace(FREE_CHOICE, chooses_slots=False, least_ctx=4096))
    assert found.choice.n_ctx == 4096
    with pytest.raises(NotEnoughMemory):
        fit_memory(host(300 * MIB), WANTED, replace(FREE_CHOICE, chooses_slots=False, least_ctx=4096))


def test_slots_are_given_up_where_cells_are_not_enough() -> None:
    """Each has a state of its own; with fewer of them cells are as many as fit."""
    found = fit_memory(host(2 * GIB, slot=512 * MIB), WANTED, FREE_CHOICE)
    assert found.choice.num_slots == 2
    assert 4096 < found.choice.n_ctx <= 8192


def test_what_was_given_is_not_changed() -> None:
    """It is refused only if it does not fit at all, with the needed memory, the free memory and the ways out."""
    assert fit_memory(host(2 * GIB + 200 * MIB), WANTED, FIXED).choice == WANTED
    with pytest.raises(NotEnoughMemory) as error:
        fit_memory(host(2 * GIB), WANTED, FIXED)
    message = str(error.value)
    assert "needs 2,148 MiB of host memory" in message
    assert "2,048 MiB KV cache and states at n_ctx 32768 and 8 slots" in message
    assert "2,048 MiB are free" in message
    assert "n_ctx 30976 would fit" in message
    assert "fit=False" in message
    with pytest.raises(NotEnoughMemory, match="2,048 MiB are all that there is"):
        fit_memory(host(2 * GIB), WANTED, replace(FIXED, is_alone=True))


def test_weights_that_are_not_mapped_count() -> None:
    """A load without mmap has to allocate them."""
    with pytest.raises(NotEnoughMemory, match=r"4,096 MiB weights.*load_mode"):
        fit_memory(host(3 * GIB, mapped=False), WANTED, FREE_CHOICE)


def test_what_is_free_need_not_be_known() -> None:
    """Then nothing is refused."""
    measure = host(0)

    def unknown(choice: MemoryChoice) -> MemoryEstimate:
        estimate = measure(choice)
        return replace(estimate, devices=tuple(replace(device, free_bytes=None) for device in estimate.devices))

    assert fit_memory(unknown, WANTED, FIXED).choice == WANTED


def test_cells_are_given_up_before_layers() -> None:
    """A GPU that holds the weights and some cells keeps all layers."""
    found = fit_memory(gpu(12 * GIB), WANTED, FREE_CHOICE)
    assert found.choice.n_gpu_layers is None
    assert 512 < found.choice.n_ctx < 32768


def test_as_many_layers_stay_on_the_gpu_as_fit() -> None:
    """With the least cells; one layer more would not leave the margin."""
    measure = gpu(6 * GIB)
    found = fit_memory(measure, WANTED, replace(FREE_CHOICE, chooses_slots=False))
    layers = found.choice.n_gpu_layers
    assert layers is not None
    assert 0 < layers < LAYERS
    assert FREE_CHOICE.fits(found.estimate)
    assert not FREE_CHOICE.fits(measure(replace(found.choice, n_gpu_layers=layers + 1)))


def test_experts_leave_the_gpu_before_layers_do() -> None:
    """Of as few layers as need be."""
    rules = replace(FREE_CHOICE, n_expert=64, chooses_slots=False)
    measure = gpu(12 * GIB, experts=32 * GIB, dense=4 * GIB)
    found = fit_memory(measure, WANTED, rules)
    assert found.choice.n_gpu_layers is None
    assert 0 < found.choice.n_cpu_moe < LAYERS
    assert not rules.fits(measure(replace(found.choice, n_cpu_moe=found.choice.n_cpu_moe - 1)))


def test_layers_follow_where_all_experts_are_not_enough() -> None:
    """All experts in host memory, and some layers."""
    rules = replace(FREE_CHOICE, n_expert=64, chooses_slots=False)
    found = fit_memory(gpu(4 * GIB, experts=32 * GIB), WANTED, rules)
    assert found.choice.n_cpu_moe == LAYERS
    assert found.choice.n_gpu_layers is not None


def test_a_gpu_that_is_too_small_is_named() -> None:
    """With the number of layers given, a load is refused before it fails."""
    with pytest.raises(NotEnoughMemory, match=r"of memory of CUDA0 .* lower n_gpu_layers"):
        fit_memory(gpu(6 * GIB), WANTED, FIXED)


def test_margins_of_several_gpus_are_by_their_order() -> None:
    """The last one counts for all that follow; host memory beside GPUs has its own."""
    rules = replace(FIXED, targets=(GIB, 0))
    devices = [
        DeviceMemory(device=name, weights_bytes=GIB, compute_bytes=0, free_bytes=free)
        for name, free in (("CUDA0", 2 * GIB), ("CUDA1", GIB), ("CUDA2", GIB), ("CPU", 2 * GIB))
    ]
    estimate = MemoryEstimate(n_ctx=256, num_slots=1, devices=tuple(devices), is_measured=True)
    assert rules.fits(estimate)
    assert not replace(rules, targets=(GIB + 1, 0)).fits(estimate)
    assert not replace(rules, targets=(GIB, 1)).fits(estimate)
