"""Where models are looked for and kept, from the environment variables that huggingface_hub, llama.cpp and Ollama read.

They are read at each call, and huggingface_hub is not imported: what is in the caches is found without it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline import validation

_TRUE = frozenset({"1", "on", "yes", "true"})
_ENDPOINT = "https://huggingface.co"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSettings:
    """What a look-up or a download uses.

    cache: huggingface_hub's folder of repositories, where downloads go. endpoint: of the hub, without a slash at the end.
    token: given or of HF_TOKEN; None leaves it to huggingface_hub, which knows logins. offline: nothing is requested from the
    network. url_cache: files from other addresses. llama_cache: llama.cpp's folder. ollama: Ollama's.
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
        """Folders with repositories as huggingface_hub lays them out: its own, and llama.cpp's where that is elsewhere."""
        return tuple(dict.fromkeys((self.cache, self.llama_cache)))


def hub_settings(*, token: str | None = None, offline: bool = False) -> HubSettings:
    """Return the settings; what is given goes before the environment. Raises `InvalidType` for a wrong type."""
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
    """Return whether a variable that switches something is set to a word for on."""
    return os.environ.get(name, "").lower() in _TRUE


def _folder(env: Mapping[str, str], name: str) -> Path | None:
    value = env.get(name)
    return Path(os.path.expandvars(value)).expanduser() if value else None
