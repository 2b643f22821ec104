"""`paceline cache`: the prefixes that survive on this machine's disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import terminal
from paceline.cli.endings import FAILED
from paceline.errors import InvalidParams
from paceline.hub.locate import shown_bytes

if TYPE_CHECKING:
    from paceline.engine.disk_blocks import FoundFile

# fmt: off
Folder = Annotated[Path | None, typer.Option(
    "--folder", metavar="FOLDER", help="The folder that --disk-cache of `paceline serve` names.",
    show_default="paceline/kv in the user's cache folder",
)]
Models = Annotated[list[str] | None, typer.Argument(
    metavar="[ID]...", help="As `paceline cache ls` shows them.", show_default=False,
)]
All = Annotated[bool, typer.Option("--all", help="Remove those of all models.")]
AsJson = Annotated[bool, typer.Option("--json", help="A JSON list.")]
# fmt: on

cache_commands = typer.Typer(no_args_is_help=True, help="Prefixes of prompts on the disk, which survive a restart.")


@cache_commands.callback()
def _cache() -> None:
    pass


@cache_commands.command()
def ls(*, folder: Folder = None, as_json: AsJson = False) -> None:
    """List the models with prefixes on the disk. Models with another context have other prefixes, and another line."""
    from paceline.engine.disk_blocks import about

    root, found = _found(folder)
    records: list[dict[str, Any]] = [
        {
            "id": model,
            "model": ", ".join(map(str, about(root, model).get("files", ()))),
            "files": len(files),
            "tokens": sum(file.name.num_cells for file in files if file.name is not None),
            "bytes": sum(file.num_bytes for file in files),
            "used": max(file.used_ns for file in files) / 1e9,
        }
        for model, files in found.items()
    ]
    if as_json:
        terminal.write_json(records, indent=2)
    elif not records:
        terminal.note(f"There are no prefixes in {root}; `paceline serve` writes them.")
    else:
        heading = ("ID", "MODEL", "FILES", "TOKENS", "SIZE", "USED")
        terminal.write_table(heading, [
            (each["id"][:8], each["model"], f"{each['files']:,}", f"{each['tokens']:,}", shown_bytes(each["bytes"]),
             terminal.day(each["used"]))
            for each in records
        ])  # fmt: skip


@cache_commands.command()
def rm(models: Models = None, *, folder: Folder = None, every: All = False) -> None:
    """Remove the prefixes of models. A server that runs goes on, and computes them again."""
    from paceline.engine.disk_blocks import remove

    root, found = _found(folder)
    wanted = set(found) if every else {_one_of(given, found) for given in models or ()}
    if not (every or models):
        raise InvalidParams("name the models by their ID in `paceline cache ls`, or give --all")
    terminal.note(f"Removed; {shown_bytes(remove(root, wanted))} are free again.")


@cache_commands.command()
def verify(*, folder: Folder = None) -> None:
    """Read every file and compare its checksums; write the names of damaged files. Exit code 1 if there are any."""
    from paceline.engine.disk_blocks import ModelFolder
    from paceline.errors import StateError

    root, found = _found(folder)
    num_damaged = num_files = 0
    for model, files in found.items():
        reader = ModelFolder(root, bytes.fromhex(model))
        for file in files:
            if file.name is None:
                continue
            try:
                reader.read(file.name)
            except FileNotFoundError:  # a server has deleted it meanwhile
                continue
            except (StateError, OSError) as error:
                num_damaged += 1
                terminal.write(f"{file.path}: {error}\n")
            num_files += 1
    terminal.note(f"{terminal.counted(num_files, 'file')}, {num_damaged} damaged.")
    if num_damaged:
        raise typer.Exit(FAILED)


def _found(folder: Path | None) -> tuple[Path, dict[str, list[FoundFile]]]:
    from paceline.engine.disk_blocks import files_of
    from paceline.engine.disk_cache import default_folder

    root, found = default_folder() if folder is None else folder, dict[str, list["FoundFile"]]()
    for file in files_of(root):
        found.setdefault(file.model, []).append(file)
    return root, dict(sorted(found.items()))


def _one_of(given: str, found: dict[str, list[FoundFile]]) -> str:
    """Return the only model with an ID that begins so. Raises `InvalidParams`."""
    matching = [model for model in found if model.startswith(given.lower())]
    if len(matching) != 1 or not given:
        number = "several models have" if len(matching) > 1 else "no model has"
        raise InvalidParams(f"{number} an ID that begins with {given!r:.40}; `paceline cache ls` lists them")
    return matching[0]
