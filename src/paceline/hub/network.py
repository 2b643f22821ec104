"""Requests to web servers and to the Hugging Face Hub: deadlines, statuses, Retry-After, ranges, ETags, listings, tokens.

A server may be hostile: status and headers have a deadline, a body must arrive at a minimum rate, and nothing is decompressed.
Listings are requested here, since huggingface_hub reads a response of any length. No other module imports huggingface_hub; it
finds tokens, and downloads files that the hub sends by its own protocol alone. Blocking; any thread. httpx is loaded late.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar
from urllib.parse import quote

from paceline.errors import Aborted, AccessDenied, HubUnavailable, ModelNotFound, PacelineError
from paceline.hub.file_choice import RepoFile, nearest_names
from paceline.hub.references import HubSettings, is_repository_path, without_secrets

if TYPE_CHECKING:
    import httpx


PASSING: Final = (408, 425, 429, 500, 502, 503, 504)
"""Statuses after which the same request may succeed."""

TIMEOUT_S: Final = 20.0
"""Longest wait for a connection, and for the next bytes."""
HEAD_S: Final = 60.0
"""Longest wait for status and headers, with all redirects."""
RATE_WINDOW_S: Final = 60.0
"""Period in which a body must arrive with at least `MIN_BYTES_S`."""
MIN_BYTES_S: Final = 1024
SMALL_BODY_S: Final = 120.0
"""Longest wait for a whole listing, after its headers."""
MAX_REDIRECTS: Final = 10
LONGEST_WAIT_S: Final = 60.0
"""Longest delay of a retry that a server may ask for."""

T = TypeVar("T")

_MAX_DIGITS: Final = 18
_NEW_CONNECTION: Final = ("connection.connect_tcp.complete", "connection.start_tls.complete")


def new_client() -> httpx.Client:
    """Return a client that opens a connection for each request, as `open_response` expects."""
    import httpx

    return httpx.Client(
        timeout=TIMEOUT_S, headers={"user-agent": "paceline"}, limits=httpx.Limits(max_keepalive_connections=0)
    )


@contextmanager
def open_response(
    client: httpx.Client, url: str, headers: Mapping[str, str], *, method: str = "GET"
) -> Iterator[httpx.Response]:
    """Yield the response to a request, with its body unread. Redirects are followed; their bodies are not read.

    Raises `httpx.HTTPError`, which is a `ReadTimeout` if status and headers take more than `HEAD_S`.
    """
    import httpx

    with _Deadline(HEAD_S) as deadline:
        request = client.build_request(
            method,
            url,
            headers={**headers, "accept-encoding": "identity"},
            extensions={"trace": deadline.traced},
        )
        try:
            response = client.send(request, stream=True, follow_redirects=False)
            for _ in range(MAX_REDIRECTS):
                if response.next_request is None:
                    break
                response.close()
                response = client.send(response.next_request, stream=True, follow_redirects=False)
        except httpx.TransportError:
            if deadline.is_over:
                raise httpx.ReadTimeout(f"no complete headers within {HEAD_S:g} s") from None
            raise
    try:
        if response.next_request is not None:
            raise httpx.TooManyRedirects(f"more than {MAX_REDIRECTS} redirects", request=request)
        yield response
    finally:
        response.close()


class _Deadline:
    """Shuts down the connections of a request if its block takes too long: httpx limits only each wait for bytes."""

    def __init__(self, seconds: float) -> None:
        self._sockets: list[socket.socket] = []
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True
        self.is_over = False

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()

    def traced(self, event: str, info: Mapping[str, Any]) -> None:
        """Note the socket of a new connection. httpcore calls this for each of its steps."""
        if event in _NEW_CONNECTION and (found := info["return_value"].get_extra_info("socket")) is not None:
            self._sockets.append(found)
            if self.is_over:
                self._end()

    def _end(self) -> None:
        self.is_over = True
        for each in self._sockets:
            with suppress(OSError):
                socket.socket.shutdown(each, socket.SHUT_RDWR)  # SSLSocket.shutdown would also drop the TLS state


def body_pieces(response: httpx.Response) -> Iterator[bytes]:
    """Yield the bytes of a body as they arrive.

    Raises `httpx.HTTPError`: `DecodingError` if the body is compressed, `ReadTimeout` if it is slower than `MIN_BYTES_S`.
    """
    import httpx

    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise httpx.DecodingError(f"{response.url.host} sends it compressed ({encoding[:20]!r}), unasked")
    began_s, count = time.monotonic(), 0
    for piece in response.iter_raw():
        count += len(piece)
        seconds = time.monotonic() - began_s
        if seconds >= RATE_WINDOW_S:
            if count < MIN_BYTES_S * seconds:
                raise httpx.ReadTimeout(f"less than {MIN_BYTES_S} bytes/s for {seconds:.0f} s")
            began_s, count = time.monotonic(), 0
        yield piece


def small_body(response: httpx.Response, max_bytes: int) -> bytes:
    """Return a body of at most `max_bytes` that arrives within `SMALL_BODY_S`. Raises `httpx.HTTPError`."""
    import httpx

    body, began_s = bytearray(), time.monotonic()
    for piece in body_pieces(response):
        body += piece
        if time.monotonic() - began_s > SMALL_BODY_S:
            raise httpx.ReadTimeout(f"the response is not complete after {SMALL_BODY_S:g} s")
        if len(body) > max_bytes:
            raise httpx.DecodingError(f"the response has more than {max_bytes >> 20} MiB")
    return bytes(body)


def refused(response: httpx.Response, name: str, url: str) -> Exception:
    """Return the error for an unsuccessful status. name: the file's name."""
    status, host = response.status_code, response.url.host
    if status in PASSING:
        return Passing(f"{host} is overloaded (HTTP {status})", retry_after_s(response.headers.get("retry-after")))
    if status in (401, 403):
        return AccessDenied(
            f"{host} refuses {name} (HTTP {status}); it needs a token that may read it: set HF_TOKEN or pass hf_token"
        )
    if status in (404, 410):
        return ModelNotFound(f"there is no file at {without_secrets(url)} (HTTP {status})")
    return HubUnavailable(f"{host} did not send {name}: HTTP {status}")


class Passing(Exception):
    """A failure that may pass, as of an overloaded server; wait_s: the delay that the server asks for."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s


def with_retries(
    request: Callable[[], T],
    waits_s: Sequence[float],
    note: Callable[[str], object],
    cancel: threading.Event,
    name: str,
) -> T:
    """Send a request, and repeat it while the server is overloaded.

    Args:
        request: Sends the request; raises `Passing`.
        waits_s: The delay before each retry, unless the server asks for another.
        note: Shows a line about each retry.
        cancel: Ends a wait.
        name: The name of the request in messages.

    Raises:
        Passing: The last attempt failed, or the server asks for more than a minute.
        Aborted: `cancel` was set.
    """
    for default_s in waits_s:
        try:
            return request()
        except Passing as error:
            wait_s = default_s if error.wait_s is None else error.wait_s
            if wait_s > LONGEST_WAIT_S:
                raise
            note(f"{error}; trying again in {wait_s:.1f} s")
            if cancel.wait(wait_s):
                raise Aborted(f"{name} was stopped") from None
    return request()


def retry_after_s(text: str | None) -> float | None:
    """Return the seconds that a Retry-After header asks for; None without one."""
    if text is None:
        return None
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    with suppress(ValueError, TypeError):
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    return None


def content_range(text: str) -> tuple[int | None, int | None]:
    """Return first byte and total of a Content-Range header."""
    unit, _, rest = text.partition(" ")
    span, _, total = rest.partition("/")
    first = span.partition("-")[0]
    begin = whole_number(first)
    if unit != "bytes" or begin is None:
        return None, None
    return begin, whole_number(total)


def whole_number(text: str) -> int | None:
    """Return a length in ASCII digits from a header; None for other texts and for numbers from 10**18 on."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS else None


def is_weak(tag: str) -> bool:
    """Return whether an ETag is weak, so that If-Range does not accept it."""
    return tag.startswith("W/")


def are_same_version(tag: str, other: str) -> bool:
    """Compare two ETags weakly: servers that compress, and proxies, mark the tag of the same file as weak."""
    return tag.removeprefix("W/") == other.removeprefix("W/")


_INVALID_CREDENTIALS: Final = "Invalid credentials in Authorization header"
_MAX_LISTING_BYTES: Final = 16 << 20
_MAX_FILE_BYTES: Final = 1 << 50
_RETRIES: Final = 3
_HUB_PASSING: Final = (408, 429, 500, 502, 503, 504)
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_GIT_ID: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_COMMIT: Final = re.compile(r"[\w-]+", re.ASCII)
_HTTP_LIBRARIES: Final = {"httpx", "httpx2", "httpcore", "requests", "urllib3"}  # of huggingface_hub's versions


@dataclass(frozen=True, slots=True)
class RepoListing:
    """The files of a repository at a commit, in the hub's order."""

    repo: str
    commit: str
    files: tuple[RepoFile, ...]


class HubApi:
    """Requests to the hub. note: shows lines about retries. cancel: ends waits between attempts."""

    def __init__(self, settings: HubSettings, note: Callable[[str], object], cancel: threading.Event) -> None:
        self._settings, self._note, self._cancel = settings, note, cancel

    def listing(self, repo: str, revision: str | None) -> RepoListing:
        """Return the files of a repository. Raises `ModelNotFound`, `AccessDenied`, `HubUnavailable`."""
        path = f"/{quote(repo)}" + ("" if revision is None else f"/revision/{quote(revision, safe='')}")
        try:
            info = self._try(repo, lambda: self._json(f"{path}?blobs=true", repo, revision))
        except ModelNotFound as error:
            raise ModelNotFound(f"{error}{self._similar(repo, revision)}") from None
        match info:
            case {"sha": str(commit), "siblings": [*siblings]} if _COMMIT.fullmatch(commit):
                files = tuple(map(self._repo_file, siblings))
            case _:
                raise self._no_listing()
        outside = next((file.path for file in files if not is_repository_path(file.path)), None)
        if outside is not None:
            raise HubUnavailable(
                f"{self._settings.endpoint} lists {outside!r:.80} in {repo}, which leads out of it or is no path; "
                "check HF_ENDPOINT"
            )
        return RepoListing(repo, commit, files)

    def _repo_file(self, listed: object) -> RepoFile:
        match listed:
            case {"rfilename": str(path), **facts}:
                size, blob, lfs = (facts.get(key) for key in ("size", "blobId", "lfs"))
            case _:
                raise self._no_listing()
        if not (size is None or (isinstance(size, int) and 0 <= size < _MAX_FILE_BYTES)):
            raise self._no_listing()
        sha256 = lfs.get("sha256") if isinstance(lfs, dict) else None
        known = sha256 if isinstance(sha256, str) and _SHA256.fullmatch(sha256) else None
        git_id = blob if isinstance(blob, str) and _GIT_ID.fullmatch(blob) else None
        return RepoFile(path, size, known or git_id, known)

    def _no_listing(self) -> HubUnavailable:
        return HubUnavailable(f"{self._settings.endpoint} does not list files as the hub does; check HF_ENDPOINT")

    def url(self, repo: str, commit: str, path: str) -> str:
        """Return the address of a file."""
        from huggingface_hub import hf_hub_url

        return hf_hub_url(repo, path, revision=commit, endpoint=self._settings.endpoint)

    def headers(self) -> dict[str, str]:
        """Return the headers that authorise a download."""
        token = self._token()
        return {} if token is None else {"authorization": f"Bearer {token}"}

    def denied(self, repo: str) -> AccessDenied:
        """Return the error for a repository that the hub lists, but refuses to send files of."""
        endpoint = self._settings.endpoint
        conditions = f"accept its conditions at {endpoint}/{repo}"
        if self._token() is None:
            return AccessDenied(
                f"{repo} is gated: {conditions}, make a token at {endpoint}/settings/tokens, "
                "and set HF_TOKEN to it or pass hf_token"
            )
        return AccessDenied(
            f"{repo} is gated, and this token's account may not read it: {conditions} with that account"
        )

    def download(self, repo: str, commit: str, path: str) -> Path:
        """Download a file into huggingface_hub's cache with its own client, and return the path."""
        from huggingface_hub import hf_hub_download

        settings = self._settings

        def download() -> str:
            with self._translated(repo, commit):
                return hf_hub_download(
                    repo,
                    path,
                    revision=commit,
                    cache_dir=settings.cache,
                    endpoint=settings.endpoint,
                    token=settings.token,
                    library_name="paceline",
                )

        return Path(self._try(repo, download))

    def _json(self, path: str, repo: str, revision: str | None) -> Any:
        """Return a response of the hub's API of models, at most `_MAX_LISTING_BYTES`."""
        import httpx

        settings = self._settings
        try:
            with (
                new_client() as client,
                open_response(client, f"{settings.endpoint}/api/models{path}", self.headers()) as response,
            ):
                if not response.is_success:
                    raise self._refused(repo, revision, response.status_code, response.headers)
                return json.loads(small_body(response, _MAX_LISTING_BYTES))
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeEncodeError) as error:
            raise self._unreachable(error) from None
        except (ValueError, RecursionError) as error:
            raise HubUnavailable(
                f"{settings.endpoint} does not respond as the hub does ({error}); check HF_ENDPOINT"
            ) from None

    def _try(self, repo: str, request: Callable[[], T]) -> T:
        waits_s = [2.0**attempt / 2 for attempt in range(_RETRIES)]
        try:
            return with_retries(request, waits_s, self._note, self._cancel, f"the look-up of {repo}")
        except Passing as error:
            raise HubUnavailable(f"{error}; try again later, or log in with HF_TOKEN for a higher limit") from None

    def _similar(self, repo: str, revision: str | None) -> str:
        """Return the nearest names of the same owner for a missing repository."""
        user = repo.partition("/")[0]
        if revision is not None:
            return ""
        try:
            models = self._json(f"?author={quote(user, safe='')}&limit=200", repo, revision)
        except (PacelineError, Passing):  # only a hint in a message
            return ""
        listed = models if isinstance(models, list) else []
        names = [name for each in listed if isinstance(each, dict) and isinstance(name := each.get("id"), str)]
        return f"; {nearest_names(repo, names)}" if names else f"; the hub has no models of {user}"

    def _token(self) -> str | None:
        """Return the token of requests: the given token, or the token of a login."""
        from huggingface_hub import constants, get_token

        if self._settings.token is not None or constants.HF_HUB_DISABLE_IMPLICIT_TOKEN:
            return self._settings.token
        return get_token()

    @contextmanager
    def _translated(self, repo: str, revision: str | None) -> Iterator[None]:
        """Raise huggingface_hub's errors as paceline's."""
        from huggingface_hub.errors import HfHubHTTPError

        try:
            yield
        except Exception as error:
            causes = [
                each for each in (error, error.__cause__) if each is not None
            ]  # the cause of a LocalEntryNotFoundError
            for each in causes:
                if isinstance(each, HfHubHTTPError):
                    raise self._refused(repo, revision, each.response.status_code, each.response.headers) from None
            libraries = [{kind.__module__.partition(".")[0] for kind in type(each).__mro__} for each in causes]
            failed = (each for each, names in zip(causes, libraries, strict=True) if names & _HTTP_LIBRARIES)
            raise self._unreachable(next(failed, error)) from error

    def _refused(self, repo: str, revision: str | None, status: int, headers: Mapping[str, str]) -> Exception:
        """Return the error for an unsuccessful status, by its X-Error-Code."""
        endpoint, code = self._settings.endpoint, headers.get("x-error-code")
        if status == 401 and code is None and headers.get("x-error-message") != _INVALID_CREDENTIALS:
            code = "RepoNotFound"  # the hub does not say whether a repository is private or missing
        match code:
            case "GatedRepo":
                return self.denied(repo)
            case "RevisionNotFound":
                return ModelNotFound(f"{repo} has no branch, tag or commit {revision!r}")
            case "RepoNotFound":
                private = "it is private and needs a token: set HF_TOKEN or pass hf_token"
                if self._token() is not None:
                    private = "the token may not see it"
                return ModelNotFound(f"{endpoint} has no repository {repo}, or {private}")
            case "EntryNotFound":
                return ModelNotFound(f"{repo} has no such file at {revision}")
        if status in _HUB_PASSING:
            reason = "limits the rate of requests" if status == 429 else "is overloaded"
            return Passing(f"{endpoint} {reason} (HTTP {status})", retry_after_s(headers.get("retry-after")))
        if status in (401, 403):
            if self._token() is None:
                return self.denied(repo)
            return AccessDenied(f"{endpoint} refuses the token (HTTP {status}); is it expired, or another hub's?")
        return HubUnavailable(f"{endpoint} cannot be used: HTTP {status} for {repo}")

    def _unreachable(self, error: BaseException) -> HubUnavailable:
        reason = str(error).partition("\n")[0] or type(error).__name__
        return HubUnavailable(
            f"cannot reach {self._settings.endpoint}: {reason}; check the network, a proxy (HTTPS_PROXY) or a mirror "
            "(HF_ENDPOINT); offline, only models of `paceline list` can be loaded"
        )
