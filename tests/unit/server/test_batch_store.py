"""The store of files and batches: limits and expiry."""

from __future__ import annotations

import io
import sqlite3
from pathlib import Path

import pytest

from paceline.errors import CapacityError, EngineError, InvalidParams, Unsupported
from paceline.server import batch_store
from paceline.server.batch_store import (
    BatchOwner,
    BatchStore,
    StoredBatch,
    StoredFile,
    database_of,
    new_batch_id,
    new_file_id,
)


def file(size: int = 3, expires_at: int | None = None) -> StoredFile:
    return StoredFile(
        id=new_file_id(), bytes=size, created_at=1, filename="a.jsonl", purpose="batch", expires_at=expires_at
    )


def add(store: BatchStore, tenant: str = "", expires_at: int | None = None) -> str:
    record = file(expires_at=expires_at)
    store.add_file(tenant, record, io.BytesIO(b"abc"))
    return record.id


@pytest.mark.parametrize(("limit", "value"), [("MAX_FILES", 2), ("MAX_BYTES", 6)])
def test_a_tenant_has_so_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int) -> None:
    """In number and in bytes; others have as many, and a deleted file makes room."""
    monkeypatch.setattr(batch_store, limit, value)
    store = BatchStore(tmp_path)
    first = add(store, "one")
    add(store, "one")
    with pytest.raises(CapacityError, match="delete some"):
        add(store, "one")
    assert len(list((tmp_path / "files").iterdir())) == 2
    add(store, "two")
    assert store.delete_file("one", first)
    add(store, "one")
    store.close()


def test_expired_files_are_deleted_unless_a_batch_reads_them(tmp_path: Path) -> None:
    """Records and contents; a batch that has ended reads none."""
    store = BatchStore(tmp_path)
    old, read, new = add(store, expires_at=10), add(store, expires_at=10), add(store, expires_at=30)
    batch = StoredBatch(
        id=new_batch_id(),
        endpoint="/v1/completions",
        input_file_id=read,
        completion_window="24h",
        created_at=1,
        expires_at=9,
    )
    store.put_batch(batch, BatchOwner())
    store.delete_expired(20)
    assert [store.file("", each) is not None for each in (old, read, new)] == [False, True, True]
    assert not store.path(old).exists()
    with pytest.raises(InvalidParams, match="cancel it first"):
        store.delete_file("", read)
    batch.status = "completed"
    store.put_batch(batch)
    store.delete_expired(20)
    assert store.file("", read) is None
    store.close()


def test_a_folder_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    """And left as it is."""
    BatchStore(tmp_path).close()
    with sqlite3.connect(database_of(tmp_path)) as database:
        database.execute("PRAGMA user_version = 2")
    database.close()
    for _ in range(2):
        with pytest.raises(Unsupported, match="newer version"):
            BatchStore(tmp_path)


def test_a_damaged_folder_is_refused_and_not_locked(tmp_path: Path) -> None:
    """So that it can be opened once it is repaired."""
    BatchStore(tmp_path).close()
    content = database_of(tmp_path).read_bytes()
    database_of(tmp_path).write_bytes(b"no database" * 1000)
    for _ in range(2):
        with pytest.raises(EngineError, match="cannot be read"):
            BatchStore(tmp_path)
    database_of(tmp_path).write_bytes(content)
    BatchStore(tmp_path).close()


def test_an_upload_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """Nor does an upload during which the server was killed."""

    class Broken(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise OSError(28, "No space left on device")

    store = BatchStore(tmp_path)
    record = file()
    with pytest.raises(OSError, match="No space"):
        store.add_file("", record, Broken())
    assert not store.path(record.id).exists()
    kept, torn = add(store), store.path(new_file_id())
    torn.write_bytes(b"abc")
    store.close()
    store = BatchStore(tmp_path)
    assert (torn.exists(), store.path(kept).exists()) == (False, True)
    store.close()


def test_a_folder_is_of_one_server_at_a_time(tmp_path: Path) -> None:
    """Its contents outlive the server."""
    store = BatchStore(tmp_path)
    kept = add(store, "one")
    with pytest.raises(CapacityError, match="another server"):
        BatchStore(tmp_path)
    store.close()
    again = BatchStore(tmp_path)
    assert again.file("one", kept) is not None
    assert again.path(kept).read_bytes() == b"abc"
    again.close()
