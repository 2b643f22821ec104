"""Names of models (repositories of the Hugging Face Hub, web addresses, Ollama's names), and the settings of the caches.

    hf:USER/REPO[@REVISION][:QUANT]     a quantisation of a repository, by default as llama.cpp chooses
    hf:USER/REPO[@REVISION]/FILE.gguf   one file of it
    https://HOST/FILE.gguf              a file on the web; those of the hub become hf: references
    ollama:NAME[:TAG]                   a model that Ollama has downloaded

Settings come from the environment variables of huggingface_hub, llama.cpp and Ollama, and are read at each call.
Standard library only.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from paceline import validation
from paceline.errors import InvalidParams, ModelFileNotFound

HUB_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")

_PART = r"[A-Za-z0-9_](?:[\w.-]{0,94}[A-Za-z0-9_])?"
_REPO = re.compile(rf"{_PART}/{_PART}", re.ASCII)
_HUB_NAME = re.compile(
    r"(?P<repo>[^/@:]+/[^/@:]+)(?:@(?P<revision>[^:]+?))?(?:/(?P<file>[^:]+\.gguf)|:(?P<quant>[^/:]+))?", re.ASCII
)
_REVISION = re.compile(r"[\w.-]+(?:/[\w.-]+)*", re.ASCII)
_OLLAMA_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?::[\w.-]+)?", re.ASCII)
_QUANT = re.compile(r"[\w.-]+", re.ASCII)
_MAX_DEPTH = 16  # folders of a repository within each other, with the file
_MAX_NAME_BYTES = 200  # file systems take 255, and a download adds a suffix
_SCHEMES = ("hf:", "http://", "https://", "ollama:")
_FORMS = (
    "write hf:USER/REPO, hf:USER/REPO:QUANT or hf:USER/REPO/FILE.gguf, such as hf:ggml-org/gemma-3-1b-it-GGUF:Q4_K_M"
)


@dataclass(frozen=True, slots=True)
class HubReference:
    """A model in a repository of the hub.

    Attributes:
        repo: USER/REPO.
        quantisation: As in file names, "Q4_K_M"; None chooses.
        file: The file to load, whatever its quantisation.
        revision: A branch, a tag or a commit; None is main.
    """

    repo: str
    quantisation: str | None = None
    file: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        text = self.repo if self.revision is None else f"{self.repo}@{self.revision}"
        if self.file is not None:
            return f"{text}/{self.file}"
        return text if self.quantisation is None else f"{text}:{self.quantisation}"


@dataclass(frozen=True, slots=True)
class UrlReference:
    """A GGUF file on the web, or any part of a split set."""

    url: str

    def __str__(self) -> str:
        return without_secrets(self.url)

    @property
    def file_name(self) -> str:
        """The last part of the path."""
        return unquote(urlsplit(self.url).path.rpartition("/")[2])


@dataclass(frozen=True, slots=True)
class OllamaReference:
    """A model of Ollama with its name, "llama3.2:1b"."""

    name: str

    def __str__(self) -> str:
        return f"ollama:{self.name}"


ModelReference = HubReference | UrlReference | OllamaReference


def is_reference(model: object) -> bool:
    """Return whether a text names a model by hf:, http(s): or ollama: and is no path."""
    return isinstance(model, str) and model.lower().startswith(_SCHEMES)


def parse_reference(text: str, *, name: str = "model") -> ModelReference:
    """Parse a reference with a scheme. name: of the option, for messages. Raises `InvalidParams`."""
    scheme, _, rest = validation.text(name, text).partition(":")
    match scheme.lower():
        case "hf":
            return parse_hub_reference(rest.removeprefix("//"), name=name)
        case "http" | "https":
            return _parse_url(text, name)
        case "ollama":
            if not rest:
                raise InvalidParams(f"{name} {text!r} names no model; write it as ollama:llama3.2")
            return OllamaReference(rest)
        case _:
            raise InvalidParams(f"{name} {text!r} is not the name of a model: {_FORMS}")


def parse_hub_reference(text: str, *, name: str = "model") -> HubReference:
    """Parse USER/REPO[@REVISION][:QUANT] or USER/REPO[@REVISION]/FILE.gguf. Raises `InvalidParams`."""
    text = validation.text(name, text).removeprefix("hf:")
    match = _HUB_NAME.fullmatch(text)
    if match is None or _REPO.fullmatch(match["repo"]) is None or ".." in text or "--" in match["repo"]:
        registry = (
            f"; a model of Ollama's registry is downloaded by `ollama pull {text}`, and named ollama:{text}"
            if _OLLAMA_NAME.fullmatch(text)
            else ""
        )
        raise InvalidParams(
            f"{name} {text!r} is not the name of a repository of the Hugging Face Hub: {_FORMS}{registry}"
        )
    revision, file, quant = match["revision"], match["file"], match["quant"]
    if quant is not None and _QUANT.fullmatch(quant) is None:
        raise InvalidParams(
            f"{name} {text!r}: {quant!r} is not a quantisation; write one such as Q4_K_M, or leave it out"
        )
    if revision is not None and _REVISION.fullmatch(revision) is None:
        raise InvalidParams(f"{name} {text!r}: {revision!r} is not a branch, tag or commit")
    return HubReference(match["repo"], quant, check_file(file, name), revision)


def check_is_path(model: object) -> None:
    """Raise `ModelFileNotFound` if there is no such file but the path looks like a model of the hub or of Ollama."""
    if not isinstance(model, str) or model.endswith(".gguf"):
        return
    if not model:
        raise InvalidParams(
            "the name of a model is empty; give a path or a name, or leave it out (LLM() loads the demo model)"
        )
    path = validation.path("model", model)
    if path.exists():
        return
    similar, match = validation.similar_files(path), _HUB_NAME.fullmatch(model)
    if match is not None and _REPO.fullmatch(match["repo"]) is not None:
        if "did you mean" not in similar:
            similar = f"; a model of the Hugging Face Hub is named hf:{model}"
    elif _OLLAMA_NAME.fullmatch(model) is not None:
        separator = "" if not similar else similar + " A"
        similar = f"{separator or '; a'} model of Ollama is named ollama:{model}, a model of the Hugging Face Hub hf:USER/REPO"
    else:
        return
    raise ModelFileNotFound(f"there is no file {model}{similar}", str(path))


def check_file(file: str | None, name: str) -> str | None:
    """Return the path of a file in a repository; raise `InvalidParams` if it leads out of the repository."""
    if file is not None and not is_repository_path(file):
        raise InvalidParams(f"{name}: {file!r} is not the path of a file in a repository")
    return file


def is_repository_path(file: str) -> bool:
    """Return whether a path stays within its repository and a file system can hold it."""
    try:
        parts = file.encode().split(b"/")
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return len(parts) <= _MAX_DEPTH and not any(
        part in (b"", b".", b"..") or b"\0" in part or len(part) > _MAX_NAME_BYTES for part in parts
    )


def visible(text: str) -> str:
    """Return a text for messages, with question marks for control characters, since these could drive a terminal."""
    return "".join(each if each.isprintable() else "?" for each in text)


def without_secrets(url: str) -> str:
    """Return a URL without user, password, query and fragment, for messages."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _parse_url(url: str, name: str) -> HubReference | UrlReference:
    try:
        parts = urlsplit(url)
        host = parts.hostname
        _ = parts.port  # raises if the port is no number
    except ValueError as error:
        raise InvalidParams(f"{name} is not a valid URL: {error}") from None
    if not host:
        raise InvalidParams(f"{name} {without_secrets(url)!r} has no host")
    if host.lower() in HUB_HOSTS:
        return _of_hub_page(parts.path, name)
    found = UrlReference(url)
    if not found.file_name:
        raise InvalidParams(f"{name} {found} names no file; give the URL of a GGUF file")
    return found


def _of_hub_page(path: str, name: str) -> HubReference:
    """Parse the path of a page of the hub, which shows a repository or a file in it."""
    user, _, rest = unquote(path).strip("/").partition("/")
    repo, _, rest = rest.partition("/")
    kind, _, rest = rest.partition("/")
    revision, _, file = rest.partition("/")
    base = parse_hub_reference(f"{user}/{repo}", name=name)
    if kind not in ("blob", "resolve", "tree", "raw") or not revision:
        return base
    if kind == "tree" or not file:
        return HubReference(base.repo, revision=revision)
    return HubReference(base.repo, file=check_file(file, name), revision=revision)


_TRUE = frozenset({"1", "on", "yes", "true"})
_ENDPOINT = "https://huggingface.co"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSettings:
    """The settings of look-ups and downloads.

    Attributes:
        cache: huggingface_hub's folder of repositories, the target of downloads.
        endpoint: The address of the hub, without a slash at the end.
        token: The given token, or HF_TOKEN; None leaves it to huggingface_hub, which knows logins.
        offline: Whether nothing is requested from the network.
        url_cache: The folder for files from other addresses.
        llama_cache: llama.cpp's folder.
        ollama: Ollama's folder.
    """

    cache: Path
    endpoint: str = _ENDPOINT
    token: str | None = None
    offline: bool = False
    url_cache: Path
    llama_cache: Path
    ollama: Path

    @property
    def repository_caches(self) -> tuple[Path, ...]:
        """The folders with huggingface_hub's layout of repositories: its own, and llama.cpp's if that is another."""
        return tuple(dict.fromkeys((self.cache, self.llama_cache)))


def hub_settings(*, token: str | None = None, offline: bool = False) -> HubSettings:
    """Return the settings. Arguments take precedence over the environment. Raises `InvalidType` for a wrong type."""
    given = None if token is None else validation.text("hf_token", token)
    is_offline = validation.boolean("offline", offline)
    env = os.environ
    home = Path(env.get("HOME") or Path.home())
    caches = _folder(env, "XDG_CACHE_HOME") or home / ".cache"
    hugging_face = _folder(env, "HF_HOME") or caches / "huggingface"
    cache = _folder(env, "HF_HUB_CACHE") or _folder(env, "HUGGINGFACE_HUB_CACHE") or hugging_face / "hub"
    system_caches = home / "Library" / "Caches" if sys.platform == "darwin" else caches
    return HubSettings(
        cache=cache,
        endpoint=(env.get("HF_ENDPOINT") or env.get("MODEL_ENDPOINT") or _ENDPOINT).rstrip("/"),
        token=given or env.get("HF_TOKEN") or env.get("HUGGING_FACE_HUB_TOKEN") or None,
        offline=is_offline or is_on("HF_HUB_OFFLINE") or is_on("TRANSFORMERS_OFFLINE"),
        url_cache=caches / "paceline" / "models",
        llama_cache=_folder(env, "LLAMA_CACHE") or system_caches / "llama.cpp",
        ollama=_folder(env, "OLLAMA_MODELS") or home / ".ollama" / "models",
    )


def is_on(name: str) -> bool:
    """Return whether an environment variable is set to 1, on, yes or true."""
    return os.environ.get(name, "").lower() in _TRUE


def _folder(env: Mapping[str, str], name: str) -> Path | None:
    value = env.get(name)
    return Path(os.path.expandvars(value)).expanduser() if value else None
