"""GET /openapi.json and /docs: the API, for programs and for people. Made in threads, when somebody first asks."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from paceline.server.api_page import api_page

_HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}


def document_routes(app: FastAPI) -> list[Route]:
    """The routes of an application that has an `openapi_url`; they go before its own."""
    told = next(route.endpoint for route in app.routes if isinstance(route, Route) and route.path == app.openapi_url)

    async def document(request: Request) -> Response:
        await asyncio.to_thread(app.openapi)  # which keeps it
        answer: Response = await told(request)
        return answer

    async def page(request: Request) -> Response:
        root = request.scope.get("root_path", "")
        return HTMLResponse(await asyncio.to_thread(lambda: api_page(app.openapi(), root)), headers=_HEADERS)

    return [
        Route("/openapi.json", document, include_in_schema=False),
        Route("/docs", page, include_in_schema=False),
    ]
