"""The bodies of Ollama's requests. Pure; any thread."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, SkipValidation

from paceline.server.dialects.request_body import RequestBody

_OPTIONS = (
    "num_predict, temperature, top_k, top_p, min_p, typical_p, repeat_last_n, repeat_penalty, presence_penalty, "
    "frequency_penalty, mirostat, mirostat_tau, mirostat_eta, seed, stop"
)


class OllamaBody(RequestBody):
    """The body of a request to one of Ollama's endpoints."""

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


class OllamaModelBody(RequestBody):
    """The body of /api/show and /api/pull. name: the older name of model."""

    model: str | None = Field(None, max_length=512)
    name: str | None = Field(None, max_length=512)
    verbose: bool | None = Field(None, description="Of /api/show: all metadata, also of the tokenizer.")
    stream: bool | None = Field(None, description="Of /api/pull: lines of JSON; true by default.")


def is_unload(body: OllamaBody) -> bool:
    """Return whether a request without a prompt asks to unload the model."""
    return body.keep_alive in (0, "0", "0s", "0m")
