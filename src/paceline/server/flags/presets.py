"""The models of a server that serves several: in a file of presets, a folder and the caches of this machine.

llama-server's preset files are INI, with a section for each model and the names of flags as keys:

    [*]                       for all models
    ctx-size = 8192
    [my-model]                its name in requests
    hf-repo = user/repo:Q8_0

A value ends at the first ; or #, which begins a comment. The precedence is llama-server's: command line, section of the model,
section [*], environment and file of `--config`. Blocking; any thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from paceline import validation
from paceline.errors import InvalidParams, PacelineError
from paceline.hub import ModelReference, parse_hub_reference
from paceline.server.flags import readers as read
from paceline.server.flags.readers import Reader
from paceline.server.flags.resolution import GivenFlag, Resolved, resolve_model
from paceline.server.flags.setters import DiskFiles, on_one_line
from paceline.server.flags.table import BY_NAME, FLAGS, SPECULATION, Print, ReadConfig, Store
from paceline.server.settings import ServerSettings

ALL_MODELS: Final = "*"
"""The section whose keys hold for all models."""

_HEADER = re.compile(r"\[[ \t]*([^\]]+?)[ \t]*\]")
_KEY = re.compile(r"([A-Za-z_][A-Za-z0-9_.-]*)[ \t]*=[ \t]*(.*)", re.DOTALL)
_COMMENT = re.compile(r"[ \t]*[;#].*", re.DOTALL)
_LINE_ENDS = re.compile(r"\r\n|\n|\r")
_TAG_END = re.compile(r"[-.]([A-Za-z0-9_]+)$")
_RESERVED: Final = "version"  # a key that llama-server passes over
_LONGEST_S: Final = 1e9

PRESET_KEYS: Final[Mapping[str, Reader]] = {
    "load-on-startup": read.switch,
    "stop-timeout": read.number(0, _LONGEST_S),
    "dedup-cache-models": read.switch,
    "pinned": read.switch,
    "unload-idle-seconds": read.seconds("never", None),
}
"""The keys that are no flags; the last two are ours."""

_BY_VARIABLE: Final = {
    **{flag.env: (flag, True) for flag in FLAGS if flag.env is not None},
    **{flag.off_env: (flag, False) for flag in FLAGS if flag.off_env is not None},
}


@dataclass(frozen=True, slots=True)
class PresetSection:
    """One section. flags: in order; options: values of `PRESET_KEYS`."""

    name: str
    flags: tuple[GivenFlag, ...]
    options: Mapping[str, Any]


def read_presets(path: Path, data: bytes) -> dict[str, PresetSection]:
    """Return the sections by name, `ALL_MODELS` among them if it is there.

    Raises `InvalidParams` that names file, line, section and key for a line that is no line of a preset, an unknown key, or a
    wrong value of `PRESET_KEYS`.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidParams(f"{on_one_line(path)} is not UTF-8: stray byte at offset {error.start}") from None
    sections: dict[str, dict[str, str]] = {}
    current: dict[str, str] | None = None
    for number, line in enumerate(_LINE_ENDS.split(text), 1):
        content = _COMMENT.sub("", line, count=1).strip(" \t")
        if not content:
            continue
        if header := _HEADER.fullmatch(content):
            current = sections[canonical_name(header[1])] = {}
        elif key := _KEY.fullmatch(content):
            if key[1] == _RESERVED:
                continue
            if current is None:
                raise InvalidParams(
                    f"{on_one_line(path)}, line {number}: {key[1]} stands before the first section; put it under [*]"
                )
            current[key[1]] = key[2]
        else:
            raise InvalidParams(
                f"{on_one_line(path)}, line {number}: {content!r:.80} is neither [SECTION] nor KEY = VALUE"
            )
    return {name: _section(path, name, keys) for name, keys in sections.items()}


def canonical_name(name: str) -> str:
    """Return a model's name with its tag in capitals, as llama-server writes it: user/repo:q8_0 is user/repo:Q8_0."""
    base, colon, tag = name.rpartition(":")
    if not colon:
        return name
    found = _TAG_END.search(tag)
    return f"{base}:{(found[1] if found else tag).upper()}"


def _section(path: Path, name: str, keys: Mapping[str, str]) -> PresetSection:
    flags: list[GivenFlag] = []
    options: dict[str, Any] = {}
    for key, text in keys.items():
        label = f"{on_one_line(path)}: [{name}] {key}"
        if (reader := PRESET_KEYS.get(key.replace("_", "-"))) is not None:
            options[key.replace("_", "-")] = reader(label, text)
        else:
            flags.append(_flag(label, f"{on_one_line(path)}: [{name}]", key, text))
    return PresetSection(name, tuple(flags), options)


def _flag(label: str, where: str, key: str, text: str) -> GivenFlag:
    """Return the flag that a key names: by a long name, a short one or llama-server's variable."""
    found = next(
        (BY_NAME[spelling] for spelling in (f"--{key.replace('_', '-')}", f"-{key}") if spelling in BY_NAME), None
    )
    found = found or _BY_VARIABLE.get(key)
    if found is None or isinstance(found[0].action, Print | ReadConfig):
        names = [name.lstrip("-") for name in BY_NAME]
        try:
            validation.reject_unknown([key], [*names, *PRESET_KEYS], "docs/guide/flags.md")
        except InvalidParams as error:
            raise InvalidParams(f"{where}: {error}") from None
        raise InvalidParams(f"{where}: {key} is of the command line alone; leave it out")
    flag, is_true = found
    if not is_true:
        text = "false" if read.switch(label, text) else "true"
    return GivenFlag(flag, label, (text,), "file")


# ---- models


ModelSource = Literal["preset", "models_dir", "cache"]

STOP_TIMEOUT_S: Final = 10.0
"""Seconds that running requests of a model get when it is unloaded, as in llama-server."""

# fmt: off
SERVERS_OWN: Final = frozenset(f"server.{name}" for name in (
    "hosts", "port", "api_keys", "allowed_hosts", "ssl_keyfile", "ssl_certfile", "root_path", "docs", "metrics", "cors_origins",
    "cors_methods", "cors_headers", "cors_credentials", "start_page", "page_folder", "body_timeout_s", "max_body_bytes",
    "max_total_body_bytes", "max_header_bytes", "max_connections", "keep_alive_s", "drain_s", "responses_store",
    "responses_store_bytes", "responses_store_total_bytes", "heartbeat_s", "log_level", "log_json", "log_file", "models_preset",
    "models_dir", "models_max", "models_memory", "models_autoload", "spare_worker",
))
# fmt: on
"""The targets of settings of the whole server, which a preset of a model cannot set."""

_MODELS_OWN: Final = frozenset(("aside.model_path", "aside.model_name", "aside.repository", "aside.repository_file"))
_NAMES: Final = frozenset(("aside.model_url", "server.aliases", "server.tags", "server.model"))
_DRAFT_REPOSITORY: Final = "--spec-draft-hf"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPreset:
    """A model and the settings that it is served with.

    name: what requests call it; settings.aliases begin with it. reference: the model's name in the hub and so on; None where
    settings.model is its path, or None for the demo model. text: its preset as INI. hidden: whether it is served and not listed.
    load_on_startup, pinned, unload_idle_s, stop_timeout_s: see `ModelEntry`.
    """

    name: str
    settings: ServerSettings
    source: ModelSource
    text: str
    reference: ModelReference | None = None
    offline: bool = False
    hf_token: str | None = field(default=None, repr=False)
    hidden: bool = False
    load_on_startup: bool = False
    pinned: bool = False
    unload_idle_s: float | None = None
    stop_timeout_s: float = STOP_TIMEOUT_S
    notes: tuple[str, ...] = ()

    @property
    def is_removable(self) -> bool:
        """Whether it may be deleted: one that was found in a cache, unless that is Ollama's."""
        return self.source == "cache" and not self.name.startswith("ollama:")


class ModelPresets:
    """The sources of a server's models, which can be read again while it runs. offline, hf_token: for downloads."""

    def __init__(self, server: Resolved, files: DiskFiles) -> None:
        """server: as resolved, with its sources."""
        self.offline, self.hf_token = server.offline, server.hf_token
        self._strong = {target for target, origin in server.origins.items() if origin.kind in ("flag", "derived")}
        *self._weak, arguments = server.sources
        self._arguments = [given for given in arguments if not targets_of(given) & (_MODELS_OWN | _NAMES)]
        self._weak = [
            [given for given in source if not targets_of(given) & (_MODELS_OWN | _NAMES)] for source in self._weak
        ]
        self._files = files

    def sets(self, target: str) -> bool:
        """Return whether the command line sets a target, for example "engine.n_ctx", for all models."""
        return target in self._strong

    def read(self, preset_file: Path | None, folder: Path | None) -> list[ModelPreset]:
        """Return all models: of a file of presets, if it is no TOML, a folder, the caches; each name once.

        Raises `InvalidParams` for a wrong file of presets or a folder that cannot be read.
        """
        sections: dict[str, PresetSection] = {}
        if preset_file is not None and preset_file.suffix.lower() != ".toml":
            try:
                sections = read_presets(preset_file, self._files.read(preset_file))
            except OSError as error:
                reason = error.strerror or error
                raise InvalidParams(f"--models-preset: cannot read {on_one_line(preset_file)}: {reason}") from None
        common = sections.pop(ALL_MODELS, PresetSection(ALL_MODELS, (), {}))
        paths: dict[str, tuple[ModelSource, Path]] = {
            name: ("cache", path) for name, path in self._files.cached_models().items()
        }
        paths |= {name: ("models_dir", path) for name, path in self._folder_models(folder)}
        found = [self._model(section, common, paths.get(section.name)) for section in sections.values()]
        hidden = self._hidden_files(found, sections, common)
        for name, known in paths.items():
            if name not in sections:
                is_hidden = known[0] == "cache" and known[1] in hidden
                found.append(self._model(PresetSection(name, (), {}), common, known, is_hidden=is_hidden))
        check_names(found)
        return found

    def _folder_models(self, folder: Path | None) -> Iterator[tuple[str, Path]]:
        """Yield name and file of the models of the folder and of its folders, chosen as llama-server chooses them."""
        if folder is None:
            return
        for name in self._names_in(folder):
            path = folder / name
            if self._files.is_folder(path):
                models = [file for file in self._names_in(path) if _is_model(file)]
                parts = [file for file in models if "-00001-of-" in file]
                if models:
                    yield name, path / (parts or models)[-1]
            elif _is_model(name):
                yield name.removesuffix(".gguf"), path

    def _names_in(self, folder: Path) -> list[str]:
        try:
            return self._files.names(folder)
        except OSError as error:
            raise InvalidParams(
                f"--models-dir: cannot read the folder {on_one_line(folder)}: {error.strerror or error}"
            ) from None

    def _model(
        self,
        section: PresetSection,
        common: PresetSection,
        known: tuple[ModelSource, Path] | None,
        *,
        is_hidden: bool = False,
    ) -> ModelPreset:
        """Resolve a model. known: the file that has this name already, in the folder or a cache."""
        notes: list[str] = []
        of_all = _kept(common.flags, notes)
        own = _kept(section.flags, notes)
        if known is not None and not any(targets_of(given) & _MODELS_OWN for given in own):
            label = f"the file of {section.name}"  # a path: the name of a file that was found has no scheme
            own = [*own, GivenFlag(BY_NAME["--model"][0], label, (str(known[1].absolute()),), "file")]
        sources = (*self._weak, of_all, own, self._arguments)
        found = resolve_model(sources, self._files, section.name)
        options: Mapping[str, Any] = {**common.options, **section.options}
        is_preset = bool(section.flags or section.options)
        return ModelPreset(
            name=section.name,
            settings=found.settings,
            source="preset" if is_preset or known is None else known[0],
            text=_as_ini(section.name, [*of_all, *own], options),
            reference=found.reference,
            offline=found.offline,
            hf_token=found.hf_token,
            hidden=is_hidden,
            load_on_startup=options.get("load-on-startup", False),
            pinned=options.get("pinned", False),
            unload_idle_s=options.get("unload-idle-seconds"),
            stop_timeout_s=options.get("stop-timeout", STOP_TIMEOUT_S),
            notes=(*dict.fromkeys(notes), *found.notes),
        )

    def _hidden_files(
        self, presets: Sequence[ModelPreset], sections: Mapping[str, PresetSection], common: PresetSection
    ) -> set[Path]:
        """Return the files in caches that presets with dedup-cache-models use: of the model, and of its drafts."""
        hidden: set[Path] = set()
        for preset in presets:
            section = sections[preset.name]
            if not {**common.options, **section.options}.get("dedup-cache-models", False):
                continue
            drafts = [given for given in section.flags if _DRAFT_REPOSITORY in given.flag.names]
            references = [parse_hub_reference(given.texts[-1], name=given.label) for given in drafts]
            for reference in (preset.reference, *references):
                if reference is not None:
                    with suppress(PacelineError):
                        hidden.add(self._files.download(reference, None, offline=True, hf_token=None).path)
        return hidden


@dataclass(frozen=True, slots=True)
class SettingsSource:
    """The sources of a server's settings.

    Attributes:
        started: The settings that the server was started with.
        read: Reads the sources again, and downloads nothing. Blocking. Raises as `resolve`.
        presets: Makes the sources of several models from settings.
        set_up_logging: Opens the log anew. Raises `OSError`.
    """

    started: Resolved
    read: Callable[[], Resolved]
    presets: Callable[[Resolved], ModelPresets]
    set_up_logging: Callable[[ServerSettings], None]


def targets_of(given: GivenFlag) -> set[str]:
    """Return the targets that a flag sets, for example "server.port"."""
    action = given.flag.action
    return set(action.targets) if isinstance(action, Store) else set()


def _kept(flags: Sequence[GivenFlag], notes: list[str]) -> list[GivenFlag]:
    """Return the flags of a section that are about a model, with notes on the rest."""
    kept = []
    for given in flags:
        if targets_of(given) & SERVERS_OWN:
            notes.append(f"{given.label} has no effect: it is a setting of the whole server")
        elif given.flag.action_of(given.texts[-1]) == SPECULATION:
            notes.append(f"{given.label} has no effect: {SPECULATION.way_out}")
        else:
            kept.append(given)
    return kept


def _is_model(name: str) -> bool:
    """Return whether a file is a model by itself: no projector for images and no draft."""
    is_companion = "mmproj" in name or name.startswith(("mtp-", "dspark-", "dflash-"))
    return name.endswith(".gguf") and not is_companion


def _as_ini(name: str, flags: Sequence[GivenFlag], options: Mapping[str, Any]) -> str:
    """Return a preset as text; secrets are left out, and of paths all but the last part."""
    lines = [f"[{name}]"]
    for given in flags:
        if not given.flag.secret:
            is_path = targets_of(given) & {"aside.model_path", "aside.mmproj_path", "server.model"}
            text = Path(given.texts[-1]).name if is_path else given.texts[-1]
            lines.append(f"{given.flag.long_name.lstrip('-')} = {text}")
    lines += [f"{key} = {str(value).lower()}" for key, value in options.items()]
    return "\n".join(lines) + "\n\n"


def check_names(presets: Sequence[ModelPreset]) -> None:
    """Raise `InvalidParams` if two models have the same name or alias."""
    owners: dict[str, str] = {}
    for preset in presets:
        for name in preset.settings.aliases:
            other = owners.setdefault(name, preset.name)
            if other != preset.name:
                raise InvalidParams(f"the models {other!r} and {preset.name!r} are both called {name!r}; rename one")
