"""LoRA adapters that are loaded and unloaded while an engine runs: the contract of the engine in this process and of a worker."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.running_engine import LONG_S

from paceline.engine import EngineClient
from paceline.engine.adapters import name_of
from paceline.engine.worker.supervisor import RestartLimits
from paceline.engine.worker.worker_engine import WorkerEngine
from paceline.errors import AdapterError, AdapterInUse, AdapterNotFound, EngineStopped, InvalidParams
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.sequence import Request
from paceline.streaming import StreamChannel, StreamChunk
from paceline.testing import FakeBackend, FakeEngineClient
from paceline.testing.fake_engine_client import fake_worker_engine

_LARGE = {"num_cells": 200_000, "eos_every": 10**9, "num_seq_ids": 8}
_FOREVER = 100_000  # tokens
_PROMPT = "a prompt that is long enough to be cached as a prefix of others"

Make = Callable[[], EngineClient]


def in_process() -> EngineClient:
    return FakeEngineClient(backend=FakeBackend(**_LARGE))


def with_worker() -> EngineClient:
    return fake_worker_engine(backend_options=_LARGE, restarts=RestartLimits(max_restarts=100, first_wait_s=0.0))


@pytest.fixture(params=[in_process, with_worker], ids=["in process", "worker"])
def engine(request: pytest.FixtureRequest) -> Iterator[EngineClient]:
    made = request.param()
    yield made
    made.close()


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Files of two adapters."""
    for name in ("one", "two"):
        (tmp_path / f"{name}.gguf").write_text(name)
    return [str(tmp_path / f"{name}.gguf") for name in ("one", "two")]


def start(engine: EngineClient, num_tokens: int = 12, **options: Any) -> StreamChannel:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return engine.accept(engine.prepare(_PROMPT, params, RequestOptions(**options)))


def read(channel: StreamChannel) -> tuple[list[int], StreamChunk]:
    chunks = list(channel)
    return [token for chunk in chunks for token in chunk.token_ids], chunks[-1]


def generate(engine: EngineClient, **options: Any) -> tuple[list[int], int]:
    """Return the tokens drawn, and how many of the prompt were cached."""
    ids, last = read(start(engine, **options))
    assert last.error is None
    assert last.usage is not None
    return ids, last.usage.cached_tokens


def test_a_loaded_adapter_is_used_by_requests_that_name_it(engine: EngineClient, files: list[str]) -> None:
    """It is listed, changes the output by its scale, and changes nothing of other requests."""
    plain = generate(engine)[0]
    engine.load_lora("a", files[0])
    assert [(adapter.name, adapter.path) for adapter in engine.loras()] == [("a", files[0])]
    adapted = generate(engine, lora={"a": 1.0})[0]
    assert len({tuple(plain), tuple(adapted), tuple(generate(engine, lora={"a": 0.5})[0])}) == 3
    assert generate(engine)[0] == plain
    engine.load_lora("b", files[1])
    assert [adapter.name for adapter in engine.loras()] == ["a", "b"]
    assert generate(engine, lora={"b": 1.0})[0] not in (plain, adapted)
    assert generate(engine, lora={"a": 1.0})[0] == adapted


def test_an_unloaded_adapter_is_gone(engine: EngineClient, files: list[str]) -> None:
    """Requests that name it are refused, and so is unloading it again."""
    engine.load_lora("a", files[0])
    generate(engine, lora={"a": 1.0})
    assert not engine.was_lora_unloaded("a")
    engine.unload_lora("a")
    assert engine.loras() == ()
    assert engine.was_lora_unloaded("a")
    assert not engine.was_lora_unloaded("b")
    with pytest.raises(InvalidParams, match="no adapter 'a'"):
        start(engine, lora={"a": 1.0})
    with pytest.raises(AdapterNotFound, match="'a'"):
        engine.unload_lora("a")
    assert generate(engine)[0]


def test_a_name_that_is_loaded_again_shares_nothing_with_the_earlier_file(
    engine: EngineClient, files: list[str]
) -> None:
    """Cached prefixes of the first file are dropped, and the output is the second's."""
    engine.load_lora("b", files[1])
    other = generate(engine, lora={"b": 1.0})[0]
    engine.load_lora("a", files[0])
    first = generate(engine, lora={"a": 1.0})[0]
    assert generate(engine, lora={"a": 1.0}) == (first, len(_PROMPT) - 1)
    engine.unload_lora("a")
    engine.load_lora("a", files[1])
    assert generate(engine, lora={"a": 1.0}) == (other, 0)
    assert other != first
    engine.unload_lora("a")
    engine.load_lora("a", files[0])
    assert generate(engine, lora={"a": 1.0}) == (first, 0)


def test_an_adapter_in_use_is_unloaded_when_its_requests_have_ended(engine: EngineClient, files: list[str]) -> None:
    """New requests are refused meanwhile; open requests finish with it."""
    engine.load_lora("a", files[0])
    expected = generate(engine, lora={"a": 1.0})[0]
    running = start(engine, _FOREVER, lora={"a": 1.0})
    first = running.get()
    prepared = engine.prepare(_PROMPT, SamplingParams(max_tokens=1), RequestOptions(lora={"a": 1.0}))
    unloading = threading.Thread(target=engine.unload_lora, args=("a",), kwargs={"timeout_s": None})
    unloading.start()
    while True:
        try:
            start(engine, 1, lora={"a": 1.0}).cancel()
        except InvalidParams as error:
            assert "unloaded" in str(error)  # noqa: PT017 - it is refused sooner or later
            break
    with pytest.raises(InvalidParams, match="is being unloaded"):
        engine.accept(prepared)
    assert unloading.is_alive()
    chunks = [first, running.get()]
    running.cancel()
    tokens = [token for chunk in chunks if isinstance(chunk, StreamChunk) for token in chunk.token_ids]
    assert tokens[: len(expected)] == expected[: len(tokens)]
    list(running)
    unloading.join(LONG_S)
    assert not unloading.is_alive()
    assert engine.loras() == ()


def test_an_adapter_whose_requests_do_not_end_in_time_stays(engine: EngineClient, files: list[str]) -> None:
    """The error says how many there are, and the adapter can be used and unloaded later."""
    engine.load_lora("a", files[0])
    running = start(engine, _FOREVER, lora={"a": 1.0})
    running.get()
    with pytest.raises(AdapterInUse, match=r"1 requests .* within 0\.05 s"):
        engine.unload_lora("a", timeout_s=0.05)
    assert [adapter.name for adapter in engine.loras()] == ["a"]
    assert generate(engine, lora={"a": 1.0})[0]
    running.cancel()
    list(running)
    engine.unload_lora("a")


def test_loading_in_place_leaves_running_requests_their_adapter(engine: EngineClient, files: list[str]) -> None:
    """Requests from then on have the new one, under the same name."""
    engine.load_lora("a", files[0])
    running = start(engine, _FOREVER, lora={"a": 1.0})
    begun = running.get()
    first = generate(engine, lora={"a": 1.0})[0]
    engine.load_lora("a", files[1], in_place=True)
    assert [(adapter.name, adapter.path) for adapter in engine.loras()] == [("a", files[1])]
    second, num_cached = generate(engine, lora={"a": 1.0})
    assert second != first
    assert num_cached == 0
    assert isinstance(begun, StreamChunk)
    assert isinstance(running.get(), StreamChunk)
    running.cancel()
    assert list(running)[-1].error is None
    assert generate(engine, lora={"a": 1.0})[0] == second


def prepared(engine: EngineClient, *names: str) -> Request:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    return engine.prepare(_PROMPT, params, RequestOptions(lora=dict.fromkeys(names, 1.0)))


def test_a_request_runs_with_the_adapters_of_the_moment_when_it_is_accepted(
    engine: EngineClient, files: list[str]
) -> None:
    """Adapters loaded in place, or again, since it was prepared; a missing adapter is named, and the engine goes on."""
    engine.load_lora("b", files[1])
    expected = generate(engine, lora={"b": 1.0})[0]
    engine.load_lora("a", files[0])
    before = [prepared(engine, "a") for _ in range(3)]
    engine.load_lora("a", files[1], in_place=True)
    ids, last = read(engine.accept(before[0]))
    assert (last.error, ids) == (None, expected)
    assert generate(engine, lora={"a": 1.0}) == (expected, len(_PROMPT) - 1)  # in the namespace of the new one
    engine.unload_lora("a")
    with pytest.raises(InvalidParams, match=r"^lora: there is no adapter 'a'; known are 'b'"):
        engine.accept(before[1])
    assert engine.num_open == 0
    engine.load_lora("a", files[1])
    assert read(engine.accept(before[2]))[0] == expected


def test_an_adapter_that_is_replaced_while_a_request_is_accepted_is_renewed(
    files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However short the time between looking for the adapter and accepting the request."""
    engine = FakeEngineClient(backend=FakeBackend(**_LARGE))
    engine.load_lora("a", files[0])
    engine.load_lora("b", files[1])
    expected = generate(engine, lora={"b": 1.0})[0]
    request, submit = prepared(engine, "a", "b"), engine._inbox.submit
    is_late = [True]

    def submit_late(request: Any, num_tokens: int, **options: Any) -> None:
        if is_late:
            is_late.pop()
            engine.unload_lora("a")
            engine.load_lora("a", files[1])
        submit(request, num_tokens, **options)

    monkeypatch.setattr(engine._inbox, "submit", submit_late)
    _, last = read(engine.accept(request))
    assert last.error is None
    assert [name_of(key) for key, _ in request.lora] == ["a", "b"]
    assert dict(request.lora).keys() == {adapter.key for adapter in engine.loras()} != {"a", "b"}
    assert request.options.lora == request.lora
    monkeypatch.undo()
    assert generate(engine, lora={"b": 1.0})[0] == expected
    engine.close()


def test_invalid_adapter_is_refused_and_its_name_stays_free(engine: EngineClient, files: list[str]) -> None:
    """A missing file, a folder, an empty one, a file's name that is too long; a name that is taken, empty, no text or no line."""
    empty = Path(files[0]).with_name("empty.gguf")
    empty.touch()
    for path in (empty.with_name("missing.gguf"), empty.parent, empty, empty.with_name("x" * 300)):
        with pytest.raises(AdapterError):
            engine.load_lora("a", path)
    for name in ("", 3, "a\x00", "a\nb"):
        with pytest.raises(InvalidParams, match="name"):
            engine.load_lora(name, files[0])  # type: ignore[arg-type]
    with pytest.raises(InvalidParams, match="path"):
        engine.load_lora("a", 3)  # type: ignore[arg-type]
    engine.load_lora("a", files[0])
    with pytest.raises(InvalidParams, match="'a' already"):
        engine.load_lora("a", files[1])
    with pytest.raises(AdapterError):
        engine.load_lora("a", empty, in_place=True)
    assert [(adapter.name, adapter.path) for adapter in engine.loras()] == [("a", files[0])]
    with pytest.raises(InvalidParams, match="timeout_s"):
        engine.unload_lora("a", timeout_s=-1)


def test_a_name_that_looks_like_a_key_names_its_own_adapter(engine: EngineClient, files: list[str]) -> None:
    """Keys of later loads are no names, and never another adapter's keys."""
    engine.load_lora("a", files[0])
    engine.unload_lora("a")
    engine.load_lora("a", files[1])
    second = generate(engine, lora={"a": 1.0})[0]
    with pytest.raises(InvalidParams, match="no adapter 'a#2'"):
        start(engine, lora={"a#2": 1.0})
    engine.load_lora("a#2", files[0])
    assert generate(engine, lora={"a#2": 1.0})[0] != second
    assert generate(engine, lora={"a": 1.0})[0] == second


def test_a_closed_engine_loads_and_unloads_nothing(engine: EngineClient, files: list[str]) -> None:
    """As it takes no requests."""
    engine.load_lora("a", files[0])
    engine.close()
    with pytest.raises(EngineStopped):
        engine.load_lora("b", files[1])
    with pytest.raises(EngineStopped):
        engine.unload_lora("a")


def test_many_loads_and_unloads_beside_requests(engine: EngineClient, files: list[str]) -> None:
    """Threads that load, use and unload adapters of their own get the output of their file each time."""
    engine.load_lora("expected", files[0])
    expected = generate(engine, lora={"expected": 1.0})[0]
    failures: list[BaseException] = []

    def work(name: str) -> None:
        try:
            for _ in range(5):
                engine.load_lora(name, files[0])
                assert generate(engine, lora={name: 1.0})[0] == expected
                engine.unload_lora(name)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "b", "c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert not failures
    assert [adapter.name for adapter in engine.loras()] == ["expected"]


# ---- a worker that dies


@pytest.fixture
def mortal() -> Iterator[WorkerEngine]:
    made = with_worker()
    assert isinstance(made, WorkerEngine)
    yield made
    made.close()


def kill(engine: WorkerEngine) -> None:
    pid = engine.worker_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def test_a_request_goes_on_with_its_adapter_in_the_next_worker(mortal: WorkerEngine, files: list[str]) -> None:
    """The next worker loads the current adapters, by their current keys, and no unloaded adapter."""
    mortal.load_lora("a", files[0])
    mortal.unload_lora("a")
    mortal.load_lora("a", files[1])
    mortal.load_lora("b", files[0])
    mortal.unload_lora("b")
    Path(files[0]).unlink()
    expected, last = read(start(mortal, 2000, lora={"a": 1.0}))
    assert last.error is None
    running = start(mortal, 2000, lora={"a": 1.0})
    begun = running.get()
    assert isinstance(begun, StreamChunk)
    kill(mortal)
    ids, last = read(running)
    assert last.error is None
    assert [*begun.token_ids, *ids] == expected
    mortal.unload_lora("a")
    assert mortal.loras() == ()


def test_an_adapter_whose_file_is_gone_fails_its_requests_and_no_others(
    mortal: WorkerEngine, files: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The next worker runs without it; unloading it and loading another under its name helps. Messages have its name."""
    mortal.load_lora("a", files[1])
    mortal.load_lora("a", files[0], in_place=True)
    plain = generate(mortal)[0]
    Path(files[0]).unlink()
    kill(mortal)
    assert generate(mortal)[0] == plain
    _, last = read(start(mortal, lora={"a": 1.0}))
    assert isinstance(last.error, AdapterError)
    assert "the adapter 'a' could not be loaded again" in str(last.error)
    assert "the adapter 'a' could not be loaded again" in caplog.text
    mortal.unload_lora("a")
    mortal.load_lora("a", files[1])
    assert generate(mortal, lora={"a": 1.0})[0] != plain


def test_loads_and_unloads_wait_for_the_next_worker(mortal: WorkerEngine, files: list[str]) -> None:
    """As if the last worker had not died."""
    for _ in range(3):
        kill(mortal)
        mortal.load_lora("a", files[0])
        assert generate(mortal, lora={"a": 1.0})[0]
        kill(mortal)
        mortal.unload_lora("a")
    assert mortal.loras() == ()
