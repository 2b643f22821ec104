"""`paceline ps`: the servers that run on this machine, and the models in them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import urlsplit

import typer

from paceline.cli import terminal
from paceline.cli.launch import is_loopback
from paceline.cli.options import ApiKeyOption
from paceline.errors import EngineError, InvalidParams

if TYPE_CHECKING:
    from httpx import Client

_TIMEOUT_S: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRow:
    """A model in a server, or a server without a loaded model.

    Attributes:
        model: The model's name; None for a server of several models that has loaded none.
        size: Bytes of the weights; None if unknown.
        url: The server's address.
        busy: Slots that compute; None if the server does not say.
        slots: All slots; None likewise.
        started: When the server began to listen, in Unix seconds; None if unknown.
        pid: The server's process; None for a server of another machine.
        state: "ready", "loading", or why the rest is unknown.
    """

    model: str | None
    size: int | None = None
    url: str
    busy: int | None = None
    slots: int | None = None
    started: float | None = None
    pid: int | None = None
    state: str = "ready"


def ps(
    *,
    url: Annotated[
        str | None, typer.Option("--url", metavar="URL", help="Ask this server, which may be on another machine.")
    ] = None,
    api_key: ApiKeyOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list.")] = False,
) -> None:
    """List the servers that run on this machine, and the models that they have loaded.

    Servers of other users are not listed. A server with keys shows its models and slots to a client with a key.
    """
    rows = list(_local_rows(api_key) if url is None else _rows_at(url, api_key))
    if as_json:
        terminal.write(json.dumps([asdict(row) for row in rows], ensure_ascii=False, indent=2) + "\n")
    elif not rows:
        terminal.note("No server runs on this machine; `paceline serve` starts one.")
    else:
        heading = ("MODEL", "SIZE", "ADDRESS", "SLOTS", "UP SINCE")
        terminal.write_table(heading, [_cells(row) for row in rows])
        for row in rows:
            if row.state not in ("ready", "loading"):
                terminal.note(f"{row.url}: {row.state}")


def _local_rows(api_key: str | None) -> Iterator[ServedRow]:
    from paceline.server.running_servers import running_servers

    for server in running_servers():
        facts: dict[str, Any] = {"url": server.urls[0], "started": server.started, "pid": server.pid}
        try:
            found = _asked(server.urls[0], api_key, checks_certificate=False)
        except EngineError as error:
            yield ServedRow(model=server.model, state=str(error), **facts)
            continue
        state = "ready" if server.model is None else "loading"
        yield from (ServedRow(**row, **facts) for row in found or [{"model": server.model, "state": state}])


def _rows_at(url: str, api_key: str | None) -> Iterator[ServedRow]:
    root = url.rstrip("/").removesuffix("/v1")
    if urlsplit(root).scheme not in ("http", "https") or not urlsplit(root).hostname:
        raise InvalidParams(f"--url must begin with http:// or https://, as in http://127.0.0.1:8080, not {url!r:.200}")
    try:
        found = _asked(root, api_key, checks_certificate=True)
    except EngineError as error:
        raise EngineError(f"the server at {root} is not listed: {error}") from None
    yield from (ServedRow(**row, url=root) for row in found or [{"model": None, "state": "no model is loaded"}])


def _asked(url: str, api_key: str | None, *, checks_certificate: bool) -> list[dict[str, Any]]:
    """Return the loaded models of a server, with sizes and slots. Raises `EngineError` if it does not say."""
    import httpx

    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    if url.startswith("unix://"):
        raise EngineError("it listens on a socket")
    root = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    options: dict[str, Any] = {"verify": checks_certificate, "trust_env": not is_loopback(root)}
    try:
        with httpx.Client(base_url=root, headers=headers, timeout=_TIMEOUT_S, **options) as client:
            models = _body(client, "api/ps", {}).get("models", [])
            owned = [model for model in models if not model["details"].get("parent_model")]  # without LoRA adapters
            return [{"model": model["name"], "size": model["size"], **_slots(client, model["name"])} for model in owned]
    except httpx.HTTPError as error:
        raise EngineError(f"it does not answer ({str(error) or type(error).__name__})") from None
    except (AttributeError, KeyError, TypeError, ValueError):
        raise EngineError("it is not a paceline server") from None


def _body(client: Client, path: str, params: dict[str, str]) -> Any:
    response = client.get(path, params=params)
    if response.status_code == 401:
        raise EngineError("it wants an API key: give --api-key, or set PACELINE_API_KEY")
    if response.status_code == 503:
        return {}
    if response.status_code != 200:
        raise EngineError(f"it replied with status {response.status_code}")
    return response.json()


def _slots(client: Client, model: str) -> dict[str, int]:
    """Return the busy and all slots of a model; empty if the server keeps them to itself."""
    with suppress(EngineError):
        slots: Sequence[dict[str, Any]] = _body(client, "slots", {"model": model})
        return {"busy": sum(slot["is_processing"] for slot in slots), "slots": len(slots)} if slots else {}
    return {}


def _cells(row: ServedRow) -> tuple[str, ...]:
    from paceline.hub.locate import shown_bytes

    since = "-" if row.started is None else f"{datetime.fromtimestamp(row.started, UTC).astimezone():%Y-%m-%d %H:%M}"
    slots = "-" if row.slots is None else f"{row.busy}/{row.slots}"
    return (
        row.model or "(none loaded)",
        "-" if not row.size else shown_bytes(row.size),
        row.url,
        row.state if row.state == "loading" else slots,
        since,
    )
