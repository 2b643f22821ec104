"""Settings while they are resolved, and the setters that store the values of flags in them.

A setter is needed if a flag sets several settings, or another value than the given one. The draft lives for one resolution.
Single values are checked by `EngineConfig` and `SamplingParams`. Any thread.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from paceline import validation
from paceline.config import CONFIG_NAMES, EngineConfig
from paceline.errors import InvalidParams, ModelLoadError
from paceline.hub import LocalModel, ModelReference, local_model
from paceline.named_object import NamedObject
from paceline.params import FIELDS, SamplingParams
from paceline.request import MAX_WEIGHT, MIN_WEIGHT
from paceline.server.flags.readers import UNSET
from paceline.server.settings import ApiKey
from paceline.speculation.named_drafter import DRAFT_MODEL, drafter_parts

Setter = Callable[["Draft", Any, str], None]
"""Takes the draft, the value and the flag's name for messages; stores in the draft what follows."""


Kind = Literal["flag", "environment", "file", "default", "derived"]


MAX_FILE_BYTES: Final = 16 << 20
"""Largest file that a flag names and whose text is used: keys, presets, schemas, grammars, chat templates."""


class DiskFiles:
    """The file system and the network, as a resolution needs them. note: receives lines about downloads. Blocking."""

    def __init__(self, note: Callable[[str], object]) -> None:
        self._note = note

    def read(self, path: Path) -> bytes:
        """Return the bytes of a file, which may be a pipe. Raises `OSError`."""
        return validation.read_file(path, MAX_FILE_BYTES, pipes=True)

    def is_file(self, path: Path) -> bool:
        """Return whether there is something to open."""
        return path.exists() and not path.is_dir()

    def is_folder(self, path: Path) -> bool:
        """Return whether the path is a folder."""
        return path.is_dir()

    def download(
        self,
        model: ModelReference,
        target: Path | None,
        *,
        offline: bool,
        hf_token: str | None,
        with_projector: bool = False,
    ) -> LocalModel:
        """Return the files of a model, downloaded if need be."""
        try:
            return local_model(
                model, target=target, offline=offline, hf_token=hf_token, with_projector=with_projector, note=self._note
            )
        except KeyboardInterrupt:
            self._note("the download was stopped; the next start continues it")
            raise

    def names(self, folder: Path) -> list[str]:
        """Return the names of the files and folders in a folder, sorted. Raises `OSError`."""
        return sorted(path.name for path in folder.iterdir())

    def cached_models(self) -> dict[str, Path]:
        """Return the models of the hub's caches and of Ollama's, by the names that requests use."""
        from paceline.hub.caches import find_models
        from paceline.hub.references import hub_settings

        named = (found for found in find_models(hub_settings()) if found.name.startswith(("hf:", "ollama:")))
        return {found.name.removeprefix("hf:"): found.path for found in named}

    def trained_context(self, model: Path | None) -> int:
        """Read a model's context length from its file. Raises `ModelLoadError` if it is no model or has none."""
        from paceline.demo import demo_model_path
        from paceline.runtime.gguf_file import read_gguf

        path = demo_model_path() if model is None else model
        metadata = read_gguf(path).metadata
        try:
            architecture = metadata[b"general.architecture"].value
            found = metadata[architecture + b".context_length"].value
        except (KeyError, TypeError):
            found = None
        if not isinstance(found, int) or found < 1:
            raise ModelLoadError(f"{path} does not say with how many tokens it was trained; give -c a number")
        return found


@dataclass(frozen=True, slots=True)
class Origin:
    """The source of a value. name: of the flag, the variable, the file and its key; for a derived value the reason."""

    kind: Kind
    name: str = ""

    def __str__(self) -> str:
        return {"default": "default", "derived": f"derived: {self.name}"}.get(self.kind, self.name)


DEFAULT = Origin("default")


def on_one_line(given: str | Path) -> str:
    """Return a text or path for a message: as it is, or quoted if it has characters that would break a line."""
    text = str(given)
    return text if text.isprintable() else repr(text)


class Draft:
    """Settings being resolved. Targets are named "engine.n_ctx", "sampling.seed", "server.port"; "aside.x" is for later steps."""

    def __init__(self, files: DiskFiles) -> None:
        self.files = files
        self.origin = DEFAULT  # of the flag that is being applied
        self.notes: list[str] = []
        self.origins: dict[str, Origin] = {}
        self._values: dict[str, Any] = {}

    def get(self, target: str, default: Any = None) -> Any:
        """Return the value so far."""
        return self._values.get(target, default)

    def put(self, target: str, value: Any, label: str) -> None:
        """Set a value, or unset it. Raises `InvalidParams` that names the flag if the value is out of its range."""
        self.origins[target] = self.origin
        if value is UNSET:
            self._values.pop(target, None)
        else:
            self._values[target] = checked(target, value, label)

    def derive(self, target: str, value: Any, why: str) -> None:
        """Set a value that follows from others."""
        self._values[target], self.origins[target] = value, Origin("derived", why)

    def drop(self, target: str) -> None:
        """Remove a value and its origin."""
        self._values.pop(target, None)
        self.origins.pop(target, None)

    def flag_of(self, target: str) -> str:
        """Return the name of the flag, variable or key that set a value."""
        return self.origins[target].name

    def place(self, name: str) -> dict[str, Any]:
        """Return all values of a place, for example "engine", by their names."""
        return {
            key.removeprefix(f"{name}."): value for key, value in self._values.items() if key.startswith(f"{name}.")
        }

    def check_file(self, path: Path, label: str, way_out: str = "") -> None:
        """Raise `InvalidParams` if a flag names a file that is not there."""
        if not self.files.is_file(path):
            raise InvalidParams(f"{label}: there is no file {on_one_line(path)}{way_out}")

    def text_of(self, path: Path, label: str) -> str:
        """Read the text of a file that a flag names. Raises `InvalidParams`."""
        try:
            return self.files.read(path).decode()
        except UnicodeDecodeError as error:
            raise InvalidParams(
                f"{label}: {on_one_line(path)} is not UTF-8: stray byte at offset {error.start}"
            ) from None
        except OSError as error:
            raise InvalidParams(f"{label}: cannot read {on_one_line(path)}: {error.strerror or error}") from None


def checked(target: str, value: Any, label: str) -> Any:
    """Return the value if `EngineConfig` or `SamplingParams` accepts it; raise their error with the flag's name."""
    place, _, name = target.partition(".")
    try:
        if place == "sampling" and name in FIELDS:
            SamplingParams(**{name: value})
        elif place == "engine" and name in CONFIG_NAMES:
            EngineConfig(**{"isolation": "process", name: value})
    except InvalidParams as error:
        raise InvalidParams(str(error).replace(name, label, 1)) from None
    return value


def of_file(target: Setter | str) -> Setter:
    """Return a setter that takes a file and stores its text, with another setter or in a setting."""

    def store(draft: Draft, value: Path, label: str) -> None:
        text = draft.text_of(value, label)
        if isinstance(target, str):
            draft.put(target, text, label)
        else:
            target(draft, text, label)

    return store


def context_size(draft: Draft, value: int, label: str) -> None:
    """Store n_ctx; 0 stands for the model's own, which is read when the model is known."""
    draft.put("engine.n_ctx", UNSET if value == 0 else value, label)
    draft.put("aside.as_trained", value == 0, label)


def slots(draft: Draft, value: Any, label: str) -> None:
    """Store num_slots; below 0 is automatic, 0 an error."""
    if value == 0:
        raise InvalidParams(f"{label} must be at least 1, or -1 for automatic, not 0")
    draft.put("engine.num_slots", UNSET if value < 0 else value, label)


def load_mode(on: Mapping[str, str], off: Mapping[str, str]) -> Setter:
    """Return a setter of a switch that changes the load mode. on, off: the new mode by the mode so far, "auto" by default."""

    def store(draft: Draft, value: bool, label: str) -> None:
        mode = draft.get("engine.load_mode", "auto")
        if mode == "direct_io":
            raise InvalidParams(
                f"{label} does not go with --load-mode dio, which reads past the page cache; leave one of them out"
            )
        modes = on if value else off
        draft.put("engine.load_mode", modes.get(mode, modes.get("auto", mode)), label)

    return store


mlock: Final = load_mode(
    {"none": "mlock", "mlock": "mlock", "auto": "mmap_mlock"}, {"mlock": "none", "mmap_mlock": "mmap"}
)
mmap: Final = load_mode(
    {"mlock": "mmap_mlock", "mmap_mlock": "mmap_mlock", "auto": "mmap"},
    {"mlock": "mlock", "mmap_mlock": "mlock", "auto": "none"},
)


def adapters(target: str) -> Setter:
    """Return a setter that adds adapters, each a pair with a path. They are named when all are known."""

    def store(draft: Draft, value: Sequence[tuple[Any, Any]], label: str) -> None:
        for path in (part for adapter in value for part in adapter if isinstance(part, Path)):
            draft.check_file(path, label)
        draft.put(target, (*draft.get(target, ()), *value), label)

    return store


def model(draft: Draft, value: Path | ModelReference, label: str) -> None:
    """Store the model's path, which is looked for when all flags are known, or its name."""
    draft.put("aside.model_path" if isinstance(value, Path) else "aside.model_name", value, label)


def in_folder(target: str, *, of_file: bool = False, kind: type[str | Path] = Path) -> Setter:
    """Return a setter that stores the path of a folder, or of a file in a folder, which must exist."""

    def store(draft: Draft, value: Path, label: str) -> None:
        folder = value.parent if of_file else value
        if not draft.files.is_folder(folder):
            raise InvalidParams(f"{label}: there is no folder {on_one_line(folder)}; make it first")
        draft.put(target, kind(value), label)

    return store


def named(name: str, check: Callable[[Any], object]) -> Setter:
    """Return a setter of an engine's option that names an object, after a check that imports no module of the user's."""

    def store(draft: Draft, value: Any, label: str) -> None:
        try:
            check(value)
        except InvalidParams as error:
            raise InvalidParams(str(error).replace(name, label, 1)) from None
        draft.put(f"engine.{name}", value, label)

    return store


def instead_of(other: str, target: str) -> Setter:
    """Return a setter that stores a constraint in place of another one: the last one counts."""

    def store(draft: Draft, value: str, label: str) -> None:
        draft.drop(other)
        draft.put(target, value, label)

    return store


def template_variables(draft: Draft, value: Mapping[str, Any], label: str) -> None:
    """Add variables for the template."""
    draft.put("server.chat_template_kwargs", {**draft.get("server.chat_template_kwargs", {}), **value}, label)


def template_variable(name: str, unset: object = None, values: Mapping[str, object] | None = None) -> Setter:
    """Return a setter that adds a variable for the template, by `values` if it is in there, unless the value is `unset`."""
    known = values or {}

    def store(draft: Draft, value: Any, label: str) -> None:
        if value != unset:
            template_variables(draft, {name: known.get(value, value)}, label)

    return store


def temperature(draft: Draft, value: float, label: str) -> None:
    """Store the temperature; below 0 counts as 0, which is greedy, with a note."""
    if value < 0:
        draft.notes.append(f"{label} {value:g} counts as 0, which is greedy")
    draft.put("sampling.temperature", max(value, 0.0), label)


def sequence_breakers(draft: Draft, value: Sequence[str], label: str) -> None:
    """Store the texts after the last "none". Escapes are resolved at the end."""
    last = max((index for index, text in enumerate(value) if text == "none"), default=-1)
    draft.put("sampling.dry_sequence_breakers", tuple(value[last + 1 :]), label)


def api_keys(draft: Draft, value: Sequence[str], label: str) -> None:
    """Add keys."""
    _add_keys(draft, [ApiKey(secret=secret) for secret in value], label)


def api_key_file(draft: Draft, value: Path, label: str) -> None:
    """Add the keys of a file, one a line; lines that begin with # are comments."""
    found = [ApiKey(secret=line) for line in _lines(draft.text_of(value, label))]
    _add_keys(draft, _some(found, label, value), label)


def tenant_key_file(draft: Draft, value: Path, label: str) -> None:
    """Add the keys of a file: TENANT:KEY a line, lines that begin with # are comments; of NAME.toml a table for each key."""
    if value.suffix.lower() == ".toml":
        _add_keys(draft, _some(_keys_of_toml(draft.text_of(value, label), label, value), label, value), label)
        return
    found = []
    for number, line in enumerate(_lines(draft.text_of(value, label)), start=1):
        tenant, _, secret = line.partition(":")
        if not tenant.strip() or not secret.strip():
            raise InvalidParams(f"{label}: key {number} of {on_one_line(value)} is not TENANT:KEY")
        found.append(ApiKey(secret=secret.strip(), tenant=tenant.strip()))
    _add_keys(draft, _some(found, label, value), label)


_Limit = Annotated[int, Meta(ge=1, le=10**15)]


class _KeyTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of a key file, with the fields of `ApiKey`."""

    key: str
    tenant: str = ""
    name: str = ""
    weight: Annotated[float, Meta(ge=MIN_WEIGHT, le=MAX_WEIGHT)] = 1.0
    tokens_per_minute: _Limit | None = None
    max_requests: _Limit | None = None
    tokens_per_day: _Limit | None = None


class _KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: list[_KeyTable] = []


def _keys_of_toml(text: str, label: str, path: Path) -> list[ApiKey]:
    try:
        content = tomllib.loads(text.removeprefix("\ufeff"))
    except (ValueError, RecursionError):  # the message may quote a key
        raise InvalidParams(f"{label}: {on_one_line(path)} is not valid TOML") from None
    try:
        tables = msgspec.convert(content, _KeyFile).keys
    except msgspec.ValidationError as error:
        raise InvalidParams(f"{label}: {on_one_line(path)}: {_problem_of_key(str(error), content)}") from None
    fields = [msgspec.structs.asdict(table) for table in tables]
    return [ApiKey(secret=table.pop("key").strip(), tenant=table.pop("tenant").strip(), **table) for table in fields]


_AT_KEY: Final = re.compile(r"(.*) - at `\$\.keys\[(\d+)\](?:\.(\w+))?`", re.DOTALL)


def _problem_of_key(problem: str, content: Mapping[str, Any]) -> str:
    """Return an error of msgspec with the number of the key, the field and its value, and with the fields that there are."""
    if found := _AT_KEY.fullmatch(problem):
        text, index, field = found.groups()
        value = f": {field} = {content['keys'][int(index)][field]!r:.80}" if field not in (None, "key") else ""
        problem = f"key {int(index) + 1}{value}: {text}"
    names = ", ".join(_KeyTable.__struct_fields__)
    return f"{problem}; give each key a table [[keys]] with {names}, of which key alone is required"


def _lines(text: str) -> list[str]:
    lines = (line.strip() for line in text.removeprefix("\ufeff").split("\n"))
    return [line for line in lines if line and not line.startswith("#")]


def _some(keys: list[ApiKey], label: str, path: Path) -> list[ApiKey]:
    if not keys:
        raise InvalidParams(
            f"{label}: {on_one_line(path)} has no key, so the server would be open; leave the flag out for that"
        )
    return keys


def _add_keys(draft: Draft, keys: Sequence[ApiKey], label: str) -> None:
    known: dict[str, ApiKey] = {key.secret: key for key in draft.get("server.api_keys", ())}
    for number, key in enumerate(keys, start=1):
        if not key.secret:
            raise InvalidParams(f"{label}: key {number} is empty; give it characters, or leave it out")
        if not key.secret.isascii() or not key.secret.isprintable():
            raise InvalidParams(f"{label}: a key has characters that no HTTP header carries; use plain ASCII")
        if not (key.tenant + key.name).isprintable():
            raise InvalidParams(f"{label}: tenant or name of key {number} has characters that cannot be printed")
        other = known.setdefault(key.secret, key)
        if other.tenant != key.tenant:
            raise InvalidParams(f"{label}: a key belongs to two tenants, {other.tenant!r} and {key.tenant!r}")
        if other != key:
            raise InvalidParams(
                f"{label}: a key of tenant {key.tenant!r} is given twice, with different names or limits"
            )
    weights = {key.tenant: key.weight for key in known.values()}
    for key in known.values():
        if key.weight != weights[key.tenant]:
            raise InvalidParams(
                f"{label}: keys of tenant {key.tenant!r} have different weights; a tenant has one weight"
            )
    merged = tuple(known.values())
    shown = Counter(key.shown_name(number) for number, key in enumerate(merged, start=1))
    for name, num in shown.items():
        if num > 1:
            raise InvalidParams(f"{label}: {num} keys have the name {name!r}; give each a name of its own")
    draft.put("server.api_keys", merged, label)


# ---- kinds of drafts


@dataclass(frozen=True, slots=True)
class SpecType:
    """A kind of drafts.

    Attributes:
        drafter: The drafter's name here.
        sizes: For each of its options the name of the flag, without `--spec-`, and llama-server's default.
    """

    drafter: str
    sizes: Mapping[str, tuple[str, int]]

    def aside(self, option: str) -> str:
        """Return the target of a given size."""
        return f"aside.{self.sizes[option][0].replace('-', '_')}"


def _lookup(kind: str) -> SpecType:
    sizes = {"size_n": ("size-n", 12), "size_m": ("size-m", 48), "min_hits": ("min-hits", 1)}
    return SpecType("ngram", {option: (f"{kind}-{name}", default) for option, (name, default) in sizes.items()})


SPEC_TYPES: Final[Mapping[str, SpecType]] = {
    "ngram-simple": _lookup("ngram-simple"),
    "ngram-map-k": _lookup("ngram-map-k"),
    "draft-simple": SpecType(DRAFT_MODEL, {}),
    "draft-mtp": SpecType("mtp", {}),
    "draft-eagle3": SpecType("eagle3", {}),
    "draft-dflash": SpecType("dflash", {}),
    "draft-dspark": SpecType("dflash", {}),
}
"""In the order in which they are asked: llama-server's, and a draft model last, as it costs most."""

HEADS: Final = ("draft-mtp", "draft-eagle3", "draft-dflash", "draft-dspark")
"""Of these the kinds that draft with heads, for which -md names their file."""

OTHERS: Final = ("ngram-map-k4v",)
"""What else it has, which is refused."""

SHARED_NGRAMS: Final = ("ngram-mod", "ngram-cache")
"""Its kinds that learn n-grams of all requests, which are refused as well."""


def spec_type(draft: Draft, value: str, label: str) -> None:
    """Store kinds of drafts, apart by commas. Raises for a name that is none."""
    names = [name.strip() for name in value.split(",")]
    for name in names:
        validation.choice(label, name, ("none", *SPEC_TYPES))
    draft.put("aside.spec_type", UNSET if "none" in names else tuple(names), label)


def spec_default(draft: Draft, value: bool, label: str) -> None:
    """Add prompt lookup, which stands here for the kind that llama-server calls its default, to the other kinds."""
    if value:
        draft.put("aside.spec_type", (*(draft.get("aside.spec_type") or ()), "ngram-simple"), label)


def spec_type_names(speculation: Any) -> str:
    """Return the kinds of drafts of the option `speculation`, separated by commas, by llama-server's names if it has them."""
    if speculation is None:
        return "none"
    names = spec_names(speculation)
    known = {kind.drafter: name for name, kind in reversed(list(SPEC_TYPES.items()))}
    return ",".join(known.get(name, name) for name in names)


def spec_names(speculation: Any) -> list[str]:
    """Return the names of the drafters of the option `speculation`."""
    return [
        NamedObject.parse("speculation", drafter).name
        if isinstance(drafter, (str, Mapping))
        else type(drafter).__name__
        for drafter in drafter_parts(speculation)
    ]
