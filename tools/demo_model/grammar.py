"""The template language of the stories: one notation to write with and to judge by.

``[x|y]`` is a choice, ``{slot}`` a word of the story's state or of a free list, ``{an}``
the right article for the word after it.  A slot written with a capital gives a capital.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping

from demo_model import words

State = Mapping[str, str]

PRONOUNS: dict[str, dict[str, str]] = {
    "m": {"he": "he", "his": "his", "him": "him", "himself": "himself"},
    "f": {"he": "she", "his": "her", "him": "her", "himself": "herself"},
}

FREE: dict[str, list[str]] = {
    "when": words.WHENS,
    "later": words.LATERS,
    "sudden": words.SUDDENS,
    "ending": words.ENDINGS,
    "good": words.GOOD,
    "bad": words.BAD,
    "sky": words.SKY,
    "lesson": words.LESSONS,
    "otherplace": list(words.PLACES),
}

BOUND: dict[str, list[str]] = {
    "aadj": words.HERO_ADJ,
    "badj": words.FRIEND_ADJ,
    "home": words.HOMES,
    "place": list(words.PLACES),
    "atplace": list(words.PLACES.values()),
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

_PIECE = re.compile(r"\{(\w+)\}|\[([^\[\]]*)\]|([^{\[]+)")
_ARTICLE = re.compile(r"\x00([aA]) (\w)")


def pieces(template: str) -> Iterator[tuple[str, str]]:
    """Split a template into ('slot' | 'choice' | 'text', value) pieces."""
    for slot, choice, text in _PIECE.findall(template):
        if slot:
            yield "slot", slot
        elif text:
            yield "text", text
        else:
            yield "choice", choice


def _fill(slot: str, state: State, rng: random.Random) -> str:
    if slot in ("an", "An"):
        return "\x00" + slot[0]
    if slot in state:
        return state[slot]
    key = slot.lower()
    value = state[key] if key in state else rng.choice(FREE[key])
    return value[0].upper() + value[1:] if slot[0].isupper() else value


def _expand(template: str, state: State, rng: random.Random) -> str:
    out = []
    for kind, value in pieces(template):
        if kind == "slot":
            out.append(_fill(value, state, rng))
        elif kind == "choice":
            out.append(_expand(rng.choice(value.split("|")), state, rng))
        else:
            out.append(value)
    return "".join(out)


def _article(match: re.Match[str]) -> str:
    letter, first = match.group(1), match.group(2)
    return f"{letter}{'n' if first.lower() in 'aeiou' else ''} {first}"


def expand(template: str, state: State, rng: random.Random) -> str:
    """Write one sentence from a template."""
    return _ARTICLE.sub(_article, _expand(template, state, rng))


def domain(slot: str, gender_a: str, gender_b: str) -> list[str]:
    """All values that a slot may take, given the genders of hero (A) and friend (B)."""
    if slot in ("A", "B"):
        return words.NAMES[gender_a if slot == "A" else gender_b]
    if slot in ("akind", "bkind"):
        return words.ANIMALS + words.PEOPLE[gender_a if slot == "akind" else gender_b]
    if slot in PRONOUNS["m"]:
        return [PRONOUNS[gender_a][slot]]
    if slot[0] == "b" and slot[1:] in PRONOUNS["m"]:
        return [PRONOUNS[gender_b][slot[1:]]]
    return BOUND[slot] if slot in BOUND else FREE[slot]


def _slot_pattern(slot: str, genders: tuple[str, str], seen: set[str], nested: bool) -> str:
    if slot in ("an", "An"):
        first = slot[0]
        return f"(?:{first}(?= [^aeiouAEIOU])|{first}n(?= [aeiouAEIOU]))"
    key = slot if slot in ("A", "B") else slot.lower()
    if slot in seen:
        return f"(?P={slot})"
    values = [re.escape(v) for v in domain(key, *genders)]
    if slot[0].isupper() and slot not in ("A", "B"):
        values = [v[0].upper() + v[1:] for v in values]
    if nested:
        return f"(?:{'|'.join(values)})"
    seen.add(slot)
    return f"(?P<{slot}>{'|'.join(values)})"


def pattern(template: str, genders: tuple[str, str], seen: set[str] | None = None) -> str:
    """Return the regular expression that accepts exactly the outputs of `expand`."""
    nested = seen is not None
    known: set[str] = set() if seen is None else seen
    out = []
    for kind, value in pieces(template):
        if kind == "slot":
            out.append(_slot_pattern(value, genders, known, nested))
        elif kind == "choice":
            out.append(f"(?:{'|'.join(pattern(v, genders, known) for v in value.split('|'))})")
        else:
            out.append(re.escape(value))
    return "".join(out)
