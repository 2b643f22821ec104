"""The command line as a user meets it: processes, pipes, terminals and Ctrl-C, on the demo model."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline
from paceline.demo import demo_model_path
from paceline.testing.models import KINDS, write_model

pytestmark = pytest.mark.native

PROMPT = "Once upon a time"
ENDLESS = ("generate", PROMPT, "-t", "1", "-n", "30000", "-c", "32768", "--ignore-eos")
COMMAND = (sys.executable, "-m", "paceline")
TIMEOUT_S = 60
ESCAPE = "\x1b"


def environment(**changes: str) -> dict[str, str]:
    unset = {"NO_COLOR", "FORCE_COLOR", "COLORTERM", "PYTHONIOENCODING"}
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    return kept | {"TERM": "xterm-256color", "COLUMNS": "80"} | changes


def paceline_(*args: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Runs a command with pipes on all sides."""
    return subprocess.run(
        [*COMMAND, *args], input=stdin, capture_output=True, check=False, timeout=TIMEOUT_S, env=environment()
    )


@contextmanager
def started(*args: str, stdin: bytes = b"") -> Iterator[subprocess.Popen[bytes]]:
    """A command that runs inside of the block, its output in pipes; it is gone afterwards, whatever happens."""
    command = [*COMMAND, *args]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment()) as process:
        try:
            assert process.stdin is not None
            process.stdin.write(stdin)
            process.stdin.close()
            process.stdin = None  # communicate() would write to it
            yield process
        finally:
            process.kill()


def output(*args: str, stdin: bytes = b"") -> str:
    """What a command that succeeds writes to stdout."""
    done = paceline_(*args, stdin=stdin)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def generate(*args: str) -> dict[str, Any]:
    """The JSON object of a generation."""
    return json.loads(output("generate", PROMPT, "-t", "1", "--json", *args))


class Terminal:
    """A command that believes to be on a terminal."""

    def __init__(self, *args: str, **env: str) -> None:
        self.seen = b""
        self._keyboard, screen = pty.openpty()
        self._process = subprocess.Popen(
            [*COMMAND, *args],
            stdin=screen,
            stdout=screen,
            stderr=screen,
            env=environment(**env),
            start_new_session=True,
        )
        os.close(screen)

    def read_until(self, text: bytes) -> None:
        """Waits for a text to show up."""
        while text not in self.seen:
            assert self._read(), f"ended without {text!r}: {self.seen!r}"

    def interrupt(self) -> None:
        """As Ctrl-C does."""
        self._process.send_signal(signal.SIGINT)

    def finish(self) -> int:
        """Reads to the end; the exit code."""
        while self._read():
            pass
        os.close(self._keyboard)
        return self._process.wait(TIMEOUT_S)

    def _read(self) -> bool:
        try:
            data = os.read(self._keyboard, 65536)
        except OSError:  # what Linux answers when the last one has left the terminal
            return False
        self.seen += data
        return bool(data)

    @property
    def text(self) -> str:
        """What was written, escapes included."""
        return self.seen.decode().replace("\r\n", "\n")

    @property
    def plain_text(self) -> str:
        """Without the escapes."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.text)


# ---- generate


def test_generate_writes_the_text_to_stdout_and_numbers_to_stderr() -> None:
    """A pipe gets the new text alone, ended by a line break, and not a single escape."""
    done = paceline_("generate", PROMPT, "-t", "1", "-n", "20", "--seed", "1")
    text, numbers = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == 0
    assert text.endswith("\n") and len(text) > 20 and PROMPT not in text
    assert re.fullmatch(
        r"20 tokens, [\d.]+ tok/s \| prompt \d+ tokens, [\d.]+ tok/s \| load [\d.]+ s \| cut at the limit \| seed 1\n",
        numbers,
    )
    assert ESCAPE not in text + numbers


def test_generate_streams() -> None:
    """Text arrives while the rest is still to come."""
    with started(*ENDLESS) as process:
        assert process.stdout is not None and len(process.stdout.read(10)) == 10
        assert process.poll() is None


def test_the_same_seed_gives_the_same_text_and_another_seed_another() -> None:
    """A seed that the statistics told repeats the run."""
    first = generate("-n", "30")
    assert first["seed"] < 2**32
    assert generate("-n", "30", "--seed", str(first["seed"]))["token_ids"] == first["token_ids"]
    assert generate("-n", "30", "--seed", str(first["seed"] ^ 1))["token_ids"] != first["token_ids"]


def test_json_is_one_object_with_everything() -> None:
    """Ids and text agree, and the counts are those of the ids."""
    answer = generate("-n", "12", "--temperature", "0", "--ignore-eos")
    model = paceline.Model.load(demo_model_path(), vocab_only=True)
    assert set(answer) == {"text", "token_ids", "finish_reason", "stop", "seed", "usage"}
    assert (answer["finish_reason"], answer["stop"], answer["usage"]["completion_tokens"]) == ("length", None, 12)
    assert answer["text"] == model.tokenizer.decode(answer["token_ids"])
    assert answer["usage"]["prompt_tokens"] == len(model.tokenizer.encode(PROMPT))
    assert all(answer["usage"][name] > 0 for name in ("load_s", "prefill_s", "decode_s", "tokens_per_s"))


def test_greedy_text_is_that_of_the_library() -> None:
    """The command adds nothing to and takes nothing from `Context.generate`."""
    model = paceline.Model.load(demo_model_path())
    sampler = paceline.Sampler(paceline.SamplingParams(temperature=0), model)
    with paceline.Context(model, n_threads=1) as context:
        expected = list(context.generate(sampler, model.tokenizer.encode(PROMPT), 40))
    assert generate("-n", "40", "--temperature", "0")["token_ids"] == expected


def test_a_stop_string_ends_the_text_before_it() -> None:
    """Whatever the tokens are, the text is cut at the first character of the first stop."""
    whole = generate("-n", "40", "--temperature", "0")["text"]
    first, second = whole[20:25], whole[30:33]
    cut = generate("-n", "40", "--temperature", "0", "--stop", second, "--stop", first)
    position, found = min((whole.find(stop), stop) for stop in (first, second))
    assert (cut["text"], cut["finish_reason"], cut["stop"]) == (whole[:position], "stop", found)


def test_an_answer_that_fills_the_context_is_cut() -> None:
    """-n -1 goes on until no cell is left."""
    answer = generate("-n", "-1", "-c", "256", "--ignore-eos")
    assert answer["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"] == 256 + 1


def test_a_grammar_decides_what_may_come(tmp_path: Path) -> None:
    """The answer is a sentence of the grammar, and ends where it does."""
    (tmp_path / "grammar.gbnf").write_text('root ::= " yes" | " no"\n')
    answer = generate("--grammar-file", str(tmp_path / "grammar.gbnf"))
    assert answer["text"] in {" yes", " no"} and answer["finish_reason"] == "end"


def test_the_prompt_comes_from_stdin_for_a_dash() -> None:
    """As if it had been an argument; the line break that `echo` adds is not part of it."""
    args = ("-t", "1", "-n", "10", "--temperature", "0", "-q")
    assert output("generate", "-", *args, stdin=PROMPT.encode() + b"\n") == output("generate", PROMPT, *args)


def test_echo_shows_the_prompt_first() -> None:
    """Also where no terminal is, when it is asked for."""
    assert output("generate", PROMPT, "-t", "1", "-n", "3", "--echo").startswith(PROMPT)


def test_control_tokens_are_read_only_when_asked_for() -> None:
    """--parse-special makes one token of the name of one, which is text otherwise."""
    args = ("-n", "0", "--json", "-t", "1", "-q")
    text = json.loads(output("generate", "<|im_end|>", *args))
    token = json.loads(output("generate", "<|im_end|>", *args, "--parse-special"))
    assert token["usage"]["prompt_tokens"] == 1 < text["usage"]["prompt_tokens"]


def test_control_tokens_are_shown_only_when_asked_for(tmp_path: Path) -> None:
    """--special gives control tokens that were generated their names; without it they have no text."""
    path = write_model(tmp_path / "tiny.gguf", KINDS["llama"])
    tokenizer = paceline.Model.load(path, vocab_only=True).tokenizer
    args = (
        "-m",
        str(path),
        "-n",
        "200",
        "--temperature",
        "5",
        "--top-p",
        "1",
        "--top-k",
        "0",
        "--min-p",
        "0",
        "-s",
        "1",
    )
    hidden, shown = generate(*args, "--ignore-eos"), generate(*args, "--ignore-eos", "--special")
    assert any(tokenizer.is_control(token) for token in shown["token_ids"])
    assert hidden["token_ids"] == shown["token_ids"]
    assert hidden["text"] == tokenizer.decode(hidden["token_ids"])
    assert shown["text"] == tokenizer.decode(shown["token_ids"], special=True) != hidden["text"]


def test_quiet_leaves_stderr_empty() -> None:
    """--quiet has neither a bar nor numbers."""
    assert paceline_("generate", PROMPT, "-t", "1", "-n", "3", "-q").stderr == b""


# ---- how it ends


def test_ctrl_c_ends_with_what_there_is() -> None:
    """The text so far is flushed, the numbers are told, and the exit code is 130."""
    with started(*ENDLESS) as process:
        assert process.stdout is not None
        begin = process.stdout.read(10)
        process.send_signal(signal.SIGINT)
        rest, numbers = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert (begin + rest).decode().endswith("\n")
    assert " | interrupted | " in numbers.decode() and "Traceback" not in numbers.decode()


def test_ctrl_c_ends_a_long_prompt_in_the_middle() -> None:
    """Within a forward pass, too; the JSON object comes all the same and says that it was cancelled."""
    with started("generate", "-", "-t", "1", "-c", "32768", "--json", "-v", stdin=b"The fox. " * 10000) as process:
        assert process.stderr is not None
        assert any(
            b"compute buffer size" in line for line in process.stderr
        )  # the context is made: seconds of work follow
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=TIMEOUT_S)
    answer = json.loads(text)
    assert process.returncode == 130
    assert (answer["finish_reason"], answer["usage"]["completion_tokens"]) == ("cancelled", 0)


def test_a_reader_that_goes_away_ends_it_quietly() -> None:
    """As with other tools in a pipe: no message, and the code that the signal would give."""
    with started(*ENDLESS) as process:
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
        (["generate", "x", "-m", "/no/\udcff.gguf"], 2, "the model's path is no valid text"),
        (["generate", "x", "-m", __file__], 1, "is no GGUF model"),
        (["generate", "many words " * 2000], 1, "the context has 1024"),
        (["generate", ""], 2, "PROMPT is empty"),
        (["generate", "x", "-c", "0"], 2, "n_ctx must be an integer >= 1"),
        (["generate", "x", "-t", "0"], 2, "n_threads must be an integer >= 1"),
        (["generate", "x", "--device", "abacus"], 2, "no device 'abacus'"),
        (["generate", "-"], 2, "stdin is not UTF-8"),
        (["tokenize", "--decode", "4096"], 2, "the vocabulary has 4096 tokens"),
        (["embed", "a", ""], 2, "texts[1] has no tokens"),
        (["embed", "a", "--npy", "/no/such/file.npy"], 1, "/no/such/file.npy: No such file or directory"),
        (["info", "/no/such.gguf"], 1, "/no/such.gguf: No such file or directory"),
    ],
)
def test_what_goes_wrong_is_one_line_and_a_code(args: list[str], code: int, message: str) -> None:
    """1 where it failed, 2 where it was asked for wrongly; nothing on stdout."""
    done = paceline_(*args, stdin=b"\xff")
    error = done.stderr.decode()
    assert (done.returncode, done.stdout) == (code, b"")
    assert error.startswith("Error: ") and message in error and error.count("\n") == 1


# ---- tokenize, embed, info


def test_tokens_go_back_to_the_text() -> None:
    """Ids through a pipe give the text again, also where a character takes several tokens."""
    text = "The fox 🦊 says: «ça va?»\n\tDone."
    ids = output("tokenize", text, "--ids")
    assert output("tokenize", "--decode", "-", stdin=ids.encode()) == text + "\n"
    assert output("tokenize", "-", "--count", stdin=text.encode()) == f"{len(ids.split())}\n"
    assert [line.split()[0] for line in output("tokenize", text).splitlines()] == ids.split()


def test_token_json_has_the_bytes() -> None:
    """The bytes of all tokens are the text's."""
    answer = json.loads(output("tokenize", "é🦊", "--json"))
    assert bytes(byte for token in answer["tokens"] for byte in token["bytes"]) == "é🦊".encode()
    assert answer["ids"] == [token["id"] for token in answer["tokens"]] and answer["count"] == len(answer["ids"])


def test_embed_writes_a_vector_a_line(tmp_path: Path) -> None:
    """JSON lines for pipes, and the same numbers in a NumPy file."""
    lines = [json.loads(line) for line in output("embed", "-", "three", "-t", "1", stdin=b"one\ntwo\n").splitlines()]
    assert [(line["index"], line["text"]) for line in lines] == [(0, "one"), (1, "two"), (2, "three")]
    output("embed", "one", "two", "three", "-t", "1", "--npy", str(tmp_path / "x"))
    array = np.load(tmp_path / "x")
    assert array.dtype == np.float32 and array.shape == (3, len(lines[0]["embedding"]))
    assert np.array_equal(array, np.array([line["embedding"] for line in lines], dtype=np.float32))
    assert np.linalg.norm(array, axis=1) == pytest.approx(1, abs=1e-5)


def test_embed_can_give_a_vector_a_token() -> None:
    """Pooling none has a list of vectors a text, as many as the text has tokens."""
    (line,) = output("embed", "one two", "-t", "1", "--pooling", "none", "--normalize", "none").splitlines()
    assert len(json.loads(line)["embedding"]) == int(output("tokenize", "one two", "--count"))


def test_info_tells_version_build_and_machine() -> None:
    """Everything that a bug report needs, for people and for programs."""
    facts = json.loads(output("info", "--json"))
    assert facts["version"] == paceline.__version__
    assert facts["build"]["backend"] in {"cpu", "cuda", "metal", "vulkan", "hip"} and facts["build"]["cache_dir"]
    assert "CPU" in {device["name"] for device in facts["devices"]} and facts["physical_cores"] >= 1
    text = output("info")
    for value in (
        facts["version"],
        facts["build"]["llama_cpp_commit"],
        facts["build"]["cache_dir"],
        str(demo_model_path()),
    ):
        assert value in text
    assert ESCAPE not in text


def test_info_of_a_model_agrees_with_the_loaded_model() -> None:
    """Without loading the weights it says what the model itself says."""
    facts = json.loads(output("info", str(demo_model_path()), "--json", "--metadata"))
    model = paceline.Model.load(demo_model_path())
    shape = facts["model"]
    for name in ("size_bytes", "n_params", "n_ctx_train", "n_layer", "n_embd", "n_head", "n_head_kv", "n_swa"):
        assert shape[name] == getattr(model, name), name
    assert (shape["quantisation"], shape["memory_class"]) == (model.ftype, model.memory_class.value)
    assert facts["vocabulary"]["special_tokens"] == dict(model.tokenizer.special_tokens)
    assert set(facts["vocabulary"]["end_of_generation"]) == model.tokenizer.eog_ids
    assert facts["metadata"] == dict(model.metadata) and facts["chat_templates"] == sorted(model.chat_templates)
    assert "Q8_0" in output("info", str(demo_model_path()))


# ---- terminals


def test_a_terminal_sees_a_bar_then_prompt_and_text_and_numbers() -> None:
    """The bar goes away, the prompt comes before the text, and there are colours."""
    screen = Terminal("generate", PROMPT, "-t", "1", "-n", "5", "--seed", "1")
    assert screen.finish() == 0
    assert "Loading paceline-demo.gguf" in screen.text and "100%" in screen.text
    assert f"{ESCAPE}[2m{PROMPT}{ESCAPE}[0m" in screen.text
    lines = screen.plain_text.splitlines()
    assert any(line.startswith(PROMPT) and len(line) > len(PROMPT) for line in lines) and "5 tokens" in lines[-1]
    assert screen.text.rfind("[?25h") > screen.text.rfind("[?25l"), "the cursor is left hidden"


def test_a_dumb_terminal_sees_no_escapes() -> None:
    """The same text without bar and colours."""
    screen = Terminal("generate", PROMPT, "-t", "1", "-n", "5", TERM="dumb")
    assert screen.finish() == 0
    assert ESCAPE not in screen.text and screen.text.startswith(PROMPT) and "5 tokens" in screen.text


def test_ctrl_c_on_a_terminal_keeps_text_and_numbers_apart() -> None:
    """The numbers begin on a line of their own and the code is 130."""
    screen = Terminal(*ENDLESS)
    screen.read_until(PROMPT.encode())
    screen.interrupt()
    assert screen.finish() == 130
    assert re.fullmatch(r"\d+ tokens?.* \| interrupted \| seed \d+", screen.plain_text.splitlines()[-1])


def test_embed_shows_a_preview_on_a_terminal() -> None:
    """People see the shape and the first numbers, not all of them."""
    screen = Terminal("embed", "one", "-t", "1")
    assert screen.finish() == 0
    assert re.search(r"one\n  \d+ numbers, norm 1\.0000: [+-]0\.\d{4} .* \.\.\.\n", screen.plain_text)


def test_help_on_a_terminal_has_colours() -> None:
    """Headings group the options."""
    screen = Terminal("generate", "--help")
    assert screen.finish() == 0
    assert ESCAPE in screen.text and "How tokens are chosen" in screen.plain_text
