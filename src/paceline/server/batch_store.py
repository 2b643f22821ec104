"""Files and batches of clients, which survive restarts: records in SQLite, contents in files beside. Blocking; any thread.

FOLDER/batches.sqlite      records of files and batches, as JSON, by tenant
FOLDER/files/ID            the contents of a file
FOLDER/lock                held by the server that uses the folder
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import sqlite3
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, TypeVar

import msgspec

from paceline.errors import CapacityError, EngineError, InvalidParams, Unsupported
from paceline.server.batch_run import BatchFiles

MAX_FILES: Final = 10_000
"""Files of a tenant."""
MAX_BYTES: Final = 16 << 30
"""Bytes of a tenant's files."""

FilePurpose = Literal["batch", "batch_output"]
BatchStatus = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"
]
OPEN: Final = ("validating", "in_progress", "finalizing", "cancelling")
"""The statuses of a batch that has not ended."""


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file, in OpenAI's form."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: FilePurpose
    expires_at: int | None = None
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"


class InputError(msgspec.Struct, frozen=True):
    """A reason why a batch failed. line: of the input file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class InputErrors(msgspec.Struct, frozen=True):
    """The reasons why a batch failed."""

    data: list[InputError]
    object: Literal["list"] = "list"


class RequestCounts(msgspec.Struct):
    """Counts of a batch's requests: all, requests with a result, and requests with an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class StoredBatch(msgspec.Struct, kw_only=True):
    """A batch, in OpenAI's form."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: BatchStatus = "validating"
    metadata: dict[str, str] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: InputErrors | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    object: Literal["batch"] = "batch"


class BatchOwner(msgspec.Struct, frozen=True):
    """The client that a batch runs for. key_digest: of its API key, in hexadecimal digits."""

    tenant: str = ""
    key_digest: str = ""


Record = TypeVar("Record", StoredFile, StoredBatch)

_TABLES: Final[Mapping[type[msgspec.Struct], str]] = {StoredFile: "files", StoredBatch: "batches"}
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, tenant TEXT NOT NULL, purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL, expires_at INTEGER, record BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS files_of_tenant ON files (tenant, number);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, tenant TEXT NOT NULL, is_open INTEGER NOT NULL,
    owner BLOB NOT NULL, record BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS batches_of_tenant ON batches (tenant, number);
PRAGMA user_version = 1;
"""
_VERSION: Final = 1


def database_of(folder: Path) -> Path:
    """Return the database of a folder; it exists once a file was uploaded."""
    return folder / "batches.sqlite"


class BatchStore:
    """The files and batches of one server.

    Raises `CapacityError` if another server uses the folder, `Unsupported` if a newer version wrote it, `EngineError` if its
    database is damaged, and `OSError`.
    """

    def __init__(self, folder: Path) -> None:
        self._files = folder / "files"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._files.mkdir(mode=0o700, exist_ok=True)
        self._lock = threading.Lock()
        with ExitStack() as opened:
            lock_file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            opened.callback(os.close, lock_file)
            try:
                fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CapacityError(
                    f"another server has the batches in {folder}; start this one with --batch-folder FOLDER"
                ) from None
            try:
                self._db = sqlite3.connect(database_of(folder), isolation_level=None, check_same_thread=False)
                opened.callback(self._db.close)
                if self._db.execute("PRAGMA user_version").fetchone()[0] > _VERSION:
                    raise Unsupported(
                        f"a newer version has written the batches in {folder}; name another --batch-folder"
                    )
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.executescript(_SCHEMA)
                self._delete_unknown()
            except (sqlite3.DatabaseError, msgspec.DecodeError) as error:
                raise EngineError(
                    f"the batches in {folder} cannot be read ({error}); repair its database, or name another --batch-folder"
                ) from None
            self._opened = opened.pop_all()

    def _delete_unknown(self) -> None:
        """Delete contents of files that have no record: of an upload that did not end."""
        known = {file_id for (file_id,) in self._db.execute("SELECT id FROM files")}
        known.update(*(output_ids(batch) for batch, _ in self.open_batches()))
        for path in self._files.iterdir():
            if path.name not in known:
                path.unlink()

    def close(self) -> None:
        """Close the database, and leave the folder to another server."""
        with self._lock:
            self._opened.close()

    # ---- files

    def path(self, file_id: str) -> Path:
        """Return the path of a file's contents. file_id: of a record, or made by this module."""
        return self._files / file_id

    def add_file(self, tenant: str, record: StoredFile, content: BinaryIO | None) -> None:
        """Add a file. content: None if it is in place already. Raises `CapacityError` if the tenant has too many."""
        with self._lock:
            (count, size) = self._db.execute(
                "SELECT count(*), coalesce(sum(bytes), 0) FROM files WHERE tenant = ?", (tenant,)
            ).fetchone()
        if content is not None:
            if count >= MAX_FILES or size + record.bytes > MAX_BYTES:
                raise CapacityError(
                    f"there are {count} files with {size} bytes, and may be {MAX_FILES} with {MAX_BYTES}; delete some"
                )
            path = self.path(record.id)
            try:
                with path.open("xb") as target:
                    shutil.copyfileobj(content, target)
                    target.flush()
                    os.fsync(target.fileno())
            except BaseException:
                path.unlink(missing_ok=True)
                raise
        row = (record.id, tenant, record.purpose, record.bytes, record.expires_at, msgspec.json.encode(record))
        self._execute(
            "INSERT OR REPLACE INTO files (id, tenant, purpose, bytes, expires_at, record) VALUES (?, ?, ?, ?, ?, ?)",
            row,
        )

    def file(self, tenant: str, file_id: str) -> StoredFile | None:
        """Return a file of the tenant; None if there is no such file."""
        return self._one(StoredFile, tenant, file_id)

    def files(
        self, tenant: str, after: str | None, limit: int, *, descending: bool, purpose: str | None = None
    ) -> tuple[list[StoredFile], bool]:
        """Return files of the tenant after the file `after`, and whether there are more.

        Raises `InvalidParams` if there is no such file.
        """
        of = {"tenant": tenant} | ({} if purpose is None else {"purpose": purpose})
        return self._page(StoredFile, of, after, limit, descending=descending)

    def delete_file(self, tenant: str, file_id: str) -> bool:
        """Delete a file; return whether it existed. Raises `InvalidParams` if an open batch reads it."""
        if self.file(tenant, file_id) is None:
            return False
        for batch, _ in self.open_batches():
            if batch.input_file_id == file_id:
                raise InvalidParams(f"file_id: the batch {batch.id} reads this file; cancel it first")
        self._execute("DELETE FROM files WHERE id = ?", (file_id,))
        self.path(file_id).unlink(missing_ok=True)
        return True

    def delete_expired(self, now_s: float) -> None:
        """Delete expired files, except inputs of open batches."""
        read = {batch.input_file_id for batch, _ in self.open_batches()}
        with self._lock:
            found = self._db.execute("SELECT id, tenant FROM files WHERE expires_at < ?", (now_s,)).fetchall()
        for file_id, tenant in found:
            if file_id not in read:
                with suppress(OSError):
                    self.delete_file(tenant, file_id)

    # ---- batches

    def put_batch(self, batch: StoredBatch, owner: BatchOwner | None = None) -> None:
        """Store a batch as it is now. owner: of a new batch."""
        with self._lock:  # the latest call stores the latest state
            record, is_open = msgspec.json.encode(batch), batch.status in OPEN
            if owner is None:
                values = (record, is_open, batch.id)
                self._db.execute("UPDATE batches SET record = ?, is_open = ? WHERE id = ?", values)
                return
            row = (batch.id, owner.tenant, is_open, msgspec.json.encode(owner), record)
            self._db.execute("INSERT INTO batches (id, tenant, is_open, owner, record) VALUES (?, ?, ?, ?, ?)", row)

    def batch(self, tenant: str, batch_id: str) -> StoredBatch | None:
        """Return a batch of the tenant; None if there is no such batch."""
        return self._one(StoredBatch, tenant, batch_id)

    def batches(self, tenant: str, after: str | None, limit: int) -> tuple[list[StoredBatch], bool]:
        """Return batches of the tenant, the latest first, and whether there are more. Raises `InvalidParams` for `after`."""
        return self._page(StoredBatch, {"tenant": tenant}, after, limit, descending=True)

    def open_batches(self) -> list[tuple[StoredBatch, BatchOwner]]:
        """Return the open batches of all tenants, the oldest first."""
        with self._lock:
            rows = self._db.execute("SELECT record, owner FROM batches WHERE is_open ORDER BY number").fetchall()
        decode = msgspec.json.decode
        return [(decode(record, type=StoredBatch), decode(owner, type=BatchOwner)) for record, owner in rows]

    def output_files(self, batch: StoredBatch) -> BatchFiles:
        """Return the files of a batch's run."""
        results, errors = (self.path(file_id) for file_id in output_ids(batch))
        return BatchFiles(self.path(batch.input_file_id), results, errors, endpoints=(batch.endpoint,))

    # ---- SQL

    def _execute(self, statement: str, values: tuple[Any, ...]) -> None:
        with self._lock:
            self._db.execute(statement, values)

    def _one(self, kind: type[Record], tenant: str, record_id: str) -> Record | None:
        query = f"SELECT record FROM {_TABLES[kind]} WHERE tenant = ? AND id = ?"  # noqa: S608 - a table of ours
        with self._lock:
            row = self._db.execute(query, (tenant, record_id)).fetchone()
        return None if row is None else msgspec.json.decode(row[0], type=kind)

    def _page(
        self, kind: type[Record], of: Mapping[str, str], after: str | None, limit: int, *, descending: bool
    ) -> tuple[list[Record], bool]:
        """Return records after the record `after`, and whether there are more. of: values of columns, by the columns' names."""
        table, (order, sign) = _TABLES[kind], ("DESC", "<") if descending else ("ASC", ">")
        conditions = [f"{name} = ?" for name in of]
        values: list[str] = [*of.values()]
        if after is not None:
            if self._one(kind, of["tenant"], after) is None:
                raise InvalidParams(f"after: there is no {after[:80]!r} in this list")
            conditions.append(f"number {sign} (SELECT number FROM {table} WHERE id = ?)")  # noqa: S608
            values.append(after)
        query = f"SELECT record FROM {table} WHERE {' AND '.join(conditions)} ORDER BY number {order} LIMIT ?"  # noqa: S608
        with self._lock:
            rows = self._db.execute(query, (*values, limit + 1)).fetchall()
        return [msgspec.json.decode(row[0], type=kind) for row in rows[:limit]], len(rows) > limit


def new_file_id() -> str:
    """Return a new id of a file."""
    return f"file-{secrets.token_hex(12)}"


def new_batch_id() -> str:
    """Return a new id of a batch."""
    return f"batch_{secrets.token_hex(12)}"


def output_ids(batch: StoredBatch) -> tuple[str, str]:
    """Return the ids that the files of a batch's results and errors have once it has ended."""
    name = batch.id.removeprefix("batch_")
    return f"file-{name}-output", f"file-{name}-errors"
