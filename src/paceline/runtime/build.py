"""Build facts of the compiled core."""

from __future__ import annotations

from dataclasses import dataclass

from paceline import _native


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildInfo:
    """Facts that were fixed when the core was compiled.

    Folders are those of the machine that built it; a folder in the builder's home is reported in the user's.
    backend: cpu, cuda, metal, vulkan or hip, and backend_reason why. flags: NAME=VALUE as given to llama.cpp's build.
    sanitizers: empty, or such as "address,undefined". assertions: whether llama.cpp's debug assertions are compiled in.
    own_attention: whether attention on a CPU may be computed by paceline's own kernel (see `runtime.attention`).
    """

    backend: str
    backend_reason: str
    llama_cpp_version: str
    llama_cpp_commit: str
    llama_cpp_source: str
    build_type: str
    sanitizers: str
    flags: tuple[str, ...]
    compiler: str
    target: str
    cache_dir: str
    cache_entry: str
    assertions: bool
    own_attention: bool


def build_info() -> BuildInfo:
    """Return the facts of the loaded core."""
    facts = _native.build_info()
    return BuildInfo(**{**facts, "flags": tuple(facts["flags"])})
