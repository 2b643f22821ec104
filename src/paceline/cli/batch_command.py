"""`paceline batch run`: the requests of a file in OpenAI's batch format, through an engine of its own or a server."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from paceline.cli import options as option
from paceline.cli import terminal
from paceline.cli.endings import FAILED, StopSignal
from paceline.cli.endings import run as run_work
from paceline.cli.launch import found_server, is_loopback
from paceline.errors import InvalidParams

if TYPE_CHECKING:
    import httpx

    from paceline.server.batch_run import BatchEntry, BatchFiles, BatchLine
    from paceline.server.settings import ServerSettings

_LINES_PER_SLOT: Final = 4  # sent at once: prompts that wait are tokenised, and grouped by their prefixes
_LINES_OF_SERVER: Final = 32
_READ_S: Final = 3600.0  # without a byte of a server that stalls; a response comes whole, after its generation
_REPORT_S: Final = 10.0
_UPDATE_S: Final = 1.0

# fmt: off
Requests = Annotated[Path, typer.Argument(
    metavar="FILE", help="Requests, one JSON object a line: custom_id, method, url, body.",
)]
Output = Annotated[Path, option.running("--output", "-o", metavar="FILE", help="The file of the results.")]
Errors = Annotated[Path | None, option.running(
    "--errors", metavar="FILE", help="The file of lines that failed.", show_default="OUTPUT with .errors before its suffix",
)]
Url = Annotated[str | None, option.running(
    "--url", metavar="URL", help="Send the requests to a server that runs, in place of an engine of its own.",
    show_default="none",
)]
Concurrency = Annotated[int | None, option.running(
    "--concurrency", metavar="N", min=1, max=4096, help="Requests that are sent at once.",
    show_default=f"{_LINES_PER_SLOT} for each slot; {_LINES_OF_SERVER} with --url",
)]
MaxRetries = Annotated[int, option.running(
    "--max-retries", metavar="N", min=0, max=100,
    help="How often a request is sent again that a server refuses for now, or whose connection fails.",
)]
Slots = Annotated[int | None, option.running(
    "--parallel", "-np", metavar="N", min=1, help="Requests that compute at once.", show_default="8",
)]
Context = Annotated[int | None, option.running(
    "--ctx-size", "-c", metavar="N", min=1, help="Tokens of the context, which all slots share.",
    show_default="as memory allows",
)]
Quiet = Annotated[bool, option.showing("--quiet", "-q", help="Show no progress.")]
# fmt: on

batch_commands = typer.Typer(no_args_is_help=True, help="Run files of requests in OpenAI's batch format.")


@batch_commands.callback()
def _batch() -> None:
    pass


@batch_commands.command()
def run(
    requests: Requests,
    *,
    output: Output,
    errors: Errors = None,
    model: option.ModelOption = None,
    n_gpu_layers: option.GpuLayersOption = None,
    device: option.DeviceOption = None,
    lora: option.LoraOption = None,
    ctx_size: Context = None,
    parallel: Slots = None,
    threads: option.ThreadsOption = None,
    url: Url = None,
    api_key: option.ApiKeyOption = None,
    concurrency: Concurrency = None,
    max_retries: MaxRetries = 8,
    quiet: Quiet = False,
) -> None:
    """Run the requests of a file, and append their results to another file as they end.

    After Ctrl-C or a crash the same command goes on: lines that have a result or an error are not run again. Lines that
    failed, and lines that are no requests, go to the file of errors.

    The exit code is 0 without errors, 1 if there are some or the run ends early, 2 for wrong options or files of another
    run, 130 after Ctrl-C.
    """
    of_engine = {"n_gpu_layers": n_gpu_layers, "devices": device, "n_ctx": ctx_size, "num_slots": parallel}
    of_engine = {name: value for name, value in {**of_engine, "n_threads": threads}.items() if value}
    adapters = option.lora_adapters(lora)
    if url is not None and (of_engine or adapters):
        raise InvalidParams("options of the engine have no effect with --url: the server there has its own")

    def work(stop: StopSignal) -> int:
        from paceline.server.batch_run import BatchFiles, BatchSender, run_batch, run_in_thread
        from paceline.server.settings import ServerSettings

        failed = output.with_name(f"{output.stem}.errors{output.suffix}") if errors is None else errors

        async def run_all() -> None:
            if await run_in_thread(files.is_finished):  # no model is loaded for nothing
                return
            total = None if quiet else await run_in_thread(files.count_lines)
            served = None
            if url is None:
                path = None if model is None else option.local_path(model, stop)
                loras = {"lora": {name: file for name, (file, _) in adapters.items()}} if adapters else {}
                scales = {name: scale for name, (_, scale) in adapters.items()}
                settings = ServerSettings(model=path, engine_options={**of_engine, **loras}, lora_scales=scales)
                connecting = _own_server(settings)
            else:
                found = await run_in_thread(lambda: found_server(url, model, api_key, loads=False))
                served = None if model is None else found.model
                connecting = _other_server(found.url, api_key)
            async with connecting as (client, num_slots):
                at_once = concurrency or (_LINES_PER_SLOT * num_slots if num_slots else _LINES_OF_SERVER)
                sender = BatchSender(client, max_retries)

                async def send(line: BatchLine) -> BatchEntry:
                    return await sender(line if served is None else _with_model(line, served))

                async with _progress(files, total, is_shown=not quiet) as on_entry:
                    await run_batch(files, send, at_once, on_entry)

        # The name under which a server has the model, so that a run may go on with --url.
        name = "" if model is None else model.rsplit("/", 1)[-1].removesuffix(".gguf")
        with BatchFiles(requests, output, failed, model=name, is_stopped=stop.event.is_set) as files:
            try:
                asyncio.run(_until_stopped(run_all(), stop))
            finally:
                if not quiet:
                    terminal.note(_summary(files, output, failed))
            return files.num_failed

    if run_work(work):
        raise typer.Exit(FAILED)


def _with_model(line: BatchLine, model: str) -> BatchLine:
    """Return a line whose body names a model: the given one, unless it has one."""
    import msgspec

    body = msgspec.json.decode(line.body, type=dict[str, msgspec.Raw])
    if "model" in body:
        return line
    body["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.structs.replace(line, body=msgspec.Raw(msgspec.json.encode(body)))


async def _until_stopped(work: Any, stop: StopSignal) -> None:
    """Run a coroutine, and cancel it after Ctrl-C. Raises its errors."""
    loop, requested = asyncio.get_running_loop(), asyncio.Event()

    def abort() -> None:
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(requested.set)

    with stop.aborting(abort):
        running, stopping = asyncio.create_task(work), asyncio.create_task(requested.wait())
        await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        running.cancel()
        await asyncio.wait((running,))
    if not running.cancelled():
        running.result()


@asynccontextmanager
async def _own_server(settings: ServerSettings) -> AsyncIterator[tuple[httpx.AsyncClient, int]]:
    """Load the model behind the server's application; yield a client of it, without a socket, and the number of slots."""
    import httpx

    from paceline.server.application import build_app

    app = build_app(settings)
    service = app.state.service
    async with app.router.lifespan_context(app):
        await service.loaded.wait()
        if service.failure is not None:
            raise service.failure
        transport = httpx.ASGITransport(app)
        timeout = httpx.Timeout(None)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=timeout) as client:
            yield client, service.engine().config.num_slots


@asynccontextmanager
async def _other_server(url: str, api_key: str | None) -> AsyncIterator[tuple[httpx.AsyncClient, int]]:
    """Yield a client of a server that runs, and 0."""
    import httpx

    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    timeout = httpx.Timeout(_READ_S, connect=10.0, pool=None)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=timeout, limits=limits, trust_env=not is_loopback(url)
    ) as client:
        yield client, 0


@asynccontextmanager
async def _progress(
    files: BatchFiles, total: int | None, *, is_shown: bool
) -> AsyncIterator[Callable[[BatchEntry], object]]:
    """Show the progress: a bar if stderr is a terminal, else a line now and then. Yields a function to call with each entry."""
    if not is_shown:
        yield lambda _: None
        return
    speed = _Speed(files, total)
    with _bar(files, speed, total) if terminal.can_draw(sys.stderr) else _notes(files, speed, total) as show:

        def add(entry: BatchEntry) -> None:
            speed.add(entry)
            show()

        async def show_often() -> None:
            while True:
                await asyncio.sleep(_UPDATE_S)
                show()

        showing = asyncio.create_task(show_often())
        try:
            yield add
        finally:
            showing.cancel()


@contextmanager
def _notes(files: BatchFiles, speed: _Speed, total: int | None) -> Iterator[Callable[[], None]]:
    reported_s = time.monotonic()

    def show() -> None:
        nonlocal reported_s
        if time.monotonic() - reported_s >= _REPORT_S:
            reported_s = time.monotonic()
            of = "" if total is None else f" of {total:,}"
            terminal.note(f"{files.num_done:,}{of} lines, {speed.words()}")

    yield show


@contextmanager
def _bar(files: BatchFiles, speed: _Speed, total: int | None) -> Iterator[Callable[[], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
    console = terminal.console(sys.stderr)
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task("", total=total, completed=files.num_done)
        yield lambda: bar.update(task, completed=files.num_done, description=speed.words())


class _Speed:
    """Errors, tokens a second and the time that is left of a run. total: lines of the input; None: not known."""

    def __init__(self, files: BatchFiles, total: int | None) -> None:
        self._files, self._total = files, total
        self._began_s, self._num_before, self._num_tokens = time.monotonic(), files.num_done, 0

    def add(self, entry: BatchEntry) -> None:
        """Count the tokens of an entry."""
        from paceline.server.batch_run import num_tokens_of

        if entry.response is not None:
            self._num_tokens += num_tokens_of(bytes(entry.response.body))

    def words(self) -> str:
        """Return the errors so far, the tokens a second, and the time that is left once a line has ended."""
        seconds = max(time.monotonic() - self._began_s, 1e-3)
        text = f"{terminal.counted(self._files.num_failed, 'error')}{option.shown_speed(self._num_tokens / seconds)}"
        num_ended = self._files.num_done - self._num_before
        if self._total is None or not num_ended:
            return text
        left_s = seconds / num_ended * max(self._total - self._files.num_done, 0)
        return f"{text}, {timedelta(seconds=round(left_s))} left"


def _summary(files: BatchFiles, output: Path, errors: Path) -> str:
    results = f"{terminal.counted(files.num_done - files.num_failed, 'result')} in {output}"
    return results + (f", {terminal.counted(files.num_failed, 'error')} in {errors}" if files.num_failed else "")
