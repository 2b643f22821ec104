"""The batches of a server: each runs as a task, through the server's own application and below interactive requests.

    validating -> in_progress -> finalizing -> completed
         |             |-> expired, after 24 hours
         |-> failed    |-> cancelling -> cancelled

On the event loop; files and the store are used in threads. A server that stops leaves its batches open, and the next server with
the folder goes on with them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import httpx
import msgspec
from starlette.types import Receive, Scope, Send

from paceline.errors import CapacityError, EngineError, PacelineError
from paceline.server.api_errors import ApiException, ServerDraining, not_supported, strip_folders
from paceline.server.batch_run import (
    BatchEntry,
    BatchFailure,
    BatchFiles,
    BatchLine,
    BatchSender,
    new_id,
    run_batch,
    run_in_thread,
)
from paceline.server.batch_store import (
    BatchOwner,
    BatchStatus,
    BatchStore,
    InputError,
    InputErrors,
    StoredBatch,
    StoredFile,
    database_of,
    output_ids,
)
from paceline.server.in_flight import TurnQueue
from paceline.server.request_context import RequestContext

if TYPE_CHECKING:
    from fastapi import FastAPI

    from paceline.server.service import Server

PRIORITY: Final = -1000
"""Of the requests of batches: an interactive request of the tenant that arrives within hours goes first."""
WINDOW_S: Final = 24 * 3600
FILE_LIFE_S: Final = 30 * 24 * 3600
MAX_REQUESTS: Final = 50_000
MAX_OPEN: Final = 100
"""Batches of a tenant that have not ended."""

_MAX_ERRORS: Final = 100  # that are listed
_MAX_RETRIES: Final = 8640  # about a day, in steps of at most ten seconds
_RUNNING_OF_TENANT: Final = 2  # batches, each with a window of its input in memory
_MAX_BREAKS: Final = 3  # each may have computed for long
_RETRY_S: Final = 10.0
_SWEEP_S: Final = 3600.0
_DEFAULT_SLOTS: Final = 8
_log = logging.getLogger("paceline.server")


class BatchJobs:
    """The files and batches of a server, and the tasks of the batches that have not ended.

    Args:
        app: The application, whose `state.service` is the server.
        server: The server.
        clock: Returns the time in Unix seconds.
    """

    def __init__(self, app: FastAPI, server: Server, clock: Callable[[], float] = time.time) -> None:
        settings = server.settings
        self._app, self._server, self._clock = app, server, clock
        self._folder = settings.batch_folder
        self._store: BatchStore | None = None
        self._opening = asyncio.Lock()
        self._is_stopped = False
        self._tasks: dict[str, tuple[StoredBatch, asyncio.Task[None]]] = {}
        self._checking = asyncio.Lock()
        self._running: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(_RUNNING_OF_TENANT))
        self._sweeping: asyncio.Task[None] | None = None
        num_slots = settings.engine_options.get("num_slots") or _DEFAULT_SLOTS
        # A slot stays free, so that an interactive request never waits for the end of a line.
        self._num_at_once = max(1, num_slots - 1)
        self._slots = TurnQueue(self._num_at_once, self._num_at_once)

    async def start(self) -> None:
        """Go on with the batches of an earlier server, if there are any."""
        if self._folder is not None and database_of(self._folder).exists():
            try:
                await self.store()
            except (ApiException, PacelineError, OSError) as error:
                _log.warning("batches are not run: %s", error)

    async def stop(self) -> None:
        """Stop the batches, which stay open. Idempotent."""
        self._is_stopped = True
        tasks = [task for _, task in self._tasks.values()]
        if self._sweeping is not None:
            tasks.append(self._sweeping)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        async with self._opening:
            if self._store is not None:
                await asyncio.to_thread(self._store.close)
            self._store = None

    async def store(self) -> BatchStore:
        """Return the store, opened if need be.

        Raises `ApiException` if there is none, or the server ends, and as `BatchStore`.
        """
        async with self._opening:
            if self._is_stopped:
                raise ServerDraining
            if self._folder is None:
                raise not_supported("this server keeps no files and batches; start it with --batch-folder FOLDER")
            if self._store is None:
                store = await asyncio.to_thread(BatchStore, self._folder)
                try:
                    opened = await asyncio.to_thread(store.open_batches)
                except BaseException:
                    store.close()
                    raise
                self._store, self._sweeping = store, asyncio.create_task(self._sweep(store))
                for batch, owner in opened:
                    self._begin(store, batch, owner)
            return self._store

    async def create(self, batch: StoredBatch, owner: BatchOwner) -> None:
        """Store a batch and begin it. Raises `CapacityError` if the tenant has too many, and as `store`."""
        store = await self.store()
        opened = await asyncio.to_thread(store.open_batches)
        if sum(other.tenant == owner.tenant for _, other in opened) >= MAX_OPEN:
            raise CapacityError(f"{MAX_OPEN} batches have not ended, which is the limit; try again later")
        await asyncio.to_thread(store.put_batch, batch, owner)
        self._begin(store, batch, owner)

    async def batch(self, tenant: str, batch_id: str) -> StoredBatch | None:
        """Return a batch of the tenant, with its present counts; None if there is no such batch. Raises as `store`."""
        found = await asyncio.to_thread((await self.store()).batch, tenant, batch_id)
        return self.with_current_counts(found) if found is not None else None

    def with_current_counts(self, batch: StoredBatch) -> StoredBatch:
        """Return a stored batch with its current counts, which are stored when the batch ends."""
        running = self._tasks.get(batch.id)
        return batch if running is None else running[0]

    async def cancel(self, batch: StoredBatch) -> None:
        """Cancel a batch of `batch` that has not ended; a batch that is being cancelled stays as it is."""
        running = self._tasks.get(batch.id)
        if running is None or batch.status not in ("validating", "in_progress"):
            return
        store = await self.store()
        if batch.status not in ("validating", "in_progress"):  # it ended just now
            return
        batch.status, batch.cancelling_at = "cancelling", int(self._clock())
        running[1].cancel()
        await asyncio.to_thread(store.put_batch, batch)

    # ---- tasks

    def _begin(self, store: BatchStore, batch: StoredBatch, owner: BatchOwner) -> None:
        task = asyncio.create_task(self._run(store, batch, owner))
        self._tasks[batch.id] = batch, task
        task.add_done_callback(lambda _: self._tasks.pop(batch.id, None))

    async def _run(self, store: BatchStore, batch: StoredBatch, owner: BatchOwner) -> None:
        try:
            await self._run_to_end(store, batch, owner)
        except Exception as error:  # noqa: BLE001 - reported by the batch and the log
            _log.exception("the batch %s failed", batch.id)
            batch.errors = InputErrors([InputError("internal_error", strip_folders(str(error))[:400])])
            with suppress(Exception):
                await run_in_thread(lambda: _add_outputs(store, batch, owner, int(self._clock())))
            with suppress(Exception):
                await self._set(store, batch, "failed")

    async def _run_to_end(self, store: BatchStore, batch: StoredBatch, owner: BatchOwner) -> None:
        outcome: BatchStatus = "completed"
        try:
            async with asyncio.timeout(max(0.0, batch.expires_at - self._clock())):
                if batch.status == "validating":
                    async with self._checking:  # each reads a window of its input
                        errors = await run_in_thread(lambda: _check(store, batch))
                    if errors:
                        batch.errors = InputErrors(errors)
                        await self._set(store, batch, "failed")
                        return
                    await self._set(store, batch, "in_progress")
                if batch.status == "in_progress":
                    await self._server.loaded.wait()
                    async with self._running[owner.tenant]:
                        await self._run_lines(store, batch, owner)
        except TimeoutError:
            outcome = "expired"
        except asyncio.CancelledError:
            if batch.status != "cancelling":  # the server stops
                raise
            asyncio.current_task().uncancel()  # type: ignore[union-attr] # this is a task
        if batch.status == "cancelling":
            outcome = "cancelled"
        elif outcome == "completed":
            await self._set(store, batch, "finalizing")
        await run_in_thread(lambda: _finish(store, batch, owner, outcome, int(self._clock())))
        await self._set(store, batch, outcome)

    async def _run_lines(self, store: BatchStore, batch: StoredBatch, owner: BatchOwner) -> None:
        async with self._client(owner) as client:
            sender = BatchSender(
                client,
                _MAX_RETRIES,
                max_wait_s=_RETRY_S,
                room=lambda line: self._in_turn(owner.tenant, _num_sequences(line)),
                max_breaks=_MAX_BREAKS,
            )
            while True:
                opened = ExitStack()
                try:
                    files = await run_in_thread(partial(opened.enter_context, store.output_files(batch)))
                    count = _counter(batch, files)
                    count(None)
                    await run_batch(files, sender, self._num_at_once, count)
                except FileNotFoundError:
                    raise
                except (EngineError, OSError) as error:  # such as a full disk
                    _log.warning("the batch %s waits: %s", batch.id, error)
                else:
                    return
                finally:
                    await run_in_thread(opened.close)
                await asyncio.sleep(_RETRY_S)

    @asynccontextmanager
    async def _in_turn(self, tenant: str, num_slots: int) -> AsyncIterator[None]:
        """Hold slots during the block. Tenants take turns."""
        turn = self._slots.enter(tenant, num_slots)
        try:
            await turn
            yield
        finally:
            if not turn.cancelled():
                self._slots.leave(tenant, num_slots)

    def _client(self, owner: BatchOwner) -> httpx.AsyncClient:
        """Return a client of the server's own application, whose requests are the owner's."""
        digest = bytes.fromhex(owner.key_digest)

        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            context = RequestContext.of(scope)
            context.is_internal, context.fixed_priority = True, PRIORITY
            context.tenant, context.key_digest = owner.tenant, digest
            context.account = self._server.kept.key_accounts.of_batch(digest, owner.tenant)
            await self._app(scope, receive, send)

        base = f"http://localhost{self._server.settings.root_path}"
        return httpx.AsyncClient(transport=httpx.ASGITransport(call), base_url=base, timeout=httpx.Timeout(None))

    async def _set(self, store: BatchStore, batch: StoredBatch, status: BatchStatus) -> None:
        """Set and store the status of a batch, with its time."""
        batch.status = status
        if status != "validating":
            setattr(batch, f"{status}_at", int(self._clock()))
        await run_in_thread(lambda: store.put_batch(batch))

    async def _sweep(self, store: BatchStore) -> None:
        while True:
            try:
                await run_in_thread(lambda: store.delete_expired(self._clock()))
            except Exception:  # noqa: BLE001 - logged, and tried again
                _log.exception("expired files of batches are not deleted")
            await asyncio.sleep(_SWEEP_S)


def _counter(batch: StoredBatch, files: BatchFiles) -> Callable[[Any], None]:
    def count(_: object) -> None:
        batch.request_counts.completed = files.num_done - files.num_failed
        batch.request_counts.failed = files.num_failed

    return count


def _check(store: BatchStore, batch: StoredBatch) -> list[InputError]:
    """Count the requests of a new batch; return the errors of lines that are no requests. In a thread."""
    errors: list[InputError] = []
    total = 0
    with store.output_files(batch) as files:
        while any(window := files.next_window()):
            lines, refused = window
            total += len(lines)
            for entry in refused[: _MAX_ERRORS - len(errors)]:
                assert entry.error is not None  # noqa: S101 - of a refused line
                errors.append(InputError(entry.error.code, entry.error.message, entry.line))
    batch.request_counts.total = total
    if not errors and not total:
        errors.append(InputError("empty_file", "the input file has no requests"))
    if not errors and total > MAX_REQUESTS:
        errors.append(InputError("too_many_requests", f"the input file has {total} requests, more than {MAX_REQUESTS}"))
    return errors


def _finish(store: BatchStore, batch: StoredBatch, owner: BatchOwner, outcome: BatchStatus, now: int) -> None:
    """Write the errors of lines that were not run, and add the files of results and errors to the store. In a thread."""
    with store.output_files(batch) as files:
        while outcome != "completed" and any(window := files.next_window()):
            for line in window[0]:
                reason = BatchFailure(f"batch_{outcome}", f"the batch was {outcome} before this request had a response")
                files.write(BatchEntry(new_id(), line.custom_id, None, reason))
            for entry in window[1]:
                files.write(entry)
        _counter(batch, files)(None)
    _add_outputs(store, batch, owner, now)


def _add_outputs(store: BatchStore, batch: StoredBatch, owner: BatchOwner, now: int) -> None:
    """Add the files of results and errors to the store, if they have entries."""
    found: list[str | None] = []
    for file_id, kind in zip(output_ids(batch), ("output", "errors"), strict=True):
        path = store.path(file_id)
        size = path.stat().st_size if path.exists() else 0
        if not size:
            path.unlink(missing_ok=True)
            found.append(None)
            continue
        record = StoredFile(
            id=file_id,
            bytes=size,
            created_at=now,
            filename=f"{batch.id}_{kind}.jsonl",
            purpose="batch_output",
            expires_at=now + FILE_LIFE_S,
        )
        store.add_file(owner.tenant, record, None)
        found.append(file_id)
    batch.output_file_id, batch.error_file_id = found


class _Sequences(msgspec.Struct):
    """The members of a body that decide how many sequences it generates."""

    n: Any = None
    prompt: Any = None


def _num_sequences(line: BatchLine) -> int:
    """Return how many slots a line takes: choices of each of its prompts."""
    try:
        body = msgspec.json.decode(line.body, type=_Sequences)
    except msgspec.DecodeError:  # the route refuses it
        return 1
    is_list = isinstance(body.prompt, list) and bool(body.prompt) and not isinstance(body.prompt[0], int)
    return max(1, body.n if isinstance(body.n, int) else 1) * (len(body.prompt) if is_list else 1)
