"""Models of a router as the APIs list them: llama-server's and OpenAI's objects, Ollama's entries. On the event loop."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from paceline.engine.adapters import projector_file
from paceline.errors import PacelineError
from paceline.hub import is_reference
from paceline.model_manager import ModelStatus
from paceline.runtime import projector_facts
from paceline.runtime.gguf_file import read_gguf
from paceline.server.api_errors import api_error_of, strip_folders
from paceline.server.dialects.ollama.ollama_routes import listed_model, loaded_models, model_info, timestamp
from paceline.server.dialects.openai.openai_routes import model_facts, ollama_listing
from paceline.server.engine_routes import input_modalities
from paceline.server.flags import ModelPreset
from paceline.server.flags.presets import PRESET_KEYS
from paceline.server.router.routed_models import VALUES, RoutedModels

_PAGE_STATES: Final = {"preparing": "loading", "queued": "loading", "unloading": "loaded"}


def list_body(models: RoutedModels, downloads: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Return the body of GET /models: each model, followed by its adapters. downloads: models that are being downloaded."""
    data = [body for preset in models.presets() for body in _with_adapters(models, preset)]
    data += downloads
    names = [model["id"] for model in data]
    listed = [
        ollama_listing(
            model["id"],
            parent=model.get("parent", ""),
            is_multimodal=len(model["architecture"]["input_modalities"]) > 1,
        )
        for model in data
    ]
    page = {"has_more": False, "first_id": names[0] if names else None, "last_id": names[-1] if names else None}
    return {"models": listed, "object": "list", "data": data, **page}


def named_body(models: RoutedModels, name: str) -> dict[str, Any]:
    """Return a model by any of its names, or an adapter. Raises as `RoutedModels.preset`."""
    preset = models.preset(name)
    bodies = _with_adapters(models, preset)
    return next((body for body in bodies[1:] if body["id"] == name), bodies[0])


def page_entries(models: RoutedModels) -> list[dict[str, Any]]:
    """Return the entries of the models on the web page."""
    return [_page_entry(models, preset) for preset in models.presets()]


def _page_entry(models: RoutedModels, preset: ModelPreset) -> dict[str, Any]:
    status = models.status(preset)
    return {
        "id": preset.name,
        "aliases": list(preset.settings.aliases[1:]),
        "state": _PAGE_STATES.get(status.state, status.state),
        "progress": round(status.progress, 4) if models.ready(preset.name) is None else 1.0,
        "modalities": _modalities(models, preset),
        "adapters": list(models.adapters(preset)),
        "error": None if status.error is None else api_error_of(status.error).message,
    }


def _with_adapters(models: RoutedModels, preset: ModelPreset) -> list[dict[str, Any]]:
    """Return a model and its adapters, which have vLLM's members: their file's name as root, the model as parent."""
    model = _model_body(models, preset)
    bodies = [model]
    for name, path in models.adapters(preset).items():
        own: dict[str, Any] = {"id": name, "display_name": name, "aliases": [], "tags": [], "meta": None}
        bodies.append(model | own | {"can_remove": False, "root": Path(path).name, "parent": preset.name})
    return bodies


def _model_body(models: RoutedModels, preset: ModelPreset) -> dict[str, Any]:
    """Return a model with its status. type, display_name and created_at are Anthropic's."""
    served = models.ready(preset.name)
    now = int(time.time())
    return {
        **_body(preset.name, preset.settings.aliases[1:], preset.settings.tags, now),
        "status": _status_body(preset, models.status(preset)),
        "architecture": _architecture(_modalities(models, preset)),
        "source": preset.source,
        "can_remove": preset.is_removable,
        "type": "model",
        "display_name": preset.name,
        "created_at": datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "meta": None if served is None else model_facts(served),
    }


def _body(name: str, aliases: Sequence[str], tags: Sequence[str], created: int) -> dict[str, Any]:
    own = {"id": name, "aliases": list(aliases), "tags": list(dict.fromkeys(tags))}
    return {**own, "object": "model", "owned_by": "paceline", "created": created}


def _architecture(modalities: list[str]) -> dict[str, list[str]]:
    return {"input_modalities": modalities, "output_modalities": ["text"]}


def _modalities(models: RoutedModels, preset: ModelPreset) -> list[str]:
    served = models.ready(preset.name)
    return input_modalities(_modalities_of_files(preset) if served is None else served.engine().model.modalities)


def _modalities_of_files(preset: ModelPreset) -> Collection[str]:
    """Return the modalities beside text of a model that is not loaded, by the header of its projector's file."""
    settings = preset.settings
    projector = settings.engine_options.get("mmproj")
    if settings.model is None or preset.reference is not None or is_reference(projector):
        return ()
    with suppress(PacelineError, OSError):
        path = projector_file((settings.model,), projector)
        if path is not None:
            return _projector_modalities(path, path.stat().st_mtime_ns)
    return ()


@lru_cache(maxsize=1024)
def _projector_modalities(path: Path, changed_ns: int) -> tuple[str, ...]:  # noqa: ARG001 - a file that changes is read again
    return projector_facts(path).modalities


def download_body(name: str, progress: dict[str, Any]) -> dict[str, Any]:
    """Return a model that is being downloaded. progress: bytes by the name of each file."""
    return {
        **_body(name, (), (), int(time.time())),
        "status": {"value": "downloading", "args": [], "progress": progress},
        "architecture": _architecture(["text"]),
        "source": "cache",
        "can_remove": True,
        "meta": None,
    }


def _status_body(preset: ModelPreset, status: ModelStatus) -> dict[str, Any]:
    """Return llama-server's status; state, progress, error and memory are ours."""
    body: dict[str, Any] = {"value": VALUES[status.state], "args": _arguments(preset), "preset": preset.text}
    if status.state == "failed":
        body |= {"failed": True, "exit_code": 1}
        if status.error is not None:
            body["error"] = strip_folders(api_error_of(status.error).message)
    body |= {"state": status.state, "progress": round(status.progress, 4), "num_users": status.num_users}
    return body | {"needed_bytes": status.needed_bytes, "taken_bytes": status.taken_bytes}


def _arguments(preset: ModelPreset) -> list[str]:
    """Return the preset as the arguments of a command line."""
    arguments = ["paceline", "serve", "--alias", preset.name]
    for line in preset.text.splitlines():
        key, equals, value = line.partition(" = ")
        if equals and key not in PRESET_KEYS:
            arguments += [f"--{key}", value]
    return arguments


def tags_body(models: RoutedModels) -> dict[str, Any]:
    """Return the body of Ollama's /api/tags: all models, with facts of the loaded models."""
    return {"models": [_tagged(models, preset) for preset in models.presets()]}


def _tagged(models: RoutedModels, preset: ModelPreset) -> dict[str, Any]:
    served = models.ready(preset.name)
    if served is not None:
        return listed_model(served)
    size, modified = 0, time.time()
    if preset.settings.model is not None and preset.reference is None:
        with suppress(OSError):
            facts = preset.settings.model.stat()
            size, modified = facts.st_size, facts.st_mtime
    details = {"parent_model": "", "format": "gguf", "family": "", "families": [], "parameter_size": ""}
    return {
        "name": preset.name,
        "model": preset.name,
        "modified_at": timestamp(int(modified)),
        "size": size,
        "digest": "",
        "details": {**details, "quantization_level": ""},
    }


def running_body(models: RoutedModels) -> dict[str, Any]:
    """Return the body of Ollama's /api/ps: the loaded models."""
    return {"models": [model for served in models.all_ready().values() for model in loaded_models(served)]}


def file_description(preset: ModelPreset, *, verbose: bool) -> dict[str, Any]:
    """Describe a model that is not loaded by its file, if that is on this machine. Blocking; any thread."""
    metadata = _metadata(preset.settings.model if preset.reference is None else None)
    family = metadata.get("general.architecture", "")
    details = {"parent_model": "", "format": "gguf", "family": family, "families": [family] if family else []}
    template = metadata.get("tokenizer.chat_template", "")
    return {
        "license": metadata.get("general.license", ""),
        "modelfile": "",
        "parameters": "",
        "template": template,
        "details": {**details, "parameter_size": "", "quantization_level": ""},
        "model_info": model_info(metadata, verbose=verbose),
        "capabilities": ["completion"],
        "modified_at": timestamp(int(time.time())),
    }


def _metadata(path: Path | None) -> dict[str, str]:
    """Return the single values of a file's header as text; none if there is no file, or no model in it."""
    if path is None:
        return {}
    try:
        metadata = read_gguf(path).metadata
    except (PacelineError, OSError):
        return {}
    values = {name.decode("utf-8", "replace"): value.value for name, value in metadata.items()}
    return {name: _text(value) for name, value in values.items() if isinstance(value, bytes | int | float)}


def _text(value: bytes | float) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return str(value).lower() if isinstance(value, bool) else str(value)
