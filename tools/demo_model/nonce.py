"""Made-up words, names and phrases: they teach copying, since no one can know them by heart."""

from __future__ import annotations

import random

_ONSETS = "b c d f g h j k l m n p r s t v w z br cl dr fl gr kr pl pr sh sl st tr ch th".split()
_VOWELS = "a e i o u ai ea ee oo ou".split()
_CODAS = ["", "", "", "n", "r", "l", "s", "t", "m", "nd", "rk", "st", "x"]
PHRASE_WORDS = (
    "the a my your big small red green old new warm cold happy quiet house tree river cake song "
    "letter train winter summer garden stone music bread light night morning friend book dog cat "
    "is was will can runs sings sleeps and or with under over near please today tomorrow now best "
    "cheap fast how to make find why when where love story park beach milk coffee tea call buy"
).split()
FIRST_NAMES = (
    "Alice Bob Carol David Eve Frank Grace Henry Irene John Kate Liam Mary Noah Paul Peter Rachel "
    "Sarah Thomas Vera William Zoe Ali Chen Diego Fatima Hiro Ines Jorge Karim Lena Marco Nadia Omar"
).split()


def word(rng: random.Random) -> str:
    """A made-up word in lower case."""
    syllables = rng.choice([1, 2, 2, 2, 3])
    return "".join(
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + (rng.choice(_CODAS) if i == syllables - 1 else "")
        for i in range(syllables)
    )


def name(rng: random.Random) -> str:
    """A first name, real or made up."""
    return rng.choice(FIRST_NAMES) if rng.random() < 0.5 else word(rng).capitalize()


def phrase(rng: random.Random, most: int = 4) -> str:
    """A few words, some of them made up."""
    count = rng.randint(1, most)
    return " ".join(word(rng) if rng.random() < 0.15 else rng.choice(PHRASE_WORDS) for _ in range(count))
