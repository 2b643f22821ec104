"""llama-server's responses, whole and as events, rendered from hand-made chunks and completions."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from tests.unit.server.dialects.llama_server.letters import letters

from paceline.params import SamplingParams
from paceline.server.dialects.llama_server.completion_request import CompletionRequest
from paceline.server.dialects.llama_server.completion_routes import CompletionRenderer, LineLimits, select_fields
from paceline.server.dialects.token_reports import _LLAMA_MIN_LOGPROB
from paceline.server.running_request import ProgressChunk
from paceline.streaming import FinishReason, StreamChunk, TokenLogprobs, Usage
from paceline.streaming.chunk import completion_of

USAGE = Usage(prompt_tokens=3, cached_tokens=1, completion_tokens=2, prefill_s=0.5, decode_s=0.25)
END = FinishReason.STOP


class Ticking:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now = 10.0

    def __call__(self) -> float:
        return self.now


def made(clock: Ticking | None = None, n: int = 1, **options: Any) -> CompletionRenderer:
    """Return a renderer for a prompt of three tokens, in a context of ten."""
    params = SamplingParams(max_tokens=None, n=n, **options.pop("sampling", {}))
    request = CompletionRequest(
        prompts=([1, 2, 3],), texts=("abc",), params=params, settings={"n_predict": -1, "inner": {"x": 1}},
        warnings=options.pop("warnings", ()), line_limits=LineLimits(), **options,
    )  # fmt: skip
    slots = [4 + choice for choice in range(n)]
    return CompletionRenderer(
        request, slots, model="it", tokenizer=letters(), max_positions=10, clock=clock or Ticking()
    )


def rendered(renderer: CompletionRenderer, *chunks: StreamChunk) -> list[dict[str, Any]]:
    """The events of the chunks."""
    return [json.loads(event) for chunk in chunks for event in renderer(0, chunk)]


def whole(renderer: CompletionRenderer, *chunks: StreamChunk) -> Any:
    """Return the whole response of these chunks."""
    completion = completion_of(chunks, prompt=[1, 2, 3], wants_logprobs=True, wants_prompt_logprobs=False, index=0)
    return json.loads(json.dumps(renderer.whole([completion])))


def test_a_chunk_becomes_an_event() -> None:
    """Its text, its tokens, and how many there have been."""
    first, second = rendered(
        made(), StreamChunk(index=0, token_ids=(7, 8), text="hi"), StreamChunk(index=2, token_ids=(9,), text="")
    )
    assert first == {
        "index": 0, "content": "hi", "tokens": [7, 8], "stop": False, "id_slot": 4, "tokens_predicted": 2,
        "tokens_evaluated": 3,
    }  # fmt: skip
    assert second["tokens_predicted"] == 3


def test_the_last_chunk_becomes_its_text_and_then_the_end() -> None:
    """As in llama-server the end itself has neither text nor tokens."""
    text, end = rendered(
        made(),
        StreamChunk(
            index=0, token_ids=(7,), text="a\n", finish_reason=END, stop=399, stop_token_ids=(399,), usage=USAGE
        ),
    )
    assert (text["content"], text["stop"]) == ("a\n", False)
    assert (end["content"], end["tokens"], end["stop"], end["stop_type"]) == ("", [], True, "eos")
    assert (end["tokens_predicted"], end["has_new_line"], end["prompt"], end["model"]) == (2, True, "abc", "it")
    assert "warnings" not in end
    assert "completion_probabilities" not in end


@pytest.mark.parametrize(
    ("stop", "sampling", "expected"),
    [
        (399, {}, ("eos", "")),
        (399, {"stop_token_ids": [399]}, ("eos", "")),
        (399, {"stop_token_ids": [399], "ignore_eos": True}, ("word", "")),
        (7, {"stop_token_ids": [7]}, ("word", "")),
        ("!", {"stop": ["!"]}, ("word", "!")),
        (None, {"grammar": 'root ::= "a"'}, ("eos", "")),
    ],
)
def test_the_stop_type_follows_from_what_ended_the_choice(
    stop: str | int | None, sampling: dict[str, Any], expected: tuple[str, str]
) -> None:
    """The model's own end and a complete grammar are "eos"; a stop string and any other stop token are "word"."""
    chunk = StreamChunk(index=0, finish_reason=FinishReason.STOP, stop=stop, usage=USAGE)
    for body in (whole(made(sampling=sampling), chunk), rendered(made(sampling=sampling), chunk)[-1]):
        assert (body["stop_type"], body["stopping_word"]) == expected


def test_choices_end_together_each_in_its_place() -> None:
    """The request's usage is known at the end of its last choice."""
    renderer = made(n=2)
    assert rendered(renderer, StreamChunk(index=0, choice=1, finish_reason=END)) == []
    events = rendered(renderer, StreamChunk(index=0, choice=0, finish_reason=FinishReason.LENGTH, usage=USAGE))
    assert [(event["index"], event["stop_type"], event["id_slot"]) for event in events] == [
        (0, "limit", 4),
        (1, "eos", 5),
    ]


def test_a_choice_that_failed_has_no_stop_type() -> None:
    """Its chunks come without a reason, since the stream has the error."""
    failed = StreamChunk(index=0, choice=0, token_ids=(7,), text="a")
    *_, first, second = rendered(
        made(n=2), failed, StreamChunk(index=0, choice=1, finish_reason=FinishReason.LENGTH, usage=USAGE)
    )
    assert (first["stop_type"], second["stop_type"]) == ("none", "limit")


def test_a_whole_response_has_its_tokens_only_where_they_were_asked_for() -> None:
    """One is an object, several are a list."""
    chunk = StreamChunk(index=0, token_ids=(7, 8), text="hi", finish_reason=FinishReason.STOP, stop="!", usage=USAGE)
    completion = whole(made(), chunk)
    assert (completion["content"], completion["tokens"], completion["stop_type"], completion["stopping_word"]) == (
        "hi",
        [],
        "word",
        "!",
    )
    assert whole(made(return_tokens=True), chunk)["tokens"] == [7, 8]
    assert [result["index"] for result in whole(made(n=2), StreamChunk(index=0, choice=1), chunk)] == [0, 1]


def test_a_completion_that_filled_the_context_is_truncated() -> None:
    """Ten positions: three of the prompt, seven of the completion."""
    for count, is_full in ((6, False), (7, True)):
        chunk = StreamChunk(index=0, token_ids=(5,) * count, finish_reason=FinishReason.LENGTH, usage=USAGE)
        completion = whole(made(), chunk)
        assert (completion["truncated"], completion["tokens_cached"]) == (is_full, 3 + count - 1)


def test_timings_follow_from_what_it_took() -> None:
    """The first token comes with the prompt; division by nothing is nothing."""
    chunk = StreamChunk(index=0, token_ids=(7, 8), finish_reason=FinishReason.LENGTH, usage=USAGE)
    assert whole(made(), chunk)["timings"] == {
        "cache_n": 1, "prompt_n": 2, "prompt_ms": 500.0, "prompt_per_token_ms": 250.0, "prompt_per_second": 4.0,
        "predicted_n": 2, "predicted_ms": 250.0, "predicted_per_token_ms": 250.0, "predicted_per_second": 4.0,
    }  # fmt: skip
    nothing = whole(made(), StreamChunk(index=0, finish_reason=FinishReason.LENGTH, usage=Usage()))["timings"]
    assert set(nothing.values()) == {0}
    drafted = Usage(draft_tokens=4, accepted_tokens=3)
    timings = whole(made(), StreamChunk(index=0, finish_reason=FinishReason.LENGTH, usage=drafted))["timings"]
    assert (timings["draft_n"], timings["draft_n_accepted"]) == (4, 3)


def test_timings_per_token_come_while_it_runs() -> None:
    """They are measured by the renderer's clock."""
    clock = Ticking()
    renderer = made(clock, timings_per_token=True)
    clock.now += 2
    (first,) = rendered(renderer, StreamChunk(index=0, token_ids=(7,)))
    clock.now += 1
    (second,) = rendered(renderer, StreamChunk(index=1, token_ids=(8, 9)))
    assert (first["timings"]["prompt_ms"], first["timings"]["predicted_ms"]) == (2000, 0)
    assert (second["timings"]["predicted_n"], second["timings"]["predicted_per_second"]) == (3, 2)


def test_timings_add_up_while_the_prompt_is_computed_and_after() -> None:
    """cache_n and computed tokens are the tokens in memory; nothing is predicted yet."""
    clock = Ticking()
    renderer = made(clock, timings_per_token=True, return_progress=True)
    steps = [(1, 0.0), (2, 0.5)]
    first, second = rendered(
        renderer, *(ProgressChunk(index=0, cache=1, processed=count, elapsed_s=took) for count, took in steps)
    )
    assert (first["prompt_progress"], second["prompt_progress"]) == (
        {"total": 3, "cache": 1, "processed": 1, "time_ms": 0},
        {"total": 3, "cache": 1, "processed": 2, "time_ms": 500},
    )
    for event, computed, took_ms in ((first, 0, 0.0), (second, 1, 500.0)):
        timings = event["timings"]
        assert (event["tokens"], timings["predicted_n"], timings["predicted_ms"]) == ([], 0, 0.0)
        assert (timings["cache_n"], timings["prompt_n"], timings["prompt_ms"]) == (1, computed, took_ms)
    clock.now += 0.25
    (token,) = rendered(renderer, StreamChunk(index=0, token_ids=(7,)))
    timings = token["timings"]
    assert (timings["cache_n"], timings["prompt_n"], timings["prompt_ms"]) == (1, 2, 750.0)
    assert (timings["predicted_n"], timings["predicted_ms"]) == (1, 0.0)


def test_progress_that_was_not_asked_for_shows_in_timings_alone() -> None:
    """The timings of every choice include it."""
    renderer = made(n=2, timings_per_token=True)
    assert rendered(renderer, ProgressChunk(index=0, cache=2, processed=2, elapsed_s=0.0)) == []
    for choice in (0, 1):
        (event,) = rendered(renderer, StreamChunk(index=0, choice=choice, token_ids=(7,)))
        assert (event["timings"]["cache_n"], event["timings"]["prompt_n"]) == (2, 1)


def test_probabilities_have_two_shapes() -> None:
    """The model's as logarithms; after sampling as probabilities, and without impossible tokens."""
    scored = TokenLogprobs(math.log(0.5), (65, 0xC3), (math.log(0.5), -math.inf))
    chunk = StreamChunk(index=0, token_ids=(65,), logprobs=(scored,), finish_reason=FinishReason.LENGTH, usage=USAGE)
    (entry,) = whole(made(sampling={"logprobs": 2}), chunk)["completion_probabilities"]
    assert (entry["id"], entry["token"], entry["bytes"], entry["logprob"]) == (65, "A", [65], math.log(0.5))
    assert entry["top_logprobs"][1] == {"id": 0xC3, "token": "", "bytes": [0xC3], "logprob": _LLAMA_MIN_LOGPROB}
    renderer = made(sampling={"logprobs": 2, "logprobs_mode": "sampled"})
    (entry,) = whole(renderer, chunk)["completion_probabilities"]
    assert entry["prob"] == 0.5
    assert [candidate["id"] for candidate in entry["top_probs"]] == [65]


def test_a_streams_probabilities_come_with_their_tokens() -> None:
    """The end does not repeat them."""
    chunk = StreamChunk(index=0, token_ids=(65,), logprobs=(TokenLogprobs(-1.0),), finish_reason=END, usage=USAGE)
    text, end = rendered(made(sampling={"logprobs": 1}), chunk)
    assert text["completion_probabilities"][0]["id"] == 65
    assert "completion_probabilities" not in end


def test_with_probabilities_every_event_has_one_token() -> None:
    """Its own text, too, if the chunk had several; text that comes after its tokens has none."""
    scores = tuple(TokenLogprobs(-float(rank)) for rank in range(3))
    chunk = StreamChunk(index=0, token_ids=(65, 66, 67), text="ABC", logprobs=scores)
    renderer = made(sampling={"logprobs": 1}, timings_per_token=True)
    events = rendered(renderer, chunk, StreamChunk(index=3, text="!"))
    assert [(event["content"], event["tokens"]) for event in events] == [
        ("A", [65]),
        ("B", [66]),
        ("C", [67]),
        ("!", []),
    ]
    assert [[token["logprob"] for token in event["completion_probabilities"]] for event in events] == [
        [0],
        [-1],
        [-2],
        [],
    ]
    assert [event["timings"]["predicted_n"] for event in events] == [1, 2, 3, 3]


def test_a_response_has_the_fields_that_were_asked_for_and_what_was_ignored() -> None:
    """Under their requested names; missing fields are left out."""
    chunk = StreamChunk(index=0, finish_reason=END, usage=USAGE)
    fields = ("content", "generation_settings/inner/x", "nothing", "content/x")
    renderer = made(response_fields=fields, warnings=("so it was",))
    assert whole(renderer, chunk) == {"content": "", "generation_settings/inner/x": 1, "warnings": ["so it was"]}
    assert select_fields({"a": {"b": None}}, ["a/b", "a/c", "a"]) == {"a/b": None, "a": {"b": None}}
