"""`paceline embed` as a user runs it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from tests.e2e.commands import Terminal, output

pytestmark = pytest.mark.native


def test_embed_writes_a_vector_a_line(tmp_path: Path) -> None:
    """JSON lines for pipes, and the same numbers in a NumPy file."""
    lines = [json.loads(line) for line in output("embed", "-", "three", "-t", "1", stdin=b"one\ntwo\n").splitlines()]
    assert [(line["index"], line["text"]) for line in lines] == [(0, "one"), (1, "two"), (2, "three")]
    assert output("embed", "-t", "1", stdin=b"one\ntwo\nthree\n") == "".join(f"{json.dumps(line)}\n" for line in lines)
    output("embed", "one", "two", "three", "-t", "1", "--npy", str(tmp_path / "x"))
    array = np.load(tmp_path / "x")
    assert array.dtype == np.float32 and array.shape == (3, len(lines[0]["embedding"]))
    assert np.array_equal(array, np.array([line["embedding"] for line in lines], dtype=np.float32))
    assert np.linalg.norm(array, axis=1) == pytest.approx(1, abs=1e-5)


def test_embed_shows_a_preview_on_a_terminal() -> None:
    """People see the shape and the first numbers, not all of them."""
    screen = Terminal("embed", "one", "-t", "1")
    assert screen.finish() == 0
    assert re.search(r"one\n  \d+ numbers, norm 1\.0000: [+-]0\.\d{4} .* \.\.\.\n", screen.plain_text)


def test_embed_can_give_a_vector_a_token() -> None:
    """Pooling none has a list of vectors a text, as many as the text has tokens."""
    (line,) = output("embed", "one two", "-t", "1", "--pooling", "none", "--normalize", "none").splitlines()
    assert len(json.loads(line)["embedding"]) == int(output("tokenize", "one two", "--count"))
