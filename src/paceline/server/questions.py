"""Questions to the engine that have one answer and no stream: cancelled where their client hangs up, or by their id.

On the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from paceline.engine.collecting import answered
from paceline.errors import Cancelled
from paceline.server.exchange import Exchange
from paceline.server.hang_up import HangUp
from paceline.server.service import Service


@dataclass(slots=True, eq=False)
class _Asking:
    """As `OpenRequests` wants it."""

    request_id: str
    tenant: str
    task: asyncio.Future[list[Any]]
    is_cancelled: bool = False
    num_parts: int = 1

    def cancel(self) -> None:
        """Ends it."""
        self.is_cancelled = True
        self.task.cancel()


async def ask(service: Service, request: Request, submit: Callable[[], Future[list[Any]]]) -> list[Any]:
    """Calls `submit` in a thread and waits for its answer. The request's body must have been read.

    Raises what the engine raises, `Draining`, `ClientGone` after a hang-up, `Cancelled` where somebody cancelled it by its id.
    """
    service.check_accepting()
    exchange = Exchange.of(request.scope)
    asking = _Asking(exchange.request_id, exchange.tenant, asyncio.ensure_future(answered(submit)))
    hang_up = HangUp(request)
    hang_up.tell(asking.task.cancel)
    service.open_requests.add(asking)
    try:
        return await asking.task
    except asyncio.CancelledError:
        hang_up.check()
        if asking.is_cancelled:
            raise Cancelled("the request was cancelled") from None
        raise
    finally:
        hang_up.close()
        service.open_requests.remove(asking)
