"""`paceline perplexity`: windows, scored tokens and figures."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline import LLM, Model, demo_model_path
from paceline.cli.app import build_app
from paceline.cli.endings import StopSignal
from paceline.cli.perplexity import scored_windows, windows_of
from paceline.errors import InvalidParams
from paceline.observability.metrics import Instrument
from paceline.scheduling.records import EndRecord

pytestmark = pytest.mark.native

TEXT = "Once upon a time there was a little girl. She liked to play with her dog in the park. " * 8


def invoked(*arguments: str, text: str | None = None) -> Any:
    done = CliRunner().invoke(build_app(), ["perplexity", *arguments], input=text, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done


def measured(*arguments: str) -> dict[str, float]:
    found: dict[str, float] = json.loads(invoked("-q", "--json", *arguments).stdout)
    return found


@pytest.mark.parametrize(("stride", "first_scored"), [(None, 33), (16, 48)])
def test_figures_are_those_of_scored_prompts(tmp_path: Path, stride: int | None, first_scored: int) -> None:
    """Each window alone, as llama-perplexity cuts the text, or overlapping."""
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    found = measured(str(file), "-c", "64", "-np", "2", *(["--stride", str(stride)] if stride else []))
    with LLM(num_slots=1, n_ctx=512) as llm:
        ids = llm.tokenizer.encode(TEXT)
        starts = range(0, len(ids) - 63, stride or 64)
        scored: list[float] = []
        num_bytes = 0
        for start in starts:
            window = ids[start : start + 64]
            whole = llm.generate(window, max_tokens=0, prompt_logprobs=0, cache_prompt=False)
            scored += [token.own for token in (whole.prompt_logprobs or ())[first_scored - 1 :]]
            num_bytes += sum(len(llm.tokenizer.token_bytes(token)) for token in window[first_scored:])
    assert found["scored_tokens"] == len(scored) == len(starts) * (64 - first_scored)
    assert found["scored_bytes"] == num_bytes
    mean = -sum(scored) / len(scored)
    assert math.log(found["perplexity"]) == pytest.approx(mean, abs=1e-2)
    assert found["bits_per_token"] == pytest.approx(mean / math.log(2), abs=1e-2)
    assert found["bits_per_byte"] == pytest.approx(-sum(scored) / math.log(2) / num_bytes, abs=1e-2)


class StopAfter(Instrument):
    """Requests a stop when so many requests have ended."""

    def __init__(self, number: int, stop: StopSignal) -> None:
        self._left, self._stop = number, stop

    def request_ended(self, record: EndRecord) -> None:
        self._left -= 1
        if self._left == 0:
            self._stop.request()


def test_a_stop_keeps_the_windows_that_have_ended() -> None:
    """With the log-probabilities and the bytes of these windows; later ones are not computed."""
    stop = StopSignal()
    with LLM(num_slots=1, n_ctx=256, instruments=(StopAfter(3, stop),)) as llm:
        windows = windows_of(llm.tokenizer, TEXT * 4, 64, None)
        found = list(scored_windows(llm, windows, stop))
        whole = list(scored_windows(llm, windows, StopSignal()))
    assert 3 <= len(found) < len(whole) == len(windows.token_ids)
    assert [num_bytes for _, num_bytes in found] == windows.num_bytes[: len(found)]
    for (logprobs, _), (expected, _) in zip(found, whole, strict=False):
        assert logprobs == pytest.approx(expected, abs=1e-2)


def test_windows_are_told_as_they_end() -> None:
    """The first one while later ones are still queued."""
    stop = StopSignal()
    with LLM(num_slots=1, n_ctx=256) as llm:
        windows = windows_of(llm.tokenizer, TEXT * 4, 64, None)
        scored = scored_windows(llm, windows, stop)
        next(scored)
        assert llm.stats().queued > 0
        stop.request()
        assert len(list(scored)) < len(windows.token_ids) - 1


def test_a_text_that_fills_no_window_is_refused() -> None:
    """With the number of its tokens."""
    with Model.load(demo_model_path(), vocab_only=True) as model:
        windows = windows_of(model.tokenizer, TEXT, 64, None)
        assert {len(window) for window in windows.token_ids} == {64}
        with pytest.raises(InvalidParams, match="fewer than a window"):
            windows_of(model.tokenizer, "Once upon a time", 64, None)


def test_a_stride_is_less_than_a_window(tmp_path: Path) -> None:
    """Else tokens between windows would be left out."""
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    done = CliRunner().invoke(build_app(), ["perplexity", str(file), "-c", "64", "--stride", "64"])
    assert done.exit_code == 2
    assert "--stride must be less than --window (64), not 64" in done.stderr


def test_text_of_stdin_has_the_same_figures_in_one_line() -> None:
    """Without --json they are a sentence. One window at a time, so that every pass has the same tokens in both runs."""
    (line,) = invoked("-q", "-c", "64", "-np", "1", text=TEXT).stdout.splitlines()
    found = json.loads(invoked("-q", "-c", "64", "-np", "1", "--json", "-", text=TEXT).stdout)
    assert line.startswith(f"perplexity {found['perplexity']:.4f} ± {found['perplexity_error']:.4f}, ")
    assert line.endswith(f"({found['scored_tokens']} tokens of {found['scored_bytes']} bytes)")


def test_ctrl_c_prints_the_figures_of_the_windows_that_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a text. Bytes are those of these windows."""
    stopped, windows, requested = threading.Event(), list[int](), StopSignal.request

    @contextmanager
    def bar(total: int, show: object) -> Iterator[Callable[[], object]]:
        def advance() -> None:
            windows.append(total)
            if len(windows) == 2:
                os.kill(os.getpid(), signal.SIGINT)
                assert stopped.wait(60)

        yield advance

    def request(stop: StopSignal) -> None:
        requested(stop)
        stopped.set()

    monkeypatch.setattr("paceline.engine.results.progress_bar", bar)
    monkeypatch.setattr(StopSignal, "request", request)
    done = CliRunner().invoke(build_app(), ["perplexity", "--json", "-c", "64", "-np", "1"], input=TEXT * 8)
    found = json.loads(done.stdout)
    assert done.exit_code == 130 or isinstance(done.exception, KeyboardInterrupt)
    assert found["scored_tokens"] == len(windows) * 31
    assert 2 <= len(windows) < windows[0]
    with Model.load(demo_model_path(), vocab_only=True) as model:
        whole = windows_of(model.tokenizer, TEXT * 8, 64, None)
    assert found["scored_bytes"] == sum(whole.num_bytes[: len(windows)])
