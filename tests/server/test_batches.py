"""/v1/files and /v1/batches with the `openai` package: results, errors, ends, restarts, tenants."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import openai
import pytest
from openai.types import Batch
from python_multipart.multipart import MultipartParser
from tests.polling import wait_until
from tests.server.conftest import DEMO_ENGINE
from tests.server.openai_world import OpenAIServer
from tests.server.running import RunningServer

from paceline.observability.metrics import Instrument
from paceline.scheduling.records import RequestRecord
from paceline.server import batch_jobs
from paceline.server.batch_run import BatchEntry, BatchFiles, BatchLine, SendLine
from paceline.server.batch_store import BatchStore
from paceline.server.dialects.openai import openai_batches
from paceline.server.settings import ApiKey, ServerSettings

pytestmark = pytest.mark.native

CHAT: Final = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
LONG: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 700, "ignore_eos": True}


class Priorities(Instrument):
    """Notes the priority of each request, and the most slots that were taken at once."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.running: set[tuple[int, int]] = set()
        self.most_running = 0

    def request_started(self, key: int, choice: int, slot: int, now_s: float) -> None:
        self.running.add((key, choice))
        self.most_running = max(self.most_running, len(self.running))

    def slot_freed(self, key: int, choice: int, slot: int, now_s: float) -> None:
        self.running.discard((key, choice))

    def request_queued(self, record: RequestRecord) -> None:
        self.seen.append(record.priority)


PRIORITIES = Priorities()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAIServer]:
    folder = tmp_path_factory.mktemp("batches")
    engine = {"num_slots": 3, "instruments": [PRIORITIES]}
    with OpenAIServer(engine, batch_folder=folder) as running:
        yield running


@pytest.fixture
def client(server: OpenAIServer) -> Iterator[openai.OpenAI]:
    with server.openai() as client:
        yield client


def lines(*bodies: dict[str, Any], url: str = "/v1/completions") -> bytes:
    requests = [
        {"custom_id": f"r{number}", "method": "POST", "url": url, "body": body} for number, body in enumerate(bodies)
    ]
    return "".join(json.dumps(request) + "\n" for request in requests).encode()


def begun(client: openai.OpenAI, data: bytes, endpoint: Any = "/v1/completions", **options: Any) -> Batch:
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **options)


def ended(client: openai.OpenAI, batch: Batch) -> Batch:
    wait_until(lambda: client.batches.retrieve(batch.id).status in ENDED)
    return client.batches.retrieve(batch.id)


def entries(client: openai.OpenAI, file_id: str | None) -> dict[str | None, dict[str, Any]]:
    if file_id is None:
        return {}
    found = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    assert max(Counter(entry["custom_id"] for entry in found).values()) == 1
    return {entry["custom_id"]: entry for entry in found}


def counts(batch: Batch) -> tuple[int, int, int]:
    assert batch.request_counts is not None
    return batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"prompt": "Once", "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 2}),
        ("/v1/embeddings", {"input": "Hello"}),
    ],
)
def test_a_batch_completes(client: openai.OpenAI, endpoint: Any, body: dict[str, Any]) -> None:
    """Each line has a response in the output, and the batch has OpenAI's members."""
    batch = begun(client, lines(body, body, url=endpoint), endpoint, metadata={"of": "a test"})
    assert (batch.status, batch.object, batch.metadata) == ("validating", "batch", {"of": "a test"})
    batch = ended(client, batch)
    assert (batch.status, counts(batch), batch.error_file_id) == ("completed", (2, 2, 0), None)
    times = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
    assert times == sorted(time for time in times if time is not None)
    found = entries(client, batch.output_file_id)
    assert found.keys() == {"r0", "r1"}
    assert all(entry["response"]["status_code"] == 200 and entry["error"] is None for entry in found.values())


def test_requests_run_below_interactive_requests(client: openai.OpenAI) -> None:
    """Whatever priority a body has, and however it is spelled."""
    PRIORITIES.seen.clear()
    bodies = [{"prompt": "Once", "max_tokens": 1, name: 5} for name in ("ignored", "priority", "Priority")]
    data = lines(*bodies).replace(b'"Priority"', rb'"\u0070riority"')
    assert ended(client, begun(client, data)).status == "completed"
    assert PRIORITIES.seen == [batch_jobs.PRIORITY] * 3
    chat = lines({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "priority": 5}, url=CHAT)
    assert ended(client, begun(client, chat, CHAT)).status == "completed"
    assert PRIORITIES.seen == [batch_jobs.PRIORITY] * 4
    client.completions.create(model="tale", prompt="Once", max_tokens=1)
    assert PRIORITIES.seen[-1] == 0


@pytest.mark.parametrize("body", [{"prompt": "Once", "n": 2}, {"prompt": ["Once", "Twice"]}])
def test_choices_leave_a_slot_to_interactive_requests(client: openai.OpenAI, body: dict[str, Any]) -> None:
    """Each choice of each prompt takes a slot."""
    PRIORITIES.most_running = 0
    batch = ended(client, begun(client, lines(*[{**body, "max_tokens": 20, "ignore_eos": True}] * 5)))
    assert batch.status == "completed"
    assert 0 < PRIORITIES.most_running <= 2


@pytest.mark.parametrize("error", [ValueError("no /a/folder/file.txt"), OSError("the disk is full")])
def test_results_outlive_an_exception(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """The batch goes on after an error of the system. It fails after another one, and its results can be read."""
    run_batch, errors = batch_jobs.run_batch, [error]

    async def run(*args: Any) -> None:
        await run_batch(*args)
        if errors:
            raise errors.pop()

    monkeypatch.setattr(batch_jobs, "run_batch", run)
    monkeypatch.setattr(batch_jobs, "_RETRY_S", 0.0)
    batch = ended(client, begun(client, lines({"prompt": "a", "max_tokens": 1})))
    assert batch.status == ("completed" if isinstance(error, OSError) else "failed")
    assert entries(client, batch.output_file_id).keys() == {"r0"}
    if not isinstance(error, OSError):
        assert batch.errors is not None and batch.errors.data
        assert "folder" not in (batch.errors.data[0].message or "")


def test_a_tenant_has_two_batches_that_run(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are checked, and wait: each that runs has a part of its input in memory."""
    run_batch, inside, may_run = batch_jobs.run_batch, 0, threading.Event()

    async def run(*args: Any) -> None:
        nonlocal inside
        inside += 1
        while not may_run.is_set():
            await asyncio.sleep(0.001)
        await run_batch(*args)

    monkeypatch.setattr(batch_jobs, "run_batch", run)
    batches = [begun(client, lines({"prompt": "a", "max_tokens": 1})) for _ in range(4)]
    wait_until(lambda: all(client.batches.retrieve(batch.id).status == "in_progress" for batch in batches))
    wait_until(lambda: inside >= 2)
    assert inside == 2
    may_run.set()
    assert {ended(client, batch).status for batch in batches} == {"completed"}
    assert inside == 4


def test_a_request_with_an_error_is_in_the_error_file(client: openai.OpenAI) -> None:
    """And the batch completes."""
    batch = ended(client, begun(client, lines({"prompt": "a", "max_tokens": 1}, {"prompt": "a", "max_tokens": "x"})))
    assert (batch.status, counts(batch)) == ("completed", (2, 1, 1))
    assert entries(client, batch.output_file_id).keys() == {"r0"}
    assert entries(client, batch.error_file_id)["r1"]["response"]["status_code"] == 400


@pytest.mark.parametrize(
    ("data", "line", "message"),
    [
        (b"nonsense\n", 1, "malformed"),
        (lines({"prompt": "a"}) * 2, 2, "'r0' is of an earlier line"),
        (lines({"prompt": "a"}) + lines({}, {"input": "a"}, url="/v1/embeddings"), 2, "url must be /v1/completions"),
        (b"", None, "no requests"),
    ],
)
def test_a_file_with_other_lines_fails_as_a_whole(
    client: openai.OpenAI, data: bytes, line: int | None, message: str
) -> None:
    """With the number of each line, and nothing runs."""
    batch = ended(client, begun(client, data))
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert batch.errors is not None and batch.errors.data
    assert batch.errors.data[0].line == line
    assert message in (batch.errors.data[0].message or "")


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold all lines of batches but the first one."""
    run_batch = batch_jobs.run_batch

    async def run(files: BatchFiles, send: SendLine, *others: Any) -> None:
        async def send_first(line: BatchLine) -> BatchEntry:
            if line.custom_id != "r0":
                await asyncio.Event().wait()
            return await send(line)

        await run_batch(files, send_first, *others)

    monkeypatch.setattr(batch_jobs, "run_batch", run)


@pytest.mark.usefixtures("held")
def test_a_cancelled_batch_keeps_its_results(client: openai.OpenAI) -> None:
    """Requests that were not run are errors; cancelling again changes nothing, and a batch that has ended refuses."""
    short = {"prompt": "Once", "max_tokens": 1}
    batch = begun(client, lines(*[short] * 13))
    wait_until(lambda: counts(client.batches.retrieve(batch.id))[1] == 1)
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = ended(client, batch)
    assert (batch.status, counts(batch)) == ("cancelled", (13, 1, 12))
    found = entries(client, batch.error_file_id)
    assert {entry["error"]["code"] for entry in found.values()} == {"batch_cancelled"}
    assert entries(client, batch.output_file_id).keys() == {"r0"}
    assert client.batches.cancel(batch.id).status == "cancelled"
    done = ended(client, begun(client, lines(short)))
    with pytest.raises(openai.ConflictError, match="it is completed"):
        client.batches.cancel(done.id)


def test_a_batch_expires(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests without a response until then are errors."""
    monkeypatch.setattr(openai_batches, "WINDOW_S", 0)
    batch = ended(client, begun(client, lines(LONG, LONG) + b"nonsense\n"))
    assert (batch.status, batch.output_file_id) == ("expired", None)
    assert batch.expired_at is not None
    codes = {name: entry["error"]["code"] for name, entry in entries(client, batch.error_file_id).items()}
    assert codes == {"r0": "batch_expired", "r1": "batch_expired", None: "invalid_line"}


@pytest.mark.usefixtures("held")
def test_files_are_listed_and_deleted(client: openai.OpenAI) -> None:
    """By pages, in both orders; the input of a batch that runs stays."""
    made = [client.files.create(file=("a.jsonl", b"x"), purpose="batch").id for _ in range(3)]
    assert [file.id for file in client.files.list(limit=1)][:3] == made[::-1]
    page = client.files.list(after=made[0], order="asc", limit=2, purpose="batch")
    assert ([file.id for file in page.data], page.has_more) == (made[1:], False)
    file = client.files.retrieve(made[0])
    assert (file.bytes, file.filename, file.purpose, file.status) == (1, "a.jsonl", "batch", "processed")
    assert client.files.delete(made[0]).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(made[0])
    with pytest.raises(openai.BadRequestError, match="after"):
        client.files.list(after=made[0])
    batch = begun(client, lines(*[LONG] * 2))
    with pytest.raises(openai.BadRequestError, match="cancel it first"):
        client.files.delete(batch.input_file_id)
    client.batches.cancel(batch.id)
    ended(client, batch)
    assert client.files.delete(batch.input_file_id).deleted


def test_batches_are_listed_by_pages(client: openai.OpenAI) -> None:
    """The latest first."""
    made = [begun(client, lines({"prompt": "a", "max_tokens": 1})).id for _ in range(3)]
    page = client.batches.list(limit=2)
    assert ([batch.id for batch in page.data], page.has_more) == (made[:0:-1], True)
    assert client.batches.list(limit=1, after=made[1]).data[0].id == made[0]


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"purpose": "fine-tune"}, "purpose must be 'batch'"),
        ({}, "purpose"),
        ({"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "5"}, "seconds"),
        ({"purpose": "batch", "expires_after[seconds]": "5000"}, "anchor"),
    ],
)
def test_a_wrong_upload_is_refused(server: OpenAIServer, form: dict[str, str], message: str) -> None:
    """With the field at fault."""
    with server.client() as raw:
        refused = raw.post("/v1/files", files={"file": ("a", b"x")}, data=form)
        assert (refused.status_code, message in refused.json()["error"]["message"]) == (400, True)
        assert raw.post("/v1/files", data={"purpose": "batch"}, files={"other": ("a", b"x")}).status_code == 400


def test_an_upload_is_parsed_in_pieces(server: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no other request waits for the end of a large one."""
    sizes: list[int] = []
    write = MultipartParser.write

    def note(parser: MultipartParser, data: bytes) -> int:
        sizes.append(len(data))
        return write(parser, data)

    monkeypatch.setattr(MultipartParser, "write", note)
    content = b"x" * 3_000_000
    with server.client() as raw:
        done = raw.post("/v1/files", files={"file": ("a.jsonl", content)}, data={"purpose": "batch"})
        assert raw.get(f"/v1/files/{done.json()['id']}/content").content == content
    assert max(sizes) <= 1 << 18


def test_a_file_may_expire_sooner(client: openai.OpenAI) -> None:
    """`expires_after` counts from its creation."""
    after: Any = {"anchor": "created_at", "seconds": 4000}
    file = client.files.create(file=("a.jsonl", b"x"), purpose="batch", expires_after=after)
    assert file.expires_at == file.created_at + 4000


@pytest.mark.parametrize(
    "changes", [{"input_file_id": "file-none"}, {"endpoint": "/v1/models"}, {"completion_window": "1h"}]
)
def test_a_wrong_batch_is_refused(server: OpenAIServer, client: openai.OpenAI, changes: dict[str, str]) -> None:
    """Before anything is stored."""
    file = client.files.create(file=("a.jsonl", b"x"), purpose="batch")
    body = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h", **changes}
    with server.client() as raw:
        refused = raw.post("/v1/batches", json=body)
    assert refused.status_code == (404 if "input_file_id" in changes else 400)
    assert refused.json()["error"]["param"] == next(iter(changes))


def test_a_batch_goes_on_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request has one response, and a server beside it is refused the folder. A server that ends says so.

    Files that cannot be deleted are tried again.
    """
    body = {"prompt": "Once upon a time", "max_tokens": 40, "ignore_eos": True}
    num_sweeps = 0

    def delete_expired(*_: object) -> None:
        nonlocal num_sweeps
        num_sweeps += 1
        raise ValueError("a test")

    monkeypatch.setattr(batch_jobs, "_SWEEP_S", 0.01)
    monkeypatch.setattr(BatchStore, "delete_expired", delete_expired)
    with OpenAIServer(batch_folder=tmp_path) as first, first.openai() as client:
        batch = begun(client, lines(*[body] * 30))
        wait_until(lambda: counts(client.batches.retrieve(batch.id))[1] > 2)
        other = RunningServer(ServerSettings(batch_folder=tmp_path, engine_options=DEMO_ENGINE))
        with other, other.client() as raw:
            refused = raw.get("/v1/files")
            assert (refused.status_code, "another server" in refused.text) == (503, True)
        wait_until(lambda: num_sweeps >= 2)
        first.do(first.app.state.batches.stop())
        with first.client() as raw:
            refused = raw.get("/v1/files")
            assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
    store = BatchStore(tmp_path)
    ((left, _),) = store.open_batches()
    store.close()
    assert left.id == batch.id
    with OpenAIServer(batch_folder=tmp_path) as second, second.openai() as client:
        batch = ended(client, batch)
        assert (batch.status, counts(batch)) == ("completed", (30, 30, 0))
        assert len(entries(client, batch.output_file_id)) == 30


def test_a_server_without_a_folder_has_no_batches() -> None:
    """With the flag that gives it one."""
    with RunningServer(ServerSettings(engine_options=DEMO_ENGINE)) as running, running.client() as raw:
        for path in ("/v1/files", "/v1/batches", "/v1/files/x", "/v1/batches/x"):
            refused = raw.get(path)
            assert (refused.json()["error"]["code"], "--batch-folder" in refused.text) == ("unsupported", True)


def test_tenants_have_files_and_batches_of_their_own(tmp_path: Path) -> None:
    """A batch runs as its tenant, without its key, and leaves a place to interactive requests of the key."""
    keys = (ApiKey(secret="first", tenant="one", max_requests=2), ApiKey(secret="second", tenant="two"))
    with OpenAIServer(batch_folder=tmp_path, api_keys=keys) as running:
        one, two = (openai.OpenAI(base_url=f"{running.url}/v1", api_key=key.secret, max_retries=0) for key in keys)
        with one, two:
            batch = ended(one, begun(one, lines({"prompt": "a", "max_tokens": 1})))
            assert (batch.status, counts(batch)) == ("completed", (1, 1, 0))
            assert len(one.files.list().data) == 2
            assert two.files.list().data == two.batches.list().data == []
            for call in (two.files.retrieve, two.files.content, two.files.delete):
                with pytest.raises(openai.NotFoundError):
                    call(batch.input_file_id)
            for look in (two.batches.retrieve, two.batches.cancel):
                with pytest.raises(openai.NotFoundError):
                    look(batch.id)
            with pytest.raises(openai.NotFoundError):
                two.batches.create(
                    input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"
                )
            batch = begun(one, lines(*[LONG] * 6))
            (account, _) = running.service.kept.key_accounts
            wait_until(lambda: account.num_in_flight > 0)
            one.completions.create(model="tale", prompt="Once", max_tokens=1)
            assert one.batches.retrieve(batch.id).status == "in_progress"
            one.batches.cancel(batch.id)
        assert httpx.get(f"{running.url}/v1/batches").status_code == 401
