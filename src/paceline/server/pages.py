"""HTML pages: / is the web page or a list of links, /docs is the OpenAPI document, which runs no scripts."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from html import escape
from typing import Any, Final

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response
from starlette.routing import Match, Route
from starlette.types import Scope

from paceline import __version__
from paceline.server.routes import RouteFacts, Routes, route_path
from paceline.server.service import Server, Service
from paceline.server.settings import ServerSettings
from paceline.server.web_page import PageFiles

_HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}


def start_page_routes(server: Server, facts: Callable[[], list[tuple[str, str]]]) -> Routes:
    """Return /: the web page, or a page of links if there is none. facts: about the server, by their names."""
    router = Routes(RouteFacts(public=True))

    @router.get("/", include_in_schema=False)
    async def start_page(request: Request) -> Response:
        root = request.scope.get("root_path", "")
        page = server.page
        if page.files is not None:
            return await file_response(page.files, "/", request)
        if not page.why_not:
            raise HTTPException(404)
        return _links_page(server.settings, page.why_not, facts(), root)

    return router


def _links_page(settings: ServerSettings, why: str, facts: list[tuple[str, str]], root: str) -> HTMLResponse:
    links = {"/health": "health", "/v1/models": "models"}
    if settings.docs:
        links["/docs"] = "API documentation"
    if settings.metrics:
        links["/metrics"] = "metrics"
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)
    shown = " · ".join(f'<a href="{escape(root + path)}">{name}</a>' for path, name in links.items())
    html = _page("paceline", f"<h1>paceline</h1><dl>{listed}</dl><p>{shown}</p><p>{escape(why)}</p>")
    return HTMLResponse(html, headers=_HEADERS)


async def file_response(files: PageFiles, path: str, request: Request) -> Response:
    """Return an existing file of the web page."""
    file = await files.get(path, request.headers)
    if file.path is not None:
        return FileResponse(file.path, file.status, file.headers)
    return Response(file.content, file.status, file.headers)


class PageRoute(Route):
    """The route of all files of a web page but /, and of its folders without a slash. It goes last: other routes win.

    The files are public: the page itself asks for a key.
    """

    facts = RouteFacts(public=True)
    is_dynamic = True  # files come and go

    def __init__(self, files: PageFiles) -> None:
        self._files = files
        super().__init__("/{path:path}", self._send, methods=["GET"], include_in_schema=False)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match a file of the page, or the path of a folder that has an index."""
        if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
            return Match.NONE, {}
        path = route_path(scope)
        if not self._files.has(path) and not self._files.has(path + "/"):
            return Match.NONE, {}
        return Match.FULL, {"endpoint": self.endpoint, "path_params": {}}

    async def _send(self, request: Request) -> Response:
        path = route_path(request.scope)
        if self._files.has(path):
            return await file_response(self._files, path, request)
        root = request.scope.get("root_path", "")  # without scheme and host, which a proxy may have changed
        query = f"?{request.url.query}" if request.url.query else ""
        return RedirectResponse(f"{root}/{path.strip('/')}/{query}", 307)


def server_facts(service: Service) -> list[tuple[str, str]]:
    """Return the facts on the start page of a server with one model."""
    facts = [("version", __version__), ("model", ", ".join(service.names))]
    if service.is_loaded:
        config = service.engine().config
        return [*facts, ("slots", str(config.num_slots)), ("state", "ready" if not service.is_draining else "ending")]
    state = "failed to load" if service.failure is not None else f"loading, {service.progress:.0%}"
    return [*facts, ("state", state)]


class DocumentRoute(Route):
    """A route of the API's document, which is public."""

    facts = RouteFacts(public=True)


def document_routes(app: FastAPI, *, strict_fields: bool = False) -> list[Route]:
    """Return /openapi.json and /docs of an application with an `openapi_url`; they go before its own routes.

    strict_fields: whether bodies with unknown fields are refused.
    """
    openapi = next(route.endpoint for route in app.routes if isinstance(route, Route) and route.path == app.openapi_url)

    def described() -> dict[str, Any]:
        """Return the document. The first call builds it, which takes a while: not for the event loop."""
        document = app.openapi()
        for schema in document["components"]["schemas"].values() if strict_fields else ():
            if schema.get("additionalProperties") is True:  # a `RequestBody`
                schema["additionalProperties"] = False
        return document

    async def document(request: Request) -> Response:
        await asyncio.to_thread(described)
        response: Response = await openapi(request)
        return response

    async def page(request: Request) -> Response:
        root = request.scope.get("root_path", "")
        return HTMLResponse(await asyncio.to_thread(lambda: api_page(described(), root)), headers=_HEADERS)

    return [
        DocumentRoute("/openapi.json", document, include_in_schema=False),
        DocumentRoute("/docs", page, include_in_schema=False),
    ]


class MissingDocumentRoute(DocumentRoute):
    """A path of the API's document on a server without it: 404, also without a key. A file of the web page wins over it."""

    def __init__(self, path: str) -> None:
        super().__init__(path, self._send, include_in_schema=False)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match GET alone, so that other methods are 404, too."""
        match, child_scope = super().matches(scope)
        return (match, child_scope) if match is Match.FULL else (Match.NONE, {})

    async def _send(self, _request: Request) -> Response:
        raise HTTPException(404)


Schema = Mapping[str, Any]

_OURS: Final = "paceline's own"  # begins the descriptions of fields that no other server has
_METHODS: Final = ("get", "head", "post", "put", "patch", "delete")
_BOUNDS: Final = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {}",
    "maxItems": "at most {}",
}
_CODE: Final = re.compile(r"`([^`]+)`")
_STYLE: Final = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
a{color:#0645ad}code{font:.9em ui-monospace,monospace}h2{margin:2.5rem 0 .5rem}h3{font-size:1rem;margin:1rem 0 .3rem}
details{border:1px solid #ccc;border-radius:6px;margin:.4rem 0;padding:0 .8rem}summary{cursor:pointer;padding:.5rem 0}
summary b{display:inline-block;width:4.5rem;font-size:.85em}summary span{float:right;color:#666}
table{border-collapse:collapse;width:100%;margin-bottom:1rem}
td{text-align:left;vertical-align:top;padding:.25rem .6rem .25rem 0;border-top:1px solid #ddd;overflow-wrap:anywhere}
dt{float:left;clear:left;width:8rem;color:#666}dd{margin:0 0 .3rem 8rem}td:first-child{width:13rem}td:nth-child(2){width:15rem}
@media(max-width:40rem){summary span{float:none;display:block}}
@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}a{color:#8ab4f8}details{border-color:#444}
td{border-color:#333}summary span,dt{color:#999}}
"""


def _page(title: str, body: str) -> str:
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>
<body>{body}</body></html>
"""


def api_page(document: Mapping[str, Any], root: str = "") -> str:
    """Return an OpenAPI document as HTML. root: the prefix of the server's routes."""
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    groups: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method in _METHODS:
            if method in methods:
                tag = (methods[method].get("tags") or ["others"])[0]
                groups.setdefault(tag, []).append(_operation(method.upper(), path, methods[method]))
    shown = (f'<h2 id="{_anchor(tag)}">{escape(tag)}</h2>{"".join(group)}' for tag, group in groups.items())
    schemas: Mapping[str, Schema] = document.get("components", {}).get("schemas", {})
    body = f"""<h1>{title}</h1>
<p>All routes of this server. The same for programs: <a href="{escape(root)}/openapi.json">openapi.json</a>.
State of this server: <a href="{escape(root)}/">start page</a>.</p>
<p>{" · ".join(f'<a href="#{_anchor(tag)}">{escape(tag)}</a>' for tag in [*groups, "Bodies"])}</p>
{"".join(shown)}
<h2 id="bodies">Bodies</h2>
{"".join(_schema(name, schema) for name, schema in schemas.items())}
"""
    return _page(f"{title}: API", body)


def _operation(method: str, path: str, described: Schema) -> str:
    head = f"<b>{method}</b><code>{escape(path)}</code> <span>{_text(described.get('summary', ''))}</span>"
    parts = [f"<p>{_text(described.get('description', ''))}</p>"]
    if parameters := described.get("parameters"):
        rows = []
        for parameter in parameters:
            place = f"in the {parameter['in']}" + (", required" if parameter.get("required") else "")
            kind = f"{_type(parameter.get('schema', {}))}, {place}"
            rows.append((parameter["name"], kind, _text(parameter.get("description", ""))))
        parts.append("<h3>Parameters</h3>" + _table(rows))
    for kind, content in described.get("requestBody", {}).get("content", {}).items():
        parts.append(f"<h3>Body</h3><p>{_type(content.get('schema', {}))}, as <code>{escape(kind)}</code></p>")
    responses = []
    for status, response in described.get("responses", {}).items():
        kinds = ", ".join(f"<code>{escape(kind)}</code>" for kind in response.get("content", {}))
        responses.append(
            ("any other" if status == "default" else status, kinds, _text(response.get("description", "")))
        )
    parts.append("<h3>Responses</h3>" + _table(responses))
    return f"<details><summary>{head}</summary>{''.join(parts)}</details>"


def _schema(name: str, schema: Schema) -> str:
    """Return a body with its fields: required fields first, fields that only this server has last."""
    required, rows = schema.get("required", ()), []
    for field, described in schema.get("properties", {}).items():
        about, default = _text(described.get("description", "")), described.get("default")
        if default not in (None, ""):
            about += f" Default: <code>{escape(json.dumps(default))}</code>"
        is_ours = described.get("description", "").startswith(_OURS)
        rank = 0 if field in required else 2 if is_ours else 1
        rows.append((rank, (field, _type(described) + (", required" if field in required else ""), about)))
    table = _table([cells for _, cells in sorted(rows, key=lambda row: row[0])])
    about = f"<p>{_text(schema.get('description', ''))}</p>"
    return f'<details open id="{escape(name)}"><summary><b>{escape(name)}</b></summary>{about}{table}</details>'


def _table(rows: list[tuple[str, str, str]]) -> str:
    cells = (f"<td><code>{escape(name)}</code></td><td>{kind}</td><td>{about}</td>" for name, kind, about in rows)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def _type(schema: Schema) -> str:
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " or ".join(dict.fromkeys(_type(choice) for choice in schema[several]))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"<code>{escape(json.dumps(value))}</code>" for value in values)
    kind = schema.get("type", "anything")
    shown = f"list of {_type(schema['items'])}" if kind == "array" and schema.get("items") else escape(str(kind))
    bounds = [text.format(schema[name]) for name, text in _BOUNDS.items() if name in schema]
    return f"{shown} ({escape(', '.join(bounds))})" if bounds else shown


def _text(text: str) -> str:
    return _CODE.sub(r"<code>\1</code>", escape(text))


def _anchor(tag: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", tag.lower())
