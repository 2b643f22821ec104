"""The compiled core of this process, and which one it is if the installation has several.

A build from source has one core, the module `paceline._native`. A wheel for many machines has a core for each kind of processor,
`_native_<core>.so`: the same module, with kernels that were compiled for these processors. The best core that the processor can
run is loaded under the name `paceline._native`. The variable PACELINE_CORE names another one.
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path

from paceline.errors import InvalidParams, Unsupported

VARIABLE = "PACELINE_CORE"


@dataclass(frozen=True, slots=True)
class CompiledCore:
    """The loaded core.

    Attributes:
        name: The name of the core, for example "v3"; empty if the installation has one core.
        reason: Why it was loaded.
        all_names: The names of the cores of this installation, best first; empty if it has one core.
    """

    name: str
    reason: str
    all_names: tuple[str, ...] = ()


def choose(wanted: str, lacks: dict[str, str]) -> CompiledCore:
    """Return the core to load.

    Args:
        wanted: The value of PACELINE_CORE, or an empty string.
        lacks: The features that the processor lacks for each core, best core first; empty if it can run the core.

    Raises:
        InvalidParams: PACELINE_CORE names none of the cores.
        Unsupported: The processor cannot run the core that PACELINE_CORE names, or any core.
    """
    names, usable = tuple(lacks), [name for name, missing in lacks.items() if not missing]
    if not lacks:
        if wanted:
            raise InvalidParams(
                f"{VARIABLE} is {wanted!r}, but this installation has one core, as it was built from source; unset {VARIABLE}"
            )
        return CompiledCore("", "built from source")
    if wanted and wanted not in lacks:
        raise InvalidParams(f"{VARIABLE} must be one of {', '.join(map(repr, names))}, not {wanted!r}")
    if wanted and lacks[wanted]:
        runs = f"it runs {', '.join(usable)}" if usable else "it runs no core of this installation"
        raise Unsupported(f"{VARIABLE} is {wanted!r}, but this processor has no {lacks[wanted]}; {runs}")
    if wanted:
        return CompiledCore(wanted, VARIABLE, names)
    if not usable:
        raise Unsupported(
            f"this processor has no {lacks[names[-1]]}, which the core {names[-1]} needs; 'pip install --no-binary paceline' "
            "compiles a core for this machine"
        )
    better = names[: names.index(usable[0])]
    return CompiledCore(
        usable[0], f"this processor has no {lacks[better[-1]]}" if better else "the best of this installation", names
    )


def _missing_features(library: Path) -> dict[str, str]:
    """Return the argument `lacks` of `choose`, as the library for this question reports it."""
    if not library.exists():
        return {}
    processor = ctypes.CDLL(str(library))
    processor.paceline_cores.restype = processor.paceline_core_lacks.restype = ctypes.c_char_p
    names: list[str] = processor.paceline_cores().decode().split()
    return {name: ", ".join(processor.paceline_core_lacks(name.encode()).decode().split()) for name in names}


def _load() -> CompiledCore:
    folder = Path(__file__).parents[1]
    core = choose(os.environ.get(VARIABLE, ""), _missing_features(folder / "_processor.so"))
    name = "paceline._native"
    if core.name and name not in sys.modules:
        path = str(folder / f"_native_{core.name}.so")
        loader = ExtensionFileLoader(name, path)
        module = module_from_spec(ModuleSpec(name, loader, origin=path))
        loader.exec_module(module)
        sys.modules[name] = vars(sys.modules["paceline"])["_native"] = module
    return core


_loaded = _load()


def loaded_core() -> CompiledCore:
    """Return the core that was loaded."""
    return _loaded
