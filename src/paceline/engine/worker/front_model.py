"""What the front has of the model: its vocabulary, to tokenise, to detokenise, and to refuse a request before it is sent."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from paceline.engine.sampling_defaults import sampling_defaults
from paceline.output import Vocabulary
from paceline.params import SamplingParams
from paceline.runtime import Sampler
from paceline.runtime.remote_model import RemoteModel


class FrontModel(Protocol):
    """A vocabulary and what follows from it."""

    @property
    def tokenizer(self) -> Any:
        """Encodes prompts, decodes echoes."""

    @property
    def model(self) -> Any:
        """What `LLM.model` returns."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokens' bytes and the ends of generation."""

    @property
    def sampling_defaults(self) -> SamplingParams:
        """Of the model."""

    def check(self, params: SamplingParams) -> None:
        """Raise what a sampler with these params would raise."""

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Take what the worker says of the model."""

    def close(self) -> None:
        """Give the memory back."""


class LlamaFrontModel:
    """A GGUF file's vocabulary."""

    def __init__(self, paths: list[str], kv_overrides: Mapping[str, Any] | None) -> None:
        chosen: Any = paths[0] if len(paths) == 1 else [Path(path) for path in paths]
        self.model = RemoteModel.load(chosen, vocab_only=True, kv_overrides=kv_overrides)
        self.tokenizer = tokenizer = self.model.tokenizer
        self.vocabulary = Vocabulary(tokenizer.pieces(False), tokenizer.pieces(True), tokenizer.eog_ids)
        self.sampling_defaults = sampling_defaults(self.model.metadata)

    def check(self, params: SamplingParams) -> None:
        """Make a sampler, and with it compiles the grammar."""
        Sampler(params, self.model).close()

    def describe(self, facts: Mapping[str, Any]) -> None:
        """See `FrontModel`."""
        self.model.describe(facts)

    def close(self) -> None:
        """See `FrontModel`."""
        self.model.close()


def seeded(params: SamplingParams) -> SamplingParams:
    """Return the params with a seed, so that a replay of the request draws the same."""
    return params if params.seed is not None else params.replace(seed=secrets.randbits(64))
