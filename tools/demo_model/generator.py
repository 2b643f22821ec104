"""The protocol of an engine for the measurement, and paceline as an engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from paceline.params import SamplingParams
from paceline.runtime import Context, Model, Sampler


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; a temperature of 0 means the most likely one."""

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int = 0


GREEDY = Sampling()


@dataclass(frozen=True)
class Output:
    """The generated text; `ended` is True if the model stopped by itself."""

    text: str
    tokens: list[int]
    ended: bool


class Generator(Protocol):
    """An engine with one model."""

    def generate(self, prompt: str, limit: int, sampling: Sampling = GREEDY) -> Output:
        """Continue a prompt, with special tokens parsed."""
        ...

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt."""
        ...

    def next_tokens(self, tokens: list[int]) -> list[int]:
        """Return the greedy choice after each token of a sequence."""
        ...


class PacelineGenerator:
    """The model of a GGUF file as paceline runs it."""

    def __init__(self, path: Path, n_threads: int = 1) -> None:
        self.model = Model.load(path)
        room = self.model.n_ctx_train
        self.context = Context(
            self.model, n_ctx=room, n_batch=room, n_outputs_max=room, n_threads=n_threads, n_threads_batch=n_threads
        )

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt."""
        return self.model.tokenizer.encode(prompt, add_special=False, parse_special=True)

    def generate(self, prompt: str, limit: int, sampling: Sampling = GREEDY) -> Output:
        """Continue a prompt from an empty context."""
        ids = self.encode(prompt)
        room = min(limit, self.context.max_positions - len(ids))
        params = SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
        )
        self.context.clear()
        with Sampler(params, self.model) as sampler:
            tokens = list(self.context.generate(sampler, ids, room))
        return Output(self.model.tokenizer.decode(tokens, special=True), tokens, len(tokens) < room)

    def next_tokens(self, tokens: list[int]) -> list[int]:
        """Return the greedy choice after each token of a sequence."""
        self.context.clear()
        self.context.decode(tokens, wants_logits="all")
        return [int(self.context.logits(index).argmax()) for index in range(len(tokens))]
