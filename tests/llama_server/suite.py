"""Runs llama-server's own tests, unmodified, against `paceline serve`, and returns how each of them ended."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.llama_server.launcher import MODELS
from tests.llama_server.stand_ins import write_all, write_cache
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
EXCLUDED = (
    "test_mcp_servers.py",
    "test_tools_builtin.py",
    "test_proxy.py",
    "test_compat_gcp.py",
    "test_kv_keep_only_active.py",
    "test_vision_api.py",
)
"""Files about what paceline does not have at all."""

TEST_TIMEOUT_S = 60
_TESTS = Path("tools") / "server" / "tests"
_NODE_ID = re.compile(r"^(unit/[^:]+::.+)$", re.MULTILINE)


class Suite:
    """A copy of the tests in a folder of its own, with models and a program for them."""

    def __init__(self, folder: Path, source: Path) -> None:
        """source: the tree of llama.cpp."""
        self._folder = folder
        folder.mkdir(exist_ok=True)
        self._tests = folder / _TESTS
        self._models = folder / "stand-ins.json"
        self._socket = folder / "socket"
        shutil.copytree(source / _TESTS, self._tests, ignore=shutil.ignore_patterns("__pycache__", ".pytest_cache"))
        (self._tests / "tmp").mkdir(exist_ok=True)
        for name in ("models", "tools/mtmd"):  # templates and pictures, which tests name relative to their folder
            (folder / name).symlink_to(source / name, target_is_directory=True)
        write_cache(folder / "hub")
        self._models.write_text(json.dumps(write_all(folder / "stand-ins")))
        self._program = folder / "llama-server"
        client = f"{sys.executable} -I -S {ROOT / 'tests' / 'llama_server' / 'fork_server.py'}"
        self._program.write_text(f'#!/bin/sh\nexec {client} connect {self._socket} "$@"\n')
        self._program.chmod(self._program.stat().st_mode | stat.S_IXUSR)

    def collect(self) -> list[str]:
        """Return the ids of all tests that count, without the folder's name."""
        run = subprocess.run(
            self._command("--collect-only", "-q"),
            cwd=self._tests,
            env=self._environment(port=8080),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if run.returncode:
            raise RuntimeError(f"llama-server's tests cannot be collected: {run.stdout[-2000:]}{run.stderr[-2000:]}")
        return [name.removeprefix("unit/") for name in _NODE_ID.findall(run.stdout)]

    def run(self, tests: Sequence[str], *, jobs: int = 1) -> dict[str, str]:
        """Run tests, and return the outcome of each: passed, failed or skipped; failed if it did not end."""
        shares = [list(tests[number::jobs]) for number in range(jobs)]
        command = [sys.executable, "-m", "tests.llama_server.launcher", str(self._socket)]
        with (self._folder / "fork-server.txt").open("wb") as log:
            forking = subprocess.Popen(command, env=self._environment(0), stdout=log, stderr=subprocess.STDOUT)
        try:
            while not self._socket.exists():
                if forking.poll() is not None:
                    raise RuntimeError(f"the servers cannot be started, see {self._folder / 'fork-server.txt'}")
                time.sleep(0.05)
            running = [self._start(number, share) for number, share in enumerate(shares)]
            for process in running:
                process.wait()
        finally:
            forking.kill()
            forking.wait()
            self._socket.unlink(missing_ok=True)
        found = {str(line["test"]): str(line["outcome"]) for line in self.lines()}
        return {test: found.get(f"unit/{test}", "failed") for test in tests}

    def lines(self) -> list[Mapping[str, object]]:
        """Return the records of all outcomes so far."""
        files = sorted(self._folder.glob("outcomes-*.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    def _start(self, number: int, tests: Iterable[str]) -> subprocess.Popen[bytes]:
        wanted = self._folder / f"tests-{number}.json"
        wanted.write_text(json.dumps([f"unit/{test}" for test in tests]))
        environment = self._environment(port=free_port())
        environment["PACELINE_SUITE_TESTS"] = str(wanted)
        environment["PACELINE_SUITE_OUTCOMES"] = str(self._folder / f"outcomes-{number}.jsonl")
        command = self._command("-q", "--timeout", str(TEST_TIMEOUT_S))
        with (self._folder / f"log-{number}.txt").open("wb") as log:
            return subprocess.Popen(command, cwd=self._tests, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def _command(self, *options: str) -> list[str]:
        ignored = [f"--ignore=unit/{name}" for name in EXCLUDED]
        plugins = ["-p", "tests.llama_server.plugin", "-p", "no:randomly", "-p", "no:cacheprovider"]
        return [sys.executable, "-m", "pytest", "-m", "not slow", *plugins, *ignored, *options]

    def _environment(self, port: int) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("LLAMA_", "PYTEST_"))}
        return {
            **kept,
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "LLAMA_SERVER_BIN_PATH": str(self._program),
            MODELS: str(self._models),
            "HF_HUB_CACHE": str(self._folder / "hub"),
            "PORT": str(port),
        }
