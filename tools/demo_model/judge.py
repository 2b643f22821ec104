"""Judges stories by the grammar that wrote the corpus: takes the sentences that it could have written."""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import dataclass

from demo_model import plots, words
from demo_model.grammar import pattern
from demo_model.stories import split_sentences

_ALL_NAMES = {n for names in words.NAMES.values() for n in names}


def _genders(template: str) -> list[tuple[str, str]]:
    hero = bool(re.search(r"\{([Hh]e|[Hh]is|him|himself|A|akind)\}", template))
    friend = bool(re.search(r"\{(b(he|his|him)|B|bkind)\}", template))
    return list(itertools.product("mf" if hero else "m", "mf" if friend else "m"))


@functools.cache
def _recognisers() -> list[re.Pattern[str]]:
    return [
        re.compile(pattern(template, genders)) for template in plots.all_templates() for genders in _genders(template)
    ]


@functools.cache
def accepts(sentence: str) -> bool:
    """Whether the grammar can write this sentence."""
    return any(r.fullmatch(sentence) for r in _recognisers())


@dataclass(frozen=True)
class Verdict:
    """The judge's findings in a story."""

    sentences: int
    correct: int
    names: int
    ended: bool
    rejected: tuple[str, ...]

    @property
    def same_cast(self) -> bool:
        """The story keeps to its hero and one friend."""
        return self.names <= 2


def judge(text: str, ended: bool) -> Verdict:
    """Judge a story; `ended` says whether the model stopped by itself."""
    sentences = split_sentences(text)
    rejected = tuple(s for s in sentences if not accepts(s))
    found = set(re.findall(r"\b[A-Z][a-z]+\b", text)) & _ALL_NAMES
    return Verdict(len(sentences), len(sentences) - len(rejected), len(found), ended, rejected)
