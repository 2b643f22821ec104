"""Who speaks next: whether a prompt goes on with a conversation's last message, or an answer begins after it.

Pure; any thread. Knows no template and no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import InvalidParams


@dataclass(frozen=True, slots=True)
class Turn:
    """What `ChatFormat.render` is to make a prompt of; the members are its parameters of these names."""

    messages: Sequence[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False


def next_turn(
    messages: Sequence[dict[str, Any]],
    *,
    continues: bool | None = None,
    generates: bool | None = None,
    prefills: bool = False,
) -> Turn:
    """The turn after these messages, which `checked_messages` answered.

    continues, generates: continue_final_message and add_generation_prompt as a request has them; None: not at all.
    prefills: whether a last message of the assistant's is the beginning of its answer where the request does not say.
    Raises `InvalidParams` for what excludes each other.
    """
    if continues:
        if generates:
            raise InvalidParams(
                "add_generation_prompt and continue_final_message exclude each other: an answer has one beginning"
            )
        return Turn(messages, add_generation_prompt=False, continue_final_message=True)
    if continues is False or not prefills or messages[-1]["role"] != "assistant":
        return Turn(messages, add_generation_prompt=generates is not False)
    if len(messages) > 1 and messages[-2]["role"] == "assistant":
        raise InvalidParams("messages end with two of the assistant's, and only one can be continued; join them")
    if len(messages) > 1 and _is_empty(messages[-1]["content"]):
        return Turn(messages[:-1])
    return Turn(messages, add_generation_prompt=False, continue_final_message=True)


def _is_empty(content: str | list[dict[str, str]]) -> bool:
    return not content if isinstance(content, str) else not any(part["text"] for part in content)
