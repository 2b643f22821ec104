"""Store values of flags that set more than one setting, or another value than the one given. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from paceline.errors import InvalidParams
from paceline.hub import ModelReference
from paceline.scheduling.strategies import check_strategy_name
from paceline.server.flags.flag import UNSET, Draft, Setter, on_one_line
from paceline.server.settings import ApiKey
from paceline.speculation.named_drafter import check_drafter_name

_HOST = re.compile(r"(?:\*\.)?[\w-]+(?:\.[\w-]+)*\.?", re.ASCII)
_ORIGIN = re.compile(r"https?://(?:[\w.-]+|\[[0-9a-fA-F:.]+\])(?::[0-9]{1,5})?/?", re.ASCII)
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_COMMAND_R_ROLES = "{'system': 'SYSTEM', 'user': 'USER', 'assistant': 'CHATBOT'}"
NAMED_TEMPLATES: Final = {  # of llama-server's built-in names
    "chatml": "chatml",  # llama.cpp's own
    "llama3": (
        "{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' "
        "+ message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "command-r": (
        f"{{% set roles = {_COMMAND_R_ROLES} %}}{{% for message in messages if message['role'] in roles %}}"
        "{{ '<|START_OF_TURN_TOKEN|><|' + roles[message['role']] + '_TOKEN|>' + message['content'] | trim "
        "+ '<|END_OF_TURN_TOKEN|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"
    ),
}


def of_file(setter: Setter) -> Setter:
    """Return a setter that takes a file and stores its text with another setter."""
    return lambda draft, value, label: setter(draft, draft.text_of(value, label), label)


def context_size(draft: Draft, value: int, label: str) -> None:
    """Store n_ctx; 0 stands for the model's own, which is read when the model is known."""
    draft.put("engine.n_ctx", UNSET if value == 0 else value, label)
    draft.put("aside.as_trained", value == 0, label)


def slots(draft: Draft, value: Any, label: str) -> None:
    """Store num_slots; below 0 is automatic, 0 an error."""
    if value == 0:
        raise InvalidParams(f"{label} must be at least 1, or -1 for automatic, not 0")
    draft.put("engine.num_slots", UNSET if value < 0 else value, label)


def mlock(draft: Draft, value: bool, label: str) -> None:
    """Store the load mode with the weights locked, and mapped unless --no-mmap was given."""
    mode = draft.get("engine.load_mode", "auto")
    _check_not_direct(mode, label)
    locked = {"none": "mlock", "mlock": "mlock"}.get(mode, "mmap_mlock")
    unlocked = {"mlock": "none", "mmap_mlock": "mmap"}.get(mode, mode)
    draft.put("engine.load_mode", locked if value else unlocked, label)


def mmap(draft: Draft, value: bool, label: str) -> None:
    """Store the load mode with the file mapped or not; the weights stay locked or not."""
    mode = draft.get("engine.load_mode", "auto")
    _check_not_direct(mode, label)
    is_locked = mode in ("mlock", "mmap_mlock")
    draft.put(
        "engine.load_mode", ("mmap_mlock" if value else "mlock") if is_locked else "mmap" if value else "none", label
    )


def _check_not_direct(mode: str, label: str) -> None:
    if mode == "direct_io":
        raise InvalidParams(
            f"{label} does not go with --load-mode dio, which reads past the page cache; leave one of them out"
        )


def adapters(draft: Draft, value: Sequence[Path], label: str) -> None:
    """Add adapters with scale 1."""
    scaled_adapters(draft, [(path, 1.0) for path in value], label)


def scaled_adapters(draft: Draft, value: Sequence[tuple[Path, float]], label: str) -> None:
    """Add adapters; they are named when all are known."""
    for path, _ in value:
        if not draft.files.is_file(path):
            raise InvalidParams(f"{label}: there is no file {on_one_line(path)}")
    draft.put("aside.adapters", (*draft.get("aside.adapters", ()), *value), label)


def named_adapters(draft: Draft, value: Sequence[tuple[str, Path]], label: str) -> None:
    """Add adapters with names of their own."""
    for _, path in value:
        if not draft.files.is_file(path):
            raise InvalidParams(f"{label}: there is no file {on_one_line(path)}")
    draft.put("aside.named_adapters", (*draft.get("aside.named_adapters", ()), *value), label)


def model(draft: Draft, value: Path | ModelReference, label: str) -> None:
    """Store the model's path, which is looked for when all flags are known, or its name."""
    draft.put("aside.model_path" if isinstance(value, Path) else "aside.model_name", value, label)


def state_folder(draft: Draft, value: Path, label: str) -> None:
    """Store the folder for saved slots. Raises where there is no such folder."""
    if not draft.files.is_folder(value):
        raise InvalidParams(f"{label}: there is no folder {on_one_line(value)}; make it first")
    draft.put("engine.state_folder", str(value), label)


def strategy(draft: Draft, value: str | Mapping[str, Any], label: str) -> None:
    """Store a strategy's name and options; checks what does not need an import of its module."""
    try:
        check_strategy_name(value)
    except InvalidParams as error:
        raise InvalidParams(str(error).replace("strategy", label, 1)) from None
    draft.put("engine.strategy", value, label)


def speculation(draft: Draft, value: str | Mapping[str, Any], label: str) -> None:
    """Store a drafter's name and options; checks what does not need an import of its module."""
    try:
        check_drafter_name(value)
    except InvalidParams as error:
        raise InvalidParams(str(error).replace("speculation", label, 1)) from None
    draft.put("engine.speculation", value, label)


def trace(draft: Draft, value: Path, label: str) -> None:
    """Store the trace's path. Raises where its folder does not exist."""
    if not draft.files.is_folder(value.parent):
        raise InvalidParams(f"{label}: there is no folder {on_one_line(value.parent)}; make it first")
    draft.put("engine.trace", value, label)


def page_folder(draft: Draft, value: Path, label: str) -> None:
    """Store the folder of a web page. Raises where there is none."""
    if not draft.files.is_folder(value):
        raise InvalidParams(f"{label}: there is no folder {on_one_line(value)}")
    draft.put("server.page_folder", value, label)


def temperature(draft: Draft, value: float, label: str) -> None:
    """Store the temperature; below 0 counts as 0, which is greedy, with a note."""
    if value < 0:
        draft.notes.append(f"{label} {value:g} counts as 0, which is greedy")
    draft.put("sampling.temperature", max(value, 0.0), label)


def grammar(draft: Draft, value: str, label: str) -> None:
    """Store a grammar in place of a schema: the last one counts."""
    draft.drop("sampling.json_schema")
    draft.put("sampling.grammar", value, label)


def json_schema(draft: Draft, value: str, label: str) -> None:
    """Store a schema in place of a grammar: the last one counts."""
    draft.drop("sampling.grammar")
    draft.put("sampling.json_schema", value, label)


def sequence_breakers(draft: Draft, value: Sequence[str], label: str) -> None:
    """Store the texts after the last "none". Escapes are resolved at the end."""
    last = max((index for index, text in enumerate(value) if text == "none"), default=-1)
    draft.put("sampling.dry_sequence_breakers", tuple(value[last + 1 :]), label)


def chat_template(draft: Draft, value: str, label: str) -> None:
    """Store Jinja source or a template's name. Of llama-server's names only some are supported."""
    if "{" not in value and value not in NAMED_TEMPLATES:
        raise InvalidParams(
            f"{label} must be {', '.join(NAMED_TEMPLATES)} or the text of a Jinja template, not {value!r:.80}; other names of "
            "templates are not supported: give the text, or its file to --chat-template-file, or leave it out for the "
            "model's own"
        )
    draft.put("server.chat_template", NAMED_TEMPLATES.get(value, value), label)


def template_text(draft: Draft, value: str, label: str) -> None:
    """Store Jinja source."""
    draft.put("server.chat_template", value, label)


def template_variables(draft: Draft, value: dict[str, Any], label: str) -> None:
    """Add variables for the template."""
    draft.put("server.chat_template_kwargs", {**draft.get("server.chat_template_kwargs", {}), **value}, label)


def reasoning(draft: Draft, value: str, label: str) -> None:
    """Add the template variable enable_thinking; auto leaves it unset."""
    if value != "auto":
        template_variables(draft, {"enable_thinking": value == "on"}, label)


def reasoning_effort(draft: Draft, value: str, label: str) -> None:
    """Add the template variable reasoning_effort; default leaves it unset."""
    if value != "default":
        template_variables(draft, {"reasoning_effort": value}, label)


def reasoning_preserve(draft: Draft, value: bool, label: str) -> None:
    """Add the template variable preserve_reasoning."""
    template_variables(draft, {"preserve_reasoning": value}, label)


def root_path(draft: Draft, value: str, label: str) -> None:
    """Store the prefix of all routes, /word/word, without a slash at its end."""
    trimmed = value.rstrip("/")
    if trimmed and (not trimmed.startswith("/") or not trimmed.isprintable() or set(trimmed) & set(" ?#%{}\\")):
        raise InvalidParams(f"{label} must begin with a slash and be a plain path, such as /llm, not {value!r:.80}")
    draft.put("server.root_path", trimmed, label)


def api_keys(draft: Draft, value: Sequence[str], label: str) -> None:
    """Add keys."""
    _add_keys(draft, [ApiKey(secret=secret) for secret in value], label)


def api_key_file(draft: Draft, value: Path, label: str) -> None:
    """Add the keys of a file, one a line; lines that begin with # are comments."""
    found = [ApiKey(secret=line) for line in _lines(draft.text_of(value, label))]
    _add_keys(draft, _some(found, label, value), label)


def tenant_key_file(draft: Draft, value: Path, label: str) -> None:
    """Add the keys of a file, TENANT:KEY a line; lines that begin with # are comments."""
    found = []
    for number, line in enumerate(_lines(draft.text_of(value, label)), start=1):
        tenant, _, secret = line.partition(":")
        if not tenant.strip() or not secret.strip():
            raise InvalidParams(f"{label}: key {number} of {on_one_line(value)} is not TENANT:KEY")
        found.append(ApiKey(secret=secret.strip(), tenant=tenant.strip()))
    _add_keys(draft, _some(found, label, value), label)


def allowed_hosts(draft: Draft, value: Sequence[str], label: str) -> None:
    """Store names without scheme and port, *.name for all below one, or * for any."""
    for name in value:
        if name != "*" and not _HOST.fullmatch(name):
            raise InvalidParams(
                f"{label} must be names such as llm.example.org or *.example.org, without scheme and port, between commas, "
                f"or *, not {name!r:.80}"
            )
    draft.put("server.allowed_hosts", tuple(value), label)


def media_domains(draft: Draft, value: Sequence[str], label: str) -> None:
    """Store names of hosts, or *.name for all below one."""
    for name in value:
        if not _HOST.fullmatch(name):
            raise InvalidParams(
                f"{label} must be names such as images.example.org or *.example.org, without scheme and port, between commas, "
                f"not {name!r:.80}"
            )
    draft.put("server.media_domains", tuple(value), label)


def cors_origins(draft: Draft, value: Sequence[str], label: str) -> None:
    """Store whole origins, localhost for every port of this machine, or * for all."""
    for origin in value:
        if origin not in ("*", "localhost") and not _ORIGIN.fullmatch(origin):
            raise InvalidParams(
                f"{label} must be origins such as https://page.example or http://192.168.0.7:3000, between commas, localhost, "
                f"or *, not {origin!r:.80}"
            )
    draft.put("server.cors_origins", tuple(origin.rstrip("/") for origin in value), label)


def cors_methods(draft: Draft, value: Sequence[str], label: str) -> None:
    """Store HTTP methods."""
    draft.put("server.cors_methods", _tokens(value, label, "GET,POST"), label)


def cors_headers(draft: Draft, value: Sequence[str], label: str) -> None:
    """Store names of headers, or * for those that a page requests."""
    draft.put("server.cors_headers", _tokens(value, label, "Authorization,Content-Type"), label)


def _tokens(value: Sequence[str], label: str, example: str) -> tuple[str, ...]:
    for name in value:
        if not _TOKEN.fullmatch(name):
            raise InvalidParams(f"{label} must be names between commas, such as {example}, or *, not {name!r:.80}")
    return tuple(dict.fromkeys(value))


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
