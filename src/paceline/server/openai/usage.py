"""The usage object of OpenAI's answers, with what paceline knows beside. Pure; any thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.streaming import Usage


def usage_body(usages: Sequence[Usage]) -> dict[str, Any]:
    """Of one HTTP request, whose prompts took this; cached_from is told where it is the same for all that were cached."""
    prompt = sum(one.prompt_tokens for one in usages)
    completion = sum(one.completion_tokens for one in usages)
    sources = {one.cached_from for one in usages if one.cached_from is not None}
    details: dict[str, Any] = {"cached_tokens": sum(one.cached_tokens for one in usages)}
    if len(sources) == 1:
        details["cached_from"] = sources.pop()
    body: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": details,
    }
    drafts = sum(one.draft_tokens for one in usages)
    if drafts:
        accepted = sum(one.accepted_tokens for one in usages)
        body["completion_tokens_details"] = {"draft_tokens": drafts, "accepted_draft_tokens": accepted}
    return body
