"""The body of POST /completion or /infill, parsed: prompts, sampling, options, and the settings that responses report.

Values that llama-server clamps are clamped with a warning. Values that it documents as "off" turn a sampler off. A field that
would change the output and is not supported is refused. Parsing tokenises: not for the event loop.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline import validation
from paceline.engine.prompts import Prompt, has_media
from paceline.errors import InvalidParams, InvalidType, PromptTooLong, Unsupported
from paceline.params import PatternTrigger, SamplingParams
from paceline.request import MAX_DRAFT, RequestOptions
from paceline.runtime import Tokenizer
from paceline.server.dialects.llama_server.llama_bodies import (
    OPTION_EXTRAS,
    SAMPLING,
    CompletionBody,
    InfillBody,
    InfillChunk,
    LoraScale,
)
from paceline.server.dialects.request_body import (
    BANNED_BIAS,
    MarkedImages,
    cap_warnings,
    drop_stream_options,
    enforceable,
    is_prompt_list,
    min_prompt_tokens,
    parse_logit_bias,
    parse_samplers,
    read_prompts,
    tokenize_mixed,
    without_empty_texts,
    without_fractions,
    without_other_constraints,
)

RANDOM_SEED = 2**32 - 1
"""The number by which llama-server names a random seed, as -1 does."""

_TOKEN_TRIGGER, _WORD_TRIGGER, _PATTERN_TRIGGER, _FULL_PATTERN_TRIGGER = 0, 1, 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ParseContext:
    """Facts that parsing needs beside the body.

    Attributes:
        base: Sampling defaults.
        tokenizer: Encodes the prompts.
        images: Reads the images of prompts.
        n_ctx: Tokens of a sequence; 0: no limit.
        n_batch: Tokens of a tick.
        max_prompts: Prompts of a request.
        adapters: Names of the LoRA adapters by id.
        spm_infill: Whether the suffix comes first in an infill prompt.
        spec_types: The kinds of drafts, as llama-server names them.
        strict: Whether unknown fields are refused.
    """

    base: SamplingParams
    tokenizer: Tokenizer
    images: MarkedImages
    n_ctx: int = 0
    n_batch: int = 0
    max_prompts: int = 256
    adapters: Sequence[str] = ()
    spm_infill: bool = False
    spec_types: str = "none"
    strict: bool = False


def parse_params(body: CompletionBody, context: ParseContext, warnings: list[str]) -> SamplingParams:
    """Return the sampling parameters. Raises `InvalidParams`, and `Unsupported` for a field that would change the output."""
    base = context.base
    changes = _given(body, ("grammar_lazy",))
    changes |= {SAMPLING[name].name: _bounded(name, value, warnings) for name, value in _given(body, SAMPLING).items()}
    if changes.get("dry_base", 1.0) < 1.0:
        warnings.append(f"dry_base must be at least 1; {changes.pop('dry_base')} was ignored")
    if body.seed is not None:
        changes["seed"] = _parse_seed(body.seed)
    if body.samplers is not None:
        changes["samplers"] = parse_samplers(body.samplers, warnings)
    if body.logit_bias is not None:
        changes["logit_bias"] = parse_logit_bias(context.tokenizer, body.logit_bias, warnings)
    if body.dry_sequence_breakers is not None:
        if not body.dry_sequence_breakers:
            raise InvalidParams("dry_sequence_breakers must be a list of at least one text")
        changes["dry_sequence_breakers"] = tuple(body.dry_sequence_breakers)
    if stops := without_empty_texts([body.stop] if isinstance(body.stop, str) else body.stop or []):
        changes["stop"] = tuple(dict.fromkeys(stops))
    if (num_choices := body.n_cmpl or body.n) is not None:
        changes["n"] = num_choices
    num_predict = _num_predict(body)
    changes["max_tokens"] = base.max_tokens if num_predict == -1 else num_predict
    changes |= _constraint(body, warnings)
    if num_probs := body.n_probs if body.n_probs is not None else body.logprobs:
        changes |= {"logprobs": num_probs, "logprobs_mode": "sampled" if body.post_sampling_probs else "raw"}
    if body.min_keep is not None and body.min_keep > 1:
        raise Unsupported(
            f"min_keep must be 0 or 1, not {body.min_keep}: samplers here always keep one token, never more"
        )
    params, relaxed = enforceable("json_schema", base.replace(**without_other_constraints(base, changes)))
    warnings += relaxed
    return params


def parse_options(body: CompletionBody, warnings: list[str]) -> dict[str, Any]:
    """Return the keywords of `RequestOptions` that the body has. Raises `InvalidParams`."""
    options, unused = drop_stream_options(_given(body, OPTION_EXTRAS), stream=bool(body.stream))
    warnings += [f"{name} has no effect without stream and was ignored" for name in unused]
    options |= _most_drafts(body, warnings)
    RequestOptions(**options)  # raises for wrong values
    return options | ({} if body.cache_prompt is not False else {"cache_prompt": False})


def _most_drafts(body: CompletionBody, warnings: list[str]) -> dict[str, Any]:
    """Return max_draft of speculative.n_max, a name that llama-server no longer reads. A value above the maximum counts as it."""
    asked = body.speculative_n_max
    if asked is None:
        return {}
    if body.max_draft is not None:
        warnings.append("speculative.n_max was ignored, since there is max_draft as well")
        return {}
    if asked > MAX_DRAFT:
        warnings.append(f"speculative.n_max: {asked} counts as {MAX_DRAFT}")
    return {"max_draft": min(asked, MAX_DRAFT)}


def _given(body: CompletionBody, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(body, name) for name in names if getattr(body, name) is not None}


def parse_lora_scales(entries: Sequence[LoraScale], adapters: Sequence[str], warnings: list[str]) -> dict[str, float]:
    """Return scales by the adapters' names; adapters without an entry are not applied."""
    scales: dict[str, float] = {}
    for entry in entries:
        if 0 <= entry.id < len(adapters):
            scales[adapters[entry.id]] = entry.scale
        else:
            warnings.append(f"lora: there is no adapter {entry.id}, and it was ignored")
    return scales


def _bounded(name: str, value: Any, warnings: list[str]) -> Any:
    """Return the value of a sampling parameter as llama-server takes it."""
    row = SAMPLING[name]
    if row.ours:
        return without_fractions(value)
    if row.off is not None:
        value = _clamp(value, *row.off)
    if row.is_clamped:
        kind = float if row.kind == "number" else int
        clamped = kind(_clamp(value, row.low, row.high))
        if clamped != value:
            warnings.append(f"{name}: {value} counts as {clamped}")
            return clamped
    return value


def _clamp(value: Any, low: float | None, high: float | None) -> Any:
    if low is not None and value < low:
        return low
    return high if high is not None and value > high else value


def _parse_seed(seed: int) -> int | None:
    """Return the seed; a negative number counts as an unsigned one of 32 bits, as llama-server stores it."""
    if seed in (-1, RANDOM_SEED):
        return None
    return validation.integer("seed", seed, -(2**31), 2**64 - 1) % (2**32 if seed < 0 else 2**64)


def _num_predict(body: CompletionBody) -> int:
    return next((n for n in (body.n_predict, body.max_completion_tokens, body.max_tokens) if n is not None), -1)


def _constraint(body: CompletionBody, warnings: list[str]) -> dict[str, Any]:
    """Return the grammar or the schema. A grammar wins, as in llama-server; an empty grammar is none."""
    triggers = tuple(_parse_trigger(index, trigger) for index, trigger in enumerate(body.grammar_triggers or ()))
    if body.grammar:
        if body.json_schema is not None:
            warnings.append("json_schema was ignored, since there is a grammar as well")
        return {"grammar": body.grammar, "grammar_triggers": triggers if body.grammar_lazy else ()}
    if body.json_schema is None:
        return {}
    if not isinstance(body.json_schema, (dict, bool)):
        raise InvalidType(f"json_schema must be an object or a bool, not {type(body.json_schema).__name__}")
    return {"json_schema": {"type": "object"} if body.json_schema == {} else body.json_schema}


def _parse_trigger(index: int, trigger: dict[str, Any]) -> str | int | dict[str, Any]:
    kind, value = trigger.get("type"), trigger.get("value")
    if kind == _TOKEN_TRIGGER:
        return validation.integer(f"grammar_triggers[{index}].token", without_fractions(trigger.get("token")), 0)
    if kind == _WORD_TRIGGER:
        return validation.text(f"grammar_triggers[{index}].value", value)
    if kind in (_PATTERN_TRIGGER, _FULL_PATTERN_TRIGGER):
        pattern = validation.text(f"grammar_triggers[{index}].value", value)
        return {"pattern": pattern, "is_full": kind == _FULL_PATTERN_TRIGGER}
    raise InvalidParams(
        f"grammar_triggers[{index}].type must be 0 (a token), 1 (a word), 2 (a pattern) or 3 (a pattern of the whole text), "
        f"not {kind!r}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LineLimits:
    """min_indent: least indentation of every line but the first; generation stops before a line with less.

    max_predict_s: seconds since the first token after which a line break stops generation; None: no limit.
    """

    min_indent: int = 0
    max_predict_s: float | None = None

    @property
    def has_any(self) -> bool:
        """True if there is a limit."""
        return self.min_indent > 0 or self.max_predict_s is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A parsed body.

    Attributes:
        prompts: The token ids of each prompt, or its segments with images.
        texts: The text of each prompt with control tokens, with a marker for each image.
        settings: The settings that responses report.
        options: Keywords of `RequestOptions` that the body has.
        warnings: A sentence for each ignored field.
    """

    prompts: tuple[Prompt, ...]
    texts: tuple[str, ...]
    params: SamplingParams
    settings: Mapping[str, Any]
    warnings: tuple[str, ...]
    line_limits: LineLimits
    options: Mapping[str, Any] = field(default_factory=dict)
    stream: bool = False
    return_tokens: bool = False
    timings_per_token: bool = False
    return_progress: bool = False
    response_fields: tuple[str, ...] = ()
    id_slot: int = -1


def parse_request(body: CompletionBody, context: ParseContext) -> CompletionRequest:
    """Parse a body: tokenise prompts, map fields. Raises `InvalidParams`, `Unsupported`, `PromptTooLong`."""
    warnings = body.field_warnings(strict=context.strict)
    prompts = _parse_prompts(body, context)
    params = parse_params(body, context, warnings)
    options = parse_options(body, warnings)
    if body.lora is not None:
        options["lora"] = parse_lora_scales(body.lora, context.adapters, warnings)
    if any(map(has_media, prompts)):
        options |= {"add_special": body.add_special is not False, "parse_special": body.parse_special is not False}
    return_progress = bool(body.return_progress)
    if return_progress and (len(prompts) > 1 or not body.stream):
        warnings.append("return_progress has an effect on a stream of one prompt only and was ignored")
        return_progress = False
    stream, limit_ms = bool(body.stream), body.t_max_predict_ms or 0
    may_draft = bool(options.get("speculation", True)) and options.get("max_draft") != 0
    others = {
        "timings_per_token": bool(body.timings_per_token),
        "lora": [{"id": entry.id, "scale": entry.scale} for entry in body.lora or ()],
        "speculative.types": context.spec_types if may_draft else "none",
    }
    fields = tuple(body.response_fields or ())
    needs_text = not fields or "prompt" in fields
    return CompletionRequest(
        prompts=tuple(prompts),
        texts=tuple(_text_of(prompt, context) if needs_text else "" for prompt in prompts),
        params=params,
        settings=full_settings(params, context.tokenizer.eog_ids, stream=stream, others=others),
        warnings=cap_warnings(warnings),
        line_limits=LineLimits(min_indent=body.n_indent or 0, max_predict_s=limit_ms / 1000 if limit_ms > 0 else None),
        options=options,
        stream=stream,
        return_tokens=bool(body.return_tokens),
        timings_per_token=bool(body.timings_per_token),
        return_progress=return_progress,
        response_fields=fields,
        id_slot=-1 if body.id_slot is None else body.id_slot,
    )


def _text_of(prompt: Any, context: ParseContext) -> str:
    if has_media(prompt):
        return "".join(segment if isinstance(segment, str) else context.images.marker for segment in prompt)
    return context.tokenizer.decode(prompt, special=True)


def _parse_prompts(body: CompletionBody, context: ParseContext) -> Sequence[Prompt]:
    prompts: list[Prompt]
    tokenizer = context.tokenizer
    given = body.prompt if is_prompt_list(body.prompt) else [body.prompt]
    if len(given) > context.max_prompts:  # before tokenising, which takes a while
        raise InvalidParams(
            f"prompt: {len(given)} prompts are more than the {context.max_prompts} that this server takes at once"
        )
    most = context.n_ctx if body.truncate is None and context.n_ctx > 0 else None
    # Of /infill only `prompt` counts; its other fields are cut. Prompts with images are left to the engine.
    at_least = 0 if most is None else max((min_prompt_tokens(tokenizer, prompt) for prompt in given), default=0)
    if most is not None and at_least > most:
        raise _too_long(at_least, most, is_counted=False)
    if isinstance(body, InfillBody):
        prompts = [infill_prompt(body, context)]
    elif body.prompt is None:
        raise InvalidParams('"prompt" must be given: a text, token ids, or a list of these')
    else:
        add, parse = body.add_special is not False, body.parse_special is not False
        prompts = read_prompts(tokenizer, "prompt", body.prompt, context.images, add_special=add, parse_special=parse)
    longest = max((len(prompt) for prompt in prompts if not has_media(prompt)), default=0)
    if most is not None and longest > most:
        raise _too_long(longest, most)
    return prompts


def _too_long(num_tokens: int, n_ctx: int, *, is_counted: bool = True) -> PromptTooLong:
    number = f"{'' if is_counted else 'at least '}{num_tokens}"
    message = f"request ({number} tokens) exceeds the available context size ({n_ctx} tokens), try increasing it"
    return PromptTooLong(message, num_tokens, n_ctx, is_counted)


_PROJECT, _FILE, _UNNAMED = "myproject\n", "filename\n", "tmp"
_BETWEEN = "\n\n--- snippet ---\n\n"  # where the model has no token for it


def infill_prompt(body: InfillBody, context: ParseContext) -> list[int]:
    """Return the token ids of an infill prompt.

    The prefix keeps its end and the suffix its beginning, at most three quarters and one quarter of n_batch; other
    files fill what that and twice n_predict leave of n_ctx, from their end. Control tokens spelled out in the texts
    stay text, except in `prompt` if the body has `parse_special`. Raises `Unsupported` if the model has no tokens for
    it.
    """
    tokenizer, n_batch = context.tokenizer, context.n_batch
    for_prefix, for_suffix, for_middle = tokenizer.fim.required()
    prompt = tokenizer.encode(body.prompt or "", add_special=False, parse_special=bool(body.parse_special))
    prefix = _text_ids(tokenizer, "input_prefix", body.input_prefix)
    suffix = _text_ids(tokenizer, "input_suffix", body.input_suffix)
    before = [for_prefix, *prefix[max(0, len(prefix) - 3 * (n_batch // 4)) :], *prompt]
    after = [for_suffix, *suffix[: max(0, n_batch // 4 - (2 + len(prompt)))]]
    rest = max(0, context.n_ctx - n_batch - 2 * max(_num_predict(body), 0))
    extra = _extra_ids(tokenizer, body.input_extra or ())
    bos = [tokenizer.bos] if tokenizer.add_bos and tokenizer.bos is not None else []
    sides = after + before if context.spm_infill else before + after
    return [*extra[max(0, len(extra) - rest) :], *bos, *sides, for_middle]


def _text_ids(tokenizer: Tokenizer, name: str, value: Any) -> list[int]:
    if value is None:
        raise InvalidParams(f'"{name}" is required')
    return tokenize_mixed(tokenizer, name, value, add_special=False, parse_special=False)


def _extra_ids(tokenizer: Tokenizer, chunks: Sequence[InfillChunk]) -> list[int]:
    rep, sep = tokenizer.fim.rep, tokenizer.fim.sep
    ids: list[int] = []
    if rep is not None:
        ids += [rep, *tokenizer.encode(_PROJECT, add_special=False)]
    for chunk in chunks:
        if sep is not None:
            name = f"{chunk.filename or _UNNAMED}\n"
            ids += [sep, *tokenizer.encode(name, add_special=False)]
        else:
            ids += tokenizer.encode(_BETWEEN, add_special=False)
        ids += tokenizer.encode(chunk.text, add_special=False)
    if sep is not None:
        ids += [sep, *tokenizer.encode(_FILE, add_special=False)]
    return ids


def brief_settings(
    params: SamplingParams, *, stream: bool = False, others: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the settings without lists and grammars, for /props and /slots. others: settings outside of sampling."""
    num_predict = -1 if params.max_tokens is None else params.max_tokens
    given = others or {}
    return {
        "seed": RANDOM_SEED if params.seed is None else params.seed,
        **{name: getattr(params, row.name) for name, row in SAMPLING.items() if not row.ours},
        "max_tokens": num_predict,
        "n_predict": num_predict,
        "n_keep": 0,
        "n_discard": 0,
        "stream": stream,
        "n_probs": params.logprobs or 0,
        "min_keep": 0,
        "chat_format": "Content-only",
        "reasoning_format": "none",
        "reasoning_in_content": False,
        "generation_prompt": "",
        "samplers": list(params.samplers),
        "speculative.types": given.get("speculative.types", "none"),
        "timings_per_token": given.get("timings_per_token", False),
        "post_sampling_probs": params.logprobs is not None and params.logprobs_mode == "sampled",
        "backend_sampling": False,
        "lora": given.get("lora", []),
    }


def full_settings(
    params: SamplingParams, eog_ids: Iterable[int], *, stream: bool, others: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings for a response. A JSON schema is reported as given, not as its grammar."""
    never = [(token, BANNED_BIAS) for token in sorted(eog_ids)] if params.ignore_eos else []
    biases = params.logit_bias.items() if isinstance(params.logit_bias, Mapping) else params.logit_bias
    settings = brief_settings(params, stream=stream, others=others) | {
        "dry_sequence_breakers": list(params.dry_sequence_breakers),
        "stop": list(params.stop),
        "logit_bias": [
            {"bias": None if bias <= BANNED_BIAS else bias, "token": token} for token, bias in [*biases, *never]
        ],
        "grammar": params.grammar or "",
        "grammar_lazy": params.grammar_lazy,
        "grammar_triggers": [_trigger_body(trigger) for trigger in params.grammar_triggers],
        "preserved_tokens": [],
    }
    if isinstance(params.json_schema, str):
        settings["json_schema"] = json.loads(params.json_schema)
    return settings


def _trigger_body(trigger: object) -> dict[str, Any]:
    match trigger:
        case int():
            return {"type": 0, "value": "", "token": trigger}
        case PatternTrigger():
            return {"type": 3 if trigger.is_full else 2, "value": trigger.pattern}
        case _:
            return {"type": 1, "value": trigger}
