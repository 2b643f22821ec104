"""Map errors to the status, type, code and body that a client receives in the form of its API.

Pure; any thread. Messages carry no tracebacks and no folders; the server's log has the details.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, Final

import msgspec
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from paceline import errors
from paceline.streaming import FinishReason

FAILED_FINISH_REASONS = frozenset(
    {FinishReason.ERROR, FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.SHUTDOWN, FinishReason.SLOW_READER}
)
"""Finish reasons that are reported as an error."""

COMPLETE_FINISH_REASONS = frozenset(FinishReason) - FAILED_FINISH_REASONS
"""Finish reasons of complete responses. Their values are OpenAI's terms."""

DEFAULT_RETRY_S = 1
"""Retry-After in seconds without an estimate."""

CLIENT_CLOSED = 499
"""Status after a disconnection or cancellation; only a client that cancelled by id receives it."""

_FIRST_WORD = re.compile(r"\w+")
_MAX_CHARS = 2000  # of a message
_WORD = r"[^\s/\\:'\"<>|]+"
_FOLDERS = re.compile(rf"(?<![\w.~:/])(?:[A-Za-z]:\\|~?/)(?:{_WORD}(?: {_WORD})*[/\\])+")  # names may have spaces


@dataclass(frozen=True, slots=True)
class ApiError:
    """An error as a client receives it.

    Attributes:
        status: The status of the response.
        type: llama-server's term.
        code: Our own term, which is stable.
        message: A sentence for people.
        param: The field at fault.
        extra: Further members of the error object.
        retry_after_s: The value of the Retry-After header.
    """

    status: int
    type: str
    code: str | None
    message: str
    param: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    retry_after_s: int | None = None


class ApiException(HTTPException):
    """Carries an `ApiError` to the exception handler. health: the members of /health during this error."""

    def __init__(self, api_error: ApiError, **health: Any) -> None:
        super().__init__(api_error.status, api_error.message)
        self.api_error, self.health = api_error, health


class ModelLoading(ApiException):
    """The model is being loaded. progress: 0 to 1. remaining_s: an estimate."""

    def __init__(self, progress: float, remaining_s: int = DEFAULT_RETRY_S) -> None:
        api_error = ApiError(503, "unavailable_error", "loading", "Loading model", retry_after_s=remaining_s)
        super().__init__(api_error, status="loading", progress=round(progress, 4))


class ModelLoadFailed(ApiException):
    """The model could not be loaded."""

    def __init__(self, error: BaseException) -> None:
        cause = api_error_of(error)
        message = strip_folders(cause.message)  # the client of this request is not at fault
        api_error = replace(cause, status=503, type="unavailable_error", message=message, retry_after_s=None)
        super().__init__(api_error, status="failed")


class WorkerCrashLoop(ApiException):
    """The worker process crashed several times in a row and is not up again. Health routes report it; requests wait."""

    def __init__(self, num_crashes: int, restart_in_s: float | None) -> None:
        until = "the next one loads" if restart_in_s is None else f"restart in {restart_in_s:.1f} s"
        message = f"the engine's worker process crashed {num_crashes} times in a row; {until}"
        estimate_wait_s = max(DEFAULT_RETRY_S, math.ceil(restart_in_s or 0))
        api_error = ApiError(503, "unavailable_error", "crash_loop", message, retry_after_s=estimate_wait_s)
        super().__init__(api_error, status="crash_loop", crashes=num_crashes)


class WorkerHung(ApiException):
    """The worker process gives no heartbeats and is replaced. Health routes report it; requests wait."""

    def __init__(self) -> None:
        message = "the engine's worker process hung and is replaced; requests wait for the next one"
        api_error = ApiError(503, "unavailable_error", "worker_hung", message, retry_after_s=DEFAULT_RETRY_S)
        super().__init__(api_error, status="hung")


class ServerDraining(ApiException):
    """The server is shutting down and accepts no requests."""

    def __init__(self) -> None:
        message = "the server is shutting down and takes no requests; try another one"
        super().__init__(ApiError(503, "unavailable_error", "shutdown", message, retry_after_s=DEFAULT_RETRY_S))


class ClientDisconnected(ApiException):
    """The client disconnected before its response was complete."""

    def __init__(self) -> None:
        super().__init__(ApiError(CLIENT_CLOSED, "cancelled_error", "client_gone", "the client disconnected"))


def invalid_request(
    message: str, param: str | None = None, code: str = "invalid_params", status: int = 400
) -> ApiException:
    """Return the exception for a request that is at fault. param: the field."""
    kind = "not_found_error" if status == 404 else "invalid_request_error"
    return ApiException(ApiError(status, kind, code, message, param=param))


def not_supported(message: str) -> ApiException:
    """Return the exception for a feature that this server was not started with."""
    return ApiException(ApiError(501, "not_supported_error", "unsupported", message))


@contextmanager
def naming_param(names: Collection[str], **others: str) -> Iterator[None]:
    """Add `param` to an error of a request if its message begins with a name of a field.

    others: maps the engine's name of a field to the body's.
    """
    try:
        yield
    except errors.RequestError as error:
        word = _FIRST_WORD.match(str(error))
        param = None if word is None else others.get(word[0], word[0])
        if param not in names:
            raise
        raise ApiException(replace(api_error_of(error), param=param)) from error


# ---- from errors to API errors

_BY_ERROR: dict[type[BaseException], tuple[int, str]] = {
    errors.NoTokenAllowed: (400, "invalid_request_error"),  # by the request's own masks, bans and grammar
    errors.PromptTooLong: (400, "exceed_context_size_error"),
    errors.Unsupported: (501, "not_supported_error"),
    errors.RequestError: (400, "invalid_request_error"),
    errors.QueueFull: (429, "rate_limit_error"),
    errors.CapacityError: (503, "unavailable_error"),
    errors.EngineStopped: (503, "unavailable_error"),
    errors.RpcServerUnavailable: (503, "unavailable_error"),
    errors.WorkerUnresponsive: (503, "unavailable_error"),
    errors.Closed: (503, "unavailable_error"),
    errors.Cancelled: (CLIENT_CLOSED, "cancelled_error"),
    errors.DeadlineExceeded: (504, "timeout_error"),
    errors.StateError: (400, "invalid_request_error"),
    errors.PacelineError: (500, "server_error"),
}
_BY_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
_BY_FINISH_REASON = {
    FinishReason.CANCELLED: ApiError(CLIENT_CLOSED, "cancelled_error", "cancelled", "the request was cancelled"),
    FinishReason.DEADLINE: ApiError(504, "timeout_error", "deadline", "the request ran out of time"),
    FinishReason.SHUTDOWN: ApiError(503, "unavailable_error", "shutdown", "the server is shutting down"),
    FinishReason.SLOW_READER: ApiError(
        408, "timeout_error", "slow_reader", "the client read too slowly, and what it had not read grew too long"
    ),
    FinishReason.ERROR: ApiError(500, "server_error", "engine_error", "the request failed"),
}


def api_error_of(error: BaseException) -> ApiError:
    """Map an exception to an `ApiError`. Unexpected exceptions reveal nothing of themselves."""
    if isinstance(error, ApiException):
        return error.api_error
    if isinstance(error, errors.PacelineError):
        return _of_paceline(error)
    if isinstance(error, RequestValidationError):
        return _of_validation(error)
    if isinstance(error, HTTPException):
        status = error.status_code
        code = HTTPStatus(status).phrase.lower().replace(" ", "_").replace("-", "_")
        kind = _BY_STATUS.get(status, "server_error" if status >= 500 else "invalid_request_error")
        return ApiError(status, kind, code, clean_message(strip_folders(str(error.detail))))
    return ApiError(500, "server_error", "internal_error", "internal server error; the server log has the details")


def api_error_of_finish(reason: FinishReason, error: BaseException | None = None) -> ApiError:
    """Map a failed finish reason, or the error that caused it, to an `ApiError`."""
    return _BY_FINISH_REASON[reason] if error is None else api_error_of(error)


def _of_paceline(error: errors.PacelineError) -> ApiError:
    status, kind = next(_BY_ERROR[kind] for kind in type(error).__mro__ if kind in _BY_ERROR)
    is_callers = isinstance(error, errors.RequestError)
    return ApiError(
        status,
        kind,
        error.code,
        clean_message(str(error) if is_callers else strip_folders(str(error))),
        extra=_context_size(error),
        retry_after_s=DEFAULT_RETRY_S if status in (429, 503) else None,
    )


def _context_size(error: errors.PacelineError) -> dict[str, Any]:
    """Return the further members of the error of a too long prompt: llama-server's, and whether its tokens were counted."""
    if not isinstance(error, errors.PromptTooLong):
        return {}
    members = {"n_prompt_tokens": error.num_tokens, "n_ctx": error.max_tokens}
    known: dict[str, Any] = {name: value for name, value in members.items() if value is not None}
    return known if error.is_counted else {**known, "n_prompt_tokens_counted": False}


def _of_validation(error: RequestValidationError) -> ApiError:
    first = error.errors()[0]
    place = [str(part) for part in first["loc"][1:]]  # the first is the part of the request: body, query, path
    if first["type"] == "json_invalid":
        detail = first.get("ctx", {}).get("error", "")
        return ApiError(400, "invalid_request_error", "invalid_json", clean_message(f"the body is not JSON: {detail}"))
    name = ".".join(place)
    message = f"{name}: {first['msg']}" if name else f"the body: {first['msg']}"
    return ApiError(
        400,
        "invalid_request_error",
        "invalid_params",
        clean_message(message),
        param=clean_message(place[0]) if place else None,
    )


def strip_folders(text: str) -> str:
    """Cut every absolute path in a text to its last part."""
    return _FOLDERS.sub("", text)


def clean_message(text: str) -> str:
    """Return a text that UTF-8 can carry, no longer than a message may be."""
    cut = text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 3] + "..."
    return cut.encode("utf-8", "replace").decode()


# ---- the shapes of the APIs


def openai_error_body(api_error: ApiError) -> dict[str, Any]:
    """Return OpenAI's error object."""
    kind, code = api_error.type, api_error.code
    if kind == "exceed_context_size_error":
        kind, code = "invalid_request_error", "context_length_exceeded"
    elif kind == "not_supported_error":
        kind = "invalid_request_error"
    return {
        "error": {"message": api_error.message, "type": kind, "param": api_error.param, "code": code, **api_error.extra}
    }


def llama_error_body(api_error: ApiError) -> dict[str, Any]:
    """Return llama-server's error object."""
    return {
        "error": {"code": api_error.status, "message": api_error.message, "type": api_error.type, **api_error.extra}
    }


def openai_status(api_error: ApiError) -> int:
    """Return the status in OpenAI's API, which has no 501: a request for an unsupported feature is at fault."""
    return 400 if api_error.status == 501 else api_error.status


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """The form in which an API reports errors.

    Attributes:
        body: Returns the body of a response.
        status: Returns its status.
        paths: Paths without a route have this form if they are listed here, or below a listed path. A path with a slash at its
            end stands for the paths below it alone.
        id_header: The name of a header that repeats X-Request-Id; empty: none.
    """

    body: Callable[[ApiError], dict[str, Any]]
    status: Callable[[ApiError], int]
    paths: tuple[str, ...] = ()
    id_header: bytes = b""


OPENAI_FORM: Final = ErrorForm(openai_error_body, openai_status, ("/v1", "/chat/", "/audio/", "/responses"))
LLAMA_FORM: Final = ErrorForm(llama_error_body, lambda api_error: api_error.status)


def error_body_response(api_error: ApiError, form: ErrorForm, headers: Mapping[str, str] | None = None) -> Response:
    """Return the response that reports an error in the form of an API."""
    retry = {} if api_error.retry_after_s is None else {"retry-after": str(api_error.retry_after_s)}
    return Response(
        msgspec.json.encode(form.body(api_error)),
        form.status(api_error),
        headers={**(headers or {}), **retry},
        media_type="application/json",
    )
