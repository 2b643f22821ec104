"""The web page at GET /: the files that were built into this package, or the files of a folder.

Built files are read once and kept, compressed as well. The page has a strict content security policy: no inline scripts or
styles, and nothing from other hosts. A worker has the policy of its own response, so each built file is sent with one. A
folder's files are sent unchanged, as llama-server does with `--path`.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import ipaddress
import mimetypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Final

import paceline
from paceline.server.settings import ServerSettings, is_socket_path

INDEX: Final = "index.html"
PREVIEW: Final = "preview.html"
"""The document of the frames in which the page shows HTML of a model."""

TRACE_VIEWER: Final = "trace.html"
"""The viewer of `paceline trace show --html`, which is no page of a server."""

NOT_BUILT: Final = (
    "The web page was not built into this installation. Where Node.js is installed, PACELINE_WEBUI=ON builds it when the "
    "package is built."
)
OFF: Final = (
    "The web page is off, as anyone who reaches this server could use it without an API key. Give the server keys "
    "(--api-key), or ask for the page (--webui)."
)

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    "media-src 'self' data: blob:; font-src 'self'; frame-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
PREVIEW_POLICY: Final = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "media-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
"""An origin of its own and inline code. It blocks each request of the document, but not WebRTC, and not the name lookup of an
address that the document tries to open: the page runs no script of a model there before a person asks for it."""

_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".map": "application/json",
    ".webmanifest": "application/manifest+json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".wasm": "application/wasm",
    ".woff2": "font/woff2",
    ".txt": "text/plain; charset=utf-8",
}
"""By suffix, as systems know different types; the system is asked for other suffixes."""

_FOREVER: Final = "public, max-age=31536000, immutable"  # of names with a hash of the content
_SAFE: Final = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
_LEAST_COMPRESSED: Final = 1024  # bytes: smaller files are not compressed


def media_type(name: str) -> str:
    """Return the type of a file by its name."""
    suffix = PurePosixPath(name).suffix.lower()
    return _TYPES.get(suffix) or mimetypes.guess_type(name)[0] or "application/octet-stream"


@dataclass(frozen=True, slots=True)
class PageResponse:
    """The response for a file. path: a file to read, in place of content."""

    status: int
    headers: Mapping[str, str]
    content: bytes = b""
    path: Path | None = None


@dataclass(frozen=True, slots=True)
class BuiltFile:
    """A file of the built page. compressed: with gzip; None if that is no smaller."""

    content: bytes
    compressed: bytes | None
    tag: str
    headers: Mapping[str, str]

    @classmethod
    def of(cls, name: str, content: bytes) -> BuiltFile:
        """Return the record of a file's content. name: within the page, for example assets/x.js."""
        compressed = gzip.compress(content, 9, mtime=0) if len(content) >= _LEAST_COMPRESSED else content
        headers = {
            "content-type": media_type(name),
            "cache-control": _FOREVER if name.startswith("assets/") else "no-cache",
            **_SAFE,
        }
        headers["content-security-policy"] = PREVIEW_POLICY if name == PREVIEW else POLICY
        if name.endswith(".html") and name != PREVIEW:
            headers["x-frame-options"] = "DENY"
        # With the headers: a browser that has the file under an older policy gets the new one.
        identity = hashlib.sha256(repr(sorted(headers.items())).encode() + content)
        return cls(
            content=content,
            compressed=compressed if len(compressed) < len(content) else None,
            tag=identity.hexdigest()[:32],
            headers=headers,
        )

    def respond(self, headers: Mapping[str, str]) -> PageResponse:
        """Build the response: 304 if the client's ETag matches, else the content, compressed if the client accepts that."""
        content, tag, more = self.content, self.tag, dict(self.headers)
        if self.compressed is not None:
            more["vary"] = "accept-encoding"
            if _accepts_gzip(headers.get("accept-encoding", "")):
                content, tag = self.compressed, f"{tag}-gzip"
                more["content-encoding"] = "gzip"
        more["etag"] = f'"{tag}"'
        tags = [entry.strip().removeprefix("W/").strip('"') for entry in headers.get("if-none-match", "").split(",")]
        if tag in tags or tags == ["*"]:
            kept = ("cache-control", "content-security-policy", "etag", "vary")
            return PageResponse(304, {name: more[name] for name in kept if name in more})
        return PageResponse(200, more, content)


def _accepts_gzip(header: str) -> bool:
    for entry in header.lower().split(","):
        name, _, weight = entry.strip().partition(";")
        if name.strip() in ("gzip", "*"):
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


class BuiltPage:
    """The page of this package. files: by their names within it. A route is "/" for the page, or "/assets/x.js" for a file."""

    def __init__(self, files: Mapping[str, BuiltFile]) -> None:
        self._files = {f"/{name}": file for name, file in files.items() if name != TRACE_VIEWER}
        self._files["/"] = files[INDEX]

    def has(self, route: str) -> bool:
        """Return whether the file exists."""
        return route in self._files

    async def get(self, route: str, headers: Mapping[str, str]) -> PageResponse:
        """Return the response for an existing file, by a request's headers."""
        return self._files[route].respond(headers)


class PageFolder:
    """The present files of a folder, by the same routes. Hidden files, and links out of the folder, are not served."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()

    def has(self, route: str) -> bool:
        """Return whether the file exists."""
        return self._file(route) is not None

    async def get(self, route: str, headers: Mapping[str, str]) -> PageResponse:
        """Return the response for a file; 404 if it was removed just now."""
        del headers
        path = await asyncio.to_thread(self._file, route)
        if path is None:
            return PageResponse(404, {})
        return PageResponse(
            200, {"content-type": media_type(path.name), "cache-control": "no-cache", **_SAFE}, b"", path
        )

    def _file(self, route: str) -> Path | None:
        parts = [part for part in route.split("/") if part]
        if any(part.startswith(".") or "\\" in part or "\0" in part for part in parts):
            return None
        path = self._folder.joinpath(*parts)
        if route.endswith("/"):
            path /= INDEX
        try:
            path = path.resolve(strict=True)
            return path if path.is_relative_to(self._folder) and path.is_file() else None
        except (OSError, RuntimeError, ValueError):  # RuntimeError: links in a circle
            return None


PageFiles = BuiltPage | PageFolder


def built_folder() -> Path:
    """Return the folder of the built page, which may not exist."""
    return Path(paceline.__file__).parent / "webui"


@cache
def built_files() -> Mapping[str, BuiltFile]:
    """Return the files of the built page by their names; none if it was not built."""
    folder = built_folder()
    if not (folder / INDEX).is_file():
        return {}
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = {path.relative_to(folder).as_posix(): path for path in paths}
    return {name: BuiltFile.of(name, path.read_bytes()) for name, path in names.items()}


def page_facts() -> dict[str, Any]:
    """Return the page's facts for `paceline info`: whether it was built, and the bytes of its files, compressed."""
    files = built_files()
    sizes = [len(file.content if file.compressed is None else file.compressed) for file in files.values()]
    return {"is_built": bool(files), "num_bytes": sum(sizes)}


@dataclass(frozen=True, slots=True)
class WebPage:
    """The page of a server. files: None if it has none; why_not: then a sentence for people, empty if GET / is off."""

    files: PageFiles | None
    why_not: str = ""

    @classmethod
    def of(cls, settings: ServerSettings) -> WebPage:
        """Return the page of a server."""
        if settings.start_page is False:
            return cls(None)
        if settings.page_folder is not None:
            return cls(PageFolder(settings.page_folder))
        if settings.start_page is None and not is_guarded(settings):
            return cls(None, OFF)
        files = built_files()
        return cls(BuiltPage(files)) if files else cls(None, NOT_BUILT)


def is_guarded(settings: ServerSettings) -> bool:
    """Return whether only this machine reaches a server, or a key is needed."""
    return bool(settings.api_keys) or all(map(_is_local, settings.hosts))


def _is_local(host: str) -> bool:
    if (
        is_socket_path(host)
        or host[:1] == "@"
        or Path(host).is_absolute()
        or host == "localhost"
        or host.endswith(".localhost")
    ):
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:  # another name, which may be any address
        return False
