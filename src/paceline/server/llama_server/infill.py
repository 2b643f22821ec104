"""The prompt that fills a gap in a text, in llama-server's layout. Not for the event loop: tokenises.

rep "myproject" [sep name, text]... sep "filename" bos pre prefix prompt suf suffix mid

or, for models that were trained so, with the suffix before the prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import InvalidParams, Unsupported
from paceline.runtime import Tokenizer
from paceline.runtime.tokenizer import FimTokens
from paceline.server.llama_server.bodies import InfillBody, InfillChunk
from paceline.server.prompt_inputs import tokenize_mixed

_PROJECT, _FILE, _UNNAMED = "myproject\n", "filename\n", "tmp"
_BETWEEN = "\n\n--- snippet ---\n\n"  # where the model has no token for it


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLimits:
    """Limits of the engine. n_ctx: tokens of a sequence; n_batch: of a tick; max_prompts: prompts of a request."""

    n_ctx: int
    n_batch: int
    max_prompts: int = 256


def infill_prompt(
    body: InfillBody, tokenizer: Tokenizer, limits: PromptLimits, *, suffix_first: bool = False
) -> list[int]:
    """Return the token ids of an infill prompt.

    The prefix keeps its end and the suffix its beginning, at most three quarters and one quarter of n_batch; other
    files fill what that and twice n_predict leave of n_ctx, from their end. Raises `Unsupported` if the model has no
    tokens for it.
    """
    for_prefix, for_suffix, for_middle = _fim_tokens(tokenizer.fim)
    prompt = tokenizer.encode(body.prompt or "", add_special=False, parse_special=True)
    prefix = _text_ids(tokenizer, "input_prefix", body.input_prefix)
    suffix = _text_ids(tokenizer, "input_suffix", body.input_suffix)
    before = [for_prefix, *prefix[max(0, len(prefix) - 3 * (limits.n_batch // 4)) :], *prompt]
    after = [for_suffix, *suffix[: max(0, limits.n_batch // 4 - (2 + len(prompt)))]]
    asked = next((n for n in (body.n_predict, body.max_completion_tokens, body.max_tokens) if n is not None), -1)
    rest = max(0, limits.n_ctx - limits.n_batch - 2 * max(asked, 0))
    extra = _extra_ids(tokenizer, body.input_extra or ())
    bos = [tokenizer.bos] if tokenizer.add_bos and tokenizer.bos is not None else []
    sides = after + before if suffix_first else before + after
    return [*extra[max(0, len(extra) - rest) :], *bos, *sides, for_middle]


def _fim_tokens(fim: FimTokens) -> tuple[int, int, int]:
    """Return the tokens for prefix, suffix and middle."""
    if fim.prefix is None or fim.suffix is None or fim.middle is None:
        missing = [name for name in ("prefix", "suffix", "middle") if getattr(fim, name) is None]
        raise Unsupported(f"Infill is not supported by this model: it has no token for the {' and the '.join(missing)}")
    return fim.prefix, fim.suffix, fim.middle


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
