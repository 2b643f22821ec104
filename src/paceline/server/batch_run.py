"""Run a file of requests in OpenAI's batch format: its lines, its retries, and the files of results and errors.

    lines of the input  ─ BatchFiles.next_window ─>  a window, sorted by prefix  ─ BatchSender ─>  results and errors

A window is all that is in memory of the input. The files of results and errors say what an earlier run has done, so that a run
that was interrupted goes on and each line is run once. `paceline batch run` and the batches of the server run through this.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import os
import random
import sqlite3
import stat
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, BinaryIO, Final, NamedTuple, Self, TypeAlias, TypeVar

import httpx
import msgspec

from paceline.errors import Aborted, EngineError, InvalidParams
from paceline.validation import open_file

ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
"""The values that a line's `url` may have."""

MAX_LINE_BYTES: Final = 64 << 20
_ENTRY_START: Final = b'{"id":"batch_req_'
_WINDOW_LINES: Final = 4096
_WINDOW_BYTES: Final = 32 << 20
_RETRIED: Final = frozenset({429, 502, 503, 504})
_LONGEST_WAIT_S: Final = 60.0
T = TypeVar("T")
_NOTHING: Final = msgspec.Raw(b"")


class BatchLine(msgspec.Struct, frozen=True):
    """A line of the input: one request.

    Attributes:
        custom_id: The caller's name of the request, which no other line has.
        url: The path of the endpoint.
        body: The JSON of the request's body.
        method: Always POST.
    """

    custom_id: Annotated[str, msgspec.Meta(min_length=1)]
    url: str
    body: msgspec.Raw
    method: str = "POST"


class BatchResponse(msgspec.Struct, frozen=True):
    """The response to a line. request_id: its X-Request-Id."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchFailure(msgspec.Struct, frozen=True):
    """The reason why a line has no response."""

    code: str
    message: str


class BatchEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the results or of the errors.

    Attributes:
        id: An id of the entry.
        custom_id: The id of the line; None if it has none.
        response: None if there was none.
        error: None if there was a response.
        line: The number of an input line that is no request, or that repeats an id.
        digest: A hash of the request and its model, or of the bytes of a line that is no request.
    """

    id: str
    custom_id: str | None
    response: BatchResponse | None
    error: BatchFailure | None
    line: int | None = None
    digest: str | None = None

    @property
    def succeeded(self) -> bool:
        """Whether the entry is a result, and not an error."""
        return self.response is not None and 200 <= self.response.status_code < 300


class _BodyPrefix(msgspec.Struct):
    """The members of a body by which lines with a common prefix are found: the model, and the order of templates."""

    model: msgspec.Raw = _NOTHING
    tools: msgspec.Raw = _NOTHING
    instructions: msgspec.Raw = _NOTHING
    messages: msgspec.Raw = _NOTHING
    prompt: msgspec.Raw = _NOTHING
    input: msgspec.Raw = _NOTHING
    stream: Any = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class _WithUsage(msgspec.Struct):
    usage: _Usage | None = None


class _ErrorBody(msgspec.Struct):
    code: str | None = None


class _WithError(msgspec.Struct):
    error: _ErrorBody


class _Named(msgspec.Struct):
    custom_id: str | None = None


class _Written(msgspec.Struct):
    """The members of an entry of an earlier run by which its line is known."""

    id: str
    custom_id: str | None
    digest: str
    line: int | None = None


_decode_line = msgspec.json.Decoder(BatchLine).decode
_decode_prefix = msgspec.json.Decoder(_BodyPrefix).decode
_decode_usage = msgspec.json.Decoder(_WithUsage).decode
_decode_error = msgspec.json.Decoder(_WithError).decode
_decode_named = msgspec.json.Decoder(_Named).decode
_decode_written = msgspec.json.Decoder(_Written).decode
_encode = msgspec.json.Encoder().encode


def parse_line(data: bytes | None, endpoints: Collection[str] = ENDPOINTS) -> BatchLine:
    """Return the request of an input line; None: a line that is too long. Raises `InvalidParams` if it is no request."""
    if data is None:
        raise InvalidParams(f"the line has more than {MAX_LINE_BYTES} bytes")
    try:
        line = _decode_line(data)
        head = _decode_prefix(line.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidParams(f"this is no request in OpenAI's batch format: {error}") from None
    if line.method != "POST":
        raise InvalidParams(f"method must be POST, not {line.method!r:.80}")
    if line.url not in endpoints:
        raise InvalidParams(f"url must be {' or '.join(endpoints)}, not {line.url!r:.80}")
    if head.stream not in (None, False):
        raise InvalidParams("stream: responses in a batch are not streamed; leave it out")
    return line


def num_tokens_of(body: bytes) -> int:
    """Return the tokens that a response reports as generated; of an embedding, the tokens of its input."""
    try:
        usage = _decode_usage(body).usage
    except msgspec.DecodeError:
        return 0
    return 0 if usage is None else usage.completion_tokens or usage.output_tokens or usage.prompt_tokens


class BatchFiles:
    """The input, results and errors of a run. Use it as a context manager; locks keep other runs from results and errors.

    Attributes:
        num_done: Entries of results and errors, earlier runs included.
        num_failed: Entries of errors, earlier runs included.

    Args:
        source: The input, which may be a pipe.
        results: Created if it is missing, and removed at the end if it has no entries then. An incomplete last line of an
            earlier run is cut off.
        errors: Likewise.
        endpoints: The values that a line's `url` may have.
        model: The model that runs the requests, as the caller names it. Entries of another model are refused.
        is_stopped: Whether to stop the reading of a file, by `Aborted`. Any thread.
    """

    def __init__(
        self,
        source: Path,
        results: Path,
        errors: Path,
        *,
        endpoints: Collection[str] = ENDPOINTS,
        model: str = "",
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._source, self._results, self._errors = source, results, errors
        self._endpoints, self._model, self._is_stopped = endpoints, model, is_stopped
        self.num_done = self.num_failed = 0
        self._open = ExitStack()
        self._out: dict[Path, int] = {}
        self._window: tuple[list[BatchLine], list[BatchEntry]] | None = None  # that `is_finished` has read

    def __enter__(self) -> Self:
        """Open the files and read which lines are done.

        Raises `InvalidParams` if a file holds other lines, another run uses it, or a file is named twice, `Aborted`, and
        `OSError`.
        """
        with ExitStack() as opened:
            self._input: BinaryIO = opened.enter_context(open_file(self._source, pipes=True))
            # A private database, which SQLite keeps in memory up to some megabytes, and else in a temporary file.
            self._ids = sqlite3.connect("", isolation_level=None, check_same_thread=False)
            opened.callback(self._ids.close)
            self._ids.execute("PRAGMA journal_mode = OFF")
            self._ids.execute("CREATE TABLE ids (name BLOB PRIMARY KEY, digest TEXT, is_read INTEGER) WITHOUT ROWID")
            self._ids.execute("CREATE TABLE refused (digest TEXT PRIMARY KEY, num_entries INTEGER) WITHOUT ROWID")
            self._ids.execute("BEGIN")  # never committed: its contents are in the files
            if self._results == self._errors:
                raise InvalidParams(
                    f"{self._errors} is named twice; give the results and the errors files of their own"
                )
            status = [os.fstat(self._input.fileno())]
            for output in (self._results, self._errors):
                opened.callback(self._close, output, is_new=not output.exists())
                self._out[output] = _open_output(output)
                status.append(os.fstat(self._out[output]))
            for number, path in enumerate((self._results, self._errors), 1):
                if any(os.path.samestat(status[number], other) for other in status[:number]):
                    raise InvalidParams(f"{path} is named twice; give the results and the errors files of their own")
            for path, descriptor in self._out.items():
                _lock(path, descriptor)
            for path, descriptor in self._out.items():
                os.ftruncate(descriptor, self._read_written(path))
            self._open = opened.pop_all()
        self._pending = self._read_pending()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def next_window(self) -> tuple[list[BatchLine], list[BatchEntry]]:
        """Return the next lines that are not done, and the errors of lines that are no requests; both empty at the end.

        Lines with a common prefix are side by side. Reads the input: for a thread.
        """
        if self._window is not None:
            window, self._window = self._window, None
            return window
        lines: list[BatchLine] = []
        refused: list[BatchEntry] = []
        num_bytes = 0
        for found in self._pending:
            if isinstance(found, BatchEntry):
                refused.append(found)
            else:
                lines.append(found)
                num_bytes += len(found.body)
            if len(lines) + len(refused) >= _WINDOW_LINES or num_bytes >= _WINDOW_BYTES:
                break
        lines.sort(key=_prefix_of)
        return lines, refused

    def is_finished(self) -> bool:
        """Return whether no line is left. Reads the next window: for a thread, and before the first `next_window`."""
        self._window = self.next_window()
        return not any(self._window)

    def write(self, entry: BatchEntry) -> None:
        """Append an entry to the results or the errors. It is written when this returns, also if the process is killed."""
        if entry.digest is None:
            ((digest,),) = self._ids.execute(
                "SELECT digest FROM ids WHERE name = ?", (_name_of(entry.custom_id or ""),)
            )
            entry = msgspec.structs.replace(entry, digest=digest)
        data = memoryview(_encode(entry) + b"\n")
        path = self._results if entry.succeeded else self._errors
        try:
            while data:
                data = data[os.write(self._out[path], data) :]
        except OSError as error:
            error.filename = str(path)
            raise
        self.num_done += 1
        self.num_failed += not entry.succeeded

    def count_lines(self) -> int | None:
        """Return the number of lines of the input that are not blank, read in a first pass; None if it is no regular file."""
        if not stat.S_ISREG(os.fstat(self._input.fileno()).st_mode):
            return None
        with open_file(self._source) as file:
            return sum(1 for line in self._lines(file) if line.data)

    def _lines(self, file: BinaryIO) -> Iterator[_NumberedLine]:
        for line in _numbered(file, MAX_LINE_BYTES):
            self._check_wanted()
            yield line

    def _check_wanted(self) -> None:
        if self._is_stopped():
            raise Aborted("the reading of a batch was stopped")

    def _read_pending(self) -> Iterator[BatchLine | BatchEntry]:
        for number, data, is_whole in self._lines(self._input):
            if not data:
                continue
            custom_id = None
            try:
                line = parse_line(data if is_whole else None, self._endpoints)
                custom_id = line.custom_id
                digest = _digest(self._model.encode(), line.url.encode(), bytes(line.body))
                written = self._note_read(custom_id, digest)
            except InvalidParams as error:
                digest, custom_id = _digest(data), custom_id or _id_in(data)
                if not self._take_refused(digest):
                    reason = BatchFailure("invalid_line", f"line {number}: {error}")
                    yield BatchEntry(new_id(), custom_id, None, reason, line=number, digest=digest)
                continue
            if written is None:
                yield line
            elif written != digest:
                raise InvalidParams(
                    f"{self._results} or {self._errors} has an entry of another request, or of another model, with the "
                    f"custom_id {custom_id!r:.200}; name other files, or remove the entry"
                )

    def _note_read(self, custom_id: str, digest: str) -> str | None:
        """Note that a line was read; return the digest in an earlier run's entry of its id, None if there is no entry.

        Raises `InvalidParams` if an earlier line has this id.
        """
        name = _name_of(custom_id)
        found = self._ids.execute("SELECT digest, is_read FROM ids WHERE name = ?", (name,)).fetchone()
        if found is not None and found[1]:
            raise InvalidParams(f"custom_id {custom_id!r:.200} is of an earlier line; give each line an id of its own")
        self._ids.execute("INSERT OR REPLACE INTO ids VALUES (?, ?, 1)", (name, digest))
        return None if found is None else str(found[0])

    def _take_refused(self, digest: str) -> bool:
        """Return whether an earlier run has an entry of a refused line with these bytes that no line before has taken."""
        taken = self._ids.execute(
            "UPDATE refused SET num_entries = num_entries - 1 WHERE digest = ? AND num_entries > 0", (digest,)
        )
        return taken.rowcount > 0

    def _read_written(self, path: Path) -> int:
        """Note the lines that have entries in results or errors; return the bytes of its complete lines."""
        complete = 0
        with path.open("rb") as file:
            for number, data in enumerate(file, 1):
                self._check_wanted()
                is_whole = data.endswith(b"\n")
                if not is_whole and data[: len(_ENTRY_START)] == _ENTRY_START[: len(data)]:
                    break
                try:
                    written = _decode_written(data) if is_whole else None
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    written = None
                if written is None:
                    raise InvalidParams(
                        f"{path} exists, and its line {number} is none of a batch's results; name another file"
                    )
                if written.line is not None:
                    self._ids.execute(
                        "INSERT INTO refused VALUES (?, 1) ON CONFLICT DO UPDATE SET num_entries = num_entries + 1",
                        (written.digest,),
                    )
                elif written.custom_id is not None:
                    values = _name_of(written.custom_id), written.digest
                    self._ids.execute("INSERT OR IGNORE INTO ids VALUES (?, ?, 0)", values)
                complete += len(data)
                self.num_done += 1
                self.num_failed += path == self._errors
        return complete

    def _close(self, path: Path, *, is_new: bool) -> None:
        descriptor = self._out.pop(path, None)
        if descriptor is None:
            return
        try:
            if is_new and not os.fstat(descriptor).st_size:
                with suppress(InvalidParams):  # another run's
                    _lock(path, descriptor)
                    path.unlink()
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _open_output(path: Path) -> int:
    """Open results or errors for entries. Raises `OSError`, also for a pipe or a device."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a regular file", str(path))
    return descriptor


def _lock(path: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_locked = os.path.samestat(
            os.fstat(descriptor), path.stat()
        )  # a run that ends may have removed an empty file
    except (BlockingIOError, FileNotFoundError):
        is_locked = False
    if not is_locked:
        raise InvalidParams(f"another run writes {path}; wait for it, or name another file")


class _NumberedLine(NamedTuple):
    """A line without blanks around it, and its number from 1. is_whole: False for the beginning of a line that is too long."""

    number: int
    data: bytes
    is_whole: bool


def _numbered(file: BinaryIO, max_bytes: int) -> Iterator[_NumberedLine]:
    number = 0
    while data := file.readline(max_bytes + 1):
        number += 1
        is_whole = len(data) <= max_bytes or data.endswith(b"\n")
        end = data
        while not end.endswith(b"\n") and (end := file.readline(_WINDOW_BYTES)):
            is_whole = False
        yield _NumberedLine(number, data.strip(), is_whole)


def _id_in(data: bytes) -> str | None:
    """Return the id of a line that is no request; None if there is none."""
    try:
        return _decode_named(data).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _name_of(custom_id: str) -> bytes:
    return hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _digest(*parts: bytes) -> str:
    found = hashlib.blake2b(digest_size=12)
    for part in parts:
        found.update(len(part).to_bytes(8))
        found.update(part)
    return found.hexdigest()


def _prefix_of(line: BatchLine) -> tuple[str, bytes, bytes]:
    head = _decode_prefix(line.body)
    return (
        line.url,
        bytes(head.model),
        b"".join((head.tools, head.instructions, head.messages, head.prompt, head.input)),
    )


def new_id() -> str:
    """Return a new id of an entry."""
    return f"batch_req_{os.urandom(12).hex()}"


SendLine: TypeAlias = Callable[[BatchLine], Awaitable[BatchEntry]]
"""Runs a line and returns its result or error, as `BatchSender` does."""


class BatchSender:
    """Sends lines over an HTTP client, which may call an application in this process.

    A response with status 429, 502, 503 or 504, and a connection that fails, are tried again after Retry-After, or after a time
    that doubles; a request that ran out of its own time is not. After the last retry the line is an error if other lines had
    responses meanwhile. With 429 it is then tried on: the server has a limit, and serves.

    Args:
        client: Its base URL is the server's.
        max_retries: Attempts after the first.
        backoff_s: Seconds before the second attempt.
        max_wait_s: Most seconds between two attempts.
        room: Returns a context manager that is held during each attempt of a line.
        max_breaks: Attempts that may end with 502, 504 or without a response; after one more the line is an error, whatever
            other lines do. None: no such limit.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        max_retries: int = 8,
        backoff_s: float = 0.5,
        *,
        max_wait_s: float = _LONGEST_WAIT_S,
        room: Callable[[BatchLine], AbstractAsyncContextManager[Any]] = lambda _: nullcontext(),
        max_breaks: int | None = None,
    ) -> None:
        self._client, self._max_retries, self._backoff_s, self._max_wait_s = client, max_retries, backoff_s, max_wait_s
        self._room, self._max_breaks = room, max_breaks
        self._num_served = 0

    async def __call__(self, line: BatchLine) -> BatchEntry:
        """SendLine a line; return its result or error. Raises `EngineError` if the server cannot be reached or serves nothing."""
        num_served, num_left, num_breaks, backoff_s = self._num_served, self._max_retries, 0, self._backoff_s
        while True:
            outcome = await self._attempt(line)
            if isinstance(outcome, httpx.Response):
                if outcome.status_code not in _RETRIED or _is_deadline(outcome):
                    self._num_served += 1
                    return _entry_of(line, outcome)
            elif not isinstance(outcome, httpx.TransportError):  # such as a body that cannot be decompressed
                return _without_response(line, "invalid_response", outcome)
            status = outcome.status_code if isinstance(outcome, httpx.Response) else None
            num_breaks += status not in (429, 503)
            is_broken = self._max_breaks is not None and num_breaks > self._max_breaks
            if num_left == 0 and status == 429 and self._num_served > num_served:
                num_served, num_left = self._num_served, self._max_retries + 1
            if num_left == 0 or is_broken:
                break
            num_left -= 1
            await asyncio.sleep(self._wait_s(outcome, backoff_s))
            backoff_s = min(2 * backoff_s, self._max_wait_s)
        if not is_broken and self._num_served == num_served:
            if isinstance(outcome, httpx.Response):
                raise EngineError(f"the server replied with status {outcome.status_code}: {outcome.text[:400]}")
            raise EngineError(f"the server at {self._client.base_url} cannot be reached: {outcome!r:.200}")
        if isinstance(outcome, httpx.Response):
            return _entry_of(line, outcome)
        return _without_response(line, "connection_failed", outcome)

    def _wait_s(self, outcome: httpx.Response | httpx.RequestError, backoff_s: float) -> float:
        if isinstance(outcome, httpx.Response):
            retry_after = outcome.headers.get("retry-after", "")
            if retry_after.isdecimal():
                return min(float(retry_after), self._max_wait_s)
        return min(backoff_s, self._max_wait_s) * random.uniform(0.5, 1.0)  # noqa: S311 - no secret

    async def _attempt(self, line: BatchLine) -> httpx.Response | httpx.RequestError:
        try:
            headers = {"content-type": "application/json"}
            async with self._room(line):
                return await self._client.post(line.url, content=bytes(line.body), headers=headers)
        except httpx.RequestError as error:
            return error


def _is_deadline(response: httpx.Response) -> bool:
    """Return whether a request ran out of the time that it has, and not a proxy's: once more it would compute as long."""
    try:
        code = _decode_error(response.content).error.code
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return response.status_code == httpx.codes.GATEWAY_TIMEOUT and code in ("deadline", "deadline_exceeded")


def _without_response(line: BatchLine, code: str, error: httpx.RequestError) -> BatchEntry:
    return BatchEntry(new_id(), line.custom_id, None, BatchFailure(code, f"{error!r:.400}"))


def _entry_of(line: BatchLine, response: httpx.Response) -> BatchEntry:
    try:
        body = response.content
        if b"\n" in body:
            body = _encode(msgspec.json.decode(body))  # an entry is one line
        else:
            msgspec.json.decode(body, type=msgspec.Raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        body = _encode(response.text)
    request_id = response.headers.get("x-request-id", "")
    return BatchEntry(
        new_id(), line.custom_id, BatchResponse(response.status_code, request_id, msgspec.Raw(body)), None
    )


async def run_in_thread(function: Callable[[], T]) -> T:
    """Call a function in a thread, as `asyncio.to_thread` does. If this is cancelled, it ends after the function."""
    work = asyncio.ensure_future(asyncio.to_thread(function))
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait((work,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        work.exception()  # otherwise unread
        raise cancelled
    return work.result()


async def run_batch(
    files: BatchFiles, send: SendLine, num_at_once: int, on_entry: Callable[[BatchEntry], object] = lambda _: None
) -> None:
    """Run all lines that are not done, and write their results and errors as they end.

    Lines that run when this is cancelled have no entries; a later run repeats them. Raises as `BatchSender`, and `OSError`.

    Args:
        files: Opened.
        send: Sends a line.
        num_at_once: Lines that are sent at once.
        on_entry: Called after an entry was written.
    """

    async def write(entries: Sequence[BatchEntry]) -> None:
        def write_all() -> None:
            for entry in entries:
                files.write(entry)

        if entries:
            await run_in_thread(write_all)
        for entry in entries:
            on_entry(entry)

    waiting: deque[BatchLine] = deque()
    running: set[asyncio.Future[BatchEntry]] = set()
    try:
        while True:
            if not waiting:
                lines, refused = await run_in_thread(files.next_window)
                waiting.extend(lines)
                await write(refused)
                if refused and not lines:
                    continue
            while waiting and len(running) < num_at_once:
                running.add(asyncio.ensure_future(send(waiting.popleft())))
            if not running:
                return
            ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            failures = [error for task in ended if (error := task.exception()) is not None]
            await write([task.result() for task in ended if task.exception() is None])
            if failures:
                raise failures[0]
    finally:
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
