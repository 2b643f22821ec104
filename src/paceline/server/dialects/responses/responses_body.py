"""The body of /v1/responses: fields, limits, and the rules for fields that the endpoint does not act on. Pure; any thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import Field

from paceline.errors import InvalidParams
from paceline.server.dialects.openai.openai_bodies import GenerationBody
from paceline.server.dialects.request_body import FieldRules, RequestBody

LOGPROBS = "message.output_text.logprobs"

_MAX_METADATA, _MAX_KEY, _MAX_VALUE = 16, 64, 512
_Short = Annotated[str, Field(max_length=512)]
_Word = Annotated[str, Field(max_length=64)]


class ReasoningConfig(RequestBody):
    """How the model thinks."""

    rules: ClassVar[FieldRules] = FieldRules(
        declared_without_effect=("context", "mode"), harmless={"context": ("auto",), "mode": ("standard",)}
    )

    effort: _Word | None = Field(
        None, description="A variable of the template; none turns thinking off, default leaves it to the template."
    )
    summary: _Word | None = Field(None, description="Accepted; thinking is returned as it is, without a summary.")
    generate_summary: _Word | None = Field(None, description="The older name of summary.")
    context: _Word | None = Field(None, description="Accepted; the template decides which thinking it renders.")
    mode: _Word | None = Field(None, description="It has no effect here.")


class TextConfig(RequestBody):
    """The shape of the text."""

    rules: ClassVar[FieldRules] = FieldRules(
        declared_without_effect=("verbosity",), harmless={"verbosity": ("medium",)}
    )

    format: dict[str, Any] | None = Field(
        None, description='{"type": "text" | "json_object"}, or {"type": "json_schema", "name": ..., "schema": ...}'
    )
    verbosity: _Word | None = Field(None, description="It has no effect here.")


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


class ResponsesBody(GenerationBody):
    """The body of /v1/responses."""

    rules: ClassVar[FieldRules] = _RULES

    input: Any = Field(None, description="A text, or a list of items: messages, calls with their outputs, reasoning.")
    instructions: str | None = Field(None, description="A system message in front of all items, for this response.")
    previous_response_id: _Short | None = Field(
        None, description="A stored response, whose items come first; needs a server with --responses-store."
    )
    store: bool | None = Field(
        None, description="Keep the response, where the server has --responses-store: true by default there."
    )
    max_output_tokens: int | None = Field(
        None, ge=-1, le=2**31 - 1, description="Thinking included; -1, and by default: until the context is full."
    )
    max_tokens: int | None = Field(None, ge=-1, le=2**31 - 1, description="llama-server's name of max_output_tokens.")
    n: int | None = Field(None, ge=1, le=1, description="1: a response has one output.")
    top_logprobs: int | None = Field(
        None, ge=0, le=1000, description=f"So many of the most likely tokens; include needs {LOGPROBS}."
    )
    include: list[str] | None = Field(None, description=f"{LOGPROBS}: the tokens' log-probabilities.")
    tools: list[Any] | None = Field(None, description="Functions that the model may call.")
    tool_choice: Any = Field(
        None, description='"auto" (default), "none", "required", a function by its name, or allowed_tools.'
    )
    parallel_tool_calls: bool | None = Field(None, description="Whether one response may have several calls.")
    max_tool_calls: int | None = Field(None, description="It limits OpenAI's own tools, and has no effect here.")
    reasoning: ReasoningConfig | None = Field(None, description="How the model thinks.")
    text: TextConfig | None = Field(None, description="The shape of the text.")
    truncation: str | None = Field(
        None,
        description='"auto" leaves out the first items of a conversation that is too long; "disabled" by default.',
        json_schema_extra={"enum": ["auto", "disabled"]},
    )
    metadata: dict[str, Any] | None = Field(None, description="Up to 16 texts by names; returned as they are.")
    user: _Short | None = Field(None, description="Returned as it is; it has no effect here.")
    safety_identifier: _Short | None = Field(None, description="Returned as it is; it has no effect here.")
    prompt_cache_key: _Short | None = Field(None, description="Returned as it is; it has no effect here.")
    service_tier: _Word | None = Field(None, description="It has no effect here.")
    background: bool | None = Field(None, description="It has no effect here: no response is made in the background.")
    background_options: Any = Field(None, description="It has no effect here.")
    context_management: Any = Field(
        None, description="It has no effect here: nothing is compacted; truncation leaves items out."
    )
    conversation: Any = Field(None, description="Refused; use previous_response_id.")
    prompt: Any = Field(None, description="Refused: there are no stored prompts here.")
    client_metadata: Any = Field(None, description="Notes of a client about itself; they have no effect here.")
    access_programs: Any = Field(None, description="It has no effect here.")
    image: Any = Field(None, description="It has no effect here.")
    personality: Any = Field(None, description="It has no effect here.")
    reasoning_format: str | None = Field(
        None, description='llama-server\'s: "none" leaves thinking in the text; otherwise it is an item of its own.'
    )
    reasoning_budget_tokens: int | None = Field(
        None,
        ge=-1,
        le=2**31 - 1,
        description="llama-server's: most tokens of thinking; 0: none; -1: as the server has it.",
    )
    thinking_budget_tokens: int | None = Field(
        None, ge=-1, le=2**31 - 1, description="Another name of reasoning_budget_tokens."
    )
    reasoning_budget_message: Annotated[str, Field(max_length=4096)] | None = Field(
        None, description="llama-server's: text that ends thinking where its budget is used up."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="paceline's own: variables of the template.")
    continue_final_message: bool | None = Field(
        None, description="paceline's own: continue the last message, the assistant's."
    )
    add_generation_prompt: bool | None = Field(
        None, description="paceline's own: let the template begin the assistant's message; true by default."
    )


def value_warnings(body: ResponsesBody) -> list[str]:
    """Return a warning for each value that is ignored. Raises `InvalidParams` for invalid values."""
    _check_metadata(body.metadata)
    if body.truncation not in (None, "auto", "disabled"):
        raise InvalidParams(f"truncation must be 'auto' or 'disabled', not {body.truncation!r:.80}")
    if body.max_output_tokens == 0:
        raise InvalidParams("max_output_tokens must be at least 1, or -1 for no limit, not 0")
    return [*_reasoning_warnings(body.reasoning), *_include_warnings(body)]


def _check_metadata(metadata: Mapping[str, Any] | None) -> None:
    if not metadata:
        return
    if len(metadata) > _MAX_METADATA:
        raise InvalidParams(f"metadata must have at most {_MAX_METADATA} entries, not {len(metadata)}")
    for name, value in metadata.items():
        if len(name) > _MAX_KEY:
            raise InvalidParams(f"metadata has a name of {len(name)} characters, and may have {_MAX_KEY}")
        if not isinstance(value, str) or len(value) > _MAX_VALUE:
            raise InvalidParams(f"metadata[{name!r}] must be a text of at most {_MAX_VALUE} characters")


def _reasoning_warnings(reasoning: ReasoningConfig | None) -> list[str]:
    if reasoning is None or not (reasoning.summary or reasoning.generate_summary):
        return []
    return ["reasoning.summary: no summary is made; the item has the thinking itself as its content"]


def _include_warnings(body: ResponsesBody) -> list[str]:
    include = body.include or []
    others = list(dict.fromkeys(name[:80] for name in include if name != LOGPROBS))
    warnings = [f"include: {name} has no effect here and was ignored" for name in others]
    if body.top_logprobs and LOGPROBS not in include:
        warnings.append(f"top_logprobs has no effect if include does not have {LOGPROBS} and was ignored")
    return warnings
