"""`paceline info`: what this installation and machine have, or what a model file says of itself."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import terminal
from paceline.cli.interrupt import Stop, run
from paceline.cli.loading import ModelChoice, load
from paceline.cli.model_facts import ModelFacts, VocabularyFacts, model_facts, vocabulary_facts
from paceline.errors import InvalidParams, PacelineError

if TYPE_CHECKING:
    from paceline.runtime import Model

_MAX_SHOWN = 160


def info(
    model: Annotated[
        Path | None, typer.Argument(metavar="MODEL", help="GGUF file to describe.", show_default=False)
    ] = None,
    *,
    metadata: Annotated[bool, typer.Option("--metadata", help="The model's metadata too, long values cut.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, nothing cut.")] = False,
) -> None:
    """Show version, build, devices and memory; with a model, what its file says (the weights are not loaded)."""
    if metadata and model is None:
        raise InvalidParams("--metadata needs a MODEL")
    facts = _machine_facts() if model is None else run(lambda stop: _model_facts(model, stop, metadata=metadata))
    if as_json:
        terminal.write(json.dumps(facts, ensure_ascii=False, indent=2) + "\n")
    elif model is None:
        _write_machine(facts)
    else:
        _write_model(facts)


def _machine_facts() -> dict[str, Any]:
    from paceline import __version__
    from paceline.demo import demo_draft_model_path, demo_model_path
    from paceline.runtime import available_memory, backend_features, build_info, devices, physical_cores
    from paceline.runtime.attention import kernel

    return {
        "version": __version__,
        "python": platform.python_version(),
        "build": asdict(build_info()),
        "devices": [asdict(device) for device in devices()],
        "features": dict(backend_features()),
        "cpu_attention": kernel(),
        "physical_cores": physical_cores(),
        "available_memory_bytes": available_memory(),
        "demo_models": {"demo": _path_or_none(demo_model_path), "draft": _path_or_none(demo_draft_model_path)},
    }


def _path_or_none(find: Callable[[], Path]) -> str | None:
    try:
        return str(find())
    except PacelineError:
        return None


def _model_facts(path: Path, stop: Stop, *, metadata: bool) -> dict[str, Any]:
    model = load(ModelChoice(path=path, vocab_only=True, show_progress=False), stop).model
    facts: dict[str, Any] = {
        "path": str(path),
        "model": asdict(model_facts(model)),
        "vocabulary": asdict(vocabulary_facts(model)),
        "chat_templates": sorted(model.chat_templates),
    }
    return facts | ({"metadata": _sorted_metadata(model)} if metadata else {})


def _sorted_metadata(model: Model) -> dict[str, str]:
    return dict(sorted(model.metadata.items()))


def _write_machine(facts: Mapping[str, Any]) -> None:
    build = facts["build"]
    terminal.write_section(
        f"paceline {facts['version']}",
        [
            ("llama.cpp", f"{build['llama_cpp_version']}, commit {build['llama_cpp_commit']}"),
            ("backend", f"{build['backend']} ({build['backend_reason']})"),
            ("build", ", ".join(filter(None, _build_words(build)))),
            ("python", facts["python"]),
            ("cache folder", build["cache_dir"]),
        ],
    )
    terminal.write_section("this machine", _machine_rows(facts))
    terminal.write_section("demo models", [(name, path or "missing") for name, path in facts["demo_models"].items()])


def _build_words(build: Mapping[str, Any]) -> Iterator[str]:
    yield build["build_type"]
    yield build["compiler"]
    yield build["target"]
    yield build["sanitizers"] and f"sanitizers {build['sanitizers']}"
    yield "with assertions" if build["assertions"] else ""


def _machine_rows(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for device in facts["devices"]:
        memory = f"{_gib(device['free_bytes'])} free of {_gib(device['total_bytes'])}"
        yield f"device {device['name']}", f"{device['description']}, {device['kind']}, {memory}"
    yield "physical cores", str(facts["physical_cores"])
    available = facts["available_memory_bytes"]
    yield "available memory", "unknown" if available is None else _gib(available)
    yield "CPU attention", facts["cpu_attention"]
    for backend, names in _features_by_backend(facts["features"]).items():
        yield f"{backend} features", " ".join(names)


def _features_by_backend(features: Mapping[str, str]) -> dict[str, list[str]]:
    """What is on, by backend: {"CPU": ["AVX2", ...]}; a value that is no switch is shown."""
    found: dict[str, list[str]] = {}
    for name, value in features.items():
        backend, _, feature = name.partition(".")
        if value not in ("0", ""):
            found.setdefault(backend, []).append(feature if value == "1" else f"{feature}={value}")
    return found


def _write_model(facts: Mapping[str, Any]) -> None:
    model, vocabulary = ModelFacts(**facts["model"]), VocabularyFacts(**facts["vocabulary"])
    terminal.write_section(model.name or Path(facts["path"]).name, [("file", facts["path"]), *_model_rows(model)])
    terminal.write_section("vocabulary", _vocabulary_rows(vocabulary))
    terminal.write_section("chat templates", [(name, "yes") for name in facts["chat_templates"]] or [("none", "-")])
    if "metadata" in facts:
        terminal.write_section("metadata", [(key, _cut(value)) for key, value in facts["metadata"].items()])


def _model_rows(model: ModelFacts) -> Iterator[tuple[str, str]]:
    yield "architecture", model.architecture
    yield "parameters", _count(model.n_params)
    yield "weights", _bytes(model.size_bytes) + (f", mostly {model.quantisation}" if model.quantisation else "")
    yield "context", f"{model.n_ctx_train:,} tokens" if model.n_ctx_train else ""
    yield "layers", _said(model.n_layer)
    yield "width", _said(model.n_embd, model.n_ff and f", feed-forward {model.n_ff}")
    yield "heads", _said(model.n_head, model.n_head_kv and f", {model.n_head_kv} for keys and values")
    yield "experts", _said(model.n_expert, model.n_expert_used and f", {model.n_expert_used} used")
    yield "memory", model.memory_class.replace("_", " ") + (f" of {model.n_swa} tokens" if model.n_swa else "")
    yield "can", ", ".join(_named(encode=model.has_encoder, embed=True, generate=model.can_generate))


def _vocabulary_rows(vocabulary: VocabularyFacts) -> Iterator[tuple[str, str]]:
    yield "kind", vocabulary.type + (f", split as {vocabulary.pre_tokenizer}" if vocabulary.pre_tokenizer else "")
    yield "tokens", f"{vocabulary.n_vocab:,}"
    yield "added to texts", " and ".join(_named(bos=vocabulary.add_bos, eos=vocabulary.add_eos)) or "nothing"
    for role, token in vocabulary.special_tokens.items():
        yield role, f"{token} {vocabulary.names[token]!r}"
    yield "end an answer", ", ".join(f"{token} {vocabulary.names[token]!r}" for token in vocabulary.end_of_generation)


def _named(**holds: bool) -> list[str]:
    return [name for name, true in holds.items() if true]


def _said(value: int | None, more: str | int | None = "") -> str:
    return f"{value}{more or ''}" if value else ""


def _cut(value: str) -> str:
    line = value.replace("\n", "\\n")
    return line if len(line) <= _MAX_SHOWN else f"{line[:_MAX_SHOWN]}... ({len(value):,} characters)"


def _count(number: int) -> str:
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.1f} {letter}"
    return str(number)


def _bytes(number: int) -> str:
    return f"{number / 2**20:,.1f} MiB" if number < 2**30 else _gib(number)


def _gib(number: int) -> str:
    return f"{number / 2**30:,.1f} GiB"
