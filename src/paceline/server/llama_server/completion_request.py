"""What a body of POST /completion or /infill asks for, read once: prompts, sampling, and what answers tell of both.

Reading tokenises and checks: not for the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.errors import InvalidParams, PromptTooLong
from paceline.params import SamplingParams
from paceline.runtime import Tokenizer
from paceline.server.llama_server.asking import Setting, lora_scales, request_options, sampling_params
from paceline.server.llama_server.bodies import CompletionBody, InfillBody, capped
from paceline.server.llama_server.infill import Room, infill_ids
from paceline.server.llama_server.line_limits import LineLimits
from paceline.server.llama_server.prompts import all_prompts, is_several
from paceline.server.llama_server.settings_shown import full_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """prompts: token ids of each; texts: the same as text, control tokens included. settings: as answers show them.

    options: keywords of `RequestOptions` that the body has. warnings: of what was ignored, a sentence each.
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
        """Whether somebody reads the answer while it comes."""
        return self.stream or self.line_limits.has_any

    @property
    def of_drawn(self) -> bool:
        """Whether probabilities are those after sampling."""
        return self.params.logprobs_mode == "sampled"


def read_request(body: CompletionBody, setting: Setting, room: Room) -> CompletionRequest:
    """Raises what is wrong with the body, `PromptTooLong` for a prompt that is too long."""
    warnings = body.ignored()
    prompts = _prompts(body, setting, room)
    params = sampling_params(body, setting, warnings)
    options = request_options(body, warnings)
    if body.lora is not None:
        options["lora"] = lora_scales(body.lora, setting.adapters, warnings)
    tells_progress = _tells_progress(body, len(prompts), warnings)
    stream = bool(body.stream)
    told = {
        "timings_per_token": bool(body.timings_per_token),
        "lora": [{"id": entry.id, "scale": entry.scale} for entry in body.lora or ()],
    }
    fields = tuple(body.response_fields or ())
    needs_text = not fields or "prompt" in fields
    return CompletionRequest(
        prompts=tuple(prompts),
        texts=tuple(setting.tokenizer.decode(ids, special=True) if needs_text else "" for ids in prompts),
        params=params,
        settings=full_settings(params, setting.tokenizer.eog_ids, stream=stream, told=told),
        warnings=tuple(capped(warnings)),
        line_limits=_line_limits(body),
        options=options,
        stream=stream,
        return_tokens=bool(body.return_tokens),
        timings_per_token=bool(body.timings_per_token),
        return_progress=tells_progress,
        response_fields=fields,
        id_slot=-1 if body.id_slot is None else body.id_slot,
    )


def truncated(
    request: CompletionRequest, prompts: Sequence[tuple[int, ...]], tokenizer: Tokenizer
) -> CompletionRequest:
    """The request with its prompts as they were cut."""
    texts = tuple(tokenizer.decode(ids, special=True) for ids in prompts)
    return replace(request, prompts=tuple(map(list, prompts)), texts=texts)


def _prompts(body: CompletionBody, setting: Setting, room: Room) -> Sequence[list[int]]:
    if isinstance(body, InfillBody):
        prompts = [infill_ids(body, setting.tokenizer, room, suffix_first=setting.spm_infill)]
    elif body.prompt is None:
        raise InvalidParams('"prompt" must be given: a text, token ids, or a list of these')
    else:
        _check_number(body.prompt, room)
        add, parse = body.add_special is not False, body.parse_special is not False
        prompts = all_prompts(setting.tokenizer, "prompt", body.prompt, add_special=add, parse_special=parse)
    longest = max(map(len, prompts))
    if longest > room.n_ctx > 0 and body.truncate is None:
        message = (
            f"request ({longest} tokens) exceeds the available context size ({room.n_ctx} tokens), try increasing it"
        )
        raise PromptTooLong(message, longest, room.n_ctx)
    return prompts


def _check_number(prompt: Any, room: Room) -> None:
    """Before they are tokenised, which takes a while."""
    if is_several(prompt) and len(prompt) > room.max_prompts:
        raise InvalidParams(
            f"prompt: {len(prompt)} prompts are more than the {room.max_prompts} that this server takes at once"
        )


def _tells_progress(body: CompletionBody, num_prompts: int, warnings: list[str]) -> bool:
    if body.return_progress and (num_prompts > 1 or not body.stream):
        warnings.append("return_progress has an effect on a stream of one prompt only and was ignored")
        return False
    return bool(body.return_progress)


def _line_limits(body: CompletionBody) -> LineLimits:
    limit_ms = body.t_max_predict_ms or 0
    return LineLimits(min_indent=body.n_indent or 0, max_predict_s=limit_ms / 1000 if limit_ms > 0 else None)
