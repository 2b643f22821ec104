"""The shapes of prompts, and the layout of a gap's prompt, over a vocabulary of letters."""

from __future__ import annotations

from typing import Any

import pytest
from tests.media_requests import DATA, request_media
from tests.unit.server.dialects.llama_server.letters import BOS, letters

from paceline.errors import InvalidParams, InvalidType, RequestError, Unsupported
from paceline.params import SamplingParams
from paceline.server.dialects.llama_server.completion_request import ParseContext, infill_prompt
from paceline.server.dialects.llama_server.llama_bodies import InfillBody
from paceline.server.dialects.request_body import MarkedImages, read_prompts

A, B, C = 97, 98, 99


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("ab", [[BOS, A, B]]),
        ([A, B], [[A, B]]),
        ([A, "bc"], [[A, B, C]]),
        (["ab", 5], [[BOS, A, B, 5]]),
        ({"prompt_string": "a"}, [[BOS, A]]),
        (["a"], [[BOS, A]]),
        (["a", "b"], [[BOS, A], [BOS, B]]),
        (["a", [B, C], {"prompt_string": [1, "c"]}], [[BOS, A], [B, C], [1, C]]),
        ([[A], [B, "c", 3]], [[A], [B, C, 3]]),
    ],
)
def test_a_prompt_has_many_shapes(given: Any, wanted: list[list[int]]) -> None:
    """A list with a number in it is one prompt, any other several; only a text that comes first is begun."""
    assert read_prompts(letters(), "prompt", given) == wanted


@pytest.mark.parametrize(
    "given", [[], [[]], 5, None, True, [True], [1, True], [1.5], [-1], [400], {"a": 1}, [{}], ["a", 1, None]]
)
def test_anything_else_is_refused_by_name(given: Any) -> None:
    """With the name of the field in front."""
    with pytest.raises(RequestError, match="prompt"):
        read_prompts(letters(), "prompt", given)


def test_images_are_refused_where_texts_are_tokenised() -> None:
    """They are not taken for text."""
    with pytest.raises(Unsupported, match="multimodal"):
        read_prompts(letters(), "prompt", {"prompt_string": "a", "multimodal_data": ["AAAA"]})


def read(prompt: Any, marker: str = "<m>") -> list[Any]:
    return read_prompts(letters(), "prompt", prompt, MarkedImages(marker, request_media()))


def test_images_stand_where_their_markers_do() -> None:
    """In a list of prompts, beside others; without data a marker is text."""
    both = {"prompt_string": "a<m><m>b", "multimodal_data": [DATA, DATA]}
    (found,) = read(both)
    assert [getattr(item, "name", item) for item in found] == [
        "a",
        "prompt.multimodal_data[0]",
        "prompt.multimodal_data[1]",
        "b",
    ]
    first, second = read(["ab", {"prompt_string": "<m>", "multimodal_data": [DATA]}])
    assert first == letters().encode("ab")
    assert [entry.name for entry in second] == ["prompt[1].multimodal_data[0]"]
    assert read({"prompt_string": "a", "multimodal_data": []}) == [letters().encode("a")]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ({"prompt_string": "a", "multimodal_data": [DATA]}, "prompt has 1 multimodal_data, and 0 markers <m>"),
        ({"prompt_string": "<m><m>", "multimodal_data": [DATA]}, "has 1 multimodal_data, and 2 markers"),
        ({"prompt_string": "<m>", "multimodal_data": DATA}, "prompt.multimodal_data must be a list"),
        ({"prompt_string": "<m>", "multimodal_data": ["aGk="]}, r"prompt.multimodal_data\[0\]: an image must be a PNG"),
        ({"prompt_string": 5, "multimodal_data": [DATA]}, "prompt.prompt_string must be"),
        ([{"prompt_string": "<m>", "multimodal_data": [""]}], r"prompt\[0\].multimodal_data\[0\] is empty"),
    ],
)
def test_markers_and_data_have_to_fit(prompt: Any, words: str) -> None:
    """By their place."""
    with pytest.raises(RequestError, match=words):
        read(prompt)


def gap(
    fim: dict[str, int], n_batch: int = 100, n_ctx: int = 1000, *, spm_infill: bool = False, **fields: Any
) -> list[int]:
    """The prompt of a gap between "aa" and "cc"."""
    body = InfillBody.model_validate({"input_prefix": "aa", "input_suffix": "cc", **fields})
    images = MarkedImages("<m>", request_media())
    context = ParseContext(
        base=SamplingParams(),
        tokenizer=letters(**fim),
        images=images,
        n_batch=n_batch,
        n_ctx=n_ctx,
        spm_infill=spm_infill,
    )
    return infill_prompt(body, context)


FIM = {"prefix": 1, "suffix": 2, "middle": 3}


def test_a_gap_lies_between_its_tokens() -> None:
    """Prefix and prompt, then suffix, then the token after which the model writes."""
    assert gap(FIM, prompt="b") == [BOS, 1, A, A, B, 2, C, C, 3]


def test_the_suffix_comes_first_for_models_that_were_trained_so() -> None:
    """The beginning of the completion stays with the prefix."""
    assert gap(FIM, spm_infill=True, prompt="b") == [BOS, 2, C, C, 1, A, A, B, 3]


def test_other_files_come_first_each_with_its_name() -> None:
    """In the tokens of the model if it has them; else between lines."""
    files = {"input_extra": [{"filename": "f", "text": "x"}, {"text": "y"}]}
    spelt = "".join(map(chr, gap({**FIM, "rep": 4, "sep": 5}, **files)))
    assert spelt == f"\4myproject\n\5f\nx\5tmp\ny\5filename\n{chr(BOS)}\1aa\2cc\3"
    spelt = "".join(map(chr, gap(FIM, **files)))
    assert spelt == f"\n\n--- snippet ---\n\nx\n\n--- snippet ---\n\ny{chr(BOS)}\1aa\2cc\3"


def test_a_long_gap_keeps_what_is_near_it() -> None:
    """Three quarters of a batch of the prefix's end, a quarter of the suffix's beginning, and files from their end."""
    ids = gap(FIM, n_batch=16, n_ctx=20, input_prefix="x" * 50 + "aa", input_suffix="cc" + "y" * 50)
    assert ids == [BOS, 1, *[ord("x")] * 10, A, A, 2, C, C, 3]
    ids = gap(FIM, n_batch=16, n_ctx=20, input_extra=[{"text": "1234567"}])
    assert ids[:4] == [ord(item) for item in "4567"]
    assert gap(FIM, n_batch=16, n_ctx=20, n_predict=2, input_extra=[{"text": "1234567"}])[0] == BOS


def test_a_model_without_the_tokens_is_refused() -> None:
    """The error names the missing fields."""
    with pytest.raises(Unsupported, match="suffix and the middle"):
        gap({"prefix": 1})


@pytest.mark.parametrize("name", ["input_prefix", "input_suffix"])
def test_both_sides_of_a_gap_must_be_there(name: str) -> None:
    """Null is no side."""
    with pytest.raises(InvalidParams, match=name):
        gap(FIM, **{name: None})
    with pytest.raises(InvalidType, match=name):
        gap(FIM, **{name: 3})
