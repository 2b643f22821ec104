"""The next turn of a conversation: whether a prompt continues the last message, or begins a new one after it.

Pure; any thread. Knows no template and no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.chat.messages import parse_messages
from paceline.errors import InvalidParams


@dataclass(frozen=True, slots=True)
class Turn:
    """Parsed messages and how the prompt ends; the fields mean what `ChatTemplate.render`'s parameters do."""

    messages: Sequence[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False


def next_turn(
    messages: object,
    *,
    continues: bool | None = None,
    generates: bool | None = None,
    prefills: bool = False,
) -> Turn:
    """Parse a conversation and decide how its prompt ends.

    Args:
        messages: The conversation, see `parse_messages`.
        continues: `continue_final_message` of the request; None if it has none.
        generates: `add_generation_prompt` of the request; None if it has none.
        prefills: Whether a last message of the role assistant is continued when the request does not say.

    Raises:
        InvalidParams: A message is malformed, or options contradict each other.
        Unsupported: A message has tools, reasoning, images or audio.
    """
    parsed = parse_messages(messages)
    if continues:
        if generates:
            raise InvalidParams(
                "add_generation_prompt and continue_final_message exclude each other; set one of them to false"
            )
        return Turn(parsed, add_generation_prompt=False, continue_final_message=True)
    if continues is False or not prefills or parsed[-1]["role"] != "assistant":
        return Turn(parsed, add_generation_prompt=generates is not False)
    if len(parsed) > 1 and parsed[-2]["role"] == "assistant":
        raise InvalidParams("messages end with two of the assistant's, and only one can be continued; join them")
    if len(parsed) > 1 and _is_empty(parsed[-1]["content"]):
        return Turn(parsed[:-1])
    return Turn(parsed, add_generation_prompt=False, continue_final_message=True)


def _is_empty(content: str | list[dict[str, str]]) -> bool:
    return not content if isinstance(content, str) else not any(part["text"] for part in content)
