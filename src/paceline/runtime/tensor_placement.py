"""Where single tensors go: patterns of their names, and the types of buffers they name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from paceline import _native, validation
from paceline.errors import InvalidParams, InvalidType

HOST_BUFFER: Final = "CPU"
# The experts of a mixture, and dense feed-forward weights, as llama.cpp's common/common.h has them for --cpu-moe and the like.
_EXPERTS: Final = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
_DENSE: Final = r"\.ffn_(up|down|gate)\."
_MAX_LAYERS: Final = 512


def tensor_placements(
    tensor_overrides: Mapping[str, str] | None, *, cpu_moe: bool = False, n_cpu_moe: int = 0, n_cpu_ffn: int = 0
) -> list[tuple[str, str]]:
    """Return patterns of tensor names and the buffer type of each, in the order in which they are tried.

    Raises `InvalidParams` and `InvalidType`; the native core checks the patterns when it gets them.
    """
    placed = _checked_overrides(tensor_overrides)
    if validation.boolean("cpu_moe", cpu_moe):
        placed.append((_EXPERTS, HOST_BUFFER))
    for name, count, weights in (("n_cpu_moe", n_cpu_moe, _EXPERTS), ("n_cpu_ffn", n_cpu_ffn, _DENSE)):
        layers = range(validation.integer(name, count, 0, _MAX_LAYERS))
        placed += [(rf"blk\.{layer}{weights}", HOST_BUFFER) for layer in layers]
    return placed


def _checked_overrides(overrides: Mapping[str, str] | None) -> list[tuple[str, str]]:
    if overrides is None:
        return []
    if not isinstance(overrides, Mapping):
        raise InvalidType(
            "tensor_overrides must be a mapping of patterns to buffer types, such as "
            f'{{"ffn_.*_exps": "CPU"}}, not {type(overrides).__name__}'
        )
    known = _native.buffer_types()
    found = []
    for pattern, buffer in overrides.items():
        validation.text("tensor_overrides: a pattern", pattern)
        if validation.text(f"tensor_overrides[{pattern!r:.80}]", buffer) not in known:
            raise InvalidParams(
                f"tensor_overrides[{pattern!r:.80}]: there is no buffer type {buffer!r:.80}; this build has "
                f"{', '.join(known)}"
            )
        found.append((pattern, buffer))
    return found
