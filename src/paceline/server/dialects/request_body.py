"""The base of every JSON body, the check of its fields, and fields that requests of several APIs share.

All dialects check unknown fields, fields without effect and unsupported fields here. An unknown field is ignored with a
warning, or refused if the server has `--strict-fields`. Shared fields are prompts, embedding inputs, request options, samplers,
biases and constraints. Tokenising takes time: not for the event loop.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, field_validator

from paceline import validation
from paceline.constraints.llguidance_schemas import relaxed_schema
from paceline.engine.prompts import Prompt, check_may_be_embedded
from paceline.errors import InvalidParams, InvalidType, PacelineError, Unsupported
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.runtime import Tokenizer
from paceline.sampling_table import SAMPLER_LETTERS, SAMPLER_NAMES
from paceline.server.api_errors import ApiException, clean_message, invalid_request
from paceline.server.in_flight import while_wanted
from paceline.server.request_media import RequestMedia

_MAX_WARNINGS = 32
_MAX_UNKNOWN = 16  # that are named, with a hint each
_MAX_NAME_CHARS = 80
_ASKS_FOR_NOTHING: tuple[Any, ...] = (None, 0, -1, False, {}, [], "")
_MAX_WHOLE = 2.0**64


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRules:
    """How fields are treated that the endpoint does not act on.

    Attributes:
        without_effect: Undeclared fields that clients send and that change nothing here; a warning.
        declared_without_effect: Declared fields of this kind.
        unsupported: Fields that would change the output, with the way out; an error.
        harmless: Values of these fields that ask for nothing, beside null, 0, -1, false and empty values.
        renamed: Undeclared fields that are another name of a declared one; no warning.
        hints: Sentences about unknown fields, in place of the nearest known name.
    """

    without_effect: Collection[str] = ()
    declared_without_effect: Collection[str] = ()
    unsupported: Mapping[str, str] = field(default_factory=dict)
    harmless: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    renamed: Collection[str] = ()
    hints: Mapping[str, str] = field(default_factory=dict)


_NO_RULES = FieldRules()

T = TypeVar("T")
Unchecked = Annotated[T | None, SkipValidation]
"""The type of a field that may be large: it is checked in a thread when it is read."""


def optional(description: str, **rules: Any) -> Any:
    """Return a field of a body that may be absent. rules: keywords of pydantic's `Field`."""
    return Field(None, description=description, **rules)


class RequestBody(BaseModel):
    """A JSON object of a request. Undeclared fields are kept for `field_warnings`; null counts as absent.

    Strict: a bool is no number, a text is no number, and a number with a fraction is no integer. NaN and infinities are
    refused. A whole float such as 100.0 is an integer, as in JSON Schema.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    rules: ClassVar[FieldRules] = _NO_RULES

    @field_validator("*", mode="before")
    @classmethod
    def _without_fraction(cls, value: Any) -> Any:
        return without_fractions(value) if isinstance(value, float) else value  # lists may be long: see their readers

    def field_warnings(self, *, strict: bool = False, place: str = "") -> list[str]:
        """Return a warning for each field that is ignored, also for fields of nested objects; see `check_fields`."""
        declared = type(self).model_fields
        given = {name: getattr(self, name) for name in declared if name in self.model_fields_set}
        warnings = check_fields({**given, **(self.model_extra or {})}, declared, self.rules, strict=strict, place=place)
        for name, value in given.items():
            if isinstance(value, RequestBody):
                warnings += value.field_warnings(strict=strict, place=f"{place}{name}.")
        return warnings


def without_fractions(value: Any) -> Any:
    """Return a whole float such as 100.0 as an integer, also in a list of numbers; any other value unchanged.

    Languages without integers write whole numbers as floats, and JSON has one kind of number.
    """
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) <= _MAX_WHOLE else value
    if isinstance(value, list) and float in set(map(type, value)):
        return [without_fractions(item) if isinstance(item, float) else item for item in value]
    return value


def check_fields(
    fields: Mapping[str, Any],
    known: Collection[str],
    rules: FieldRules = _NO_RULES,
    *,
    strict: bool = False,
    place: str = "",
) -> list[str]:
    """Return a warning for each field of an object that is ignored. A field that is null is absent.

    Args:
        fields: The object.
        known: The names that the endpoint acts on.
        rules: The treatment of other names.
        strict: Whether unknown fields are refused.
        place: The path of the object within the body, with a dot at its end.

    Raises:
        ApiException: A field is not supported, or unknown if strict.
    """
    warnings: list[str] = []
    unknown: list[str] = []
    for name, value in fields.items():
        if value is None:
            continue
        asks = value not in _ASKS_FOR_NOTHING and value not in rules.harmless.get(name, ())
        if name in rules.unsupported:
            if asks:
                raise _refusal(place, name, f"is not supported here; {rules.unsupported[name]}", Unsupported.code)
        elif name in rules.declared_without_effect or (name in rules.without_effect and name not in known):
            if asks:
                warnings.append(f"{place}{name} has no effect here and was ignored")
        elif name not in known and name not in rules.renamed:
            unknown.append(name)
    return warnings + _unknown_warnings(unknown, [*known, *rules.renamed], rules, strict=strict, place=place)


def _unknown_warnings(
    unknown: Sequence[str], known: Collection[str], rules: FieldRules, *, strict: bool, place: str
) -> list[str]:
    if unknown and strict:
        hint = _hint(unknown[0], known, rules) or "; /docs lists the fields"
        raise _refusal(place, unknown[0], f"is not a field of this endpoint{hint}", "unknown_parameter")
    warnings = [
        f"{place}{_shown(name)} is not a field of this endpoint and was ignored{_hint(name, known, rules)}"
        for name in unknown[:_MAX_UNKNOWN]
    ]
    if len(unknown) > _MAX_UNKNOWN:
        warnings.append(f"{len(unknown) - _MAX_UNKNOWN} more unknown fields were ignored")
    return warnings


def cap_warnings(warnings: Sequence[str]) -> tuple[str, ...]:
    """Return the first warnings and the number of the others, so that a response stays smaller than its request."""
    rest = len(warnings) - _MAX_WARNINGS
    if rest <= 0:
        return tuple(warnings)
    return (*warnings[:_MAX_WARNINGS], f"and {rest} more warning{'s' if rest > 1 else ''}")


def warned(warnings: Sequence[str]) -> dict[str, Any]:
    """Return the member of a response that has its warnings; no member without warnings."""
    return {"warnings": warnings} if warnings else {}


def _refusal(place: str, name: str, reason: str, code: str) -> ApiException:
    return invalid_request(f"{place}{_shown(name)} {reason}", clean_message(place + name[:_MAX_NAME_CHARS]), code)


def _hint(name: str, known: Collection[str], rules: FieldRules) -> str:
    if name in rules.hints:
        return f"; {rules.hints[name]}"
    near = validation.nearest_names(name[:_MAX_NAME_CHARS], known)
    return f"; did you mean {near[0]}?" if near else ""


def _shown(name: str) -> str:
    return name if name.isidentifier() and len(name) <= _MAX_NAME_CHARS else repr(name[:_MAX_NAME_CHARS])


def checked_object(place: str, value: object, shape: str = "an object") -> Mapping[str, Any]:
    """Return a value that is an object. Raises `InvalidType`, which names the place and the shape, for any other value."""
    if not isinstance(value, Mapping):
        raise InvalidType(f"{place} must be {shape}, not {type(value).__name__}")
    return value


def checked_list(place: str, value: object, shape: str = "a list") -> list[Any]:
    """Return a value that is a list. Raises `InvalidType`, which names the place and the shape, for any other value."""
    if not isinstance(value, list):
        raise InvalidType(f"{place} must be {shape}, not {type(value).__name__}")
    return value


# ---- fields that several APIs share


_STREAM_OPTIONS = ("interval", "max_buffered_tokens", "slow_reader")


def merge_options(options: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the server's options with a request's own, which win; the smaller `timeout_s` of the two holds.

    Both are keywords of `RequestOptions`.
    """
    result = {**options, **mine}
    limits = [limit for limit in (options.get("timeout_s"), mine.get("timeout_s")) if limit is not None]
    if limits:
        result["timeout_s"] = min(limits)
    return result


def drop_stream_options(options: Mapping[str, Any], *, stream: bool) -> tuple[dict[str, Any], list[str]]:
    """Return the keywords of `RequestOptions` that have an effect, and the names of the options that need a stream."""
    unused = [] if stream else [name for name in _STREAM_OPTIONS if name in options]
    return {name: value for name, value in options.items() if name not in unused}, unused


_SHAPES = "a text, a list of token ids and texts, or an object with prompt_string"


@dataclass(frozen=True, slots=True)
class MarkedImages:
    """The images of prompts: the marker in the text, and the reader of the data."""

    marker: str
    media: RequestMedia


def read_prompts(
    tokenizer: Tokenizer,
    name: str,
    value: Any,
    images: MarkedImages | None = None,
    *,
    add_special: bool = True,
    parse_special: bool = True,
) -> list[Any]:
    """Return the token ids of one prompt or of each in a list. A list with a number in it is one prompt.

    A prompt with multimodal_data is returned as segments, to which the engine adds the special tokens.

    Args:
        tokenizer: Encodes the texts.
        name: The field of the body.
        value: Its value.
        images: Reads the images; None: prompts with images are refused.
        add_special: As in `Tokenizer.encode`.
        parse_special: As in `Tokenizer.encode`.

    Raises:
        RequestError: A list or prompt is empty, a value has another shape, or as `Tokenizer.encode`.
        ApiException: As `RequestMedia.of_base64`.
    """
    _check_not_empty(name, value)
    return [
        _read_prompt(tokenizer, place, prompt, images, add_special=add_special, parse_special=parse_special)
        for place, prompt in while_wanted(_named(name, value))
    ]


def segments_of(name: str, value: Mapping[str, Any], images: MarkedImages) -> list[Any]:
    """Return the texts and images of a prompt_string with a marker for each of multimodal_data.

    Raises `InvalidParams` if their numbers differ, and as `RequestMedia.of_base64`.
    """
    text, data = validation.text(f"{name}.prompt_string", value["prompt_string"]), value["multimodal_data"]
    place = f"{name}.multimodal_data"
    data = checked_list(place, data, "a list of images and audio in base64")
    read = [images.media.of_data(f"{place}[{index}]", attachment) for index, attachment in enumerate(data)]
    texts = text.split(images.marker)
    if len(texts) - 1 != len(read):
        raise InvalidParams(
            f"{name} has {len(read)} multimodal_data, and {len(texts) - 1} markers {images.marker} in its prompt_string; GET "
            "/props has the marker"
        )
    segments: list[Any] = [texts[0]]
    for image, after in zip(read, texts[1:], strict=True):
        segments += [image, after]
    return [segment for segment in segments if segment != ""]


def _check_not_empty(name: str, value: Any) -> None:
    if is_prompt_list(value) and not value:
        raise InvalidParams(f"{name} must not be an empty list; give it a text or token ids")


def _named(name: str, value: Any) -> list[tuple[str, Any]]:
    if not is_prompt_list(value):
        return [(name, value)]
    return [(f"{name}[{index}]", item) for index, item in enumerate(value)]


def is_prompt_list(value: object) -> bool:
    """Return whether `read_prompts` takes a value for a list of prompts."""
    return isinstance(value, list) and not any(_is_number(item) for item in value)


def min_prompt_tokens(tokenizer: Tokenizer, prompt: object) -> int:
    """Return a lower bound of the tokens of one prompt, which is not tokenised.

    The bound is 0 for a prompt with images, since markers in its text are no tokens, and for a malformed one.
    """
    if isinstance(prompt, dict):
        prompt = None if prompt.get("multimodal_data") else prompt.get("prompt_string")
    if isinstance(prompt, list):
        return sum(tokenizer.min_tokens(part) if isinstance(part, str) else 1 for part in prompt)
    return tokenizer.min_tokens(prompt) if isinstance(prompt, str) else 0


def _read_prompt(
    tokenizer: Tokenizer,
    name: str,
    value: Any,
    images: MarkedImages | None,
    *,
    add_special: bool,
    parse_special: bool,
) -> Any:
    if isinstance(value, dict) and "prompt_string" in value:
        if value.get("multimodal_data"):
            if images is None:
                raise Unsupported(f"{name}.multimodal_data: images are not taken here; leave them out")
            return segments_of(name, value, images)
        value = value["prompt_string"]
    ids = tokenize_mixed(tokenizer, name, value, add_special=add_special, parse_special=parse_special)
    if not ids:
        raise InvalidParams(f"{name} has no tokens; give it at least one")
    return ids


def tokenize_mixed(tokenizer: Tokenizer, name: str, value: Any, *, add_special: bool, parse_special: bool) -> list[int]:
    """Return the ids of a text, or of texts and ids in a list. Special tokens are added before a first text only."""
    if isinstance(value, str):
        return tokenizer.encode(validation.text(name, value), add_special=add_special, parse_special=parse_special)
    if not isinstance(value, list):
        raise InvalidType(f"{name} must be {_SHAPES}, not {type(value).__name__}")
    value = without_fractions(value)
    if not any(isinstance(item, str) for item in value):
        return validation.token_ids(name, value, tokenizer.n_vocab)
    ids: list[int] = []
    for index, item in enumerate(value):
        ids += _tokenize_part(tokenizer, f"{name}[{index}]", item, add_special and index == 0, parse_special)
    return ids


def _tokenize_part(tokenizer: Tokenizer, name: str, value: Any, add_special: bool, parse_special: bool) -> list[int]:
    if isinstance(value, str):
        return tokenizer.encode(validation.text(name, value), add_special=add_special, parse_special=parse_special)
    hint = f"the vocabulary has {tokenizer.n_vocab} tokens"
    return [validation.integer(name, value, 0, tokenizer.n_vocab - 1, hint)]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def read_inputs(
    tokenizer: Tokenizer, name: str, value: Any, options: RequestOptions, longest: int, images: MarkedImages
) -> list[Prompt]:
    """Return inputs as `tokenize_inputs`. Inputs with images or audio are returned as segments, which the engine tokenises.

    Such inputs are objects with multimodal_data, as in `read_prompts`, or with a content of parts, as in OpenAI's chats.
    Raises as both, and as `RequestMedia.read_part`.
    """
    _check_not_empty(name, value)
    if isinstance(value, list) and not is_prompt_list(value):
        return [*tokenize_inputs(tokenizer, name, value, options, longest)]
    add, parse = options.add_special, options.parse_special
    found: list[Prompt] = []
    for index, (place, given) in enumerate(while_wanted(_named(name, value))):
        segments: Any = None
        if isinstance(given, dict) and "content" in given:
            segments = _segments_of_parts(place, given["content"], images)
        elif isinstance(given, dict) and "prompt_string" in given and given.get("multimodal_data"):
            segments = segments_of(place, given, images)
        if segments is None:
            text = _text_of_parts(place, given)
            _check_input(tokenizer, index, text, options, longest)
            segments = _read_prompt(tokenizer, place, text, None, add_special=add, parse_special=parse)
        found.append(segments)
    return found


def _segments_of_parts(name: str, parts: object, images: MarkedImages) -> list[Any] | None:
    """Return the texts and media of content parts; None if all are texts, or the value is no list."""
    if not isinstance(parts, list):
        return None
    places = [f"{name}.content[{at}]" for at in range(len(parts))]
    media = [images.media.read_part(place, part) for place, part in zip(places, parts, strict=True)]
    if not any(media):
        return None
    return [
        _text_of_part(place, part) if read is None else read
        for place, part, read in zip(places, parts, media, strict=True)
    ]


def tokenize_inputs(
    tokenizer: Tokenizer, name: str, value: Any, options: RequestOptions, longest: int
) -> list[list[int]]:
    """Return token ids in the shapes of `read_prompts`, and of objects with text parts.

    Such an object is {"content": [{"type": "text", "text": ...}, ...]}; its parts are joined. Raises `InvalidParams`
    and `InvalidType` naming the field, also for an input without tokens. Raises `PromptTooLong`, before any is tokenised, for
    an input with more bytes than `longest` tokens have; the engine raises it for others that are too long.
    """
    if isinstance(value, list):
        value = [_text_of_parts(f"{name}[{at}]", item) for at, item in enumerate(value)]
    value = _text_of_parts(name, value)
    for index, (_, given) in enumerate(_named(name, value)):
        _check_input(tokenizer, index, given, options, longest)
    add, parse = options.add_special, options.parse_special
    return read_prompts(tokenizer, name, value, add_special=add, parse_special=parse)


def _check_input(tokenizer: Tokenizer, index: int, value: Any, options: RequestOptions, longest: int) -> None:
    check_may_be_embedded(f"text {index}", min_prompt_tokens(tokenizer, value), options, longest)


def _text_of_parts(name: str, value: Any) -> Any:
    """Return the text of an object with content parts, or with a text as Jina's clients send it; any other value unchanged."""
    if isinstance(value, dict) and isinstance(value.get("text"), str) and not {"content", "prompt_string"} & set(value):
        return value["text"]
    if not isinstance(value, dict) or "content" not in value:
        return value
    parts = value["content"]
    if not isinstance(parts, list):
        raise InvalidType(
            f"{name}.content must be a list of parts, not {type(parts).__name__}; or give the text itself"
        )
    return "".join(_text_of_part(f"{name}.content[{at}]", part) for at, part in enumerate(parts))


def _text_of_part(name: str, part: Any) -> str:
    if not isinstance(part, dict):
        raise InvalidType(f'{name} must be an object such as {{"type": "text", "text": "..."}}, not {part!r:.80}')
    if part.get("type") != "text":
        raise InvalidParams(
            f"{name}.type must be text, or image_url or input_audio where images and audio are taken, not "
            f"{part.get('type')!r:.80}"
        )
    text = part.get("text", "")
    if not isinstance(text, str):
        raise InvalidType(f"{name}.text must be a text, not {type(text).__name__}")
    return text


def without_empty_texts(stop: Any) -> Any:
    """Return the stop texts without empty ones, which end nothing; None if there are no others.

    Values of other types are returned as they are: `SamplingParams` refuses them.
    """
    kept = [text for text in stop if text != ""] if isinstance(stop, list) else stop
    return None if kept in ([], "") else kept


def check_sampling_field(place: str, name: str, value: Any) -> None:
    """Raise `InvalidParams` or `InvalidType` for an invalid value of a sampling parameter. place: its name in the body."""
    try:
        SamplingParams(**{name: value})
    except PacelineError as error:
        message = f"{place}{str(error).removeprefix(name)}"
        raise (InvalidType if isinstance(error, InvalidType) else InvalidParams)(message) from None


_MAX_SAMPLERS = 256


def parse_samplers(samplers: list[Any] | str, warnings: list[str]) -> tuple[str, ...]:
    """Return the samplers in order, from names, their variants or letters.

    Unknown names and repetitions are skipped with a warning. Raises `InvalidParams` for more than `_MAX_SAMPLERS`.
    """
    if len(samplers) > _MAX_SAMPLERS:
        raise InvalidParams(f"samplers must have at most {_MAX_SAMPLERS} names or letters, not {len(samplers)}")
    if isinstance(samplers, str):
        named = [(letter, SAMPLER_LETTERS.get(letter)) for letter in samplers]
    else:
        texts = [validation.text(f"samplers[{index}]", text) for index, text in enumerate(samplers)]
        named = [(text, SAMPLER_NAMES.get(text.lower())) for text in texts]
    found: list[str] = []
    for given, name in named:
        if name is None:
            warnings.append(f"samplers: there is no {given!r:.60}, and it was ignored")
        elif name in found:
            warnings.append(f"samplers: {given!r} comes twice and is applied once")
        else:
            found.append(name)
    return tuple(found)


_MAX_BIASES = 2**16
_ID_KEY = re.compile(r"(-?[0-9]{1,11})(?:\.0{1,9})?")
BANNED_BIAS = -1e6
"""The bias that stands for minus infinity: no logit makes up for it."""


def parse_logit_bias(tokenizer: Tokenizer, value: Any, warnings: list[str] | None = None) -> dict[int, float]:
    """Return biases by token id. Several biases of a token add up.

    Args:
        tokenizer: Encodes the texts that stand for their tokens.
        value: An object, or a list of pairs: token ids or texts to numbers, or to false, which bans the token.
        warnings: Takes a sentence for each entry that llama-server skips; None: such an entry is an error.

    Raises:
        RequestError: The value has another shape, a bias is out of range, there are too many, or an entry is wrong.
    """
    if not isinstance(value, (list, dict)):
        raise InvalidType(f"logit_bias must be an object or a list of pairs, not {type(value).__name__}")
    if len(value) > _MAX_BIASES:
        raise InvalidParams(f"logit_bias must have at most {_MAX_BIASES} entries, not {len(value)}")
    pairs = [(_token_key(key), bias) for key, bias in value.items()] if isinstance(value, dict) else value
    found: dict[int, float] = {}
    for pair in pairs:
        try:
            ids, bias = _read_bias(tokenizer, pair)
        except InvalidParams as error:
            if warnings is None:
                raise
            warnings.append(f"{error}; the entry was ignored")
            continue
        amount = validation.number("logit_bias", bias, BANNED_BIAS, -BANNED_BIAS)
        for token in ids:
            found[token] = max(BANNED_BIAS, min(-BANNED_BIAS, found.get(token, 0.0) + amount))
    return found


def _read_bias(tokenizer: Tokenizer, pair: Any) -> tuple[list[int], float]:
    """Return the token ids of a pair, and its bias."""
    if not isinstance(pair, (list, tuple)) or len(pair) != 2:
        raise InvalidParams(f"logit_bias: {pair!r:.60} is not a pair of a token and a bias")
    token, bias = pair
    if bias is not False and not _is_number(bias):
        raise InvalidParams(f"logit_bias: {bias!r:.60} is neither a number nor false")
    ids: list[int] = []
    if isinstance(token, str):
        ids = tokenizer.encode(validation.text("logit_bias", token), add_special=False)
    elif _is_number(token) and token == int(token) and 0 <= token < tokenizer.n_vocab:
        ids = [int(token)]
    if not ids:
        raise InvalidParams(f"logit_bias: {token!r:.60} is not a token of the vocabulary")
    return ids, BANNED_BIAS if bias is False else bias


def _token_key(key: str) -> int | str:
    """Return the token id that the key of an object stands for; any other key unchanged."""
    digits = _ID_KEY.fullmatch(key)
    return key if digits is None else int(digits[1])


CONSTRAINTS = ("grammar", "json_schema", "regex", "choice", "lark")
"""Fields of `SamplingParams` that a body may set."""

NO_CONSTRAINT: tuple[Any, ...] = (None, "", [], ())
"""Values of these fields with which they constrain nothing: clients send fields that their users left blank."""

GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""vLLM's older names, and those of `structured_outputs`."""

_CONSTRAINT_FIELDS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
_NARROWING = ("uniqueItems", "propertyNames", "format")
_MAX_LEFT_OUT = 10
_KINDS = (*_CONSTRAINT_FIELDS, "json_object")
_COMPACT = "disable_any_whitespace"
_STRUCTURED = FieldRules(
    without_effect=("disable_fallback", "disable_additional_properties", "whitespace_pattern"),
    unsupported={"structural_tag": f"use one of {', '.join(_KINDS)}"},
)
_FORMAT = ("type", "json_schema", "schema")
_DESCRIBED = ("name", "description", "schema", "strict")


def response_format_changes(
    response_format: Mapping[str, Any] | None, warnings: list[str], *, strict: bool
) -> dict[str, Any]:
    """Return the keywords of `SamplingParams` for OpenAI's response_format; none for text.

    warnings: takes the warnings about unknown members. Raises `InvalidParams`, and `ApiException` for unknown members if strict.
    """
    if response_format is None:
        return {}
    warnings += check_fields(response_format, _FORMAT, place="response_format.", strict=strict)
    kind = response_format.get("type")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": response_format.get("schema") or {"type": "object"}}
    if kind != "json_schema":
        raise InvalidParams(f'response_format.type must be "text", "json_object" or "json_schema", not {kind!r:.80}')
    described = response_format.get("json_schema")
    if described is None:  # llama-server's examples have it here
        schema = response_format.get("schema")
    else:
        schema = described.get("schema") if isinstance(described, Mapping) else None
    if isinstance(described, Mapping):
        warnings += check_fields(described, _DESCRIBED, place="response_format.json_schema.", strict=strict)
    if schema is None:
        raise InvalidParams("response_format.json_schema.schema must be a JSON schema")
    return {"json_schema": schema}


def structured_output_changes(given: Mapping[str, Any], warnings: list[str], *, strict: bool) -> dict[str, Any]:
    """Return the keywords of `SamplingParams` for vLLM's structured_outputs and guided_* among the fields of a body.

    warnings: takes the warnings about unknown members. Raises `InvalidParams` for more than one constraint, and
    `ApiException` for a constraint that is not supported, or for unknown members if strict.
    """
    found: dict[str, Any] = {}
    options = given.get("structured_outputs")
    if options is not None:
        options = checked_object("structured_outputs", options, "an object")
        known = (*_KINDS, _COMPACT)
        warnings += check_fields(options, known, _STRUCTURED, place="structured_outputs.", strict=strict)
        found |= {f"structured_outputs.{name}": options[name] for name in _KINDS if name in options}
    found |= {name: given[name] for name in GUIDED if given.get(name) is not None}
    found = {name: value for name, value in found.items() if value not in (*NO_CONSTRAINT, False)}
    if len(found) > 1:
        raise InvalidParams(f"{' and '.join(found)} exclude each other: set one of them")
    for name, value in found.items():
        kind = GUIDED.get(name, name.removeprefix("structured_outputs."))
        if kind == "json_object":
            return {"json_schema": {"type": "object"}}
        return {_CONSTRAINT_FIELDS[kind]: value}
    return {}


def compact_changes(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword of `SamplingParams` for `disable_any_whitespace` within vLLM's structured_outputs; none without it."""
    options = given.get("structured_outputs")
    wanted = options.get(_COMPACT) if isinstance(options, Mapping) else None
    return {} if wanted is None else {_COMPACT: validation.boolean(f"structured_outputs.{_COMPACT}", wanted)}


def enforceable(field: str, params: SamplingParams) -> tuple[SamplingParams, list[str]]:
    """Return params without the keywords of `_NARROWING` that cannot be enforced, and a warning for each left-out keyword.

    Pydantic writes these keywords for types of Python. Other keywords are refused when the schema is compiled.
    field: the schema's field in the body. Raises `GrammarError` for a keyword with a value of the wrong type.
    """
    schema = json.loads(params.json_schema) if isinstance(params.json_schema, str) else None
    if not isinstance(schema, dict):
        return params, []
    relaxed, left_out = relaxed_schema(schema, _NARROWING)
    if relaxed == schema:
        return params, []
    warnings = [f"{field}: {sentence}" for sentence in left_out[:_MAX_LEFT_OUT]]
    if len(left_out) > _MAX_LEFT_OUT:
        warnings.append(f"{field}: {len(left_out) - _MAX_LEFT_OUT} more keywords are left out")
    return params.replace(json_schema=relaxed), warnings


def without_other_constraints(base: SamplingParams, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes without empty constraints. If they set a constraint, further changes remove the default constraint."""
    changes = {name: value for name, value in changes.items() if name not in CONSTRAINTS or value not in NO_CONSTRAINT}
    given = [name for name in CONSTRAINTS if changes.get(name) is not None]
    if not given:
        return dict(changes)
    others: dict[str, Any] = {
        name: None for name in CONSTRAINTS if name not in changes and getattr(base, name) is not None
    }
    if "grammar" not in given:
        others |= {"grammar_lazy": False, "grammar_triggers": (), "grammar_prefix": "", "grammar_root": "root"}
    return {**others, **changes}
