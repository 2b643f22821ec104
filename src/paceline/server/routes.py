"""Routes with their facts for middleware, and the route that a request matches.

A route states its facts where it is defined:

    ROUTES = Routes(RouteFacts(errors=OPENAI_FORM, model="required"), tags=["OpenAI"])

    @ROUTES.post("/v1/completions", summary="Complete a text", early=EVENTS)
    async def complete(body: CompletionBody, request: Request) -> Response:
        service = Service.of(request.scope)  # of the model that the request names, which is loaded
        ...

Middleware reads `facts_of(scope)`. No other module compares paths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal, TypeVar

from fastapi import Depends
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from paceline.server.api_errors import LLAMA_FORM, ApiError, ApiException, ErrorForm, error_body_response
from paceline.server.json_bodies import LLAMA_ERRORS, JsonRequest, Responses
from paceline.server.request_context import SERVICE, EarlyResponse, RequestContext
from paceline.server.sse import SSE, Framing

_MAX_KNOWN = 512  # pairs of method and path that are remembered: clients choose paths
_MAX_KNOWN_PATH = 128  # characters of a path that is remembered
_TABLE = "paceline_routes"  # a member of the application's state


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStream:
    """The format of a stream that may begin before its model is loaded, with heartbeats until the model replies.

    Attributes:
        framing: How events are sent.
        error_event: Returns the event of the body of an error.
        done: The last event; empty: there is none.
        begin: Begins the response of a model by its name, for the model's stream to continue; None: a heartbeat is a ping.
    """

    framing: Framing
    error_event: Callable[[bytes], bytes] = lambda body: body
    done: bytes = b""
    begin: Callable[[str], EarlyResponse] | None = None


EVENTS: Final = EarlyStream(framing=SSE, done=b"[DONE]")
"""Events without names, of OpenAI's and llama-server's completions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteFacts:
    """Facts of a route for middleware.

    Attributes:
        errors: The form of its errors.
        public: Whether a request needs no API key.
        operator: Whether the key must be an operator's if the server has tenants.
        model: "required": the route runs with the `Service` of the model that the request names. "none": it is about the whole
            server. "named": the same, but a request with ?model= goes to the model's own route of the same path.
        loads_model: Whether a request loads its model. ?autoload= overrides this.
        is_counted: Whether a request counts as in flight, so that a server that drains waits for it.
        is_limited: Whether the limits of API keys hold for a POST request with a model; they do not if it computes nothing.
        while_draining: Whether a POST request is accepted while the server drains.
        takes_forms: Whether the body may be multipart/form-data; other bodies are read as JSON.
        early: The format of its stream if that may begin before the model is loaded.
    """

    errors: ErrorForm = LLAMA_FORM
    public: bool = False
    operator: bool = False
    model: Literal["required", "named", "none"] = "none"
    loads_model: bool = True
    is_counted: bool = True
    is_limited: bool = True
    while_draining: bool = False
    takes_forms: bool = False
    early: EarlyStream | None = None


_NO_FACTS: Final = RouteFacts()
_FACTS: Final = frozenset(field.name for field in fields(RouteFacts))


class ApiRoute(APIRoute):
    """A route of the API. It reads its body with `JsonRequest`."""

    facts: RouteFacts = _NO_FACTS

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match a request, unless it names a model and a later route is about models."""
        if self.facts.model == "named" and SERVICE in scope:
            return Match.NONE, {}
        return super().matches(scope)

    def get_route_handler(self) -> Callable[[Request], Any]:
        """Return FastAPI's handler, called with a `JsonRequest`."""
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json


Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


class Routes(list[BaseRoute]):
    """A list of routes that have some properties in common.

    Args:
        facts: The facts of each route, unless it changes them.
        tags: Groups of the API's document.
        responses: Descriptions of responses for the API's document, beside the default.
    """

    def __init__(self, facts: RouteFacts, *, tags: Sequence[str] = (), responses: Responses | None = None) -> None:
        super().__init__()
        self._facts, self._tags = facts, tags
        self._responses: Responses = {**LLAMA_ERRORS, **(responses or {})}

    def get(self, path: str, **options: Any) -> Callable[[Endpoint], Endpoint]:
        """Return a decorator that adds a GET route. options: as `add` has them."""
        return lambda endpoint: self.add("GET", path, endpoint, **options)

    def post(self, path: str, **options: Any) -> Callable[[Endpoint], Endpoint]:
        """Return a decorator that adds a POST route. options: as `add` has them."""
        return lambda endpoint: self.add("POST", path, endpoint, **options)

    def delete(self, path: str, **options: Any) -> Callable[[Endpoint], Endpoint]:
        """Return a decorator that adds a DELETE route. options: as `add` has them."""
        return lambda endpoint: self.add("DELETE", path, endpoint, **options)

    def add(
        self, method: str, path: str, endpoint: Endpoint, *, responses: Responses | None = None, **options: Any
    ) -> Endpoint:
        """Add a route, and return its endpoint. options: of FastAPI's `APIRoute`, and fields of `RouteFacts` that differ."""
        facts = replace(self._facts, **{name: options.pop(name) for name in _FACTS if name in options})
        route = ApiRoute(
            path,
            endpoint,
            methods=[method],
            tags=list(self._tags),
            responses={**self._responses, **(responses or {})},
            dependencies=[_OPERATOR_ONLY] if facts.operator else None,
            **options,
        )
        route.facts = facts
        self.append(route)
        return endpoint


def check_operator(request: Request) -> None:
    """Raise `ApiException` (403) if the request's key is a tenant's and not the operator's."""
    if not RequestContext.of(request.scope).is_operator:
        raise ApiException(_OPERATOR_KEY_REQUIRED)


_OPERATOR_ONLY: Final = Depends(check_operator)
_OPERATOR_KEY_REQUIRED: Final = ApiError(
    403,
    "permission_error",
    "operator_key_required",
    "this request acts on all tenants of the server, and the API key belongs to one of them; send an operator's key, which is "
    "one of --api-key or --api-key-file",
)


# ---- which route a request matches


class RouteTable:
    """Finds the route of a method and a path. Results are remembered, except for files of a web page, which may change."""

    def __init__(self, routes: Sequence[BaseRoute] = ()) -> None:
        self._routes = [route for route in routes if not getattr(route, "is_dynamic", False)]
        self._dynamic = [route for route in routes if getattr(route, "is_dynamic", False)]
        self._known: dict[tuple[str, str], tuple[RouteFacts | None, ErrorForm]] = {}
        forms = {_facts(route).errors for route in routes}
        self._prefixes = sorted(((prefix, form) for form in forms for prefix in form.paths), key=lambda pair: pair[0])

    def facts(self, method: str, path: str) -> RouteFacts | None:
        """Return the facts of the route of this method and this path without the server's prefix; None if there is none."""
        facts, _ = self._find(method, path)
        if facts is None and self._dynamic:
            match, dynamic = self._match(self._dynamic, method, path)
            return dynamic if match is Match.FULL else None
        return facts

    def errors(self, method: str, path: str) -> ErrorForm:
        """Return the form of errors of a request: of its route, else of a route of its path, else of similar paths."""
        return self._find(method, path)[1]

    def _find(self, method: str, path: str) -> tuple[RouteFacts | None, ErrorForm]:
        """Return the facts of the route that serves the request, if there is a route, and the form of errors."""
        known = self._known.get((method, path))
        if known is None:
            match, facts = self._match(self._routes, method, path)
            errors = facts.errors
            if facts is _NO_FACTS:  # no route has this path: the form of its longest prefix
                forms = [
                    form
                    for prefix, form in self._prefixes
                    if path == prefix or path.startswith(f"{prefix.rstrip('/')}/")
                ]
                errors = forms[-1] if forms else LLAMA_FORM
            known = facts if match is Match.FULL else None, errors
            if len(path) <= _MAX_KNOWN_PATH:
                if len(self._known) >= _MAX_KNOWN:
                    self._known.clear()  # clients may make up many paths
                self._known[method, path] = known
        return known

    def _match(self, routes: Sequence[BaseRoute], method: str, path: str) -> tuple[Match, RouteFacts]:
        scope = {"type": "http", "method": method, "path": path, "root_path": "", "headers": []}
        best, facts = Match.NONE, _NO_FACTS
        for route in routes:
            match, _ = route.matches(scope)
            if match is Match.FULL:
                return match, _facts(route)
            if match is Match.PARTIAL and best is Match.NONE:
                best, facts = match, _facts(route)
        return best, facts


def _facts(route: BaseRoute) -> RouteFacts:
    facts = getattr(route, "facts", _NO_FACTS)
    return facts if isinstance(facts, RouteFacts) else _NO_FACTS


def route_path(scope: Scope) -> str:
    """Return the path without the server's prefix."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    if root and (path == root or path.startswith(root + "/")):
        return path[len(root) :] or "/"
    return path


def facts_of(scope: Scope) -> RouteFacts | None:
    """Return the facts of the route that a request matches; None if no route serves it."""
    return _table_of(scope).facts(scope["method"], route_path(scope))


def error_form_of(scope: Scope) -> ErrorForm:
    """Return the form of errors of a request."""
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    return _table_of(scope).errors(method, route_path(scope))


def error_response(api_error: ApiError, scope: Scope, headers: Mapping[str, str] | None = None) -> Response:
    """Return the response that reports an error to a request, in the form of its route."""
    return error_body_response(api_error, error_form_of(scope), headers)


def _table_of(scope: Scope) -> RouteTable:
    app = scope.get("app")
    if app is None:  # an application that is only middleware
        return RouteTable()
    table = getattr(app.state, _TABLE, None)
    if not isinstance(table, RouteTable):
        table = RouteTable(app.routes)
        setattr(app.state, _TABLE, table)
    return table
