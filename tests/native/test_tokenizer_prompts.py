"""Functions of a tokenizer for prompts: outside text kept apart from control tokens, tokens to fill in the middle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from paceline.errors import InvalidParams
from paceline.runtime import Model, Tokenizer
from paceline.runtime.tokenizer import FimTokens
from paceline.testing.models import LlamaSpec, numbered

TinyModels = Callable[..., Path]


def spans_of(text: str, parts: Sequence[str]) -> list[tuple[int, int]]:
    """Return the places of the parts of a text in a row."""
    spans, end = [], 0
    for part in parts:
        start = text.index(part, end)
        end = start + len(part)
        spans.append((start, end))
    return spans


@pytest.fixture(scope="module")
def chat_tokens(tiny_models: TinyModels) -> Tokenizer:
    """Byte-level BPE with <|bos|> in front and <|im_start|>, <|im_end|>."""
    return Model.load(tiny_models("llama"), vocab_only=True).tokenizer


def test_control_tokens_in_inputs_are_text(chat_tokens: Tokenizer) -> None:
    """Only those outside of the inputs count, also after letters of several bytes."""
    text = "é<|im_start|>世界<|im_end|>ü<|im_end|>"
    ids = chat_tokens.encode_prompt(text, spans_of(text, ["世界<|im_end|>ü"]))
    start, end = (chat_tokens.token_id(name) for name in ("<|im_start|>", "<|im_end|>"))
    assert [token for token in ids if chat_tokens.is_control(token)] == [chat_tokens.bos, start, end]
    assert chat_tokens.decode(ids[1:], special=True) == text


@pytest.mark.parametrize("inputs", [["<|im_"], ["end|>"], ["im_end"], ["|"], ["<|im_end|>"], ["<|", "|>"]])
def test_a_token_put_together_with_an_input_is_text(chat_tokens: Tokenizer, inputs: list[str]) -> None:
    """Half of it from outside is enough, whichever half."""
    text = "a<|im_end|>b<|im_start|>"
    ids = chat_tokens.encode_prompt(text, spans_of(text, inputs))
    assert chat_tokens.token_id("<|im_end|>") not in ids
    assert ids[-1] == chat_tokens.token_id("<|im_start|>")
    assert chat_tokens.decode(ids[1:], special=True) == text


@pytest.mark.parametrize("inputs", [[], ["hello"], ["hello <b>", "!"], [""]])
def test_inputs_without_tokens_change_nothing(chat_tokens: Tokenizer, inputs: list[str]) -> None:
    """The ids equal those of the whole text in one piece."""
    text = "<|im_start|>user hello <b> world<|im_end|>!"
    assert chat_tokens.encode_prompt(text, spans_of(text, inputs)) == chat_tokens.encode(text, parse_special=True)


def test_sentencepiece_vocabularies_keep_them_apart_too(vocabulary: Model) -> None:
    """<s> typed by a user begins nothing."""
    tokenizer = vocabulary.tokenizer
    text = "<s>[INST] say </s> and <s> [/INST]"
    ids = tokenizer.encode_prompt(text, spans_of(text, ["say </s> and <s>"]))
    assert (
        ids.count(tokenizer.bos or 0) == 2 and ids.count(tokenizer.eos or 0) == 0
    )  # one in front, one of the template
    assert "</s>" in tokenizer.decode(ids)


def test_long_prompts_are_cut_between_their_tokens_as_others_are(chat_tokens: Tokenizer) -> None:
    """Thousands of control tokens, of the template and of users, in one text."""
    turn = "<|im_start|>user\nhi <|im_end|> there<|im_end|>\n"
    text = turn * 3_000
    spans = [(at * len(turn) + 17, at * len(turn) + 36) for at in range(3_000)]
    assert text[slice(*spans[7])] == "hi <|im_end|> there"
    ids = chat_tokens.encode_prompt(text, spans)
    end = chat_tokens.token_id("<|im_end|>")
    assert ids.count(end or 0) == 3_000
    assert ids[1 : 1 + (len(ids) - 1) // 3_000] * 3_000 == ids[1:]


def test_a_prompt_of_nothing_is_what_the_vocabulary_puts_around_it(chat_tokens: Tokenizer) -> None:
    """No text, no inputs."""
    assert chat_tokens.encode_prompt("", []) == [chat_tokens.bos]
    with pytest.raises(InvalidParams, match="text has a lone surrogate"):
        chat_tokens.encode_prompt("\ud800", [])


def test_fim_tokens_are_a_record(tiny_models: TinyModels, chat_tokens: Tokenizer) -> None:
    """Its fields name their purpose; None if the vocabulary lacks the token."""
    first = chat_tokens.token_id("<|fim_prefix|>") or 0
    assert chat_tokens.fim == FimTokens(prefix=first, suffix=first + 1, middle=first + 2)
    assert chat_tokens.fim.can_fill
    none = Model.load(tiny_models(LlamaSpec(vocabulary=numbered(300))), vocab_only=True).tokenizer.fim
    assert none == FimTokens() and not none.can_fill


def test_all_six_fim_tokens_are_read_from_the_file(tiny_models: TinyModels) -> None:
    """Each key of the metadata becomes the field of its name."""
    names = ("pre", "suf", "mid", "pad", "rep", "sep")
    overrides = {f"tokenizer.ggml.fim_{name}_token_id": 10 + place for place, name in enumerate(names)}
    model = Model.load(tiny_models(LlamaSpec(vocabulary=numbered(300))), vocab_only=True, kv_overrides=dict(overrides))
    assert model.tokenizer.fim == FimTokens(prefix=10, suffix=11, middle=12, pad=13, rep=14, sep=15)
