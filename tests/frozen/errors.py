"""Make the frozen table of errors: the report of each error in each dialect, before and within a stream."""

from __future__ import annotations

import json
from typing import Any

import httpx
from tests.exact import EXACT
from tests.frozen.exchanges import CHATS, Script, scripted_server
from tests.frozen.text import Normaliser

from paceline import errors
from paceline.server.settings import ApiKey

_KINDS = sorted(
    (kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.PacelineError)),
    key=lambda kind: kind.__name__,
)


def _made(kind: type[errors.PacelineError]) -> errors.PacelineError:
    arguments = (9, 8) if kind is errors.PromptTooLong else ()
    return kind("field: why /home/me/model.gguf failed", *arguments)


def _line(response: httpx.Response) -> str:
    retry = f" retry-after {response.headers['retry-after']}" if "retry-after" in response.headers else ""
    return f"  {response.status_code}{retry} {json.dumps(response.json(), ensure_ascii=False)}"


def reported_errors() -> str:
    """Return status and body of each error of the engine, and of the server's own limits, in each dialect."""
    script, lines = Script(), []
    with scripted_server(script) as server, server.client() as client:
        engine = server.engine
        for kind in _KINDS:
            error = _made(kind)

            def failing(*_: Any, error: errors.PacelineError = error) -> Any:
                raise error

            engine.prepare = failing
            lines.append(f"{kind.__name__} ({kind.code})")
            for path, body in CHATS.items():
                lines += [f"{path}", _line(client.post(path, json={**body, "stream": True}))]
        del engine.prepare
        lines.append("errors within a stream")
        for kind in (errors.InvalidParams, errors.NoTokenAllowed, errors.EngineDied, errors.DeadlineExceeded):
            for path, body in CHATS.items():
                script.begin("Hello.", fails_at=1, failure=_made(kind))
                text = client.post(path, json={**body, "stream": True}).text
                last = [line for line in Normaliser()(text).splitlines() if "why" in line]
                lines += [f"{kind.__name__} {path}", *(f"  {line}" for line in last)]
    keys = (ApiKey(secret="secret"),)
    with scripted_server(
        Script(), api_keys=keys, max_body_bytes=300, engine_options={**EXACT, "isolation": "thread"}
    ) as server:
        known = {"authorization": "Bearer secret"}
        with server.client() as stranger, server.client(headers=known) as client:
            for path, body in CHATS.items():
                lines += [f"no key {path}", _line(stranger.post(path, json=body))]
                lines += [f"too large {path}", _line(client.post(path, json={**body, "user": "x" * 400}))]
                lines += [f"wrong method {path}", _line(client.put(path, json=body))]
                lines += [f"no object {path}", _line(client.post(path, json=[]))]
                lines += [f"unknown route {path}", _line(client.post(f"{path}/nothing", json=body))]
    return "\n".join(lines) + "\n"
