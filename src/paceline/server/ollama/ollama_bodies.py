"""The bodies of Ollama's requests. Fields that have no meaning here are named in warnings. Pure; any thread.

As in Ollama, unknown fields and options are no errors: its clients send those of any version.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, SkipValidation

from paceline.server.api_errors import clean_message

_OPTIONS = (
    "num_predict, temperature, top_k, top_p, min_p, typical_p, repeat_last_n, repeat_penalty, presence_penalty, "
    "frequency_penalty, mirostat, mirostat_tau, mirostat_eta, seed, stop"
)


class OllamaBody(BaseModel):
    """A request's body. Unknown fields are kept for warnings; null counts as absent."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    model: str | None = Field(None, max_length=512, description="Any name is taken for the one model, with a warning.")
    options: Annotated[dict[str, Any] | None, SkipValidation] = Field(None, description=_OPTIONS)
    keep_alive: Annotated[str | float | None, SkipValidation] = Field(
        None, description="Accepted: the model stays loaded."
    )


class OllamaGenerationBody(OllamaBody):
    """Fields that chats and completions share."""

    stream: bool | None = Field(None, description="Stream the response as lines of JSON; true by default.")
    format: Annotated[str | dict[str, Any] | None, SkipValidation] = Field(
        None, description='"json", or a JSON schema.'
    )
    think: Annotated[bool | str | None, SkipValidation] = Field(
        None,
        description='Whether the model thinks, or how much: "low", "medium", "high"; by default as its template has it.',
    )
    logprobs: bool | None = Field(None, description="Return each token's log-probability.")
    top_logprobs: int | None = Field(None, ge=0, le=1000, description="Of so many of the most likely too.")


class OllamaChatBody(OllamaGenerationBody):
    """The body of /api/chat."""

    messages: Annotated[list[dict[str, Any]] | None, SkipValidation] = Field(
        None,
        description="Each with a role (system, user, assistant, tool) and a content, a text, and maybe images in base64. None: "
        "load the model.",
    )
    tools: Annotated[list[dict[str, Any]] | None, SkipValidation] = Field(
        None, description="Functions that the model may call."
    )


class OllamaGenerateBody(OllamaGenerationBody):
    """The body of /api/generate."""

    prompt: str | None = Field(None, description="A user's message, unless raw. None: load the model.")
    suffix: str | None = Field(None, description="Text after the output, for models that can fill in the middle.")
    system: str | None = Field(None, description="The system message.")
    images: Annotated[list[str] | None, SkipValidation] = Field(
        None, description="In base64; they stand in front of the prompt."
    )
    raw: bool | None = Field(None, description="Complete the prompt as it is, without the model's template.")
    template: str | None = Field(None, description="Refused: templates are the server's.")
    context: Annotated[list[int] | None, SkipValidation] = Field(None, description="Refused: use /api/chat.")


class OllamaEmbedBody(OllamaBody):
    """The body of /api/embed."""

    input: Annotated[str | list[str], SkipValidation] = Field(description="A text, or a list of them.")
    truncate: bool | None = Field(None, description="Cut texts that are too long; true by default.")
    dimensions: int | None = Field(None, ge=1, description="Only the first so many, brought back to length 1.")


class OllamaEmbeddingsBody(OllamaBody):
    """The body of /api/embeddings, the older form."""

    prompt: str | None = Field(None, description="A text.")


class OllamaModelBody(BaseModel):
    """The body of /api/show and /api/pull. name: the older name of model."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str | None = Field(None, max_length=512)
    name: str | None = Field(None, max_length=512)
    verbose: bool | None = Field(None, description="Of /api/show: all metadata, also of the tokenizer.")
    stream: bool | None = Field(None, description="Of /api/pull: lines of JSON; true by default.")


def unknown_warnings(names: Collection[str], place: str = "") -> list[str]:
    """Return a warning for each field or option that has no meaning here; for many of them one in all."""
    if len(names) > 50:
        return [f"{place or 'the body'}: {len(names)} fields without a meaning here"]
    return [clean_message(f"{place}{name[:80]}: accepted, and without a meaning here") for name in names]


def is_unload(body: OllamaBody) -> bool:
    """Return whether a request without a prompt asks to unload the model."""
    return body.keep_alive in (0, "0", "0s", "0m")


def given(mapping: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the members that are not null."""
    return {name: value for name, value in (mapping or {}).items() if value is not None}
