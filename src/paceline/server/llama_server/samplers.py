"""llama-server's spellings of the order of samplers: names, their variants, or one letter each."""

from __future__ import annotations

from paceline.params import SAMPLERS
from paceline.server.sampler_names import LETTERS, OTHER_NAMES

_NAMES = {
    **{name.replace("_", "-"): name for name in SAMPLERS},
    **{name.replace("_", ""): name for name in SAMPLERS},
    **OTHER_NAMES,
    **{name: name for name in SAMPLERS},
}


def order(samplers: list[str] | str, warnings: list[str]) -> tuple[str, ...]:
    """The names in order; what is no sampler, or comes again, is left out and named in `warnings`."""
    if isinstance(samplers, str):
        named = [(one, LETTERS.get(one)) for one in samplers]
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
