"""Short exercises that can only be solved by copying from the question."""

from __future__ import annotations

import json
import random

from demo_model import nonce
from demo_model.fmt import Message

Pair = tuple[str, str]

_REPEAT = ["Repeat: {}", "Say it again: {}", "Repeat after me: {}", "Copy this: {}", "Say: {}", "Write: {}", "Echo {}"]
_KEYS = (
    "colour city name age food animal number word code home job friend title day room item song book price size "
    "country place street key team"
).split()
_ORDINALS = ["first", "second", "third", "fourth", "fifth"]
_PUT = ["The {} is in {}.", "The {} is near {}.", "I left the {} in {}.", "You can find the {} at {}."]


def _things(rng: random.Random, low: int, high: int) -> list[str]:
    return [nonce.thing(rng) for _ in range(rng.randint(low, high))]


def repeat(rng: random.Random) -> Pair:
    """Say a row of words again."""
    text = " ".join(_things(rng, 1, 12))
    return rng.choice(_REPEAT).format(text), text


def quote(rng: random.Random) -> Pair:
    """Take words out of quotes, or put them into quotes."""
    text = " ".join(_things(rng, 1, 6))
    if rng.random() < 0.5:
        return rng.choice(['Say "{}".', 'Repeat "{}".', 'What is between the quotes: "{}"?']).format(text), text
    return rng.choice(["Write {} in quotes.", "Put quotes around {}.", "Quote {}."]).format(text), f'"{text}"'


def pick(rng: random.Random) -> Pair:
    """One word of a row by its place."""
    row = _things(rng, 2, 5)
    place = rng.choice([*_ORDINALS[: len(row)], "last"])
    value = row[-1] if place == "last" else row[_ORDINALS.index(place)]
    ask = rng.choice(["Write the {} word of: {}", "What is the {} word of {}?", "Which word is {} in {}?"])
    return ask.format(place, " ".join(row)), value


def look_up(rng: random.Random) -> Pair:
    """Return a value by its key."""
    keys = rng.sample(_KEYS, rng.randint(2, 5))
    values = {key: " ".join(_things(rng, 1, 2)) for key in keys}
    facts = rng.choice([", ", "; "]).join(f"{key}: {value}" for key, value in values.items())
    if rng.random() < 0.4:
        facts = json.dumps(values)
    key = rng.choice(keys)
    return f"{facts}. What is the {key}?", f"The {key} is {values[key]}."


def where(rng: random.Random) -> Pair:
    """Questions about the places of things, told just before."""
    what = [nonce.word(rng) for _ in range(rng.randint(1, 3))]
    places = [nonce.proper(rng) for _ in what]
    told = " ".join(rng.choice(_PUT).format(w, p) for w, p in zip(what, places, strict=True))
    at = rng.randrange(len(what))
    return f"{told} Where is the {what[at]}?", f"The {what[at]} is in {places[at]}."


def as_json(rng: random.Random) -> Pair:
    """Keys and values, or a row, written as JSON."""
    if rng.random() < 0.5:
        row = _things(rng, 1, 6)
        return f"Write as a JSON list: {', '.join(row)}", json.dumps(row)
    keys = rng.sample(_KEYS, rng.randint(1, 3))
    values = {key: " ".join(_things(rng, 1, 3)) for key in keys}
    return f"Write as JSON: {', '.join(f'{k}: {v}' for k, v in values.items())}", json.dumps(values)


_MAKERS = [repeat, repeat, repeat, quote, pick, look_up, look_up, where, as_json, as_json]


def exercises(rng: random.Random) -> list[Message]:
    """Return some exercises, one after another."""
    out: list[Message] = []
    for _ in range(rng.randint(2, 6)):
        question, answer = rng.choice(_MAKERS)(rng)
        out += [Message("user", question), Message("assistant", answer)]
    return out
