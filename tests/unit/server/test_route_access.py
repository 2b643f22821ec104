"""Who may call which route: the page about tenants lists the routes of all applications."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from starlette.routing import BaseRoute, Route
from tests.unit.server.flags.world import FakeFiles

from paceline.ray_serve.cluster_app import cluster_routes
from paceline.server.api_errors import LLAMA_FORM, OPENAI_FORM, ErrorForm
from paceline.server.application import build_app
from paceline.server.dialects.anthropic.anthropic_routes import ANTHROPIC_FORM
from paceline.server.dialects.ollama.ollama_routes import OLLAMA_FORM
from paceline.server.flags import ModelPresets, resolve
from paceline.server.pages import PageRoute
from paceline.server.router.router_app import build_router_app
from paceline.server.routes import RouteFacts, RouteTable
from paceline.server.settings import ServerSettings

PAGE = Path(__file__).parents[3] / "docs" / "guide" / "tenants.md"


def single_routes() -> Iterable[BaseRoute]:
    return build_app(ServerSettings(start_page=True, docs=True)).routes


def router_routes() -> Iterable[BaseRoute]:
    files = FakeFiles({"p.ini": "[one]\nmodel = /one.gguf\n"})
    found = resolve(["--models-preset", "p.ini"], {}, files)
    return build_router_app(found.settings, ModelPresets(found, files)).routes


def cluster_only_routes() -> Iterable[BaseRoute]:
    return cluster_routes(None)


def found_routes() -> dict[str, str]:
    """Return who may call each route of any application; HEAD is as GET."""
    found: dict[str, str] = {}
    for routes in (single_routes(), router_routes(), cluster_only_routes()):
        for route in routes:
            if isinstance(route, PageRoute):
                continue
            assert isinstance(route, Route), route
            facts = facts_of_route(route)
            for method in (route.methods or set()) - {"HEAD"}:
                access = "public" if facts.public else "operator" if facts.operator else "tenant"
                name = f"{method} {route.path}"
                assert found.setdefault(name, access) == access, name
    return found


def facts_of_route(route: Route) -> RouteFacts:
    """FastAPI's own route of the document comes after ours of the same path."""
    facts = getattr(route, "facts", None)
    if route.path == "/openapi.json":
        return RouteFacts(public=True)
    assert isinstance(facts, RouteFacts), route
    return facts


def documented_routes() -> dict[str, str]:
    rows = re.findall(r"^\| (`[A-Z]+ /.*?) \| (public|tenant|operator)[ ,|]", PAGE.read_text("utf-8"), re.MULTILINE)
    return {name: access for names, access in rows for name in re.findall(r"`([A-Z]+ [^`]*)`", names)}


def test_every_route_is_listed_with_the_key_that_it_needs() -> None:
    """A new route without a row in the page fails here, and so does a row without a route."""
    assert documented_routes() == found_routes()


def test_routes_that_change_the_server_need_an_operators_key() -> None:
    """Routes that change the server for all tenants, or show replicas' work for all of them, are the operator's."""
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


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("/v1/messages", ANTHROPIC_FORM),
        ("/v1/messages/nothing", ANTHROPIC_FORM),
        ("/v1/messagesx", OPENAI_FORM),
        ("/v1", OPENAI_FORM),
        ("/v1/rerank", OPENAI_FORM),
        ("/rerank", LLAMA_FORM),
        ("/chat/completions", OPENAI_FORM),
        ("/chat", LLAMA_FORM),
        ("/api", OLLAMA_FORM),
        ("/api/nothing", OLLAMA_FORM),
        ("/apix", LLAMA_FORM),
        ("/nothing", LLAMA_FORM),
    ],
)
def test_errors_have_the_form_of_the_route_or_of_routes_with_a_similar_path(path: str, form: ErrorForm) -> None:
    """For any method."""
    for routes in (single_routes(), router_routes()):
        table = RouteTable(list(routes))
        assert [table.errors(method, path) is form for method in ("GET", "POST", "PUT")] == [True] * 3
