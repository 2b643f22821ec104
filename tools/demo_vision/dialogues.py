"""Conversations about a picture as tokens, with the place of the picture and flags of learned tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from demo_model.fmt import Chat, Message, segments
from demo_vision.questions import about
from demo_vision.scenes import Pixels, draw, random_scene

_OPENING = "<|im_start|>user\n"  # the picture stands behind it
LENGTH = 136  # of the text, in tokens: four or five questions


@dataclass(frozen=True)
class Dialogues:
    """Some conversations. pixels: (rows, side, side, 3); the picture stands behind the first `head` tokens of each row."""

    pixels: Pixels
    tokens: NDArray[np.int64]  # (rows, LENGTH), padded with 0
    learned: NDArray[np.bool_]  # the same shape: the model writes them
    head: int


class DialogueWriter:
    """Writes conversations from seeds: the same seed, the same conversation."""

    def __init__(self, tokenizer: Path, side: int) -> None:
        self._side = side
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        self._encoded = lru_cache(maxsize=1 << 16)(lambda text: self._tokenizer.encode(text).ids)

    def write(self, seeds: range) -> Dialogues:
        """Return one conversation for each seed."""
        rows = [self._row(random.Random(seed)) for seed in seeds]
        pixels, tokens, learned = (np.stack(column) for column in zip(*rows, strict=True))
        return Dialogues(pixels, tokens, learned, len(self._encoded(_OPENING)))

    def _row(self, rng: random.Random) -> tuple[Pixels, NDArray[np.int64], NDArray[np.bool_]]:
        scene = random_scene(rng)
        ids: list[int] = []
        flags: list[bool] = []
        for question in about(scene, rng):  # the empty thought is learned, so that a template may ask for thoughts
            turn = segments(Chat([Message("user", question.text), Message("assistant", question.reply, think="")]))
            pieces = [(self._encoded(_OPENING), False), (self._encoded(turn[0].text.removeprefix(_OPENING)), False)]
            pieces += [(self._encoded(segment.text), segment.learn) for segment in turn[1:]]
            if len(ids) + sum(len(piece) for piece, _ in pieces) > LENGTH:
                continue
            for piece, learn in pieces:
                ids += piece
                flags += [learn] * len(piece)
        tokens, learned = np.zeros(LENGTH, np.int64), np.zeros(LENGTH, np.bool_)
        tokens[: len(ids)], learned[: len(ids)] = ids, flags
        return draw(scene, self._side), tokens, learned
