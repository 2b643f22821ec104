"""The bodies of llama-server's requests: names, types, hard limits. Pure; any thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, SkipValidation, create_model

from paceline import validation
from paceline.sampling_table import LLAMA_SETTINGS, Parameter, rows_in
from paceline.server.dialects.request_body import FieldRules, RequestBody, Unchecked, optional

_INT32 = 2**31 - 1
_MANY = 1024  # members of lists that are checked on the event loop; others are checked where they are read


def _carried(value: str) -> str:
    return validation.text("text", value)


Text = Annotated[str, AfterValidator(_carried)]
Count = Annotated[int, Field(ge=0, le=_INT32)]
CountOrMinusOne = Annotated[int, Field(ge=-1, le=_INT32)]


class LlamaBody(RequestBody):
    """The body of a request to one of llama-server's endpoints. model: names the model if there are several."""

    model: Text | None = None


class LoraScale(RequestBody):
    """Scale of one adapter. id: its index in the list of adapters."""

    id: int
    scale: float = 0.0


_OURS = "paceline's own; as in "

OPTION_EXTRAS = (
    "priority", "queue_timeout_s", "ttft_timeout_s", "timeout_s", "truncate", "special", "cache_salt", "interval",
    "max_buffered_tokens", "slow_reader", "speculation", "max_draft",
)  # fmt: skip
"""Fields of `RequestOptions` that llama-server does not have."""
_OF_STREAMS = ("interval", "max_buffered_tokens", "slow_reader")
_TYPES: dict[str, Any] = {"number": float, "boolean": bool, "text": str, "texts": list[str]}

SAMPLING: Mapping[str, Parameter] = dict(
    sorted(rows_in("llama_server").items(), key=lambda entry: [*LLAMA_SETTINGS, entry[0]].index(entry[0]))
)
"""Sampling parameters by the names that bodies have, in the order of `generation_settings`."""


def _sampling_field(row: Parameter) -> Any:
    if row.ours:
        return _extra_field("SamplingParams")
    if row.kind != "integer":
        return (_TYPES[row.kind] | None, None)
    is_bounded = not (row.is_clamped or row.off)
    return (Annotated[int, Field(ge=row.low, le=_INT32) if is_bounded else Field()] | None, None)


def _extra_field(record: str) -> Any:
    return (Any, Field(default=None, description=_OURS + record))


if TYPE_CHECKING:
    _GeneratedFields = LlamaBody
else:
    _GeneratedFields = create_model(
        "GeneratedFields",
        __base__=LlamaBody,
        **{name: _sampling_field(row) for name, row in SAMPLING.items()},
        **{
            name: _extra_field("RequestOptions; for streams" if name in _OF_STREAMS else "RequestOptions")
            for name in OPTION_EXTRAS
        },
    )


class PacelineFields(_GeneratedFields):
    """Fields that llama-server does not have. `SamplingParams` and `RequestOptions` check their values."""

    truncate: Any = optional(_OURS + "RequestOptions")
    max_draft: Any = optional(_OURS + "RequestOptions")
    speculative_n_max: Count | None = Field(
        default=None, alias="speculative.n_max", description="Most drafts in a tick, as max_draft."
    )
    add_special: bool | None = optional(_OURS + "RequestOptions; on unless false")
    parse_special: bool | None = optional(_OURS + "RequestOptions; on unless false")


class CompletionBody(PacelineFields):
    """Body of POST /completion; names, defaults and special values are llama-server's."""

    rules: ClassVar[FieldRules] = FieldRules(
        declared_without_effect=(
            "n_keep", "n_discard", "n_cache_reuse", "sse_ping_interval", "backend_sampling", "verbose", "stream_options",
        ),
        without_effect=frozenset((
            "chat_format", "chat_parser", "continue_final_message", "echo", "generation_prompt", "grammar_type",
            "message_delimiters", "parse_tool_calls", "preserved_tokens", "reasoning_budget_end_tag",
            "reasoning_budget_end_tags", "reasoning_budget_message", "reasoning_budget_start_tag",
            "reasoning_budget_tokens", "reasoning_control", "reasoning_format", "speculative.n_min",
            "speculative.ngram_min_hits", "speculative.ngram_size_m", "speculative.ngram_size_n", "speculative.p_min",
            "speculative.type", "t_max_prompt_ms",
        )),
    )  # fmt: skip

    prompt: Any = optional(
        "A text, token ids, a list of both mixed, an object with prompt_string, or a list of any of these."
    )
    stream: bool | None = None
    n_predict: CountOrMinusOne | None = None
    max_tokens: CountOrMinusOne | None = None
    max_completion_tokens: CountOrMinusOne | None = None
    n_cmpl: Annotated[int, Field(ge=1, le=256)] | None = None
    n: Annotated[int, Field(ge=1, le=256)] | None = None
    stop: Annotated[list[str], Field(max_length=_MANY)] | str | None = None
    seed: int | None = None
    dry_sequence_breakers: Annotated[list[str], Field(max_length=_MANY)] | None = None
    samplers: Annotated[list[str], Field(max_length=_MANY)] | Annotated[str, Field(max_length=_MANY)] | None = None
    min_keep: Count | None = None
    logit_bias: Annotated[list[Any] | dict[str, Any] | None, SkipValidation] = None
    grammar: str | None = None
    grammar_lazy: bool | None = None
    grammar_triggers: Annotated[list[dict[str, Any]], Field(max_length=_MANY)] | None = None
    json_schema: Annotated[dict[str, Any] | bool | None, SkipValidation] = None
    n_probs: Count | None = None
    logprobs: Count | None = None
    post_sampling_probs: bool | None = None
    return_tokens: bool | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    response_fields: Annotated[list[str], Field(max_length=_MANY)] | None = None
    cache_prompt: bool | None = None
    id_slot: int | None = None
    lora: Annotated[list[LoraScale], Field(max_length=_MANY)] | None = None
    t_max_predict_ms: CountOrMinusOne | None = None
    n_indent: Count | None = None
    # These have no effect; see `rules`.
    n_keep: CountOrMinusOne | None = None
    n_discard: Count | None = None
    n_cache_reuse: Count | None = None
    sse_ping_interval: CountOrMinusOne | None = None
    backend_sampling: bool | None = None
    verbose: bool | None = None
    stream_options: dict[str, Any] | None = None


class InfillChunk(RequestBody):
    """A piece of another file, for context."""

    text: str
    filename: str | None = None


class InfillBody(CompletionBody):
    """Body of POST /infill: text before and after the gap, pieces of other files. `prompt` begins the completion."""

    prompt: str | None = None
    parse_special: bool | None = optional("Of prompt; off by default, and never of other texts.")
    input_prefix: Any = None
    input_suffix: Any = None
    input_extra: Annotated[list[InfillChunk], Field(max_length=_MANY)] | None = None


class DetokenizeBody(LlamaBody):
    """Body of POST /detokenize."""

    tokens: Annotated[list[int] | None, SkipValidation] = None


class TemplateBody(LlamaBody):
    """Body of POST /apply-template: a conversation, without sampling."""

    messages: Any
    add_generation_prompt: bool | None = None
    continue_final_message: bool | str | None = optional(
        'Whether the prompt ends with the last message, unfinished; "content" is true. Where it is the '
        "assistant's, that is so unless this is false."
    )
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = optional('"auto", "none", "required", or a tool, as in a chat.')
    parallel_tool_calls: bool | None = None
    json_schema: dict[str, Any] | None = None


class TokenizeBody(TemplateBody):
    """Body of POST /tokenize: llama-server's with `content`, vLLM's with `prompt` or `messages`."""

    content: Any = optional("A text, or a list of texts and token ids.")
    add_special: bool | None = optional("Of content; off by default.")
    parse_special: bool | None = optional("Of content; on by default.")
    with_pieces: bool | None = optional("Of content: return each token's text beside its id.")
    prompt: Any = optional("As content, and the response has vLLM's shape.")
    messages: Any = optional("A conversation, whose prompt the chat template renders.")
    add_special_tokens: bool | None = optional(
        "Of prompt, on by default. A chat template writes its special tokens itself."
    )
    return_token_strs: bool | None = optional("Of prompt and messages: return each token as the vocabulary spells it.")


class EmbeddingBody(LlamaBody):
    """Body of POST /embedding and /embeddings. content and input mean the same; input wins."""

    content: Any = None
    input: Any = None
    embd_normalize: CountOrMinusOne | None = None
    encoding_format: str | None = None
    truncate: Any = optional(_OURS + "RequestOptions; also a bool, or START, END, NONE")


class RerankBody(LlamaBody):
    """Body of POST /rerank, as Jina and Cohere have it. With `texts` in place of `documents` it is TEI's."""

    query: str
    documents: Unchecked[list[str | dict[str, Any]]] = optional('Each a text, or an object with a text: {"text": ...}.')
    texts: Annotated[list[str] | None, SkipValidation] = None
    top_n: int | None = optional("Return only the best; all by default.")
    return_documents: bool | None = optional(
        "Whether each result has its document, as an object with a text; off by default."
    )
    return_text: bool | None = optional("The same of texts.")
    truncate: Any = optional(_OURS + "RequestOptions; also a bool, or START, END, NONE")


class SlotBody(LlamaBody):
    """Body of POST /slots/{id}. filename: a name without folders, for save and restore."""

    filename: str | None = None
