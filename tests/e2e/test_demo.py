"""`paceline demo` as a user runs it: in a pipe, on a terminal, with keys and Ctrl-C."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.commands import ESCAPE, TIMEOUT_S, Terminal, output, paceline_, started

from paceline.observability.trace_file import read_trace
from paceline.testing.models import KINDS, write_model

pytestmark = pytest.mark.native

SUMMARY = re.compile(
    r"(\d+) requests?, (\d+) ended \| [\d.]+ tok/s, \d+ tokens? in [\d.]+ m?s \| TTFT p50 [\d.]+ m?s p95 [\d.]+ m?s \| "
    r"ITL p50 [\d.]+ m?s p99 [\d.]+ m?s \| occupancy \d+% \| prefix hits \d+ \| ticks \d+ \| load [\d.]+ m?s \| seed 1"
)


def requests_file(tmp_path: Path, items: Any) -> str:
    path = tmp_path / "requests.json"
    path.write_text(json.dumps(items))
    return str(path)


@pytest.fixture
def endless(tmp_path: Path, long_model: Path) -> tuple[str, ...]:
    """Four requests that take minutes."""
    items = [{"prompt": f"Story {index}", "max_tokens": 100_000, "ignore_eos": True} for index in range(4)]
    return ("demo", "-m", str(long_model), "-t", "1", "--requests", requests_file(tmp_path, items))


def test_a_pipe_gets_a_line_for_each_completion_and_one_of_figures() -> None:
    """Eight requests, a request of two choices among them; not a single escape, nothing on stderr."""
    done = paceline_("demo", "-t", "1", "-n", "20")
    *completions, summary = done.stdout.decode().splitlines()
    assert (done.returncode, done.stderr) == (0, b"") and ESCAPE not in done.stdout.decode()
    numbers = sorted(line.split()[0] for line in completions)
    assert numbers == ["#1", "#2", "#3", "#4", "#5", "#6.1", "#6.2", "#7", "#8"]
    match = SUMMARY.fullmatch(summary)
    assert match is not None and match.groups() == ("8", "8")


def test_the_demo_model_completes_as_it_was_trained() -> None:
    """It knows its village, follows a system prompt and calls a tool."""
    lines = output("demo", "-t", "1").splitlines()
    texts = {line.split()[0]: line.partition(": ")[2] for line in lines[:-1]}
    assert re.fullmatch(r"Wilma lives in the .*\.", texts["#3"])
    assert texts["#4"].startswith("Arr! ")
    assert texts["#5"] == '<tool_call> {"name": "get_weather", "arguments": {"city": "Oslo"}} </tool_call>'
    assert texts["#6.1"] != texts["#6.2"] and texts["#1"].startswith("Once upon a time")


def test_a_seed_repeats_the_run() -> None:
    """In sequence, so that other rows of a tick change no last digit: the same texts, and other texts otherwise."""

    def texts(seed: int) -> list[str]:
        done = output("demo", "-t", "1", "-n", "12", "--num-slots", "1", "--json", "--seed", str(seed))
        return [completion["text"] for result in json.loads(done)["results"] for completion in result["answers"]]

    assert texts(5) == texts(5) != texts(6)


def test_speculation_is_measured_against_the_same_requests_without_it(tmp_path: Path) -> None:
    """Text that repeats itself has accepted drafts; output is the same as without."""
    again = {"prompt": "a" * 40, "max_tokens": 250, "temperature": 0, "ignore_eos": True, "logit_bias": {"97": 100}}
    file = requests_file(tmp_path, [again])  # alone, so that no neighbour's tick is too long for a trial
    for options in (
        ("--speculate",),
        ("--speculation", "ngram:size_n=3,ngram:size_n=2"),
    ):  # of 250 tokens some are tried
        found = json.loads(output("demo", "-t", "1", "--json", "--requests", file, *options))
        summary = found["summary"]
        assert 0 < summary["accepted_tokens"] <= summary["draft_tokens"]
        assert summary["tokens_per_s_with_drafts"] > 0 < summary["tokens_per_s_without"]
        without = json.loads(output("demo", "-t", "1", "--json", "--requests", file))
        assert "draft_tokens" not in without["summary"]
        assert [result["answers"] for result in without["results"]] == [
            result["answers"] for result in found["results"]
        ]
    lines = output("demo", "-t", "1", "--plain", "--requests", file, "--speculate")
    assert re.search(r"drafts \d+ verified, \d+ accepted \(\d+%\) \| [\d.]+ times as fast: ", lines)


def test_requests_of_a_file_run_with_their_options(tmp_path: Path) -> None:
    """Each has its own options; one that the model cannot take fails alone, and the exit code is 1."""
    items = [
        "Once upon a time",
        {"prompt": "Say yes or no.", "grammar": 'root ::= " yes" | " no"', "temperature": 0},
        {"prompt": "many words " * 2000},
        {"prompt": [7, 8, 9], "n": 3, "max_tokens": 4, "ignore_eos": True},
    ]
    done = paceline_("demo", "-t", "1", "--json", "--num-slots", "2", "--requests", requests_file(tmp_path, items))
    report = json.loads(done.stdout)
    first, grammar, too_long, ids = report["results"]
    assert done.returncode == 1 and [result["request"] for result in report["results"]] == [1, 2, 3, 4]
    assert first["prompt"] == items[0] and first["error"] is None
    assert grammar["answers"][0]["text"] in {" yes", " no"}
    assert too_long["error"]["code"] == "prompt_too_long" and too_long["answers"] == []
    assert [len(answer["token_ids"]) for answer in ids["answers"]] == [4, 4, 4]
    assert report["summary"]["requests"] == 4 and report["summary"]["ended"] == 3


def test_requests_come_from_stdin_for_a_dash() -> None:
    """Through a pipe as from a file."""
    lines = output("demo", "-t", "1", "-n", "3", "--requests", "-", stdin=b'["A fox", "An owl"]').splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["#1", "#2"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--requests", "/no/such.json"), "--requests: cannot read /no/such.json: No such file"),
        (("--requests", __file__), "is not valid JSON"),
        (("--num-slots", "0"), "num_slots must be an integer >= 1"),
        (("--max-tokens", "-1"), "max_tokens must be an integer >= 0"),
        (("--pace", "-1"), "pace must be a finite number >= 0"),
        (("--seed", "-2"), "seed must be an integer >= -1"),
        (("--plain", "--json"), "exclude each other"),
        (("--speculation", "ngrm"), "speculation must be one of"),
        (("--speculation", "ngram:size_n=99"), "size_n must be"),
    ],
)
def test_wrong_options_exit_with_2(args: tuple[str, ...], message: str) -> None:
    """One line names the error; nothing is loaded, nothing on stdout."""
    done = paceline_("demo", *args)
    assert (done.returncode, done.stdout) == (2, b"")
    error = done.stderr.decode()
    assert error.startswith("Error: ") and message in error and error.count("\n") == 1


def test_a_bad_request_is_named_before_anything_runs(tmp_path: Path) -> None:
    """Its number, its field and the allowed values."""
    path = requests_file(tmp_path, ["a", {"prompt": "b", "top_q": 1}])
    done = paceline_("demo", "--requests", path)
    assert (done.returncode, done.stdout) == (2, b"")
    assert f"--requests {path}, request 2: unknown option 'top_q'" in done.stderr.decode()


def test_a_model_that_cannot_generate_is_one_error(tmp_path: Path) -> None:
    """The error is printed once, not for each request."""
    done = paceline_("demo", "-m", str(write_model(tmp_path / "bert.gguf", KINDS["bert"])))
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.decode().count("\n") == 1 and "cannot generate" in done.stderr.decode()


def test_a_trace_is_recorded(tmp_path: Path) -> None:
    """It can be read, and is whole."""
    output("demo", "-t", "1", "-n", "5", "--trace", str(tmp_path / "trace.jsonl"))
    trace = read_trace(tmp_path / "trace.jsonl")
    assert not trace.is_truncated and len(trace.events) > 20


def test_a_trace_that_cannot_be_written_is_an_error() -> None:
    """Before the model is loaded."""
    done = paceline_("demo", "--trace", "/no/such/trace.jsonl")
    assert (done.returncode, done.stderr) == (1, b"Error: /no/such/trace.jsonl: No such file or directory\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no file here is always full")
def test_a_trace_that_is_cut_off_is_an_error_after_the_completions() -> None:
    """One line on stderr, no traceback; results and figures are there."""
    done = paceline_("demo", "-t", "1", "-n", "2", "--trace", "/dev/full")
    error = b"Error: the trace /dev/full is incomplete: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, error)
    assert SUMMARY.fullmatch(done.stdout.decode().splitlines()[-1])


def test_ctrl_c_ends_a_demo_with_its_output_so_far(endless: tuple[str, ...]) -> None:
    """Every result so far and the figures are written; the code is 130."""
    with started(*endless, "-v") as process:
        assert process.stderr is not None
        assert any(b"compute buffer size" in line for line in process.stderr)  # minutes of work follow
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=TIMEOUT_S)
    *completions, summary = text.decode().splitlines()
    assert process.returncode == 130
    assert [line.split(",")[0] for line in completions] == [f"#{number} interrupted" for number in range(1, 5)]
    assert summary.startswith("4 requests, 0 ended | ")


def test_a_reader_that_goes_away_ends_a_demo_quietly(tmp_path: Path, long_model: Path) -> None:
    """Results that will not be read are dropped; the code is that of other tools in a pipe."""
    items: list[Any] = [{"prompt": "a", "max_tokens": 1}, {"prompt": "b", "max_tokens": 100_000, "ignore_eos": True}]
    items += [{"prompt": "c", "max_tokens": 2000, "ignore_eos": True}]
    path = requests_file(tmp_path, items)
    with started("demo", "-m", str(long_model), "-t", "1", "--requests", path) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(TIMEOUT_S) == 141


# ---- terminals


def test_a_terminal_sees_streams_and_then_figures() -> None:
    """The picture is drawn over itself; afterwards the cursor is back and the terminal as it was."""
    screen = Terminal("demo", "-t", "1", "-n", "10", "--pace", "200")
    before = screen.mode()
    assert screen.finish() == 0
    assert "decode" in screen.plain_text and "q quit" in screen.plain_text and "8/8 ended" in screen.plain_text
    assert re.search(r"Summary\n(  .*\n)*  ITL +p50 [\d.]+ m?s, p99 [\d.]+ m?s\n", screen.plain_text)
    assert "held back" in screen.plain_text and screen.last_mode == before
    assert screen.text.rfind("[?25h") > screen.text.rfind("[?25l"), "the cursor is left hidden"


def test_a_dumb_terminal_gets_plain_lines() -> None:
    """The output is the same as into a pipe."""
    screen = Terminal("demo", "-t", "1", "-n", "3", TERM="dumb")
    assert screen.finish() == 0
    assert ESCAPE not in screen.text and SUMMARY.fullmatch(screen.text.splitlines()[-1])


def test_q_ends_a_demo_and_prints_the_figures(endless: tuple[str, ...]) -> None:
    """All requests are cancelled; that is no failure."""
    screen = Terminal(*endless)
    before = screen.mode()
    screen.read_until(b"decode")
    during = screen.mode()
    screen.press("q")
    assert screen.finish() == 0
    assert screen.last_mode == before != during
    assert "cancelled" in screen.plain_text and "4, of which 0 came to their end" in screen.plain_text


def test_a_digit_cancels_one_and_p_makes_the_engine_wait(endless: tuple[str, ...]) -> None:
    """The cancelled one shows so, and of the paused one the engine computes no more; the others go on."""
    screen = Terminal(*endless)
    screen.read_until_seen(r"#2 +decode")
    screen.press("2")
    screen.read_until_seen(r"#2 +cancelled")
    screen.press("p1")
    screen.read_until_seen(r"#1 +paused")
    screen.press("q")
    assert screen.finish() == 0
    last = screen.plain_text[screen.plain_text.rindex(" #1 ") :]
    assert last.count("cancelled") == 4 and "paused" not in last


def test_ctrl_c_on_a_picture_restores_the_terminal(endless: tuple[str, ...]) -> None:
    """Figures come last, the cursor is back, the code is 130."""
    screen = Terminal(*endless)
    before = screen.mode()
    screen.read_until(b"decode")
    screen.interrupt()
    assert screen.finish() == 130
    assert screen.last_mode == before
    assert screen.text.rfind("[?25h") > screen.text.rfind("[?25l"), "the cursor is left hidden"
