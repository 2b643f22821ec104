"""Map the body of /v1/responses to a chat: messages, tools, sampling parameters. Pure; any thread."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline import validation
from paceline.chat import ChatOptions, Tool, Turn, next_turn, template_kwargs
from paceline.errors import InvalidParams, InvalidType, Unsupported
from paceline.params import SamplingParams
from paceline.server.constraint_fields import CONSTRAINTS, GUIDED
from paceline.server.media_input.request_media import RequestMedia, known_attachment
from paceline.server.openai.parsing import ParsedRequest, parse_generation
from paceline.server.responses_api.input_items import Item, messages_of, parse_items
from paceline.server.responses_api.responses_body import LOGPROBS, ResponsesBody, check_fields

RENAMED = {
    "messages": "input",
    "json_schema": "text",
    "logprobs": "top_logprobs",
    "kwargs": "chat_template_kwargs",
}
"""The engine's names of fields that the body has under another one."""

# Members of a tool beside type, name, description, parameters and strict: what they say where they ask for nothing.
_EMPTY_TOOL_MEMBERS: Mapping[str, tuple[Any, ...]] = {
    "allowed_callers": (None, [], ["direct"]),
    "async": (None, False),
    "defer_loading": (None, False),
    "output_schema": (None,),
}
_FORMAT_MEMBERS: Mapping[str, tuple[str, ...]] = {
    "text": ("type",),
    "json_object": ("type",),
    "json_schema": ("type", "name", "schema", "description", "strict"),
}
_TOOL_MEMBERS = ("type", "name", "description", "parameters", "strict")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest:
    """What a body asks for. items: of the input. earlier: of the response before it. may_truncate: leave out messages."""

    parsed: ParsedRequest
    chat_options: ChatOptions
    items: list[Item]
    earlier: Sequence[Item] = ()
    instructions: str | None = None
    continues: bool | None = None
    generates: bool | None = None
    may_truncate: bool = False

    def messages(self, media: RequestMedia) -> list[dict[str, Any]]:
        """Return the messages of the whole conversation, the instructions left out. media: reads its images, once."""
        return messages_of(self.items, self.earlier, media)

    def turn(self, messages: Sequence[Mapping[str, Any]], *, prefills: bool = False, num_left_out: int = 0) -> Turn:
        """Return the conversation, without so many messages behind those of the system.

        messages: what `messages` returned. prefills: see `next_turn`.
        """
        begin = _num_of_system(messages)
        instructions = [{"role": "system", "content": self.instructions}] if self.instructions else []
        kept = [*instructions, *messages[:begin], *messages[begin + num_left_out :]]
        return next_turn(
            kept, continues=self.continues, generates=self.generates, prefills=prefills, read_part=known_attachment
        )


def truncations(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return how many messages may be left out, ascending: up to one of the user's, so that no result loses its call."""
    begin = _num_of_system(messages)
    return [index - begin for index, one in enumerate(messages) if index > begin and one["role"] == "user"]


def _num_of_system(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return how many messages in front are the system's."""
    roles = (message["role"] for message in messages)
    return next((index for index, role in enumerate(roles) if role not in ("system", "developer")), len(messages))


def parse_responses(  # noqa: PLR0913 - where the parts of a request come from
    body: ResponsesBody,
    base: SamplingParams,
    options: Mapping[str, Any],
    *,
    reasoning_format: str = "auto",
    template_variables: Callable[[Mapping[str, Any], str | None], dict[str, Any]] = template_kwargs,
    earlier: Sequence[Item] = (),
    find: Callable[[str], Item | None] = lambda _: None,
) -> ResponsesRequest:
    """Parse a body.

    Args:
        body: The body.
        base: Defaults of the sampling parameters.
        options: Keywords of `RequestOptions` from outside the body.
        reasoning_format: The default.
        template_variables: Completes the variables of the chat template by the server's, and by the effort.
        earlier: The items of the conversation before the input.
        find: Returns a stored item by its id.

    Raises:
        InvalidParams: A value is malformed; the message begins with its place.
        Unsupported: A value is known, and not supported.
        ApiException: A field is unknown or not supported.
    """
    warnings = check_fields(body)
    if body.input is None and not earlier:
        raise InvalidParams("input must be given: a text, or a list of items")
    items = parse_items([] if body.input is None else body.input, earlier, find)
    choice, tools = parse_tool_fields(body.tools, body.tool_choice)
    parsed = parse_generation(body, base, options, _sampling_changes(body))
    effort = None if body.reasoning is None else body.reasoning.effort
    return ResponsesRequest(
        parsed=replace(parsed, warnings=(*warnings, *parsed.warnings)),
        chat_options=ChatOptions(
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=body.parallel_tool_calls,
            reasoning_format=body.reasoning_format or reasoning_format,
            kwargs=template_variables(body.chat_template_kwargs or {}, effort),
            thinking_budget=_budget(body),
            thinking_message=body.reasoning_budget_message or "",
        ),
        items=items,
        earlier=earlier,
        instructions=body.instructions,
        continues=body.continue_final_message,
        generates=body.add_generation_prompt,
        may_truncate=body.truncation == "auto",
    )


def _budget(body: ResponsesBody) -> int | None:
    """Return the most tokens of thinking that a body asks for; None where it leaves that to the server."""
    given = body.reasoning_budget_tokens
    wanted = body.thinking_budget_tokens if given is None else given
    return None if wanted == -1 else wanted


def _sampling_changes(body: ResponsesBody) -> dict[str, Any]:
    """Return the keywords of `SamplingParams` that have another shape in this API."""
    changes: dict[str, Any] = {}
    if body.max_output_tokens is not None:
        if body.max_tokens not in (None, body.max_output_tokens):
            raise InvalidParams("max_tokens is another name of max_output_tokens: give one of them")
        changes["max_tokens"] = body.max_output_tokens
    if LOGPROBS in (body.include or ()):
        changes["logprobs"] = body.top_logprobs or 0
    schema = _schema(None if body.text is None else body.text.format)
    if schema is not None:
        others = [
            name
            for name in ("response_format", "structured_outputs", *GUIDED, *CONSTRAINTS)
            if getattr(body, name, None) is not None
        ]
        if others:
            raise InvalidParams(f"text.format and {' and '.join(others)} exclude each other: set one of them")
        changes["json_schema"] = schema
    return changes


def _schema(given: Mapping[str, Any] | None) -> Any:
    """Return the JSON schema of a text.format; None for text."""
    if given is None:
        return None
    kind = validation.choice("text.format.type", given.get("type"), tuple(_FORMAT_MEMBERS))
    _check_known("text.format", given, _FORMAT_MEMBERS[kind])
    if kind != "json_schema":
        return None if kind == "text" else {"type": "object"}
    for name in ("name", "description"):
        if given.get(name) is not None:
            validation.text(f"text.format.{name}", given[name])
    if given.get("strict") is not None:
        validation.boolean("text.format.strict", given["strict"])
    if not isinstance(given.get("schema"), Mapping):
        raise InvalidType("text.format.schema must be a JSON schema, an object")
    return given["schema"]


def _check_known(place: str, given: Mapping[Any, Any], names: Collection[str]) -> None:
    for name in given:
        if name not in names:
            raise InvalidParams(f"{place}.{str(name)[:80]} is not known; it has {', '.join(names)}")


def parse_tool_fields(tools: object, choice: object) -> tuple[object, list[Tool]]:
    """Return the tool_choice as chats take it, and the tools that are offered."""
    if tools is None:
        tools = []
    if not isinstance(tools, list):
        raise InvalidType(f"tools must be a list, not {type(tools).__name__}")
    offered = [_parse_tool(f"tools[{index}]", tool) for index, tool in enumerate(tools)]
    if choice is None or isinstance(choice, str):
        return choice, offered
    if not isinstance(choice, Mapping):
        raise InvalidType(f"tool_choice must be a text or an object, not {type(choice).__name__}")
    kind = choice.get("type")
    if kind == "allowed_tools":
        return _parse_allowed(choice, offered)
    if kind != "function":
        raise Unsupported(
            f"tool_choice.type {kind!r:.80} is not supported; it is 'function' or 'allowed_tools', or tool_choice is 'auto', "
            "'none' or 'required'"
        )
    _check_known("tool_choice", choice, ("type", "name"))
    name = validation.text("tool_choice.name", choice.get("name"))
    return {"type": "function", "function": {"name": name}}, offered


def _parse_allowed(choice: Mapping[Any, Any], offered: Sequence[Tool]) -> tuple[str, list[Tool]]:
    _check_known("tool_choice", choice, ("type", "mode", "tools"))
    mode = validation.choice("tool_choice.mode", choice.get("mode"), ("auto", "required"))
    allowed = choice.get("tools")
    if not isinstance(allowed, list):
        raise InvalidType("tool_choice.tools must be a list of objects with type and name")
    names = set()
    for index, tool in enumerate(allowed):
        place = f"tool_choice.tools[{index}]"
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise Unsupported(f"{place} must be a function with its name: other tools are not supported")
        _check_known(place, tool, ("type", "name"))
        names.add(validation.text(f"{place}.name", tool.get("name")))
    missing = names - {tool.name for tool in offered}
    if missing:
        raise InvalidParams(f"tool_choice.tools names {min(missing)[:80]!r}, and tools has no such function")
    return mode, [tool for tool in offered if tool.name in names]


def _parse_tool(place: str, tool: object) -> Tool:
    if not isinstance(tool, Mapping):
        raise InvalidType(f"{place} must be an object with type and name, not {type(tool).__name__}")
    kind = tool.get("type")
    if kind != "function":
        raise Unsupported(
            f"{place}.type {kind!r:.80} is not supported: this server runs no tools, and knows functions alone, which the "
            "client runs; leave it out"
        )
    if isinstance(tool.get("function"), Mapping):
        raise InvalidParams(f"{place}.function is how chat completions spell it; name and parameters stand beside type")
    for name, value in tool.items():
        if name not in _TOOL_MEMBERS and name not in _EMPTY_TOOL_MEMBERS:
            raise InvalidParams(f"{place}.{str(name)[:80]} is not known; a function has {', '.join(_TOOL_MEMBERS)}")
        if value not in _EMPTY_TOOL_MEMBERS.get(name, (value,)):
            raise Unsupported(f"{place}.{name} is not supported; leave it out")
    if tool.get("strict") is not None:
        validation.boolean(f"{place}.strict", tool["strict"])
    description = tool.get("description")
    return Tool(
        validation.text(f"{place}.name", tool.get("name")),
        "" if description is None else validation.text(f"{place}.description", description),
        tool.get("parameters"),
    )
