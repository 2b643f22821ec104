"""Map the bodies of Anthropic's requests to what a chat is made of. Pure; any thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline import validation
from paceline.chat import ChatOptions
from paceline.errors import InvalidParams, InvalidType
from paceline.params import SamplingParams
from paceline.server.anthropic.anthropic_bodies import MessageBody, TokenCountBody, field_warnings
from paceline.server.anthropic.anthropic_messages import conversation_of, tool_choice_of, tools_of
from paceline.server.media_input.request_media import RequestMedia

MESSAGE_DEFAULTS: Mapping[str, Any] = {"temperature": 1.0, "top_p": 1.0, "max_tokens": None}

_MAX_STOPS, _MAX_STOP_CHARS = 256, 4096
_EFFORTS = ("low", "medium", "high", "xhigh", "max")

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
) -> ParsedMessages:
    """Parse a body. base: defaults; reasoning_format: the server's; media: reads its images.

    Raises `InvalidParams`, `InvalidType` and `Unsupported`, which name the field.
    """
    warnings = field_warnings(body)
    tools, about_tools = tools_of(body.tools)
    tool_choice, parallel = tool_choice_of(body.tool_choice, tools)
    effort, schema = _output_config(body.output_config)
    thinking = _parse_thinking(body.thinking)
    changes: dict[str, Any] = {} if schema is None else {"json_schema": schema}
    kwargs = {**(body.chat_template_kwargs or {}), **thinking.variables}
    stops: tuple[str, ...] = ()
    if isinstance(body, MessageBody):
        stops = _stops(body.stop_sequences)
        changes |= {"max_tokens": body.max_tokens, "stop": stops}
        given = {name: getattr(body, name) for name in ("temperature", "top_p", "top_k")}
        changes |= {name: value for name, value in given.items() if value is not None}
    return ParsedMessages(
        conversation=conversation_of(body.messages, body.system, media),
        params=base.replace(**changes),
        chat=ChatOptions(
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel,
            reasoning_format=reasoning_format,
            kwargs=variables(kwargs, effort),
            thinking_budget=thinking.budget,
        ),
        stops=stops,
        shows_thinking=thinking.is_shown,
        warnings=(*warnings, *about_tools),
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
        if not 1 <= size <= _MAX_STOP_CHARS:
            raise InvalidParams(f"stop_sequences[{index}] must have 1 to {_MAX_STOP_CHARS} characters, not {size}")
    return tuple(stops)


@dataclass(frozen=True, slots=True)
class _Thinking:
    """variables: for the template. budget: most tokens of it. is_shown: whether its text is returned."""

    variables: Mapping[str, Any]
    budget: int | None = None
    is_shown: bool = True


def _parse_thinking(thinking: object) -> _Thinking:
    if thinking is None:
        return _Thinking({})
    if not isinstance(thinking, Mapping):
        raise InvalidType(f"thinking must be an object with a type, not {type(thinking).__name__}")
    kind = validation.choice("thinking.type", thinking.get("type"), ("enabled", "adaptive", "disabled"))
    _check_known("thinking", thinking, ("type", "budget_tokens", "display"))
    if kind == "disabled":
        return _Thinking({"enable_thinking": False})
    budget, display = thinking.get("budget_tokens"), thinking.get("display")
    if budget is not None:
        budget = validation.integer("thinking.budget_tokens", budget, 0, 2**31 - 1)
    if display is not None:
        display = validation.choice("thinking.display", display, ("summarized", "omitted"))
    return _Thinking({"enable_thinking": True}, budget, display != "omitted")


def _output_config(config: object) -> tuple[str | None, Mapping[str, Any] | None]:
    """Return the reasoning effort and the schema of the content."""
    if config is None:
        return None, None
    if not isinstance(config, Mapping):
        raise InvalidType(f"output_config must be an object, not {type(config).__name__}")
    _check_known("output_config", config, ("effort", "format"))
    effort, wanted = config.get("effort"), config.get("format")
    if effort is not None:
        effort = validation.choice("output_config.effort", effort, _EFFORTS)
    if wanted is None:
        return effort, None
    if not isinstance(wanted, Mapping):
        raise InvalidType(f"output_config.format must be an object with type and schema, not {type(wanted).__name__}")
    _check_known("output_config.format", wanted, ("type", "schema"))
    validation.choice("output_config.format.type", wanted.get("type"), ("json_schema",))
    schema = wanted.get("schema")
    if not isinstance(schema, Mapping):
        raise InvalidType(f"output_config.format.schema must be a JSON schema, an object, not {type(schema).__name__}")
    return effort, schema


def _check_known(place: str, value: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name, member in value.items():
        if name not in known and member is not None:
            raise InvalidParams(f"{place}.{name[:80]} is not known; there are {', '.join(known)}")
