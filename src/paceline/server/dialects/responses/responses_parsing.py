"""Map the body of /v1/responses to a chat: messages, tools, sampling parameters.

Texts in logit_bias are tokenised: not for the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline import validation
from paceline.chat import ChatOptions, Turn, next_turn, template_kwargs
from paceline.errors import InvalidParams, InvalidType
from paceline.params import SamplingParams
from paceline.runtime import Tokenizer
from paceline.server.dialects.constraint_fields import CONSTRAINTS, GUIDED
from paceline.server.dialects.openai.parsing import ParsedRequest, parse_generation
from paceline.server.dialects.request_body import check_fields
from paceline.server.dialects.responses.input_items import Item, added_tools, parse_items
from paceline.server.dialects.responses.input_warnings import InputWarnings
from paceline.server.dialects.responses.item_messages import messages_of
from paceline.server.dialects.responses.response_tools import ResponseTools, parse_tool_fields
from paceline.server.dialects.responses.responses_body import LOGPROBS, ResponsesBody, value_warnings
from paceline.server.media_input.request_media import RequestMedia, known_attachment

RENAMED = {
    "messages": "input",
    "json_schema": "text",
    "logprobs": "top_logprobs",
    "kwargs": "chat_template_kwargs",
}
"""The engine's names of fields that the body has under another one."""

_FORMAT_MEMBERS: Mapping[str, tuple[str, ...]] = {
    "text": ("type",),
    "json_object": ("type",),
    "json_schema": ("type", "name", "schema", "description", "strict"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest:
    """The parsed body of a request.

    Attributes:
        parsed: Sampling parameters, options and warnings.
        chat_options: Tools, thinking and variables of the chat template.
        items: The items of the input.
        earlier: The items of the response before it.
        tools: The tools that the model may call.
        instructions: The system message of this response.
        continues: `continue_final_message` of the body.
        generates: `add_generation_prompt` of the body.
        may_truncate: Whether the first messages may be left out.
    """

    parsed: ParsedRequest
    chat_options: ChatOptions
    items: list[Item]
    earlier: Sequence[Item] = ()
    tools: ResponseTools = field(default_factory=ResponseTools)
    instructions: str | None = None
    continues: bool | None = None
    generates: bool | None = None
    may_truncate: bool = False

    def messages(self, media: RequestMedia) -> list[dict[str, Any]]:
        """Return the messages of the whole conversation, the instructions left out. media: reads its images, once."""
        return messages_of(self.items, self.earlier, media, self.tools.names)

    def turn(self, messages: Sequence[Mapping[str, Any]], *, prefills: bool = False, num_left_out: int = 0) -> Turn:
        """Return the conversation as a turn.

        Args:
            messages: The result of `messages`.
            prefills: See `next_turn`.
            num_left_out: The number of messages to leave out after the system messages.
        """
        begin = _num_of_system(messages)
        instructions = [{"role": "system", "content": self.instructions}] if self.instructions else []
        kept = [*instructions, *messages[:begin], *messages[begin + num_left_out :]]
        return next_turn(
            kept, continues=self.continues, generates=self.generates, prefills=prefills, read_part=known_attachment
        )


def truncations(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the numbers of messages that may be left out, ascending.

    The rest begins with a message of the user, so that no result loses its call.
    """
    begin = _num_of_system(messages)
    return [index - begin for index, message in enumerate(messages) if index > begin and message["role"] == "user"]


def _num_of_system(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of system messages at the beginning."""
    roles = (message["role"] for message in messages)
    return next((index for index, role in enumerate(roles) if role not in ("system", "developer")), len(messages))


def parse_responses(  # noqa: PLR0913 - where the parts of a request come from
    body: ResponsesBody,
    base: SamplingParams,
    options: Mapping[str, Any],
    tokenizer: Tokenizer,
    *,
    strict: bool = False,
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
        tokenizer: Encodes the texts in logit_bias.
        strict: Whether unknown fields are refused.
        reasoning_format: The default.
        template_variables: Completes the variables of the chat template by the server's, and by the effort.
        earlier: The items of the conversation before the input.
        find: Returns a stored item by its id.

    Raises:
        InvalidParams: A value is malformed; the message begins with its place.
        Unsupported: A value is known and not supported.
        ApiException: A field is not supported, or unknown if strict.
    """
    warnings = value_warnings(body)
    if body.input is None and not earlier:
        raise InvalidParams("input must be given: a text, or a list of items")
    left_out = InputWarnings(strict=strict)
    items = parse_items([] if body.input is None else body.input, earlier, find, left_out)
    placed = [(f"the earlier item {index}", item) for index, item in enumerate(earlier)]
    placed += [(f"input[{index}]", item) for index, item in enumerate(items)]
    tools = parse_tool_fields(body.tools, body.tool_choice, added_tools(placed), strict=strict)
    changes = _sampling_changes(body, warnings, strict=strict)
    warnings += [*left_out.sentences(), *tools.warnings]
    parsed = parse_generation(body, base, options, changes, tokenizer, strict=strict, warnings=warnings)
    effort = None if body.reasoning is None else body.reasoning.effort
    return ResponsesRequest(
        parsed=parsed,
        chat_options=ChatOptions(
            tools=tools.functions,
            tool_choice=tools.choice,
            parallel_tool_calls=body.parallel_tool_calls,
            reasoning_format=body.reasoning_format or reasoning_format,
            kwargs=template_variables(body.chat_template_kwargs or {}, effort),
            thinking_budget=_budget(body),
            thinking_message=body.reasoning_budget_message or "",
        ),
        items=items,
        earlier=earlier,
        tools=tools,
        instructions=body.instructions,
        continues=body.continue_final_message,
        generates=body.add_generation_prompt,
        may_truncate=body.truncation == "auto",
    )


def _budget(body: ResponsesBody) -> int | None:
    """Return the body's limit on tokens of thinking; None if the server decides."""
    given = body.reasoning_budget_tokens
    wanted = body.thinking_budget_tokens if given is None else given
    return None if wanted == -1 else wanted


def _sampling_changes(body: ResponsesBody, warnings: list[str], *, strict: bool) -> dict[str, Any]:
    """Return the keywords of `SamplingParams` that have another shape in this API.

    warnings: takes the warnings about text.format.
    """
    changes: dict[str, Any] = {}
    if LOGPROBS in (body.include or ()):
        changes["logprobs"] = body.top_logprobs or 0
    schema = _schema(None if body.text is None else body.text.format, warnings, strict=strict)
    if schema is not None:
        others = [
            name
            for name in ("response_format", "structured_outputs", *GUIDED, *CONSTRAINTS)
            if getattr(body, name, None) not in (None, {"type": "text"})
        ]
        if others:
            raise InvalidParams(f"text.format and {' and '.join(others)} exclude each other: set one of them")
        changes["json_schema"] = schema
    return changes


def _schema(given: Mapping[str, Any] | None, warnings: list[str], *, strict: bool) -> Any:
    """Return the JSON schema of a text.format; None for text."""
    if given is None:
        return None
    kind = validation.choice("text.format.type", given.get("type"), tuple(_FORMAT_MEMBERS))
    warnings += check_fields(given, _FORMAT_MEMBERS[kind], strict=strict, place="text.format.")
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
