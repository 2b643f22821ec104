"""A route costs one file: its facts stand at its definition, and middleware reads them there."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

import paceline
from paceline.server.api_errors import OPENAI_FORM
from paceline.server.application import build_app
from paceline.server.json_bodies import json_response
from paceline.server.request_context import RequestContext
from paceline.server.routes import RouteFacts, Routes
from paceline.server.settings import ApiKey, ServerSettings

SERVER = Path(paceline.__file__).parent / "server"


def routes() -> Routes:
    router = Routes(RouteFacts(), tags=["new"])

    @router.get("/new", summary="A public route", public=True)
    async def read() -> Response:
        return json_response("public")

    @router.post("/new/keyed", summary="A route with OpenAI's errors", errors=OPENAI_FORM)
    async def keyed() -> Response:
        return json_response("keyed")

    @router.post("/new/form", summary="A route that takes a form", takes_forms=True)
    async def form(request: Request) -> Response:
        async with request.form() as fields:
            return json_response({"a": fields["a"]})

    return router


def test_a_new_route_has_its_key_its_errors_and_its_body_without_any_other_change() -> None:
    """The document of the API has it too."""
    app = build_app(ServerSettings(api_keys=(ApiKey(secret="secret"),)))
    app.router.routes.extend(routes())
    keyed = {"x-api-key": "secret"}

    async def responses() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return [
                await client.get("/new"),
                await client.post("/new/keyed"),
                await client.post("/new/keyed", headers=keyed),
                await client.post("/new/form", headers=keyed, data={"a": "b"}, files={"f": b""}),
            ]

    public, refused, served, posted = asyncio.run(responses())
    assert public.json() == "public"
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    assert served.json() == "keyed"
    assert posted.json() == {"a": "b"}
    assert {"/new", "/new/keyed", "/new/form"} <= app.openapi()["paths"].keys()


@pytest.mark.parametrize(
    "headers", [{}, {"authorization": ""}, {"authorization": "Bearer "}, {"authorization": "Bearer"}, {"x-api-key": ""}]
)
def test_a_request_without_a_key_has_none_even_if_a_key_of_the_settings_is_empty(headers: dict[str, str]) -> None:
    """An empty key would let every request in. The flags refuse one, and so does a server of other settings."""
    app = build_app(ServerSettings(api_keys=(ApiKey(secret=""), ApiKey(secret="secret"))))
    app.router.routes.extend(routes())

    async def status() -> int:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return (await client.post("/new/keyed", headers=headers)).status_code

    assert asyncio.run(status()) == 401


@pytest.mark.parametrize(("keys", "status"), [((ApiKey(secret="secret"),), 401), ((), 200)])
def test_a_batch_without_an_account_is_refused_if_there_are_keys(keys: tuple[ApiKey, ...], status: int) -> None:
    """Its key is gone, and so are all keys of its tenant."""
    app = build_app(ServerSettings(api_keys=keys))
    app.router.routes.extend(routes())

    async def as_batch(scope: Scope, receive: Receive, send: Send) -> None:
        context = RequestContext.of(scope)
        context.is_internal, context.tenant, context.key_digest = True, "gone", b"digest"
        await app(scope, receive, send)

    async def found() -> int:
        transport = httpx.ASGITransport(as_batch)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return (await client.post("/new/keyed")).status_code

    assert asyncio.run(found()) == status


def test_no_module_but_that_of_routes_compares_paths() -> None:
    """A table of URLs elsewhere would be a second place to change."""
    compares = re.compile(r'startswith\(\(?f?"/|path (?:==|!=|in) [\("\']|== "/')
    modules = [path for path in SERVER.rglob("*.py") if path.name != "routes.py" and "flags" not in path.parts]
    found = [path.name for path in modules for line in path.read_text("utf-8").splitlines() if compares.search(line)]
    assert found == []
