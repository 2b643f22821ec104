"""Tries one model file as a user would, and writes the results as JSON: run by test_architectures.py, a process a file.

Each way of generating is compared with prompts that are computed alone and without a cache: equality of the tokens, and the
largest difference of their log-probabilities.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tests.exact import EXACT

from paceline import LLM, Completion, Model
from paceline.errors import PacelineError
from paceline.kv_cache.offload import TransferCost
from paceline.runtime import Context
from paceline.streaming import Nothing

# The files know 256 positions, have windows of 32 and compress 128 tokens to one.
_LENGTHS = (1, 5, 40, 150)
_ENGINE: dict[str, Any] = {**EXACT, "chunk_size": 48}
_SAMPLING = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 5, "ignore_eos": True, "logprobs": 1}
# The logits of random weights lie within a few tenths. Too cold, one token may win everywhere; too warm, the seed alone
# decides. The first of these at which texts differ is taken.
_TEMPERATURES = (0.03, 0.1, 0.3)
_COMMON = 100  # tokens, three windows
_ATTEMPTS = 4
_BEFORE_FORK = 16


def ids(count: int, seed: int) -> list[int]:
    """Return random token ids; every model has 128 of them at least."""
    chosen = random.Random(seed)
    return [chosen.randrange(128) for _ in range(count)]


class Probe:
    """The ways of generating with one model, each compared with computing alone."""

    def __init__(self, model: Model, num_slots: int, folder: str) -> None:
        self._model, self._folder = model, folder
        self._options: dict[str, Any] = {**_ENGINE, "num_slots": num_slots}
        self._sampling: dict[str, Any] = {}

    def found(self) -> dict[str, Any]:
        """Return the result of each way."""
        with self._engine() as llm:
            alone = self._alone(llm)
            return {
                "generated": [len(completion.token_ids) for completion in alone],
                "depends": self._depends(llm),
                "texts": len({completion.token_ids for completion in alone}),
                "default": self._tried(self._default),
                "together": self._tried(lambda: self._together(llm, alone)),
                "cached": self._tried(lambda: self._cached(llm, alone)),
                "shared": self._tried(lambda: self._shared(llm)),
                "forked": self._tried(lambda: self._forked(llm)),
                "choices": self._tried(lambda: self._choices(llm)),
                "preempted": self._tried(self._preempted),
                "saved": self._tried(self._saved),
            }

    def _engine(self, **options: Any) -> LLM:
        return LLM(self._model, **{**self._options, **options})

    def _tried(self, way: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        try:
            return way()
        except PacelineError as error:
            return {"refused": f"{type(error).__name__}: {error}"}

    def _alone(self, llm: LLM) -> list[Completion]:
        for temperature in _TEMPERATURES:
            self._sampling = {**_SAMPLING, "temperature": temperature}
            alone = [self._expected(llm, prompt, 24) for prompt in _prompts()]
            if len({completion.token_ids for completion in alone}) > 1:
                break
        return alone

    def _expected(self, llm: LLM, prompt: list[int], max_tokens: int, **options: Any) -> Completion:
        return llm.generate(prompt, cache_prompt=False, **{**self._sampling, "max_tokens": max_tokens, **options})

    def _default(self) -> dict[str, Any]:
        """All four together, and from the cache, with flash attention and a cache of half precision."""
        with self._engine(flash_attn="auto", type_k="f16", type_v="f16") as llm:
            alone = [self._expected(llm, prompt, 24) for prompt in _prompts()]
            together, cached = self._together(llm, alone), self._cached(llm, alone)
            return {**cached, "off": max(together["off"], cached["off"]), "same": together["same"] and cached["same"]}

    def _together(self, llm: LLM, alone: list[Completion]) -> dict[str, Any]:
        return _compared(llm.generate(_prompts(), cache_prompt=False, **self._sampling, max_tokens=24), alone)

    def _cached(self, llm: LLM, alone: list[Completion]) -> dict[str, Any]:
        first = [llm.generate(prompt, **self._sampling, max_tokens=24) for prompt in _prompts()]
        again = [llm.generate(prompt, **self._sampling, max_tokens=24) for prompt in _prompts()]
        return _compared([*first, *again], [*alone, *alone])

    def _shared(self, llm: LLM) -> dict[str, Any]:
        """Prompts with a common beginning: at once, then others of which the beginning is known.

        On a busy machine the first one may be past its beginning when the others come: then it is tried with another beginning.
        """
        for attempt in range(_ATTEMPTS):
            common = ids(_COMMON, 1 + 100 * attempt)
            prompts = [[*common, *ids(20, seed)] for seed in range(10, 14)]
            later = [[*common, *ids(20, seed)] for seed in range(14, 16)]
            at_once = llm.generate(prompts, **self._sampling, max_tokens=8)
            known = llm.generate(later, **self._sampling, max_tokens=8)
            alone = [self._expected(llm, prompt, 8) for prompt in [*prompts, *later]]
            found = _compared([*at_once, *known], alone)
            if not found["same"] or min(found["cached"][1:]) == _COMMON:
                break
        return found

    def _forked(self, llm: LLM) -> dict[str, Any]:
        """Prompts that continue the tokens of a running request, and that request itself."""
        prompt, generated = ids(_COMMON, 2), []
        stream = llm.stream(prompt, **self._sampling, max_tokens=100, max_buffered_tokens=_BEFORE_FORK)
        while len(generated) < _BEFORE_FORK and not isinstance(chunk := stream.get(), Nothing):
            generated += chunk.token_ids
        forks = [[*prompt, *generated[:_BEFORE_FORK], *ids(5, seed)] for seed in (20, 21)]
        found: list[Completion] = []
        if self._options["num_slots"] > 1:
            found = llm.generate(forks, **self._sampling, max_tokens=8)
        for chunk in stream:
            generated += chunk.token_ids
        undisturbed = self._expected(llm, prompt, 100)
        result = _compared(found, [self._expected(llm, prompt, 8) for prompt in forks[: len(found)]])
        return {**result, "same": result["same"] and tuple(generated) == undisturbed.token_ids}

    def _choices(self, llm: LLM) -> dict[str, Any]:
        """Three choices of one prompt, which is computed once: each token is as likely as after the same tokens alone."""
        prompt = ids(_COMMON, 3)
        off = 0.0
        for choice in llm.generate(prompt, **self._sampling, max_tokens=4, n=3).choices:
            for place, own in enumerate(choice.logprobs or ()):
                likely = self._likely(llm, [*prompt, *choice.token_ids[:place]])
                off = max(off, abs(own.own - likely[choice.token_ids[place]]))
        return {"same": True, "off": off}

    def _likely(self, llm: LLM, prompt: list[int]) -> dict[int, float]:
        """Return the log-probabilities of the tokens that may follow."""
        found = self._expected(llm, prompt, 1, logprobs=128).logprobs
        assert found is not None
        return dict(zip(found[0].token_ids, found[0].values, strict=True))

    def _depends(self, llm: LLM) -> float:
        """Return how much log-probabilities change with the first tokens of a prompt, the yardstick of all differences."""
        one, other = (self._likely(llm, [*ids(30, seed), *ids(20, 7)]) for seed in (5, 6))
        return max(abs(one[token] - other[token]) for token in one.keys() & other.keys())

    def _preempted(self) -> dict[str, Any]:
        """Twice as many cells are needed as there are; preempted sequences are saved, and go on."""
        prompts = [ids(60, seed) for seed in range(30, 34)]
        with self._engine(n_ctx=256) as llm:
            found = llm.generate(prompts, **self._sampling, max_tokens=60, cache_prompt=True)
            count = llm.stats().number("paceline_preemptions_total")
            return {**_compared(found, [self._expected(llm, prompt, 60) for prompt in prompts]), "count": count}

    def _saved(self) -> dict[str, Any]:
        """A prefix as a file, which another engine goes on from."""
        prompt = ids(_COMMON, 4)
        with self._engine(state_folder=self._folder) as llm:
            before = llm.generate(prompt, **self._sampling, max_tokens=8)
            llm.save_prefix("one", prompt)
        with self._engine(state_folder=self._folder) as llm:
            llm.load_prefix("one")
            return _compared([llm.generate(prompt, **self._sampling, max_tokens=8)], [before])


def _prompts() -> list[list[int]]:
    return [[(7 * place * place + 11 * length) % 128 for place in range(length)] for length in _LENGTHS]


def _compared(found: Sequence[Completion], expected: Sequence[Completion]) -> dict[str, Any]:
    """Return whether the tokens are the same, and the largest difference of a log-probability after the same tokens.

    Tokens are drawn, and rounding decides a draw that falls on the border between two of them: one text in four may part there,
    if the likeliest token was as likely.
    """
    off, num_others = 0.0, 0
    for completion, other in zip(found, expected, strict=True):
        num_others += completion.token_ids != other.token_ids
        for place, (own, others) in enumerate(zip(completion.logprobs or (), other.logprobs or (), strict=True)):
            if own.token_ids[:1] == others.token_ids[:1]:
                off = max(off, abs(own.values[0] - others.values[0]))
            if completion.token_ids[: place + 1] != other.token_ids[: place + 1]:
                break
            off = max(off, abs(own.own - others.own))
    return {
        "same": num_others <= len(found) // 4,
        "off": off,
        "cached": [completion.usage.cached_tokens for completion in found],
        "from": [completion.usage.cached_from for completion in found],
    }


def embedded(model: Model, num_slots: int) -> dict[str, Any]:
    """Return the width of vectors of texts and the difference of batched from single vectors, or the reason for none."""
    texts = [[token % 100 for token in prompt[:100]] for prompt in _prompts()[1:]]
    try:
        with LLM(model, n_threads=1, num_slots=num_slots) as llm:
            together = llm.embed(texts)
            alone = np.stack([llm.embed([text])[0] for text in texts])
        return {
            "width": together.shape[1],
            "off": float(np.abs(together - alone).max()),
            "distinct": float(np.abs(alone[0] - alone[1]).max()),
        }
    except PacelineError as error:
        return {"refused": f"{type(error).__name__}: {error}"}


def facts(model: Model, num_slots: int) -> dict[str, Any]:
    """Return the runtime's facts about the model's memory."""
    result: dict[str, Any] = {"architecture": model.native.architecture, "memory": model.memory_class.value}
    if model.has_decoder and not model.has_encoder:
        with Context(model, n_ctx=256, n_seq_max=num_slots, n_threads=1) as context:
            result["has_state_apart"] = context.has_state_apart
    return result


def probe(path: str, num_slots: int = 4, *, generates: bool = True) -> dict[str, Any]:
    """Return the result of each way, or "refused" with the error."""
    result: dict[str, Any] = {}
    try:
        with Model.load(path) as model, tempfile.TemporaryDirectory() as folder:
            result = {**facts(model, num_slots), "embedded": embedded(model, num_slots)}
            return {**result, **Probe(model, num_slots, folder).found()} if generates else result
    except PacelineError as error:
        return {**result, "refused": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    # However short a prompt is, those who make way are saved: a busy machine may find it cheaper to compute them again.
    TransferCost.round_trip_seconds = lambda *_: 0.0  # type: ignore[method-assign]
    sys.stdout.write(json.dumps(probe(sys.argv[1], **json.loads(sys.argv[2]))))
