"""What becomes of body fields that have no meaning of their own here: taken for another, named in a warning, or refused.

Pure; any thread.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from paceline.errors import Unsupported
from paceline.server.openai.body_fields import Body
from paceline.server.openai.refusing import refused
from paceline.server.problems import clean

# What other servers call something that is here.
RENAMED = {
    "n_predict": "max_tokens",
    "repeat_last_n": "penalty_last_n",
    "repetition_penalty": "repeat_penalty",
    "typ_p": "typical_p",
}

# OpenAI's: they say something to OpenAI, and nothing about the answer.
_OPENAI_IGNORED = (
    "metadata", "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "reasoning_effort", "safety_identifier", "service_tier", "store", "user", "verbosity",
)  # fmt: skip
# llama-server's: what its clients send along to these endpoints.
_LLAMA_SERVER_IGNORED = (
    "backend_sampling", "chat_format", "id_slot", "min_keep", "n_cache_reuse", "n_discard", "n_keep", "parse_tool_calls",
    "post_sampling_probs", "reasoning_control", "reasoning_format", "response_fields", "return_progress", "return_tokens",
    "sse_ping_interval", "t_max_predict_ms", "t_max_prompt_ms", "verbose",
)  # fmt: skip
_IGNORED = frozenset(_OPENAI_IGNORED + _LLAMA_SERVER_IGNORED)

# OpenAI's: the answer would be another one, so that leaving them out would be no answer to the question. With what value
# they ask for nothing.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "web_search_options": (),
}
_WHERE_INSTEAD = {
    "tenant": "it follows from the API key; cache_salt keeps prefixes apart too",
    "request_id": "send it as the header X-Request-Id",
}


def renamed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Of fields that a body does not know, those that mean one that it does, by that one's name."""
    known = {RENAMED[name]: value for name, value in fields.items() if name in RENAMED and value is not None}
    if known.get("max_tokens") == -1:  # llama-server's word for "until the context is full"
        known["max_tokens"] = None
    return known


def judge(fields: Mapping[str, Any], body: type[Body]) -> list[str]:
    """A warning for each field that is ignored. Raises for one that cannot be."""
    warnings = []
    for name, value in fields.items():
        if name in _IGNORED:
            if value is not None:
                warnings.append(f"{name}: accepted, and without a meaning here")
        elif name in _UNSUPPORTED:
            if value is not None and value not in _UNSUPPORTED[name]:
                raise refused(f"{name} is not supported here yet; leave it out", name, Unsupported.code)
        elif name not in RENAMED:
            message = f"{_shown(name)} is no parameter of this endpoint; {_way_out(name, body)}"
            raise refused(message, clean(name[:80]), "unknown_parameter")
    return warnings


def _way_out(name: str, body: type[Body]) -> str:
    if name in _WHERE_INSTEAD:
        return _WHERE_INSTEAD[name]
    near = difflib.get_close_matches(name[:80], [*body.model_fields, *RENAMED], n=1)
    return f"did you mean {near[0]}?" if near else "/docs lists those that there are"


def _shown(name: str) -> str:
    """As it is where it looks like a name."""
    return name if name.isidentifier() and len(name) <= 80 else repr(name[:80])
