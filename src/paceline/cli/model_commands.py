"""Commands about models: `pull`, `list`, `show`, `rm` and `prune` for the caches of this machine, `quantize`, and `info`.

`info` describes this installation and machine, or a model file without loading its weights. llama.cpp reads the shape of a model
only together with its weights, so widths and counts come from the metadata here. For a few architectures, which are named below,
llama.cpp's code has values that the file leaves out.
"""

from __future__ import annotations

import io
import itertools
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline import demo, hub, validation
from paceline.cli import terminal
from paceline.cli.config_file import CONFIG_VARIABLE, MODEL_VARIABLE, ConfigFile, check_config, default_path, entries
from paceline.cli.endings import StopSignal, run
from paceline.cli.inputs import text_argument
from paceline.cli.options import ModelChoice, VerboseOption, load, local_path, model_names, progress_bar, show_log
from paceline.config import MAX_RPC_SERVERS
from paceline.errors import Aborted, InvalidParams, ModelLoadError, ModelNotFound, PacelineError, RpcServerUnavailable
from paceline.hub.caches import find_leftovers, find_models, matching_models, remove_leftovers, remove_models
from paceline.hub.locate import shown_bytes
from paceline.hub.references import hub_settings
from paceline.validation import addresses

if TYPE_CHECKING:
    from paceline.runtime import Model, QuantizedModel


_downloading = partial(typer.Option, rich_help_panel="How it is downloaded")

# Options are laid out by hand, a few lines each.
# fmt: off
ModelName = Annotated[str, typer.Argument(
    metavar="MODEL", help="USER/REPO[:QUANT] on the Hugging Face Hub, the URL of a GGUF file, ollama:NAME.",
)]
ListedName = Annotated[str, typer.Argument(
    metavar="MODEL", autocompletion=model_names,
    help="As `paceline list` names it, or USER/REPO[:QUANT], a URL, ollama:NAME.",
)]
HfFile = Annotated[str | None, _downloading(metavar="FILE", help="This file of the repository.", show_default=False)]
HfToken = Annotated[str | None, _downloading(
    metavar="TOKEN", envvar="HF_TOKEN", show_envvar=False, help="Token of the hub.",
    show_default="HF_TOKEN, or that of `hf auth login`",
)]
Offline = Annotated[bool, _downloading("--offline", help="Use the caches only; request nothing.")]
NoProjector = Annotated[bool, _downloading("--no-mmproj", help="Leave out the projector for images.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="List what would be removed, and remove nothing.")]
# fmt: on


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
    reference = parse_name(model)
    if hf_file is not None:
        if not isinstance(reference, hub.HubReference):
            raise InvalidParams(
                f"--hf-file needs a repository of the Hugging Face Hub, and {reference} is not a repository"
            )
        reference = hub.HubReference(
            reference.repo, file=hub.check_file(hf_file, "--hf-file"), revision=reference.revision
        )
    note: Callable[[str], object] = (lambda _: None) if quiet else terminal.note

    def work(stop: StopSignal) -> None:
        try:
            found = hub.local_model(
                reference,
                offline=offline,
                hf_token=hf_token,
                with_projector=not no_mmproj,
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

    run(work)


def list_models(*, as_json: AsJson = False) -> None:
    """List the models that huggingface_hub, llama.cpp, Ollama and paceline have downloaded."""
    settings = hub_settings()
    models = find_models(settings)
    if as_json:
        records: list[dict[str, Any]] = [
            {name: getattr(model, name) for name in ("name", "source", "parts", "size", "modified", "quantisation")}
            for model in models
        ]
        for record in records:
            record["parts"] = [str(part) for part in record["parts"]]
        terminal.write_json(records, indent=2)
    elif not models:
        terminal.note(f"There are no models in {settings.cache} and the other caches; `paceline pull` downloads one.")
    else:
        rows = [(model.name, shown_bytes(model.size), terminal.day(model.modified), model.source) for model in models]
        terminal.write_table(("NAME", "SIZE", "DOWNLOADED", "BY"), rows)


def show(model: ListedName, *, hf_token: HfToken = None, offline: Offline = False, as_json: AsJson = False) -> None:
    """Show the files of a downloaded model and what they say; of a repository, each of its models.

    Of a model that was not downloaded, only the first bytes are requested.
    """
    reference, settings = parse_listed(model), hub_settings(token=hf_token, offline=offline)
    try:
        facts = [
            {
                "name": found.name,
                "downloaded_by": found.source,
                "size": shown_bytes(found.size),
                "quantisation": found.quantisation,
                **_header_facts(found.path),
                "parts": [str(part) for part in found.parts],
            }
            for found in matching_models(settings, reference)
        ]
    except ModelNotFound:
        if settings.offline or not isinstance(reference, hub.HubReference | hub.UrlReference):
            raise
        facts = [run(lambda stop: _remote_facts(reference, stop, hf_token))]
    if as_json:
        terminal.write_json(facts, indent=2)
        return
    for shown in facts:
        rows = [(key.replace("_", " "), value) for key, value in shown.items() if key not in ("name", "parts")]
        words = [
            (key, f"{value:,}" if isinstance(value, int) else str(value)) for key, value in rows if value is not None
        ]
        terminal.write_section(shown["name"], [*words, *(("file", part) for part in shown["parts"])])


def rm(model: ListedName, *, dry_run: DryRun = False) -> None:
    """Remove a downloaded model; of a repository without QUANT, all of its models. Ollama's are left to Ollama."""
    settings = hub_settings()
    models = matching_models(settings, parse_listed(model))
    freed = 0 if dry_run else remove_models(settings, models)
    for each in models:
        terminal.write(f"{each.name}\n")
    size = shown_bytes(sum(each.size for each in models) if dry_run else freed)
    terminal.note(f"{size} would be free; nothing was removed." if dry_run else f"Removed; {size} are free again.")


def prune(*, dry_run: DryRun = False) -> None:
    """Remove what no model needs: parts of downloads, and versions of models that no branch or tag has any more."""
    leftovers = find_leftovers(hub_settings())
    if not dry_run:
        leftovers = remove_leftovers(leftovers)
    for leftover in leftovers:
        terminal.write(f"{leftover.path}\n")
    files = terminal.counted(len(leftovers), "file")
    size = shown_bytes(sum(leftover.size for leftover in leftovers))
    if not leftovers:
        terminal.note("There is nothing to remove.")
    elif dry_run:
        terminal.note(f"{files}; {size} would be free, nothing was removed.")
    else:
        terminal.note(f"Removed {files}; {size} are free again.")


def parse_name(text: str) -> hub.ModelReference:
    """Parse a name of a model. A repository of the hub needs no "hf:". Raises `InvalidParams`."""
    return (
        hub.parse_reference(text, name="MODEL")
        if hub.is_reference(text)
        else hub.parse_hub_reference(text, name="MODEL")
    )


def parse_listed(text: str) -> hub.ModelReference | Path:
    """Parse a name as `paceline list` shows it: as `parse_name`, or the path of a file. Raises `InvalidParams`."""
    path = Path(os.path.expanduser(text))  # noqa: PTH111 - pathlib's raises for an unknown user
    return path if path.is_absolute() or path.is_file() else parse_name(text)


def _remote_facts(reference: hub.ModelReference, stop: StopSignal, hf_token: str | None) -> dict[str, Any]:
    """Return the facts of the hub and of the file's header about a model that was not downloaded."""
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
    """Return the facts of a file's header, or the problem if it cannot be read."""
    from paceline.runtime.gguf_file import read_gguf

    try:
        header = {key.decode("utf-8", "replace"): value.value for key, value in read_gguf(path).metadata.items()}
    except ModelLoadError as error:
        return {"problem": str(error)}

    def text(key: str) -> str:
        value = header.get(key)
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else ""

    architecture = text("general.architecture")
    return {
        "title": text("general.name"),
        "architecture": architecture,
        "context": header.get(f"{architecture}.context_length"),
        "licence": text("general.license"),
        "chat_template": "yes" if "tokenizer.chat_template" in header else "",
    }


_quantising = partial(typer.Option, rich_help_panel="Which types")

# Options are laid out by hand, a few lines each.
# fmt: off
QuantizeModel = Annotated[str, typer.Argument(
    metavar="MODEL", autocompletion=model_names,
    help="GGUF file in F32, F16 or BF16, of a split set its first part; or hf:USER/REPO:F16, a URL, ollama:NAME.",
)]
QuantizeType = Annotated[str, typer.Argument(
    metavar="TYPE", help="Q4_K_M, Q5_K_M, Q6_K, Q8_0, IQ4_XS or another of llama.cpp's names; COPY keeps all types.",
)]
Output = Annotated[Path | None, typer.Option(
    "--output", "-o", metavar="FILE", help="The new file, or a folder for it.",
    show_default="beside the model, of a named model in this folder",
)]
QuantizeThreads = Annotated[int | None, typer.Option(
    "--threads", "-t", metavar="N", min=1, help="Threads that compute.", show_default="physical cores",
)]
Imatrix = Annotated[Path | None, _quantising(
    metavar="FILE", help="Importance matrix of llama-imatrix.", show_default="none",
)]
AllowRequantize = Annotated[bool, _quantising(
    "--allow-requantize", help="Quantise tensors again that are quantised already; this loses more quality.",
)]
LeaveOutput = Annotated[bool, _quantising("--leave-output-tensor", help="Leave output.weight as it is.")]
Pure = Annotated[bool, _quantising("--pure", help="Give all tensors the same type, in place of llama.cpp's mixture.")]
OutputTensorType = Annotated[str | None, _quantising(
    metavar="TYPE", help="Type of output.weight.", show_default="llama.cpp's choice",
)]
EmbeddingType = Annotated[str | None, _quantising(
    "--token-embedding-type", metavar="TYPE", help="Type of the token embeddings.", show_default="llama.cpp's choice",
)]
TensorTypes = Annotated[list[str] | None, _quantising(
    "--tensor-type", metavar="PATTERN=TYPE", help="Type of the tensors with names that match; may be repeated.",
    show_default="llama.cpp's choice",
)]
KeepSplit = Annotated[bool, typer.Option("--keep-split", help="Write as many parts as the model has.")]
DryQuantize = Annotated[bool, typer.Option("--dry-run", help="Show types and sizes, and write nothing.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the new file if it exists.")]
# fmt: on


def quantize(
    model: QuantizeModel,
    quantisation: QuantizeType,
    *,
    output: Output = None,
    threads: QuantizeThreads = None,
    imatrix: Imatrix = None,
    allow_requantize: AllowRequantize = False,
    leave_output_tensor: LeaveOutput = False,
    pure: Pure = False,
    output_tensor_type: OutputTensorType = None,
    token_embedding_type: EmbeddingType = None,
    tensor_type: TensorTypes = None,
    keep_split: KeepSplit = False,
    dry_run: DryQuantize = False,
    force: Force = False,
    verbose: VerboseOption = False,
) -> None:
    """Write a model file with its weights in a smaller type, such as Q4_K_M.

    The new file gets its name when it is complete. Ctrl-C ends the command after the tensor that is being computed, and
    leaves no file.
    """
    text = text_argument("MODEL", model)
    folder = Path.cwd() if output is None and hub.is_reference(text) else None
    pairs = [text_argument("--tensor-type", pair).rpartition("=") for pair in tensor_type or ()]
    for pattern, equals, name in pairs:
        if not (pattern and equals and name):
            raise InvalidParams(
                f"--tensor-type must be PATTERN=TYPE, such as ffn_down=Q6_K, not {pattern + equals + name!r}"
            )

    def work(stop: StopSignal) -> QuantizedModel:
        from paceline.runtime import quantize

        path = local_path(text, stop)
        if verbose:
            show_log(logging.DEBUG)
        with progress_bar(f"Quantising {path.name}", not verbose and not dry_run) as progress:
            return quantize(
                path,
                text_argument("TYPE", quantisation),
                folder if output is None else output,
                n_threads=threads,
                imatrix=imatrix,
                allow_requantize=allow_requantize,
                leave_output_tensor=leave_output_tensor,
                pure=pure,
                output_tensor_type=output_tensor_type,
                token_embedding_type=token_embedding_type,
                tensor_types={pattern: name for pattern, _, name in pairs},
                keep_split=keep_split,
                dry_run=dry_run,
                overwrite=force,
                progress=progress,
                cancel=stop.event,
            )

    made = run(work)
    before = f"{_bytes(made.source_bytes)}, {made.source_bits_per_weight:.2f} bits per weight"
    after = f"{_bytes(made.size_bytes)}, {made.bits_per_weight:.2f} bits per weight"
    files = [("would write" if dry_run else "file", str(path)) for path in made.paths]
    terminal.write_section(
        made.quantisation, [("weights", _count(made.n_params)), ("before", before), ("after", after), *files]
    )
    terminal.write("\n")
    rows = [
        (name, str(use.num_tensors), _bytes(use.size_bytes), f"{use.size_bytes / made.size_bytes:.1%}")
        for name, use in made.tensor_types.items()
    ]
    terminal.write_table(("TYPE", "TENSORS", "SIZE", "SHARE"), rows)
    if made.refusal:
        terminal.note(f"Without --dry-run this is refused: {made.refusal}")


_MAX_SHOWN = 160

# Options are laid out by hand, a few lines each.
# fmt: off
InfoModel = Annotated[str | None, typer.Argument(
    metavar="MODEL", autocompletion=model_names, show_default=False,
    help="GGUF file, of a split set its first part; or hf:USER/REPO[:QUANT], a URL, ollama:NAME.",
)]
Metadata = Annotated[bool, typer.Option("--metadata", help="The model's metadata too, long values cut.")]
NumCells = Annotated[int | None, typer.Option(
    "--ctx-size", "-c", metavar="N", help="KV cells for which memory is computed.", show_default="as in serve",
)]
NumSlots = Annotated[int | None, typer.Option(
    "--parallel", "-np", metavar="N", help="Slots for which memory is computed.", show_default="as in serve",
)]
CacheType = Annotated[str | None, typer.Option(
    "--cache-type", metavar="TYPE", help="Type of the keys and values in the KV cache.", show_default="f16",
)]
Rpc = Annotated[str | None, typer.Option(
    "--rpc", metavar="HOST:PORT,...", help="Other hosts that compute.", show_default="none",
)]
WholeJson = Annotated[bool, typer.Option("--json", help="One JSON object, nothing cut.")]
# fmt: on


def info(
    ctx: typer.Context,
    model: InfoModel = None,
    *,
    metadata: Metadata = False,
    ctx_size: NumCells = None,
    parallel: NumSlots = None,
    cache_type: CacheType = None,
    rpc: Rpc = None,
    as_json: WholeJson = False,
) -> None:
    """Show version, build, devices and memory; with a model, what its file says and what it needs.

    The weights are not loaded, and nothing is downloaded: of a model on the network only the header is requested.
    """
    named = {"metadata": "--metadata", "ctx_size": "-c", "parallel": "-np", "cache_type": "--cache-type"}
    for name, flag in named.items():
        source = ctx.get_parameter_source(name)
        if model is None and source is not None and source.name == "COMMANDLINE":  # the config file may have it
            raise InvalidParams(f"{flag} needs a MODEL")
    given = {"n_ctx": ctx_size, "num_slots": parallel, "type_k": cache_type, "type_v": cache_type}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if rpc is not None:
        options["rpc"] = list(addresses("--rpc", text_argument("--rpc", rpc), MAX_RPC_SERVERS))
    facts = (
        _machine_facts(ctx, options.get("rpc", ()))
        if model is None
        else run(lambda stop: _described(model, stop, options, metadata=metadata))
    )
    if as_json:
        terminal.write_json(facts, indent=2)
    elif model is None:
        _write_machine(facts)
    else:
        _write_model(facts)


def _machine_facts(ctx: typer.Context, addresses: Sequence[str]) -> dict[str, Any]:
    """Return the facts of the installation and the machine. Raises `InvalidParams` for a wrong config file."""
    from paceline import __version__, runtime
    from paceline.runtime import attention, matmul, rpc
    from paceline.server.web_page import page_facts

    models: dict[str, str | None] = {"demo": None, "draft": None, "vision": None}
    finders = (demo.demo_model_path, demo.demo_draft_model_path, demo.demo_vision_model_path)
    for name, find in zip(models, finders, strict=True):
        with suppress(PacelineError):
            models[name] = str(find())
    servers: list[dict[str, Any]] = []
    for address in addresses:
        try:
            server = rpc.greet(address)
        except RpcServerUnavailable as error:
            servers.append({"address": address, "error": str(error)})
            continue
        lent = [asdict(device) for device in server.devices]
        servers.append({"address": address, "protocol": ".".join(map(str, server.protocol)), "devices": lent})
    facts = {
        "version": __version__,
        "python": platform.python_version(),
        "build": asdict(runtime.build_info()),
        "core": asdict(runtime.loaded_core()),
        "devices": [asdict(device) for device in runtime.devices()],
        "features": dict(runtime.backend_features()),
        "cpu_attention": attention.kernel(),
        "cpu_matmul": matmul.kernel(),
        "physical_cores": runtime.physical_cores(),
        "available_memory_bytes": runtime.available_memory(),
        "web_page": page_facts(),
        "demo_models": models,
        **({"rpc_servers": servers} if addresses else {}),
    }
    config: ConfigFile | None = ctx.obj
    group: Any = ctx.find_root().command
    if config is not None:
        check_config(config, group.commands)
    return facts | {
        "configuration": {
            "file": None if config is None else str(config.path),
            "default_file": str(default_path()),
            "values": {} if config is None else dict(entries(config)),
            "variables": {name: os.environ[name] for name in (MODEL_VARIABLE, CONFIG_VARIABLE) if os.environ.get(name)},
        },
    }


def _described(name: str, stop: StopSignal, options: Mapping[str, Any], *, metadata: bool) -> dict[str, Any]:
    """Return the facts of a model. Of a named model that is not on this machine only the header is requested."""
    from paceline.engine.adapters import projectors_beside
    from paceline.hub.remote_header import model_headers
    from paceline.runtime import projector_facts

    text = text_argument("MODEL", name)
    with ExitStack() as stack:
        if hub.is_reference(text):
            found = stack.enter_context(model_headers(text, cancel=stop.event, note=terminal.note))
            path, facts = found.paths[0], {"path": str(found.paths[0]), "name": found.name}
            if not found.is_local:
                names = found.files[0] + (f" and {len(found.files) - 1} more parts" if len(found.files) > 1 else "")
                facts["path"] = f"not downloaded: {names}, {shown_bytes(found.size)}"
        else:
            hub.check_is_path(text)
            path, facts = validation.path("MODEL", text), {"path": text}
        model = load(ModelChoice(model=str(path), vocab_only=True, show_progress=False), stop).model
        projectors: list[dict[str, Any]] = []
        for file in projectors_beside(model.paths):
            try:
                projectors.append(asdict(projector_facts(file)))
            except PacelineError as error:
                projectors.append({"path": str(file), "error": str(error)})
        return {
            **facts,
            "model": model_facts(model),
            "vocabulary": _vocabulary_facts(model),
            "chat_templates": sorted(model.chat_templates),
            "modalities": sorted({"text", *projectors[0].get("modalities", ())} if len(projectors) == 1 else {"text"}),
            "projectors": projectors,
            "memory": _memory_facts(path, options),
            **({"metadata": dict(sorted(model.metadata.items()))} if metadata else {}),
        }


def _memory_facts(path: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the memory needs of the model, and the choice that fits; from the header alone if it cannot be planned."""
    from paceline.engine.memory_needs import estimate_memory, memory_report

    try:
        report = memory_report(path, options)
    except InvalidParams:
        raise
    except PacelineError as error:
        return {"needed": asdict(estimate_memory(path, dry_run=False, **options)), "note": str(error)}
    return {"needed": asdict(report.wanted), "fitted": report.fitted and asdict(report.fitted), "note": report.refusal}


def _write_machine(facts: Mapping[str, Any]) -> None:
    from paceline.server.web_page import NOT_BUILT

    build, core, page, config = facts["build"], facts["core"], facts["web_page"], facts["configuration"]
    words = (
        *(build[name] for name in ("build_type", "compiler", "target")),
        build["sanitizers"] and f"sanitizers {build['sanitizers']}",
        "with assertions" if build["assertions"] else "",
        "with RPC" if build["rpc"] else "",
    )
    core_name = f"{core['name']} of {', '.join(core['all_names'])}" if core["all_names"] else "the only one"
    terminal.write_section(
        f"paceline {facts['version']}",
        [
            ("llama.cpp", f"{build['llama_cpp_version']}, commit {build['llama_cpp_commit']}"),
            ("backend", f"{build['backend']} ({build['backend_reason']})"),
            ("build", ", ".join(filter(None, words))),
            ("core", f"{core_name} ({core['reason']})"),
            ("python", facts["python"]),
            ("cache folder", build["cache_dir"]),
            ("web page", f"built, {page['num_bytes'] / 1024:.0f} KiB compressed" if page["is_built"] else NOT_BUILT),
        ],
    )
    terminal.write_section("this machine", _machine_rows(facts))
    file = config["file"] or f"none; {config['default_file']} is read if it exists"
    wins = {MODEL_VARIABLE: ", which wins over the file"}
    variables = [(name, value + wins.get(name, "")) for name, value in config["variables"].items()]
    terminal.write_section("configuration", [("file", file), *config["values"].items(), *variables])
    if "rpc_servers" in facts:
        terminal.write_section("other hosts", _server_rows(facts["rpc_servers"]))
    terminal.write_section("demo models", [(name, path or "missing") for name, path in facts["demo_models"].items()])


def _machine_rows(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for device in facts["devices"]:
        memory = f"{_gib(device['free_bytes'])} free of {_gib(device['total_bytes'])}"
        yield f"device {device['name']}", f"{device['description']}, {device['kind']}, {memory}"
    yield "physical cores", str(facts["physical_cores"])
    available = facts["available_memory_bytes"]
    yield "available memory", "unknown" if available is None else _gib(available)
    yield "CPU attention", facts["cpu_attention"]
    name = facts["cpu_matmul"]
    yield "CPU matrix products", name if name == "llama.cpp" else f"paceline ({name})"
    found: dict[str, list[str]] = {}
    for feature, value in facts["features"].items():
        backend, _, name = feature.partition(".")
        if value not in ("0", ""):
            found.setdefault(backend, []).append(name if value == "1" else f"{name}={value}")
    for backend, names in found.items():
        yield f"{backend} features", " ".join(names)


def _server_rows(servers: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    names = itertools.count()
    for server in servers:
        if "error" in server:
            yield server["address"], server["error"]
            continue
        for device in server["devices"]:
            memory = f"{_gib(device['free_bytes'])} free of {_gib(device['total_bytes'])}"
            yield f"device RPC{next(names)}", f"{server['address']}, protocol {server['protocol']}, {memory}"


def _write_model(facts: Mapping[str, Any]) -> None:
    model = facts["model"]
    rows = [("name", facts.get("name", "")), ("file", facts["path"]), *_model_rows(model)]
    terminal.write_section(model["name"] or facts.get("name") or Path(facts["path"]).name, rows)
    terminal.write_section("vocabulary", _vocabulary_rows(facts["vocabulary"]))
    terminal.write_section("prompts", _prompt_rows(facts["modalities"], facts["projectors"]))
    terminal.write_section("what it needs", _memory_rows(facts["memory"], model["n_ctx_train"]))
    terminal.write_section("chat templates", [(name, "yes") for name in facts["chat_templates"]] or [("none", "-")])
    if "metadata" in facts:
        terminal.write_section("metadata", [(key, _cut(value)) for key, value in facts["metadata"].items()])


def _model_rows(model: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    def shown(name: str, more: str = "", of: str = "") -> str:
        count, second = model[name], model[more] if more else None
        return f"{count}{f', {of.format(second)}' if second else ''}" if count else ""

    yield "architecture", model["architecture"]
    yield "parameters", _count(model["n_params"])
    mostly = f", mostly {model['quantisation']}" if model["quantisation"] else ""
    yield "weights", _bytes(model["size_bytes"]) + mostly
    yield "context", f"{model['n_ctx_train']:,} tokens" if model["n_ctx_train"] else ""
    yield "layers", shown("n_layer")
    yield "width", shown("n_embd", "n_ff", "feed-forward {}")
    yield "heads", shown("n_head", "n_head_kv", "{} for keys and values")
    yield "experts", shown("n_expert", "n_expert_used", "{} used")
    window = f" of {model['n_swa']} tokens" if model["memory_class"] == "sliding_window" else ""
    yield "memory", model["memory_class"].replace("_", " ") + window
    yield "can", ", ".join(_named(encode=model["has_encoder"], embed=True, generate=model["can_generate"]))


def _prompt_rows(modalities: Sequence[str], projectors: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    yield "may have", ", ".join(reversed(modalities))
    for projector in projectors:
        words = (
            [projector["error"]] if "error" in projector else [_bytes(projector["weights_bytes"]), *projector["kinds"]]
        )
        if "error" not in projector:
            words.append("for " + " and ".join(projector["modalities"]))
            if projector["image_size"]:
                words.append(f"images of {projector['image_size']} pixels, patches of {projector['patch_size']}")
        yield "projector", ", ".join([Path(projector["path"]).name, *filter(None, words)])
    if len(projectors) > 1:
        yield "", "none of them is taken without --mmproj FILE"


def _memory_rows(facts: Mapping[str, Any], n_ctx_train: int | None) -> Iterator[tuple[str, str]]:
    from paceline.runtime import MemoryEstimate

    needed, fitted = MemoryEstimate.of_json(facts["needed"]), facts.get("fitted")
    cache = f"{needed.n_ctx:,} cells, {terminal.counted(needed.num_slots, 'slot')}" if needed.n_ctx else ""
    one = f", {min(needed.n_ctx, n_ctx_train or needed.n_ctx):,} tokens for one request"
    yield "for", cache and cache + one
    for device in needed.devices:
        buffers = "unknown" if device.compute_bytes is None else _bytes(device.compute_bytes)
        weights, cache = _bytes(device.weights_bytes), _bytes(device.cache_bytes)
        size = _bytes(device.total_bytes)
        yield f"on {device.device}", f"{size}, weights {weights}, KV cache and states {cache}, buffers {buffers}"
    free = [(device.device, device.free_bytes) for device in needed.devices]
    yield "free", ", ".join(f"{name} {_bytes(num_bytes)}" for name, num_bytes in free if num_bytes is not None)
    if fitted is None:
        yield "fits", f"no: {facts['note']}" if "fitted" in facts else f"not planned: {facts['note']}"
        return
    usual = {"n_ctx": needed.n_ctx, "num_slots": needed.num_slots}
    chosen = [f"{name}={value}" for name, value in fitted["choice"].items() if value and value != usual.get(name)]
    estimate = MemoryEstimate.of_json(fitted["estimate"])
    slowly = ", but the weights do not stay in memory beside the cache" if estimate.short_of_cache else ""
    yield "fits", "yes" + (f", with {', '.join(chosen)}" if chosen else "") + slowly


def _vocabulary_rows(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "kind", facts["type"] + (f", split as {facts['pre_tokenizer']}" if facts["pre_tokenizer"] else "")
    yield "tokens", f"{facts['n_vocab']:,}"
    yield "added to texts", " and ".join(_named(bos=facts["add_bos"], eos=facts["add_eos"])) or "nothing"
    for role, token in facts["special_tokens"].items():
        yield role, f"{token} {facts['names'][token]!r}"
    yield "end of generation", ", ".join(f"{token} {facts['names'][token]!r}" for token in facts["end_of_generation"])


def _named(**holds: bool) -> list[str]:
    return [name for name, true in holds.items() if true]


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


_DEFAULT_WINDOWS = {"gemma2": 4096, "llama4": 8192}  # llama.cpp knows their window where the file names none
_IGNORED_WINDOWS = {"phi3"}  # the file may name one, and llama.cpp does not use it


def model_facts(model: Model) -> dict[str, Any]:
    """Return the facts of a model, which may have been loaded with `vocab_only`; None for a fact that its file lacks."""
    from paceline.runtime.quantisation import FILE_TYPES

    metadata = model.metadata
    architecture = metadata.get("general.architecture", "unknown")

    def number(key: str) -> int | None:
        return _number(metadata.get(f"{architecture}.{key}"))

    layers = number("block_count")
    n_swa = _window(architecture, number("attention.sliding_window"))
    memory = model.memory_class
    return {
        "name": metadata.get("general.name"),
        "architecture": architecture,
        "size_bytes": model.size_bytes,
        "n_params": model.n_params,
        "quantisation": FILE_TYPES.get(_number(metadata.get("general.file_type"))),
        "n_ctx_train": number("context_length"),
        "n_layer": None if layers is None else layers - (number("nextn_predict_layers") or 0),  # without draft heads
        "n_embd": number("embedding_length"),
        "n_ff": number("feed_forward_length"),
        "n_head": number("attention.head_count"),
        "n_head_kv": number("attention.head_count_kv"),
        "n_expert": number("expert_count"),
        "n_expert_used": number("expert_used_count"),
        "n_swa": n_swa,
        "memory_class": "sliding_window" if n_swa and memory == "attention" else memory,
        "has_encoder": model.has_encoder,
        "can_generate": model.has_decoder and memory != "none",
    }


def _vocabulary_facts(model: Model) -> dict[str, Any]:
    tokenizer = model.tokenizer
    special, ends = dict(tokenizer.special_tokens), sorted(tokenizer.eog_ids)
    return {
        "type": tokenizer.vocab_type,
        "pre_tokenizer": model.metadata.get("tokenizer.ggml.pre"),
        "n_vocab": tokenizer.n_vocab,
        "add_bos": tokenizer.add_bos,
        "add_eos": tokenizer.add_eos,
        "special_tokens": special,
        "end_of_generation": ends,
        "names": {token: tokenizer.token_text(token) for token in sorted({*special.values(), *ends})},
    }


def _number(text: str | None) -> int | None:
    """Parse a count; None if it is missing or not one number (some models have one a layer)."""
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def _window(architecture: str, named: int | None) -> int:
    if architecture in _IGNORED_WINDOWS:
        return 0
    return _DEFAULT_WINDOWS.get(architecture, 0) if named is None else named
