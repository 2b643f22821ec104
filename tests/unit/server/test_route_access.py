"""Who may call which route: the page about tenants lists the routes of all applications."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Route
from tests.unit.server.flags.world import FakeFiles

from paceline.ray_serve.cluster_app import cluster_routes
from paceline.server.application import build_app
from paceline.server.flags import ModelPresets, resolve
from paceline.server.middleware.access import PUBLIC
from paceline.server.pages import PageRoute
from paceline.server.request_context import OPERATOR_ONLY
from paceline.server.router.router_application import build_router_app
from paceline.server.settings import ServerSettings

PAGE = Path(__file__).parents[3] / "docs" / "guide" / "tenants.md"


def single_routes() -> Iterable[BaseRoute]:
    return build_app(ServerSettings(start_page=True, docs=True)).routes


def router_routes() -> Iterable[BaseRoute]:
    files = FakeFiles({"p.ini": "[one]\nmodel = /one.gguf\n"})
    found = resolve(["--models-preset", "p.ini"], {}, files)
    return build_router_app(found.settings, ModelPresets(found, files)).routes


def cluster_only_routes() -> Iterable[BaseRoute]:
    return cluster_routes(None).routes


def all_routes(routes: Iterable[Any]) -> Iterator[Route]:
    """Yield the routes, those of included routers as well."""
    for route in routes:
        included = getattr(route, "original_router", None)
        if included is not None:
            yield from all_routes(included.routes)
        elif not isinstance(route, PageRoute):
            assert isinstance(route, Route), route
            yield route


def access_of(method: str, route: Route) -> str:
    if method == "GET" and route.path in PUBLIC:
        return "public"
    is_operators = isinstance(route, APIRoute) and OPERATOR_ONLY in route.dependencies
    return "operator" if is_operators else "tenant"


def found_routes() -> dict[str, str]:
    """Return who may call each route of any application; HEAD is as GET."""
    found: dict[str, str] = {}
    for routes in (single_routes(), router_routes(), cluster_only_routes()):
        for route in all_routes(routes):
            for method in (route.methods or set()) - {"HEAD"}:
                access = access_of(method, route)
                name = f"{method} {route.path}"
                assert found.setdefault(name, access) == access, name
    return found


def documented_routes() -> dict[str, str]:
    rows = re.findall(r"^\| (`[A-Z]+ /.*?) \| (public|tenant|operator)[ ,|]", PAGE.read_text("utf-8"), re.MULTILINE)
    return {name: access for names, access in rows for name in re.findall(r"`([A-Z]+ [^`]*)`", names)}


def test_every_route_is_listed_with_the_key_that_it_needs() -> None:
    """A new route without a row in the page fails here, and so does a row without a route."""
    assert documented_routes() == found_routes()


def test_routes_that_change_the_server_need_an_operators_key() -> None:
    """What changes the server for all tenants, or shows what replicas do for all of them, is the operator's."""
    assert {name for name, access in found_routes().items() if access == "operator"} == {
        "POST /lora-adapters",
        "POST /props",
        "POST /v1/load_lora_adapter",
        "POST /v1/unload_lora_adapter",
        "POST /models",
        "DELETE /models",
        "POST /models/load",
        "POST /models/unload",
        "GET /cluster",
        "GET /cluster/{model}/{replica}/slots",
        "GET /cluster/{model}/{replica}/metrics",
    }
