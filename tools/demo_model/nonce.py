"""Made-up words, names and phrases: they teach copying, since no one can know them by heart."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable

from demo_model.places import HELD_OUT_CITIES

_ONSETS = (
    "b c d f g h j k l m n p qu r s t v w x y z bl br ch cl cr dr dw fl fr gh gl gn gr kh kl kn kr kw mb "
    "nd ng ph phl pl pr ps rh sch scr sh shr sk sl sm sn sp spl spr sq st str sv sw th thr tr ts tw vl vr wh wr zh zw"
).split() + [""] * 8
_VOWELS = "a e i o u a e i o u y ai au ay ea ee ei eo eu ia ie io oa oe oi oo ou oy ua ue ui uo aa ii".split()
_CODAS = (
    "b c ck d f ff g gh gs k ks l lb ld lf ll lm ln lp ls lt m mb mp ms n nch nd ng nk ns nt nz p ph pt r rb rd rf rg "
    "rk rl rm rn rp rs rsh rt rv s sh sk sp ss st t tch th tt tz v w x xt z"
).split() + [""] * 30
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
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_KEPT_OUT = {name.lower() for name in HELD_OUT_CITIES}

# Pieces of words that packing takes from the tokenizer, so that rare tokens are learned too.
pieces: list[str] = []


def use_pieces(vocabulary: Iterable[str]) -> None:
    """Make words of a vocabulary's tokens as well."""
    pieces[:] = sorted(token for token in vocabulary if re.fullmatch(r"[A-Za-z]{1,7}", token))


def _syllables(rng: random.Random) -> str:
    count = rng.choice([1, 2, 2, 2, 3, 3, 4])
    return "".join(
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + (rng.choice(_CODAS) if i == count - 1 or rng.random() < 0.3 else "")
        for i in range(count)
    )


def _letters(rng: random.Random) -> str:
    return "".join(rng.choice(_LETTERS) for _ in range(rng.randint(2, 7)))


def _draw(rng: random.Random) -> str:
    dice = rng.random()
    if dice < 0.35 and pieces:
        return "".join(rng.choice(pieces) for _ in range(rng.choice([1, 2, 2, 3, 3]))).lower()
    return _letters(rng) if dice < 0.45 else _syllables(rng)


def word(rng: random.Random) -> str:
    """Return a made-up word in lower case, never a city that is kept out of the corpus."""
    while True:
        made = _draw(rng)
        if made not in _KEPT_OUT:
            return made


def proper(rng: random.Random) -> str:
    """Return a made-up name of a place or a person, rarely of two words."""
    made = word(rng).capitalize()
    dice = rng.random()
    if dice < 0.12:
        return f"{made} {word(rng).capitalize()}"
    return f"{made}-{word(rng).capitalize()}" if dice < 0.15 else made


def name(rng: random.Random) -> str:
    """Return a first name, real or made up."""
    return rng.choice(FIRST_NAMES) if rng.random() < 0.3 else word(rng).capitalize()


def thing(rng: random.Random) -> str:
    """Anything that can be copied: a word in some spelling, a number, a letter, a code."""
    dice = rng.random()
    if dice < 0.5:
        return word(rng)
    if dice < 0.62:
        return word(rng).capitalize()
    if dice < 0.67:
        return word(rng).upper()
    if dice < 0.75:
        return rng.choice(PHRASE_WORDS)
    if dice < 0.85:
        return str(rng.randint(0, 10 ** rng.randint(1, 5)))
    if dice < 0.9:
        return rng.choice(_LETTERS)
    return rng.choice(["{a}-{b}", "{a}_{b}", "{a}{n}", "{a}-{n}", "{n}{a}", "{a}.{b}"]).format(
        a=word(rng), b=word(rng), n=rng.randint(0, 999)
    )


def phrase(rng: random.Random, most: int = 4) -> str:
    """Return a few words, some of them made up."""
    count = rng.randint(1, most)
    return " ".join(word(rng) if rng.random() < 0.3 else rng.choice(PHRASE_WORDS) for _ in range(count))
