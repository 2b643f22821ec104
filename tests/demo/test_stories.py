"""The grammar of the stories and the judge that reads by it."""

from __future__ import annotations

import random

import pytest

from demo_model import grammar, plots, stories, words
from demo_model.judge import accepts, judge


def some_stories(count: int, seed: int = 5) -> list[str]:
    rng = random.Random(seed)
    return [stories.tell_story(rng) for _ in range(count)]


def test_every_written_sentence_is_accepted() -> None:
    for text in some_stories(200):
        assert judge(text, ended=True).rejected == ()


def test_stories_have_a_fair_length_and_two_names() -> None:
    for text in some_stories(100):
        assert 40 <= len(text.split()) <= 180
        assert judge(text, ended=True).same_cast


def test_the_same_seed_writes_the_same_stories() -> None:
    assert some_stories(5) == some_stories(5)
    assert some_stories(5) != some_stories(5, seed=6)


def test_stories_are_not_all_alike() -> None:
    assert len(set(some_stories(300))) == 300


@pytest.mark.parametrize(
    "sentence",
    [
        "Once upon a time, there was a old fox named Tom.",
        "Once upon a time, there was an little fox named Tom.",
        "Tom the fox lived.",
        "Tom and Lily was the best of friends.",
        "Tom lost its way home the.",
        '"Hello, Tom," said.',
        "once there was a fox",
        "",
    ],
)
def test_wrong_sentences_are_rejected(sentence: str) -> None:
    assert not accepts(sentence)


def test_pronouns_must_agree_with_the_name() -> None:
    assert accepts("Tom went home tired and slept well.")
    assert accepts('"I must be brave," said Tom to himself.')
    assert not accepts('"I must be brave," said Tom to herself.')
    assert accepts('"I must be brave," said Lily to herself.')


def test_swapped_words_are_rejected() -> None:
    rng = random.Random(3)
    for text in some_stories(30):
        for sentence in stories.split_sentences(text):
            parts = sentence.split()
            if len(parts) < 5:
                continue
            at = rng.randrange(1, len(parts) - 2)
            if parts[at] == parts[at + 1]:
                continue
            parts[at], parts[at + 1] = parts[at + 1], parts[at]
            assert not accepts(" ".join(parts)), parts


def test_a_cut_story_has_a_rejected_sentence() -> None:
    text = some_stories(1)[0]
    verdict = judge(text[:-12], ended=False)
    assert len(verdict.rejected) == 1
    assert verdict.correct == verdict.sentences - 1


def test_a_third_name_is_noticed() -> None:
    text = "Tom went home tired and slept well. That night, Lily fell asleep with a smile. "
    assert judge(text, ended=True).same_cast
    assert not judge(text + "That night, Ruby fell asleep with a smile.", ended=True).same_cast


def test_a_quoted_question_is_one_sentence_with_its_tag() -> None:
    text = '"What is wrong?" asked Lily. "My ball is gone," said Tom with tears in his eyes.'
    assert stories.split_sentences(text) == [
        '"What is wrong?" asked Lily.',
        '"My ball is gone," said Tom with tears in his eyes.',
    ]


def test_article_follows_the_next_letter() -> None:
    rng = random.Random(0)
    assert grammar.expand("{An} {x} ran.", {"x": "owl"}, rng) == "An owl ran."
    assert grammar.expand("{An} {x} ran.", {"x": "fox"}, rng) == "A fox ran."


def test_every_lesson_of_a_plot_is_known_to_the_judge() -> None:
    assert set(plots.PLOT_LESSONS) == set(plots.PLOTS)
    for lessons in plots.PLOT_LESSONS.values():
        assert set(lessons) <= set(words.LESSONS)


def test_every_slot_of_every_template_has_words() -> None:
    for template in plots.all_templates():
        for kind, value in grammar.pieces(template):
            if kind == "slot" and value.lower() != "an":
                key = value if value in ("A", "B") else value.lower()
                assert grammar.domain(key, "m", "f"), value
