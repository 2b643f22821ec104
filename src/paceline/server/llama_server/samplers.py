"""llama-server's spellings of the order of samplers: names, their variants, or one letter each."""

from __future__ import annotations

from paceline.params import SAMPLERS

_LETTERS = {
    "d": "dry",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "s": "top_n_sigma",
    "m": "min_p",
    "t": "temperature",
    "x": "xtc",
    "i": "infill",
    "e": "penalties",
    "a": "adaptive_p",
}
_NAMES = {
    **{name.replace("_", "-"): name for name in SAMPLERS},
    **{name.replace("_", ""): name for name in SAMPLERS},
    "nucleus": "top_p",
    "temp": "temperature",
    "typ": "typ_p",
    **{name: name for name in SAMPLERS},
}


def order(samplers: list[str] | str, warnings: list[str]) -> tuple[str, ...]:
    """The names in order; what is no sampler, or comes again, is left out and named in `warnings`."""
    if isinstance(samplers, str):
        named = [(one, _LETTERS.get(one)) for one in samplers]
    else:
        named = [(one, _NAMES.get(one.lower())) for one in samplers]
    found: list[str] = []
    for given, name in named:
        if name is None:
            warnings.append(f"samplers: there is no {given!r:.60}, and it was ignored")
        elif name in found:
            warnings.append(f"samplers: {given!r} comes twice and is applied once")
        else:
            found.append(name)
    return tuple(found)
