"""Calls to replicas by Ray Serve: routed calls go through a deployment handle, others to a replica that Serve's router has found.

Serve makes its request router itself, on a thread of its own. `Membership` is the place where the router and the engine that
calls the replicas meet: the router writes the replicas there, the engine reads them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RunningReplica

from paceline.cluster import PromptBlocks
from paceline.cluster.replica_calls import Method, ReplicaGone

_FIRST_WAIT_S = 0.05  # between tries of the first routed call, after which others can be made


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """The first argument of a routed call, for the request router.

    Attributes:
        prompt: The request's prompt.
        avoid: Replicas that are chosen only if there are no others.
    """

    prompt: PromptBlocks
    avoid: frozenset[str] = frozenset()


class Membership:
    """The replicas of a deployment as this process's request router knows them. Any thread may call.

    Attributes:
        sample: A request that the router has seen; None before the first.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._replicas: Mapping[str, RunningReplica] = {}  # that take requests
        self._listeners: list[Callable[[frozenset[str]], None]] = []
        self._known: dict[str, RunningReplica] = {}  # also replicas that took requests until recently
        self.sample: PendingRequest | None = None

    def set(self, replicas: Mapping[str, RunningReplica]) -> None:
        """Replace the replicas, and tell the listeners if the set has changed."""
        with self._lock:
            is_same = replicas.keys() == self._replicas.keys()
            self._replicas = dict(replicas)
            self._known.update(replicas)
            if not is_same:
                self._tell(*self._listeners)

    def remove(self, replica_id: str) -> None:
        """Take out a replica that has died."""
        with self._lock:
            self.set({name: replica for name, replica in self._replicas.items() if name != replica_id})

    def listen(self, listener: Callable[[frozenset[str]], None]) -> None:
        """Call a listener now and at each change. It is called under the lock, on any thread, so it must not wait."""
        with self._lock:
            self._listeners.append(listener)
            self._tell(listener)

    def unlisten(self, listener: Callable[[frozenset[str]], None]) -> None:
        """Stop calling a listener; an unknown listener is no error."""
        with self._lock, suppress(ValueError):
            self._listeners.remove(listener)

    def _tell(self, *listeners: Callable[[frozenset[str]], None]) -> None:
        """Call listeners under the lock, so that the newest report is the last report that each listener gets."""
        for listener in listeners:
            listener(frozenset(self._replicas))

    def find(self, replica_id: str) -> RunningReplica | None:
        """Return a replica, also one that takes no more requests; None if it was forgotten."""
        return self._known.get(replica_id)

    def name_of_actor(self, actor_id: str | None) -> str | None:
        """Return the replica of an actor, by the hexadecimal id that errors have; None if it is unknown."""
        found = (name for name, replica in list(self._known.items()) if replica.actor_id.hex() == actor_id)
        return None if actor_id is None else next(found, None)

    def forget(self, replica_id: str) -> None:
        """Forget a replica that takes no more requests."""
        with self._lock:
            if replica_id not in self._replicas:
                self._known.pop(replica_id, None)


@cache
def membership_of(app: str, deployment: str) -> Membership:
    """Return the membership of a deployment in this process."""
    del app, deployment  # they are the key of the cache
    return Membership()


class RayCalls:
    """The `ReplicaCalls` of one deployment, on the event loop of the engine that calls."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle.options()
        self._membership = membership_of(handle.app_name, handle.deployment_name)
        self._loop = asyncio.get_running_loop()
        self._changed: Callable[[frozenset[str]], None] = lambda _: None
        self._finding: asyncio.Task[None] | None = None

    def watch(self, changed: Callable[[frozenset[str]], None]) -> None:
        """Call `changed` with the replicas that take requests, as soon as Serve has found them and at each change."""
        self._changed = changed
        self._finding = self._loop.create_task(self._find())

    async def _find(self) -> None:
        """Make a first call, which has Serve find the replicas; then listen to the membership."""
        while True:
            try:
                await self._replied(self._handle.options(method_name="ping").remote(RoutedPrompt(PromptBlocks(1))))
                break
            except (ReplicaGone, RayError):
                await asyncio.sleep(_FIRST_WAIT_S)
        self._membership.listen(self._tell)

    def _tell(self, replica_ids: frozenset[str]) -> None:
        """Report the replicas, from the thread of Serve's router."""
        with suppress(RuntimeError):  # the engine has ended
            self._loop.call_soon_threadsafe(self._changed, replica_ids)

    async def route(self, prompt: PromptBlocks, avoid: frozenset[str], method: Method, *args: Any) -> Any:
        """Call the best replica for a prompt. If a replica dies before it takes the call, Serve passes it over."""
        response = self._handle.options(method_name=method).remote(RoutedPrompt(prompt, avoid), *args)
        try:
            return await self._replied(response)
        except asyncio.CancelledError:
            response.cancel()  # it may still wait for a replica
            raise

    async def call(self, replica_id: str, method: Method, *args: Any) -> Any:
        """Return the result of a method of one replica."""
        return await self._replied(self._send(replica_id, method, args, is_streaming=False).get_async())

    async def stream(self, replica_id: str, method: Method, *args: Any) -> AsyncIterator[bytes]:
        """Yield the items of a method of one replica."""
        result = self._send(replica_id, method, args, is_streaming=True)
        try:
            while True:
                try:
                    frame = await self._replied(result.__anext__())
                except StopAsyncIteration:
                    return
                yield frame
        finally:
            result.cancel()

    def _send(self, replica_id: str, method: Method, args: tuple[Any, ...], *, is_streaming: bool) -> Any:
        replica, sample = self._membership.find(replica_id), self._membership.sample
        if replica is None or sample is None:
            raise ReplicaGone("it is not known any more", replica_id)
        number = uuid.uuid4().hex
        metadata = dataclasses.replace(
            sample.metadata,
            request_id=number,
            internal_request_id=number,
            call_method=method,
            is_streaming=is_streaming,
        )
        return replica.try_send_request(PendingRequest(list(args), {}, metadata), with_rejection=False)

    def forget(self, replica_id: str) -> None:
        """Forget a replica that is gone."""
        self._membership.forget(replica_id)

    async def aclose(self) -> None:
        """End the search for replicas and stop listening."""
        if self._finding is not None and not self._finding.done():
            self._finding.cancel()
            await asyncio.wait((self._finding,))
        self._membership.unlisten(self._tell)

    async def _replied(self, reply: Any) -> Any:
        """Return a replica's reply. Raises `ReplicaGone` if its actor died, and the errors that the method raised."""
        try:
            return await reply
        except RayActorError as error:
            name = self._membership.name_of_actor(getattr(error, "actor_id", None))
            raise ReplicaGone(_first_line(error), name) from error
        except RayTaskError as error:
            if isinstance(error.cause, ReplicaGone):
                raise error.cause from None
            raise error.as_instanceof_cause() from None
        except (RayError, RayServeException) as error:
            raise ReplicaGone(_first_line(error)) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise ReplicaGone("it cancelled the call, as it is being stopped") from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
