"""The Hugging Face Hub: files of a repository, tokens, errors.

Listings are requested here, since huggingface_hub reads a response of any length. The only module that imports huggingface_hub,
for tokens, and for files that the hub sends by its own protocol alone. Blocking; any thread.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote

from paceline.errors import Aborted, AccessDenied, HubUnavailable, ModelNotFound, PacelineError
from paceline.hub.download import DownloadObserver
from paceline.hub.file_choice import RepoFile, nearest_names
from paceline.hub.http_responses import new_client, open_response, retry_after_s, small_body
from paceline.hub.hub_settings import HubSettings
from paceline.hub.references import is_repository_path

T = TypeVar("T")

_INVALID_CREDENTIALS: Final = "Invalid credentials in Authorization header"
_MAX_LISTING_BYTES: Final = 16 << 20
_MAX_FILE_BYTES: Final = 1 << 50
_ATTEMPTS: Final = 4
_LONGEST_WAIT_S: Final = 60.0
_PASSING: Final = (408, 429, 500, 502, 503, 504)
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_GIT_ID: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_COMMIT: Final = re.compile(r"[\w-]+", re.ASCII)
_HTTP_LIBRARIES: Final = ("httpx", "httpx2", "httpcore", "requests", "urllib3")  # of huggingface_hub's versions


@dataclass(frozen=True, slots=True)
class RepoListing:
    """The files of a repository at a commit, in the hub's order."""

    repo: str
    commit: str
    files: tuple[RepoFile, ...]


class HubApi:
    """Requests to the hub. cancel: ends waits between attempts."""

    def __init__(self, settings: HubSettings, observer: DownloadObserver, cancel: threading.Event) -> None:
        self._settings, self._observer, self._cancel = settings, observer, cancel

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
        token = _token(self._settings)
        return {} if token is None else {"authorization": f"Bearer {token}"}

    def denied(self, repo: str) -> AccessDenied:
        """Return the error for a repository whose files the hub refuses, although it lists them."""
        return _denied(self._settings, repo, has_token=bool(self.headers()))

    def download(self, repo: str, commit: str, path: str) -> Path:
        """Have huggingface_hub download a file into its cache, and return its place."""
        from huggingface_hub import hf_hub_download

        settings = self._settings

        def download() -> str:
            with _translated(settings, repo, commit):
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
        """Return what the hub sends of its models' API, of at most `_MAX_LISTING_BYTES`."""
        import httpx

        settings = self._settings
        try:
            with (
                new_client() as client,
                open_response(client, f"{settings.endpoint}/api/models{path}", self.headers()) as response,
            ):
                if not response.is_success:
                    raise _of_response(settings, repo, revision, response.status_code, response.headers)
                return json.loads(small_body(response, _MAX_LISTING_BYTES))
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeEncodeError) as error:
            raise _unreachable(settings, error) from None
        except (ValueError, RecursionError) as error:
            raise HubUnavailable(
                f"{settings.endpoint} does not respond as the hub does ({error}); check HF_ENDPOINT"
            ) from None

    def _try(self, repo: str, request: Callable[[], T]) -> T:
        """Send a request, again if the hub asks for patience."""
        for attempt in range(_ATTEMPTS):
            try:
                return request()
            except _Overloaded as error:
                wait_s = 2.0**attempt / 2 if error.wait_s is None else error.wait_s
                if attempt + 1 == _ATTEMPTS or wait_s > _LONGEST_WAIT_S:
                    raise HubUnavailable(
                        f"{error}; try again later, or log in with HF_TOKEN for a higher limit"
                    ) from None
                self._observer.note(f"{error}; trying again in {wait_s:.1f} s")
                if self._cancel.wait(wait_s):
                    raise Aborted(f"the look-up of {repo} was stopped") from None
        raise AssertionError("the last attempt returns or raises")

    def _similar(self, repo: str, revision: str | None) -> str:
        """Return the nearest names of the same owner, for a repository that does not exist."""
        user = repo.partition("/")[0]
        if revision is not None:
            return ""
        try:
            models = self._json(f"?author={quote(user, safe='')}&limit=200", repo, revision)
        except (PacelineError, _Overloaded):  # only a hint in a message
            return ""
        listed = models if isinstance(models, list) else []
        names = [name for each in listed if isinstance(each, dict) and isinstance(name := each.get("id"), str)]
        return f"; {nearest_names(repo, names)}" if names else f"; the hub has no models of {user}"


class _Overloaded(Exception):
    """The hub asks for patience."""

    def __init__(self, message: str, wait_s: float | None) -> None:
        super().__init__(message)
        self.wait_s = wait_s


def _token(settings: HubSettings) -> str | None:
    """Return the token that requests carry: the one that was given, or that of a login."""
    from huggingface_hub import constants, get_token

    if settings.token is not None or constants.HF_HUB_DISABLE_IMPLICIT_TOKEN:
        return settings.token
    return get_token()


@contextmanager
def _translated(settings: HubSettings, repo: str, revision: str | None) -> Iterator[None]:
    """Raise huggingface_hub's errors as ours."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except HfHubHTTPError as error:
        raise _of_response(settings, repo, revision, error.response.status_code, error.response.headers) from None
    except Exception as error:
        cause = error.__cause__  # that of a LocalEntryNotFoundError is the reason
        if isinstance(cause, HfHubHTTPError):
            status, headers = cause.response.status_code, cause.response.headers
            raise _of_response(settings, repo, revision, status, headers) from None
        failed = next((each for each in (error, cause) if each is not None and _is_transport_error(each)), error)
        raise _unreachable(settings, failed) from error


def _of_response(
    settings: HubSettings, repo: str, revision: str | None, status: int, headers: Mapping[str, str]
) -> Exception:
    """Return the error for a status that is none of success; X-Error-Code says more about it."""
    code = headers.get("x-error-code")
    if status == 401 and code is None and headers.get("x-error-message") != _INVALID_CREDENTIALS:
        code = "RepoNotFound"  # the hub does not say whether a repository is private or missing
    match code:
        case "GatedRepo":
            return _denied(settings, repo, has_token=_token(settings) is not None)
        case "RevisionNotFound":
            return ModelNotFound(f"{repo} has no branch, tag or commit {revision!r}")
        case "RepoNotFound":
            private = "it is private and needs a token: set HF_TOKEN or pass hf_token"
            if _token(settings) is not None:
                private = "the token may not see it"
            return ModelNotFound(f"{settings.endpoint} has no repository {repo}, or {private}")
        case "EntryNotFound":
            return ModelNotFound(f"{repo} has no such file at {revision}")
        case _:
            return _of_status(settings, repo, status, headers)


def _is_transport_error(error: BaseException) -> bool:
    return any(kind.__module__.partition(".")[0] in _HTTP_LIBRARIES for kind in type(error).__mro__)


def _unreachable(settings: HubSettings, error: BaseException) -> HubUnavailable:
    reason = str(error).partition("\n")[0] or type(error).__name__
    return HubUnavailable(
        f"cannot reach {settings.endpoint}: {reason}; check the network, a proxy (HTTPS_PROXY) or a mirror (HF_ENDPOINT); "
        "offline, only models of `paceline list` can be loaded"
    )


def _denied(settings: HubSettings, repo: str, *, has_token: bool) -> AccessDenied:
    conditions = f"accept its conditions at {settings.endpoint}/{repo}"
    if not has_token:
        return AccessDenied(
            f"{repo} is gated: {conditions}, make a token at {settings.endpoint}/settings/tokens, "
            "and set HF_TOKEN to it or pass hf_token"
        )
    return AccessDenied(f"{repo} is gated, and this token's account may not read it: {conditions} with that account")


def _of_status(settings: HubSettings, repo: str, status: int, headers: Mapping[str, str]) -> Exception:
    if status in _PASSING:
        what = "limits the rate of requests" if status == 429 else "is overloaded"
        return _Overloaded(f"{settings.endpoint} {what} (HTTP {status})", retry_after_s(headers.get("retry-after")))
    if status in (401, 403):
        if _token(settings) is None:
            return _denied(settings, repo, has_token=False)
        return AccessDenied(f"{settings.endpoint} refuses the token (HTTP {status}); is it expired, or another hub's?")
    return HubUnavailable(f"{settings.endpoint} cannot be used: HTTP {status} for {repo}")
