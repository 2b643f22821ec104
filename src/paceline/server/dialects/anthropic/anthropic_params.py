"""Map the bodies of Anthropic's requests to what a chat is made of. Pure; any thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline import validation
from paceline.chat import ChatOptions
from paceline.errors import InvalidParams, InvalidType
from paceline.params import SamplingParams
from paceline.server.api_errors import ApiError, ApiException
from paceline.server.dialects.anthropic.anthropic_bodies import MessageBody, TokenCountBody
from paceline.server.dialects.anthropic.anthropic_messages import conversation_of, tool_choice_of, tools_of
from paceline.server.dialects.constraint_fields import enforceable
from paceline.server.dialects.request_body import cap_warnings, check_fields, without_fractions
from paceline.server.dialects.request_fields import without_empty_texts
from paceline.server.media_input.request_media import RequestMedia

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
