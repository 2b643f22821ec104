"""From anything that goes wrong to what a client is told: a status, a type, a code, and a body in the shape of its API.

Pure. Messages carry no tracebacks and no folders; what happened inside is for the log. Any thread.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from paceline import errors
from paceline.streaming import FinishReason

FAILED_ENDINGS = frozenset(
    {
        FinishReason.ERROR,
        FinishReason.CANCELLED,
        FinishReason.DEADLINE,
        FinishReason.SHUTDOWN,
        FinishReason.SLOW_READER,
    }
)
"""The reasons that APIs tell as an error; with any other the answer is whole."""

RETRY_S = 1
"""What clients are told to wait where nothing better is known, in seconds."""

CLIENT_CLOSED = 499
"""The status of what its client gave up; no client sees it but one that cancelled by id."""

_MOST_CHARS = 2000  # of a message
_WORD = r"[^\s/\\:'\"<>|]+"
_FOLDERS = re.compile(rf"(?<![\w.~:/])(?:[A-Za-z]:\\|~?/)(?:{_WORD}(?: {_WORD})*[/\\])+")  # names may have blanks


@dataclass(frozen=True, slots=True)
class Problem:
    """What a client is told. type: in llama-server's words; code: ours, stable; param: the field at fault.

    extra: members of the error object beside these. retry_after_s: for the header of that name.
    """

    status: int
    type: str
    code: str | None
    message: str
    param: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    retry_after_s: int | None = None


class Refused(HTTPException):
    """A request that is answered with a problem; routes may raise it."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.status, problem.message)
        self.problem = problem


class Loading(Refused):
    """The model is not there yet. progress: 0 to 1. rest_s: how long loading goes on, as far as that can be told."""

    def __init__(self, progress: float, rest_s: int = RETRY_S) -> None:
        super().__init__(Problem(503, "unavailable_error", "loading", "Loading model", retry_after_s=rest_s))
        self.progress = progress


class LoadFailed(Refused):
    """The model could not be loaded, and will not be."""

    def __init__(self, error: BaseException) -> None:
        told = problem_of(error)
        message = without_folders(told.message)  # whoever is at fault, it is not who asks
        super().__init__(replace(told, status=503, type="unavailable_error", message=message, retry_after_s=None))


class Draining(Refused):
    """The server is about to end and takes no work any more."""

    def __init__(self) -> None:
        message = "the server is shutting down and takes no requests; try another one"
        super().__init__(Problem(503, "unavailable_error", "shutdown", message, retry_after_s=RETRY_S))


class ClientGone(Refused):
    """The client hung up before its answer was there; nobody reads what is answered to it."""

    def __init__(self) -> None:
        super().__init__(Problem(CLIENT_CLOSED, "cancelled_error", "client_gone", "the client hung up"))


# ---- from errors to problems

_BY_ERROR: dict[type[BaseException], tuple[int, str]] = {
    errors.PromptTooLong: (400, "exceed_context_size_error"),
    errors.Unsupported: (501, "not_supported_error"),
    errors.RequestError: (400, "invalid_request_error"),
    errors.QueueFull: (429, "rate_limit_error"),
    errors.CapacityError: (503, "unavailable_error"),
    errors.EngineStopped: (503, "unavailable_error"),
    errors.Closed: (503, "unavailable_error"),
    errors.Cancelled: (CLIENT_CLOSED, "cancelled_error"),
    errors.DeadlineExceeded: (504, "timeout_error"),
    errors.StateError: (400, "invalid_request_error"),
    errors.PacelineError: (500, "server_error"),
}
_BY_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
_ENDINGS = {
    FinishReason.CANCELLED: Problem(CLIENT_CLOSED, "cancelled_error", "cancelled", "the request was cancelled"),
    FinishReason.DEADLINE: Problem(504, "timeout_error", "deadline", "the request ran out of time"),
    FinishReason.SHUTDOWN: Problem(503, "unavailable_error", "shutdown", "the server is shutting down"),
    FinishReason.SLOW_READER: Problem(
        408, "timeout_error", "slow_reader", "the client read too slowly, and what it had not read grew too long"
    ),
    FinishReason.ERROR: Problem(500, "server_error", "engine_error", "the request failed"),
}


def problem_of(error: BaseException) -> Problem:
    """What is told of an error. Of one that nobody foresaw no more than that."""
    if isinstance(error, Refused):
        return error.problem
    if isinstance(error, errors.PacelineError):
        return _of_paceline(error)
    if isinstance(error, RequestValidationError):
        return _of_validation(error)
    if isinstance(error, HTTPException):
        return _of_status(error.status_code, str(error.detail))
    return Problem(
        500, "server_error", "internal_error", "the server failed in a way that nobody foresaw; its log has more"
    )


def problem_of_ending(reason: FinishReason, error: BaseException | None = None) -> Problem:
    """What is told of an answer that ended in one of `FAILED_ENDINGS`."""
    return _ENDINGS[reason] if error is None else problem_of(error)


def _of_paceline(error: errors.PacelineError) -> Problem:
    status, kind = next(_BY_ERROR[each] for each in type(error).__mro__ if each in _BY_ERROR)
    is_callers = isinstance(error, errors.RequestError)
    return Problem(
        status,
        kind,
        error.code,
        clean(str(error) if is_callers else without_folders(str(error))),
        extra=_context_size(error),
        retry_after_s=RETRY_S if status in (429, 503) else None,
    )


def _context_size(error: errors.PacelineError) -> dict[str, Any]:
    """llama-server's members of the error object of a prompt that is too long."""
    if not isinstance(error, errors.PromptTooLong):
        return {}
    told = {"n_prompt_tokens": error.num_tokens, "n_ctx": error.max_tokens}
    return {name: value for name, value in told.items() if value is not None}


def _of_validation(error: RequestValidationError) -> Problem:
    first = error.errors()[0]
    place = [str(part) for part in first["loc"][1:]]  # the first says where in the request: body, query, path
    if first["type"] == "json_invalid":
        detail = first.get("ctx", {}).get("error", "")
        return Problem(400, "invalid_request_error", "invalid_json", clean(f"the body is not JSON: {detail}"))
    name = ".".join(place)
    message = f"{name}: {first['msg']}" if name else f"the body: {first['msg']}"
    return Problem(
        400, "invalid_request_error", "invalid_params", clean(message), param=clean(place[0]) if place else None
    )


def _of_status(status: int, detail: str) -> Problem:
    code = HTTPStatus(status).phrase.lower().replace(" ", "_").replace("-", "_")
    kind = _BY_STATUS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return Problem(status, kind, code, clean(without_folders(detail)))


def without_folders(text: str) -> str:
    """The text with every absolute path cut to its last part."""
    return _FOLDERS.sub("", text)


def clean(text: str) -> str:
    """The text as UTF-8 can carry it, and no longer than a message may be."""
    cut = text if len(text) <= _MOST_CHARS else text[: _MOST_CHARS - 3] + "..."
    return cut.encode("utf-8", "replace").decode()


# ---- the two shapes


def openai_body(problem: Problem) -> dict[str, Any]:
    """The error object of OpenAI's API."""
    kind, code = problem.type, problem.code
    if kind == "exceed_context_size_error":
        kind, code = "invalid_request_error", "context_length_exceeded"
    elif kind == "not_supported_error":
        kind = "invalid_request_error"
    return {"error": {"message": problem.message, "type": kind, "param": problem.param, "code": code, **problem.extra}}


def llama_body(problem: Problem) -> dict[str, Any]:
    """The error object of llama-server."""
    return {"error": {"code": problem.status, "message": problem.message, "type": problem.type, **problem.extra}}


def openai_status(problem: Problem) -> int:
    """OpenAI's API knows no 501: what is not supported is the request's fault."""
    return 400 if problem.status == 501 else problem.status


def speaks_openai(path: str) -> bool:
    """Whether errors of this route, without prefix, have OpenAI's shape."""
    return path == "/v1" or path.startswith(("/v1/", "/chat/"))


def response_of(problem: Problem, path: str, headers: Mapping[str, str] | None = None) -> Response:
    """The answer to a request of this route, without prefix, that met a problem."""
    is_openai = speaks_openai(path)
    retry = {} if problem.retry_after_s is None else {"retry-after": str(problem.retry_after_s)}
    return Response(
        msgspec.json.encode(openai_body(problem) if is_openai else llama_body(problem)),
        openai_status(problem) if is_openai else problem.status,
        headers={**(headers or {}), **retry},
        media_type="application/json",
    )
