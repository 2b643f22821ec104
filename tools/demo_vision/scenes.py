"""Pictures of one to four coloured shapes that do not touch, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Grid = NDArray[np.floating[Any]]
Pixels = NDArray[np.uint8]

SHAPES: Final = ("circle", "square", "triangle", "cross", "ring")
COLOURS: Final = {
    "red": (214, 40, 40),
    "green": (40, 160, 70),
    "blue": (40, 80, 210),
    "yellow": (240, 205, 40),
    "purple": (140, 50, 165),
    "black": (25, 25, 25),
}
MAX_FIGURES: Final = 4
_LEAST_SIZE, _MOST_SIZE, _GAP = 0.095, 0.17, 0.03  # radii and the gap between two, as parts of the side
_SAMPLES = 4  # a side, of each pixel


@dataclass(frozen=True)
class Figure:
    """A shape with its place: x to the right, y down, from 0 to 1; `size` is half of its width."""

    shape: str
    colour: str
    x: float
    y: float
    size: float

    @property
    def name(self) -> str:
        """The colour and the shape."""
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """A picture before it is drawn. seed: for irrelevant details, the ground and the shades."""

    figures: tuple[Figure, ...]
    seed: int


def random_scene(rng: random.Random) -> Scene:
    """Draw one: as many figures as fit of a number from one to four, never two alike."""
    figures: list[Figure] = []
    for _ in range(rng.randint(1, MAX_FIGURES)):
        for _ in range(50):
            figure = _random_figure(rng)
            if all(figure.name != other.name and _are_apart(figure, other) for other in figures):
                figures.append(figure)
                break
    return Scene(tuple(figures), rng.getrandbits(32))


def _random_figure(rng: random.Random) -> Figure:
    size = rng.uniform(_LEAST_SIZE, _MOST_SIZE)
    x, y = (rng.uniform(size + _GAP / 2, 1 - size - _GAP / 2) for _ in range(2))
    return Figure(rng.choice(SHAPES), rng.choice(list(COLOURS)), x, y, size)


def _are_apart(one: Figure, other: Figure) -> bool:
    distance = one.size + other.size + _GAP
    return abs(one.x - other.x) > distance or abs(one.y - other.y) > distance


def draw(scene: Scene, side: int) -> Pixels:
    """Return the picture as (side, side, 3), with smooth edges."""
    rng = random.Random(scene.seed)
    pixels = np.empty((side, side, 3), np.float32)
    pixels[:] = _shade(rng, [rng.uniform(185, 250)] * 3, 6)
    steps = (np.arange(side * _SAMPLES, dtype=np.float32) + 0.5) / (side * _SAMPLES)
    for figure in scene.figures:
        inside = _INSIDE[figure.shape](
            (steps[None, :] - figure.x) / figure.size, (steps[:, None] - figure.y) / figure.size
        )
        covered = inside.reshape(side, _SAMPLES, side, _SAMPLES).mean((1, 3), dtype=np.float32)[..., None]
        pixels += covered * (_shade(rng, list(COLOURS[figure.colour]), 18) - pixels)
    rounded: Pixels = np.clip(pixels + 0.5, 0, 255).astype(np.uint8)
    return rounded


def _shade(rng: random.Random, colour: list[float], spread: float) -> Grid:
    return np.array([part + rng.uniform(-spread, spread) for part in colour], np.float32)


def _cross(x: Grid, y: Grid) -> NDArray[np.bool_]:
    return (np.maximum(abs(x), abs(y)) < 1) & (np.minimum(abs(x), abs(y)) < 0.34)


# Of points relative to the middle, by half of the width.
_INSIDE: Final[dict[str, Callable[[Grid, Grid], NDArray[np.bool_]]]] = {
    "circle": lambda x, y: x * x + y * y < 1,
    "square": lambda x, y: np.maximum(abs(x), abs(y)) < 0.9,
    "triangle": lambda x, y: (y < 0.9) & (2 * abs(x) < y + 1.1),
    "cross": _cross,
    "ring": lambda x, y: (x * x + y * y < 1) & (x * x + y * y > 0.3),
}
