"""From what a caller asks to a request that an engine can accept: checked, tokenised, with its samplers. Caller's thread."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from paceline.engine.backend import Lora
from paceline.engine.prompts import Prompt, fitted, prompt_ids
from paceline.errors import InvalidParams, PromptTooLong, Unsupported
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.scheduling.clock import Clock
from paceline.scheduling.limits import Limits, Vocabulary
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
        """A request that nobody has accepted. Raises `RequestError`s."""
        if not self.shares:
            options = dataclasses.replace(options, cache_prompt=False)
        if self.limits.max_positions == 0:
            raise Unsupported("this model cannot generate; it embeds texts")
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
    """Raises `InvalidParams` for a name that the engine was not given."""
    for name, _ in lora:
        if name not in known:
            names = ", ".join(map(repr, known)) or "none; give them to the engine with lora=[...]"
            raise InvalidParams(f"lora: there is no adapter {name!r}; known are {names}")


def check_embeddable(texts: list[list[int]], longest: int) -> None:
    """Raises `PromptTooLong` for a text that has more tokens than can be embedded."""
    for index, text in enumerate(texts):
        if len(text) > longest:
            message = f"text {index} has {len(text)} tokens, and {longest} can be embedded; split or cut it"
            raise PromptTooLong(message, len(text), longest)
