"""The bodies of Ollama's requests, and their mapping to sampling parameters and a conversation. Pure; any thread."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, SkipValidation

from paceline import validation
from paceline.chat import ChatOptions
from paceline.chat.conversation import MAX_MESSAGES, MAX_TOOL_CALLS, OmittedAttachment
from paceline.errors import InvalidParams, InvalidType, Unsupported
from paceline.media import Image
from paceline.params import SamplingParams
from paceline.sampling_table import rows_in
from paceline.server.dialects.request_body import (
    FieldRules,
    RequestBody,
    Unchecked,
    cap_warnings,
    check_fields,
    check_sampling_field,
    checked_list,
    checked_object,
    enforceable,
    optional,
    without_empty_texts,
    without_fractions,
)
from paceline.server.request_media import RequestMedia

_FIELDS = rows_in("ollama")


class OllamaBody(RequestBody):
    """The body of a request to one of Ollama's endpoints."""

    model: str | None = optional("Any name is taken for the one model, with a warning.", max_length=512)
    options: Unchecked[dict[str, Any]] = optional(", ".join(_FIELDS))
    keep_alive: Unchecked[str | float] = optional("Accepted: the model stays loaded.")


class OllamaGenerationBody(OllamaBody):
    """Fields that chats and completions share."""

    stream: bool | None = optional("Stream the response as lines of JSON; true by default.")
    format: Unchecked[str | dict[str, Any]] = optional('"json", or a JSON schema.')
    think: Unchecked[bool | str] = optional(
        'Whether the model thinks, or how much: "low", "medium", "high"; by default as its template has it.'
    )
    logprobs: bool | None = optional("Return each token's log-probability.")
    top_logprobs: int | None = optional("Of so many of the most likely too.", ge=0, le=1000)


class OllamaChatBody(OllamaGenerationBody):
    """The body of /api/chat."""

    messages: Unchecked[list[dict[str, Any]]] = optional(
        "Each with a role (system, user, assistant, tool) and a content, a text, and maybe images in base64. None: "
        "load the model."
    )
    tools: Unchecked[list[dict[str, Any]]] = optional("Functions that the model may call.")


class OllamaGenerateBody(OllamaGenerationBody):
    """The body of /api/generate."""

    prompt: str | None = optional("A user's message, unless raw. None: load the model.")
    suffix: str | None = optional("Text after the output, for models that can fill in the middle.")
    system: str | None = optional("The system message.")
    images: Unchecked[list[str]] = optional("In base64; they stand in front of the prompt.")
    raw: bool | None = optional("Complete the prompt as it is, without the model's template.")
    template: str | None = optional("Refused: templates are the server's.")
    context: Unchecked[list[int]] = optional("Refused: use /api/chat.")


class OllamaEmbedBody(OllamaBody):
    """The body of /api/embed."""

    input: Annotated[str | list[str], SkipValidation] = Field(description="A text, or a list of them.")
    truncate: bool | None = optional("Cut texts that are too long; true by default.")
    dimensions: int | None = optional("Only the first so many, brought back to length 1.", ge=1)


class OllamaEmbeddingsBody(OllamaBody):
    """The body of /api/embeddings, the older form."""

    prompt: str | None = optional("A text.")


class OllamaModelBody(RequestBody):
    """The body of /api/show and /api/pull. name: the older name of model."""

    model: str | None = Field(None, max_length=512)
    name: str | None = Field(None, max_length=512)
    verbose: bool | None = optional("Of /api/show: all metadata, also of the tokenizer.")
    stream: bool | None = optional("Of /api/pull: lines of JSON; true by default.")


def is_unload(body: OllamaBody) -> bool:
    """Return whether a request without a prompt asks to unload the model."""
    return body.keep_alive in (0, "0", "0s", "0m")


_WITHOUT_EFFECT = (
    "draft_num_predict", "embedding_only", "f16_kv", "logits_all", "low_vram", "main_gpu", "num_batch", "num_ctx", "num_gpu",
    "num_gqa", "num_keep", "num_thread", "numa", "penalize_newline", "rope_frequency_base", "rope_frequency_scale", "tfs_z",
    "use_mlock", "use_mmap", "vocab_only",
)  # fmt: skip
_OPTIONS = FieldRules(without_effect=_WITHOUT_EFFECT)
_EMBEDDING_OPTIONS = FieldRules(without_effect=(*_FIELDS, *_WITHOUT_EFFECT))
_EFFORTS = ("low", "medium", "high", "max")

TemplateVariables = Callable[[Mapping[str, Any], str | None], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedOllama:
    """A parsed body without its messages.

    Attributes:
        params: The sampling parameters.
        chat: Tools and template variables.
        num_top: Most likely tokens reported with each token; None: no log-probabilities.
        warnings: Sentences for the client.
    """

    params: SamplingParams
    chat: ChatOptions
    num_top: int | None = None
    warnings: tuple[str, ...] = ()


def parse_ollama(
    body: OllamaGenerationBody,
    base: SamplingParams,
    variables: TemplateVariables,
    reasoning_format: str,
    *,
    strict: bool = False,
) -> ParsedOllama:
    """Parse a body but for its messages. base: defaults; variables: as `Service.template_variables`.

    strict: refuse unknown fields and options. Raises `InvalidParams`, `InvalidType` and `Unsupported`, which name the field,
    and `ApiException` for unknown fields.
    """
    warnings = body.field_warnings(strict=strict)
    if isinstance(body, OllamaGenerateBody):
        _check_generate(body)
    changes = _parse_options(body.options, warnings, strict=strict)
    schema = _schema(body.format)
    if schema is not None:
        changes["json_schema"] = schema
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    if num_top is not None:
        changes["logprobs"] = num_top
    thinking, effort = _thinking(body.think)
    params, relaxed = enforceable("format", base.replace(**changes))
    return ParsedOllama(
        params=params,
        chat=ChatOptions(
            tools=body.tools if isinstance(body, OllamaChatBody) else None,
            reasoning_format=reasoning_format,
            kwargs=variables(thinking, effort),
        ),
        num_top=num_top,
        warnings=cap_warnings((*warnings, *relaxed)),
    )


def option_warnings(body: OllamaBody, *, strict: bool) -> list[str]:
    """Return warnings about fields that an embedding ignores: all options, and unknown fields."""
    rules, options = _EMBEDDING_OPTIONS, _checked_options(body.options)
    return [*body.field_warnings(strict=strict), *check_fields(options, (), rules, strict=strict, place="options.")]


def _checked_options(options: object) -> Mapping[str, Any]:
    if options is not None and not isinstance(options, Mapping):
        raise InvalidType(f"options must be an object, not {type(options).__name__}")
    return options or {}


def _check_generate(body: OllamaGenerateBody) -> None:
    if body.template:
        raise Unsupported("template is not supported: the chat template is the server's; leave it out, or set raw")
    if body.context:
        raise Unsupported("context is not supported; send the conversation as messages to /api/chat")
    if body.suffix and body.images:
        raise InvalidParams("suffix and images exclude each other: what is filled in is text alone")
    if body.suffix and body.system:
        raise InvalidParams("suffix and system exclude each other: what is filled in has no system message")


def _parse_options(given: object, warnings: list[str], *, strict: bool) -> dict[str, Any]:
    """Return keywords of `SamplingParams`. warnings: receives warnings about options without effect."""
    options = {name: without_fractions(value) for name, value in _checked_options(given).items()}
    warnings += check_fields(options, _FIELDS, _OPTIONS, strict=strict, place="options.")
    options["stop"] = without_empty_texts(options.get("stop"))
    changes: dict[str, Any] = {}
    for name, row in _FIELDS.items():
        value = options.get(name)
        if value is None:
            continue
        if name == "num_predict" and validation.integer("options.num_predict", value, -(2**31), 2**31 - 1) <= 0:
            value = None
        check_sampling_field(f"options.{name}", row.name, value)
        changes[row.name] = value
    return changes


def _schema(wanted: object) -> Any:
    if wanted is None or wanted == "":
        return None
    if wanted == "json":
        return {"type": "object"}
    if not isinstance(wanted, Mapping):
        raise InvalidParams(f'format must be "json" or a JSON schema, an object, not {wanted!r:.80}')
    return wanted


def _thinking(think: object) -> tuple[dict[str, Any], str | None]:
    """Return variables of the template and the reasoning effort."""
    if think is None or think == "":
        return {}, None
    if isinstance(think, bool):
        return {"enable_thinking": think}, None
    return {"enable_thinking": True}, validation.choice("think", think, _EFFORTS)


_RENAMED = ("role", "content", "images", "thinking", "tool_calls", "tool_name", "name", "tool_call_id")
"""Members that are converted; others go on to `parse_messages`, which knows or reports them."""


def ollama_conversation(messages: object, media: RequestMedia) -> list[dict[str, Any]]:
    """Return a conversation as `parse_messages` takes it, with images in front of the texts of their messages.

    A result without an id belongs to the next call without a result, by the tool's name if it is given. A result without a call
    is kept. Raises `InvalidParams` for a malformed message, and `ApiException` as `RequestMedia.of_base64`.
    """
    messages = checked_list("messages", messages, "a list of messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidParams(f"messages must have at most {MAX_MESSAGES} messages, not {len(messages)}; leave some out")
    converted, open_calls = [], _OpenCalls()
    for index, message in enumerate(messages):
        converted.append(_message(f"messages[{index}]", message, open_calls, media))
    return converted


class _OpenCalls:
    """The calls that have no result yet: their ids and names, in order."""

    def __init__(self) -> None:
        self._calls: OrderedDict[str, str] = OrderedDict()
        self._by_name: dict[str, OrderedDict[str, None]] = {}
        self._known: set[str] = set()

    def add(self, place: str, call_id: object, name: str) -> str:
        """Add a call and return its id; of one without, the place is it."""
        given = f"call_{len(self._known)}" if call_id in (None, "") else validation.text(f"{place}.id", call_id)
        self._close(given)
        self._calls[given] = name
        self._by_name.setdefault(name, OrderedDict())[given] = None
        self._known.add(given)
        return given

    def take(self, place: str, call_id: object, name: object) -> str | None:
        """Return the id of the call that a result is of, or the id that it has; None if there is neither."""
        if call_id not in (None, ""):
            wanted = validation.text(f"{place}.tool_call_id", call_id)
            self._close(wanted)
            return wanted
        first = next(iter(self._by_name.get(str(name), ()) if name else self._calls), None)
        if first is not None:
            self._close(first)
        return first

    def _close(self, call_id: str) -> None:
        name = self._calls.pop(call_id, None)
        if name is not None:
            del self._by_name[name][call_id]


def images_of(place: str, images: object, media: RequestMedia) -> list[Image | OmittedAttachment]:
    """Return images that are given as a list of base64. Raises as `RequestMedia.of_base64`."""
    if images is None:
        return []
    images = checked_list(place, images, "a list of images in base64")
    return [media.of_base64(f"{place}[{index}]", image) for index, image in enumerate(images)]


def with_images(text: str, images: list[Image | OmittedAttachment]) -> str | list[Any]:
    """Return a content of images and the text behind them."""
    if not images:
        return text
    return [*images, *([{"type": "text", "text": text}] if text else [])]


def _message(place: str, message: object, open_calls: _OpenCalls, media: RequestMedia) -> dict[str, Any]:
    message = checked_object(place, message, "an object with role and content")
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    text = "" if content is None else validation.text(f"{place}.content", content)
    images = images_of(f"{place}.images", message.get("images"), media)
    converted = {name: value for name, value in message.items() if name not in _RENAMED}
    converted |= {"role": role, "content": None if content is None and not images else with_images(text, images)}
    if role == "tool":
        name = message.get("tool_name") or message.get("name")
        if name is not None:
            converted["name"] = validation.text(f"{place}.tool_name", name)
        call_id = open_calls.take(place, message.get("tool_call_id"), name)
        if call_id is not None:
            converted["tool_call_id"] = call_id
    if message.get("thinking"):
        converted["reasoning_content"] = validation.text(f"{place}.thinking", message["thinking"])
    if calls:
        converted["tool_calls"] = _calls(f"{place}.tool_calls", role, calls, open_calls)
    return converted


def _calls(place: str, role: object, calls: object, open_calls: _OpenCalls) -> list[dict[str, Any]]:
    if role != "assistant":
        raise InvalidParams(f"{place} is for messages of the role assistant, not {role!r:.80}")
    calls = checked_list(place, calls, "a list of calls")
    if len(calls) > MAX_TOOL_CALLS:
        raise InvalidParams(f"{place} must be at most {MAX_TOOL_CALLS} calls, not {len(calls)}")
    return [_call(f"{place}[{index}]", call, open_calls) for index, call in enumerate(calls)]


def _call(place: str, call: object, open_calls: _OpenCalls) -> dict[str, Any]:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise InvalidType(f"{place} must be an object with function")
    function = call["function"]
    name = validation.text(f"{place}.function.name", function.get("name"))
    arguments = function.get("arguments") or {}
    if not isinstance(arguments, (str, Mapping)):
        raise InvalidType(f"{place}.function.arguments must be an object, not {type(arguments).__name__}")
    return {**call, "id": open_calls.add(place, call.get("id"), name), "function": {**function, "arguments": arguments}}
