"""Made-up words, and the exercises in copying them."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator

import pytest

from demo_model import copying, corpus, nonce, places, tools_data


@pytest.fixture
def vocabulary() -> Iterator[list[str]]:
    nonce.use_pieces(["Qzx", "oslo", "ab", "Ġspaced", '"', "12"])
    yield nonce.pieces
    nonce.use_pieces([])


def test_only_words_of_a_vocabulary_become_pieces(vocabulary: list[str]) -> None:
    assert vocabulary == ["Qzx", "ab", "oslo"]


def test_no_made_up_word_is_a_city_that_is_kept_out(vocabulary: list[str]) -> None:
    rng = random.Random(1)
    made = {nonce.word(rng) for _ in range(3000)}
    assert "oslooslo" in made
    assert not made & {city.lower() for city in places.HELD_OUT_CITIES}


@pytest.mark.usefixtures("vocabulary")
def test_no_call_in_the_corpus_has_a_city_that_is_kept_out() -> None:
    kept_out = {f'"{city}"' for city in places.HELD_OUT_CITIES}
    for document in itertools.islice(corpus.documents(17), 1500):
        text = "".join(segment.text for segment in document)
        assert not [city for city in kept_out if city in text]


def test_made_up_words_are_varied() -> None:
    rng = random.Random(2)
    made = [nonce.thing(rng) for _ in range(2000)]
    assert len(set(made)) > 1500
    for has in (str.isupper, str.isdigit, str.istitle, lambda w: "-" in w, lambda w: len(w) == 1):
        assert 20 < sum(map(has, made)) < 1000


def test_every_answer_of_an_exercise_stands_in_its_question() -> None:
    rng = random.Random(3)
    for make in (copying.repeat, copying.pick):
        for _ in range(200):
            question, answer = make(rng)
            assert answer in question


def test_a_value_is_looked_up_by_its_key() -> None:
    rng = random.Random(4)
    for _ in range(200):
        question, answer = copying.look_up(rng)
        key = question.rpartition("What is the ")[2].rstrip("?")
        value = answer.removeprefix(f"The {key} is ").removesuffix(".")
        assert f"{key}: {value}" in question or f'"{key}": "{value}"' in question


def test_json_exercises_are_json() -> None:
    rng = random.Random(5)
    for _ in range(200):
        question, answer = copying.as_json(rng)
        data = json.loads(answer)
        values = data.values() if isinstance(data, dict) else data
        assert all(value in question for value in values)


def test_parameters_of_one_tool_have_different_names() -> None:
    rng = random.Random(6)
    for _ in range(3000):
        family = tools_data.unknown_family(rng)
        assert len({param.names for param in family.params}) == len(family.params)
