"""The body of /v1/responses: fields, limits, and the treatment of fields that have no meaning here. Pure; any thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from paceline.errors import InvalidParams, Unsupported
from paceline.server.api_errors import invalid_request
from paceline.server.openai.openai_bodies import GenerationBody

LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)

_MAX_METADATA, _MAX_KEY, _MAX_VALUE = 16, 64, 512
_Short = Annotated[str, Field(max_length=512)]
_Word = Annotated[str, Field(max_length=64)]


class ReasoningConfig(BaseModel):
    """How the model thinks."""

    model_config = ConfigDict(strict=True, extra="forbid")

    effort: _Word | None = Field(
        None, description="A variable of the template; none turns thinking off, default leaves it to the template."
    )
    summary: _Word | None = Field(None, description="Accepted; thinking is returned as it is, without a summary.")
    generate_summary: _Word | None = Field(None, description="The older name of summary.")
    context: _Word | None = Field(None, description="Accepted; the template decides which thinking it renders.")
    mode: _Word | None = Field(None, description="Accepted, and without a meaning here.")


class TextConfig(BaseModel):
    """The shape of the text."""

    model_config = ConfigDict(strict=True, extra="forbid")

    format: dict[str, Any] | None = Field(
        None, description='{"type": "text" | "json_object"}, or {"type": "json_schema", "name": ..., "schema": ...}'
    )
    verbosity: _Word | None = Field(None, description="Accepted, and without a meaning here.")


class ResponsesBody(GenerationBody):
    """The body of /v1/responses."""

    input: Any = Field(None, description="A text, or a list of items: messages, calls with their outputs, reasoning.")
    instructions: str | None = Field(None, description="A system message in front of all items, for this response.")
    previous_response_id: _Short | None = Field(
        None, description="A stored response, whose items come first; needs a server with --responses-store."
    )
    store: bool | None = Field(
        None, description="Keep the response, where the server has --responses-store: true by default there."
    )
    max_output_tokens: int | None = Field(
        None, ge=1, le=2**31 - 1, description="Thinking included; by default as many as the context holds."
    )
    max_tokens: int | None = Field(None, ge=0, le=2**31 - 1, description="llama-server's name of max_output_tokens.")
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
    max_tool_calls: int | None = Field(None, description="Accepted; it limits OpenAI's own tools, and there are none.")
    reasoning: ReasoningConfig | None = Field(None, description="How the model thinks.")
    text: TextConfig | None = Field(None, description="The shape of the text.")
    truncation: str | None = Field(
        None,
        description='"auto" leaves out the first items of a conversation that is too long; "disabled" by default.',
        json_schema_extra={"enum": ["auto", "disabled"]},
    )
    metadata: dict[str, Any] | None = Field(None, description="Up to 16 texts by names; returned as they are.")
    user: _Short | None = Field(None, description="Returned as it is, and without a meaning here.")
    safety_identifier: _Short | None = Field(None, description="Returned as it is, and without a meaning here.")
    prompt_cache_key: _Short | None = Field(None, description="Returned as it is, and without a meaning here.")
    service_tier: _Word | None = Field(None, description="Accepted, and without a meaning here.")
    background: bool | None = Field(None, description="false: responses are not made in the background.")
    background_options: Any = Field(None, description="Refused, as background is.")
    context_management: Any = Field(
        None, description="Refused: nothing is compacted here; truncation leaves items out."
    )
    conversation: Any = Field(None, description="Refused; use previous_response_id.")
    prompt: Any = Field(None, description="Refused: there are no stored prompts here.")
    client_metadata: Any = Field(None, description="Accepted: notes of a client about itself, without a meaning here.")
    access_programs: Any = Field(None, description="Accepted, and without a meaning here.")
    image: Any = Field(None, description="Accepted, and without a meaning here.")
    personality: Any = Field(None, description="Accepted, and without a meaning here.")
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


_IGNORED = (
    "user", "safety_identifier", "prompt_cache_key", "service_tier", "max_tool_calls", "access_programs", "image", "personality",
)  # fmt: skip
_UNSUPPORTED: Mapping[str, str] = {
    "background": "leave it out, and read the response as a stream",
    "background_options": "leave it out, and read the response as a stream",
    "context_management": "leave it out; truncation can leave out the first items of a conversation",
    "conversation": "use previous_response_id, or send the items",
    "prompt": "there are no stored prompts here; send instructions and input",
}


def check_fields(body: ResponsesBody) -> list[str]:
    """Return a warning for each field that is ignored. Raises for values that are invalid or not supported."""
    for name, way_out in _UNSUPPORTED.items():
        if getattr(body, name) not in (None, False):
            raise invalid_request(f"{name} is not supported; {way_out}", name, Unsupported.code)
    _check_metadata(body.metadata)
    if body.truncation not in (None, "auto", "disabled"):
        raise InvalidParams(f"truncation must be 'auto' or 'disabled', not {body.truncation!r:.80}")
    ignored = [name for name in _IGNORED if getattr(body, name) not in (None, "auto", "default")]
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        ignored.append("text.verbosity")
    warnings = [f"{name}: accepted, and without a meaning here" for name in ignored]
    return [*warnings, *_reasoning_warnings(body.reasoning), *_include_warnings(body)]


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
    if reasoning is None:
        return []
    warnings = []
    if reasoning.summary or reasoning.generate_summary:
        warnings.append("reasoning.summary: no summary is made; the item has the thinking itself as its content")
    if reasoning.context not in (None, "auto"):
        warnings.append("reasoning.context: accepted, and without a meaning here")
    if reasoning.mode not in (None, "standard"):
        warnings.append("reasoning.mode: accepted, and without a meaning here")
    return warnings


def _include_warnings(body: ResponsesBody) -> list[str]:
    include = body.include or []
    for index, name in enumerate(include):
        if name not in INCLUDABLE:
            raise InvalidParams(f"include[{index}] must be one of {', '.join(INCLUDABLE)}, not {name!r:.80}")
    warnings = [f"include: {name} is accepted, and without a meaning here" for name in include if name != LOGPROBS]
    if body.top_logprobs and LOGPROBS not in include:
        warnings.append(f"top_logprobs: without a meaning where include does not have {LOGPROBS}")
    return list(dict.fromkeys(warnings))
