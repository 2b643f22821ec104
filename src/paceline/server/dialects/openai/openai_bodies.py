"""The bodies of OpenAI's requests: their fields, and the rules for fields that the endpoints do not act on.

pydantic checks the types of OpenAI's fields. paceline's own fields are made from `SamplingParams` and `RequestOptions`,
so that no name is written twice; these records check the values, also those of OpenAI's sampling fields. Pure; any thread.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_type_hints

from pydantic import Field, SkipValidation, create_model

from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.server.dialects.request_body import FieldRules, RequestBody

# Of SamplingParams: fields that have a shape of their own in OpenAI's bodies.
_SPELT_BY_OPENAI = frozenset(
    {
        "max_tokens", "temperature", "top_p", "n", "stop", "seed", "presence_penalty", "frequency_penalty", "logit_bias",
        "logprobs", "echo",
    }
)  # fmt: skip
# Of RequestOptions: what the API key, the header and the chat format decide; `lora` has a shape of its own.
_NOT_OF_THE_BODY = frozenset({"tenant", "request_id", "lora", "preserved_tokens"})

# Of SamplingParams: names of a program's own code, which no client may choose, and what the chat format decides.
_NOT_OF_A_CLIENT = frozenset({"constraint", "logits_processors", "thinking"})

SAMPLING_EXTRAS = tuple(
    f.name for f in dataclasses.fields(SamplingParams) if f.name not in _SPELT_BY_OPENAI | _NOT_OF_A_CLIENT
)
OPTION_EXTRAS = (*(f.name for f in dataclasses.fields(RequestOptions) if f.name not in _NOT_OF_THE_BODY), "lora")
EMBEDDING_OPTIONS = ("queue_timeout_s", "timeout_s", "truncate", "add_special", "parse_special")


# OpenAI's fields that do not change the output.
_OPENAI_WITHOUT_EFFECT = (
    "metadata", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "reasoning_effort", "safety_identifier", "service_tier", "store", "user", "verbosity",
)  # fmt: skip
# OpenAI's fields whose result can only be missing: no sound, no web search, no moderation.
_OPENAI_NOT_DONE = ("audio", "modalities", "moderation", "web_search_options")
# Fields that clients of llama-server send to these endpoints.
_LLAMA_SERVER_WITHOUT_EFFECT = (
    "backend_sampling", "chat_format", "id_slot", "min_keep", "n_cache_reuse", "n_discard", "n_keep", "parse_tool_calls",
    "post_sampling_probs", "preserved_tokens", "reasoning_control", "response_fields", "return_progress", "return_tokens",
    "sse_ping_interval", "t_max_predict_ms", "t_max_prompt_ms", "verbose",
)  # fmt: skip
_RULES = FieldRules(
    without_effect=frozenset((*_OPENAI_WITHOUT_EFFECT, *_OPENAI_NOT_DONE, *_LLAMA_SERVER_WITHOUT_EFFECT)),
    unsupported={
        "chat_template": "the chat template is the server's, see --chat-template; leave the field out",
        "constraint": "use json_schema, regex, choice, grammar or lark",
        "documents": "put the documents into a message",
        "function_call": "it is the older name of tool_choice; send tools and tool_choice",
        "functions": "it is the older name of tools; send tools and tool_choice",
        "logits_processors": "use logit_bias, bad_words or a constraint",
        "tenant": "it follows from the API key; cache_salt keeps prefixes apart too",
        "use_beam_search": "leave it out; n draws several choices",
    },
    harmless={"function_call": ("none", "auto"), "modalities": (["text"],)},
    renamed=("max_completion_tokens", "n_predict", "repeat_last_n", "repetition_penalty", "typ_p"),
    hints={
        "enable_thinking": "send it in chat_template_kwargs",
        "request_id": "send it as the header X-Request-Id",
        "thinking": "send enable_thinking in chat_template_kwargs",
        "truncate_prompt_tokens": "truncate cuts prompts that are too long",
    },
)


class OpenAIBody(RequestBody):
    """The body of a request to one of OpenAI's or vLLM's endpoints."""

    rules: ClassVar[FieldRules] = _RULES

    model: str | None = Field(
        None,
        max_length=512,
        description="A name from /v1/models. Any other is taken for the one model, with a warning.",
    )


def _extras(record: type, names: tuple[str, ...]) -> dict[str, Any]:
    """Return optional fields for members of a dataclass."""
    hints = get_type_hints(record)
    defaults = {field.name: field.default for field in dataclasses.fields(record)}
    return {name: _extra(hints[name], record.__name__, defaults[name]) for name in names}


def _extra(hint: Any, owner: str, default: object) -> Any:
    shown = "" if default in (None, "", ()) else f"; {default!r} unless the server or the model sets another"
    field = Field(default=None, description=f"paceline's own: as in {owner}{shown}.")
    return Annotated[hint | None, SkipValidation], field


_LORA = Annotated[dict[str, float] | None, SkipValidation]

if TYPE_CHECKING:
    SamplingFields = OpenAIBody
    EmbeddingFields = OpenAIBody
else:
    SamplingFields = create_model(
        "Extras",
        __base__=OpenAIBody,
        **_extras(SamplingParams, SAMPLING_EXTRAS),
        **_extras(RequestOptions, tuple(name for name in OPTION_EXTRAS if name != "lora")),
        lora=(_LORA, Field(default=None, description="paceline's own: scales of adapters by their names.")),
    )
    EmbeddingFields = create_model("EmbeddingExtras", __base__=OpenAIBody, **_extras(RequestOptions, EMBEDDING_OPTIONS))


class StreamOptions(RequestBody):
    """The reports of a stream beside its text."""

    rules: ClassVar[FieldRules] = FieldRules(declared_without_effect=("include_obfuscation",))

    include_usage: bool | None = Field(None, description="One more event at the end, with the usage and no choices.")
    continuous_usage_stats: bool | None = Field(None, description="paceline's own: usage so far in every event.")
    include_obfuscation: bool | None = Field(None, description="Accepted; nothing is obfuscated here.")


_LIMIT = "Most tokens of a choice; -1: until the context is full."


class GenerationBody(SamplingFields):
    """Fields that completions and chat completions share."""

    temperature: float | None = Field(None, ge=0, description="0: the most likely token. 1 by default.")
    top_p: float | None = Field(None, ge=0, le=1, description="1 by default.")
    n: int | None = Field(None, ge=1, le=256, description="Choices of each prompt; 1 by default.")
    stop: Annotated[str | list[str] | None, SkipValidation] = Field(
        None, description="A text, or up to 256 of them, which end the output and are not part of it."
    )
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1, description="The same seed draws the same tokens.")
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float | bool] | list[Any] | None, SkipValidation] = Field(
        None,
        description="Token ids to biases, as an object or as a list of pairs. llama-server's: a text in place of an id "
        "stands for its tokens, and false bans a token.",
    )
    max_tokens: int | None = Field(None, ge=-1, le=2**31 - 1, description=_LIMIT)
    stream: bool | None = Field(None, description="Stream the response as server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="Without effect if the response is not streamed.")
    timings_per_token: bool | None = Field(None, description="llama-server's: timings in every event of a stream.")
    return_token_ids: bool | None = Field(None, description="paceline's own: token_ids beside every text.")
    response_format: dict[str, Any] | None = Field(None, description='{"type": "text" | "json_object" | "json_schema"}')
    structured_outputs: Annotated[dict[str, Any] | None, SkipValidation] = Field(
        None, description="vLLM's: one of json, regex, choice, grammar (GBNF) and json_object."
    )
    guided_json: Any = Field(None, description="vLLM's older name of json_schema.")
    guided_regex: Any = Field(None, description="vLLM's older name of regex.")
    guided_choice: Any = Field(None, description="vLLM's older name of choice.")
    guided_grammar: Any = Field(None, description="vLLM's older name of grammar.")


class OpenAICompletionBody(GenerationBody):
    """The body of /v1/completions."""

    prompt: Annotated[
        str | dict[str, Any] | list[str | dict[str, Any]] | list[int] | list[list[int]] | None, SkipValidation
    ] = Field(
        None,
        description="A text, token ids, an object with prompt_string and multimodal_data (images in base64), or a list of one "
        "of these.",
    )
    max_tokens: int | None = Field(None, ge=-1, le=2**31 - 1, description=f"{_LIMIT} 16 by default.")
    best_of: int | None = Field(None, description="n, or nothing.")
    logprobs: int | None = Field(
        None, ge=0, le=1000, description="So many of the most likely tokens, and the one drawn."
    )
    echo: bool | None = Field(None, description="Return the prompt as part of the output.")
    suffix: str | None = Field(None, description="Text after the output, for models that can fill in the middle.")


class OpenAIChatBody(GenerationBody):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], SkipValidation] = Field(
        description="Each with a role (system, developer, user, assistant) and a content, text or a list of text parts."
    )
    max_tokens: int | None = Field(None, ge=-1, le=2**31 - 1, description="The older name of max_completion_tokens.")
    max_completion_tokens: int | None = Field(
        None, ge=-1, le=2**31 - 1, description="-1, and by default: until the context is full."
    )
    logprobs: bool | None = Field(None, description="Return each token's log-probability.")
    top_logprobs: int | None = Field(
        None, ge=0, le=1000, description="Of so many of the most likely too; needs logprobs."
    )
    tools: list[Any] | None = Field(None, description="Functions that the model may call.")
    tool_choice: Any = Field(None, description='"auto" (default), "none", "required", or one of the tools by its name.')
    parallel_tool_calls: bool | None = Field(None, description="Whether one message may call several tools.")
    reasoning_format: str | None = Field(
        None, description='llama-server\'s: "none" leaves thinking in the content; otherwise it is reasoning_content.'
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
    include_reasoning: bool | None = Field(None, description="vLLM's: false leaves thinking out of the response.")
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = Field(
        None, description="A variable of the template; none turns thinking off, default leaves it to the template."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="paceline's own: variables of the template.")
    continue_final_message: bool | None = Field(
        None, description="paceline's own: continue the last message, the assistant's."
    )
    return_progress: bool | None = Field(
        None, description="llama-server's: events with `prompt_progress` before the first token; only with stream."
    )
    add_generation_prompt: bool | None = Field(
        None, description="paceline's own: let the template begin the assistant's message; true by default."
    )


class OpenAIEmbeddingBody(EmbeddingFields):
    """The body of /v1/embeddings."""

    input: Any = Field(
        description="A text, token ids, both mixed in a list, an object with prompt_string (and multimodal_data) or with content "
        "(a list of parts, texts and images), or a list of any of these."
    )
    encoding_format: str | None = Field(
        None,
        description='"float" by default; "base64": little-endian float32.',
        json_schema_extra={"enum": ["float", "base64"]},
    )
    dimensions: int | None = Field(None, ge=1, description="Only the first so many, brought back to length 1.")
    prompt_name: str | None = Field(
        None,
        max_length=256,
        description="A prefix of the model's file by its name; GGUF files carry none, so it is refused.",
    )
    pooling: str | None = Field(None, description='paceline\'s own: "mean", "cls" or "last" in place of the model\'s.')


class ClassifyBody(OpenAIBody):
    """The body of /classify."""

    input: Any = Field(description="A text, token ids, or a list of either; see /v1/embeddings.")
    use_activation: bool | None = Field(None, description="False: the numbers of the model's head, not probabilities.")
    truncate: Any = Field(default=None, description="paceline's own: as in RequestOptions.")


class ScoreBody(OpenAIBody):
    """The body of /score."""

    text_1: Annotated[str | list[str], SkipValidation] = Field(description="A text, or as many as text_2 has.")
    text_2: Annotated[str | list[str], SkipValidation] = Field(description="A text or a list of texts.")
    use_activation: bool | None = Field(None, description="False: the number of a reranker's head, without sigmoid.")
    truncate: Any = Field(default=None, description="paceline's own: as in RequestOptions, of text_2 with a reranker.")


class LoraBody(RequestBody):
    """Fields of vLLM's requests about LoRA adapters."""

    lora_name: str = Field(min_length=1, max_length=256, description="The name that requests give as their model.")


class LoadLoraBody(LoraBody):
    """The body of /v1/load_lora_adapter."""

    rules: ClassVar[FieldRules] = FieldRules(unsupported={"scale": "requests set scales in lora; leave it out"})

    lora_path: str = Field(
        min_length=1, max_length=4096, description="A GGUF file of the server's machine, with an adapter for its model."
    )
    load_inplace: bool | None = Field(
        None, description="Replace an adapter of this name; requests that run finish with the old one."
    )


class UnloadLoraBody(LoraBody):
    """The body of /v1/unload_lora_adapter."""

    rules: ClassVar[FieldRules] = FieldRules(declared_without_effect=("lora_int_id",))

    lora_int_id: int | None = Field(None, description="vLLM's; it has no effect here.")
    timeout_s: float = Field(
        30.0, ge=0, le=86_400, description="paceline's own: how long requests that use it may take to end."
    )
