"""Questions about a scene that have one right reply, and that reply."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from demo_vision.scenes import COLOURS, SHAPES, Figure, Scene

NUMBERS: Final = ("None", "One", "Two", "Three", "Four")
LEAST_DISTANCE: Final = 0.12  # of two middles, for one to be left of or above the other


@dataclass(frozen=True)
class Question:
    """A question, the right reply, and the skill it takes."""

    skill: str
    text: str
    reply: str


def about(scene: Scene, rng: random.Random) -> list[Question]:
    """Return questions about a scene, one of each kind that fits it, in any order."""
    found = [question for kind in _KINDS if (question := kind(scene.figures, rng)) is not None]
    rng.shuffle(found)
    return found


def _count(figures: tuple[Figure, ...], rng: random.Random) -> Question:
    nouns = ("shapes are there", "shapes do you see", "figures are in the picture", "shapes are in the picture")
    return Question("count", f"How many {rng.choice(nouns)}?", f"{NUMBERS[len(figures)]}.")


def _count_some(figures: tuple[Figure, ...], rng: random.Random) -> Question:
    if rng.random() < 0.5:
        shape = rng.choice([rng.choice(SHAPES), rng.choice(figures).shape])
        number = sum(figure.shape == shape for figure in figures)
        plural = "crosses" if shape == "cross" else f"{shape}s"
        return Question("count some", f"How many {plural} are there?", f"{NUMBERS[number]}.")
    colour = rng.choice([rng.choice(list(COLOURS)), rng.choice(figures).colour])
    number = sum(figure.colour == colour for figure in figures)
    return Question("count some", f"How many {colour} shapes are there?", f"{NUMBERS[number]}.")


def _shape(figures: tuple[Figure, ...], rng: random.Random) -> Question | None:
    if len(figures) == 1:
        text = rng.choice(("What shape is it?", "Which shape is this?", "What shape is in the picture?"))
        return Question("shape", text, f"A {figures[0].shape}.")
    if not (single := _single(figures, "colour")):
        return None
    figure = rng.choice(single)
    text = rng.choice((f"What shape is {figure.colour}?", f"Which shape is the {figure.colour} one?"))
    return Question("shape", text, f"A {figure.shape}.")


def _colour(figures: tuple[Figure, ...], rng: random.Random) -> Question | None:
    if not (single := _single(figures, "shape")):
        return None
    figure = rng.choice(single)
    text = rng.choice((f"What colour is the {figure.shape}?", f"Which colour has the {figure.shape}?"))
    return Question("colour", text, f"{figure.colour.capitalize()}.")


def _sideways(figures: tuple[Figure, ...], rng: random.Random) -> Question | None:
    pairs = [(a, b) for a in figures for b in figures if a is not b and abs(a.x - b.x) >= LEAST_DISTANCE]
    if not pairs:
        return None
    a, b = rng.choice(pairs)
    text = f"Is the {a.name} left or right of the {b.name}?"
    return Question("left or right", text, "Left." if a.x < b.x else "Right.")


def _upright(figures: tuple[Figure, ...], rng: random.Random) -> Question | None:
    pairs = [(a, b) for a in figures for b in figures if a is not b and abs(a.y - b.y) >= LEAST_DISTANCE]
    if not pairs:
        return None
    a, b = rng.choice(pairs)
    text = f"Is the {a.name} above or below the {b.name}?"
    return Question("above or below", text, "Above." if a.y < b.y else "Below.")


def _is_there(figures: tuple[Figure, ...], rng: random.Random) -> Question:
    name = rng.choice([f"{rng.choice(list(COLOURS))} {rng.choice(SHAPES)}", rng.choice(figures).name])
    reply = "Yes." if any(figure.name == name for figure in figures) else "No."
    return Question("is there", f"Is there a {name}?", reply)


def _describe(figures: tuple[Figure, ...], rng: random.Random) -> Question | None:
    names = [f"a {figure.name}" for figure in sorted(figures, key=lambda figure: figure.x)]
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    text = rng.choice(("Describe the picture.", "What is in the picture?", "What do you see?", "What is this?"))
    return Question("describe", text, f"From left to right: {listed}." if len(names) > 1 else f"{listed.capitalize()}.")


def _single(figures: tuple[Figure, ...], field: str) -> list[Figure]:
    """Return the figures with a colour or shape of their own."""
    counts = Counter(getattr(figure, field) for figure in figures)
    return [figure for figure in figures if counts[getattr(figure, field)] == 1]


_KINDS: Final[tuple[Callable[[tuple[Figure, ...], random.Random], Question | None], ...]] = (
    _count, _count_some, _shape, _colour, _sideways, _upright, _is_there, _describe,
)  # fmt: skip
