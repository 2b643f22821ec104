"""`paceline pull`, `list`, `show`, `rm`, `prune`: models by name, and what the caches of this machine have."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import terminal
from paceline.cli.interrupt import StopSignal, run
from paceline.cli.options import model_names
from paceline.errors import Aborted, InvalidParams, ModelLoadError, ModelNotFound
from paceline.hub.references import HubReference, UrlReference

if TYPE_CHECKING:
    from paceline.hub import ModelReference
    from paceline.hub.found_models import FoundModel

_downloading = partial(typer.Option, rich_help_panel="How it is downloaded")

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="USER/REPO[:QUANT] on the Hugging Face Hub, the URL of a GGUF file, ollama:NAME."
    ),
]
ListedName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        autocompletion=model_names,
        help="As `paceline list` names it, or USER/REPO[:QUANT], a URL, ollama:NAME.",
    ),
]
HfFile = Annotated[str | None, _downloading(metavar="FILE", help="This file of the repository.", show_default=False)]
HfToken = Annotated[
    str | None,
    _downloading(
        metavar="TOKEN",
        envvar="HF_TOKEN",
        show_envvar=False,
        help="Token of the hub.",
        show_default="HF_TOKEN, or that of `hf auth login`",
    ),
]
Offline = Annotated[bool, _downloading("--offline", help="Use the caches only; request nothing.")]
NoProjector = Annotated[bool, _downloading("--no-mmproj", help="Leave out the projector for images.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="List what would be removed, and remove nothing.")]


def pull(
    model: ModelName,
    *,
    hf_file: HfFile = None,
    hf_token: HfToken = None,
    offline: Offline = False,
    no_mmproj: NoProjector = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress and no notes.")] = False,
) -> None:
    """Download a model, and write the paths of its files.

    Without QUANT it is Q4_K_M, else Q8_0 or the first file that fits into memory. Files go to huggingface_hub's cache; what
    is there already, or in llama.cpp's or Ollama's, is not downloaded. Ctrl-C keeps what has arrived, and the next pull
    continues it.
    """
    reference = _with_file(parse_name(model), hf_file)
    run(lambda stop: _pull(reference, stop, hf_token=hf_token, offline=offline, projector=not no_mmproj, quiet=quiet))


def list_models(*, as_json: AsJson = False) -> None:
    """List the models that huggingface_hub, llama.cpp, Ollama and paceline have downloaded."""
    from paceline.hub.found_models import find_models
    from paceline.hub.hub_settings import hub_settings

    settings = hub_settings()
    models = find_models(settings)
    if as_json:
        terminal.write(json.dumps([_record(each) for each in models], ensure_ascii=False, indent=2) + "\n")
    elif not models:
        terminal.note(f"There are no models in {settings.cache} and the other caches; `paceline pull` downloads one.")
    else:
        terminal.write_table(("NAME", "SIZE", "DOWNLOADED", "BY"), [_row(each) for each in models])


def show(model: ListedName, *, hf_token: HfToken = None, offline: Offline = False, as_json: AsJson = False) -> None:
    """Show the files of a downloaded model and what they say; of a repository, each of its models.

    Of a model that was not downloaded, only the first bytes are requested.
    """
    from paceline.hub.found_models import matching_models
    from paceline.hub.hub_settings import hub_settings

    wanted, settings = parse_listed(model), hub_settings(token=hf_token, offline=offline)
    try:
        facts = [_facts(each) for each in matching_models(settings, wanted)]
    except ModelNotFound:
        if settings.offline or not isinstance(wanted, HubReference | UrlReference):
            raise
        facts = [run(lambda stop: _remote_facts(wanted, stop, hf_token))]
    if as_json:
        terminal.write(json.dumps(facts, ensure_ascii=False, indent=2) + "\n")
        return
    for one in facts:
        rows = [(key.replace("_", " "), _shown(value)) for key, value in one.items() if key not in ("name", "parts")]
        terminal.write_section(one["name"], [*rows, *(("file", part) for part in one["parts"])])


def rm(model: ListedName, *, dry_run: DryRun = False) -> None:
    """Remove a downloaded model; of a repository without QUANT, all of its models. Ollama's are left to Ollama."""
    from paceline.hub.found_models import matching_models, remove_models
    from paceline.hub.hub_settings import hub_settings
    from paceline.hub.locate import shown_bytes

    settings = hub_settings()
    models = matching_models(settings, parse_listed(model))
    freed = 0 if dry_run else remove_models(settings, models)
    for each in models:
        terminal.write(f"{each.name}\n")
    size = shown_bytes(sum(each.size for each in models) if dry_run else freed)
    terminal.note(f"{size} would be free; nothing was removed." if dry_run else f"Removed; {size} are free again.")


def prune(*, dry_run: DryRun = False) -> None:
    """Remove what no model needs: parts of downloads, and versions of models that no branch or tag has any more."""
    from paceline.hub.found_models import find_leftovers, remove_leftovers
    from paceline.hub.hub_settings import hub_settings
    from paceline.hub.locate import shown_bytes

    found = find_leftovers(hub_settings())
    leftovers = found if dry_run else remove_leftovers(found)
    for each in leftovers:
        terminal.write(f"{each.path}\n")
    what, size = terminal.counted(len(leftovers), "file"), shown_bytes(sum(each.size for each in leftovers))
    if not leftovers:
        terminal.note("There is nothing to remove.")
    elif dry_run:
        terminal.note(f"{what}; {size} would be free, nothing was removed.")
    else:
        terminal.note(f"Removed {what}; {size} are free again.")


def parse_name(text: str) -> ModelReference:
    """Parse a name of a model, where a repository of the hub needs no "hf:". Raises `InvalidParams`."""
    from paceline.hub import is_reference, parse_hub_reference, parse_reference

    return parse_reference(text, name="MODEL") if is_reference(text) else parse_hub_reference(text, name="MODEL")


def parse_listed(text: str) -> ModelReference | Path:
    """Parse a name as `paceline list` shows it: as `parse_name`, or the path of a file. Raises `InvalidParams`."""
    path = Path(os.path.expanduser(text))  # noqa: PTH111 - pathlib's raises for an unknown user
    return path if path.is_absolute() or path.is_file() else parse_name(text)


def _with_file(reference: ModelReference, file: str | None) -> ModelReference:
    from paceline.hub import check_file

    if file is None:
        return reference
    if not isinstance(reference, HubReference):
        raise InvalidParams(
            f"--hf-file needs a repository of the Hugging Face Hub, and {reference} is not a repository"
        )
    return HubReference(reference.repo, file=check_file(file, "--hf-file"), revision=reference.revision)


def _pull(
    reference: ModelReference,
    stop: StopSignal,
    *,
    hf_token: str | None,
    offline: bool,
    projector: bool,
    quiet: bool,
) -> None:
    from paceline.hub import local_model

    note = _silent if quiet else terminal.note
    try:
        found = local_model(
            reference,
            offline=offline,
            hf_token=hf_token,
            with_projector=projector,
            cancel=stop.event,
            stream=io.StringIO() if quiet else sys.stderr,
            note=note,
        )
    except Aborted as error:
        note(str(error))
        raise
    for path in (*found.parts, found.projector):
        if path is not None:
            terminal.write(f"{path}\n")


def _silent(text: str) -> None:
    """Drop a note."""


def _record(model: FoundModel) -> dict[str, Any]:
    return {**asdict(model), "parts": [str(part) for part in model.parts]}


def _row(model: FoundModel) -> tuple[str, str, str, str]:
    from paceline.hub.locate import shown_bytes

    day = datetime.fromtimestamp(model.modified, UTC).astimezone().strftime("%Y-%m-%d %H:%M")
    return model.name, shown_bytes(model.size), day, model.source


def _facts(model: FoundModel) -> dict[str, Any]:
    """Return what the cache and the file's header say."""
    from paceline.hub.locate import shown_bytes

    facts = {"name": model.name, "downloaded_by": model.source, "size": shown_bytes(model.size)}
    facts |= {"quantisation": model.quantisation, **_header_facts(model.path)}
    return {**facts, "parts": [str(part) for part in model.parts]}


def _remote_facts(reference: ModelReference, stop: StopSignal, hf_token: str | None) -> dict[str, Any]:
    """Return what the hub and the file's header say of a model that was not downloaded."""
    from paceline.hub.locate import shown_bytes
    from paceline.hub.remote_header import model_headers

    with model_headers(reference, hf_token=hf_token, cancel=stop.event, note=terminal.note) as model:
        return {
            "name": model.name,
            "downloaded": "no",
            "size": shown_bytes(model.size),
            **_header_facts(model.paths[0]),
            "quantisations": ", ".join(model.quantisations),
            "projector": "yes" if model.has_projector else "",
            "parts": list(model.files),
        }


def _header_facts(path: Path) -> dict[str, Any]:
    """Return what a header says. One that cannot be read is reported as such."""
    from paceline.runtime.gguf_file import read_gguf

    try:
        header = {key.decode("utf-8", "replace"): value.value for key, value in read_gguf(path).metadata.items()}
    except ModelLoadError as error:
        return {"problem": str(error)}
    architecture = _text(header, "general.architecture")
    return {
        "title": _text(header, "general.name"),
        "architecture": architecture,
        "context": header.get(f"{architecture}.context_length"),
        "licence": _text(header, "general.license"),
        "chat_template": "yes" if "tokenizer.chat_template" in header else "",
    }


def _text(header: Mapping[str, Any], key: str) -> str:
    value = header.get(key)
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else ""


def _shown(value: object) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
