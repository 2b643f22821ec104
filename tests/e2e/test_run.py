"""`paceline run` as a user runs it: a path or a name, a prompt, a pipe, a conversation."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tests.e2e.commands import COMMAND, Terminal, environment, output, paceline_

from paceline import demo_model_path

pytestmark = pytest.mark.native

OPTIONS = ("-t", "1", "--temperature", "0", "-n", "20")


def test_a_prompt_gets_one_answer() -> None:
    """The words after the model are one message, and the answer is that of `chat`; a pipe is a message, too."""
    expected = output("chat", "-q", *OPTIONS, "Hello! Who are you?")
    model = str(demo_model_path())
    assert output("run", "-q", *OPTIONS, model, "Hello!", "Who", "are", "you?") == expected
    assert output("run", model, "Hello! Who are you?", "-q", *OPTIONS) == expected
    assert output("run", "-q", *OPTIONS, model, stdin=b"Hello! Who are you?\n") == expected


def test_without_a_prompt_it_is_a_conversation() -> None:
    """On a terminal it asks for messages until Ctrl-D."""
    chat = Terminal("run", str(demo_model_path()), *OPTIONS)
    chat.read_until_seen(r"Ctrl-D\s+ends\.\s+> ")
    chat.press("Hello! Who are you?\n")
    chat.read_until_seen(r"I am paceline-demo[^>]*> ")
    chat.press("\x04")
    assert chat.finish() == 0


@pytest.mark.parametrize("model", ["none.gguf", "none"])
def test_a_missing_file_is_one_line(model: str) -> None:
    """It names the path; the exit code is 1."""
    done = paceline_("run", model, "Hello!")
    assert (done.returncode, done.stdout) == (1, b"")
    assert model in done.stderr.decode() and done.stderr.decode().count("\n") == 1


def test_flags_win_over_the_environment_and_that_over_the_config_file(tmp_path: Path) -> None:
    """In a process of its own, which reads the file's section."""
    config = tmp_path / "config.toml"
    config.write_text(f'model = "{tmp_path / "none.gguf"}"\n[generate]\nmax-tokens = 3\nseed = 1\nquiet = true\n')
    variables = environment(PACELINE_CONFIG=str(config), PACELINE_MODEL=str(demo_model_path()))
    command = [*COMMAND, "generate", "Once upon a time", "-t", "1", "--json"]
    for flags, count in (((), 3), (("-n", "2"), 2)):
        done = subprocess.run([*command, *flags], env=variables, capture_output=True, check=True, timeout=60)
        assert (len(json.loads(done.stdout)["token_ids"]), done.stderr) == (count, b"")
    del variables["PACELINE_MODEL"]
    failed = subprocess.run(command, env=variables, capture_output=True, check=False, timeout=60)
    assert failed.returncode == 1 and b"none.gguf" in failed.stderr
