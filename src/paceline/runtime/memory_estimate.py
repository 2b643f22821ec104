"""Records of the memory that a model with a context needs, by device, against what the devices have."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

HOST = "CPU"  # the name of host memory among devices


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """What a model takes of one device's memory, in bytes.

    Attributes:
        device: The device as `paceline info` names it; "CPU" is host memory.
        weights_bytes: Tensors of the model.
        mapped_bytes: The part of weights_bytes that is mapped from the file. The operating system reads it when needed, and
            may drop it where memory is short; it is therefore no part of needed_bytes.
        cache_bytes: The KV cache, and recurrent states.
        compute_bytes: Buffers of the forward pass and rows of logits; None where they were not measured.
        free_bytes: What can be allocated now, within a container's limit; None where unknown.
    """

    device: str
    weights_bytes: int
    mapped_bytes: int = 0
    cache_bytes: int = 0
    compute_bytes: int | None = None
    free_bytes: int | None = None

    @property
    def needed_bytes(self) -> int:
        """What has to be allocated."""
        return self.total_bytes - self.mapped_bytes

    @property
    def total_bytes(self) -> int:
        """What is needed to run without reading weights from the file again."""
        return self.weights_bytes + self.cache_bytes + (self.compute_bytes or 0)

    def fits(self, margin_bytes: int = 0) -> bool:
        """Whether what has to be allocated is free, and `margin_bytes` more."""
        return self.free_bytes is None or self.needed_bytes + margin_bytes <= self.free_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """What a model with a KV cache of `n_ctx` cells for `num_slots` sequences needs.

    Attributes:
        n_ctx: KV cells.
        num_slots: Sequences that run at once.
        devices: The memory of each device, host memory last.
        is_measured: Whether llama.cpp planned it; otherwise it was computed from the file's header alone, without the
            buffers of the forward pass.
    """

    n_ctx: int
    num_slots: int
    devices: tuple[DeviceMemory, ...]
    is_measured: bool

    @property
    def weights_bytes(self) -> int:
        """The tensors of the model on all devices."""
        return sum(one.weights_bytes for one in self.devices)

    @property
    def cache_bytes(self) -> int:
        """KV cache and recurrent states on all devices."""
        return sum(one.cache_bytes for one in self.devices)

    @property
    def compute_bytes(self) -> int | None:
        """Buffers of the forward pass on all devices; None where they were not measured."""
        return sum(one.compute_bytes or 0 for one in self.devices) if self.is_measured else None

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return sum(one.total_bytes for one in self.devices)

    @property
    def fits(self) -> bool:
        """Whether every device has what has to be allocated. Mapped weights may exceed the memory: they are read again."""
        return all(one.fits() for one in self.devices)

    @property
    def short_of_cache(self) -> bool:
        """Whether it fits, but not together with the mapped weights, which are then read from the file again and again."""
        return self.fits and any(
            one.mapped_bytes and one.free_bytes is not None and one.total_bytes > one.free_bytes for one in self.devices
        )

    def plus(self, other: MemoryEstimate) -> MemoryEstimate:
        """Return what this model needs together with another one, whose cells and slots are its own affair."""
        devices = {one.device: one for one in self.devices}
        for added in other.devices:
            one = devices.get(added.device)
            devices[added.device] = added if one is None else _sum(one, added)
        host = devices.pop(HOST, None)
        found = (*devices.values(), *(() if host is None else (host,)))
        return dataclasses.replace(self, devices=found, is_measured=self.is_measured and other.is_measured)

    @classmethod
    def of_json(cls, found: dict[str, Any]) -> Self:
        """Return the estimate that `dataclasses.asdict` was made of."""
        devices = tuple(DeviceMemory(**one) for one in found["devices"])
        return cls(**{**found, "devices": devices})


def _sum(one: DeviceMemory, other: DeviceMemory) -> DeviceMemory:
    measured = [size for size in (one.compute_bytes, other.compute_bytes) if size is not None]
    return DeviceMemory(
        device=one.device,
        weights_bytes=one.weights_bytes + other.weights_bytes,
        mapped_bytes=one.mapped_bytes + other.mapped_bytes,
        cache_bytes=one.cache_bytes + other.cache_bytes,
        compute_bytes=sum(measured) if measured else None,
        free_bytes=other.free_bytes if one.free_bytes is None else one.free_bytes,
    )


def mebibytes(count: int) -> str:
    """Return bytes for a message."""
    return f"{count / 2**20:,.1f} MiB" if count < 10 << 20 else f"{count / 2**20:,.0f} MiB"
