"""GET /: a small page for people who open the server in a browser. Nothing on it is loaded from elsewhere."""

from __future__ import annotations

from html import escape

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse

from paceline import __version__
from paceline.server.service import Service

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>paceline</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>body{{font:16px/1.5 system-ui,sans-serif;max-width:40rem;margin:3rem auto;padding:0 1rem;color:#222;background:#fff}}
dt{{float:left;clear:left;width:8rem;color:#666}}dd{{margin:0 0 .3rem 8rem}}a{{color:#0645ad}}
@media(prefers-color-scheme:dark){{body{{color:#ddd;background:#181818}}a{{color:#8ab4f8}}dt{{color:#999}}}}</style></head>
<body><h1>paceline</h1><dl>{facts}</dl><p>{links}</p></body></html>
"""


def routes(service: Service) -> APIRouter:
    """The page."""
    router = APIRouter()

    @router.get("/", include_in_schema=False)
    async def start_page(request: Request) -> HTMLResponse:
        root = request.scope.get("root_path", "")
        links = {"/health": "health", "/v1/models": "models"}
        if service.settings.docs:
            links["/docs"] = "API documentation"
        if service.settings.metrics:
            links["/metrics"] = "metrics"
        return HTMLResponse(
            _PAGE.format(
                facts="".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in _facts(service)),
                links=" · ".join(f'<a href="{escape(root + path)}">{name}</a>' for path, name in links.items()),
            ),
            headers={"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"},
        )

    return router


def _facts(service: Service) -> list[tuple[str, str]]:
    facts = [("version", __version__), ("model", ", ".join(service.names))]
    if service.is_loaded:
        config = service.engine().config
        return [*facts, ("slots", str(config.num_slots)), ("state", "ready" if not service.is_draining else "ending")]
    state = "failed to load" if service.failure is not None else f"loading, {service.progress:.0%}"
    return [*facts, ("state", state)]
