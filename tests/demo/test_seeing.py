"""The demo model that sees, as a user meets it: in the library, over HTTP and in the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.e2e.commands import output
from tests.media_requests import data_url, text_part
from tests.pictures import png
from tests.server.openai_world import OpenAIServer

from demo_vision.measure import REQUIRED, measure
from demo_vision.scenes import Figure, Scene, draw
from paceline import LLM
from paceline.demo import demo_vision_model_path

pytestmark = pytest.mark.native

SCENE = Scene((Figure("circle", "red", 0.25, 0.3, 0.15), Figure("square", "blue", 0.7, 0.7, 0.15)), seed=1)
QUESTIONS = {
    "How many shapes are there?": "Two.",
    "What shape is red?": "A circle.",
    "What colour is the square?": "Blue.",
    "Is the red circle left or right of the blue square?": "Left.",
    "Is the red circle above or below the blue square?": "Above.",
}
IMAGE: dict[str, Any] = {"type": "image_url", "image_url": {"url": data_url(draw(SCENE, 256))}}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with OpenAIServer({"num_slots": 4}, model=demo_vision_model_path()) as world, world.client() as client:
        yield client


def replied(client: httpx.Client, messages: list[Any]) -> tuple[str, int]:
    """The reply to a conversation, and how many of its tokens were cached."""
    body = {"messages": messages, "temperature": 0, "max_tokens": 40}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    found = response.json()
    return found["choices"][0]["message"]["content"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.full
def test_what_is_required_of_it_holds_for_a_sample() -> None:
    """Of twenty-five pictures that were not in training; the model card has the figures of 300."""
    with LLM(demo_vision_model_path(), n_threads=1) as llm:
        rows = {row.name: row for row in measure(llm, 25, 0)}
    assert set(REQUIRED) <= set(rows)
    asked = sum((Counter(right=rows[name].right, total=rows[name].count) for name in REQUIRED), Counter())
    assert asked["right"] >= 0.9 * asked["total"]


@pytest.mark.parametrize("question", QUESTIONS)
def test_questions_over_http(client: httpx.Client, question: str) -> None:
    """The picture is cached from the first question on."""
    reply, _ = replied(client, [{"role": "user", "content": [IMAGE, text_part(question)]}])
    assert reply == QUESTIONS[question]


def test_a_conversation_about_a_picture(client: httpx.Client) -> None:
    """The second question finds the picture and the first turn in the cache."""
    messages: list[Any] = [{"role": "user", "content": [IMAGE, text_part("How many shapes are there?")]}]
    reply, _ = replied(client, messages)
    messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "What colour is the square?"}]
    again, num_cached = replied(client, messages)
    assert (reply, again) == ("Two.", "Blue.")
    assert num_cached > 64


def test_the_terminal_needs_no_model_for_a_picture(tmp_path: Path) -> None:
    """With `--image` and no `-m` the demo vision model replies, and without an image the text model."""
    path = tmp_path / "shapes.png"
    path.write_bytes(png(draw(SCENE, 200)))
    said = output("chat", "What shape is red?", "--image", str(path), "-t", "1", "--temperature", "0", "-q")
    assert said.strip() == "A circle."
