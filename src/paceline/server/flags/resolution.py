"""Resolve command line, environment and file to `ServerSettings`. Pure but for the `Files` that are passed in."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from paceline import validation
from paceline.config import CONFIG_NAMES, EngineConfig
from paceline.errors import InvalidParams, PacelineError
from paceline.hub import HubReference, ModelReference, UrlReference
from paceline.params import SamplingParams
from paceline.server.flags.flag import (
    DEFAULT,
    Draft,
    Files,
    Ignore,
    Origin,
    Print,
    ReadConfig,
    Reject,
    Store,
    on_one_line,
)
from paceline.server.flags.sources import (
    GivenFlag,
    from_arguments,
    from_config,
    from_environment,
    from_table,
    odd_variables,
    read_toml,
    strongest,
)
from paceline.server.flags.spec_types import resolve_draft_model, resolve_spec_type
from paceline.server.settings import ServerSettings, is_socket_path

_CELLS: Final = 256  # llama.cpp rounds contexts up to it
_N_BATCH: Final = 2048
_ESCAPES: Final = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}
_ESCAPE: Final = re.compile(r"\\(?:x([0-9a-fA-F]{2})|([nrt'\"\\]))")


@dataclass(frozen=True, slots=True)
class Resolved:
    """The result. prints: what to print in place of serving. notes: to print before the server starts.

    origins: where each setting came from, by names such as "engine.n_ctx"; those that are not there are defaults. is_router:
    whether several models are served. sources: all that was given, the weakest source first, for their presets; offline,
    hf_token: for their downloads.
    """

    settings: ServerSettings
    prints: Literal["help", "version", "config"] | None = None
    notes: tuple[str, ...] = ()
    origins: Mapping[str, Origin] = field(default_factory=dict)
    is_router: bool = False
    sources: tuple[Sequence[GivenFlag], ...] = field(default=(), repr=False)
    offline: bool = False
    hf_token: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """One of several models. reference: its name in the hub and so on, None where settings have a path.

    offline, hf_token: for its download.
    """

    settings: ServerSettings
    reference: ModelReference | None
    offline: bool
    hf_token: str | None
    notes: tuple[str, ...]


def resolve(
    argv: Sequence[str],
    environ: Mapping[str, str],
    files: Files,
    *,
    default_config: Path | None = None,
    other_names: Callable[[], Collection[str]] = tuple,
) -> Resolved:
    """Return the settings. The command line wins over the environment, that over the file, that over the defaults.

    default_config: the config file that is read if none is named and it exists. other_names: returns the
    names on its top level that are for other commands.

    Raises `InvalidParams` for what is unknown, rejected or out of range, with the flag, the value and the way out;
    `ModelLoadError` where -c 0 needs the context length of a file that is no model, and what a download raises.
    """
    arguments, variables = from_arguments(argv), from_environment(environ)
    prints = _printed(arguments)
    if prints in ("help", "version"):
        return Resolved(ServerSettings(), prints)
    config = _config_file((*variables, *arguments), files, default_config, other_names)
    variables = _without_model(variables, arguments)
    config = _without_model(config, [*variables, *arguments])
    chosen, notes = strongest((config, variables, arguments))
    draft = Draft(files)
    draft.notes += [*notes, *odd_variables(environ)]
    for given in chosen:
        _apply(draft, given)
    is_router = _is_router(draft)
    reference = None if is_router else _model(draft)
    _check_together(draft)
    if reference is not None:
        _download(draft, *reference, downloads=prints is None)
    if not is_router:
        _download_draft(draft, downloads=prints is None)
        _read_model(draft)
    offline, token = draft.get("aside.offline", False), draft.get("aside.hf_token") or None
    return Resolved(
        _settings(draft),
        prints,
        tuple(draft.notes),
        draft.origins,
        is_router=is_router,
        sources=(config, variables, arguments),
        offline=offline,
        hf_token=token,
    )


def resolve_model(sources: Sequence[Sequence[GivenFlag]], files: Files, name: str) -> ResolvedModel:
    """Resolve one of several models, by the sources that hold for it, the weakest first. name: what requests call it.

    Nothing is downloaded, and its file need not be there. Raises as `resolve`.
    """
    chosen, notes = strongest(sources)
    draft = Draft(files)
    draft.notes += notes
    for given in chosen:
        _apply(draft, given)
    reference = _model_of_preset(draft, name)
    draft.put("server.aliases", tuple(dict.fromkeys((name, *draft.get("server.aliases", ())))), "--alias")
    _check_together(draft)
    _read_model(draft)
    offline, token = draft.get("aside.offline", False), draft.get("aside.hf_token") or None
    return ResolvedModel(_settings(draft), reference, offline, token, tuple(draft.notes))


def resolve_table(path: Path, table: Mapping[str, Any], files: Files) -> tuple[ServerSettings, tuple[str, ...]]:
    """Resolve the flags of a server whose models and sockets are named elsewhere; return notes as well.

    path: of the file that the table is in. Raises `InvalidParams`.
    """
    chosen, notes = strongest((from_table(path, table),))
    draft = Draft(files)
    draft.notes += notes
    for given in chosen:
        _apply(draft, given)
    _check_together(draft)
    return _settings(draft), tuple(draft.notes)


def _printed(arguments: Sequence[GivenFlag]) -> Literal["help", "version", "config"] | None:
    """Return what to print: the first one requested, help and version before the configuration."""
    wanted = [given.flag.action.what for given in arguments if isinstance(given.flag.action, Print) and given.value()]
    return next((what for what in wanted if what != "config"), wanted[0] if wanted else None)


def _config_file(
    givens: Sequence[GivenFlag], files: Files, default: Path | None, other_names: Callable[[], Collection[str]]
) -> list[GivenFlag]:
    """Read the file that was named last, the command line after the environment; without one, the default file."""
    named = [given for given in givens if isinstance(given.flag.action, ReadConfig)]
    label, path = (named[-1].label, named[-1].value()) if named else ("the config file", default)
    if path is None or not (named or files.is_file(path)):
        return []
    try:
        data = files.read(path)
    except OSError as error:
        raise InvalidParams(f"{label}: cannot read {on_one_line(path)}: {error.strerror or error}") from None
    return from_config(path, read_toml(path, data), other_names)


_REPLACED: Final[
    Mapping[str, frozenset[str]]
] = {  # by a flag of a stronger source; -m beside -mu is where its file goes
    "--model": frozenset(("--hf-repo", "--hf-file")),
    "--hf-repo": frozenset(("--model", "--model-url")),
    "--model-url": frozenset(("--model", "--hf-repo", "--hf-file")),
    "--models-preset": frozenset(("--model", "--model-url", "--hf-repo", "--hf-file")),
    "--models-dir": frozenset(("--model", "--model-url", "--hf-repo", "--hf-file")),
}


def _without_model(weaker: list[GivenFlag], stronger: Sequence[GivenFlag]) -> list[GivenFlag]:
    """Return the flags without those that name a model if a stronger source chooses another one, or several."""
    replaced = frozenset[str]().union(*(_REPLACED.get(given.flag.long_name, ()) for given in stronger))
    return [given for given in weaker if given.flag.long_name not in replaced]


def _apply(draft: Draft, given: GivenFlag) -> None:
    value = given.value()
    draft.origin = given.origin
    match given.flag.action_of(value):
        case Reject(way_out):
            raise InvalidParams(f"{_spelling(given)}: {way_out}")
        case Ignore(why) if not _is_foreign(given):
            draft.notes.append(f"{_spelling(given)} has no effect: {why}")
        case Store(setter=None) as store:
            for target in store.targets:
                draft.put(target, value if store.convert is None else store.convert(value), given.label)
        case Store(setter=setter) if setter is not None:
            setter(draft, value, given.label)


def _is_foreign(given: GivenFlag) -> bool:
    """Return whether it is a variable that other programs read as well: no note, as it may not be meant for this one."""
    return given.kind == "environment" and not given.label.startswith(("LLAMA_", "PACELINE_"))


def _spelling(given: GivenFlag) -> str:
    """Return the flag as it was given, with its value where that matters."""
    flag = given.flag
    shows = given.kind != "flag" or (flag.actions and flag.metavar)
    return f"{given.label} {on_one_line(given.texts[-1]):.80}" if shows and not flag.secret else given.label


def _settings(draft: Draft) -> ServerSettings:
    return ServerSettings(
        **draft.place("server"), engine_options=draft.place("engine"), sampling=draft.place("sampling")
    )


def _check_together(draft: Draft) -> None:
    """Derive values that follow from several flags, and check them together. Raises `InvalidParams`."""
    steps = (
        _isolation,
        _sleep,
        resolve_draft_model,
        resolve_spec_type,
        _projector,
        _lora,
        _escapes,
        _tls,
        _hosts,
        _bodies,
        _together,
    )
    for step in steps:
        step(draft)


def _read_model(draft: Draft) -> None:
    """Derive values that may follow from the model's file, which is there now."""
    for step in (_context, _batches):
        step(draft)


def _model(draft: Draft) -> tuple[str, ModelReference] | None:
    """Store the model's file; return a name whose files are to be downloaded, and the target that it was given for."""
    named, path = _named_model(draft), draft.get("aside.model_path")
    if named is None:
        if path is not None:
            _model_file(draft, path)
        return None
    target, reference = named
    draft.origin = draft.origins[target]
    label = draft.origin.name
    if path is not None and not isinstance(reference, UrlReference):
        raise InvalidParams(f"{draft.origins['aside.model_path'].name} and {label} name two models; give one of them")
    if not draft.get("server.aliases") and isinstance(reference, HubReference):
        draft.put("server.aliases", (str(reference),), label)
    return named


def _download(draft: Draft, target: str, reference: ModelReference, *, downloads: bool) -> None:
    """Find a model by its name, downloaded if need be; only note it where nothing but the settings is to be printed."""
    draft.origin = draft.origins[target]
    label, path = draft.origin.name, draft.get("aside.model_path")
    if not downloads:
        draft.notes.append(f"{label} {reference} is looked for, and downloaded if need be, when the server starts")
        return
    found = draft.files.download(
        reference,
        path,
        offline=draft.get("aside.offline", False),
        hf_token=draft.get("aside.hf_token") or None,
        with_projector=draft.get("engine.mmproj") is None,
    )
    draft.put("server.model", found.path, label)
    if draft.get("engine.mmproj") is None and found.projector is not None:
        draft.derive("engine.mmproj", str(found.projector), f"the projector of {label} {reference}")


def _download_draft(draft: Draft, *, downloads: bool) -> None:
    """Find a draft model that is used and given by name, as `_download`."""
    reference = draft.get("aside.draft_repository")
    if reference is None or draft.get("engine.draft_model") is None:
        return
    draft.origin = draft.origins["aside.draft_repository"]
    label = draft.origin.name
    if not downloads:
        draft.notes.append(f"{label} {reference} is looked for, and downloaded if need be, when the server starts")
        return
    offline, token = draft.get("aside.offline", False), draft.get("aside.hf_token") or None
    found = draft.files.download(reference, None, offline=offline, hf_token=token)
    draft.put("engine.draft_model", str(found.path), label)


_OF_ROUTER: Final = ("models_preset", "models_dir", "models_max", "models_memory", "models_autoload")


def _is_router(draft: Draft) -> bool:
    """Return whether several models are to be served: one of their flags is given, and no model."""
    given = [draft.origins[f"server.{name}"] for name in _OF_ROUTER if f"server.{name}" in draft.origins]
    path = draft.get("aside.model_path")
    if not given or (_named_model(draft) is None and path is None):
        return bool(given)
    if any(origin.kind != "environment" for origin in given):
        draft.notes.append(f"{given[0].name} has no effect: a model is named, which is the only one that is served")
    return False


def _model_of_preset(draft: Draft, name: str) -> ModelReference | None:
    """Store the path of a preset's model, or return its name. Raises `InvalidParams` where it has none, or two."""
    named, path = _named_model(draft), draft.get("aside.model_path")
    if named is None:
        if path is None:
            raise InvalidParams(
                f"the preset [{name}] names no model; give it model = FILE or hf-repo = USER/REPO:QUANT"
            )
        draft.put("server.model", path, "model")
        return None
    target, reference = named
    if path is not None:
        raise InvalidParams(
            f"{draft.origins['aside.model_path'].name} and {draft.origins[target].name} name two models; give one of them"
        )
    return reference


def _named_model(draft: Draft) -> tuple[str, ModelReference] | None:
    """Return the model that is given by name, and by which target. Raises `InvalidParams` where there are two."""
    targets = ("aside.repository", "aside.model_url", "aside.model_name")
    named = [(target, draft.get(target)) for target in targets if draft.get(target) is not None]
    if len(named) > 1:
        first, second = (draft.origins[target].name for target, _ in named[:2])
        raise InvalidParams(f"{first} and {second} name two models; give one of them")
    file = draft.get("aside.repository_file")
    if file is None:
        return named[0] if named else None
    if not named or named[0][0] != "aside.repository":
        raise InvalidParams(
            f"{draft.origins['aside.repository_file'].name} names a file of a repository; give -hf, too"
        )
    target, reference = named[0]
    return target, HubReference(reference.repo, file=file, revision=reference.revision)


def _other_names(path: Path) -> str:
    """Return a hint at a similar file, or at the names of models that are no paths."""
    similar = validation.similar_files(path)
    if "did you mean" in similar:
        return similar
    return "; -hf takes models of the Hugging Face Hub, and ollama:NAME is a model of Ollama"


def _model_file(draft: Draft, path: Path) -> None:
    draft.origin = draft.origins["aside.model_path"]
    label = draft.origin.name
    if not draft.files.is_file(path):
        raise InvalidParams(f"{label}: there is no file {on_one_line(path)}{_other_names(path)}")
    draft.put("server.model", path, label)


def _isolation(draft: Draft) -> None:
    """Default to a process of its own, where a library's engine has a thread."""
    if draft.get("engine.isolation") is None:
        draft.put("engine.isolation", "process", "--isolation")
        draft.origins["engine.isolation"] = DEFAULT
    if draft.get("engine.isolation") == "thread" and draft.get("engine.rpc"):
        raise InvalidParams("--rpc needs --isolation process, as llama.cpp ends the process that loses a host")
    for name, target in (
        ("--on-engine-death", "engine.on_engine_death"),
        ("--max-restarts", "engine.max_restarts"),
        ("--hang-timeout", "engine.hang_timeout_s"),
    ):
        if draft.get("engine.isolation") == "thread" and draft.get(target) is not None:
            raise InvalidParams(
                f"{name} means nothing with --isolation thread, as a thread dies with its program; leave one out"
            )


def _sleep(draft: Draft) -> None:
    if draft.get("engine.isolation") == "thread" and draft.get("engine.sleep_idle_s") is not None:
        raise InvalidParams(
            "--sleep-idle-seconds needs --isolation process, whose memory is given back as a whole; leave one of them out"
        )


def _context(draft: Draft) -> None:
    per_slot = draft.get("aside.cells_per_slot")
    if draft.get("aside.as_trained"):
        asked = draft.origins["engine.n_ctx"].name
        model = draft.get("server.model")
        if model is None and _named_model(draft) is not None:
            model = _cached_file(draft)
            if model is None:
                return  # the file is not there yet
        trained = draft.files.trained_context(model)
        draft.derive("engine.n_ctx", trained, f"{asked} 0, as many as the model was trained with")
    elif per_slot is not None and draft.get("engine.n_ctx") is None:
        num_slots = draft.get("engine.num_slots", EngineConfig().num_slots)
        name = draft.origins["aside.cells_per_slot"].name
        draft.derive("engine.n_ctx", per_slot * num_slots, f"{name} {per_slot} times {num_slots} slots")
    if per_slot is not None:
        draft.notes.append(
            f"{draft.origins['aside.cells_per_slot'].name}: all slots share the cells, so a sequence may use more than {per_slot}"
        )


def _cached_file(draft: Draft) -> Path | None:
    """Return the file of a model that is given by name, if a cache has it."""
    named = _named_model(draft)
    if named is None or isinstance(named[1], UrlReference):
        return None
    try:
        return draft.files.download(named[1], None, offline=True, hf_token=None).path
    except PacelineError:
        return None


def _batches(draft: Draft) -> None:
    """Lower batches to the context as llama.cpp does, with a note."""
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


def _projector(draft: Draft) -> None:
    """Store the projector that is given; one with a URL is downloaded when the model is loaded."""
    given = {name: draft.get(f"aside.{name}") for name in ("mmproj_path", "mmproj_url")}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        first, second = (draft.origins[f"aside.{name}"].name for name in named)
        raise InvalidParams(f"{first} and {second} name two projectors; give one of them")
    if draft.get("aside.mmproj_auto") is False:
        draft.origin = draft.origins["aside.mmproj_auto"]
        draft.notes += [f"{draft.origins[f'aside.{one}'].name} has no effect with {draft.origin.name}" for one in named]
        draft.put("engine.mmproj", False, draft.origin.name)
    elif named:
        draft.origin = draft.origins[f"aside.{named[0]}"]
        path = given["mmproj_path"]
        if path is not None and not draft.files.is_file(path):
            raise InvalidParams(f"{draft.origin.name}: there is no file {on_one_line(path)}; -mmu takes a URL")
        draft.put("engine.mmproj", str(given[named[0]]), draft.origin.name)
    elif draft.get("aside.mmproj_auto"):
        draft.origin = draft.origins["aside.mmproj_auto"]
        draft.put("engine.mmproj", None, draft.origin.name)


def _lora(draft: Draft) -> None:
    """Name adapters by their files; of the same name, the second is name-2. Those with names of their own are not applied."""
    found, named = draft.get("aside.adapters", ()), draft.get("aside.named_adapters", ())
    if not (found or named):
        return
    paths: dict[str, Path] = {}
    scales: dict[str, float] = {}
    for path, scale in found:
        same = sum(other.stem == path.stem for other in paths.values())
        name = path.stem if not same else f"{path.stem}-{same + 1}"
        if name in paths:
            raise InvalidParams(f"two adapters would be called {name!r}; rename the file {on_one_line(path)}")
        paths[name], scales[name] = path, scale
    for name, path in named:
        if name in paths:
            raise InvalidParams(f"two adapters would be called {name!r}; give --lora-modules another name")
        if name in draft.get("server.aliases", ()):
            raise InvalidParams(f"--lora-modules: {name!r} is the model's own name; give the adapter another one")
        paths[name] = path
    draft.origin = draft.origins["aside.adapters" if found else "aside.named_adapters"]
    draft.put("engine.lora", {name: str(path) for name, path in paths.items()}, "--lora")
    draft.put("server.lora_scales", {} if draft.get("aside.unapplied") else scales, "--lora")


def _escapes(draft: Draft) -> None:
    if draft.get("aside.escape", True):
        for target in ("sampling.stop", "sampling.dry_sequence_breakers"):
            if draft.get(target) is not None:
                draft.origin = draft.origins[target]
                draft.put(target, tuple(map(unescaped, draft.get(target))), draft.origin.name)


def unescaped(text: str) -> str:
    r"""Return the text with \n, \r, \t, \', \", \\ and \xHH resolved; any other backslash stays."""
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


def _hosts(draft: Draft) -> None:
    """Reject port 0 with several addresses: each would get a different port."""
    hosts = [host for host in draft.get("server.hosts", ()) if not is_socket_path(host)]
    if draft.get("server.port") == 0 and len(hosts) > 1:
        raise InvalidParams(
            f"--port 0 takes any free port, and {' and '.join(hosts)} would get different ones; give a port, or one address"
        )


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
    """Check the values together."""
    try:
        SamplingParams(**draft.place("sampling"))
        EngineConfig(**{name: value for name, value in draft.place("engine").items() if name in CONFIG_NAMES})
    except InvalidParams as error:
        raise InvalidParams(f"flags that do not go together: {error}") from None
