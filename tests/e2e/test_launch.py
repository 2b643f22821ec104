"""`paceline launch`: a program as the agent, which writes down how it was started."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.e2e.commands import COMMAND, environment
from tests.e2e.served import Served

from paceline.cli import launch
from paceline.errors import EngineError

pytestmark = pytest.mark.native

KEY, TIMEOUT_S = "secret", 120
# Asks the server for a message, and writes arguments, environment and the reply to the file that REPORT names.
AGENT = """#!{python}
import json, os, signal, sys, time, urllib.request
found = {{"pid": os.getpid(), "arguments": sys.argv[1:], "environment": dict(os.environ)}}
url = os.environ.get("ANTHROPIC_BASE_URL")
if url:
    talk = [{{"role": "user", "content": "Hi"}}]
    body = json.dumps({{"model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 3, "messages": talk}})
    request = urllib.request.Request(url + "/v1/messages", body.encode(), {{"x-api-key": os.environ["ANTHROPIC_AUTH_TOKEN"]}})
    found["message"] = json.load(urllib.request.urlopen(request, timeout=60))
interrupts = []
signal.signal(signal.SIGINT, lambda *_: interrupts.append(1))
with open(os.environ["REPORT"] + ".part", "w") as file:
    json.dump(found, file)
os.rename(os.environ["REPORT"] + ".part", os.environ["REPORT"])
while "--wait" in sys.argv and not interrupts:
    time.sleep(0.01)
sys.exit(7)
"""


class Agents:
    """A folder with programs of the agents' names on the PATH."""

    def __init__(self, folder: Path) -> None:
        self._report = folder / "report.json"
        for name in ("claude", "codex", "opencode", "qwen", "aider"):
            program = folder / name
            program.write_text(AGENT.format(python=sys.executable))
            program.chmod(program.stat().st_mode | stat.S_IXUSR)
        path = f"{folder}:{os.environ['PATH']}"
        # A proxy that does not answer: a server of this machine has to be reached without it.
        proxies = dict.fromkeys(("http_proxy", "HTTP_PROXY"), "http://127.0.0.1:9")
        self._environment = environment(
            PATH=path, REPORT=str(self._report), ANTHROPIC_API_KEY="of the user", NO_PROXY="a.example", **proxies
        )

    def start(self, *args: str) -> subprocess.Popen[bytes]:
        """Start `paceline launch`."""
        command = [*COMMAND, "launch", *args]
        return subprocess.Popen(command, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def report(self) -> dict[str, Any]:
        """Return the agent's record, once it exists."""
        deadline = time.monotonic() + TIMEOUT_S
        while not self._report.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        found: dict[str, Any] = json.loads(self._report.read_text())
        return found


@pytest.fixture
def agents(tmp_path: Path) -> Agents:
    """Return the programs of one test."""
    return Agents(tmp_path)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """Serve the demo model with a key."""
    with Served("--api-key", KEY, "-np", "2") as server:
        yield server


def ended(process: subprocess.Popen[bytes]) -> tuple[int, str, str]:
    """Return the exit code, stdout and stderr of a process."""
    out, err = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, out.decode(), err.decode()


def test_an_agent_talks_to_a_server_that_ends_with_it(agents: Agents, long_model: Path) -> None:
    """The agent's exit code is that of the command, and Ctrl-C is the agent's."""
    process = agents.start("claude", "-m", str(long_model), "-c", "30000", "-np", "2", "--", "--wait", "-p", "Hi there")
    report = agents.report()
    url = report["environment"]["ANTHROPIC_BASE_URL"]
    assert report["arguments"] == ["--wait", "-p", "Hi there"]
    assert report["message"]["usage"]["output_tokens"] == 3
    assert report["environment"]["ANTHROPIC_MODEL"] == "long"
    assert "ANTHROPIC_API_KEY" not in report["environment"]
    assert report["environment"]["NO_PROXY"] == "a.example,127.0.0.1,::1,localhost"
    assert len(httpx.get(f"{url}/slots").json()) == 2
    process.send_signal(signal.SIGINT)  # the terminal sends it to both
    time.sleep(0.2)
    assert process.poll() is None
    os.kill(report["pid"], signal.SIGINT)
    code, _, err = ended(process)
    assert code == 7, err
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/health")


def test_sigterm_ends_the_server_too(agents: Agents, long_model: Path) -> None:
    """Nothing is left of a command that was told to end."""
    process = agents.start("claude", "-m", str(long_model), "--", "--wait")
    url = agents.report()["environment"]["ANTHROPIC_BASE_URL"]
    process.terminate()
    code, _, err = ended(process)
    assert code == 128 + signal.SIGTERM, err
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/health")


def test_sigterm_ends_the_agent_beside_a_server_that_goes_on(agents: Agents, served: Served) -> None:
    """The command leaves no agent without its terminal."""
    process = agents.start("claude", "--url", served.url, "--api-key", KEY, "--", "--wait")
    agent = agents.report()["pid"]
    process.terminate()
    code, _, err = ended(process)
    assert code == 128 + signal.SIGTERM, err
    with pytest.raises(ProcessLookupError):
        os.kill(agent, 0)
    assert httpx.get(f"{served.url}/health").status_code == 200


def _claude(report: dict[str, Any], url: str) -> None:
    assert report["environment"]["ANTHROPIC_BASE_URL"] == url
    assert report["message"]["model"] == "paceline-demo"


def _codex(report: dict[str, Any], url: str) -> None:
    pairs = [argument.split("=", 1) for argument in report["arguments"] if argument != "-c"]
    options = {name: json.loads(value) for name, value in pairs}
    assert options["model_providers.paceline.base_url"] == f"{url}/v1"
    assert (options["model"], options["model_context_window"]) == ("paceline-demo", 1024)
    assert report["environment"][options["model_providers.paceline.env_key"]] == KEY


def _opencode(report: dict[str, Any], url: str) -> None:
    config = json.loads(report["environment"]["OPENCODE_CONFIG_CONTENT"])
    provider = config["provider"]["paceline"]
    assert (provider["options"]["baseURL"], provider["options"]["apiKey"]) == (f"{url}/v1", KEY)
    assert provider["models"]["paceline-demo"]["limit"]["context"] == 1024
    assert config["model"] == "paceline/paceline-demo"


def _qwen(report: dict[str, Any], url: str) -> None:
    assert report["environment"]["OPENAI_BASE_URL"] == f"{url}/v1"
    assert report["environment"]["OPENAI_API_KEY"] == KEY
    assert report["arguments"][-2:] == ["--model", "paceline-demo"]


def _aider(report: dict[str, Any], url: str) -> None:
    assert report["environment"]["OPENAI_API_BASE"] == f"{url}/v1"
    assert report["arguments"] == ["--model", "openai/paceline-demo"]


@pytest.mark.parametrize("check", [_claude, _codex, _opencode, _qwen, _aider])
def test_each_agent_is_pointed_at_a_server_that_runs(
    agents: Agents, served: Served, check: Callable[[dict[str, Any], str], None]
) -> None:
    """The settings have its address, model, context and key; a small context is reported."""
    process = agents.start(check.__name__.removeprefix("_"), "--url", f"{served.url}/v1/", "--api-key", KEY)
    code, _, err = ended(process)
    assert code == 7, err
    assert "paceline-demo has 1,024 tokens of context" in err
    check(agents.report(), served.url)


def test_print_shows_commands_for_a_shell(agents: Agents, tmp_path: Path) -> None:
    """A shell that runs them starts the agent so."""
    code, out, err = ended(
        agents.start("codex", "-m", "my models/a.gguf", "-c", "9000", "--print", "--", "exec", "Say 'hi'")
    )
    assert code == 0, err
    serve, *rest = out.splitlines()
    assert serve == "paceline serve -m 'my models/a.gguf' -a a --host 127.0.0.1 -c 9000 &"
    shell = environment(PATH=f"{tmp_path}:{os.environ['PATH']}", REPORT=str(tmp_path / "report.json"))
    assert subprocess.run(["sh", "-c", "\n".join(rest)], env=shell, check=False).returncode == 7
    report = agents.report()
    assert report["arguments"][-2:] == ["exec", "Say 'hi'"]
    assert 'model="a"' in report["arguments"] and "model_context_window=9000" in report["arguments"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("emacs",), "AGENT must be one of claude, codex, opencode, qwen, aider, not 'emacs'"),
        (("claude", "--url", "http://127.0.0.1:9"), "no server answers at http://127.0.0.1:9"),
        (("claude", "-c", "4096"), "--ctx-size and --parallel are for a server that is started"),
        (("claude", "--url", "http://127.0.0.1:9", "-m", "x", "-np", "2"), "for a server that is started"),
    ],
)
def test_wrong_usage_is_one_line(agents: Agents, args: tuple[str, ...], message: str) -> None:
    """With exit code 2."""
    code, _, err = ended(agents.start(*args))
    assert code == 2
    assert message in err and len(err.strip().splitlines()) == 1


def test_a_key_and_a_model_are_checked_before_the_agent_starts(agents: Agents, served: Served) -> None:
    """The messages have the server's advice."""
    code, _, err = ended(agents.start("claude", "--url", served.url))
    assert code == 2 and "wants an API key" in err
    code, _, err = ended(agents.start("claude", "--url", served.url, "--api-key", KEY, "-m", "other"))
    assert code == 2 and "has paceline-demo, not 'other'" in err


class _Page(BaseHTTPRequestHandler):
    """Another program: a page under every path."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html></html>")

    def log_message(self, *_: object) -> None:
        """Write no log."""


def test_another_program_at_the_address_is_no_server(agents: Agents) -> None:
    """The error asks whether it is paceline's."""
    with HTTPServer(("127.0.0.1", 0), _Page) as page:
        threading.Thread(target=page.handle_request, daemon=True).start()
        code, _, err = ended(agents.start("claude", "--url", f"http://127.0.0.1:{page.server_port}"))
    assert code == 1
    assert "lists no models; is it a paceline server?" in err and len(err.strip().splitlines()) == 1


def test_a_server_that_cannot_start_says_why(agents: Agents, tmp_path: Path) -> None:
    """The end of its log is in the error."""
    code, _, err = ended(agents.start("claude", "-m", str(tmp_path / "none.gguf")))
    assert code == 1
    assert "the server ended with exit code" in err and "none.gguf" in err


UNHEALTHY = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    replies = json.loads(sys.argv[1])
    def do_GET(self):
        body = json.dumps(self.replies[0]).encode()
        if len(self.replies) > 1:
            self.replies.pop(0)
        self.send_response(503)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
print("the worker died of SIGSEGV", flush=True)
server.serve_forever()
"""


@pytest.mark.parametrize("status", ["crash_loop", "failed", "ended"])
def test_a_server_that_never_becomes_ready_says_why(status: str, tmp_path: Path) -> None:
    """It loads, then restarts its worker over and over: the reason and the end of the log are in the error."""
    replies = [{"status": "loading", "progress": 0.5}] * 2 + [{"status": status, "error": {"message": "it crashed"}}]
    log = tmp_path / "server.log"
    with log.open("wb") as output:
        command = [sys.executable, "-c", UNHEALTHY, json.dumps(replies)]
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL)
    try:
        with pytest.raises(EngineError, match="does not become ready: it crashed: (?s:.*)SIGSEGV"):
            launch._ready(server, log)
    finally:
        server.kill()
        server.wait()


def test_an_agent_that_is_not_installed_names_its_install_command(tmp_path: Path) -> None:
    """Nothing is started."""
    command = [*COMMAND, "launch", "qwen", "-m", "x.gguf"]
    done = subprocess.run(command, env=environment(PATH=str(tmp_path)), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "qwen is not on the PATH; install it: npm install -g @qwen-code/qwen-code" in done.stderr
