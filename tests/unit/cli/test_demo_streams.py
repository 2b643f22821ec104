"""The streams of a demo, its keys, and its report; on channels without an engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.cli import demo
from paceline.cli.demo import DemoRequest, LiveDemo, completed, parse_requests, result_lines
from paceline.cli.demo_pace import Pacer
from paceline.cli.screen import TopState
from paceline.errors import DecodeError, PromptTooLong
from paceline.streaming import FinishReason, Stream, StreamChannel, StreamChunk, Usage


class Engine:
    """Hands out streams that the test feeds; refuses the prompt "long"."""

    def __init__(self) -> None:
        self.senders: list[Any] = []
        self.cancelled: list[int] = []

    def stream(self, prompt: object, **options: Any) -> Stream:
        if prompt == "long":
            raise PromptTooLong("the prompt is\ntoo long")
        channel, index = StreamChannel.create(), len(self.senders)
        self.senders.append(channel.attach(on_cancel=lambda: self.cancelled.append(index)))
        return Stream(channel)

    def push(self, index: int, text: str, choice: int = 0) -> None:
        self.senders[index].push(StreamChunk(index=0, token_ids=(1,), text=text, choice=choice))

    def end(self, index: int, choice: int = 0, **changes: Any) -> None:
        facts = {"finish_reason": FinishReason.STOP, "usage": Usage(prompt_tokens=3, completion_tokens=2)} | changes
        self.senders[index].finish(StreamChunk(index=1, choice=choice, **facts))


def submitted(*items: Any) -> tuple[Engine, list[DemoRequest]]:
    engine, requests = Engine(), completed(parse_requests(items, "test"), 1, None)
    demo.submit(engine, requests)  # type: ignore[arg-type]
    return engine, requests


def take(requests: list[DemoRequest]) -> None:
    for request in requests:
        request.take()


def test_text_is_kept_by_completion_until_the_end() -> None:
    """Text and tokens of two choices do not mix, and it is over only with the last chunk."""
    engine, streams = submitted({"prompt": "a", "n": 2})
    (running,) = streams
    engine.push(0, "one", 0)
    engine.push(0, "two", 1)
    take(streams)
    assert [choice.text for choice in running.choices] == ["one", "two"] and not running.is_over
    engine.senders[0].push(StreamChunk(index=1, choice=1, finish_reason=FinishReason.LENGTH))
    engine.end(0, text="!")
    take(streams)
    assert [choice.text for choice in running.choices] == ["one!", "two"] and running.is_over
    assert [choice.reason for choice in running.choices] == ["stop", "length"]


def test_a_refused_request_leaves_the_others_alone() -> None:
    """It has its error and is over; only if all are refused is the first error raised."""
    _, streams = submitted("long", "b")
    refused, other = streams
    assert refused.is_over and isinstance(refused.error, PromptTooLong) and not other.is_over
    with pytest.raises(PromptTooLong):
        submitted("long", "long")


def test_a_stream_that_an_engine_ends_without_numbers_is_over() -> None:
    """An engine that dies ends its streams with an error alone."""
    engine, streams = submitted("a")
    engine.end(0, finish_reason=FinishReason.ERROR, error=DecodeError("gone"), usage=None)
    take(streams)
    (running,) = streams
    assert running.is_over and isinstance(running.error, DecodeError)
    assert result_lines(running) == ["#1 failed (gone), 0 tokens: "]


def test_a_digit_cancels_the_request_of_this_number() -> None:
    """A number without a request, or of an ended request, does nothing."""
    engine, streams = submitted("a", "b")
    keys = LiveDemo(streams, "", None)
    keys.press("3")
    assert engine.cancelled == []
    keys.press("2")
    assert engine.cancelled == [1]


def test_p_and_a_digit_stop_a_reader_and_start_it_again() -> None:
    """Keys pressed meanwhile wait, and are read afterwards."""
    engine, streams = submitted("a", "b")
    keys, (first, second) = LiveDemo(streams, "", None), tuple(streams)
    for key in "p1":
        keys.press(key)
    engine.push(0, "x")
    engine.push(1, "y")
    take(streams)
    assert (first.choices[0].text, second.choices[0].text) == ("", "y")
    assert [line.state for line in keys.lines(TopState())] == ["unread", "decode"]
    for key in "p1":
        keys.press(key)
    take(streams)
    assert first.choices[0].text == "x" and engine.cancelled == []


def test_p_and_p_stop_all_readers_and_start_them_again() -> None:
    """As long as one still reads, all are stopped; another key after p changes nothing."""
    _, streams = submitted("a", "b")
    keys, (first, second) = LiveDemo(streams, "", None), tuple(streams)
    for presses, are_read in (
        ("p1", [False, True]),
        ("pp", [False, False]),
        ("px", [False, False]),
        ("pp", [True, True]),
    ):
        for key in presses:
            keys.press(key)
        assert [first.is_read, second.is_read] == are_read, presses


def test_q_cancels_all_and_reads_what_is_left() -> None:
    """Also if a reader was stopped, or nothing would ever come to its end."""
    engine, streams = submitted("a", "b")
    keys = LiveDemo(streams, "", None)
    for key in "ppq":
        keys.press(key)
    assert engine.cancelled == [0, 1]
    for index in range(2):
        engine.end(index, finish_reason=FinishReason.CANCELLED)
    take(streams)
    assert all(request.is_over for request in streams)
    assert result_lines(streams[0]) == ["#1 interrupted, 0 tokens: "]


def test_keys_show_what_they_do() -> None:
    """The last line changes with the effect of the next key."""
    _, streams = submitted("a")
    keys = LiveDemo(streams, "", None)
    assert keys.hint == " Ctrl-C quits"
    keys._keys = object()  # type: ignore[assignment]
    first = keys.hint
    keys.press("p")
    assert "q quit" in first and "p all readers" in keys.hint


def test_a_line_has_the_state_of_its_slot() -> None:
    """By the request's name; before it has one it waits."""
    _, streams = submitted("a", {"prompt": "b", "n": 2})
    state = TopState({"slots": [{"request_id": "#2", "choice": 1, "state": "prefilling"}]})
    lines = LiveDemo(streams, "", None).lines(state)
    assert [(line.label, line.state) for line in lines] == [("#1", "waiting"), ("#2.1", "waiting"), ("#2.2", "prefill")]


def test_results_are_one_line_a_completion() -> None:
    """Line breaks of a text are spaces, and the number names the request and its choice."""
    engine, streams = submitted("long", {"prompt": "b", "n": 2})
    engine.push(0, "a\n\nb", 0)
    engine.senders[0].push(StreamChunk(index=1, choice=1, finish_reason=FinishReason.STOP, stop="END"))
    engine.end(0, stop=2)
    take(streams)
    lines = [line for request in streams for line in result_lines(request)]
    assert lines == [
        "#1 refused: the prompt is too long",
        "#2.1 ended by itself, 1 token: a b",
        "#2.2 stopped at 'END', 0 tokens: ",
    ]


def test_json_has_every_result_and_the_figures() -> None:
    """Errors have their code; figures that there are not are null."""
    engine, streams = submitted("long", "b")
    engine.push(0, "é")
    engine.end(0, stop=2)
    take(streams)
    refused, done = (demo._result(request) for request in streams)
    summary = demo.figures(streams, Pacer(0))
    assert refused["error"] == {"code": "prompt_too_long", "message": "the prompt is\ntoo long"}
    assert refused["answers"] == [] and refused["usage"] is None
    assert done["answers"] == [{"text": "é", "token_ids": [1], "finish_reason": "stop", "stop": 2}]
    assert done["error"] is None and done["usage"]["completion_tokens"] == 2
    assert summary["ttft_p50_s"] is None and summary["requests"] == 2
    assert json.dumps([refused, done, summary])


def figures(speed_up: tuple[float | None, float | None] | None, **changes: Any) -> dict[str, Any]:
    return demo.figures([], Pacer(0), speed_up) | {"load_s": 0.1, "seed": 1} | changes


def test_speculation_has_its_figures() -> None:
    """How many drafts were accepted, and the speed with and without them, as it was measured; nothing without speculation."""
    found = figures((100.0, 130.0), draft_tokens=200, accepted_tokens=150)
    rows = dict(demo.figure_rows(found))
    assert rows["drafts"] == "200 verified, 150 accepted (75%)"
    assert rows["speed-up"] == "1.30 times as fast: 130 tok/s with drafts, 100 without"
    assert "150 accepted (75%) | 1.30 times as fast" in demo.figure_line(found)
    assert (found["tokens_per_s_with_drafts"], found["tokens_per_s_without"]) == (130.0, 100.0)
    rows = dict(demo.figure_rows(figures(None)))
    assert rows["drafts"] == rows["speed-up"] == ""
    assert "drafts" not in demo.figure_line(figures(None))
    assert "draft_tokens" not in figures(None)


def test_speculation_without_drafts_or_tokens_says_so() -> None:
    """Not by a division by zero."""
    rows = dict(demo.figure_rows(figures((None, 3.0))))
    assert rows["drafts"].startswith("none")
    assert rows["speed-up"] == "not measured"
