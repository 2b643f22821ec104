"""Completion by shells, through the scripts and protocols that they use."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.hub.stand_in_hub import StandInHub
from tests.hub.test_commands import invoke, put_ollama
from tests.sweeps import sampled

HEAVY = "{'paceline._native', 'numpy', 'httpx'}"
CODE = f"import atexit, sys\natexit.register(lambda: print(sorted({HEAVY} & sys.modules.keys()), file=sys.stderr))"


@pytest.fixture
def commands(hub: StandInHub, tmp_path: Path) -> Path:
    """A folder for the PATH with `paceline`, beside a hub's and Ollama's caches with one model each."""
    hub.add("user/tiny", "tiny-Q4_K_M.gguf")
    assert invoke("pull", "user/tiny").exit_code == 0
    put_ollama(tmp_path, "llama:1b", b"GGUF")
    script = tmp_path / "bin" / "paceline"
    script.parent.mkdir()
    script.write_text(f"#!{sys.executable}\n{CODE}\nfrom paceline.cli import main\nmain()\n")
    script.chmod(0o755)
    return script.parent


def environment(commands: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}", **more}


@pytest.mark.skipif(shutil.which("bash") is None, reason="runs bash")
@pytest.mark.parametrize(
    ("words", "found"),
    sampled(
        [
            (["pu"], ["pull"]),
            (["generate", "--temp"], ["--temperature"]),
            (["serve", "--ctx-s"], ["--ctx-size"]),
            (["serve", "-m", "hf", ":", "us"], ["user/tiny:Q4_K_M"]),
            (["serve", "--port", ""], []),
            (["serve", "--isolation", "t"], ["thread"]),
            (["embed", "--pooling", "m"], ["mean"]),
            (["launch", "c"], ["claude", "codex"]),
            (["trace", ""], ["show"]),
            (["chat", "-m", ""], ["hf:user/tiny:Q4_K_M", "ollama:llama:1b"]),
            (["chat", "-m", "hf", ":", "user/t"], ["user/tiny:Q4_K_M"]),
            (["chat", "--model", "=", "ollama", ":"], ["llama:1b"]),
            (["run", "user/tiny", ":"], ["Q4_K_M"]),
            (["show", "user"], ["user/tiny:Q4_K_M"]),
            (["nothing", "x"], []),
            (["chat", "-m", "none"], []),
        ],
        every=3,
    ),
)
def test_bash(commands: Path, words: list[str], found: list[str]) -> None:
    """By the script that is installed, with words as bash breaks them, and nothing heavy loaded."""
    typed = " ".join(f"'{word}'" for word in ["paceline", *words])
    program = f"""
        eval "$(_PACELINE_COMPLETE=source_bash paceline 2>/dev/null)"
        COMP_WORDS=({typed}); COMP_CWORD={len(words)}
        _paceline_completion paceline
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "-c", program], env=environment(commands), capture_output=True, text=True, check=True, timeout=60
    )
    assert [line for line in done.stdout.splitlines() if line] == found
    assert done.stderr.strip() == "[]"


def test_zsh_and_fish(commands: Path) -> None:
    """They pass the line as it is typed; commands come with their first sentences."""
    for shell, typed, words in (
        ("zsh", "paceline chat -m hf:u", '"hf\\\\:user/tiny\\\\:Q4_K_M"'),
        ("zsh", "paceline pu", '"pull":"Download a model, and write the paths of its files."'),
        ("zsh", "paceline serve --ctx-si", '"--ctx-size":"KV cells'),
        ("fish", "paceline chat -m hf:u", "hf:user/tiny:Q4_K_M"),
        ("fish", "paceline pu", "pull\tDownload a model, and write the paths of its files."),
    ):
        more = {
            "_PACELINE_COMPLETE": f"complete_{shell}",
            "_TYPER_COMPLETE_ARGS": typed,
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        }
        done = subprocess.run(
            ["paceline"], env=environment(commands, **more), capture_output=True, text=True, check=False, timeout=60
        )
        assert words in done.stdout and done.stderr.strip() == "[]", (shell, typed, done)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(commands: Path, shell: str) -> None:
    """It names the command."""
    done = subprocess.run(
        ["paceline"],
        env=environment(commands, _PACELINE_COMPLETE=f"source_{shell}"),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "paceline" in done.stdout and f"complete_{shell}" in done.stdout
