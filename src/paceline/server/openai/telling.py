"""What a request wants to be told, put together from its body and what runs for it. On the event loop."""

from __future__ import annotations

import hashlib
import time
from functools import cache
from typing import Any

from paceline import __version__
from paceline.params import SamplingParams
from paceline.runtime import build_info
from paceline.server.generating import Generation
from paceline.server.openai.answers import Telling
from paceline.server.openai.body_fields import GenerationBody
from paceline.server.openai.reading import Asked, model_warning
from paceline.server.service import Service


def telling_of(service: Service, body: GenerationBody, asked: Asked, generation: Generation, **kind: Any) -> Telling:
    """kind: the members of `Telling` that differ between the endpoints."""
    engine, params = service.engine(), asked.params
    tells_tokens = params.logprobs is not None or params.prompt_logprobs is not None
    stream = body.stream_options
    return Telling(
        created=int(time.time()),
        model=service.names[0] if body.model is None else body.model,
        system_fingerprint=fingerprint(engine.model.fingerprint),
        prompts=generation.prompts,
        n=params.n,
        shown=_pieces(engine, special=bool(asked.options.get("special"))) if tells_tokens else (),
        spelt=_pieces(engine, special=True) if tells_tokens else (),
        num_top=params.logprobs,
        echoes=params.echo,
        token_ids=bool(body.return_token_ids),
        include_usage=bool(stream and stream.include_usage),
        continuous_usage=bool(stream and stream.continuous_usage_stats),
        clock=time.monotonic if body.timings_per_token else None,
        warnings=(*asked.warnings, *model_warning(body, service.names)),
        **kind,
    )


def scores_prompt(body: GenerationBody, params: SamplingParams) -> bool:
    """Whether the prompt's log-probabilities were asked for by themselves."""
    return params.prompt_logprobs is not None and getattr(body, "prompt_logprobs", None) is not None


@cache
def fingerprint(model: bytes) -> str:
    """Of what answers: this version, its llama.cpp and the model."""
    facts = f"{__version__} {build_info().llama_cpp_commit} ".encode() + model
    return "fp_" + hashlib.sha256(facts).hexdigest()[:12]


def _pieces(engine: Any, *, special: bool) -> Any:
    return engine.tokenizer.pieces(special)
