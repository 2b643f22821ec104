"""Requests that another front holds, and this one only relays: parts of the worker go there as they come.

    front of a cluster ──Generate, Embed──> relay ──> worker        with what was generated before, on whatever engine
    front of a cluster <──────parts──────── relay <── worker

To this front they are requests as any other, but for their readers: they are in its replay log and its blame, so that a crash of
the worker is over before the other front hears of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from paceline import validation
from paceline.engine.worker import messages
from paceline.media import Attachment, restored
from paceline.output import Vocabulary
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.scheduling.records import Delta, Embedded, EmbeddingRequest, Ended, Event, Released, Started
from paceline.sequence import GenerationState, Request

TakePart = Callable[[messages.Part], None]


@dataclass(frozen=True, slots=True)
class Relay:
    """Where the parts of a relayed request go, on the supervising thread. states: of its choices, from before."""

    take: TakePart
    states: Sequence[GenerationState | None] | None = None


def relayed_request(message: messages.Generate, key: int, options: RequestOptions, vocabulary: Vocabulary) -> Request:
    """Return the request of a message under another key. Raises `InvalidParams` for what is no request."""
    params = SamplingParams(**message.params)
    validation.integer("the number of states", len(message.states), params.n, params.n)
    validation.integer("the number of prompt tokens", len(message.prompt), 1)
    request = Request(
        key=key,
        prompt=list(message.prompt),
        params=params,
        options=options,
        samplers=(),
        submitted_s=message.submitted_s,
        lora=options.lora,
        vocabulary=vocabulary,
        echo=message.echo,
        media=message.media,
        attachments=attachments_of(message),
    )
    life = message.life
    request.started_s, request.first_token_s = life.started_s, life.first_token_s
    request.num_cached, request.cached_from = life.num_cached, life.cached_from
    return request


def relayed_embedding(message: messages.Embed, key: int, options: RequestOptions) -> EmbeddingRequest:
    """Return the embedding request of a message under another key."""
    return EmbeddingRequest(
        key=key,
        texts=message.texts,
        pooling=message.pooling,
        options=options,
        submitted_s=message.submitted_s,
        started_s=message.started_s,
        media=message.media,
        attachments=attachments_of(message),
    )


def attachments_of(message: messages.Generate | messages.Embed) -> tuple[Attachment, ...]:
    """Return the images and audio of a message."""
    return tuple(restored(one.format, one.extent, one.data, one.name) for one in message.attachments)


def parts_of(events: Iterable[Event]) -> list[messages.Part]:
    """Return the parts of events that a front makes by itself, without a worker; all that was drawn was sent before."""
    parts: list[messages.Part] = []
    for event in events:
        match event:
            case Delta(key, chunk) | Ended(key, chunk):
                parts.append(messages.Chunk(key, chunk.choice, chunk, (), (), None, isinstance(event, Ended)))
            case Released(key):
                parts.append(messages.Freed(key))
            case Embedded(key, vectors, error):
                parts.append(messages.Vectors(key, [np.asarray(one, np.float32).tobytes() for one in vectors], error))
            case Started():
                raise AssertionError("a request starts in a worker")
    return parts


def renamed(part: messages.Part, key: int) -> messages.Part:
    """Return a part under another key."""
    return msgspec.structs.replace(part, key=key)


def moved_in_time(message: messages.Generate | messages.Embed, by_s: float) -> messages.Generate | messages.Embed:
    """Return a request with all its times moved: to ages before it goes to another machine, and back to times there."""
    if isinstance(message, messages.Embed):
        started_s = None if message.started_s is None else message.started_s + by_s
        return msgspec.structs.replace(message, submitted_s=message.submitted_s + by_s, started_s=started_s)
    return msgspec.structs.replace(
        message, submitted_s=message.submitted_s + by_s, life=life_moved_in_time(message.life, by_s)
    )


def life_moved_in_time(life: messages.Life, by_s: float) -> messages.Life:
    """Return what has happened to a request with its times moved."""
    return msgspec.structs.replace(
        life,
        started_s=None if life.started_s is None else life.started_s + by_s,
        first_token_s=None if life.first_token_s is None else life.first_token_s + by_s,
    )


def part_moved_in_time(part: messages.Part, by_s: float) -> messages.Part:
    """Return a part with its times moved."""
    if isinstance(part, messages.Lived):
        return msgspec.structs.replace(part, life=life_moved_in_time(part.life, by_s))
    return part
