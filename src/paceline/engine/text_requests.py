"""From what a caller asks to a request that an engine can accept: checked, tokenised, with its samplers. Caller's thread."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.engine.backend import Lora
from paceline.engine.prompts import Prompt, fitted, prompt_ids, truncated
from paceline.errors import InvalidParams, PromptTooLong, Unsupported
from paceline.output import Vocabulary
from paceline.params import SamplingParams
from paceline.request import RequestOptions, Truncate
from paceline.scheduling.clock import Clock
from paceline.scheduling.limits import Limits
from paceline.scheduling.sequence import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequests:
    """Makes an engine's requests for text.

    shares: whether the engine keeps prompts at all. next_key: a number for each. adapters: the names that requests may use.
    make_samplers: one for each choice, or none where they are made elsewhere; raises what is wrong with the params.
    """

    tokenizer: Any
    vocabulary: Vocabulary
    limits: Limits
    shares: bool
    adapters: Collection[str]
    next_key: Callable[[], int]
    make_samplers: Callable[[SamplingParams, list[int]], tuple[object, ...]]
    clock: Clock

    def prepare(self, prompt: Prompt, params: SamplingParams, options: RequestOptions) -> Request:
        """Return a request that is checked and not yet accepted. Raises `RequestError`s."""
        if not self.shares:
            options = dataclasses.replace(options, cache_prompt=False)
        if self.limits.max_positions == 0:
            raise Unsupported(f"this model cannot generate; {self.limits.cannot_generate}")
        check_adapters(options.lora, self.adapters)
        tokenizer = self.tokenizer
        known = prompt_ids(prompt, tokenizer, options)
        ids = fitted(known, params, options, self.limits.max_positions, tokenizer.bos)
        return Request(
            key=self.next_key(),
            prompt=ids,
            params=params,
            options=options,
            samplers=self.make_samplers(params, ids),
            submitted_s=self.clock.now(),
            lora=options.lora,
            vocabulary=self.vocabulary,
            echo=tokenizer.decode(ids, special=options.special) if params.echo else "",
        )


def check_adapters(lora: Lora, known: Collection[str]) -> None:
    """Raise `InvalidParams` for a name that the engine was not given."""
    for name, _ in lora:
        if name not in known:
            names = ", ".join(map(repr, known)) or "none; give them to the engine with lora=[...]"
            raise InvalidParams(f"lora: there is no adapter {name!r}; known are {names}")


def embeddable(
    texts: list[list[int]], options: RequestOptions, longest: int, special_tokens: Mapping[str, int]
) -> list[list[int]]:
    """Return the texts, cut to `longest` tokens where they have more and the request says how. Raises `PromptTooLong`.

    A bos token in front and an eos or sep token at the end stay: models pool at them.
    """
    found = []
    for index, text in enumerate(texts):
        if len(text) > longest and options.truncate is None:
            raise too_long_to_embed(f"text {index}", len(text), longest)
        found.append(text if options.truncate is None else _cut(text, longest, options.truncate, special_tokens))
    return found


def _cut(text: list[int], longest: int, side: Truncate, special_tokens: Mapping[str, int]) -> list[int]:
    if len(text) <= longest:
        return text
    head = int(text[0] == special_tokens.get("bos"))
    tail = int(text[-1] in (special_tokens.get("eos"), special_tokens.get("sep")))
    if longest <= head + tail:
        return text[:longest]
    end = len(text) - tail
    return text[:head] + truncated(text[head:end], longest - head - tail, side) + text[end:]


def too_long_to_embed(name: str, num_tokens: int, longest: int) -> PromptTooLong:
    """Return the error of a text that has more tokens than can be embedded."""
    return PromptTooLong(
        f"{name} is too large: it has {num_tokens} tokens, and {longest} can be embedded; split it, or set truncate to "
        '"left", "right" or "middle"',
        num_tokens,
        longest,
    )
