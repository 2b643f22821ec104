"""The bodies of Anthropic's requests: fields, limits, and the rules for fields that the endpoints do not act on.

Messages, tools and blocks are checked by `anthropic_messages`, whose errors name the place. Pure; any thread.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, SkipValidation

from paceline.server.dialects.request_body import FieldRules, RequestBody

_WITHOUT_EFFECT = frozenset(
    {
        "container", "context_management", "diagnostics", "inference_geo", "mcp_servers", "metadata", "service_tier",
        "speed", "user_profile_id", "workspace_id",
    }
)  # fmt: skip


class TokenCountBody(RequestBody):
    """The body of /v1/messages/count_tokens."""

    rules: ClassVar[FieldRules] = FieldRules(without_effect=_WITHOUT_EFFECT)

    model: str | None = Field(None, max_length=512, description="Any name is taken for the one model, with a warning.")
    messages: Annotated[list[dict[str, Any]], SkipValidation] = Field(
        description="Each with a role (user, assistant, system) and a content: a text, or a list of blocks of the types text, "
        "image, document, thinking, tool_use and tool_result; blocks of other types become text."
    )
    system: Annotated[str | list[dict[str, Any]] | None, SkipValidation] = Field(
        None, description="A text, or a list of text blocks."
    )
    tools: Annotated[list[dict[str, Any]] | None, SkipValidation] = Field(
        None,
        description="Functions that the model may call: name, description, input_schema. Tools of Anthropic's servers are left "
        "out, with a warning.",
    )
    tool_choice: Annotated[dict[str, Any] | None, SkipValidation] = Field(
        None,
        description='{"type": "auto" | "any" | "tool" | "none"}, with name for a tool, and disable_parallel_tool_use.',
    )
    thinking: Annotated[dict[str, Any] | None, SkipValidation] = Field(
        None,
        description='{"type": "enabled" | "adaptive" | "between_tools" | "disabled"}, with budget_tokens and display.',
    )
    output_config: Annotated[dict[str, Any] | None, SkipValidation] = Field(
        None, description='effort, and format: {"type": "json_schema", "schema": ...}.'
    )
    output_format: Annotated[dict[str, Any] | None, SkipValidation] = Field(
        None, description="The older name of output_config's format."
    )
    thread: Annotated[dict[str, Any] | None, SkipValidation] = Field(
        None, description='{"type": "create"} is accepted; conversations are not kept.'
    )
    cache_control: Annotated[dict[str, Any] | None, SkipValidation] = Field(
        None, description="Accepted; prefixes are cached by themselves."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="paceline's own: variables of the template.")


class MessageBody(TokenCountBody):
    """The body of /v1/messages."""

    max_tokens: int = Field(
        ge=-1, le=2**31 - 1, description="Most tokens of the message, thinking included; -1: until the context is full."
    )
    stop_sequences: Annotated[list[str] | None, SkipValidation] = Field(
        None, description="Up to 256 texts, which end the message and are not part of it."
    )
    stream: bool | None = Field(None, description="Stream the message as server-sent events.")
    temperature: float | None = Field(None, ge=0, description="0: the most likely token. 1 by default.")
    top_p: float | None = Field(None, ge=0, le=1, description="1 by default.")
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
