"""Requests of another front, which a worker's front relays."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tests.pictures import picture

from paceline.engine.core import Cancel
from paceline.engine.worker import messages
from paceline.engine.worker.worker_engine import WorkerEngine
from paceline.errors import EngineStopped, InvalidParams, Unsupported
from paceline.kv_cache import MediaItem
from paceline.media import Image
from paceline.scheduling.records import Delta, Embedded, Released, RequestEvent, Started
from paceline.sequence import GenerationState
from paceline.streaming import FinishReason
from paceline.testing.fake_engine_client import fake_worker_engine

PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def engine() -> Iterator[WorkerEngine]:
    found = fake_worker_engine(backend_options={"eos_every": 10**9})
    yield found
    found.close()


def message(
    prompt: str = "a fox", states: list[GenerationState | None] | None = None, **params: Any
) -> messages.EngineRequest:
    return messages.EngineRequest(
        key=77,
        prompts=[list(prompt.encode())],
        params={"max_tokens": 12, "ignore_eos": True, "seed": 3, **params},
        options={},
        submitted_s=0.0,
        states=states or [None] * params.get("n", 1),
    )


def relayed(engine: WorkerEngine, request: messages.EngineRequest) -> list[RequestEvent]:
    """Return all parts of a request."""
    parts: queue.SimpleQueue[RequestEvent] = queue.SimpleQueue()
    key = engine.relay(request, parts.put)
    found = []
    while not found or not isinstance(found[-1], Released):
        found.append(parts.get(timeout=PATIENCE_S))
        assert found[-1].key == key
    return found


def drawn(parts: list[RequestEvent]) -> list[int]:
    return [token for part in parts if isinstance(part, Delta) for token in part.drawn]


def last(parts: list[RequestEvent]) -> Delta:
    return next(part for part in parts if isinstance(part, Delta) and part.is_last)


def test_a_request_is_relayed_from_its_beginning_to_its_end(engine: WorkerEngine) -> None:
    """All tokens come, with the request's events, and nothing is open then."""
    parts = relayed(engine, message())
    assert len(drawn(parts)) == 12
    assert any(isinstance(part, Started) and part.progress for part in parts)
    chunk = last(parts).chunk
    assert chunk is not None and chunk.finish_reason is FinishReason.LENGTH
    assert engine.num_open == 0


def test_a_request_goes_on_from_what_another_engine_generated(engine: WorkerEngine) -> None:
    """With the state of a choice the rest comes, and no token twice."""
    whole = drawn(relayed(engine, message()))
    state = GenerationState(token_ids=whole[:7], num_sent=7)
    parts = relayed(engine, message(states=[state]))
    assert drawn(parts) == whole[7:]
    first = next(part.chunk for part in parts if isinstance(part, Delta) and part.chunk is not None)
    assert first.index == 7
    assert state.token_ids == whole  # the record is the relay's from then on


def test_a_choice_that_has_ended_stays_so(engine: WorkerEngine) -> None:
    """Of two choices the ended choice brings nothing more."""
    both = relayed(engine, message(n=2))
    tokens = [
        [t for item in both if isinstance(item, Delta) and item.choice == choice for t in item.drawn]
        for choice in (0, 1)
    ]
    ended = GenerationState(token_ids=tokens[0], num_sent=12, reason=FinishReason.LENGTH)
    parts = relayed(engine, message(n=2, states=[ended, None]))
    assert drawn(parts) == tokens[1]
    assert {part.choice for part in parts if isinstance(part, Delta)} == {1}


def test_a_cancel_ends_a_relayed_request(engine: WorkerEngine) -> None:
    """The other front's command reaches the request under its local key."""
    parts: queue.SimpleQueue[RequestEvent] = queue.SimpleQueue()
    key = engine.relay(message(max_tokens=1_000_000), parts.put)
    parts.get(timeout=PATIENCE_S)
    engine.command(Cancel(key))
    found = []
    while not found or not isinstance(found[-1], Released):
        found.append(parts.get(timeout=PATIENCE_S))
    chunk = last(found).chunk
    assert chunk is not None and chunk.finish_reason is FinishReason.CANCELLED


def test_a_wrong_request_is_refused_and_leaves_nothing(engine: WorkerEngine) -> None:
    """An invalid message raises, and the next request runs."""
    with pytest.raises(InvalidParams):
        engine.relay(message(temperature=-1.0), lambda _: None)
    with pytest.raises(InvalidParams):
        engine.relay(msgspec.structs.replace(message(), options={"lora": {"none": 1.0}}), lambda _: None)
    with pytest.raises(InvalidParams, match="number of states"):
        engine.relay(message(states=[None, None]), lambda _: None)
    assert engine.num_open == 0
    assert drawn(relayed(engine, message()))


def test_texts_to_embed_are_relayed(engine: WorkerEngine) -> None:
    """Vectors come as they do from a worker."""
    request = messages.EngineRequest(key=1, prompts=[[1, 2], [3]], params=None, options={}, submitted_s=0.0)
    parts = relayed(engine, request)
    assert [len(part.vectors) for part in parts if isinstance(part, Embedded)] == [2]


def test_texts_with_media_are_relayed(engine: WorkerEngine) -> None:
    """With their items; images that the worker has no projector for fail."""
    items = (MediaItem(2, 2, 1, b"one"), MediaItem(6, 2, 1, b"two"))
    texts = [[1, 2, 0, 0, 3], [4, 0, 0, 3], [5]]
    request = messages.EngineRequest(
        key=1, prompts=texts, params=None, pooling="last", options={}, submitted_s=0.0, media=items
    )
    (found,) = [item for item in relayed(engine, request) if isinstance(item, Embedded)]
    assert (len(set(found.vectors)), found.error) == (3, None)
    image = Image(picture(1))
    data = messages.AttachmentData(image.format, image.extent, image.data)
    parts = relayed(engine, msgspec.structs.replace(request, attachments=(data,)))
    errors = [part.error for part in parts if isinstance(part, Embedded)]
    assert [type(error) for error in errors] == [Unsupported]


def test_closing_ends_relayed_requests_with_parts_of_the_front() -> None:
    """Requests of other fronts end with SHUTDOWN when the engine is closed, also requests that no worker has any more."""
    engine = fake_worker_engine(backend_options={"eos_every": 10**9})
    parts: queue.SimpleQueue[RequestEvent] = queue.SimpleQueue()
    engine.relay(message(max_tokens=1_000_000), parts.put)
    parts.get(timeout=PATIENCE_S)
    engine.close()
    found = []
    while not parts.empty():
        found.append(parts.get())
    chunk = last(found).chunk
    assert chunk is not None and chunk.finish_reason is FinishReason.SHUTDOWN
    with pytest.raises(EngineStopped):
        engine.relay(message(), parts.put)
