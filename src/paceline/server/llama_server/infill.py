"""The prompt that fills a gap in a text: llama-server's layout of it, in the model's own tokens. Not for the event loop.

rep "myproject" [sep name, text]... sep "filename"  bos  pre prefix prompt  suf suffix  mid

or, for models that were trained so, with the suffix before the prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import InvalidParams, Unsupported
from paceline.runtime import Tokenizer
from paceline.server.llama_server.bodies import InfillBody, InfillChunk
from paceline.server.llama_server.prompts import mixed_ids

_PROJECT, _FILE, _UNNAMED = "myproject\n", "filename\n", "tmp"
_BETWEEN = "\n\n--- snippet ---\n\n"  # where the model has no token for it
_NEEDED = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What the engine has: n_ctx is the most tokens of a sequence, n_batch of a tick.

    max_prompts: that it takes at once.
    """

    n_ctx: int
    n_batch: int
    max_prompts: int = 256


def check_infill(tokenizer: Tokenizer) -> None:
    """Raises `Unsupported` where the model has no tokens for it."""
    missing = [word for name, word in _NEEDED.items() if name not in tokenizer.fim_tokens]
    if missing:
        raise Unsupported(f"Infill is not supported by this model: it has no token for the {' and the '.join(missing)}")


def infill_ids(body: InfillBody, tokenizer: Tokenizer, room: Room, *, suffix_first: bool = False) -> list[int]:
    """The prompt's token ids.

    The prefix keeps its end and the suffix its beginning, three quarters and one quarter of n_batch at most; other files fill
    what that and the answer leave of n_ctx, twice the length of the answer, from their end.
    """
    check_infill(tokenizer)
    fim = tokenizer.fim_tokens
    prompt = tokenizer.encode(body.prompt or "", add_special=False, parse_special=True)
    prefix = _text_ids(tokenizer, "input_prefix", body.input_prefix)
    suffix = _text_ids(tokenizer, "input_suffix", body.input_suffix)
    before = [fim["fim_pre"], *prefix[max(0, len(prefix) - 3 * (room.n_batch // 4)) :], *prompt]
    after = [fim["fim_suf"], *suffix[: max(0, room.n_batch // 4 - (2 + len(prompt)))]]
    asked = next((n for n in (body.n_predict, body.max_completion_tokens, body.max_tokens) if n is not None), -1)
    rest = max(0, room.n_ctx - room.n_batch - 2 * max(asked, 0))
    extra = _extra_ids(tokenizer, body.input_extra or ())
    bos = [tokenizer.bos] if tokenizer.add_bos and tokenizer.bos is not None else []
    sides = after + before if suffix_first else before + after
    return [*extra[max(0, len(extra) - rest) :], *bos, *sides, fim["fim_mid"]]


def _text_ids(tokenizer: Tokenizer, name: str, value: Any) -> list[int]:
    if value is None:
        raise InvalidParams(f'"{name}" is required')
    return mixed_ids(tokenizer, name, value, add_special=False, parse_special=False)


def _extra_ids(tokenizer: Tokenizer, chunks: Sequence[InfillChunk]) -> list[int]:
    fim = tokenizer.fim_tokens
    ids: list[int] = []
    if "fim_rep" in fim:
        ids += [fim["fim_rep"], *tokenizer.encode(_PROJECT, add_special=False)]
    for chunk in chunks:
        if "fim_sep" in fim:
            name = f"{chunk.filename or _UNNAMED}\n"
            ids += [fim["fim_sep"], *tokenizer.encode(name, add_special=False)]
        else:
            ids += tokenizer.encode(_BETWEEN, add_special=False)
        ids += tokenizer.encode(chunk.text, add_special=False)
    if "fim_sep" in fim:
        ids += [fim["fim_sep"], *tokenizer.encode(_FILE, add_special=False)]
    return ids
