"""Results for callers: completions out of chunks, outcomes of lists, vectors, scores."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.engine.arguments import embedding_options, reranking_options
from paceline.engine.results import batch_outcome, scores, vectors
from paceline.errors import BatchError, DecodeError, PacelineError, PromptTooLong
from paceline.request import RequestOptions
from paceline.streaming import FinishReason, StreamChunk, TokenLogprobs, Usage
from paceline.streaming.chunk import Completion, completion_of


def completion(index: int = 0, error: PacelineError | None = None) -> Completion:
    reason = FinishReason.LENGTH if error is None else FinishReason.ERROR
    chunks = [
        StreamChunk(index=0, token_ids=(1, 2), text="ab", logprobs=(TokenLogprobs(-1.0), TokenLogprobs(-2.0))),
        StreamChunk(index=0, choice=1, token_ids=(5,), text="x", finish_reason=FinishReason.STOP, stop="y"),
        StreamChunk(index=2, token_ids=(3,), text="c", finish_reason=reason, usage=Usage(prompt_tokens=4), error=error),
    ]
    return completion_of(chunks, prompt=[7, 8], wants_logprobs=index == 0, wants_prompt_logprobs=False, index=index)


def test_chunks_become_a_completion() -> None:
    """Texts and ids of each choice are joined; the first one's fields are the completion's own."""
    whole = completion()
    assert (whole.text, whole.token_ids, whole.finish_reason) == ("abc", (1, 2, 3), FinishReason.LENGTH)
    assert [choice.text for choice in whole.choices] == ["abc", "x"]
    assert whole.choices[1].stop == "y"
    assert (whole.prompt_token_ids, whole.usage.prompt_tokens, whole.index) == ((7, 8), 4, 0)
    assert whole.logprobs is not None
    assert whole.prompt_logprobs is None
    assert completion(1).logprobs is None


def test_an_error_of_a_choice_is_raised() -> None:
    """A failure is raised; the text until then is still in the choices."""
    failed = completion(error=DecodeError("broken"))
    with pytest.raises(DecodeError, match="broken"):
        failed.raise_for_error()
    assert failed.text == "abc"
    completion().raise_for_error()


def test_a_completion_has_the_fields_of_its_first_choice() -> None:
    """The end and the reason of a failure are included as well."""
    error = DecodeError("broken")
    chunks = [
        StreamChunk(index=0, finish_reason=FinishReason.STOP, stop=9, stop_token_ids=(9,)),
        StreamChunk(index=0, choice=1, finish_reason=FinishReason.ERROR, error=error),
    ]
    options = {"prompt": [1], "wants_logprobs": False, "wants_prompt_logprobs": False, "index": 0}
    whole = completion_of(chunks, **options)  # type: ignore[arg-type]
    assert (whole.stop, whole.stop_token_ids, whole.error) == (9, (9,), None)
    assert (whole.choices[1].error, completion_of([chunks[1]], **options).error) == (error, error)  # type: ignore[arg-type]


def test_the_terminal_chunk_ends_every_choice_that_has_not_ended() -> None:
    """An engine that breaks down ends a stream with one chunk, whatever its choices had come to."""
    error = DecodeError("broken")
    chunks = [
        StreamChunk(index=0, choice=1, token_ids=(5,), text="x"),
        StreamChunk(index=0, finish_reason=FinishReason.ERROR, error=error),
    ]
    whole = completion_of(chunks, prompt=[1], wants_logprobs=False, wants_prompt_logprobs=False, index=0)
    assert [(choice.text, choice.finish_reason, choice.error) for choice in whole.choices] == [
        ("", FinishReason.ERROR, error),
        ("x", FinishReason.ERROR, error),
    ]


def test_a_list_has_every_outcome() -> None:
    """All completions, or one error that has the outcome of every prompt, in order."""
    good = [completion(index) for index in range(2)]
    assert batch_outcome(good) == good
    assert batch_outcome([]) == []
    too_long = PromptTooLong("too long")
    with pytest.raises(BatchError, match="1 of 3 prompts failed; the first is outcomes\\[1\\]: too long") as caught:
        batch_outcome([good[0], too_long, good[1]])
    assert caught.value.outcomes == (good[0], too_long, good[1])
    assert caught.value.__cause__ is too_long


def test_embedding_takes_only_options_that_mean_something() -> None:
    """Timeouts and tokenization options are taken; sampling, streaming and a priority without effect are refused."""
    taken = {"timeout_s": 2, "queue_timeout_s": 3, "request_id": "a", "add_special": False, "parse_special": True}
    assert embedding_options(taken) == RequestOptions(**taken)
    for name in ("interval", "lora", "max_tokens", "priority"):
        with pytest.raises(TypeError, match=name):
            embedding_options({name: 1})


def test_reranking_takes_no_options_of_tokenising() -> None:
    """A model's pairs have special tokens of their own."""
    assert reranking_options({"timeout_s": 2}) == RequestOptions(timeout_s=2)
    for name in ("add_special", "parse_special", "priority"):
        with pytest.raises(TypeError, match=name):
            reranking_options({name: True})


def test_vectors_are_stacked_and_normalised_as_asked() -> None:
    """float32 (n, dimension); length 1 by default; none is an empty array of the right width."""
    rows = [np.array([3.0, 4.0], dtype=np.float32), np.array([0.0, -2.0], dtype=np.float32)]
    assert vectors(rows, True, 2).tolist() == [[pytest.approx(0.6), pytest.approx(0.8)], [0, -1]]
    assert vectors(rows, False, 2).tolist() == [[3, 4], [0, -2]]
    assert vectors(rows, "max_abs", 2).tolist() == [[0.75, 1], [0, -1]]
    assert vectors([], True, 5).shape == (0, 5)
    assert vectors(rows, True, 2).dtype == np.float32


def test_scores_are_best_first_with_their_places() -> None:
    """Of equal results the earlier comes first."""
    found = scores([[0.5], [2.0], [0.5], [-1.0]])
    assert [(score.index, score.score) for score in found] == [(1, 2.0), (0, 0.5), (2, 0.5), (3, -1.0)]
