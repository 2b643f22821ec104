"""The parsed body of POST /completion or /infill: prompts, sampling, options, and what responses report of them.

Parsing tokenises: not for the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.errors import InvalidParams, PromptTooLong
from paceline.params import SamplingParams
from paceline.runtime import Tokenizer
from paceline.server.llama_server.bodies import CompletionBody, InfillBody, cap_warnings
from paceline.server.llama_server.generation_settings import full_settings
from paceline.server.llama_server.infill import PromptLimits, infill_prompt
from paceline.server.llama_server.line_limits import LineLimits
from paceline.server.llama_server.sampling_fields import ParseContext, parse_lora_scales, parse_options, parse_params
from paceline.server.prompt_inputs import is_prompt_list, tokenize_prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """prompts: token ids of each; texts: their text with control tokens. settings: as responses report them.

    options: keywords of `RequestOptions` that the body has. warnings: a sentence for each ignored field.
    """

    prompts: tuple[list[int], ...]
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

    @property
    def is_watched(self) -> bool:
        """True if chunks are read while they are generated."""
        return self.stream or self.line_limits.has_any

    @property
    def looks_at_slots(self) -> bool:
        """True if events report prefill progress, or cached tokens before the end."""
        return self.return_progress or (self.timings_per_token and self.stream and len(self.prompts) == 1)

    @property
    def of_drawn(self) -> bool:
        """True if log-probabilities are those after sampling."""
        return self.params.logprobs_mode == "sampled"


def parse_request(body: CompletionBody, context: ParseContext, limits: PromptLimits) -> CompletionRequest:
    """Parse a body: tokenise prompts, map fields. Raises `InvalidParams`, `Unsupported`, `PromptTooLong`."""
    warnings = body.ignored()
    prompts = _parse_prompts(body, context, limits)
    params = parse_params(body, context, warnings)
    options = parse_options(body, warnings)
    if body.lora is not None:
        options["lora"] = parse_lora_scales(body.lora, context.adapters, warnings)
    tells_progress = _wants_progress(body, len(prompts), warnings)
    stream = bool(body.stream)
    others = {
        "timings_per_token": bool(body.timings_per_token),
        "lora": [{"id": entry.id, "scale": entry.scale} for entry in body.lora or ()],
    }
    fields = tuple(body.response_fields or ())
    needs_text = not fields or "prompt" in fields
    return CompletionRequest(
        prompts=tuple(prompts),
        texts=tuple(context.tokenizer.decode(ids, special=True) if needs_text else "" for ids in prompts),
        params=params,
        settings=full_settings(params, context.tokenizer.eog_ids, stream=stream, others=others),
        warnings=tuple(cap_warnings(warnings)),
        line_limits=_parse_line_limits(body),
        options=options,
        stream=stream,
        return_tokens=bool(body.return_tokens),
        timings_per_token=bool(body.timings_per_token),
        return_progress=tells_progress,
        response_fields=fields,
        id_slot=-1 if body.id_slot is None else body.id_slot,
    )


def with_truncated_prompts(
    request: CompletionRequest, prompts: Sequence[tuple[int, ...]], tokenizer: Tokenizer
) -> CompletionRequest:
    """Return the request with its prompts as the engine truncated them."""
    texts = tuple(tokenizer.decode(ids, special=True) for ids in prompts)
    return replace(request, prompts=tuple(map(list, prompts)), texts=texts)


def _parse_prompts(body: CompletionBody, context: ParseContext, limits: PromptLimits) -> Sequence[list[int]]:
    if isinstance(body, InfillBody):
        prompts = [infill_prompt(body, context.tokenizer, limits, suffix_first=context.spm_infill)]
    elif body.prompt is None:
        raise InvalidParams('"prompt" must be given: a text, token ids, or a list of these')
    else:
        _check_list_length(body.prompt, limits)
        add, parse = body.add_special is not False, body.parse_special is not False
        prompts = tokenize_prompts(context.tokenizer, "prompt", body.prompt, add_special=add, parse_special=parse)
    longest = max(map(len, prompts))
    if longest > limits.n_ctx > 0 and body.truncate is None:
        message = (
            f"request ({longest} tokens) exceeds the available context size ({limits.n_ctx} tokens), try increasing it"
        )
        raise PromptTooLong(message, longest, limits.n_ctx)
    return prompts


def _check_list_length(prompt: Any, limits: PromptLimits) -> None:
    """Refuse too many prompts before they are tokenised, which takes a while."""
    if is_prompt_list(prompt) and len(prompt) > limits.max_prompts:
        raise InvalidParams(
            f"prompt: {len(prompt)} prompts are more than the {limits.max_prompts} that this server takes at once"
        )


def _wants_progress(body: CompletionBody, num_prompts: int, warnings: list[str]) -> bool:
    if body.return_progress and (num_prompts > 1 or not body.stream):
        warnings.append("return_progress has an effect on a stream of one prompt only and was ignored")
        return False
    return bool(body.return_progress)


def _parse_line_limits(body: CompletionBody) -> LineLimits:
    limit_ms = body.t_max_predict_ms or 0
    return LineLimits(min_indent=body.n_indent or 0, max_predict_s=limit_ms / 1000 if limit_ms > 0 else None)
