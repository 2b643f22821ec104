"""The demo models: their promised properties, and a check of their abilities. Figures: MODEL_CARD.md."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from demo_model.judge import judge
from paceline.demo import demo_draft_model_path, demo_model_path
from paceline.output import TextPipe
from paceline.params import SamplingParams
from paceline.runtime import Context, Model, Sampler

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model.load(demo_model_path()) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def draft() -> Iterator[Model]:
    with Model.load(demo_draft_model_path()) as loaded:
        yield loaded


def write(model: Model, prompt: str, *, parse_special: bool = False, **options: object) -> tuple[str, int]:
    """Return the model's continuation, and the number of its tokens."""
    ids = model.tokenizer.encode(prompt, parse_special=parse_special)
    pipe = TextPipe(model.tokenizer.pieces(special=False))
    with Context(model, n_ctx=1024) as context:
        sampler = Sampler(SamplingParams(max_tokens=400, **options), model)  # type: ignore[arg-type]
        tokens = list(context.generate(sampler, ids))
    return "".join(pipe.push(token).text for token in tokens) + pipe.finish().text, len(tokens)


def test_the_files_are_small_llamas_of_eight_bits(model: Model, draft: Model) -> None:
    """Architecture, quantisation and sizes match the card."""
    assert demo_model_path().stat().st_size <= 5_000_000
    for item in (model, draft):
        assert item.metadata["general.architecture"] == "llama"
        assert item.ftype == "Q8_0"
        assert item.n_vocab == 4096
    assert 2_000_000 <= model.n_params <= 4_000_000
    assert model.n_params / 15 <= draft.n_params <= model.n_params / 8


def test_both_have_one_vocabulary(model: Model, draft: Model) -> None:
    """A draft's tokens mean the same to the model that checks them."""
    assert model.tokenizer.pieces(special=True) == draft.tokenizer.pieces(special=True)
    assert model.tokenizer.eog_ids == draft.tokenizer.eog_ids


@pytest.mark.parametrize("text", ["\U0001f98a", "世", "猫"])
def test_characters_from_afar_take_several_tokens(model: Model, text: str) -> None:
    """So that a stream has to wait for the rest of a character."""
    ids = model.tokenizer.encode(text)
    assert len(ids) > 1
    assert model.tokenizer.decode(ids) == text


def test_ends_are_ends(model: Model) -> None:
    """The ends of a text and of a turn are both known end tokens."""
    names = {model.tokenizer.token_bytes(token) for token in model.tokenizer.eog_ids}
    assert {b"<|endoftext|>", b"<|im_end|>"} <= names


def test_the_chat_template_knows_tools_and_thoughts(model: Model) -> None:
    """Both are parts of the template in the file."""
    template = model.chat_template() or ""
    assert "tools" in template
    assert "<think>" in template


def test_stories_end_by_themselves_in_sentences_of_the_grammar(model: Model) -> None:
    """Of the sentences of eight stories nine in ten could have been written by the corpus' grammar."""
    good = total = 0
    for seed in range(8):
        story, count = write(model, "Once upon a time", seed=seed)
        assert count < 400
        verdict = judge("Once upon a time" + story, ended=True)
        good += verdict.correct
        total += verdict.sentences
    assert good >= 0.9 * total


def test_the_world_is_known(model: Model) -> None:
    """A question in a chat turn has its exact answer."""
    from demo_model.world import all_questions

    question = next(question for question in all_questions() if question.held_out)
    prompt = f"<|im_start|>user\n{question.text}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    text, _ = write(model, prompt, parse_special=True, temperature=0)
    assert text.strip() == question.answer


def test_a_tool_is_called_with_a_city_that_was_not_in_the_corpus(model: Model) -> None:
    """Of eight calls at least seven have the right name and arguments."""
    from demo_model.exams import weather_calls
    from demo_model.generator import Output

    right = 0
    for task in itertools.islice(weather_calls(), 8):
        text, count = write(model, task.prompt, parse_special=True, temperature=0)
        right += task.right(Output(text, [], ended=count < 400))
    assert right >= 7


def test_the_reply_takes_up_the_result_of_a_tool(model: Model) -> None:
    """Of eight replies at least seven are exactly the expected sentence."""
    from demo_model.exams import tool_answers
    from demo_model.generator import Output

    right = 0
    for task in itertools.islice(tool_answers(), 8):
        text, count = write(model, task.prompt, parse_special=True, temperature=0)
        right += task.right(Output(text, [], ended=count < 400))
    assert right >= 7
