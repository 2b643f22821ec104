"""`paceline launch`: run a coding agent on a local server. The agent is set up by environment variables and flags alone."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Annotated, Final
from urllib.parse import urlsplit

import typer

from paceline.cli import terminal
from paceline.cli.options import ApiKeyOption, choosing_model, running, showing
from paceline.errors import EngineError, InvalidParams

_DEFAULT_URL: Final = "http://127.0.0.1:8080"
_NO_KEY: Final = "paceline"  # for a server without keys: the agents refuse to start without one
_IDLE_MS: Final = 3_600_000  # a long prompt on a CPU takes minutes
_WANTED_TOKENS: Final = 24_576  # the prompts of these agents have 6,000 to 22,000 tokens
_LISTENING: Final = re.compile(r"listening on (http://\S+)")
_POLL_S: Final = 0.1
_NEVER_READY: Final = ("failed", "ended", "crash_loop")  # statuses of /health
_STOP_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server that an agent talks to.

    Attributes:
        url: Its root, without a slash at the end.
        model: The name of the model, as requests give it.
        num_tokens: The tokens that one request may have, prompt and reply together.
        api_key: Its API key, or any text for a server without keys.
    """

    url: str
    model: str
    num_tokens: int
    api_key: str = _NO_KEY


@dataclass(frozen=True, slots=True)
class AgentSetup:
    """How an agent is started.

    Attributes:
        environment: Variables that are set.
        unset: Variables that are removed from the environment.
        arguments: Arguments before the user's.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    arguments: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Agent:
    """A coding agent. executable: its name on the PATH. install: the command that installs it."""

    executable: str
    install: str
    setup: Callable[[Endpoint], AgentSetup]


def _claude(server: Endpoint) -> AgentSetup:
    names = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU")))
    return AgentSetup(
        {
            "ANTHROPIC_BASE_URL": server.url,
            "ANTHROPIC_AUTH_TOKEN": server.api_key,
            **dict.fromkeys((*names, "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL"), server.model),
            "API_TIMEOUT_MS": str(_IDLE_MS),
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        unset=("ANTHROPIC_API_KEY",),  # it would win over the token
    )


def _codex(server: Endpoint) -> AgentSetup:
    provider = {
        "name": "paceline",
        "base_url": f"{server.url}/v1",
        "env_key": "PACELINE_API_KEY",
        "wire_api": "responses",
        "stream_idle_timeout_ms": _IDLE_MS,
    }
    options = {
        "model": server.model,
        "model_provider": "paceline",
        "model_context_window": server.num_tokens,
        **{f"model_providers.paceline.{name}": value for name, value in provider.items()},
    }
    # The values are TOML, whose strings and integers are JSON's.
    arguments = [part for name, value in options.items() for part in ("-c", f"{name}={json.dumps(value)}")]
    return AgentSetup({"PACELINE_API_KEY": server.api_key}, arguments=arguments)


def _opencode(server: Endpoint) -> AgentSetup:
    limit = {"context": server.num_tokens, "output": min(8192, server.num_tokens // 2)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "paceline",
        "options": {"baseURL": f"{server.url}/v1", "apiKey": server.api_key, "timeout": _IDLE_MS},
        "models": {server.model: {"name": server.model, "limit": limit, "tool_call": True}},
    }
    name = f"paceline/{server.model}"
    config = {"provider": {"paceline": provider}, "model": name, "small_model": name, "share": "disabled"}
    return AgentSetup({"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def _qwen(server: Endpoint) -> AgentSetup:
    environment = {
        "OPENAI_BASE_URL": f"{server.url}/v1",
        "OPENAI_API_KEY": server.api_key,
        "OPENAI_MODEL": server.model,
    }
    return AgentSetup(environment, arguments=("--auth-type", "openai", "--model", server.model))


def _aider(server: Endpoint) -> AgentSetup:
    environment = {
        "OPENAI_API_BASE": f"{server.url}/v1",
        "OPENAI_API_KEY": server.api_key,
        "AIDER_ANALYTICS_DISABLE": "true",
        "AIDER_CHECK_UPDATE": "false",
        "AIDER_SHOW_MODEL_WARNINGS": "false",
        "AIDER_TIMEOUT": str(_IDLE_MS // 1000),
    }
    return AgentSetup(environment, arguments=("--model", f"openai/{server.model}"))


AGENTS: Final[Mapping[str, Agent]] = {
    "claude": Agent("claude", "npm install -g @anthropic-ai/claude-code", _claude),
    "codex": Agent("codex", "npm install -g @openai/codex", _codex),
    "opencode": Agent("opencode", "npm install -g opencode-ai", _opencode),
    "qwen": Agent("qwen", "npm install -g @qwen-code/qwen-code", _qwen),
    "aider": Agent("aider", "pip install aider-chat", _aider),
}
"""The agents by the name that the command takes."""


# Options are laid out by hand, a few lines each.
# fmt: off
AgentName = Annotated[str, typer.Argument(
    metavar="AGENT", autocompletion=lambda: list(AGENTS), help=f"One of {', '.join(AGENTS)}.",
)]
Arguments = Annotated[list[str] | None, typer.Argument(
    metavar="ARG", help="Arguments of the agent, after --.", show_default=False,
)]
ServedModel = Annotated[str | None, choosing_model(
    "--model", "-m", metavar="MODEL", help="A GGUF file or name to serve; with --url a name of the server's models.",
    show_default="the first model of the server at --url",
)]
RunningServer = Annotated[str | None, running(
    "--url", metavar="URL", help="Use a server that is running.",
    show_default=f"with -m a server of its own, else {_DEFAULT_URL}",
)]
ServedContext = Annotated[int | None, running(
    "--ctx-size", "-c", metavar="N", min=1, help="Tokens of context of the server that is started.",
)]
Slots = Annotated[int | None, running(
    "--parallel", "-np", metavar="N", min=1, help="Slots of the server that is started.",
)]
PrintOnly = Annotated[bool, showing(
    "--print", help="Print the settings and the command of the agent, and run nothing.",
)]
# fmt: on


def launch(
    agent: AgentName,
    arguments: Arguments = None,
    *,
    model: ServedModel = None,
    url: RunningServer = None,
    api_key: ApiKeyOption = None,
    ctx_size: ServedContext = None,
    parallel: Slots = None,
    print_only: PrintOnly = False,
) -> None:
    """Run a coding agent on a local model: find or start a server, and point the agent at it.

    The agent's own configuration files stay as they are. A server that was started ends with the agent.
    """
    chosen = AGENTS.get(agent)
    if chosen is None:
        raise InvalidParams(f"AGENT must be one of {', '.join(AGENTS)}, not {agent!r:.80}")
    program = shutil.which(chosen.executable)
    if program is None and not print_only:
        raise InvalidParams(f"{chosen.executable} is not on the PATH; install it: {chosen.install}")
    starts = url is None and model is not None
    if not starts and (ctx_size is not None or parallel is not None):
        raise InvalidParams("--ctx-size and --parallel are for a server that is started: give -m, and no --url")
    flags = _serve_flags(str(model), ctx_size, parallel) if starts else None
    if print_only:
        server = (
            Endpoint(_DEFAULT_URL, _name_of(str(model)), ctx_size or _WANTED_TOKENS)
            if starts
            else found_server(url, model, api_key)
        )
        _print(chosen, _setup(chosen, server), arguments or [], flags)
        return
    with (
        _ended_by_signals(),
        nullcontext(found_server(url, model, api_key)) if flags is None else _started(flags) as server,
    ):
        if server.num_tokens < _WANTED_TOKENS:
            terminal.note(
                f"Note: {server.model} has {server.num_tokens:,} tokens of context, and {agent} may need up to "
                f"{_WANTED_TOKENS:,}; serve it with a larger -c if a request is refused"
            )
        code = _run(str(program), _setup(chosen, server), arguments or [])
    raise typer.Exit(code)


# ---- the server


def found_server(url: str | None, model: str | None, api_key: str | None, *, loads: bool = True) -> Endpoint:
    """Return the endpoint of a running server. Raises `InvalidParams` if no server answers or it lacks the model.

    loads: whether a model that is not loaded is loaded for its `num_tokens`, which are a guess otherwise.
    """
    import httpx

    root = (url or _DEFAULT_URL).rstrip("/").removesuffix("/v1")
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    with httpx.Client(headers=headers, timeout=10, trust_env=not is_loopback(root)) as client:
        try:
            response = client.get(f"{root}/v1/models")
        except (httpx.TransportError, httpx.InvalidURL) as error:
            way_out = "start one with `paceline serve`" if url else "name a model with -m, or a server with --url"
            raise InvalidParams(f"no server answers at {root} ({error}); {way_out}") from None
        if response.status_code == 401:
            raise InvalidParams(f"the server at {root} wants an API key; give --api-key, or set PACELINE_API_KEY")
        if response.status_code != 200:
            raise EngineError(f"the server at {root} replied to /v1/models with status {response.status_code}")
        try:
            listing = json.loads(response.content)
        except ValueError:  # such as the page of another program
            listing = None
        models = listing.get("data") if isinstance(listing, dict) else None
        is_list = isinstance(models, list) and all(isinstance(entry, dict) and "id" in entry for entry in models)
        if not is_list or not models:
            raise EngineError(f"the server at {root} lists no models; is it a paceline server?")
        names = [str(entry["id"]) for entry in models]
        if model is not None and model not in names:
            raise InvalidParams(f"--model: the server at {root} has {', '.join(names)}, not {model!r:.80}")
        chosen = models[0] if model is None else models[names.index(model)]
        num_tokens = (chosen.get("meta") or {}).get("n_ctx")
        if not isinstance(num_tokens, int) and not loads:
            num_tokens = _WANTED_TOKENS
        if not isinstance(num_tokens, int):  # a model of several that is not loaded yet
            settings = client.get(f"{root}/props", params={"model": str(chosen["id"])}, timeout=600)
            found = settings.json() if settings.status_code == 200 else {}
            num_tokens = int(found.get("default_generation_settings", {}).get("n_ctx") or _WANTED_TOKENS)
        return Endpoint(root, str(chosen["id"]), num_tokens, api_key or _NO_KEY)


def is_loopback(url: str) -> bool:
    """Return whether a URL is of this machine."""
    return urlsplit(url).hostname in ("127.0.0.1", "::1", "localhost")


def _name_of(model: str) -> str:
    """Return the name under which a file, or a model of the hub, is served."""
    return model.rsplit("/", 1)[-1].removesuffix(".gguf")


def _serve_flags(model: str, ctx_size: int | None, parallel: int | None) -> list[str]:
    flags = ["-m", model, "-a", _name_of(model), "--host", "127.0.0.1"]
    flags += [] if ctx_size is None else ["-c", str(ctx_size)]
    return flags + ([] if parallel is None else ["-np", str(parallel)])


@contextmanager
def _started(flags: Sequence[str]) -> Iterator[Endpoint]:
    """Start a server on a free port of the loopback, and end it after the block."""
    with tempfile.TemporaryDirectory(prefix="paceline-launch-") as folder:
        log = Path(folder) / "server.log"
        command = [sys.executable, "-m", "paceline", "serve", *flags, "--port", "0", "--log-level", "warning"]
        # A session of its own: Ctrl-C is for the agent.
        with (
            log.open("wb") as output,
            subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True) as server,  # noqa: S603
        ):
            try:
                yield _ready(server, log)
            finally:
                server.terminate()
                try:
                    server.wait(_STOP_S)
                except subprocess.TimeoutExpired:
                    server.kill()


def _ready(server: subprocess.Popen[bytes], log: Path) -> Endpoint:
    """Wait until the server has loaded its model.

    Raises `EngineError` if the server ends before, cannot load the model, or restarts its worker over and over.
    """
    import httpx

    terminal.note("Starting a server ...")
    root: str | None = None
    while True:
        if server.poll() is not None:
            text = log.read_text(errors="replace").strip()
            raise EngineError(f"the server ended with exit code {server.returncode}: {text[-2000:]}")
        if root is None and (match := _LISTENING.search(log.read_text(errors="replace"))):
            root = match[1]
        if root is not None:
            try:
                health = httpx.get(f"{root}/health", timeout=10, trust_env=False)
            except httpx.TransportError:
                pass  # it may not accept yet; it is asked again
            else:
                if health.status_code == 200:
                    return found_server(root, None, None)
                with suppress(ValueError):
                    body = json.loads(health.content)
                    if isinstance(body, dict) and body.get("status") in _NEVER_READY:
                        error = body.get("error")
                        message = error.get("message") if isinstance(error, dict) else body["status"]
                        text = log.read_text(errors="replace").strip()
                        raise EngineError(f"the server does not become ready: {message}: {text[-2000:]}")
        time.sleep(_POLL_S)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Have SIGTERM and SIGHUP end this process in order: the agent first, then a server that was started."""

    def end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the shape of a handler
        raise typer.Exit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- the agent


def _setup(agent: Agent, server: Endpoint) -> AgentSetup:
    """Return the agent's setup. A server of this machine is reached without the proxy that the environment may name."""
    setup = agent.setup(server)
    if not is_loopback(server.url):
        return setup
    hosts = [os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), "127.0.0.1", "::1", "localhost"]
    direct = ",".join(host for host in hosts if host)
    return replace(setup, environment={**setup.environment, "NO_PROXY": direct, "no_proxy": direct})


def _run(program: str, setup: AgentSetup, arguments: Sequence[str]) -> int:
    """Run the agent in the foreground and return its exit code."""
    environment = {name: value for name, value in os.environ.items() if name not in setup.unset}
    command = [program, *setup.arguments, *arguments]
    # The terminal sends Ctrl-C to the agent as well, which decides about it. A handler, unlike SIG_IGN, is not inherited.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        agent = subprocess.Popen(command, env=environment | dict(setup.environment))  # noqa: S603
        try:
            code = agent.wait()
        except BaseException:
            agent.terminate()
            agent.wait()
            raise
    finally:
        signal.signal(signal.SIGINT, before)
    return code if code >= 0 else 128 - code


def _print(agent: Agent, setup: AgentSetup, arguments: Sequence[str], serve_flags: Sequence[str] | None) -> None:
    """Print shell commands that serve the model and run the agent."""
    if serve_flags is not None:
        terminal.write(f"paceline serve {shlex.join(serve_flags)} &\n")
    for name in setup.unset:
        terminal.write(f"unset {name}\n")
    for name, value in setup.environment.items():
        terminal.write(f"export {name}={shlex.quote(value)}\n")
    terminal.write(shlex.join([agent.executable, *setup.arguments, *arguments]) + "\n")
