"""Real coding agents against `paceline serve`, in a network namespace that has the loopback alone.

Each agent makes a first request and sends the result of a tool call; then it begins a new session, and Ctrl-C ends a reply. The
server's access log has the prompt tokens of each request and the number of cached tokens.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tests.clients.scripted_model import write_scripted_model

from paceline import _native
from paceline.cli.launch import AGENTS, Endpoint

NODE_PACKAGES = (
    "@anthropic-ai/claude-code@2.1.197",
    "@openai/codex@0.171.0",
    "opencode-ai@1.18.33",
    "@qwen-code/qwen-code@0.15.10",
)
PYTHON_PACKAGES = ("aider-chat==0.86.2",)

MAX_FREE_S = 2.0
TIMEOUT_S = 120.0
REAL_TIMEOUT_S = 1800.0
CONTEXT = 65_536


@dataclass(frozen=True, slots=True)
class Run:
    """How an agent is run without a person.

    Attributes:
        ask: Returns its arguments for the first message of a session.
        follow_up: Returns its arguments for the next message of the session.
        calls_tools: Whether its requests have tools, so that a session has a second turn by itself.
        min_second_turn: Least cached share of the prompt of the second turn.
        min_new_session: Least cached share of the first prompt of a new session.
    """

    ask: Callable[[str], Sequence[str]]
    follow_up: Callable[[str], Sequence[str]]
    calls_tools: bool = True
    min_second_turn: float = 0.95
    min_new_session: float = 0.85


_AIDER = ("--yes-always", "--no-git", "--no-gitignore", "--no-stream", "--map-tokens", "0")
RUNS = {
    "claude": Run(lambda text: ("-p", text), lambda text: ("--continue", "-p", text)),
    "codex": Run(
        lambda text: ("exec", "--skip-git-repo-check", text),
        lambda text: ("exec", "--skip-git-repo-check", "resume", "--last", text),
    ),
    "opencode": Run(lambda text: ("run", text), lambda text: ("run", "--continue", text)),
    "qwen": Run(lambda text: ("-p", text), lambda text: ("--continue", "-p", text)),
    "aider": Run(
        lambda text: (*_AIDER, "--message", text),
        lambda text: (*_AIDER, "--restore-chat-history", "--message", text),
        calls_tools=False,
        min_second_turn=0.5,  # its prompt is short, and its rules come again after the last message
        min_new_session=0.5,
    ),
}


@dataclass(slots=True)
class Result:
    """The measurements of an agent. second_turn, new_session: cached share of the prompt; free_s: from Ctrl-C to a free slot."""

    agent: str
    version: str
    prompt_tokens: int = 0
    second_turn: float = 0.0
    new_session: float = 0.0
    free_s: float = float("inf")
    failures: list[str] = field(default_factory=list)

    def row(self) -> str:
        """Return the result as a row of a Markdown table."""
        state = "works" if not self.failures else "; ".join(self.failures)
        shares = f"{self.second_turn:.1%} | {self.new_session:.1%}"
        return f"| {self.agent} | {self.version} | {self.prompt_tokens:,} | {shares} | {self.free_s:.1f} s | {state} |"


HEADING = (
    "| agent | version | tokens of its first prompt | cached: second turn | new session | slot free after Ctrl-C | result |\n"
    "|---|---|---|---|---|---|---|"
)


def install(folder: Path) -> None:
    """Install the agents at their versions, once."""
    if not (folder / "node" / "node_modules").exists():
        (folder / "node").mkdir(parents=True, exist_ok=True)
        subprocess.run(
            ["npm", "install", "--prefix", folder / "node", "--no-fund", "--no-audit", *NODE_PACKAGES], check=True
        )
    if not (folder / "python" / "bin" / "aider").exists():
        subprocess.run([sys.executable, "-m", "venv", folder / "python"], check=True)
        subprocess.run([folder / "python" / "bin" / "pip", "install", "-q", *PYTHON_PACKAGES], check=True)


def isolate(arguments: Sequence[str]) -> int:
    """Run this suite again in a network namespace with the loopback alone; return its exit code."""
    unshare = ["unshare", "--net", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    command = 'ip link set lo up && exec "$@"'
    again = [sys.executable, "-m", "tests.clients", "agents", *arguments]
    environment = os.environ | {"PACELINE_CLIENTS_ISOLATED": "1"}
    return subprocess.run([*unshare, "sh", "-c", command, "sh", *again], env=environment, check=False).returncode


def run(folder: Path, names: Sequence[str], model: Path | None) -> int:
    """Check the agents, print a table, and return 0 if all work. model: a real model; None: scripted models."""
    with tempfile.TemporaryDirectory(prefix="paceline-agents-") as scratch:
        place = Path(scratch)
        source = Path(_native.build_info()["llama_cpp_source"])
        plain = model or write_scripted_model(place / "scripted.gguf", source)
        endless = model or write_scripted_model(place / "endless.gguf", source, is_endless=True)
        results = []
        for name in names:
            checks = AgentChecks(name, folder, place / name, is_scripted=model is None)
            results.append(checks.run(plain, endless))
            print(results[-1].row(), flush=True)
    print("\n".join(["", HEADING, *(result.row() for result in results)]))
    return int(any(result.failures for result in results))


class Server:
    """`paceline serve` with an access log."""

    def __init__(self, model: Path, log: Path) -> None:
        self._log = log
        flags = ["-m", str(model), "-a", "local", "--port", "0", "-c", str(CONTEXT), "-np", "4", "--log-level", "info"]
        with log.open("wb") as output:
            self._process = subprocess.Popen([sys.executable, "-m", "paceline", "serve", *flags], stderr=output)
        self.url = self._listening()

    def _listening(self) -> str:
        deadline = time.monotonic() + 300
        url = ""
        while time.monotonic() < deadline:
            assert self._process.poll() is None, self._log.read_text()[-2000:]
            lines = self._log.read_text().splitlines()
            url = next((line.split()[-1] for line in lines if "listening on" in line), "")
            if url and any("is ready" in line for line in lines):
                return url
            time.sleep(0.1)
        raise AssertionError(self._log.read_text()[-2000:])

    def prompts(self) -> list[dict[str, Any]]:
        """Return the entries of generations that have ended."""
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.startswith("{")]
        return [entry for line in lines if "prompt_tokens" in (entry := json.loads(line))]

    def is_processing(self) -> bool:
        """Return whether a slot is busy."""
        return any(slot["is_processing"] for slot in httpx.get(f"{self.url}/slots", timeout=30).json())

    def close(self) -> None:
        """End the server."""
        self._process.terminate()
        self._process.wait(30)


@contextmanager
def served(model: Path, log: Path) -> Iterator[Server]:
    """Serve a model inside of the block."""
    server = Server(model, log)
    try:
        yield server
    finally:
        server.close()


class AgentChecks:
    """The checks of one agent, in a home and a project of its own."""

    def __init__(self, name: str, programs: Path, place: Path, *, is_scripted: bool) -> None:
        """is_scripted: whether the model calls a tool in any case; a real model may reply at once."""
        self._name, self._run, self._place = name, RUNS[name], place
        self._is_scripted, self._timeout_s = is_scripted, TIMEOUT_S if is_scripted else REAL_TIMEOUT_S
        path = f"{programs / 'node' / 'node_modules' / '.bin'}:{programs / 'python' / 'bin'}:{os.environ['PATH']}"
        self._program = str(shutil.which(AGENTS[name].executable, path=path))
        self._environment = os.environ | {"PATH": path, "HOME": str(place / "home"), "NO_COLOR": "1", "TERM": "dumb"}
        self._environment.pop("PYTHONPATH", None)
        self._project = place / "project"
        for folder in (place / "home", self._project):
            folder.mkdir(parents=True)
        (self._project / "main.py").write_text('print("hello")\n')
        (self._project / "README.md").write_text("# A project\n")

    def run(self, plain: Path, endless: Path) -> Result:
        """Run all checks. Each failure is a sentence of the result."""
        result = Result(self._name, self._version())
        with served(plain, self._place / "plain.log") as server:
            self._check_sessions(server, result)
        with served(endless, self._place / "endless.log") as server:
            self._check_interrupt(server, result)
        return result

    def _version(self) -> str:
        done = subprocess.run(
            [self._program, "--version"], env=self._environment, capture_output=True, text=True, check=False
        )
        words = done.stdout.split()
        return next((word for word in words if word[:1].isdigit()), done.stdout.strip())

    def _check_sessions(self, server: Server, result: Result) -> None:
        first = self._session(
            server, self._run.ask("Read main.py and say what it prints."), 2 if self._run.calls_tools else 1
        )
        if not first:
            result.failures.append(f"no request was served: {self._output()}")
            return
        result.prompt_tokens = first[0]["prompt_tokens"]
        turns = first
        has_result = len(first) > 1 and first[1]["prompt_tokens"] > first[0]["prompt_tokens"]
        if self._run.calls_tools and self._is_scripted and not has_result:
            result.failures.append(f"no result of a tool was sent: {self._output()}")
        if len(first) < 2:  # no tool was called: the second turn is a message
            turns = [first[0], *self._session(server, self._run.follow_up("And what does README.md say?"), 1)]
        if len(turns) < 2:
            result.failures.append(f"no second turn: {self._output()}")
        else:
            result.second_turn = _cached_share(turns[1])
            if result.second_turn < self._run.min_second_turn:
                result.failures.append(f"second turn cached {result.second_turn:.1%}")
        again = self._session(server, self._run.ask("Which files are there?"), 1)
        result.new_session = _cached_share(again[0]) if again else 0.0
        if result.new_session < self._run.min_new_session:
            result.failures.append(f"new session cached {result.new_session:.1%}")

    def _session(self, server: Server, arguments: Sequence[str], num_wanted: int) -> list[dict[str, Any]]:
        """Run a session until a number of requests of its conversation have been served; return their log entries.

        Requests with short prompts, like the request for a title, do not count.
        """
        before = len(server.prompts())
        with self._started(server, arguments) as process:
            deadline = time.monotonic() + self._timeout_s
            while True:
                has_ended = process.poll() is not None
                entries = server.prompts()[before:]
                longest = max((entry["prompt_tokens"] for entry in entries), default=0)
                found = [entry for entry in entries if 2 * entry["prompt_tokens"] > longest]
                if len(found) >= num_wanted or has_ended or time.monotonic() > deadline:
                    return found
                time.sleep(0.1)

    def _check_interrupt(self, server: Server, result: Result) -> None:
        """Send SIGINT while a reply is generated, and time until no slot is busy."""
        with self._started(server, self._run.ask("Write a long story.")) as process:
            deadline = time.monotonic() + self._timeout_s
            while not server.is_processing():
                if process.poll() is not None or time.monotonic() > deadline:
                    result.failures.append(f"no reply to interrupt: {self._output()}")
                    return
                time.sleep(0.05)
            time.sleep(1)
            if not server.is_processing():
                result.failures.append("the reply ended before Ctrl-C")
                return
            os.killpg(process.pid, signal.SIGINT)
            begin = time.monotonic()
            while server.is_processing() and time.monotonic() < begin + 30:
                time.sleep(0.02)
            result.free_s = time.monotonic() - begin
        if result.free_s > MAX_FREE_S:
            result.failures.append(f"the slot was busy for {result.free_s:.1f} s after Ctrl-C")

    @contextmanager
    def _started(self, server: Server, arguments: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
        """Run the agent inside of the block, as the leader of a group of processes."""
        setup = AGENTS[self._name].setup(Endpoint(server.url, "local", CONTEXT))
        environment = {name: value for name, value in self._environment.items() if name not in setup.unset}
        with (self._place / "agent.log").open("wb") as output:
            process = subprocess.Popen(
                [self._program, *setup.arguments, *arguments],
                env=environment | dict(setup.environment),
                cwd=self._project,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            for number, wait_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
                if process.poll() is None:
                    os.killpg(process.pid, number)
                    try:
                        process.wait(wait_s)
                    except subprocess.TimeoutExpired:
                        continue

    def _output(self) -> str:
        return (self._place / "agent.log").read_text(errors="replace")[-500:].replace("\n", " ")


def _cached_share(entry: dict[str, Any]) -> float:
    share: float = entry["cached_tokens"] / entry["prompt_tokens"]
    return share
