"""The bodies of OpenAI's requests, and their mapping to `SamplingParams` and `RequestOptions`, which check the values.

pydantic checks the types of OpenAI's fields. paceline's own fields are made from `SamplingParams` and `RequestOptions`. Errors
name the field. Texts in logit_bias are tokenised: not for the event loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, get_type_hints

import msgspec
from pydantic import Field, SkipValidation, create_model

from paceline import validation
from paceline.chat import ChatOptions
from paceline.errors import InvalidParams, Unsupported
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.runtime import Tokenizer
from paceline.sampling_table import PARAMETERS, rows_in
from paceline.server.dialects.request_body import (
    CONSTRAINTS,
    NO_CONSTRAINT,
    FieldRules,
    RequestBody,
    Unchecked,
    cap_warnings,
    check_sampling_field,
    compact_changes,
    drop_stream_options,
    enforceable,
    merge_options,
    optional,
    parse_logit_bias,
    parse_samplers,
    response_format_changes,
    structured_output_changes,
    without_empty_texts,
    without_fractions,
    without_other_constraints,
)

# Sampling parameters whose shapes in OpenAI's bodies differ from their types here.
_OF_OTHER_SHAPE = frozenset({"max_tokens", "seed", "logit_bias", "logprobs", "echo"})
_OF_THE_LIBRARY = frozenset({"prompt_logprobs_start"})
_DECLARED = rows_in("openai")
# Of RequestOptions: what the API key, the header and the chat format decide; `lora` has a shape of its own.
_NOT_OF_THE_BODY = frozenset({"tenant", "tenant_weight", "request_id", "traceparent", "lora", "preserved_tokens"})

SAMPLING_EXTRAS = tuple(
    row.name
    for row in PARAMETERS
    if row.kind != "code" and row.name not in {*_DECLARED, *_OF_OTHER_SHAPE, *_OF_THE_LIBRARY}
)
OPTION_EXTRAS = (*(f.name for f in dataclasses.fields(RequestOptions) if f.name not in _NOT_OF_THE_BODY), "lora")
SCORING_FIELDS = (
    "priority",
    "queue_timeout_s",
    "timeout_s",
    "add_special",
    "parse_special",
    "cache_prompt",
    "cache_salt",
)
EMBEDDING_OPTIONS = ("queue_timeout_s", "timeout_s", "truncate", "add_special", "parse_special")


_RENAMED: Final = {name: row.name for row in PARAMETERS for name in row.elsewhere.split()}
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
        "tenant_weight": "it follows from the API key",
        "use_beam_search": "leave it out; n draws several choices",
    },
    harmless={"function_call": ("none", "auto"), "modalities": (["text"],)},
    renamed=("max_completion_tokens", "n_predict", *_RENAMED),
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

    model: str | None = optional(
        "A name from /v1/models. Any other is taken for the one model, with a warning.", max_length=512
    )


def _extras(record: type, names: tuple[str, ...]) -> dict[str, Any]:
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
    ScoringFields = OpenAIBody
else:
    SamplingFields = create_model(
        "Extras",
        __base__=OpenAIBody,
        **_extras(SamplingParams, SAMPLING_EXTRAS),
        **_extras(RequestOptions, tuple(name for name in OPTION_EXTRAS if name != "lora")),
        lora=(_LORA, Field(default=None, description="paceline's own: scales of adapters by their names.")),
    )
    ScoringFields = create_model("ScoringExtras", __base__=OpenAIBody, **_extras(RequestOptions, SCORING_FIELDS))
    EmbeddingFields = create_model("EmbeddingExtras", __base__=OpenAIBody, **_extras(RequestOptions, EMBEDDING_OPTIONS))


class StreamOptions(RequestBody):
    """The reports of a stream beside its text."""

    rules: ClassVar[FieldRules] = FieldRules(declared_without_effect=("include_obfuscation",))

    include_usage: bool | None = optional("One more event at the end, with the usage and no choices.")
    continuous_usage_stats: bool | None = optional("paceline's own: usage so far in every event.")
    include_obfuscation: bool | None = optional("Accepted; nothing is obfuscated here.")


_LIMIT = "Most tokens of a choice; -1: until the context is full."


class GenerationBody(SamplingFields):
    """Fields that completions and chat completions share."""

    temperature: float | None = optional("0: the most likely token. 1 by default.", ge=0)
    top_p: float | None = optional("1 by default.", ge=0, le=1)
    n: int | None = optional("Choices of each prompt; 1 by default.", ge=1, le=256)
    stop: Unchecked[str | list[str]] = optional(
        "A text, or up to 256 of them, which end the output and are not part of it."
    )
    seed: int | None = optional("The same seed draws the same tokens.", ge=-(2**63), le=2**64 - 1)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Unchecked[dict[str, float | bool] | list[Any]] = optional(
        "Token ids to biases, as an object or as a list of pairs. llama-server's: a text in place of an id "
        "stands for its tokens, and false bans a token."
    )
    max_tokens: int | None = optional(_LIMIT, ge=-1, le=2**31 - 1)
    stream: bool | None = optional("Stream the response as server-sent events.")
    stream_options: StreamOptions | None = optional("Without effect if the response is not streamed.")
    timings_per_token: bool | None = optional("llama-server's: timings in every event of a stream.")
    return_token_ids: bool | None = optional("paceline's own: token_ids beside every text.")
    response_format: dict[str, Any] | None = optional('{"type": "text" | "json_object" | "json_schema"}')
    structured_outputs: Unchecked[dict[str, Any]] = optional(
        "vLLM's: one of json, regex, choice, grammar (GBNF) and json_object."
    )
    guided_json: Any = optional("vLLM's older name of json_schema.")
    guided_regex: Any = optional("vLLM's older name of regex.")
    guided_choice: Any = optional("vLLM's older name of choice.")
    guided_grammar: Any = optional("vLLM's older name of grammar.")


class OpenAICompletionBody(GenerationBody):
    """The body of /v1/completions."""

    prompt: Annotated[
        str | dict[str, Any] | list[str | dict[str, Any]] | list[int] | list[list[int]] | None, SkipValidation
    ] = optional(
        "A text, token ids, an object with prompt_string and multimodal_data (images in base64), or a list of one "
        "of these."
    )
    max_tokens: int | None = optional(f"{_LIMIT} 16 by default.", ge=-1, le=2**31 - 1)
    best_of: int | None = optional("n, or nothing.")
    logprobs: int | None = optional("So many of the most likely tokens, and the one drawn.", ge=0, le=1000)
    echo: bool | None = optional("Return the prompt as part of the output.")
    suffix: str | None = optional("Text after the output, for models that can fill in the middle.")


class ChatFields(GenerationBody):
    """Fields that chat completions and responses share."""

    tools: list[Any] | None = optional("Functions that the model may call.")
    parallel_tool_calls: bool | None = optional("Whether one message may call several tools.")
    reasoning_format: str | None = optional(
        'llama-server\'s: "none" leaves thinking in the content; otherwise it is reasoning_content.'
    )
    reasoning_budget_tokens: int | None = optional(
        "llama-server's: most tokens of thinking; 0: none; -1: as the server has it.", ge=-1, le=2**31 - 1
    )
    thinking_budget_tokens: int | None = optional("Another name of reasoning_budget_tokens.", ge=-1, le=2**31 - 1)
    reasoning_budget_message: Annotated[str, Field(max_length=4096)] | None = optional(
        "llama-server's: text that ends thinking where its budget is used up."
    )
    chat_template_kwargs: dict[str, Any] | None = optional("paceline's own: variables of the template.")
    continue_final_message: bool | None = optional("paceline's own: continue the last message, the assistant's.")
    add_generation_prompt: bool | None = optional(
        "paceline's own: let the template begin the assistant's message; true by default."
    )


class OpenAIChatBody(ChatFields):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], SkipValidation] = Field(
        description="Each with a role (system, developer, user, assistant) and a content, text or a list of text parts."
    )
    max_tokens: int | None = optional("The older name of max_completion_tokens.", ge=-1, le=2**31 - 1)
    max_completion_tokens: int | None = optional("-1, and by default: until the context is full.", ge=-1, le=2**31 - 1)
    logprobs: bool | None = optional("Return each token's log-probability.")
    top_logprobs: int | None = optional("Of so many of the most likely too; needs logprobs.", ge=0, le=1000)
    tool_choice: Any = optional('"auto" (default), "none", "required", or one of the tools by its name.')
    include_reasoning: bool | None = optional("vLLM's: false leaves thinking out of the response.")
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = optional(
        "A variable of the template; none turns thinking off, default leaves it to the template."
    )
    return_progress: bool | None = optional(
        "llama-server's: events with `prompt_progress` before the first token; only with stream."
    )


class OpenAIEmbeddingBody(EmbeddingFields):
    """The body of /v1/embeddings."""

    input: Any = Field(
        description="A text, token ids, both mixed in a list, an object with prompt_string (and multimodal_data) or with content "
        "(a list of parts, texts and images), or a list of any of these."
    )
    encoding_format: str | None = optional(
        '"float" by default; "base64": little-endian float32.', json_schema_extra={"enum": ["float", "base64"]}
    )
    dimensions: int | None = optional("Only the first so many, brought back to length 1.", ge=1)
    prompt_name: str | None = optional(
        "A prefix of the model's file by its name; GGUF files carry none, so it is refused.", max_length=256
    )
    pooling: str | None = optional('paceline\'s own: "mean", "cls" or "last" in place of the model\'s.')


class ClassifyBody(OpenAIBody):
    """The body of /classify."""

    input: Any = Field(description="A text, token ids, or a list of either; see /v1/embeddings.")
    use_activation: bool | None = optional("False: the numbers of the model's head, not probabilities.")
    truncate: Any = optional("paceline's own: as in RequestOptions.")


class ScoreBody(OpenAIBody):
    """The body of /score."""

    text_1: Annotated[str | list[str], SkipValidation] = Field(description="A text, or as many as text_2 has.")
    text_2: Annotated[str | list[str], SkipValidation] = Field(description="A text or a list of texts.")
    use_activation: bool | None = optional("False: the number of a reranker's head, without sigmoid.")
    truncate: Any = optional("paceline's own: as in RequestOptions, of text_2 with a reranker.")


class ScoreChoicesBody(ScoringFields):
    """The body of /v1/score_choices."""

    prompt: Annotated[Any, SkipValidation] = Field(description="A text, or token ids.")
    choices: Annotated[list[Any], SkipValidation] = Field(
        description="Continuations of the prompt: texts, or lists of token ids if the prompt is one; none is empty."
    )
    length_normalization: Annotated[str | None, SkipValidation] = optional(
        "The length by which log-likelihoods are divided before they become probabilities: none, tokens or bytes."
    )


class LoraBody(RequestBody):
    """Fields of vLLM's requests about LoRA adapters."""

    lora_name: str = Field(min_length=1, max_length=256, description="The name that requests give as their model.")


class LoadLoraBody(LoraBody):
    """The body of /v1/load_lora_adapter."""

    rules: ClassVar[FieldRules] = FieldRules(unsupported={"scale": "requests set scales in lora; leave it out"})

    lora_path: str = Field(
        min_length=1, max_length=4096, description="A GGUF file of the server's machine, with an adapter for its model."
    )
    load_inplace: bool | None = optional("Replace an adapter of this name; requests that run finish with the old one.")


class UnloadLoraBody(LoraBody):
    """The body of /v1/unload_lora_adapter."""

    rules: ClassVar[FieldRules] = FieldRules(declared_without_effect=("lora_int_id",))

    lora_int_id: int | None = optional("vLLM's; it has no effect here.")
    timeout_s: float = Field(
        30.0, ge=0, le=86_400, description="paceline's own: how long requests that use it may take to end."
    )


_LIMITS: Final = ("max_output_tokens", "max_completion_tokens", "max_tokens", "n_predict")
"""Names of the most tokens, the newest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A parsed body, without its prompt. options: keywords of `RequestOptions`. warnings: sentences for the client."""

    params: SamplingParams
    options: dict[str, Any]
    warnings: tuple[str, ...] = ()


def parse_completion(
    body: OpenAICompletionBody,
    base: SamplingParams,
    options: Mapping[str, Any],
    tokenizer: Tokenizer,
    *,
    strict: bool = False,
) -> ParsedRequest:
    """Parse the body of a completion. Control tokens in a prompt's text are parsed unless the body says otherwise.

    Args:
        body: The body.
        base: Defaults of the sampling parameters.
        options: Keywords of `RequestOptions` from outside the body.
        tokenizer: Encodes the texts in logit_bias.
        strict: Whether unknown fields are refused.

    Raises:
        RequestError: A value is malformed or not supported; the message begins with the field.
        ApiException: A field is not supported, or unknown if strict.
    """
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise Unsupported(
            f"best_of must be n ({body.n or 1}) or left out, not {body.best_of}: every choice is returned"
        )
    changes: dict[str, Any] = {}
    if body.logprobs is not None:
        changes["logprobs"] = body.logprobs
        if body.echo:
            asked = given_fields(body).get("prompt_logprobs", 0)
            changes["prompt_logprobs"] = max(body.logprobs, validation.integer("prompt_logprobs", asked))
    if body.echo:
        changes["echo"] = True
        if body.suffix:
            raise Unsupported("echo and suffix exclude each other: what comes between them is not the prompt's end")
    options = {"parse_special": True, **options, "suffix": body.suffix or None}
    return parse_generation(body, base, options, changes, tokenizer, strict=strict)


def parse_chat(
    body: OpenAIChatBody,
    base: SamplingParams,
    options: Mapping[str, Any],
    tokenizer: Tokenizer,
    *,
    strict: bool = False,
) -> ParsedRequest:
    """Parse the body of a chat completion; see `parse_completion`."""
    changes: dict[str, Any] = {}
    if body.logprobs:
        changes["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs:
        raise InvalidParams("top_logprobs has no meaning without logprobs: true")
    return parse_generation(body, base, options, changes, tokenizer, strict=strict)


def parse_generation(  # noqa: PLR0913 - the parts of a request have many sources
    body: GenerationBody,
    base: SamplingParams,
    options: Mapping[str, Any],
    changes: Mapping[str, Any],
    tokenizer: Tokenizer,
    *,
    strict: bool = False,
    warnings: Sequence[str] = (),
) -> ParsedRequest:
    """Parse the fields that all bodies of generations share; see `parse_completion`.

    changes: keywords of `SamplingParams` that replace the body's. warnings: the first warnings of the request.
    """
    warnings = [*warnings, *body.field_warnings(strict=strict)]
    if body.stream_options is not None and not body.stream:
        warnings.append("stream_options has no effect if stream is not true and was ignored")
    changed = {
        **_sampling_changes(body, tokenizer, warnings),
        **_length_changes(body, warnings),
        **_constraint_changes(body, warnings, strict=strict),
        **changes,
    }
    params, relaxed = enforceable(_schema_field(body), base.replace(**without_other_constraints(base, changed)))
    warnings += relaxed
    mine = _parse_options(body, warnings)
    return ParsedRequest(params=params, options=merge_options(options, mine), warnings=cap_warnings(warnings))


def _sampling_changes(body: GenerationBody, tokenizer: Tokenizer, warnings: list[str]) -> dict[str, Any]:
    """Return the keywords of `SamplingParams` that the body has, except its length."""
    given = given_fields(body)
    changes = {name: without_fractions(given[name]) for name in (*_DECLARED, *SAMPLING_EXTRAS) if name in given}
    stop = without_empty_texts(changes.pop("stop", None))
    if stop is not None:
        changes["stop"] = stop
    if changes.get("samplers") and isinstance(changes["samplers"], (list, str)):
        samplers = parse_samplers(changes.pop("samplers"), warnings)
        changes |= {"samplers": samplers} if samplers else {}  # without a known name the defaults stay
    if isinstance(changes.get("dry_sequence_breakers"), str):
        changes["dry_sequence_breakers"] = _list_of(changes["dry_sequence_breakers"])
    if body.seed is not None:
        changes["seed"] = body.seed if body.seed >= -1 else body.seed % 2**64
    if body.logit_bias is not None:
        changes["logit_bias"] = parse_logit_bias(tokenizer, body.logit_bias)
    for name, known in _RENAMED.items():
        value = without_fractions((body.model_extra or {}).get(name))
        if value is None:
            continue
        check_sampling_field(name, known, value)
        if changes.setdefault(known, value) != value:
            warnings.append(f"{name} was ignored, since there is {known} as well")
    return changes


def _list_of(text: str) -> Any:
    """Return the list that a text has as JSON, as text-generation-webui sends it; any other text unchanged."""
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
    return value if isinstance(value, list) else text


def _length_changes(body: GenerationBody, warnings: list[str]) -> dict[str, Any]:
    """Return max_tokens by the newest of its names; None stands for -1: until the context is full."""
    given = {**(body.model_extra or {}), **given_fields(body)}
    known = {*type(body).model_fields, *body.rules.renamed}
    limits = [
        (name, validation.integer(name, without_fractions(given[name]), -1, 2**31 - 1))
        for name in _LIMITS
        if name in known and given.get(name) is not None
    ]
    if not limits:
        return {}
    newest, most = limits[0]
    warnings += [f"{name} was ignored, since there is {newest} as well" for name, limit in limits if limit != most]
    return {"max_tokens": None if most == -1 else most}


def _constraint_changes(body: GenerationBody, warnings: list[str], *, strict: bool) -> dict[str, Any]:
    """Return the constraint that a body spells as OpenAI or vLLM does. Raises `InvalidParams` for more than one."""
    wanted = response_format_changes(body.response_format, warnings, strict=strict)
    structured = structured_output_changes(given_fields(body), warnings, strict=strict)
    own = [name for name in CONSTRAINTS if getattr(body, name, None) not in NO_CONSTRAINT]
    if bool(wanted) + bool(structured) + bool(own) > 1:
        names = [*(["response_format"] if wanted else []), *(["structured_outputs"] if structured else []), *own]
        raise InvalidParams(f"{' and '.join(names)} exclude each other: set one of them")
    return wanted | structured | compact_changes(given_fields(body))


def _schema_field(body: GenerationBody) -> str:
    fields = ("json_schema", "response_format", "structured_outputs", "guided_json", "text")
    return next((name for name in fields if getattr(body, name, None) not in NO_CONSTRAINT), "json_schema")


def _parse_options(body: GenerationBody, warnings: list[str]) -> dict[str, Any]:
    """Return the keywords of `RequestOptions`. An option of streams gets a warning if the response is not streamed."""
    given = given_fields(body)
    options = {name: given[name] for name in OPTION_EXTRAS if name in given}
    RequestOptions(**options)  # raises for wrong values
    options, unused = drop_stream_options(options, stream=bool(body.stream))
    warnings += [f"{name} has no effect if stream is not true and was ignored" for name in unused]
    return options


def given_fields(body: OpenAIBody) -> dict[str, Any]:
    """Return the fields that the body has, without null."""
    return {name: value for name in body.model_fields_set if (value := getattr(body, name)) is not None}


def chat_options_of(
    body: ChatFields, tools: Any, tool_choice: Any, kwargs: Mapping[str, Any], reasoning_format: str
) -> ChatOptions:
    """Return the tools of a body and how its message is thought and rendered.

    kwargs: all variables of the chat template. reasoning_format: the server's.
    """
    budget = body.reasoning_budget_tokens
    budget = body.thinking_budget_tokens if budget is None else budget
    return ChatOptions(
        tools=tools,
        tool_choice=tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_format=body.reasoning_format or reasoning_format,
        kwargs=kwargs,
        thinking_budget=None if budget == -1 else budget,
        thinking_message=body.reasoning_budget_message or "",
    )
