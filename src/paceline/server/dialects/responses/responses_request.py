"""The body of /v1/responses, and its mapping to a chat: messages, tools, sampling parameters.

Texts in logit_bias are tokenised: not for the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

from pydantic import Field

from paceline import validation
from paceline.chat import ChatOptions, Turn, next_turn, template_kwargs
from paceline.errors import InvalidParams, InvalidType
from paceline.params import SamplingParams
from paceline.runtime import Tokenizer
from paceline.server.dialects.openai.openai_requests import (
    ChatFields,
    GenerationBody,
    ParsedRequest,
    chat_options_of,
    parse_generation,
)
from paceline.server.dialects.request_body import CONSTRAINTS, GUIDED, FieldRules, RequestBody, check_fields, optional
from paceline.server.dialects.responses.input_items import Item, added_tools, messages_of, parse_items
from paceline.server.dialects.responses.response_tools import InputWarnings, ResponseTools, parse_tool_fields
from paceline.server.request_media import RequestMedia, known_attachment

LOGPROBS = "message.output_text.logprobs"

_MAX_METADATA, _MAX_KEY, _MAX_VALUE = 16, 64, 512
_Short = Annotated[str, Field(max_length=512)]
_Word = Annotated[str, Field(max_length=64)]


class ReasoningConfig(RequestBody):
    """How the model thinks."""

    rules: ClassVar[FieldRules] = FieldRules(
        declared_without_effect=("context", "mode"), harmless={"context": ("auto",), "mode": ("standard",)}
    )

    effort: _Word | None = optional(
        "A variable of the template; none turns thinking off, default leaves it to the template."
    )
    summary: _Word | None = optional("Accepted; thinking is returned as it is, without a summary.")
    generate_summary: _Word | None = optional("The older name of summary.")
    context: _Word | None = optional("Accepted; the template decides which thinking it renders.")
    mode: _Word | None = optional("It has no effect here.")


class TextConfig(RequestBody):
    """The shape of the text."""

    rules: ClassVar[FieldRules] = FieldRules(
        declared_without_effect=("verbosity",), harmless={"verbosity": ("medium",)}
    )

    format: dict[str, Any] | None = optional(
        '{"type": "text" | "json_object"}, or {"type": "json_schema", "name": ..., "schema": ...}'
    )
    verbosity: _Word | None = optional("It has no effect here.")


_RULES = replace(
    GenerationBody.rules,
    declared_without_effect=(
        "access_programs", "background", "background_options", "context_management", "image", "max_tool_calls",
        "personality", "prompt_cache_key", "safety_identifier", "service_tier", "user",
    ),
    unsupported={
        **GenerationBody.rules.unsupported,
        "conversation": "use previous_response_id, or send the items",
        "prompt": "there are no stored prompts; send instructions and input",
    },
    harmless={**GenerationBody.rules.harmless, "service_tier": ("auto", "default")},
)  # fmt: skip


class ResponsesBody(ChatFields):
    """The body of /v1/responses."""

    rules: ClassVar[FieldRules] = _RULES

    input: Any = optional("A text, or a list of items: messages, calls with their outputs, reasoning.")
    instructions: str | None = optional("A system message in front of all items, for this response.")
    previous_response_id: _Short | None = optional(
        "A stored response, whose items come first; needs a server with --responses-store."
    )
    store: bool | None = optional("Keep the response, where the server has --responses-store: true by default there.")
    max_output_tokens: int | None = optional(
        "Thinking included; -1, and by default: until the context is full.", ge=-1, le=2**31 - 1
    )
    max_tokens: int | None = optional("llama-server's name of max_output_tokens.", ge=-1, le=2**31 - 1)
    n: int | None = optional("1: a response has one output.", ge=1, le=1)
    top_logprobs: int | None = optional(f"So many of the most likely tokens; include needs {LOGPROBS}.", ge=0, le=1000)
    include: list[str] | None = optional(f"{LOGPROBS}: the tokens' log-probabilities.")
    tool_choice: Any = optional('"auto" (default), "none", "required", a function by its name, or allowed_tools.')
    parallel_tool_calls: bool | None = optional("Whether one response may have several calls.")
    max_tool_calls: int | None = optional("It limits OpenAI's own tools, and has no effect here.")
    reasoning: ReasoningConfig | None = optional("How the model thinks.")
    text: TextConfig | None = optional("The shape of the text.")
    truncation: str | None = optional(
        '"auto" leaves out the first items of a conversation that is too long; "disabled" by default.',
        json_schema_extra={"enum": ["auto", "disabled"]},
    )
    metadata: dict[str, Any] | None = optional("Up to 16 texts by names; returned as they are.")
    user: _Short | None = optional("Returned as it is; it has no effect here.")
    safety_identifier: _Short | None = optional("Returned as it is; it has no effect here.")
    prompt_cache_key: _Short | None = optional("Returned as it is; it has no effect here.")
    service_tier: _Word | None = optional("It has no effect here.")
    background: bool | None = optional("It has no effect here: no response is made in the background.")
    background_options: Any = optional("It has no effect here.")
    context_management: Any = optional("It has no effect here: nothing is compacted; truncation leaves items out.")
    conversation: Any = optional("Refused; use previous_response_id.")
    prompt: Any = optional("Refused: there are no stored prompts here.")
    client_metadata: Any = optional("Notes of a client about itself; they have no effect here.")
    access_programs: Any = optional("It has no effect here.")
    image: Any = optional("It has no effect here.")
    personality: Any = optional("It has no effect here.")
    reasoning_format: str | None = optional(
        'llama-server\'s: "none" leaves thinking in the text; otherwise it is an item of its own.'
    )


def value_warnings(body: ResponsesBody) -> list[str]:
    """Return a warning for each value that is ignored. Raises `InvalidParams` for invalid values."""
    metadata = body.metadata or {}
    if len(metadata) > _MAX_METADATA:
        raise InvalidParams(f"metadata must have at most {_MAX_METADATA} entries, not {len(metadata)}")
    for name, value in metadata.items():
        if len(name) > _MAX_KEY:
            raise InvalidParams(f"metadata has a name of {len(name)} characters, and may have {_MAX_KEY}")
        if not isinstance(value, str) or len(value) > _MAX_VALUE:
            raise InvalidParams(f"metadata[{name!r}] must be a text of at most {_MAX_VALUE} characters")
    if body.truncation not in (None, "auto", "disabled"):
        raise InvalidParams(f"truncation must be 'auto' or 'disabled', not {body.truncation!r:.80}")
    if body.max_output_tokens == 0:
        raise InvalidParams("max_output_tokens must be at least 1, or -1 for no limit, not 0")
    warnings, reasoning, include = [], body.reasoning, body.include or []
    if reasoning is not None and (reasoning.summary or reasoning.generate_summary):
        warnings.append("reasoning.summary: no summary is made; the item has the thinking itself as its content")
    others = dict.fromkeys(name[:80] for name in include if name != LOGPROBS)
    warnings += [f"include: {name} has no effect here and was ignored" for name in others]
    if body.top_logprobs and LOGPROBS not in include:
        warnings.append(f"top_logprobs has no effect if include does not have {LOGPROBS} and was ignored")
    return warnings


RENAMED = {"messages": "input", "json_schema": "text", "logprobs": "top_logprobs", "kwargs": "chat_template_kwargs"}
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
        body: The body.
        parsed: Sampling parameters, options and warnings.
        chat_options: Tools, thinking and variables of the chat template.
        items: The items of the input.
        earlier: The items of the response before it.
        tools: The tools that the model may call.
    """

    body: ResponsesBody
    parsed: ParsedRequest
    chat_options: ChatOptions
    items: list[Item]
    earlier: Sequence[Item] = ()
    tools: ResponseTools = field(default_factory=ResponseTools)

    def messages(self, media: RequestMedia) -> list[dict[str, Any]]:
        """Return the messages of the whole conversation, the instructions left out. media: reads its images, once."""
        return messages_of(self.items, self.earlier, media, self.tools.names)

    def turn(self, messages: Sequence[Mapping[str, Any]], *, prefills: bool = False, num_left_out: int = 0) -> Turn:
        """Return the messages as a turn. num_left_out: the number of messages to leave out after the system messages."""
        begin = _num_of_system(messages)
        body = self.body
        instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
        return next_turn(
            [*instructions, *messages[:begin], *messages[begin + num_left_out :]],
            continues=body.continue_final_message,
            generates=body.add_generation_prompt,
            prefills=prefills,
            read_part=known_attachment,
        )


def truncations(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the numbers of messages that may be left out, ascending.

    The rest begins with a message of the user, so that no result loses its call.
    """
    begin = _num_of_system(messages)
    return [index - begin for index, message in enumerate(messages) if index > begin and message["role"] == "user"]


def _num_of_system(messages: Sequence[Mapping[str, Any]]) -> int:
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
    """Parse a body; as `parse_completion`.

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
        body=body,
        parsed=parsed,
        chat_options=chat_options_of(
            body,
            tools.functions,
            tools.choice,
            template_variables(body.chat_template_kwargs or {}, effort),
            reasoning_format,
        ),
        items=items,
        earlier=earlier,
        tools=tools,
    )


def _sampling_changes(body: ResponsesBody, warnings: list[str], *, strict: bool) -> dict[str, Any]:
    """Return the keywords of `SamplingParams` that have another shape in this API. warnings: about text.format."""
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
