"""Resolve command line, environment and file to `ServerSettings`. Pure but for the files that are passed in.

The sources are read into lists of `GivenFlag`. Texts become values later, so a text that a stronger source replaces never causes
an error.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from paceline import validation
from paceline.config import CONFIG_NAMES, EngineConfig
from paceline.errors import InvalidParams, PacelineError
from paceline.hub import HubReference, LocalModel, ModelReference, UrlReference
from paceline.params import SamplingParams
from paceline.server.flags.setters import (
    DEFAULT,
    HEADS,
    SPEC_TYPES,
    DiskFiles,
    Draft,
    Kind,
    Origin,
    on_one_line,
    spec_names,
)
from paceline.server.flags.table import (
    BY_KEY,
    BY_NAME,
    ENV_NAMES,
    ENV_PREFIX,
    FLAGS,
    SWITCH,
    Flag,
    Ignore,
    Print,
    ReadConfig,
    Reject,
    Store,
)
from paceline.server.settings import ServerSettings, is_socket_path
from paceline.speculation.named_drafter import DRAFT_MODEL

_CELLS: Final = 256  # llama.cpp rounds contexts up to it
_N_BATCH: Final = 2048
_ESCAPES: Final = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}
_ESCAPE: Final = re.compile(r"\\(?:x([0-9a-fA-F]{2})|([nrt'\"\\]))")


_SEE: Final = "paceline serve --help"
_FLAGS_ELSEWHERE: Final = {  # of vLLM and of llama-cpp-python's server: the same flag here, or a sentence about it
    "--chat-format": "--chat-template",
    "--dtype": "a GGUF file has its types already; --cache-type-k and --cache-type-v are those of the KV cache",
    "--enable-auto-tool-choice": "leave it out: tools work by the model's own template",
    "--enable-lora": "--lora",
    "--enable-prefix-caching": "--cache-prompt",
    "--enable-reasoning": "--reasoning-format",
    "--enforce-eager": "leave it out: nothing is compiled when a model loads",
    "--gpu-memory-utilization": "--fit-target is the memory that the model and its KV cache leave free",
    "--kv-cache-dtype": "--cache-type-k and --cache-type-v are the types of the KV cache",
    "--max-model-len": "--ctx-size",
    "--max-num-batched-tokens": "--batch-size",
    "--max-num-seqs": "--parallel",
    "--model-path": "--model",
    "--n-ctx": "--ctx-size",
    "--n-threads": "--threads",
    "--num-ctx": "--ctx-size",
    "--quantization": "a GGUF file is quantised already; choose a file, such as -m hf:USER/REPO:Q4_K_M",
    "--reasoning-parser": "leave it out: thinking is read by the model's own template",
    "--served-model-name": "--alias",
    "--speculative-config": "--model-draft, --spec-type and --draft-max say what proposes tokens",
    "--ssl-certfile": "--ssl-cert-file",
    "--ssl-keyfile": "--ssl-key-file",
    "--tensor-parallel-size": "all GPUs are used; --device, --split-mode and --tensor-split choose how",
    "--tokenizer": "a GGUF file has its tokenizer",
    "--tool-call-parser": "leave it out: calls are read by the model's own template",
    "--trust-remote-code": "leave it out: no code of a repository is run",
    "--uvicorn-log-level": "--log-verbosity",
}
_SECTION: Final = "serve"
_LLAMA_PREFIX: Final = "LLAMA_ARG_"
# PACELINE_RPC is what a build was told, too: such words are left in shells, and are no addresses.
_BUILD_VARIABLE: Final = "PACELINE_RPC"
_BUILD_WORDS: Final = ("", "0", "1", "OFF", "ON", "NO", "YES", "FALSE", "TRUE")
_MIN_SIMILARITY: Final = 0.85  # of a PACELINE_ variable that counts as a typo: other programs use the prefix too


@dataclass(frozen=True, slots=True)
class GivenFlag:
    """A flag and the texts given for it, in order. label: its spelling there, for messages."""

    flag: Flag
    label: str
    texts: tuple[str, ...]
    kind: Kind

    @property
    def origin(self) -> Origin:
        """The origin of settings that this flag sets."""
        return Origin(self.kind, self.label)

    def value(self) -> Any:
        """Return the value. Raises `InvalidParams`; readers of secrets do not quote the text."""
        values = [self.flag.reader(self.label, text) for text in self.texts]
        return tuple(item for value in values for item in value) if self.flag.many else values[-1]


def from_arguments(argv: Sequence[str]) -> list[GivenFlag]:
    """Read the command line, in order. Raises `InvalidParams` for an unknown flag or a missing value."""
    found, rest = [], list(argv)
    while rest:
        word = rest.pop(0)
        name, equals, attached = _split(word)
        flag, is_true = _lookup(name, word)
        if equals and not is_true:
            raise InvalidParams(f"{name} takes no value, not {attached!r:.80}; write it alone")
        if equals:
            text = attached
        elif flag.metavar == SWITCH:
            text = "true" if is_true else "false"
        else:
            text = " ".join(_values(name, flag, rest))
        found.append(GivenFlag(flag, name, (text,), "flag"))
    return found


def from_environment(environ: Mapping[str, str]) -> list[GivenFlag]:
    """Read variables, in the order of the table. PACELINE_ ones win over llama-server's."""
    found = []
    for flag in FLAGS:
        for name in (*flag.own_envs, flag.off_env, flag.env):
            if name is not None and name in environ and not _is_of_a_build(name, environ[name]):
                text = "false" if name == flag.off_env else environ[name]
                found.append(GivenFlag(flag, name, (text,), "environment"))
                break
    return found


def read_toml(path: Path, data: bytes) -> dict[str, Any]:
    """Read a TOML file. Raises `InvalidParams` that names it for invalid TOML."""
    try:
        return tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        raise InvalidParams(f"{on_one_line(path)} is not UTF-8: stray byte at offset {error.start}") from None
    except (ValueError, RecursionError) as error:  # of a number of thousands of digits as well
        raise InvalidParams(f"{on_one_line(path)} is not valid TOML: {error}") from None


def from_config(path: Path, table: Mapping[str, Any], other_names: Callable[[], Collection[str]]) -> list[GivenFlag]:
    """Read the config file of all commands: the flags on its top level, and the flags of [serve], which win.

    other_names: returns the names on the top level that are for other commands. Raises `InvalidParams` that names the file
    for an unknown key or a wrong type.
    """
    section = table.get(_SECTION, {})
    if not isinstance(section, Mapping):
        raise InvalidParams(f"{on_one_line(path)}: {_SECTION} must be a section [{_SECTION}]")
    unknown = [key for key in table if _key(key) not in BY_KEY and key != _SECTION]
    if unknown:
        _reject_unknown(f"{on_one_line(path)}: ", unknown, BY_KEY.keys() | set(other_names()))
    own = from_table(path, section, f"[{_SECTION}] ")
    names = {given.flag.long_name for given in own}
    common = from_table(path, {key: value for key, value in table.items() if _key(key) in BY_KEY})
    return [given for given in common if given.flag.long_name not in names] + own


def from_table(path: Path, table: Mapping[str, Any], section: str = "") -> list[GivenFlag]:
    """Read a table of a TOML file. Raises `InvalidParams` that names the file for an unknown key or a wrong type."""
    return [_from_key(f"{on_one_line(path)}: {section}", key, value) for key, value in table.items()]


def _is_of_a_build(name: str, text: str) -> bool:
    return name == _BUILD_VARIABLE and text.upper() in _BUILD_WORDS


def odd_variables(environ: Mapping[str, str]) -> list[str]:
    """Return notes on variables that look as if they were meant for the server, and are unknown or of a build."""
    notes = []
    for name in sorted(environ):
        if _is_of_a_build(name, environ[name]):
            notes.append(f"{name}={environ[name]} is for builds and not used here; as a flag it has addresses (--rpc)")
        prefix = next((start for start in (_LLAMA_PREFIX, ENV_PREFIX) if name.startswith(start)), None)
        if prefix is None or name in ENV_NAMES:
            continue
        known = [known_name.removeprefix(prefix) for known_name in ENV_NAMES if known_name.startswith(prefix)]
        nearest = validation.nearest_names(name.removeprefix(prefix), known, min_similarity=_MIN_SIMILARITY)
        if nearest or prefix == _LLAMA_PREFIX:
            hint = f"; did you mean {prefix}{nearest[0]}?" if nearest else ""
            notes.append(f"{name} is not known and not used{hint}")
    return notes


def strongest(sources: Iterable[Sequence[GivenFlag]]) -> tuple[list[GivenFlag], list[str]]:
    """Return each flag from its strongest source, and notes; sources come weakest first. Within a source the last flag counts.

    A flag that may be repeated keeps all of its texts.
    """
    chosen: dict[str, GivenFlag] = {}
    notes = []
    for source in sources:
        here: dict[str, GivenFlag] = {}
        for given in source:
            earlier = here.pop(given.flag.long_name, None)
            if earlier is not None and given.flag.many:
                given = GivenFlag(given.flag, given.label, earlier.texts + given.texts, given.kind)  # noqa: PLW2901
            elif earlier is not None and earlier.texts != given.texts:
                notes.append(f"{given.label} was given more than once; the last one counts")
            here[given.flag.long_name] = given
        chosen = {name: given for name, given in chosen.items() if name not in here} | here
    return list(chosen.values()), notes


def _split(word: str) -> tuple[str, str, str]:
    """Split --name=value; _ counts as - in a long name."""
    if not word.startswith("--"):
        return word, "", ""
    name, equals, value = word.partition("=")
    return name.replace("_", "-"), equals, value


def _lookup(name: str, word: str) -> tuple[Flag, bool]:
    if not name.startswith("-") or name in ("-", "--"):
        hint = f"a model is named with -m, and {_SEE} has all flags"
        raise InvalidParams(f"unexpected {word!r:.80}: every value belongs to a flag; {hint}")
    if name not in BY_NAME:
        names = [known for known in BY_NAME if known.startswith("--") == name.startswith("--")]
        validation.reject_unknown([name], names, _SEE, _FLAGS_ELSEWHERE)
    return BY_NAME[name]


def _values(name: str, flag: Flag, rest: list[str]) -> list[str]:
    """Take the values that follow a flag."""
    count = len(flag.metavar.split())
    if len(rest) < count:
        raise InvalidParams(f"{name} needs a value: {name} {flag.metavar}")
    if rest[0] in BY_NAME:
        long_name = flag.long_name
        raise InvalidParams(
            f"{name} needs a value, and {rest[0]} is a flag; write {long_name}={rest[0]} if you mean that"
        )
    taken, rest[:count] = rest[:count], []
    return taken


def _key(key: str) -> str:
    return key.replace("_", "-")


def _reject_unknown(where: str, keys: Iterable[str], known: Collection[str]) -> None:
    try:
        validation.reject_unknown(map(_key, keys), known, "docs/guide/flags.md")
    except InvalidParams as error:
        raise InvalidParams(f"{where}{error}") from None


def _from_key(where: str, key: str, value: Any) -> GivenFlag:
    _reject_unknown(where, [key], BY_KEY)
    flag, is_true = BY_KEY[_key(key)]
    label = f"{where}{key}"
    if not is_true and not isinstance(value, bool):
        raise InvalidParams(f"{label} must be true or false")
    many = isinstance(value, list) and flag.many
    texts = tuple(_text(label, item, flag) for item in (value if many else [value]))
    if not texts:
        raise InvalidParams(f"{label} is an empty list; leave it out")
    return GivenFlag(flag, label, texts if is_true else ("false" if value else "true",), "file")


def _text(label: str, value: object, flag: Flag) -> str:
    """Return a TOML value as it would be written on the command line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, int, float)):
        try:
            return str(value)
        except ValueError:  # an integer of thousands of digits
            raise InvalidParams(f"{label} has more digits than any setting can have") from None
    if isinstance(value, dict) and flag.table:
        return _table(label, value)
    kind = "a table" if isinstance(value, dict) else "a list" if isinstance(value, list) else type(value).__name__
    raise InvalidParams(f"{label} must be a text, a number or true or false, not {kind}")


def _table(label: str, table: dict[str, Any]) -> str:
    """Return a table of texts, numbers and booleans as JSON."""
    for key, value in table.items():
        if not isinstance(value, (str, int, float)):
            raise InvalidParams(f"{label}.{key} must be a text, a number or true or false, not {type(value).__name__}")
    try:
        return json.dumps(table, allow_nan=False)
    except ValueError:  # an integer of thousands of digits, infinity or NaN
        raise InvalidParams(f"{label} has a number that no option can have") from None


# ---- resolution


@dataclass(frozen=True, slots=True)
class Resolved:
    """Settings, with their sources and notes.

    Attributes:
        settings: The settings.
        prints: The kind of page to print in place of serving.
        notes: Lines to print before the server starts.
        origins: The sources of settings, by names like "engine.n_ctx"; other settings have their defaults.
        is_router: Whether several models are served.
        sources: All given flags, weakest source first, for the presets of models.
        offline: Whether nothing may be downloaded.
        hf_token: The hub's token for downloads.
        reference: The name of one of several models; None if `settings` have its path.
    """

    settings: ServerSettings
    prints: Literal["help", "version", "config"] | None = None
    notes: tuple[str, ...] = ()
    origins: Mapping[str, Origin] = field(default_factory=dict)
    is_router: bool = False
    sources: tuple[Sequence[GivenFlag], ...] = field(default=(), repr=False)
    offline: bool = False
    hf_token: str | None = field(default=None, repr=False)
    reference: ModelReference | None = None


def resolve(
    argv: Sequence[str],
    environ: Mapping[str, str],
    files: DiskFiles,
    *,
    default_config: Path | None = None,
    other_names: Callable[[], Collection[str]] = tuple,
    downloads: bool = True,
) -> Resolved:
    """Return the settings. The command line wins over the environment, that over the file, that over the defaults.

    default_config: the config file that is read if none is named and it exists. other_names: returns the
    names on its top level that are for other commands. downloads: whether models that are given by name are looked for, and
    downloaded; without them their settings have no path.

    Raises `InvalidParams` for a flag that is unknown, rejected or out of range, with the flag, the value and the way out;
    `ModelLoadError` if -c 0 needs the context length of a file that is no model, and the errors of a download.
    """
    arguments, variables = from_arguments(argv), from_environment(environ)
    prints = _printed(arguments)
    if prints in ("help", "version"):
        return Resolved(ServerSettings(), prints)
    downloads = downloads and prints is None
    config = _config_file((*variables, *arguments), files, default_config, other_names)
    variables = _without_model(variables, arguments)
    config = _without_model(config, [*variables, *arguments])
    draft = _applied((config, variables, arguments), files, odd_variables(environ))
    is_router = _is_router(draft)
    named = None if is_router else _model(draft)
    _check_together(draft)
    if named is not None:
        path, needs_projector = draft.get("aside.model_path"), draft.get("engine.mmproj") is None
        found = _download(draft, *named, path, downloads=downloads, with_projector=needs_projector)
        if found is not None:
            draft.put("server.model", found.path, draft.origin.name)
            if needs_projector and found.projector is not None:
                draft.derive("engine.mmproj", str(found.projector), f"the projector of {draft.origin.name} {named[1]}")
    repository = draft.get("aside.draft_repository")
    if not is_router and repository is not None and draft.get("engine.draft_model") is not None:
        found = _download(draft, "aside.draft_repository", repository, downloads=downloads)
        if found is not None:
            draft.put("engine.draft_model", str(found.path), draft.origin.name)
    if not is_router:
        _read_model(draft)
    return _resolved(draft, prints=prints, is_router=is_router, sources=(config, variables, arguments))


def resolve_model(sources: Sequence[Sequence[GivenFlag]], files: DiskFiles, name: str) -> Resolved:
    """Resolve one of several models, by the sources that hold for it, the weakest first. name: its name in requests.

    Nothing is downloaded, and its file need not be there. Raises as `resolve`.
    """
    draft = _applied(sources, files)
    named = _model(draft, name)
    draft.put("server.aliases", tuple(dict.fromkeys((name, *draft.get("server.aliases", ())))), "--alias")
    _check_together(draft)
    _read_model(draft)
    return _resolved(draft, reference=None if named is None else named[1])


def resolve_table(path: Path, table: Mapping[str, Any], files: DiskFiles) -> tuple[ServerSettings, tuple[str, ...]]:
    """Resolve the flags of a server with models and sockets that are named elsewhere; return notes as well.

    path: of the file that the table is in. Raises `InvalidParams`.
    """
    draft = _applied((from_table(path, table),), files)
    _check_together(draft)
    found = _resolved(draft)
    return found.settings, found.notes


def _applied(sources: Iterable[Sequence[GivenFlag]], files: DiskFiles, notes: Sequence[str] = ()) -> Draft:
    """Return a draft with the flags of all sources, which come weakest first."""
    chosen, of_flags = strongest(sources)
    draft = Draft(files)
    draft.notes += [*of_flags, *notes]
    for given in chosen:
        _apply(draft, given)
    return draft


def _resolved(draft: Draft, **facts: Any) -> Resolved:
    settings = ServerSettings(
        **draft.place("server"), engine_options=draft.place("engine"), sampling=draft.place("sampling")
    )
    offline, token = draft.get("aside.offline", False), draft.get("aside.hf_token") or None
    notes, origins = tuple(draft.notes), draft.origins
    return Resolved(settings, notes=notes, origins=origins, offline=offline, hf_token=token, **facts)


def _printed(arguments: Sequence[GivenFlag]) -> Literal["help", "version", "config"] | None:
    """Return the page to print: the first requested one, help and version before the configuration."""
    wanted = [given.flag.action.what for given in arguments if isinstance(given.flag.action, Print) and given.value()]
    return next((what for what in wanted if what != "config"), wanted[0] if wanted else None)


def _config_file(
    givens: Sequence[GivenFlag], files: DiskFiles, default: Path | None, other_names: Callable[[], Collection[str]]
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
    """Return the flags, without flags that name a model if a stronger source chooses another model, or several."""
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
    """Return the flag as it was given, with its value if the value matters."""
    flag = given.flag
    shows = given.kind != "flag" or (flag.actions and flag.metavar)
    return f"{given.label} {on_one_line(given.texts[-1]):.80}" if shows and not flag.secret else given.label


def _check_together(draft: Draft) -> None:
    """Derive values that follow from several flags, and check them together. Raises `InvalidParams`."""
    _check_isolation(draft)
    resolve_draft_model(draft)
    resolve_spec_type(draft)
    _projector(draft)
    _lora(draft)
    _escapes(draft)
    _check_server(draft)
    try:
        SamplingParams(**draft.place("sampling"))
        EngineConfig(**{name: value for name, value in draft.place("engine").items() if name in CONFIG_NAMES})
    except InvalidParams as error:
        raise InvalidParams(f"flags that do not go together: {error}") from None


def _model(draft: Draft, preset: str | None = None) -> tuple[str, ModelReference] | None:
    """Store the model's file, or return its name with the target that the name was given for. preset: of several models.

    Raises `InvalidParams` if there is no such file, a preset without a model, or two models.
    """
    named, path = _named_model(draft), draft.get("aside.model_path")
    if named is None:
        if preset is not None and path is None:
            raise InvalidParams(
                f"the preset [{preset}] names no model; give it model = FILE or hf-repo = USER/REPO:QUANT"
            )
        if path is not None:
            draft.origin = draft.origins["aside.model_path"]
            if preset is None and not draft.files.is_file(path):
                similar = validation.similar_files(path)
                if "did you mean" not in similar:
                    similar = "; -hf takes models of the Hugging Face Hub, and ollama:NAME is a model of Ollama"
                raise InvalidParams(f"{draft.origin.name}: there is no file {on_one_line(path)}{similar}")
            draft.put("server.model", path, draft.origin.name)
        return None
    target, reference = named
    draft.origin = draft.origins[target]
    if path is not None and (preset is not None or not isinstance(reference, UrlReference)):
        raise InvalidParams(
            f"{draft.flag_of('aside.model_path')} and {draft.origin.name} name two models; give one of them"
        )
    if preset is None and not draft.get("server.aliases") and isinstance(reference, HubReference):
        draft.put("server.aliases", (str(reference),), draft.origin.name)
    return named


def _download(
    draft: Draft,
    target: str,
    reference: ModelReference,
    path: Path | None = None,
    *,
    downloads: bool,
    with_projector: bool = False,
) -> LocalModel | None:
    """Find a model by its name, downloaded if need be; only note it if nothing but the settings is to be printed."""
    draft.origin = draft.origins[target]
    if not downloads:
        draft.notes.append(
            f"{draft.origin.name} {reference} is looked for, and downloaded if need be, when the server starts"
        )
        return None
    return draft.files.download(
        reference,
        path,
        offline=draft.get("aside.offline", False),
        hf_token=draft.get("aside.hf_token") or None,
        with_projector=with_projector,
    )


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


def _named_model(draft: Draft) -> tuple[str, ModelReference] | None:
    """Return the target and the name of the model, if it is given by name. Raises `InvalidParams` if there are two."""
    targets = ("aside.repository", "aside.model_url", "aside.model_name")
    named = [(target, draft.get(target)) for target in targets if draft.get(target) is not None]
    if len(named) > 1:
        first, second = (draft.flag_of(target) for target, _ in named[:2])
        raise InvalidParams(f"{first} and {second} name two models; give one of them")
    file = draft.get("aside.repository_file")
    if file is None:
        return named[0] if named else None
    if not named or named[0][0] != "aside.repository":
        raise InvalidParams(f"{draft.flag_of('aside.repository_file')} names a file of a repository; give -hf, too")
    target, reference = named[0]
    return target, HubReference(reference.repo, file=file, revision=reference.revision)


def _check_isolation(draft: Draft) -> None:
    """Default to a process of its own. An engine of the library defaults to a thread."""
    if draft.get("engine.isolation") is None:
        draft.put("engine.isolation", "process", "--isolation")
        draft.origins["engine.isolation"] = DEFAULT
    if draft.get("engine.isolation") != "thread":
        return
    if draft.get("engine.rpc"):
        raise InvalidParams("--rpc needs --isolation process, as llama.cpp ends the process that loses a host")
    for name, target in (
        ("--on-engine-death", "engine.on_engine_death"),
        ("--max-restarts", "engine.max_restarts"),
        ("--hang-timeout", "engine.hang_timeout_s"),
    ):
        if draft.get(target) is not None:
            raise InvalidParams(
                f"{name} means nothing with --isolation thread, as a thread dies with its program; leave one out"
            )
    if draft.get("engine.sleep_idle_s") is not None:
        raise InvalidParams(
            "--sleep-idle-seconds needs --isolation process, whose memory is given back as a whole; leave one of them out"
        )


def _read_model(draft: Draft) -> None:
    """Derive values that may follow from the model's file, which is there now."""
    _context(draft)
    n_ctx = draft.get("engine.n_ctx")
    cells = None if n_ctx is None else -(-n_ctx // _CELLS) * _CELLS
    _lower(draft, "n_batch", cells, "the context")  # as llama.cpp does
    _lower(draft, "n_ubatch", draft.get("engine.n_batch", min(_N_BATCH, cells or _N_BATCH)), "n_batch")


def _context(draft: Draft) -> None:
    per_slot = draft.get("aside.cells_per_slot")
    if draft.get("aside.as_trained"):
        asked = draft.flag_of("engine.n_ctx")
        model = draft.get("server.model")
        named = _named_model(draft)
        if model is None and named is not None:
            if isinstance(named[1], UrlReference):
                return  # the file is not there yet
            try:
                model = draft.files.download(named[1], None, offline=True, hf_token=None).path
            except PacelineError:  # nor in a cache
                return
        trained = draft.files.trained_context(model)
        draft.derive("engine.n_ctx", trained, f"{asked} 0, as many as the model was trained with")
    elif per_slot is not None and draft.get("engine.n_ctx") is None:
        num_slots = draft.get("engine.num_slots", EngineConfig().num_slots)
        name = draft.flag_of("aside.cells_per_slot")
        draft.derive("engine.n_ctx", per_slot * num_slots, f"{name} {per_slot} times {num_slots} slots")
    if per_slot is not None:
        draft.notes.append(
            f"{draft.flag_of('aside.cells_per_slot')}: all slots share the cells, so a sequence may use more than {per_slot}"
        )


def _lower(draft: Draft, name: str, most: int | None, why: str) -> None:
    value = draft.get(f"engine.{name}")
    if value is not None and most is not None and value > most:
        label = draft.flag_of(f"engine.{name}")
        draft.notes.append(f"{label} {value} is lowered to {most}, the size of {why}")
        draft.derive(f"engine.{name}", most, f"{label} {value}, lowered to the size of {why}")


def _projector(draft: Draft) -> None:
    """Store the projector that is given; one with a URL is downloaded when the model is loaded."""
    given = {name: draft.get(f"aside.{name}") for name in ("mmproj_path", "mmproj_url")}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        first, second = (draft.flag_of(f"aside.{name}") for name in named)
        raise InvalidParams(f"{first} and {second} name two projectors; give one of them")
    if draft.get("aside.mmproj_auto") is False:
        draft.origin = draft.origins["aside.mmproj_auto"]
        _note_unused(draft, [f"aside.{name}" for name in named], f"with {draft.origin.name}")
        draft.put("engine.mmproj", False, draft.origin.name)
    elif named:
        draft.origin = draft.origins[f"aside.{named[0]}"]
        if given["mmproj_path"] is not None:
            draft.check_file(given["mmproj_path"], draft.origin.name, "; -mmu takes a URL")
        draft.put("engine.mmproj", str(given[named[0]]), draft.origin.name)
    elif draft.get("aside.mmproj_auto"):
        draft.origin = draft.origins["aside.mmproj_auto"]
        draft.put("engine.mmproj", None, draft.origin.name)


def _lora(draft: Draft) -> None:
    """Name adapters by their files; the second of the same name is name-2. Adapters with names of their own are not applied."""
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


def _check_server(draft: Draft) -> None:
    files = {"--ssl-key-file": "server.ssl_keyfile", "--ssl-cert-file": "server.ssl_certfile"}
    given = {name: draft.get(target) for name, target in files.items() if draft.get(target) is not None}
    if len(given) == 1:
        missing = next(name for name in files if name not in given)
        raise InvalidParams(f"{next(iter(given))} needs {missing} beside it: TLS takes a certificate and its key")
    for name, path in given.items():
        draft.check_file(path, name)
    hosts = [host for host in draft.get("server.hosts", ()) if not is_socket_path(host)]
    if draft.get("server.port") == 0 and len(hosts) > 1:
        raise InvalidParams(
            f"--port 0 takes any free port, and {' and '.join(hosts)} would get different ones; give a port, or one address"
        )
    total = draft.get("server.max_total_body_bytes")
    most = draft.get("server.max_body_bytes", ServerSettings().max_body_bytes)
    if total is not None and total < most:
        raise InvalidParams(
            f"--max-total-body-bytes {total} has no room for one body of --max-body-bytes {most}; raise it or lower that"
        )


# ---- drafts


_DRAFT_OPTIONS: Final = (
    "p_min", "n_gpu_layers", "devices", "n_threads", "n_threads_batch", "type_k", "type_v", "tensor_overrides", "cpu_moe",
    "n_cpu_moe",
)  # fmt: skip


def resolve_draft_model(draft: Draft) -> None:
    """Store the draft model and its options; as in llama-server its kind of drafts is used if no other is named."""
    target, model = _draft_model(draft)
    types, speculation = draft.get("aside.spec_type"), draft.get("engine.speculation")
    given = [name for name in _DRAFT_OPTIONS if draft.get(f"aside.draft.{name}") is not None]
    if heads := [name for name in HEADS if name in (types or ())]:
        _check_heads(draft, heads, model)
        return
    if model is None:
        if types and "draft-simple" in types:
            raise InvalidParams(
                f"{draft.flag_of('aside.spec_type')} draft-simple needs a draft model; give -md or -hfd"
            )
        _note_unused(draft, [f"aside.draft.{name}" for name in given], "without -md or -hfd, a draft model")
        return
    draft.origin = draft.origins[target]
    label = draft.origin.name
    if types and "draft-simple" not in types:
        draft.notes.append(f"{label} has no effect without draft-simple in --spec-type")
        return
    if types is None and speculation is None:
        draft.put("aside.spec_type", ("draft-simple",), label)
    elif speculation is not None and DRAFT_MODEL not in spec_names(speculation):
        raise InvalidParams(f"{label} and --speculation without {DRAFT_MODEL}: add it there, or leave one of them out")
    draft.put("engine.draft_model", model, label)
    if given:
        draft.put("engine.draft_options", {name: draft.get(f"aside.draft.{name}") for name in given}, label)


def _check_heads(draft: Draft, heads: list[str], model: str | None) -> None:
    """Raise `InvalidParams` if draft heads cannot be used, and note options of a draft model that they do not have."""
    label, types = draft.flag_of("aside.spec_type"), draft.get("aside.spec_type")
    if len(heads) > 1 or "draft-simple" in types:
        named = ", ".join([*heads, *(kind for kind in types if kind == "draft-simple")])
        raise InvalidParams(f"{label} {named}: one of them can draft beside a model; leave the others out")
    if draft.get("aside.draft_repository") is not None:
        name = draft.flag_of("aside.draft_repository")
        raise InvalidParams(f"{name} names draft models, and {heads[0]} takes the file of its heads as -md")
    if model is None and heads[0] != "draft-mtp":
        raise InvalidParams(f"{label} {heads[0]} needs its file; give -md")
    targets = [f"aside.draft.{name}" for name in _DRAFT_OPTIONS if name != "p_min"]
    _note_unused(draft, targets, f"with {heads[0]}, whose heads compute as the model does")


def _draft_model(draft: Draft) -> tuple[str, str | None]:
    """Return the target of the draft model, and its path or name."""
    path, repository = draft.get("aside.draft_path"), draft.get("aside.draft_repository")
    if path is not None and repository is not None:
        names = [draft.flag_of(f"aside.draft_{source}") for source in ("path", "repository")]
        raise InvalidParams(f"{names[0]} and {names[1]} name two draft models; give one of them")
    if repository is not None:
        return "aside.draft_repository", f"hf:{repository}"
    if path is not None:
        draft.check_file(path, draft.flag_of("aside.draft_path"), "; -hfd takes draft models of the Hugging Face Hub")
    return "aside.draft_path", None if path is None else str(path)


def resolve_spec_type(draft: Draft) -> None:
    """Make the drafters that llama-server's flags ask for, in its order; note which of them have no effect."""
    names = [name for name in SPEC_TYPES if name in (draft.get("aside.spec_type") or ())]
    for other, kind in SPEC_TYPES.items():
        if other not in names:
            _note_unused(draft, map(kind.aside, kind.sizes), f"without --spec-type {other}")
    if not names:
        if draft.get("engine.speculation") is None:
            targets = ("engine.max_draft", "engine.min_draft")
            _note_unused(draft, targets, "without --spec-type or --speculation")
        return
    draft.origin = draft.origins["aside.spec_type"]
    if draft.get("engine.speculation") is not None:
        raise InvalidParams(f"--speculation and {draft.origin.name} both name drafters; give one of them")
    drafters = [_drafter(draft, name) for name in names]
    draft.put("engine.speculation", drafters if len(drafters) > 1 else drafters[0], draft.origin.name)


def _drafter(draft: Draft, kind_name: str) -> dict[str, Any]:
    kind = SPEC_TYPES[kind_name]
    options: dict[str, Any] = {
        option: draft.get(kind.aside(option), default) for option, (_, default) in kind.sizes.items()
    }
    if kind_name in HEADS:
        path, p_min = draft.get("aside.draft_path"), draft.get("aside.draft.p_min")
        options |= {} if path is None else {"model": str(path)}
        options |= {} if p_min is None else {"p_min": p_min}
    return {"name": kind.drafter, **options}


def _note_unused(draft: Draft, targets: Iterable[str], why: str) -> None:
    """Note each given flag of these targets that has no effect."""
    draft.notes += [f"{draft.flag_of(name)} has no effect {why}" for name in targets if draft.get(name) is not None]
