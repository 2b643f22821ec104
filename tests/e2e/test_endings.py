"""How commands end: Ctrl-C, readers that go away, outputs that take nothing, and errors."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path

import pytest
from tests.e2e.commands import COMMAND, PROMPT, TIMEOUT_S, Terminal, endless, environment, paceline_, started

from paceline.testing.models import KINDS, write_model

pytestmark = pytest.mark.native


def test_ctrl_c_ends_with_its_output_so_far(long_model: Path) -> None:
    """The text so far is flushed, the numbers are printed, and the exit code is 130."""
    with started(*endless(long_model)) as process:
        assert process.stdout is not None
        begin = process.stdout.read(10)
        process.send_signal(signal.SIGINT)
        rest, numbers = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert (begin + rest).decode().endswith("\n")
    assert " | interrupted | " in numbers.decode() and "Traceback" not in numbers.decode()


def test_ctrl_c_ends_a_long_prompt_in_the_middle(long_model: Path) -> None:
    """Within a forward pass, too; the JSON object comes all the same and says that it was cancelled."""
    args = ("generate", "-", "-m", str(long_model), "-t", "1", "-c", "131072", "--json", "-v")
    with started(*args, stdin=b"The fox. " * 10000) as process:
        assert process.stderr is not None
        # The context is made: a minute of work follows.
        assert any(b"compute buffer size" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=TIMEOUT_S)
    result = json.loads(text)
    assert process.returncode == 130
    assert (result["finish_reason"], result["usage"]["completion_tokens"]) == ("cancelled", 0)


def test_a_reader_that_goes_away_ends_it_quietly(long_model: Path) -> None:
    """As with other tools in a pipe: no message, and the code that the signal would give."""
    with started(*endless(long_model)) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(TIMEOUT_S) == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_an_output_that_takes_nothing_is_one_line() -> None:
    """A full disk exits with 1 and no traceback."""
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*COMMAND, "tokenize", "a"],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
            timeout=TIMEOUT_S,
            env=environment(),
        )
    assert (done.returncode, done.stderr) == (1, b"Error: cannot write to stdout: No space left on device\n")


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["generate", "x", "-m", "/no/such.gguf"], 1, "/no/such.gguf: No such file or directory"),
        (["generate", "x", "-m", "/no/\udcff.gguf"], 2, "the model's path is not valid text"),
        (["generate", "x", "-m", __file__], 1, "not a GGUF file"),
        (["generate", "many words " * 2000], 1, "tokens, and the context 1024; shorten it, or take a model that"),
        (["generate", ""], 2, "PROMPT is empty"),
        (["generate", "x", "--device", "abacus"], 2, "no device 'abacus'"),
        (["generate", "-"], 2, "stdin is not UTF-8"),
        (["tokenize", "--decode", "4096"], 2, "the vocabulary has 4096 tokens"),
        (["embed", "a", ""], 2, "texts[1] has no tokens"),
        (["embed", "a", "--npy", "/no/such/file.npy"], 1, "/no/such/file.npy: No such file or directory"),
        (["info", "/no/such.gguf"], 1, "/no/such.gguf: No such file or directory"),
    ],
)
def test_what_goes_wrong_is_one_line_and_a_code(args: list[str], code: int, message: str) -> None:
    """1 for failures, 2 for wrong usage; nothing on stdout."""
    done = paceline_(*args, stdin=b"\xff" if "-" in args else b"")
    error = done.stderr.decode()
    assert (done.returncode, done.stdout) == (code, b"")
    assert error.startswith("Error: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize(("flag", "names"), [("-c", "'--ctx-size' / '-c'"), ("-t", "'--threads' / '-t'")])
def test_a_value_out_of_range_names_its_flag(flag: str, names: str) -> None:
    """Behind the line on usage, as all wrong options."""
    done = paceline_("generate", "x", flag, "0")
    error = done.stderr.decode()
    assert (done.returncode, done.stdout) == (2, b"")
    assert error.startswith("Usage: ")
    assert f"Error: Invalid value for {names}: " in error
    assert "1" in error.rpartition(": ")[2]


def test_ctrl_c_on_a_terminal_keeps_text_and_numbers_apart(long_model: Path) -> None:
    """The numbers begin on a line of their own and the code is 130."""
    screen = Terminal(*endless(long_model), COLUMNS="200")
    screen.read_until(PROMPT.encode())
    screen.interrupt()
    assert screen.finish() == 130
    assert re.fullmatch(r"\d+ tokens?.* \| interrupted \| seed \d+", screen.plain_text.splitlines()[-1])


def test_a_model_that_an_engine_cannot_share_is_refused(tmp_path: Path) -> None:
    """An encoder-decoder model is reported as unsupported, with the remaining way."""
    done = paceline_("generate", "x", "-m", str(write_model(tmp_path / "t5.gguf", KINDS["t5"])))
    error = done.stderr.decode()
    assert (done.returncode, done.stdout) == (1, b"")
    assert error.startswith("Error: an encoder-decoder model ") and "Context.generate" in error
