"""What the flags do that set more than one value, or another one than was given. Called while a draft is made; pure."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.errors import InvalidParams
from paceline.server.flags.draft import Draft
from paceline.server.flags.reading import UNSET, on_one_line
from paceline.server.settings import ApiKey

MIB = 1 << 20
NO_LIMIT = sys.maxsize
_HOST = re.compile(r"(?:\*\.)?[\w-]+(?:\.[\w-]+)*\.?", re.ASCII)
NAMED_TEMPLATES = frozenset({"chatml"})  # those that have names here; llama-server has more


def context_size(draft: Draft, value: int, label: str) -> None:
    """0 stands for the model's own, which is looked up when the model is known."""
    draft.put("engine.n_ctx", UNSET if value == 0 else value, label)
    draft.put("aside.as_trained", value == 0, label)


def slots(draft: Draft, value: Any, label: str) -> None:
    """Anything below 0 is automatic; 0 has no meaning."""
    if value == 0:
        raise InvalidParams(f"{label} must be at least 1, or -1 for automatic, not 0")
    draft.put("engine.num_slots", UNSET if value < 0 else value, label)


def gpu_layers(draft: Draft, value: Any, label: str) -> None:
    """llama-server's -1 is automatic and everything below all layers; ours is -1 for all."""
    draft.put(
        "engine.n_gpu_layers", UNSET if value in ("auto", -1) else -1 if value == "all" or value < 0 else value, label
    )


def devices(draft: Draft, value: Sequence[str], label: str) -> None:
    """none: the CPU alone."""
    draft.put("engine.devices", ["CPU"] if tuple(value) == ("none",) else list(value), label)


def overrides(draft: Draft, value: Sequence[tuple[str, Any]], label: str) -> None:
    """Pairs become a mapping."""
    draft.put("engine.kv_overrides", dict(value), label)


def cache_ram(draft: Draft, value: int, label: str) -> None:
    """MiB to bytes; -1: no limit."""
    draft.put("engine.host_cache_bytes", NO_LIMIT if value < 0 else value * MIB, label)


def rope_scale(draft: Draft, value: float, label: str) -> None:
    """A factor of the context is the inverse of one of the frequencies."""
    draft.put("engine.rope_freq_scale", 1 / value, label)


def adapters(draft: Draft, value: Sequence[Path], label: str) -> None:
    """Adapters that apply as they are."""
    scaled_adapters(draft, [(path, 1.0) for path in value], label)


def scaled_adapters(draft: Draft, value: Sequence[tuple[Path, float]], label: str) -> None:
    """Adds adapters; their names are made when all are known."""
    for path, _ in value:
        if not draft.files.is_file(path):
            raise InvalidParams(f"{label}: there is no file {on_one_line(path)}")
    draft.put("aside.adapters", (*draft.get("aside.adapters", ()), *value), label)


def model(draft: Draft, value: Path, label: str) -> None:
    """A file that is there."""
    if not draft.files.is_file(value):
        raise InvalidParams(f"{label}: there is no file {on_one_line(value)}")
    draft.put("server.model", value, label)


def state_folder(draft: Draft, value: Path, label: str) -> None:
    """A folder that is there; slots are saved in it as the engine's prefixes."""
    if not draft.files.is_folder(value):
        raise InvalidParams(f"{label}: there is no folder {on_one_line(value)}; make it first")
    draft.put("engine.state_folder", str(value), label)


def max_tokens(draft: Draft, value: int, label: str) -> None:
    """Below 0: until the context is full."""
    draft.put("sampling.max_tokens", None if value < 0 else value, label)


def temperature(draft: Draft, value: float, label: str) -> None:
    """Below 0 counts as 0, which is greedy."""
    if value < 0:
        draft.notes.append(f"{label} {value:g} counts as 0, which is greedy")
    draft.put("sampling.temperature", max(value, 0.0), label)


def top_k(draft: Draft, value: int, label: str) -> None:
    """Everything below 1 is off."""
    draft.put("sampling.top_k", max(value, 0), label)


def seed(draft: Draft, value: int, label: str) -> None:
    """-1, and its 32 bits, are a fresh one for every request."""
    draft.put("sampling.seed", None if value in (-1, 2**32 - 1) else value, label)


def grammar(draft: Draft, value: str, label: str) -> None:
    """The last of grammar and schema counts."""
    draft.drop("sampling.json_schema")
    draft.put("sampling.grammar", value, label)


def grammar_file(draft: Draft, value: Path, label: str) -> None:
    """A grammar in a file."""
    grammar(draft, draft.text_of(value, label), label)


def json_schema(draft: Draft, value: str, label: str) -> None:
    """The last of grammar and schema counts."""
    draft.drop("sampling.grammar")
    draft.put("sampling.json_schema", value, label)


def json_schema_file(draft: Draft, value: Path, label: str) -> None:
    """A schema in a file."""
    json_schema(draft, draft.text_of(value, label), label)


def logit_bias(draft: Draft, value: Sequence[tuple[int, float]], label: str) -> None:
    """Pairs become a mapping."""
    draft.put("sampling.logit_bias", dict(value), label)


def sequence_breakers(draft: Draft, value: Sequence[str], label: str) -> None:
    """Those after the last "none"; escapes are read when it is known whether they are to be."""
    last = max((index for index, text in enumerate(value) if text == "none"), default=-1)
    draft.put("sampling.dry_sequence_breakers", tuple(value[last + 1 :]), label)


def chat_template(draft: Draft, value: str, label: str) -> None:
    """Jinja source, or a name. Most of llama-server's names are not known here, and none of them is Jinja."""
    if "{" not in value and value not in NAMED_TEMPLATES:
        raise InvalidParams(
            f"{label} must be chatml or the text of a Jinja template, not {value!r:.80}; other names of templates are not "
            "supported yet: give the text, or its file to --chat-template-file, or leave it out for the model's own"
        )
    draft.put("server.chat_template", value, label)


def chat_template_file(draft: Draft, value: Path, label: str) -> None:
    """A template in a file."""
    draft.put("server.chat_template", draft.text_of(value, label), label)


def template_variables(draft: Draft, value: dict[str, Any], label: str) -> None:
    """Adds variables for the template."""
    draft.put("server.chat_template_kwargs", {**draft.get("server.chat_template_kwargs", {}), **value}, label)


def reasoning(draft: Draft, value: str, label: str) -> None:
    """A variable that templates of reasoning models ask for; auto leaves it to them."""
    if value != "auto":
        template_variables(draft, {"enable_thinking": value == "on"}, label)


def reasoning_effort(draft: Draft, value: str, label: str) -> None:
    """A variable that templates of reasoning models ask for; default leaves it to them."""
    if value != "default":
        template_variables(draft, {"reasoning_effort": value}, label)


def reasoning_preserve(draft: Draft, value: bool, label: str) -> None:
    """A variable that templates of reasoning models ask for."""
    template_variables(draft, {"preserve_reasoning": value}, label)


def host(draft: Draft, value: Sequence[str], label: str) -> None:
    """One address. A list of them and sockets of the file system are not built."""
    if len(value) > 1:
        raise InvalidParams(
            f"{label}: several addresses are not supported yet; give one, or 0.0.0.0 or :: for all of this machine"
        )
    if value[0].endswith(".sock"):
        raise InvalidParams(f"{label}: sockets of the file system are not supported yet; give an IP address")
    draft.put("server.host", value[0], label)


def root_path(draft: Draft, value: str, label: str) -> None:
    """A prefix of all routes: /word/word, without a slash at its end."""
    trimmed = value.rstrip("/")
    if trimmed and (not trimmed.startswith("/") or not trimmed.isprintable() or set(trimmed) & set(" ?#%{}\\")):
        raise InvalidParams(f"{label} must begin with a slash and be a plain path, such as /llm, not {value!r:.80}")
    draft.put("server.root_path", trimmed, label)


def api_keys(draft: Draft, value: Sequence[str], label: str) -> None:
    """Adds keys."""
    _add_keys(draft, [ApiKey(secret=secret) for secret in value], label)


def api_key_file(draft: Draft, value: Path, label: str) -> None:
    """Adds the keys of a file, one a line; lines that begin with # are comments."""
    found = [ApiKey(secret=line) for line in _lines(draft.text_of(value, label))]
    _add_keys(draft, _some(found, label, value), label)


def tenant_key_file(draft: Draft, value: Path, label: str) -> None:
    """Adds the keys of a file, TENANT:KEY a line; lines that begin with # are comments."""
    found = []
    for number, line in enumerate(_lines(draft.text_of(value, label)), start=1):
        tenant, _, secret = line.partition(":")
        if not tenant.strip() or not secret.strip():
            raise InvalidParams(f"{label}: key {number} of {on_one_line(value)} is not TENANT:KEY")
        found.append(ApiKey(secret=secret.strip(), tenant=tenant.strip()))
    _add_keys(draft, _some(found, label, value), label)


def allowed_hosts(draft: Draft, value: Sequence[str], label: str) -> None:
    """Names without scheme and port, *.name for all below one, or * for any."""
    for name in value:
        if name != "*" and not _HOST.fullmatch(name):
            raise InvalidParams(
                f"{label} must be names such as llm.example.org or *.example.org, without scheme and port, between commas, "
                f"or *, not {name!r:.80}"
            )
    draft.put("server.allowed_hosts", tuple(value), label)


def cors_origins(draft: Draft, value: Sequence[str], label: str) -> None:
    """Whole origins, or * for all. llama-server's word localhost stands for ports that are not known."""
    for origin in value:
        if origin != "*" and not origin.startswith(("http://", "https://")):
            raise InvalidParams(
                f"{label} must be origins such as http://localhost:3000, between commas, or *, not {origin!r:.80}"
            )
    draft.put("server.cors_origins", tuple(origin.rstrip("/") for origin in value), label)


def heartbeat(draft: Draft, value: float, label: str) -> None:
    """-1: none, which is a wait without an end."""
    if value <= 0 and value != -1:
        raise InvalidParams(f"{label} must be a number of seconds > 0, or -1 for none, not {value:g}")
    draft.put("server.heartbeat_s", math.inf if value == -1 else float(value), label)


def verbosity(draft: Draft, value: int, label: str) -> None:
    """llama-server's numbers: 1 errors, 2 warnings, 3 information, more for everything."""
    levels = ("error", "error", "warning", "info")
    draft.put("server.log_level", "debug" if value >= len(levels) else levels[max(value, 0)], label)


def verbose(draft: Draft, value: bool, label: str) -> None:
    """Everything."""
    draft.put("server.log_level", "debug" if value else UNSET, label)


def no_log(draft: Draft, value: bool, label: str) -> None:
    """Nothing."""
    draft.put("server.log_level", "off" if value else UNSET, label)


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
    known = {key.secret: key.tenant for key in draft.get("server.api_keys", ())}
    for key in keys:
        if not key.secret.isascii() or not key.secret.isprintable():
            raise InvalidParams(f"{label}: a key has characters that no HTTP header carries; use plain ASCII")
        if known.setdefault(key.secret, key.tenant) != key.tenant:
            raise InvalidParams(f"{label}: a key belongs to two tenants, {known[key.secret]!r} and {key.tenant!r}")
    merged = tuple(ApiKey(secret=secret, tenant=tenant) for secret, tenant in known.items())
    draft.put("server.api_keys", merged, label)
