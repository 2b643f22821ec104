"""`paceline generate` as a user runs it, on the demo model: options, output and numbers."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from pathlib import Path

import pytest
from tests.e2e.commands import (
    COMMAND,
    ESCAPE,
    PROMPT,
    TIMEOUT_S,
    Terminal,
    endless,
    generate,
    output,
    paceline_,
    started,
)
from tests.sweeps import sampled

import paceline
from paceline.demo import demo_model_path
from paceline.testing.models import KINDS, LlamaSpec, write_lora, write_model

pytestmark = pytest.mark.native

ANSWERS_X = ("generate", "A", "-t", "1", "-n", "1", "-q", "--echo", "--regex", "x")


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


def test_generate_streams(long_model: Path) -> None:
    """Text arrives while the rest is still to come."""
    with started(*endless(long_model)) as process:
        assert process.stdout is not None and process.stdout.read(10) != b""
        assert process.poll() is None


def test_the_same_seed_gives_the_same_text_and_another_seed_another() -> None:
    """The seed of the statistics repeats the run."""
    first = generate("-n", "30")
    assert first["seed"] < 2**32
    assert generate("-n", "30", "--seed", str(first["seed"]))["token_ids"] == first["token_ids"]
    assert generate("-n", "30", "--seed", str(first["seed"] ^ 1))["token_ids"] != first["token_ids"]


def test_json_is_one_object_with_everything() -> None:
    """Ids and text agree, and the counts match the ids."""
    result = generate("-n", "12", "--temperature", "0", "--ignore-eos")
    model = paceline.Model.load(demo_model_path(), vocab_only=True)
    assert set(result) == {"text", "token_ids", "finish_reason", "stop", "seed", "usage"}
    assert (result["finish_reason"], result["stop"], result["usage"]["completion_tokens"]) == ("length", None, 12)
    assert result["text"] == model.tokenizer.decode(result["token_ids"])
    assert result["usage"]["prompt_tokens"] == len(model.tokenizer.encode(PROMPT))
    assert all(result["usage"][name] > 0 for name in ("load_s", "prefill_s", "decode_s", "tokens_per_s"))


def test_greedy_text_is_that_of_the_library() -> None:
    """The command adds nothing to and takes nothing from `Context.generate`."""
    model = paceline.Model.load(demo_model_path())
    sampler = paceline.Sampler(paceline.SamplingParams(temperature=0), model)
    with paceline.Context(model, n_threads=1) as context:
        expected = list(context.generate(sampler, model.tokenizer.encode(PROMPT), 40))
    assert generate("-n", "40", "--temperature", "0")["token_ids"] == expected


def test_adapters_apply_with_their_scales(tmp_path: Path) -> None:
    """--lora FILE=SCALE, to the text and to a chat, as in the library."""
    model, adapter = write_model(tmp_path / "tiny.gguf", LlamaSpec()), write_lora(tmp_path / "style.gguf", LlamaSpec())
    with paceline.LLM(model, n_ctx=512, lora={"style": adapter}, n_threads=1) as llm:
        expected = llm.generate(PROMPT, max_tokens=20, temperature=0, ignore_eos=True, lora={"style": 3.0}).token_ids
    args = ("-m", str(model), "-n", "20", "--temp", "0", "--ignore-eos")
    assert generate(*args, "--lora", f"{adapter}=3")["token_ids"] == list(expected)
    assert generate(*args)["token_ids"] != list(expected)
    done = paceline_("generate", PROMPT, *args, "--lora", str(tmp_path / "none.gguf"))
    assert done.returncode == 1 and b"none.gguf" in done.stderr and done.stderr.count(b"\n") == 1


def test_a_stop_string_ends_the_text_before_it() -> None:
    """Whatever the tokens are, the text is cut at the first character of the first stop."""
    whole = generate("-n", "40", "--temperature", "0")["text"]
    first, second = whole[20:25], whole[30:33]
    cut = generate("-n", "40", "--temperature", "0", "--stop", second, "--stop", first)
    position, found = min((whole.find(stop), stop) for stop in (first, second))
    assert (cut["text"], cut["finish_reason"], cut["stop"]) == (whole[:position], "stop", found)


def test_a_completion_that_fills_the_context_is_cut() -> None:
    """-n -1 goes on until no cell is left."""
    result = generate("-n", "-1", "-c", "256", "--ignore-eos")
    assert result["finish_reason"] == "length"
    assert result["usage"]["prompt_tokens"] + result["usage"]["completion_tokens"] == 256 + 1


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        (("--choice", "yes", "--choice", "no"), {"yes", "no"}),
        (("--regex", "[a]{3}"), {"aaa"}),
        (("--lark", 'start: "b" "c"'), {"bc"}),
        (("--grammar", 'root ::= "d"'), {"d"}),
        (("--json-schema", '{"enum": [1, 2]}'), {"1", "2"}),
    ],
)
def test_constraints_decide_the_allowed_tokens(options: tuple[str, ...], texts: set[str]) -> None:
    """Each of them ends the text as well."""
    result = generate(*options, "--ignore-eos")
    assert result["text"] in texts
    assert result["finish_reason"] == "stop"


def test_a_grammar_decides_the_allowed_tokens(tmp_path: Path) -> None:
    """The text is a sentence of the grammar, and ends with it."""
    (tmp_path / "grammar.gbnf").write_text('root ::= " yes" | " no"\n')
    result = generate("--grammar-file", str(tmp_path / "grammar.gbnf"))
    assert result["text"] in {" yes", " no"} and result["finish_reason"] == "stop"


def test_the_prompt_comes_from_stdin_for_a_dash() -> None:
    """As if it had been an argument; the line break that `echo` adds is not part of it."""
    args = ("-t", "1", "-n", "10", "--temperature", "0", "-q")
    assert output("generate", "-", *args, stdin=PROMPT.encode() + b"\n") == output("generate", PROMPT, *args)


def test_a_pipe_is_the_prompt_or_follows_it(tmp_path: Path) -> None:
    """PROMPT or --prompt, the text of --file and the text of stdin, with a blank line between them."""
    (tmp_path / "file.txt").write_text("of a file\n")

    def prompt(*args: str, stdin: bytes = b"") -> str:
        shown = output("generate", "-t", "1", "-n", "1", "-q", "--echo", "--regex", "\\|", *args, stdin=stdin)
        return shown.removesuffix("|\n")

    file = str(tmp_path / "file.txt")
    assert prompt(stdin=b"A fox\n") == "A fox"
    assert prompt("A", stdin=b"fox\nruns\n") == "A\n\nfox\nruns"
    assert prompt("-p", "A", "-f", file, stdin=b"fox\n") == "A\n\nof a file\n\nfox"
    assert prompt("--file", file) == "of a file"
    assert prompt("A", "-f", "-", stdin=b"fox") == "A\n\nfox"
    assert prompt("A", stdin=b"\n") == prompt("A") == "A"


def test_a_prompt_that_is_missing_or_given_twice_is_wrong_usage(tmp_path: Path) -> None:
    """An empty pipe and the null device are no prompt."""
    for args, words in (
        ((), b"PROMPT is missing"),
        (("-n", "1"), b"PROMPT is missing"),
        (("A", "-p", "B"), b"PROMPT and --prompt exclude each other"),
        (("-f", str(tmp_path / "none")), b"--file: cannot read"),
    ):
        done = paceline_("generate", *args)
        assert (done.returncode, done.stdout) == (2, b"") and words in done.stderr
    nothing = subprocess.DEVNULL
    done = subprocess.run([*COMMAND, "generate"], stdin=nothing, capture_output=True, check=False, timeout=TIMEOUT_S)
    assert done.returncode == 2 and b"PROMPT is missing" in done.stderr


@pytest.mark.parametrize("kind", ["null", "closed", "empty", "file", "socket"])
def test_a_stdin_that_was_inherited_does_not_block(kind: str, tmp_path: Path) -> None:
    """As cron, systemd, `docker run` without -i, `ssh -n`, and programs that leave a socket open start a command."""
    ours, theirs = socket.socketpair()
    (tmp_path / "empty").touch()
    with ours, theirs, (tmp_path / "empty").open() as file:
        stdin = {"null": subprocess.DEVNULL, "empty": subprocess.PIPE, "file": file, "socket": theirs}.get(kind)
        shell = ("sh", "-c", f'exec "$@" {"<&-" if kind == "closed" else ""}', "sh")
        command = [*shell, *COMMAND, *ANSWERS_X]
        done = subprocess.run(command, stdin=stdin, capture_output=True, check=False, timeout=TIMEOUT_S)
    assert (done.returncode, done.stdout) == (0, b"Ax\n")
    assert (b"stdin is a socket" in done.stderr) == (kind == "socket")


def test_a_slow_pipe_is_waited_for() -> None:
    """A note tells why nothing happens; a socket is read as well once it sends text."""
    ours, theirs = socket.socketpair()
    with subprocess.Popen(
        [*COMMAND, *ANSWERS_X], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        assert b"stdin is a pipe without text so far" in process.stderr.readline()
        process.stdin.write(b"fox")
        process.stdin.close()
        assert process.stdout.read() == b"A\n\nfoxx\n"
    with ours, theirs:
        ours.sendall(b"fox")
        ours.shutdown(socket.SHUT_WR)
        done = subprocess.run([*COMMAND, *ANSWERS_X], stdin=theirs, capture_output=True, check=True, timeout=TIMEOUT_S)
    assert done.stdout == b"A\n\nfoxx\n"


@pytest.mark.parametrize("columns", sampled([60, 80, 120], every=3))
def test_a_terminal_breaks_lines_between_words(columns: int) -> None:
    """The lines equal the lines of the same text from a pipe, and none fills the terminal."""
    args = ("generate", PROMPT, "-t", "1", "-n", "120", "-s", "1", "-q", "--temp", "0")
    text = output(*args, "--echo")
    screen = Terminal(*args, COLUMNS=str(columns))
    assert screen.finish() == 0
    lines = screen.plain_text.split("\n")
    assert max(map(len, lines)) < columns < len(max(text.split("\n"), key=len))
    assert screen.plain_text.split() == text.split()


def test_echo_shows_the_prompt_first() -> None:
    """With the flag it is shown without a terminal, too."""
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


def test_a_terminal_sees_a_bar_then_prompt_and_text_and_numbers() -> None:
    """The bar goes away, the prompt comes before the text, and there are colours."""
    screen = Terminal("generate", PROMPT, "-t", "1", "-n", "5", "--seed", "1", COLUMNS="200")
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
