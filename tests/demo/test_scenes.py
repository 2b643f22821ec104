"""Pictures of shapes and the questions about them: the questions fit the pictures."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

from demo_vision.questions import NUMBERS, about
from demo_vision.scenes import COLOURS, MAX_FIGURES, SHAPES, Figure, Scene, draw, random_scene

SCENES = [random_scene(random.Random(seed)) for seed in range(300)]
PLURALS = {"crosses": "cross"} | {f"{shape}s": shape for shape in SHAPES}


def middle_of(scene: Scene, figure: Figure, side: int = 128) -> np.ndarray:
    """The pixels around the middle of a figure; for a ring, the pixels of its right side."""
    pixels = draw(scene, side).astype(int)
    x = figure.x + (0.77 * figure.size if figure.shape == "ring" else 0)
    return pixels[int(figure.y * side), int(x * side)]


def test_scenes_have_one_to_four_figures_that_are_apart_and_inside() -> None:
    """All numbers, shapes and colours come up."""
    assert {len(scene.figures) for scene in SCENES} == set(range(1, MAX_FIGURES + 1))
    assert {figure.shape for scene in SCENES for figure in scene.figures} == set(SHAPES)
    assert {figure.colour for scene in SCENES for figure in scene.figures} == set(COLOURS)
    for scene in SCENES:
        for number, figure in enumerate(scene.figures):
            assert figure.size < figure.x < 1 - figure.size
            assert figure.size < figure.y < 1 - figure.size
            for other in scene.figures[:number]:
                assert max(abs(figure.x - other.x), abs(figure.y - other.y)) > figure.size + other.size


def test_a_figure_is_drawn_where_it_stands_in_its_colour() -> None:
    """The pixel at its place is nearer to its colour than to any other."""
    for scene in SCENES[:60]:
        for figure in scene.figures:
            pixel = middle_of(scene, figure)
            nearest = min(COLOURS, key=lambda name: int(((pixel - np.array(COLOURS[name])) ** 2).sum()))
            assert nearest == figure.colour


def test_a_picture_depends_on_its_scene_alone() -> None:
    """Drawn twice it is the same; another seed gives other shades."""
    scene = SCENES[0]
    assert np.array_equal(draw(scene, 64), draw(scene, 64))
    assert not np.array_equal(draw(scene, 64), draw(Scene(scene.figures, scene.seed + 1), 64))
    assert draw(scene, 64).shape == (64, 64, 3)


def right_reply(scene: Scene, text: str) -> str | None:
    """Return a reader's reply to the question; None for questions with many phrasings."""
    figures = {figure.name: figure for figure in scene.figures}
    if match := re.fullmatch(r"How many (\w+) are there\?", text):
        noun = match[1]
        number = sum(figure.shape == PLURALS[noun] for figure in scene.figures) if noun in PLURALS else len(figures)
        return f"{NUMBERS[number]}."
    if match := re.fullmatch(r"Is the (\w+ \w+) left or right of the (\w+ \w+)\?", text):
        return "Left." if figures[match[1]].x < figures[match[2]].x else "Right."
    if match := re.fullmatch(r"Is the (\w+ \w+) above or below the (\w+ \w+)\?", text):
        return "Above." if figures[match[1]].y < figures[match[2]].y else "Below."
    if match := re.fullmatch(r"Is there a (\w+ \w+)\?", text):
        return "Yes." if match[1] in figures else "No."
    if match := re.fullmatch(r"What colour is the (\w+)\?", text):
        (figure,) = [figure for figure in scene.figures if figure.shape == match[1]]
        return f"{figure.colour.capitalize()}."
    if (match := re.fullmatch(r"What shape is (\w+)\?", text)) and match[1] in COLOURS:
        (figure,) = [figure for figure in scene.figures if figure.colour == match[1]]
        return f"A {figure.shape}."
    return None


def test_every_question_has_the_right_reply() -> None:
    """Questions are parsed by other rules than their generator's; every kind of question comes up."""
    skills: dict[str, int] = {}
    checked = 0
    for number, scene in enumerate(SCENES):
        for question in about(scene, random.Random(number)):
            skills[question.skill] = skills.get(question.skill, 0) + 1
            if (expected := right_reply(scene, question.text)) is not None:
                checked += 1
                assert (question.text, question.reply) == (question.text, expected)
    assert checked > 600
    assert set(skills) == {
        "count", "count some", "shape", "colour", "left or right", "above or below", "is there", "describe"
    }  # fmt: skip
    assert min(skills.values()) > 100


@pytest.mark.parametrize("order", [1, -1])
def test_a_description_goes_from_left_to_right(order: int) -> None:
    """Whatever the order in which the figures were placed."""
    figures = (Figure("circle", "red", 0.2, 0.5, 0.1), Figure("cross", "blue", 0.8, 0.5, 0.1))[::order]
    (reply,) = [item.reply for item in about(Scene(figures, 0), random.Random(0)) if item.skill == "describe"]
    assert reply == "From left to right: a red circle and a blue cross."
