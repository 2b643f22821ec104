"""Writes little stories: a state (persons, places, things) carried through the beats of a plot."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

from demo_model import plots, words
from demo_model.grammar import PRONOUNS, State, expand

_ONCE = ("{home}", "{place}", "{atplace}")


def _person(gender: str, prefix: str) -> dict[str, str]:
    return {prefix + key: value for key, value in PRONOUNS[gender].items()}


def make_state(rng: random.Random, hero_kind: str | None = None) -> dict[str, str]:
    """Draw hero, friend, place and things of one story."""
    ga, gb = rng.choice("mf"), rng.choice("mf")
    name_a = rng.choice(words.NAMES[ga])
    name_b = rng.choice([n for n in words.NAMES[gb] if n != name_a])
    kind_a = hero_kind or rng.choice(words.ANIMALS * 2 + words.PEOPLE[ga] * 6)
    kind_b = rng.choice([k for k in words.ANIMALS * 2 + words.PEOPLE[gb] if k != kind_a])
    place, atplace = rng.choice(list(words.PLACES.items()))
    state = {"A": name_a, "B": name_b, "akind": kind_a, "bkind": kind_b}
    state |= {"place": place, "atplace": atplace, **_person(ga, ""), **_person(gb, "b")}
    lists = {
        "aadj": words.HERO_ADJ,
        "badj": words.FRIEND_ADJ,
        "home": words.HOMES,
        "col": words.COLOURS,
        "obj": words.OBJECTS,
        "food": words.FOODS,
        "hide": words.HIDES,
        "trap": words.TRAPS,
        "shelter": words.SHELTERS,
        "build": words.BUILDS,
        "part": words.PARTS,
        "seed": words.SEEDS,
        "find": words.FINDS,
        "noise": words.NOISES,
    }
    return state | {slot: rng.choice(values) for slot, values in lists.items()}


@dataclass
class Teller:
    """Writes beats in order and remembers the story so far."""

    state: State
    rng: random.Random
    friend_known: bool = False
    told: set[str] = field(default_factory=set)

    def _fits(self, template: str) -> bool:
        if any(slot in template and slot in self.told for slot in _ONCE):
            return False
        if template in self.told:
            return False
        if "{B}" not in template:
            return True
        introduces = "{badj} {bkind}" in template or "friend named" in template
        return not introduces if self.friend_known else "{bkind}" in template or introduces

    def tell(self, beat: plots.Beat) -> str:
        """One sentence of the beat, or nothing."""
        template = self.rng.choice([t for t in beat if self._fits(t)] or beat)
        self.friend_known |= "{B}" in template
        self.told |= {slot for slot in _ONCE if slot in template}
        if template:
            self.told.add(template)
        return expand(template, self.state, self.rng)

    def paragraph(self, beats: list[plots.Beat]) -> str:
        """Return the sentences of several beats, joined."""
        return " ".join(s for s in (self.tell(b) for b in beats) if s)


def _opening(rng: random.Random) -> list[plots.Beat]:
    choice = rng.random()
    if choice < 0.6:
        return [plots.OPEN_NAMED, plots.TRAIT, plots.START_DAY, plots.WEATHER]
    if choice < 0.8:
        return [plots.OPEN_UNNAMED, plots.NAMING, plots.TRAIT, plots.START_DAY]
    return [plots.OPEN_DAY, plots.WEATHER]


def tell_story(rng: random.Random, hero_kind: str | None = None) -> str:
    """One whole story."""
    plot = rng.choice(list(plots.PLOTS))
    lesson = rng.choice(plots.PLOT_LESSONS[plot])
    teller = Teller(make_state(rng, hero_kind) | {"lesson": lesson}, rng)
    start = teller.paragraph(_opening(rng))
    middle = teller.paragraph(plots.PLOTS[plot])
    closing = [plots.CLOSE] * rng.choice([1, 1, 2])
    end = teller.paragraph([*closing, plots.LAST])
    return rng.choice([" ", "\n\n"]).join(p for p in (start, middle, end) if p)


_SENTENCE_END = re.compile(r"(?<=[.!?])\"?(?=\s+[A-Z\"]|\s*$)")


def split_sentences(text: str) -> list[str]:
    """Cut a story into sentences; a quoted question before "asked" stays whole."""
    out, start = [], 0
    for match in _SENTENCE_END.finditer(text):
        out.append(text[start : match.end()].strip())
        start = match.end()
    rest = text[start:].strip()
    return [s for s in [*out, rest] if s]
