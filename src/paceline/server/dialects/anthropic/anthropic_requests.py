"""The bodies of Anthropic's requests, and their mapping to sampling parameters and chat options. Pure; any thread.

Messages, tools and blocks are checked by `anthropic_messages`; its errors name the place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field, SkipValidation

from paceline import validation
from paceline.chat import ChatOptions
from paceline.errors import InvalidParams, InvalidType
from paceline.params import SamplingParams
from paceline.server.api_errors import ApiError, ApiException
from paceline.server.dialects.anthropic.anthropic_messages import conversation_of, tool_choice_of, tools_of
from paceline.server.dialects.request_body import FieldRules, RequestBody, cap_warnings, check_fields, without_fractions
from paceline.server.dialects.request_fields import enforceable, without_empty_texts
from paceline.server.media_input.request_media import RequestMedia

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


MESSAGE_DEFAULTS: Mapping[str, Any] = {"temperature": 1.0, "top_p": 1.0, "max_tokens": None}

_MAX_STOPS, _MAX_STOP_CHARS = 256, 4096
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_THINKING_TYPES = ("enabled", "adaptive", "between_tools", "disabled")

TemplateVariables = Callable[[Mapping[str, Any], str | None], dict[str, Any]]
"""Completes a request's variables for the template and its effort, as `Service.template_variables`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedMessages:
    """What a body asks for. shows_thinking: whether the text of thinking is returned. warnings: sentences for the client."""

    conversation: list[dict[str, Any]]
    params: SamplingParams
    chat: ChatOptions
    stops: tuple[str, ...] = ()
    shows_thinking: bool = True
    warnings: tuple[str, ...] = ()


def parse_message_request(
    body: TokenCountBody,
    base: SamplingParams,
    variables: TemplateVariables,
    reasoning_format: str,
    media: RequestMedia,
    *,
    strict: bool = False,
) -> ParsedMessages:
    """Parse a body. base: defaults; reasoning_format: the server's; media: reads its images; strict: refuse unknown fields.

    Raises `InvalidParams`, `InvalidType`, `Unsupported` and `ApiException`, which name the field.
    """
    warnings = [*body.field_warnings(strict=strict), *_thread_warnings(body.thread)]
    conversation = conversation_of(body.messages, body.system, media)
    offered = tools_of(body.tools, conversation.tool_changes, strict=strict)
    tool_choice, parallel, about_choice = tool_choice_of(body.tool_choice, offered, strict=strict)
    output = _parse_output(body.output_config, body.output_format, strict=strict)
    thinking = _parse_thinking(body.thinking, strict=strict)
    changes: dict[str, Any] = {} if output.schema is None else {"json_schema": output.schema}
    kwargs = {**(body.chat_template_kwargs or {}), **thinking.variables}
    stops: tuple[str, ...] = ()
    if isinstance(body, MessageBody):
        stops = _stops(body.stop_sequences)
        changes |= {"max_tokens": None if body.max_tokens == -1 else body.max_tokens, "stop": stops}
        given = {name: getattr(body, name) for name in ("temperature", "top_p", "top_k")}
        changes |= {name: value for name, value in given.items() if value is not None}
    params, relaxed = enforceable(output.place, base.replace(**changes))
    return ParsedMessages(
        conversation=conversation.messages,
        params=params,
        chat=ChatOptions(
            tools=offered.tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel,
            reasoning_format=reasoning_format,
            kwargs=variables(kwargs, output.effort),
            thinking_budget=thinking.budget,
        ),
        stops=stops,
        shows_thinking=thinking.is_shown,
        warnings=cap_warnings(
            (
                *warnings,
                *conversation.warnings,
                *offered.warnings,
                *about_choice,
                *output.warnings,
                *relaxed,
                *thinking.warnings,
            )
        ),
    )


def _stops(stops: object) -> tuple[str, ...]:
    if stops is None:
        return ()
    if not isinstance(stops, list):
        raise InvalidType(f"stop_sequences must be a list of texts, not {type(stops).__name__}")
    if len(stops) > _MAX_STOPS:
        raise InvalidParams(f"stop_sequences must have at most {_MAX_STOPS} texts, not {len(stops)}")
    for index, stop in enumerate(stops):
        size = len(validation.text(f"stop_sequences[{index}]", stop))
        if size > _MAX_STOP_CHARS:
            raise InvalidParams(f"stop_sequences[{index}] must have at most {_MAX_STOP_CHARS} characters, not {size}")
    return tuple(without_empty_texts(stops) or ())


def _thread_warnings(thread: object) -> list[str]:
    """Return the warning about a conversation that Anthropic's servers would keep.

    Raises `ApiException` for the continuation of one: with the code in its details Anthropic's packages send the whole
    conversation again.
    """
    if thread is None:
        return []
    if not isinstance(thread, Mapping):
        raise InvalidType(f"thread must be an object with a type, not {type(thread).__name__}")
    kind = validation.choice("thread.type", thread.get("type"), ("create", "continue"))
    if kind == "create":
        return ["thread: this server keeps no conversations; send the whole conversation with the next message"]
    message = "thread.previous_message_id: this server keeps no conversations; send all messages, without thread"
    details = {"details": {"error_code": "thread_not_found"}}
    raise ApiException(ApiError(404, "not_found_error", "thread_not_found", message, param="thread", extra=details))


@dataclass(frozen=True, slots=True)
class _Thinking:
    """variables: for the template. budget: most tokens of it. is_shown: whether its text is returned."""

    variables: Mapping[str, Any]
    budget: int | None = None
    is_shown: bool = True
    warnings: Sequence[str] = ()


def _parse_thinking(thinking: object, *, strict: bool) -> _Thinking:
    if thinking is None:
        return _Thinking({})
    if not isinstance(thinking, Mapping):
        raise InvalidType(f"thinking must be an object with a type, not {type(thinking).__name__}")
    kind = validation.choice("thinking.type", thinking.get("type"), _THINKING_TYPES)
    warnings = check_fields(thinking, ("type", "budget_tokens", "display"), strict=strict, place="thinking.")
    if kind == "disabled":
        return _Thinking({"enable_thinking": False}, warnings=warnings)
    budget, display = thinking.get("budget_tokens"), thinking.get("display")
    if budget is not None:
        budget = validation.integer("thinking.budget_tokens", without_fractions(budget), 0, 2**31 - 1)
    if display is not None:
        display = validation.choice("thinking.display", display, ("summarized", "omitted", "updates"))
    return _Thinking({"enable_thinking": True}, budget, display != "omitted", warnings)


@dataclass(frozen=True, slots=True)
class _Output:
    """effort: of reasoning. schema: of the content. place: where the body has the schema."""

    effort: str | None = None
    schema: Mapping[str, Any] | None = None
    warnings: Sequence[str] = ()
    place: str = "output_config.format"


def _parse_output(config: object, older_format: object, *, strict: bool) -> _Output:
    """Parse output_config and output_format, the older name of its member `format`, which takes precedence."""
    if config is not None and not isinstance(config, Mapping):
        raise InvalidType(f"output_config must be an object, not {type(config).__name__}")
    config = config or {}
    warnings = check_fields(config, ("effort", "format"), strict=strict, place="output_config.")
    effort = config.get("effort")
    if effort is not None:
        effort = validation.choice("output_config.effort", effort, _EFFORTS)
    place, wanted = "output_config.format", config.get("format")
    if wanted is None:
        place, wanted = "output_format", older_format
    if wanted is None:
        return _Output(effort, warnings=warnings)
    if not isinstance(wanted, Mapping):
        raise InvalidType(f"{place} must be an object with type and schema, not {type(wanted).__name__}")
    warnings += check_fields(wanted, ("type", "schema"), strict=strict, place=f"{place}.")
    validation.choice(f"{place}.type", wanted.get("type"), ("json_schema",))
    schema = wanted.get("schema")
    if not isinstance(schema, Mapping):
        raise InvalidType(f"{place}.schema must be a JSON schema, an object, not {type(schema).__name__}")
    return _Output(effort, schema, warnings, place)
