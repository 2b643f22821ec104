"""`paceline ps`, `top` and `trace show`: the servers of this machine, the work of an engine now, and the record of its work."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import urlsplit

import typer

from paceline.cli import terminal
from paceline.cli.launch import is_loopback
from paceline.cli.options import ApiKeyOption
from paceline.errors import EngineError, InvalidParams, PacelineError, Unsupported

if TYPE_CHECKING:
    import httpx
    from httpx import Client

    from paceline.cli.screen import TopState
    from paceline.cli.trace import TraceSummary
    from paceline.engine import EngineClient
    from paceline.llm import LLM


_CONNECT_S: Final = 10.0
_SILENCE_S: Final = 60.0  # longer than servers wait between two comments
_AGAIN_S: Final = 1.0

Take = Callable[[str, Mapping[str, Any]], None]
"""Called with each event."""


class ServerEvents:
    """The events of a server, which a thread reads. A lost connection is tried again.

    Attributes:
        name: The URL.
        status: A sentence if there are no events, or the last ones are old; empty otherwise.
        failure: Why there will be no more events; None while there may be some.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, model: str | None = None, interval_ms: int = 250
    ) -> None:
        """url: of the server, or of its prefix. Raises `InvalidParams` if it is not a URL."""
        import httpx

        self.name = url.rstrip("/")
        try:
            address = httpx.URL(self.name)
        except httpx.InvalidURL as error:
            raise InvalidParams(f"URL {url!r:.200} cannot be read: {error}") from None
        if address.scheme not in ("http", "https") or not address.host:
            raise InvalidParams(
                f"URL must begin with http:// or https://, as in http://127.0.0.1:8080, not {url!r:.200}"
            )
        self.status, self.failure = f"connecting to {self.name} ...", None
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._params = {"interval_ms": str(interval_ms), **({} if model is None else {"model": model})}

    failure: Exception | None

    def run(self, take: Take, stop: threading.Event) -> None:
        """Pass events on until `stop` is set, or none will come."""
        import httpx

        timeout = httpx.Timeout(_CONNECT_S, read=_SILENCE_S)
        was_there = False

        def begin() -> None:
            nonlocal was_there
            was_there, self.status = True, ""

        with httpx.Client(headers=self._headers, timeout=timeout) as client:
            while not stop.is_set():
                try:
                    self._read(client, take, stop, begin)
                    self.status = "the server ended the stream; trying again ..."
                except httpx.HTTPError as error:
                    if not was_there:
                        self.failure = EngineError(
                            f"{self.name} cannot be reached: {str(error) or type(error).__name__}"
                        )
                        return
                    self.status = "the connection was lost; trying again ..."
                except EngineError as error:
                    self.failure = error
                    return
                stop.wait(_AGAIN_S)

    def _read(self, client: httpx.Client, take: Take, stop: threading.Event, begin: Callable[[], None]) -> None:
        with client.stream("GET", f"{self.name}/v1/engine/events", params=self._params) as response:
            if response.status_code == 503:  # it loads, or is about to end
                response.read()
                self.status = f"{_message(response)}; trying again ..."
                return
            if response.status_code != 200:
                response.read()
                raise EngineError(f"{self.name}: {_message(response)}")
            begin()
            for name, members in read_events(response.iter_lines()):
                take(name, members)
                if stop.is_set():
                    return


def _message(response: httpx.Response) -> str:
    """Return why a server refused, in its own words if it has some."""
    with suppress(ValueError, KeyError, TypeError):
        return str(response.json()["error"]["message"])
    return f"HTTP {response.status_code}; is this a paceline server?"


def read_events(lines: Iterator[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the events of a stream: their names and members."""
    name = ""
    for line in lines:
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, json.loads(value)


class LocalEvents:
    """The events of an engine of this process. Attributes are those of `ServerEvents`."""

    def __init__(self, engine: EngineClient, model: str, *, interval_ms: int = 250) -> None:
        """model: its name, for the title."""
        self.name, self.status = "in this process", ""
        self.failure: Exception | None = None
        self._model = model
        self._engine, self._interval_s = engine, interval_ms / 1000

    def run(self, take: Take, stop: threading.Event) -> None:
        """Pass events on until `stop` is set, or none will come."""
        import asyncio

        asyncio.run(self._watch(take, stop))

    async def _watch(self, take: Take, stop: threading.Event) -> None:
        import asyncio

        from paceline.server.engine_watch import EngineWatch, EventReader, engine_facts

        watch = EngineWatch(lambda: self._engine, lambda: "shutdown")
        reader = EventReader(watch, engine_facts(self._engine, self._model, ""), interval_s=self._interval_s)
        with reader:
            while not stop.is_set():
                with suppress(TimeoutError):
                    event = await asyncio.wait_for(reader.next(), 0.2)
                    take(event.name, event.members)
                    if event.name == "end":
                        return


EventSource = ServerEvents | LocalEvents

_DEFAULT_URL: Final = "http://127.0.0.1:8080"
_FRAMES: Final = 10  # a second
_ONCE_S: Final = 1.5  # for rates and distributions to come

_SHARED: Final = (
    "A little bear and an old owl lived at the edge of the wood. Every evening they told each other a story."
)
_BEGINNINGS: Final = ("Once upon a time", "One cold morning", "Tonight it was the owl's turn.", "The bear began:")


# Options are laid out by hand, a few lines each.
# fmt: off
ServerUrl = Annotated[str, typer.Argument(
    metavar="[URL]", help="URL of a paceline server, with its prefix if it has one.",
)]
ModelName = Annotated[str | None, typer.Option(
    "--model", "-m", metavar="NAME", help="Name of a model, for a server with several models.", show_default=False,
)]
OfDemo = Annotated[bool, typer.Option("--demo", help="Watch the demo model, which generates in this process.")]
IntervalMs = Annotated[int, typer.Option(
    "--interval-ms", min=100, max=60_000, metavar="N", help="Minimum of time between two pictures.",
)]
Once = Annotated[bool, typer.Option("--once", help="Show one picture and end, as if stdout is no terminal.")]
UrlOption = Annotated[str | None, typer.Option(
    "--url", metavar="URL", help="Ask this server, which may be on another machine.",
)]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON list.")]
TraceFile = Annotated[Path, typer.Argument(metavar="FILE", help="Trace, one JSON object a line.", show_default=False)]
HtmlTarget = Annotated[Path | None, typer.Option(
    "--html", metavar="FILE", help="Write a timeline to move about in there, as one HTML file.", show_default=False,
)]
# fmt: on


def top(
    ctx: typer.Context,
    url: ServerUrl = _DEFAULT_URL,
    *,
    api_key: ApiKeyOption = None,
    model: ModelName = None,
    demo: OfDemo = False,
    interval_ms: IntervalMs = 250,
    once: Once = False,
) -> None:
    """Show what an engine does: slots, the last ticks, shared prefixes, memory, latencies. q quits, ? shows the keys.

    Nothing is recorded while no client reads. With tenants a key shows its own requests, and sums of the rest.
    """
    source = ctx.get_parameter_source("api_key")
    has_key = source is not None and source.name == "COMMANDLINE"  # the environment or the config file may have it
    if demo and (has_key or model is not None or url != _DEFAULT_URL):
        raise InvalidParams("--demo runs in this process: give no URL, --api-key or --model with it")
    once = once or not terminal.can_draw(sys.stdout)
    if not demo:
        _show(ServerEvents(url, api_key=api_key, model=model, interval_ms=interval_ms), once=once)
        return
    with _working_demo() as llm:
        _show(LocalEvents(llm._engine, "paceline-demo", interval_ms=interval_ms), once=once)  # noqa: SLF001


def _show(source: EventSource, *, once: bool) -> None:
    """Draw the events of a source until it ends, a key or Ctrl-C."""
    from paceline.cli.screen import TopPicture, TopState

    state, stop = TopState(), threading.Event()
    reading = threading.Thread(target=source.run, args=(state.take, stop), name="paceline-top", daemon=True)
    reading.start()
    try:
        if once:
            began_s = time.monotonic()
            while reading.is_alive() and not (state.members and time.monotonic() - began_s > _ONCE_S):
                time.sleep(0.05)
            if source.failure is None:
                terminal.console(sys.stdout).print(TopPicture(state, source.name, source.status))
        else:
            _draw(state, source, reading)
    finally:
        stop.set()
        if source.failure is None:
            reading.join(1.0)
    if source.failure is not None:
        raise source.failure


def _draw(state: TopState, source: EventSource, reading: threading.Thread) -> None:
    from rich.live import Live

    from paceline.cli.screen import TopPicture

    console = terminal.console(sys.stdout)
    with ExitStack() as stack:
        keys = stack.enter_context(terminal.Keys(sys.stdin.fileno()) if terminal.can_read_keys() else nullcontext())
        live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False))
        shows_keys = False
        while reading.is_alive():
            live.update(TopPicture(state, source.name, source.status, shows_keys), refresh=True)
            if keys is None:
                time.sleep(1 / _FRAMES)
                continue
            keys.wait(1 / _FRAMES)
            pressed = keys.read()
            if "q" in pressed:
                return
            shows_keys ^= "?" in pressed


@contextmanager
def _working_demo() -> Iterator[LLM]:
    """Yield the demo model while it has some requests to run, again and again."""
    from paceline.llm import LLM

    stop = threading.Event()
    prompts = [f"{_SHARED} {begin}" for begin in _BEGINNINGS]
    with LLM() as llm:

        def work(number: int) -> None:
            seed = number
            while not stop.is_set():
                seed += 1
                try:
                    for _ in llm.stream(prompts[seed % len(prompts)], max_tokens=100 + 40 * (seed % 5), seed=seed):
                        if stop.wait(0.004):  # to be followed by eye
                            return
                except PacelineError:  # the engine ends
                    return

        workers = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(12)]
        for worker in workers:
            worker.start()
        try:
            yield llm
        finally:
            stop.set()
            for worker in workers:
                worker.join(5.0)


_TIMEOUT_S: Final = 3.0


_ROW: Final[Mapping[str, Any]] = dict.fromkeys(("model", "size", "url", "busy", "slots", "started", "pid"))
"""A row of `ps`, with None for what is unknown: a model's name, the bytes of its weights, the server's address, its busy slots
and all slots, the Unix seconds of its start, and its process, if that is of this machine. A state follows."""


def ps(*, url: UrlOption = None, api_key: ApiKeyOption = None, as_json: AsJson = False) -> None:
    """List the servers that run on this machine, and the models that they have loaded.

    Servers of other users are not listed. A server with keys shows its models and slots to a client with a key.
    """
    rows = list(_local_rows(api_key) if url is None else _rows_at(url, api_key))
    if as_json:
        terminal.write_json(rows, indent=2)
    elif not rows:
        terminal.note("No server runs on this machine; `paceline serve` starts one.")
    else:
        heading = ("MODEL", "SIZE", "ADDRESS", "SLOTS", "UP SINCE")
        terminal.write_table(heading, [_cells(row) for row in rows])
        for row in rows:
            if row["state"] not in ("ready", "loading"):
                terminal.note(f"{row['url']}: {row['state']}")


def _local_rows(api_key: str | None) -> Iterator[dict[str, Any]]:
    from paceline.server.listeners import running_servers

    for server in running_servers():
        facts: dict[str, Any] = {"url": server.urls[0], "started": server.started, "pid": server.pid}
        try:
            found = _loaded_models(server.urls[0], api_key, checks_certificate=False)
        except EngineError as error:
            yield {**_ROW, "model": server.model, **facts, "state": str(error)}
            continue
        state = "ready" if server.model is None else "loading"
        yield from ({**_ROW, **row, **facts, "state": "ready"} for row in found)
        if not found:
            yield {**_ROW, "model": server.model, **facts, "state": state}


def _rows_at(url: str, api_key: str | None) -> Iterator[dict[str, Any]]:
    root = url.rstrip("/").removesuffix("/v1")
    if urlsplit(root).scheme not in ("http", "https") or not urlsplit(root).hostname:
        raise InvalidParams(f"--url must begin with http:// or https://, as in http://127.0.0.1:8080, not {url!r:.200}")
    try:
        found = _loaded_models(root, api_key, checks_certificate=True)
    except EngineError as error:
        raise EngineError(f"the server at {root} is not listed: {error}") from None
    yield from ({**_ROW, **row, "url": root, "state": "ready"} for row in found)
    if not found:
        yield {**_ROW, "url": root, "state": "no model is loaded"}


def _loaded_models(url: str, api_key: str | None, *, checks_certificate: bool) -> list[dict[str, Any]]:
    """Return the loaded models of a server, with sizes and slots. Raises `EngineError` if it does not say."""
    import httpx

    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    if url.startswith("unix://"):
        raise EngineError("it listens on a socket")
    root = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    options: dict[str, Any] = {"verify": checks_certificate, "trust_env": not is_loopback(root)}
    try:
        with httpx.Client(base_url=root, headers=headers, timeout=_TIMEOUT_S, **options) as client:
            models = _body(client, "api/ps", {}).get("models", [])
            owned = [model for model in models if not model["details"].get("parent_model")]  # without LoRA adapters
            return [{"model": model["name"], "size": model["size"], **_slots(client, model["name"])} for model in owned]
    except httpx.HTTPError as error:
        raise EngineError(f"it does not answer ({str(error) or type(error).__name__})") from None
    except (AttributeError, KeyError, TypeError, ValueError):
        raise EngineError("it is not a paceline server") from None


def _body(client: Client, path: str, params: dict[str, str]) -> Any:
    response = client.get(path, params=params)
    if response.status_code == 401:
        raise EngineError("it wants an API key: give --api-key, or set PACELINE_API_KEY")
    if response.status_code == 503:
        return {}
    if response.status_code != 200:
        raise EngineError(f"it replied with status {response.status_code}")
    return response.json()


def _slots(client: Client, model: str) -> dict[str, int]:
    """Return the busy and all slots of a model; empty if the server keeps them to itself."""
    with suppress(EngineError):
        slots: Sequence[dict[str, Any]] = _body(client, "slots", {"model": model})
        return {"busy": sum(slot["is_processing"] for slot in slots), "slots": len(slots)} if slots else {}
    return {}


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    from paceline.hub.locate import shown_bytes

    slots = "-" if row["slots"] is None else f"{row['busy']}/{row['slots']}"
    return (
        row["model"] or "(none loaded)",
        shown_bytes(row["size"]) if row["size"] else "-",
        row["url"],
        row["state"] if row["state"] == "loading" else slots,
        "-" if row["started"] is None else terminal.day(row["started"]),
    )


trace_commands = typer.Typer(no_args_is_help=True, help="Look at traces: what an engine did, tick by tick.")


@trace_commands.callback()
def _trace() -> None:
    pass


@trace_commands.command(no_args_is_help=True)
def show(file: TraceFile, *, html: HtmlTarget = None) -> None:
    """Summarize a trace, and write its timeline as a page: slots over time, ticks as columns."""
    from paceline.cli.trace import summarize, viewer_html
    from paceline.observability.trace_file import read_trace

    trace = read_trace(file)
    if html is not None:
        from paceline.server.web_page import TRACE_VIEWER, built_folder

        viewer = built_folder() / TRACE_VIEWER
        if not viewer.is_file():
            raise Unsupported(
                "--html needs the trace viewer, which was not built into this installation: it is built with the web page "
                "where Node.js is installed (PACELINE_WEBUI=ON)"
            )
        page = viewer_html(viewer.read_text(encoding="utf-8"), trace, title=_title(file))
        html.write_text(page, encoding="utf-8")
    if trace.is_truncated:
        terminal.note(f"{file} ends within a line, which was left out")
    terminal.write_section(_title(file), _rows(summarize(trace)))


def _title(file: Path) -> str:
    """Return the file's name, with undecodable bytes replaced."""
    return file.name.encode(errors="surrogateescape").decode(errors="replace")


def _rows(summary: TraceSummary) -> Iterator[tuple[str, str]]:
    from paceline.cli.trace import seconds

    embedding = f", {summary.num_embedding_ticks:,} of them embedding" if summary.num_embedding_ticks else ""
    yield "ticks", f"{summary.num_ticks:,} in {summary.duration_s:.3f} s{embedding}"
    ended = ", ".join(f"{num} {reason}" for reason, num in summary.ended if num)
    yield "requests", f"{summary.num_requests:,}" + (f" ({ended})" if ended else "")
    yield "generated", f"{summary.num_generated:,} tokens, {summary.tokens_per_s:,.1f} a second"
    shared = f", {summary.num_from_memory:,} taken from memory" if summary.num_from_memory else ""
    yield "prefilled", f"{summary.num_prefill:,} tokens{shared}"
    drafts = f"{summary.num_drafts:,} verified, {summary.num_accepted:,} accepted"
    yield "drafts", drafts if summary.num_drafts else ""
    yield "embedded", f"{summary.num_embedded:,} texts" if summary.num_embedded else ""
    yield "preemptions", f"{summary.num_preemptions:,}" if summary.num_preemptions else ""
    yield "first token", f"p50 {seconds(summary.ttft_s, 0.5)}, p95 {seconds(summary.ttft_s, 0.95)}"
    yield "next token", f"p50 {seconds(summary.itl_s, 0.5)}, p99 {seconds(summary.itl_s, 0.99)}"
