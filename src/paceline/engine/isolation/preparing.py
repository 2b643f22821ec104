"""Makes requests ready for the worker's engine: samplers, grammars, stop strings, what was generated before.

On a thread of its own, since all of that takes time: neither the engine's thread nor the one that listens waits for it.
"""

from __future__ import annotations

import dataclasses
import threading

from paceline.engine.backend import Backend
from paceline.engine.commands import Cancel, Command, EndSlow, SetPaused
from paceline.engine.executor import as_paceline_error
from paceline.engine.inbox import Inbox
from paceline.engine.isolation import messages
from paceline.engine.isolation.black_box import BlackBox
from paceline.engine.isolation.outlet import SocketOutlet
from paceline.engine.text_requests import check_embeddable
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.scheduling.embedding import EmbeddingRequest
from paceline.scheduling.sequence import Past, Request
from paceline.streaming.chunk import FinishReason


class Preparing:
    """Takes requests as messages and lets them into the engine."""

    def __init__(
        self,
        inbox: Inbox,
        outlet: SocketOutlet,
        backend: Backend,
        box: BlackBox,
    ) -> None:
        self._inbox, self._outlet, self._backend, self._box = inbox, outlet, backend, box
        self._lock = threading.Lock()
        self._pending: dict[int, list[Command]] = {}  # what came for requests that are not ready

    def expect(self, key: int) -> None:
        """The request was received: what comes for it waits until it is ready. Listening thread."""
        with self._lock:
            self._pending[key] = []

    def tell(self, message: messages.Cancel | messages.SetPaused | messages.EndSlow) -> None:
        """Passes on what is asked of a request, after the request itself. Listening thread."""
        command = _command(message)
        with self._lock:
            early = self._pending.get(message.key)
            if early is not None:
                early.append(command)
                return
        self._inbox.put(command)

    def prepare(self, message: messages.Generate | messages.Embed) -> None:
        """Makes one ready; what is wrong with it is told to the front. Preparing thread."""
        self._box.prepare(message.key)
        try:
            request = self._request(message) if isinstance(message, messages.Generate) else self._texts(message)
            self._outlet.accept(request)
        except Exception as error:  # noqa: BLE001 - the thread outlives whatever one request does
            self._outlet.fail(message.key, as_paceline_error(error))
        finally:
            self._box.prepare(None)
        with self._lock:
            for command in self._pending.pop(message.key, ()):
                self._inbox.put(command)

    def _request(self, message: messages.Generate) -> Request:
        params, options = SamplingParams(**message.params), RequestOptions(**message.options)
        if params.prompt_logprobs is not None:  # else the front would not know of scores that wait for an interval
            options = dataclasses.replace(options, interval=1)
        samplers = self._backend.make_samplers(params, message.prompt)
        for sampler, told in zip(samplers, message.told, strict=True):
            if told is not None and told.reason is None:
                self._backend.resume_sampler(sampler, told.token_ids, told.state)
        request = Request(
            key=message.key,
            prompt=message.prompt,
            params=params,
            options=options,
            samplers=samplers,
            submitted_s=message.submitted_s,
            lora=options.lora,
            vocabulary=self._backend.vocabulary,
            pasts=[None if told is None else _past(told) for told in message.told],
            echo=message.echo,
        )
        life = message.life
        request.started_s, request.first_token_s = life.started_s, life.first_token_s
        request.num_cached, request.cached_from = life.num_cached, life.cached_from
        return request

    def _texts(self, message: messages.Embed) -> EmbeddingRequest:
        pooling = self._backend.prepare_embedding(message.pooling)
        check_embeddable(message.texts, self._backend.max_embedding_tokens(pooling))
        return EmbeddingRequest(
            key=message.key,
            texts=message.texts,
            pooling=pooling,
            options=RequestOptions(**message.options),
            submitted_s=message.submitted_s,
            started_s=message.started_s,
        )


def _command(message: messages.Cancel | messages.SetPaused | messages.EndSlow) -> Command:
    match message:
        case messages.Cancel(key):
            return Cancel(key)
        case messages.SetPaused(key, is_paused):
            return SetPaused(key, is_paused)
        case messages.EndSlow(key):
            return EndSlow(key)


def _past(told: messages.Told) -> Past:
    return Past(
        token_ids=told.token_ids,
        num_told=told.num_told,
        untold=told.untold,
        num_scored=told.num_scored,
        reason=None if told.reason is None else FinishReason(told.reason),
    )
