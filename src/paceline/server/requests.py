"""POST /v1/requests/{id}/cancel: ends a request by the id that its answer's X-Request-Id told."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from paceline.server.exchange import Exchange
from paceline.server.openai.documents import ERRORS
from paceline.server.service import Service


def routes(service: Service) -> APIRouter:
    """The route."""
    router = APIRouter(tags=["requests"])

    @router.post("/v1/requests/{request_id:path}/cancel", summary="Cancel a running request", responses=ERRORS)
    async def cancel(request_id: str, request: Request) -> dict[str, Any]:
        """Of the same key's tenant only. `cancelled` says whether there was one; its stream ends with the code "cancelled"."""
        tenant = Exchange.of(request.scope).tenant
        return {"id": request_id, "cancelled": service.open_requests.cancel(request_id, tenant)}

    return router
