"""From command line, environment and file to settings: one pure function, but for what it asks of the disk it is handed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from paceline.errors import InvalidParams
from paceline.server.flags.draft import Draft, Files, Origin
from paceline.server.flags.finishing import finish
from paceline.server.flags.flag import Flag, Ignored, Prints, ReadsConfig, Refused, Sets
from paceline.server.flags.given import Given, from_arguments, from_environment, from_file, odd_variables, strongest
from paceline.server.flags.reading import on_one_line
from paceline.server.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class Resolved:
    """What was resolved. prints: what to write in place of serving. notes: for people, before the server starts.

    origins: where each setting came from, by names such as "engine.n_ctx"; those that are not there are defaults.
    """

    settings: ServerSettings
    prints: Literal["help", "version", "config"] | None = None
    notes: tuple[str, ...] = ()
    origins: Mapping[str, Origin] = field(default_factory=dict)


def resolve(argv: Sequence[str], environ: Mapping[str, str], files: Files) -> Resolved:
    """The settings. The command line is stronger than the environment, that than the file, that than the defaults.

    Raises `InvalidParams` for what is unknown, refused or out of range, with the flag, the value and the way out;
    `ModelLoadError` where -c 0 asks a file that is no model.
    """
    arguments, variables = from_arguments(argv), from_environment(environ)
    prints = _printed(arguments)
    if prints in ("help", "version"):
        return Resolved(ServerSettings(), prints)
    config = _config_file((*variables, *arguments), files)
    chosen, notes = strongest((config, variables, arguments))
    draft = Draft(files)
    draft.notes += [*notes, *odd_variables(environ)]
    for given in chosen:
        _apply(draft, given)
    finish(draft)
    return Resolved(_settings(draft), prints, tuple(draft.notes), draft.origins)


def _printed(arguments: Sequence[Given]) -> Literal["help", "version", "config"] | None:
    """The first that asks for something to be written, help and version before the configuration."""
    wanted = [given.flag.fate.what for given in arguments if isinstance(given.flag.fate, Prints) and given.value()]
    return next((what for what in wanted if what != "config"), wanted[0] if wanted else None)


def _config_file(givens: Sequence[Given], files: Files) -> list[Given]:
    """What stands in the file that was named last, the command line after the environment."""
    named = [given for given in givens if isinstance(given.flag.fate, ReadsConfig)]
    if not named:
        return []
    path: Path = named[-1].value()
    try:
        return from_file(path, files.read(path))
    except OSError as error:
        raise InvalidParams(f"{named[-1].label}: cannot read {on_one_line(path)}: {error.strerror or error}") from None


def _apply(draft: Draft, given: Given) -> None:
    value = given.value()
    draft.origin = given.origin
    match given.flag.fate_of(value):
        case Refused(way_out):
            raise InvalidParams(f"{_asked(given)}: {way_out}")
        case Ignored(why) if not _is_foreign(given):
            draft.notes.append(f"{_asked(given)} has no effect: {why}")
        case Sets(targets, None):
            for target in targets:
                draft.put(target, value, given.label)
        case Sets(_, apply) if apply is not None:
            apply(draft, value, given.label)


def _is_foreign(given: Given) -> bool:
    """Whether it is a variable that other programs read as well, so that it says nothing about this one."""
    return given.kind == "environment" and not given.label.startswith(("LLAMA_", "PACELINE_"))


def _asked(given: Given) -> str:
    """The flag as it was given, with its value where that matters."""
    flag: Flag = given.flag
    shows = given.kind != "flag" or (flag.but and flag.metavar)
    return f"{given.label} {on_one_line(given.texts[-1]):.80}" if shows and not flag.secret else given.label


def _settings(draft: Draft) -> ServerSettings:
    return ServerSettings(
        **draft.place("server"), engine_options=draft.place("engine"), sampling=draft.place("sampling")
    )
