"""The last steps of a resolution: what follows from several flags together, and what they must not say together. Pure."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from paceline.config import CONFIG_NAMES, EngineConfig
from paceline.errors import InvalidParams
from paceline.params import SamplingParams
from paceline.server.flags.draft import DEFAULT, Draft
from paceline.server.flags.reading import on_one_line
from paceline.server.settings import ServerSettings

_CELLS: Final = 256  # llama.cpp rounds contexts up to it
_N_BATCH: Final = 2048
_ESCAPES: Final = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}
_ESCAPE: Final = re.compile(r"\\(?:x([0-9a-fA-F]{2})|([nrt'\"\\]))")


def finish(draft: Draft) -> None:
    """All steps, in order. Raises `InvalidParams`."""
    for step in (_isolation, _context, _batches, _lora, _escapes, _tls, _bodies, _together):
        step(draft)


def _isolation(draft: Draft) -> None:
    """A server's engine has a process of its own, where a library's has a thread."""
    if draft.get("engine.isolation") is None:
        draft.put("engine.isolation", "process", "--isolation")
        draft.origins["engine.isolation"] = DEFAULT
    if draft.get("engine.isolation") == "thread" and draft.get("engine.on_engine_death") is not None:
        raise InvalidParams(
            "--on-engine-death means nothing with --isolation thread, as a thread dies with its program; leave one out"
        )


def _context(draft: Draft) -> None:
    per_slot = draft.get("aside.cells_per_slot")
    if draft.get("aside.as_trained"):
        asked = draft.origins["engine.n_ctx"].name
        trained = draft.files.trained_context(draft.get("server.model"))
        draft.derive("engine.n_ctx", trained, f"{asked} 0, as many as the model was trained with")
    elif per_slot is not None and draft.get("engine.n_ctx") is None:
        num_slots = draft.get("engine.num_slots", EngineConfig().num_slots)
        name = draft.origins["aside.cells_per_slot"].name
        draft.derive("engine.n_ctx", per_slot * num_slots, f"{name} {per_slot} times {num_slots} slots")
    if per_slot is not None:
        draft.notes.append(
            f"{draft.origins['aside.cells_per_slot'].name}: all slots share the cells, so a sequence may use more than {per_slot}"
        )


def _batches(draft: Draft) -> None:
    """llama.cpp lowers batches to what fits into the context; so do we, and say it."""
    n_ctx = draft.get("engine.n_ctx")
    cells = None if n_ctx is None else -(-n_ctx // _CELLS) * _CELLS
    _lower(draft, "n_batch", cells, "the context")
    least = min(_N_BATCH, cells or _N_BATCH)
    _lower(draft, "n_ubatch", draft.get("engine.n_batch", least), "n_batch")


def _lower(draft: Draft, name: str, most: int | None, why: str) -> None:
    value = draft.get(f"engine.{name}")
    if value is not None and most is not None and value > most:
        label = draft.origins[f"engine.{name}"].name
        draft.notes.append(f"{label} {value} is lowered to {most}, the size of {why}")
        draft.derive(f"engine.{name}", most, f"{label} {value}, lowered to the size of {why}")


def _lora(draft: Draft) -> None:
    """Adapters get the names of their files; of the same name, the second is name-2."""
    found = draft.get("aside.adapters", ())
    if not found:
        return
    paths: dict[str, Path] = {}
    scales: dict[str, float] = {}
    for path, scale in found:
        same = sum(other.stem == path.stem for other in paths.values())
        name = path.stem if not same else f"{path.stem}-{same + 1}"
        if name in paths:
            raise InvalidParams(f"two adapters would be called {name!r}; rename the file {on_one_line(path)}")
        paths[name], scales[name] = path, scale
    draft.origin = draft.origins["aside.adapters"]
    draft.put("engine.lora", {name: str(path) for name, path in paths.items()}, "--lora")
    draft.put("server.lora_scales", {} if draft.get("aside.unapplied") else scales, "--lora")


def _escapes(draft: Draft) -> None:
    if draft.get("aside.escape", True):
        for target in ("sampling.stop", "sampling.dry_sequence_breakers"):
            if draft.get(target) is not None:
                draft.origin = draft.origins[target]
                draft.put(target, tuple(map(unescaped, draft.get(target))), draft.origin.name)


def unescaped(text: str) -> str:
    r"""The text with \n, \r, \t, \', \", \\ and \xHH read; any other backslash stays."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 16)) if match[1] else _ESCAPES[match[2]], text)


def _tls(draft: Draft) -> None:
    files = {"--ssl-key-file": "server.ssl_keyfile", "--ssl-cert-file": "server.ssl_certfile"}
    given = {name: draft.get(target) for name, target in files.items() if draft.get(target) is not None}
    if len(given) == 1:
        missing = next(name for name in files if name not in given)
        raise InvalidParams(f"{next(iter(given))} needs {missing} beside it: TLS takes a certificate and its key")
    for name, path in given.items():
        if not draft.files.is_file(path):
            raise InvalidParams(f"{name}: there is no file {on_one_line(path)}")


def _bodies(draft: Draft) -> None:
    total, most = (
        draft.get("server.max_total_body_bytes"),
        draft.get("server.max_body_bytes", ServerSettings().max_body_bytes),
    )
    if total is not None and total < most:
        raise InvalidParams(
            f"--max-total-body-bytes {total} has no room for one body of --max-body-bytes {most}; raise it or lower that"
        )


def _together(draft: Draft) -> None:
    """What the records say about several values at once."""
    try:
        SamplingParams(**draft.place("sampling"))
        EngineConfig(**{name: value for name, value in draft.place("engine").items() if name in CONFIG_NAMES})
    except InvalidParams as error:
        raise InvalidParams(f"flags that do not go together: {error}") from None
