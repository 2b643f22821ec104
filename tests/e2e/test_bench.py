"""`paceline bench` in processes of its own, on the demo model."""

from __future__ import annotations

import csv
import json
import signal
import statistics
from typing import Any

import pytest
from tests.e2e.commands import TIMEOUT_S, output, paceline_, started

from paceline import demo_model_path

pytestmark = pytest.mark.native

SHORT = ("bench", "-t", "1", "-p", "16", "-n", "4", "-np", "1,2", "-r", "3")
TESTS = [(16, 0, 1), (0, 4, 1), (16, 0, 2), (0, 4, 2)]  # prompt, generated, streams


def check(row: dict[str, Any]) -> None:
    """The figures of a row agree with its samples."""
    num_tokens = (row["n_prompt"] + row["n_gen"]) * row["n_streams"]
    assert len(row["samples_ns"]) == len(row["samples_ts"]) == 3
    for taken_ns, speed in zip(row["samples_ns"], row["samples_ts"], strict=True):
        assert speed == pytest.approx(num_tokens * 1e9 / taken_ns)
    assert row["avg_ts"] == pytest.approx(statistics.fmean(row["samples_ts"]))
    assert row["stddev_ts"] == pytest.approx(statistics.stdev(row["samples_ts"]))
    assert row["avg_ns"] == pytest.approx(statistics.fmean(row["samples_ns"]), abs=1)


def test_json_has_llama_benchs_names() -> None:
    """Each test with the model, the build and samples; jsonl has the same, an object a line."""
    rows = json.loads(output(*SHORT, "-o", "json"))
    assert [(row["n_prompt"], row["n_gen"], row["n_streams"]) for row in rows] == TESTS
    size = demo_model_path().stat().st_size
    for row in rows:
        check(row)
        assert row["model_filename"] == str(demo_model_path()) and 0.9 * size < row["model_size"] < size
        assert (row["n_threads"], row["n_gpu_layers"], row["model_n_params"]) == (1, -1, 3877632)
    lines = [json.loads(line) for line in output(*SHORT, "-o", "jsonl").splitlines()]
    assert [line.keys() for line in lines] == [row.keys() for row in rows]


def test_csv_has_a_line_of_names() -> None:
    """Without samples, as llama-bench."""
    rows = list(csv.DictReader(output(*SHORT, "-o", "csv").splitlines()))
    assert [(int(row["n_prompt"]), int(row["n_gen"]), int(row["n_streams"])) for row in rows] == TESTS
    assert all(float(row["avg_ts"]) > 0 for row in rows) and "samples_ns" not in rows[0]


def test_the_table_has_llama_benchs_columns() -> None:
    """And the number of streams."""
    heading, rule, *rows, empty, build = output(*SHORT).splitlines()
    names = ["model", "size", "params", "backend", "threads", "streams", "test", "t/s"]
    assert [cell.strip() for cell in heading.split("|")[1:-1]] == names
    assert {len(heading), len(rule)} == {len(row) for row in rows} and build.startswith("build: ") and empty == ""
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    assert [(row[6], row[5]) for row in cells] == [("pp16", "1"), ("tg4", "1"), ("pp16", "2"), ("tg4", "2")]
    assert all(" ± " in row[7] for row in cells)


def test_zero_leaves_a_test_out_and_lists_add_tests() -> None:
    """As in llama-bench."""
    rows = json.loads(output("bench", "-t", "1", "-p", "8,16", "-n", "0", "-np", "1", "-r", "1", "-o", "json"))
    assert [(row["n_prompt"], row["stddev_ts"]) for row in rows] == [(8, 0.0), (16, 0.0)]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("-p", "0", "-n", "0"), "nothing to measure"),
        (("-p", "many"), "-p must be numbers from 0 to"),
        (("-np", "0"), "-np must be numbers from 1 to 250"),
        (("-p", "2000"), "give -p a smaller number"),
        (("-n", "2000", "-p", "0"), "give -n a smaller number"),
        (("-r", "0"), "--repetitions"),
    ],
)
def test_wrong_numbers_are_refused(args: tuple[str, ...], words: str) -> None:
    """Before anything is written."""
    done = paceline_("bench", *args)
    assert (done.returncode, done.stdout) == (2, b"")
    assert words in done.stderr.decode()


def test_ctrl_c_keeps_the_tests_that_are_complete() -> None:
    """The exit code is 130."""
    with started("bench", "-t", "1", "-p", "8", "-n", "900", "-np", "1,64", "-r", "3", "-o", "jsonl") as process:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        second = json.loads(process.stdout.readline())
        assert (first["n_prompt"], second["n_gen"]) == (8, 900)
        json.loads(process.stdout.readline())  # the prompts of 64 streams; their generation takes long
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=TIMEOUT_S)
        assert (process.returncode, rest, errors) == (130, b"", b"")  # the last test has no line
