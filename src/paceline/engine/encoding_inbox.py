"""An inbox in front of which requests with images or audio wait until they are encoded.

    submit ──> [encoding queue] ──> commands ──> engine's thread

Commands for a request that waits come behind it. A cancel or a deadline ends its wait or its encoding, and the scheduler ends the
request. What cannot be encoded is found by the pass that would compute it, which ends its request alone.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.clock import Clock
from paceline.engine.commands import Cancel, Command, EndSlow, SetInterval, SetPaused, Stop, Submit
from paceline.engine.encoding_queue import EncodingQueue
from paceline.engine.executor import as_paceline_error
from paceline.engine.inbox import Inbox
from paceline.engine.media_encoder import MediaEncoder, num_bytes
from paceline.errors import Cancelled
from paceline.request import turn_s
from paceline.scheduling.records import EmbeddingRequest
from paceline.sequence import Request


class EncodingInbox(Inbox):
    """Bounds as `Inbox`. The queue's threads begin with the first such request, and end with `close_encoder`."""

    def __init__(self, max_requests: int, max_queue_tokens: int | None, encoder: MediaEncoder, clock: Clock) -> None:
        super().__init__(max_requests, max_queue_tokens)
        self._encoder = encoder
        self._early: dict[int, list[Command]] = {}  # commands for requests that wait
        self._queue = EncodingQueue(encode=self._encode, give_up=self._give_up, abort=encoder.cancel, clock=clock)
        self.on_left = self._queue.let_go

    def _begin(self, request: Request | EmbeddingRequest) -> None:
        if not request.attachments:
            super()._begin(request)
            return
        self._early[request.key] = []
        turn = turn_s(request.submitted_s, request.options.priority)
        self._queue.put(request.key, request, request.deadline_s(), turn, request.options.tenant)

    def put(self, command: Command) -> None:
        """As `Inbox.put`, behind the request that the command is for. `Stop` also ends what is encoded, and what waits for it."""
        if isinstance(command, Stop):
            self._encoder.stop()
        if isinstance(command, (Cancel, SetPaused, SetInterval, EndSlow)):
            early = self._early.get(command.key)
            if early is not None:
                early.append(command)
                if isinstance(command, Cancel):
                    self._queue.release(command.key)
                if command.key in self._early:
                    return  # else it may have come too late for the list; twice does no harm
        super().put(command)

    def close_encoder(self) -> None:
        """End the threads, then free the projector; what waits still is never encoded."""
        self._encoder.close()
        self._queue.close()

    def _encode(self, request: Request | EmbeddingRequest, is_given_up: Callable[[], bool]) -> None:
        namespace = request.options.tenant, request.options.cache_salt
        try:
            request.embeddings = self._encoder.encode(
                request.key, request.attachments, request.media, namespace, lambda: request.cancelled or is_given_up()
            )
            self._queue.hold(request.key, num_bytes(request.embeddings.values()))
        except Exception as error:  # noqa: BLE001 - of this request alone
            request.embeddings = as_paceline_error(error)
        self._pass_on(request)
        if not self.is_open(request.key):  # it has ended meanwhile, and no one takes it
            self._queue.let_go(request.key)

    def _give_up(self, request: Request | EmbeddingRequest) -> None:
        request.embeddings = Cancelled("the request ended before its images or audio were encoded")
        self._pass_on(request)

    def _pass_on(self, request: Request | EmbeddingRequest) -> None:
        request.attachments = ()  # from here on its embeddings count, and the files may be large
        self._commands.put(Submit(request))
        for command in self._early.pop(request.key, ()):
            self._commands.put(command)
