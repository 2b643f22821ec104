"""The Hugging Face Hub through huggingface_hub: files of a repository, tokens, the layout of its cache, errors.

The only module that imports huggingface_hub, when the hub is first asked. Blocking; any thread.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from paceline.errors import Aborted, AccessDenied, HubUnavailable, ModelNotFound, PacelineError
from paceline.hub.download import DownloadObserver
from paceline.hub.file_choice import RepoFile, nearest_names
from paceline.hub.http_responses import retry_after_s
from paceline.hub.hub_settings import HubSettings
from paceline.hub.references import is_repository_path

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.hf_api import RepoSibling

T = TypeVar("T")

_TIMEOUT_S: Final = 20.0
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
        info = self._try(
            repo, revision, lambda api: api.model_info(repo, revision=revision, files_metadata=True, timeout=_TIMEOUT_S)
        )
        if info.sha is None or info.siblings is None or not _COMMIT.fullmatch(info.sha):
            raise HubUnavailable(f"{self._settings.endpoint} does not list files as the hub does; check HF_ENDPOINT")
        files = tuple(map(_repo_file, info.siblings))
        outside = next((file.path for file in files if not is_repository_path(file.path)), None)
        if outside is not None:
            raise HubUnavailable(
                f"{self._settings.endpoint} lists {outside!r:.80} in {repo}, which leads out of it; check HF_ENDPOINT"
            )
        return RepoListing(repo, info.sha, files)

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

    def link(self, repo: str, commit: str, path: str) -> Path:
        """Give a file its place in huggingface_hub's cache, and return it; without its blob this downloads the file."""
        from huggingface_hub import hf_hub_download

        settings = self._settings
        return Path(
            self._try(
                repo,
                commit,
                lambda _: hf_hub_download(
                    repo,
                    path,
                    revision=commit,
                    cache_dir=settings.cache,
                    endpoint=settings.endpoint,
                    token=settings.token,
                    library_name="paceline",
                ),
            )
        )

    def _try(self, repo: str, revision: str | None, request: Callable[[HfApi], T]) -> T:
        """Send a request, again where the hub asks for patience."""
        from huggingface_hub import HfApi

        api = HfApi(endpoint=self._settings.endpoint, token=self._settings.token, library_name="paceline")
        for attempt in range(_ATTEMPTS):
            try:
                with _translated(self._settings, repo, revision):
                    return request(api)
            except _Overloaded as error:
                wait_s = 2.0**attempt / 2 if error.wait_s is None else error.wait_s
                if attempt + 1 == _ATTEMPTS or wait_s > _LONGEST_WAIT_S:
                    raise HubUnavailable(
                        f"{error}; try again later, or log in with HF_TOKEN for a higher limit"
                    ) from None
                self._observer.note(f"{error}; trying again in {wait_s:.1f} s")
                if self._cancel.wait(wait_s):
                    raise Aborted(f"the look-up of {repo} was stopped") from None
            except ModelNotFound as error:
                raise ModelNotFound(f"{error}{self._similar(api, repo, revision)}") from None
        raise AssertionError("the last attempt returns or raises")

    def _similar(self, api: HfApi, repo: str, revision: str | None) -> str:
        """Return the nearest names of the same owner, for a repository that does not exist."""
        user = repo.partition("/")[0]
        try:
            if revision is not None:
                return ""
            names = [model.id for model in api.list_models(author=user, limit=200)]
        except Exception:  # noqa: BLE001 - only a hint in a message
            return ""
        return f"; {nearest_names(repo, names)}" if names else f"; the hub has no models of {user}"


class _Overloaded(Exception):
    """The hub asks for patience."""

    def __init__(self, message: str, wait_s: float | None) -> None:
        super().__init__(message)
        self.wait_s = wait_s


def _repo_file(sibling: RepoSibling) -> RepoFile:
    lfs = sibling.lfs
    sha256 = None if lfs is None or not _SHA256.fullmatch(lfs.sha256) else lfs.sha256
    git_id = None if sibling.blob_id is None or not _GIT_ID.fullmatch(sibling.blob_id) else sibling.blob_id
    return RepoFile(sibling.rfilename, sibling.size, sha256 or git_id, sha256)


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
    except PacelineError:
        raise
    except HfHubHTTPError as error:
        raise _of_response(settings, repo, revision, error) from None
    except ValueError as error:  # of its parser of JSON
        raise HubUnavailable(
            f"{settings.endpoint} does not respond as the hub does ({error}); check HF_ENDPOINT"
        ) from None
    except Exception as error:
        cause = error.__cause__  # that of a LocalEntryNotFoundError is the reason
        if isinstance(cause, HfHubHTTPError):
            raise _of_response(settings, repo, revision, cause) from None
        failed = next((each for each in (error, cause) if each is not None and _is_transport_error(each)), None)
        if failed is None:
            raise
        raise _unreachable(settings, failed) from None


def _of_response(settings: HubSettings, repo: str, revision: str | None, error: HfHubHTTPError) -> Exception:
    from huggingface_hub import errors

    match error:
        case errors.GatedRepoError():
            return _denied(settings, repo, has_token=_token(settings) is not None)
        case errors.RevisionNotFoundError():
            return ModelNotFound(f"{repo} has no branch, tag or commit {revision!r}")
        case errors.RepositoryNotFoundError():
            private = "it is private and needs a token: set HF_TOKEN or pass hf_token"
            if _token(settings) is not None:
                private = "the token may not see it"
            return ModelNotFound(f"{settings.endpoint} has no repository {repo}, or {private}")
        case errors.EntryNotFoundError():
            return ModelNotFound(f"{repo} has no such file at {revision}")
        case _:
            return _of_status(settings, repo, error)


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


def _of_status(settings: HubSettings, repo: str, error: HfHubHTTPError) -> Exception:
    status = error.response.status_code
    if status in _PASSING:
        what = "limits the rate of requests" if status == 429 else "is overloaded"
        return _Overloaded(
            f"{settings.endpoint} {what} (HTTP {status})", retry_after_s(error.response.headers.get("retry-after"))
        )
    if status in (401, 403):
        if _token(settings) is None:
            return _denied(settings, repo, has_token=False)
        return AccessDenied(f"{settings.endpoint} refuses the token (HTTP {status}); is it expired, or another hub's?")
    return HubUnavailable(f"{settings.endpoint} cannot be used: HTTP {status} for {repo}")
