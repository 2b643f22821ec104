"""`ReplicaCalls` by way of Ray Serve: routed calls through a deployment handle, others through the replicas it has found.

On the event loop of the engine that calls.
"""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest

from paceline.cluster import PromptBlocks
from paceline.cluster.replica_calls import Call, ReplicaGone
from paceline.ray_serve.membership import membership_of
from paceline.ray_serve.routed_prompt import RoutedPrompt

_FIRST_WAIT_S = 0.05  # for the first routed call, after which others can be made


class RayCalls:
    """Calls to the replicas of one deployment."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle.options()
        self._membership = membership_of(handle.app_name, handle.deployment_name)
        self._loop = asyncio.get_running_loop()
        self._changed: Callable[[frozenset[str]], None] = lambda _: None
        self._finding: asyncio.Task[None] | None = None

    def watch(self, changed: Callable[[frozenset[str]], None]) -> None:
        """See `ReplicaCalls`."""
        self._changed = changed
        self._finding = self._loop.create_task(self._begin())

    async def _begin(self) -> None:
        """Make a first call, which has Serve find the replicas; then listen to which there are."""
        while True:
            try:
                await self._replied(self._handle.options(method_name="ping").remote(RoutedPrompt(PromptBlocks(1))))
                break
            except (ReplicaGone, RayError):
                await asyncio.sleep(_FIRST_WAIT_S)
        self._membership.listen(self._tell)

    def _tell(self, replica_ids: frozenset[str]) -> None:
        """Report the replicas, from the thread of Serve's router."""
        try:
            self._loop.call_soon_threadsafe(self._changed, replica_ids)
        except RuntimeError:
            return  # the engine has ended

    async def route(self, prompt: PromptBlocks, avoid: frozenset[str], method: Call, *args: Any) -> Any:
        """See `ReplicaCalls`. A replica that dies before it takes the call is passed over by Serve."""
        response = self._handle.options(method_name=method).remote(RoutedPrompt(prompt, avoid), *args)
        try:
            return await self._replied(response)
        except asyncio.CancelledError:
            response.cancel()  # it may wait for a replica still
            raise

    async def call(self, replica_id: str, method: Call, *args: Any) -> Any:
        """See `ReplicaCalls`."""
        result = self._send(replica_id, method, args, is_streaming=False)
        return await self._replied(result.get_async())

    async def stream(self, replica_id: str, method: Call, *args: Any) -> AsyncIterator[bytes]:
        """See `ReplicaCalls`."""
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

    def _send(self, replica_id: str, method: Call, args: tuple[Any, ...], *, is_streaming: bool) -> Any:
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
        """See `ReplicaCalls`."""
        if self._finding is not None and not self._finding.done():
            self._finding.cancel()
            await asyncio.wait((self._finding,))
        self._membership.unlisten(self._tell)

    async def _replied(self, reply: Any) -> Any:
        """Return a reply of a replica. Raises `ReplicaGone` where its actor died, and what it raised."""
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
