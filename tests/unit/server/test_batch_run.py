"""Batches of a file: each line once, retries, and what an earlier run has done. The server is a function."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.errors import Aborted, EngineError, InvalidParams
from paceline.server import batch_run
from paceline.server.batch_run import (
    BatchEntry,
    BatchFailure,
    BatchFiles,
    BatchSender,
    new_id,
    num_tokens_of,
    run_batch,
    run_in_thread,
)

Handler = Callable[[httpx.Request], httpx.Response]


def request(custom_id: str, prompt: str = "a", **changes: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt}} | changes


class Batch:
    """An input with its files, and runs of it against a function."""

    def __init__(self, folder: Path) -> None:
        self.source, self.results, self.errors = (folder / name for name in ("in.jsonl", "out.jsonl", "errors.jsonl"))
        self.sent: list[dict[str, Any]] = []
        self.answer: Handler = lambda sent: httpx.Response(200, json={"object": "x", "of": json.loads(sent.content)})

    def has(self, lines: Iterable[dict[str, Any] | str]) -> None:
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        self.source.write_text("".join(f"{text}\n" for text in texts))

    def files(self, model: str = "") -> BatchFiles:
        return BatchFiles(self.source, self.results, self.errors, model=model)

    def run(self, *, num_at_once: int = 4, max_retries: int = 2, num_entries: int | None = None) -> tuple[int, int]:
        """Run the lines; return the numbers of entries and errors. num_entries: after which the run is cancelled."""

        def answer(sent: httpx.Request) -> httpx.Response:
            self.sent.append(json.loads(sent.content))
            return self.answer(sent)

        async def main() -> tuple[int, int]:
            transport = httpx.MockTransport(answer)
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                with self.files() as files:
                    first = files.num_done

                    def on_entry(_: object) -> None:
                        if num_entries is not None and files.num_done - first >= num_entries:
                            running.cancel()

                    sender = BatchSender(client, max_retries, backoff_s=0.0)
                    running = asyncio.create_task(run_batch(files, sender, num_at_once, on_entry))
                    await asyncio.wait((running,))
                    if not running.cancelled():
                        running.result()
                    return files.num_done, files.num_failed

        return asyncio.run(main())

    @property
    def prompts(self) -> list[str]:
        return [body["prompt"] for body in self.sent]

    def done(self) -> list[dict[str, Any]]:
        return read(self.results)

    def failed(self) -> list[dict[str, Any]]:
        return read(self.errors)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def ids(entries: Sequence[dict[str, Any]]) -> list[str]:
    return [entry["custom_id"] for entry in entries]


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    return Batch(tmp_path)


def test_results_have_openai_s_form(batch: Batch) -> None:
    """An id, the line's id, the response with its status and request id, and no error."""
    batch.has([request("one")])
    batch.answer = lambda _: httpx.Response(200, content=b'{\n "x": 1\n}', headers={"x-request-id": "r1"})
    assert batch.run() == (1, 0)
    (entry,) = batch.done()
    assert entry.pop("id").startswith("batch_req_")
    assert len(entry.pop("digest")) == 24
    response = {"status_code": 200, "request_id": "r1", "body": {"x": 1}}
    assert entry == {"custom_id": "one", "response": response, "error": None}
    assert not batch.errors.exists()


def test_a_refused_request_goes_to_the_errors(batch: Batch) -> None:
    """With the response, also one that is no JSON, and the run goes on."""
    batch.has([request("bad", "bad"), request("html", "html"), request("good")])
    pages = {"bad": httpx.Response(400, json={"error": {"code": "x"}}), "html": httpx.Response(418, text="<p>")}
    usual = batch.answer
    batch.answer = lambda sent: pages.get(json.loads(sent.content)["prompt"]) or usual(sent)
    assert batch.run() == (3, 2)
    assert ids(batch.done()) == ["good"]
    bodies = {entry["custom_id"]: entry["response"]["body"] for entry in batch.failed()}
    assert bodies == {"bad": {"error": {"code": "x"}}, "html": "<p>"}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("nonsense", "malformed"),
        ("[]", "Expected `object`"),
        ({"custom_id": "a", "url": "/v1/completions"}, "missing required field `body`"),
        ({"url": "/v1/completions", "body": {}}, "missing required field `custom_id`"),
        (request(""), "length >= 1"),
        (request("a", body=[]), "Expected `object`"),
        (request("a", method="GET"), "method must be POST, not 'GET'"),
        (request("a", url="/v1/models"), "url must be /v1/chat/completions or .*, not '/v1/models'"),
        (request("a", body={"prompt": "a", "stream": True}), "stream"),
    ],
)
def test_a_line_that_is_no_request_is_an_error_with_its_number(
    batch: Batch, line: dict[str, Any] | str, reason: str
) -> None:
    """Blank lines are none, and the other lines run. A later run reports it once."""
    batch.has([request("first"), "", line, request("last")])
    assert batch.run() == (3, 1)
    assert batch.run() == (3, 1)
    assert sorted(ids(batch.done())) == ["first", "last"]
    (entry,) = batch.failed()
    assert (entry["line"], entry["response"], entry["error"]["code"]) == (3, None, "invalid_line")
    assert entry["error"]["message"].startswith("line 3: ")
    assert re.search(reason, entry["error"]["message"])


def test_a_line_that_is_too_long_is_an_error(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next line begins after it."""
    monkeypatch.setattr(batch_run, "MAX_LINE_BYTES", 200)
    batch.has([request("long", "x" * 200), request("next")])
    assert batch.run() == (2, 1)
    assert ids(batch.done()) == ["next"]
    assert batch.failed()[0]["error"]["message"] == "line 1: the line has more than 200 bytes"


def test_a_second_line_with_an_id_is_an_error_that_names_it(batch: Batch) -> None:
    """The first one runs; so it is in a later run, which sends nothing."""
    batch.has([request("twice", "first"), request("once"), request("twice", "second")])
    assert batch.run() == batch.run() == (3, 1)
    assert sorted(batch.prompts) == ["a", "first"]
    assert sorted(ids(batch.done())) == ["once", "twice"]
    (entry,) = batch.failed()
    assert (entry["custom_id"], entry["line"]) == ("twice", 3)
    assert "'twice' is of an earlier line" in entry["error"]["message"]


def test_lines_with_common_prefixes_are_sent_side_by_side(batch: Batch) -> None:
    """By tools and messages, whatever else is in a body, and in windows of bounded size."""
    batch.has(request(f"{number}{prefix}", prefix * 3, priority=number) for number in range(3) for prefix in "abc")
    batch.run(num_at_once=1)
    assert batch.prompts == ["aaa"] * 3 + ["bbb"] * 3 + ["ccc"] * 3


def test_lines_of_a_model_are_sent_side_by_side(batch: Batch) -> None:
    """A server with several models loads each once in a window."""
    bodies = [{"prompt": prompt, "model": model} for prompt in "ab" for model in ("y", "x")]
    batch.has(request(str(number), body=body) for number, body in enumerate(bodies))
    batch.run(num_at_once=1)
    assert [(body["model"], body["prompt"]) for body in batch.sent] == [("x", "a"), ("x", "b"), ("y", "a"), ("y", "b")]


@pytest.mark.parametrize("limit", ["_WINDOW_LINES", "_WINDOW_BYTES"])
def test_the_input_is_read_in_windows(batch: Batch, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """Of so many lines, refused lines included, or so many bytes of bodies."""
    monkeypatch.setattr(batch_run, limit, 3 if limit == "_WINDOW_LINES" else 3 * len('{"prompt": "a"}'))
    batch.has([request(str(number)) for number in range(8)] + ["bad"] * 4)
    with batch.files() as files:
        sizes = []
        while any(window := files.next_window()):
            sizes.append(sum(map(len, window)))
        assert sum(sizes) == 12
        assert sizes[:2] == [3, 3]
        if limit == "_WINDOW_LINES":
            assert set(sizes) == {3}


def test_each_line_is_run_once_however_often_a_run_is_interrupted(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is cancelled in the middle goes on in the next one."""
    monkeypatch.setattr(batch_run, "_WINDOW_LINES", 7)
    names = [f"line {number}" for number in range(40)]
    batch.has(request(name, name[-1]) for name in names)
    usual = batch.answer
    batch.answer = lambda sent: httpx.Response(400) if json.loads(sent.content)["prompt"] == "3" else usual(sent)
    num_runs = 0
    while batch.run(num_entries=3 + num_runs)[0] < 40:
        num_runs += 1
    assert num_runs > 3
    assert Counter(ids(batch.done() + batch.failed())) == Counter(names)
    assert len(batch.failed()) == 4
    num_sent = len(batch.sent)
    assert batch.run() == (40, 4)
    assert len(batch.sent) == num_sent


@pytest.mark.parametrize("cut", [1, 30])
def test_a_torn_last_line_is_cut_off_and_run_again(batch: Batch, cut: int) -> None:
    """As a process that was killed in the middle of a write leaves it."""
    batch.has([request("one", "one"), request("two", "two")])
    batch.run(num_at_once=1)
    batch.results.write_bytes(batch.results.read_bytes()[:-cut])
    assert batch.run() == (2, 0)
    assert batch.prompts == ["one", "two", "two"]
    assert ids(batch.done()) == ["one", "two"]


def test_lines_that_failed_run_again_once_the_errors_are_deleted(batch: Batch) -> None:
    """Results stay."""
    batch.has([request("one", "one"), request("two", "two")])
    usual = batch.answer
    batch.answer = lambda sent: httpx.Response(400) if json.loads(sent.content)["prompt"] == "two" else usual(sent)
    assert batch.run() == (2, 1)
    batch.errors.unlink()
    batch.answer = usual
    assert batch.run() == (2, 0)
    assert batch.prompts == ["one", "two", "two"]


@pytest.mark.parametrize("content", [b"a diary\n", b'{"custom_id": "x"}\n', b"[1]\n", b"a diary", b'{"id":"batch_rex'])
@pytest.mark.parametrize("name", ["results", "errors"])
def test_a_file_of_other_contents_is_refused_and_kept(batch: Batch, name: str, content: bytes) -> None:
    """Entries are never written into it, and its last line is cut off only if it begins as an entry does."""
    batch.has([request("one")])
    path: Path = getattr(batch, name)
    path.write_bytes(content)
    with pytest.raises(InvalidParams, match="line 1 is none of a batch's results"):
        batch.run()
    assert path.read_bytes() == content


@pytest.mark.parametrize("link", ["name", "symbolic", "hard"])
@pytest.mark.parametrize(("first", "second"), [("source", "results"), ("source", "errors"), ("results", "errors")])
def test_a_file_that_is_named_twice_is_refused_and_kept(batch: Batch, first: str, second: str, link: str) -> None:
    """Also under another name."""
    batch.has([request("one")])
    content = batch.source.read_bytes()
    named: Path = getattr(batch, first)
    named.touch()
    if link == "name":
        setattr(batch, second, named)
    elif link == "symbolic":
        getattr(batch, second).symlink_to(named)
    else:
        getattr(batch, second).hardlink_to(named)
    with pytest.raises(InvalidParams, match="named twice"):
        batch.run()
    assert batch.source.read_bytes() == content


def test_results_go_to_regular_files_alone(batch: Batch) -> None:
    """A pipe without a reader, or a device, is refused at once."""
    batch.has([request("one")])
    os.mkfifo(batch.errors)
    with pytest.raises(OSError, match="not a regular file"):
        batch.run()
    batch.errors.unlink()
    batch.results = Path("/dev/full")
    with pytest.raises(OSError, match="not a regular file"):
        batch.run()
    assert not batch.errors.exists()


def test_the_input_may_be_a_pipe(batch: Batch) -> None:
    """Each line of it runs, and its lines are not counted before."""
    batch.has([request(str(number)) for number in range(5)])
    read, write = os.pipe()
    os.write(write, batch.source.read_bytes())
    os.close(write)
    batch.source = Path(f"/dev/fd/{read}")
    with batch.files() as files:
        assert files.count_lines() is None
        assert len(files.next_window()[0]) == 5
    os.close(read)


@pytest.mark.parametrize("shared", ["results", "errors"])
def test_two_runs_cannot_write_the_same_file(batch: Batch, tmp_path: Path, shared: str) -> None:
    """The second one is refused until the first one ends, and takes nothing from the file."""
    batch.has([request("one"), request("two")])
    other = Batch(tmp_path)
    setattr(other, {"results": "errors", "errors": "results"}[shared], tmp_path / "other.jsonl")
    with batch.files() as files:
        files.next_window()
        files.write(BatchEntry(new_id(), "one", None, BatchFailure("x", "")))
        before = batch.errors.read_bytes()
        with pytest.raises(InvalidParams, match="another run writes"):
            other.run()
        assert batch.errors.read_bytes() == before
    assert batch.run() == (2, 1)


def test_a_file_without_entries_is_removed(batch: Batch) -> None:
    """Unless it was there before."""
    batch.has([])
    batch.errors.touch()
    assert batch.run() == (0, 0)
    assert (batch.results.exists(), batch.errors.exists()) == (False, True)


def test_results_of_another_request_or_model_are_refused(batch: Batch) -> None:
    """They would stand for requests that never ran."""
    batch.has([request("one"), request("two")])
    assert batch.run() == (2, 0)
    before = batch.results.read_bytes()
    with (
        batch.files("other") as files,
        pytest.raises(InvalidParams, match="or of another model, with the custom_id 'one'"),
    ):
        files.next_window()
    batch.has([request("one"), request("two", "another text")])
    with pytest.raises(InvalidParams, match="entry of another request.* with the custom_id 'two'"):
        batch.run()
    assert batch.results.read_bytes() == before
    assert len(batch.sent) == 2


def test_a_refused_line_is_known_by_its_text(batch: Batch) -> None:
    """So that no line is passed over when lines are put before it; each of several equal ones has an entry."""
    batch.has([request("one"), "bad", "bad"])
    assert batch.run() == (3, 2)
    batch.has([request("zero"), "worse", request("other", url="/x"), request("one"), "bad", "bad"])
    assert batch.run() == batch.run() == (6, 4)
    assert sorted(entry["line"] for entry in batch.failed()) == [2, 2, 3, 3]
    assert {entry["custom_id"] for entry in batch.failed()} == {None, "other"}


@pytest.mark.parametrize("num_lines", [0, 1, 3, 5])
def test_the_reading_of_files_can_be_stopped(batch: Batch, num_lines: int) -> None:
    """In the results, in the input, and while lines are counted."""
    batch.has([request("one"), request("two"), request("three")])
    assert batch.run(num_entries=1)[0] >= 1
    asked = iter([False] * num_lines)
    with pytest.raises(Aborted):
        with BatchFiles(batch.source, batch.results, batch.errors, is_stopped=lambda: next(asked, True)) as files:
            files.next_window()
            files.count_lines()


def test_an_error_of_a_write_names_the_file(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a full disk raises one."""

    def write(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    batch.has([request("one")])
    monkeypatch.setattr(os, "write", write)
    with batch.files() as files:
        files.next_window()
        with pytest.raises(OSError, match=re.escape(str(batch.errors))):
            files.write(BatchEntry(new_id(), "one", None, BatchFailure("x", "")))


@pytest.mark.parametrize("status", [429, 502, 503, 504, None])
def test_a_request_is_sent_again_if_the_server_cannot_take_it_now(batch: Batch, status: int | None) -> None:
    """None: the connection fails."""
    batch.has([request("one")])
    usual = batch.answer

    def answer(sent: httpx.Request) -> httpx.Response:
        if len(batch.sent) > 2:
            return usual(sent)
        if status is None:
            raise httpx.ConnectError("refused")
        return httpx.Response(status, headers={"retry-after": "0"})

    batch.answer = answer
    assert batch.run(max_retries=2) == (1, 0)
    assert len(batch.sent) == 3


@pytest.mark.parametrize("status", [502, 503, 504, None])
def test_a_request_that_fails_alone_is_an_error(batch: Batch, status: int | None) -> None:
    """After its last retry, if other lines had responses meanwhile: it would end every run."""
    batch.has([request("0", "0"), *(request(str(number)) for number in range(1, 10))])
    usual = batch.answer

    def answer(sent: httpx.Request) -> httpx.Response:
        if json.loads(sent.content)["prompt"] != "0":
            return usual(sent)
        if status is None:
            raise httpx.RemoteProtocolError("gone")
        return httpx.Response(status)

    batch.answer = answer
    assert batch.run(max_retries=2) == (10, 1)
    assert batch.prompts.count("0") == 3
    (entry,) = batch.failed()
    if status is None:
        assert (entry["response"], entry["error"]["code"]) == (None, "connection_failed")
    else:
        assert entry["response"]["status_code"] == status


def test_a_limit_that_leaves_room_is_waited_for(batch: Batch) -> None:
    """For longer than the retries, as long as other lines have responses."""
    num_refused = 0

    async def answer(sent: httpx.Request) -> httpx.Response:
        nonlocal num_refused
        if b"refused" not in sent.content or num_refused == 9:
            return httpx.Response(200)
        num_refused += 1
        await sender(other)
        return httpx.Response(429)

    async def main() -> BatchEntry:
        nonlocal sender
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://server") as client:
            sender = BatchSender(client, 1, backoff_s=0.0)
            return await sender(refused)

    sender: BatchSender
    batch.has([request("a", "other"), request("b", "refused")])
    with batch.files() as files:
        other, refused = files.next_window()[0]
    assert (asyncio.run(main()).succeeded, num_refused) == (True, 9)


@pytest.mark.parametrize("code", ["deadline", "deadline_exceeded", "other"])
def test_a_request_that_ran_out_of_time_is_an_error_at_once(batch: Batch, code: str) -> None:
    """It would compute as long again. The 504 of a proxy has another code, or none."""
    batch.has([request("one")])
    usual = batch.answer
    late = httpx.Response(504, json={"error": {"code": code}}, headers={"retry-after": "0"})
    batch.answer = lambda sent: late if len(batch.sent) == 1 else usual(sent)
    assert batch.run() == ((1, 0) if code == "other" else (1, 1))
    assert len(batch.sent) == (2 if code == "other" else 1)


def test_breaks_of_a_line_are_limited(batch: Batch) -> None:
    """An application in this process cannot be away: a line that breaks is at fault, also alone."""
    sent: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return httpx.Response(503 if len(sent) < 4 else 502)

    async def main() -> BatchEntry:
        transport = httpx.MockTransport(answer)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await BatchSender(client, 100, backoff_s=0.0, max_breaks=2)(line)

    batch.has([request("one")])
    with batch.files() as files:
        (line,) = files.next_window()[0]
    entry = asyncio.run(main())
    assert (len(sent), entry.response and entry.response.status_code) == (6, 502)


def test_a_response_that_cannot_be_read_is_an_error(batch: Batch) -> None:
    """Of an unknown compression, or nested too deep; the run goes on."""
    deep = "[" * 100_000 + "]" * 100_000
    batch.has([request("gzip", "gzip"), request("deep", "deep"), request("good")])
    pages: dict[str, Callable[[], httpx.Response]] = {
        "gzip": lambda: httpx.Response(
            200, stream=httpx.ByteStream(b"no gzip at all"), headers={"content-encoding": "gzip"}
        ),
        "deep": lambda: httpx.Response(400, text=deep),
    }
    usual = batch.answer
    batch.answer = lambda sent: pages.get(json.loads(sent.content)["prompt"], lambda: usual(sent))()
    assert batch.run() == (3, 2)
    entries = {entry["custom_id"]: entry for entry in batch.failed()}
    assert entries["gzip"]["error"]["code"] == "invalid_response"
    assert entries["deep"]["response"]["body"] == deep


@pytest.mark.parametrize("status", [429, 502, 503, 504, None])
def test_a_server_that_stays_away_ends_the_run_and_no_line(batch: Batch, status: int | None) -> None:
    """A later run has all lines to do."""
    batch.has([request("one"), request("two")])
    usual = batch.answer

    def answer(_: httpx.Request) -> httpx.Response:
        if status is None:
            raise httpx.ConnectError("refused")
        return httpx.Response(status)

    batch.answer = answer
    with pytest.raises(EngineError, match="cannot be reached" if status is None else f"status {status}"):
        batch.run(max_retries=1)
    assert batch.failed() == batch.done() == []
    batch.answer = usual
    assert batch.run() == (2, 0)


def test_files_are_written_in_a_thread(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow disk stops no event loop."""
    writers: list[threading.Thread] = []
    write = BatchFiles.write

    def note(files: BatchFiles, entry: BatchEntry) -> None:
        writers.append(threading.current_thread())
        write(files, entry)

    monkeypatch.setattr(BatchFiles, "write", note)
    batch.has([request("one"), "bad"])
    assert batch.run() == (2, 1)
    assert len(writers) == 2 and threading.main_thread() not in writers


def test_a_function_in_a_thread_outlives_cancellation() -> None:
    """However often it is cancelled: the function uses files that are closed next."""
    may_end, has_ended = threading.Event(), False

    def work() -> None:
        nonlocal has_ended
        may_end.wait(30)
        has_ended = True

    async def main() -> None:
        task = asyncio.create_task(run_in_thread(work))
        for _ in range(2):
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.sleep(0)
        assert not task.done()
        may_end.set()
        await asyncio.wait((task,))
        assert task.cancelled() and has_ended

    asyncio.run(main())


def test_the_tokens_of_a_response_are_counted() -> None:
    """By the names of each API; of embeddings those of the input."""
    usages = [
        {"prompt_tokens": 5, "completion_tokens": 7},
        {"input_tokens": 5, "output_tokens": 3},
        {"prompt_tokens": 5},
    ]
    assert [num_tokens_of(json.dumps({"usage": usage}).encode()) for usage in usages] == [7, 3, 5]
    assert num_tokens_of(b"{}") == num_tokens_of(b'"<p>"') == num_tokens_of(b'{"usage": null}') == 0
