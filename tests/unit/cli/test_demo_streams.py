"""The streams of a demo, its keys, and its report; on channels without an engine."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from paceline.cli import demo_streams
from paceline.cli.demo_instruments import Pacer, SlotBoard
from paceline.cli.demo_requests import requests_of
from paceline.cli.demo_screen import LiveScreen, TokenRate
from paceline.cli.demo_streams import DemoStreams
from paceline.errors import DecodeError, PromptTooLong
from paceline.scheduling.records import RequestRecord
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


def submitted(*items: Any) -> tuple[Engine, DemoStreams]:
    engine, streams = Engine(), DemoStreams()
    streams.submit(engine, requests_of(items, "test"))  # type: ignore[arg-type]
    return engine, streams


def live(streams: DemoStreams, *slots: int) -> LiveScreen:
    """A picture in which request number i is in slot slots[i], from 0."""
    board = SlotBoard()
    for key, slot in enumerate(slots):
        board.request_queued(
            RequestRecord(
                key=key, request_id=None, kind="generate", prompt_tokens=1, num_choices=1, max_tokens=9, priority=0,
                submitted_s=0.0,
            )
        )  # fmt: skip
        board.request_started(key, 0, slot, 0.0)
    return LiveScreen(streams, board, num_slots=4, title="", keys=None)


def test_text_is_kept_by_completion_until_the_end() -> None:
    """Text and tokens of two choices do not mix, and it is over only with the last chunk."""
    engine, streams = submitted({"prompt": "a", "n": 2})
    (running,) = streams
    engine.push(0, "one", 0)
    engine.push(0, "two", 1)
    streams.take()
    assert [choice.text for choice in running.choices] == ["one", "two"] and not streams.are_over
    engine.senders[0].push(StreamChunk(index=1, choice=1, finish_reason=FinishReason.LENGTH))
    engine.end(0, text="!")
    streams.take()
    assert [choice.text for choice in running.choices] == ["one!", "two"] and streams.are_over
    assert [choice.reason for choice in running.choices] == ["stop", "length"]


def test_a_refused_request_leaves_the_others_alone() -> None:
    """It has its error and is over; only where all are refused is the first error raised."""
    _, streams = submitted("long", "b")
    refused, other = streams
    assert refused.is_over and isinstance(refused.error, PromptTooLong) and not other.is_over
    assert streams.accepted == [other]
    with pytest.raises(PromptTooLong):
        submitted("long", "long")


def test_a_stream_that_an_engine_ends_without_numbers_is_over() -> None:
    """An engine that dies ends its streams with an error alone."""
    engine, streams = submitted("a")
    engine.end(0, finish_reason=FinishReason.ERROR, error=DecodeError("gone"), usage=None)
    streams.take()
    (running,) = streams
    assert running.is_over and isinstance(running.error, DecodeError)
    assert demo_streams.result_lines(running) == ["#1 failed (gone), 0 tokens: "]


def test_a_request_that_is_submitted_after_the_end_was_asked_for_is_cancelled() -> None:
    """Ctrl-C may come while requests are still being submitted."""
    engine, streams = Engine(), DemoStreams()
    streams.cancel_all()
    streams.submit(engine, requests_of(["a"], ""))  # type: ignore[arg-type]
    assert engine.cancelled == [0]


def test_a_digit_cancels_the_request_in_that_slot() -> None:
    """By the slot's number and not the request's; a slot that is free does nothing."""
    engine, streams = submitted("a", "b")
    keys = live(streams, 2, 0)
    keys.press("2")
    assert engine.cancelled == []
    keys.press("3")
    assert engine.cancelled == [0]


def test_p_and_a_digit_stop_a_reader_and_start_it_again() -> None:
    """What comes meanwhile waits, and is read afterwards."""
    engine, streams = submitted("a", "b")
    keys, (first, second) = live(streams, 0, 1), tuple(streams)
    for key in "p1":
        keys.press(key)
    engine.push(0, "x")
    engine.push(1, "y")
    streams.take()
    assert (first.choices[0].text, second.choices[0].text) == ("", "y")
    assert keys.picture().lines[0].state == "unread"
    for key in "p1":
        keys.press(key)
    streams.take()
    assert first.choices[0].text == "x" and engine.cancelled == []


def test_p_and_p_stop_all_readers_and_start_them_again() -> None:
    """As long as one still reads, all are stopped; another key after p changes nothing."""
    _, streams = submitted("a", "b")
    keys, (first, second) = live(streams, 0, 1), tuple(streams)
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
    """Also where a reader was stopped, or nothing would ever come to its end."""
    engine, streams = submitted("a", "b")
    keys = live(streams, 0, 1)
    for key in "ppq":
        keys.press(key)
    assert engine.cancelled == [0, 1]
    for index in range(2):
        engine.end(index, finish_reason=FinishReason.CANCELLED)
    streams.take()
    assert streams.are_over
    assert demo_streams.result_lines(next(iter(streams))) == ["#1 interrupted, 0 tokens: "]


def test_keys_show_what_they_do() -> None:
    """The last line changes with what the next key will do."""
    _, streams = submitted("a")
    keys = live(streams, 0)
    assert keys.picture().hint == " Ctrl-C quits"
    keys._keys = object()  # type: ignore[assignment]
    first = keys.picture().hint
    keys.press("p")
    assert "q quit" in first and "p all readers" in keys.picture().hint


def test_speed_is_that_of_the_last_frames() -> None:
    """Nothing at first; then tokens by the time since the oldest frame that is remembered."""
    now = iter([0.0, 1.0, 2.0])
    speed = TokenRate(clock=lambda: next(now))
    assert [speed.at(count) for count in (10, 30, 70)] == [0, 20, 30]


def test_results_are_one_line_a_completion() -> None:
    """Line breaks of a text are spaces, and the number names the request and its choice."""
    engine, streams = submitted("long", {"prompt": "b", "n": 2})
    engine.push(0, "a\n\nb", 0)
    engine.senders[0].push(StreamChunk(index=1, choice=1, finish_reason=FinishReason.STOP, stop="END"))
    engine.end(0, stop=2)
    streams.take()
    lines = [line for running in streams for line in demo_streams.result_lines(running)]
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
    streams.take()
    report = json.loads(demo_streams.run_json(streams, demo_streams.run_figures(streams, Pacer(0)), seed=7, load_s=0.5))
    refused, done = report["results"]
    assert refused["error"] == {"code": "prompt_too_long", "message": "the prompt is\ntoo long"}
    assert refused["answers"] == [] and refused["usage"] is None
    assert done["answers"] == [{"text": "é", "token_ids": [1], "finish_reason": "stop", "stop": 2}]
    assert done["error"] is None and done["usage"]["completion_tokens"] == 2
    assert report["summary"]["ttft_p50_s"] is None and report["summary"]["requests"] == 2
    assert (report["summary"]["seed"], report["summary"]["load_s"]) == (7, 0.5)


def figures(**changes: Any) -> demo_streams.Figures:
    found = demo_streams.run_figures(DemoStreams(), Pacer(0))
    return dataclasses.replace(found, **changes)


def test_speculation_has_its_figures() -> None:
    """How many drafts were accepted, and the speed with and without them, as it was measured; nothing without speculation."""
    found = figures(num_drafts=200, num_accepted=150)
    faster = demo_streams.SpeedUp(without=100.0, with_drafts=130.0)
    rows = dict(demo_streams.figure_rows(found, 1, 0.1, faster))
    assert rows["drafts"] == "200 verified, 150 accepted (75%)"
    assert rows["speed-up"] == "1.30 times as fast: 130 tok/s with drafts, 100 without"
    assert "150 accepted (75%) | 1.30 times as fast" in demo_streams.figure_line(found, 1, 0.1, faster)
    summary = json.loads(demo_streams.run_json(DemoStreams(), found, 1, 0.1, faster))["summary"]
    assert (summary["draft_tokens"], summary["accepted_tokens"]) == (200, 150)
    assert (summary["tokens_per_s_with_drafts"], summary["tokens_per_s_without"]) == (130.0, 100.0)
    rows = dict(demo_streams.figure_rows(found, 1, 0.1))
    assert rows["drafts"] == rows["speed-up"] == ""
    assert "drafts" not in demo_streams.figure_line(found, 1, 0.1)
    assert "draft_tokens" not in json.loads(demo_streams.run_json(DemoStreams(), found, 1, 0.1))["summary"]


def test_speculation_without_drafts_or_tokens_says_so() -> None:
    """Not by a division by zero."""
    rows = dict(demo_streams.figure_rows(figures(), 1, 0.1, demo_streams.SpeedUp(None, 3.0)))
    assert rows["drafts"].startswith("none")
    assert rows["speed-up"] == "not measured"
