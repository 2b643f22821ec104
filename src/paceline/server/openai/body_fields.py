"""The fields of request bodies: what OpenAI's generating endpoints share, and paceline's own beside them.

OpenAI's fields are checked by pydantic, to OpenAI's limits. Ours are made from `SamplingParams` and `RequestOptions`, so that
no name is written twice; their values are checked there as well, and only told to the OpenAPI pages here. Pure; any thread.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, create_model

from paceline.params import SamplingParams
from paceline.request import RequestOptions

# Of SamplingParams: what has a shape of its own in OpenAI's bodies.
_SPELT_BY_OPENAI = frozenset(
    {
        "max_tokens", "temperature", "top_p", "n", "stop", "seed", "presence_penalty", "frequency_penalty", "logit_bias",
        "logprobs", "echo",
    }
)  # fmt: skip
# Of RequestOptions: the key's, the header's; of adapters the names are the operator's, so that they come with a shape.
_NOT_OF_THE_BODY = frozenset({"tenant", "request_id", "lora"})

SAMPLING_EXTRAS = tuple(f.name for f in dataclasses.fields(SamplingParams) if f.name not in _SPELT_BY_OPENAI)
OPTION_EXTRAS = (*(f.name for f in dataclasses.fields(RequestOptions) if f.name not in _NOT_OF_THE_BODY), "lora")
EMBEDDING_OPTIONS = ("queue_timeout_s", "timeout_s", "add_special", "parse_special")


class Body(BaseModel):
    """A request's body. Other fields are kept in `model_extra`, for `reading` to judge; null is as good as absent."""

    model_config = ConfigDict(
        strict=True,
        extra="allow",
        allow_inf_nan=False,
        protected_namespaces=(),
        json_schema_extra={"additionalProperties": False},
    )

    model: str | None = Field(
        None,
        max_length=512,
        description="A name from /v1/models. Any other is taken for the one model, with a warning.",
    )


def _extras(record: type, names: tuple[str, ...]) -> dict[str, Any]:
    """Fields for the members of a dataclass, all of them optional."""
    hints = get_type_hints(record)
    defaults = {one.name: one.default for one in dataclasses.fields(record)}
    return {name: _extra(hints[name], record.__name__, defaults[name]) for name in names}


def _extra(hint: Any, owner: str, default: object) -> Any:
    shown = "" if default in (None, "", ()) else f"; {default!r} unless the server or the model says otherwise"
    field = Field(default=None, description=f"paceline's own: as in {owner}{shown}.")
    return Annotated[hint | None, SkipValidation], field


_LORA = Annotated[dict[str, float] | None, SkipValidation]

if TYPE_CHECKING:
    Extras = Body
    EmbeddingExtras = Body
else:
    Extras = create_model(
        "Extras",
        __base__=Body,
        **_extras(SamplingParams, SAMPLING_EXTRAS),
        **_extras(RequestOptions, tuple(name for name in OPTION_EXTRAS if name != "lora")),
        lora=(_LORA, Field(default=None, description="paceline's own: scales of adapters by their names.")),
    )
    EmbeddingExtras = create_model("EmbeddingExtras", __base__=Body, **_extras(RequestOptions, EMBEDDING_OPTIONS))


class StreamOptions(BaseModel):
    """What a stream tells beside its text."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = Field(None, description="One more event at the end, with the usage and no choices.")
    continuous_usage_stats: bool | None = Field(None, description="paceline's own: usage so far in every event.")
    include_obfuscation: bool | None = Field(None, description="Accepted; nothing is obfuscated here.")


class GenerationBody(Extras):
    """What completions and chat completions share."""

    temperature: float | None = Field(None, ge=0, le=2, description="0: the most likely token. 1 by default.")
    top_p: float | None = Field(None, ge=0, le=1, description="1 by default.")
    n: int | None = Field(None, ge=1, le=256, description="Choices of each prompt; 1 by default.")
    stop: Annotated[str | list[str] | None, SkipValidation] = Field(
        None, description="A text, or up to 256 of them, which end an answer and are not part of it."
    )
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1, description="The same seed draws the same tokens.")
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = Field(None, description="Token ids to -100 .. 100.")
    max_tokens: int | None = Field(None, ge=0, le=2**31 - 1)
    stream: bool | None = Field(None, description="Whether the answer comes as server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")
    timings_per_token: bool | None = Field(None, description="llama-server's: timings in every event of a stream.")
    return_token_ids: bool | None = Field(None, description="paceline's own: token_ids beside every text.")


class OpenAICompletionBody(GenerationBody):
    """The body of /v1/completions."""

    prompt: Annotated[str | list[str] | list[int] | list[list[int]] | None, SkipValidation] = Field(
        None, description="A text, token ids, or a list of one of these."
    )
    max_tokens: int | None = Field(None, ge=0, le=2**31 - 1, description="16 by default.")
    best_of: int | None = Field(None, description="n, or nothing.")
    logprobs: int | None = Field(
        None, ge=0, le=1000, description="So many of the most likely tokens, and the one drawn."
    )
    echo: bool | None = Field(None, description="Whether the prompt is part of the answer.")
    suffix: str | None = Field(None, description="What comes after the answer, where the model has tokens for it.")


class OpenAIChatBody(GenerationBody):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], SkipValidation] = Field(
        description="Each with a role (system, developer, user, assistant) and a content, text or a list of text parts."
    )
    max_tokens: int | None = Field(None, ge=0, le=2**31 - 1, description="The older name of max_completion_tokens.")
    max_completion_tokens: int | None = Field(
        None, ge=0, le=2**31 - 1, description="By default as many as the context holds."
    )
    logprobs: bool | None = Field(None, description="Whether to tell each token's log-probability.")
    top_logprobs: int | None = Field(
        None, ge=0, le=1000, description="Of so many of the most likely too; needs logprobs."
    )
    response_format: dict[str, Any] | None = Field(None, description='{"type": "text" | "json_object" | "json_schema"}')
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="paceline's own: variables of the template.")
    continue_final_message: bool | None = Field(
        None, description="paceline's own: whether the answer goes on with the last message, the assistant's."
    )
    add_generation_prompt: bool | None = Field(
        None, description="paceline's own: whether the template begins the assistant's answer; true by default."
    )


class OpenAIEmbeddingBody(EmbeddingExtras):
    """The body of /v1/embeddings."""

    input: Annotated[str | list[str] | list[int] | list[list[int]], SkipValidation] = Field(
        description="A text, token ids, or a list of one of these."
    )
    encoding_format: str | None = Field(
        None,
        description='"float" by default; "base64": little-endian float32.',
        json_schema_extra={"enum": ["float", "base64"]},
    )
    dimensions: int | None = Field(None, ge=1, description="Only the first so many, brought back to length 1.")
    pooling: str | None = Field(None, description='paceline\'s own: "mean", "cls" or "last" in place of the model\'s.')
