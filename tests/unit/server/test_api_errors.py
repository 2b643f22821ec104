"""From exceptions to error bodies, in the shapes of the APIs."""

from __future__ import annotations

import msgspec
import pytest
from starlette.exceptions import HTTPException

from paceline import errors
from paceline.errors import PacelineError
from paceline.server.api_errors import (
    FAILED_FINISH_REASONS,
    OPENAI_FORM,
    ApiError,
    ModelLoadFailed,
    api_error_of,
    api_error_of_finish,
    clean_message,
    error_body_response,
    llama_error_body,
    openai_error_body,
    openai_status,
    strip_folders,
)
from paceline.server.dialects.anthropic.anthropic_routes import ANTHROPIC_FORM, MessageEvents, MessageReply
from paceline.server.dialects.ollama.ollama_routes import OLLAMA_FORM, OllamaLines, OllamaReply
from paceline.streaming import FinishReason


def tree(base: type[PacelineError]) -> list[type[PacelineError]]:
    return [base, *(each for child in base.__subclasses__() for each in tree(child))]


def test_every_error_has_a_status_by_whose_fault_it_is() -> None:
    """The caller's are 4xx (or 501), the load's 429 or 503, the rest 5xx; the code is always ours."""
    for kind in [each for each in tree(PacelineError) if each.__module__ == "paceline.errors"]:
        api_error = api_error_of(kind("words"))
        assert api_error.code == kind.code
        assert api_error.message == "words"
        if issubclass(kind, errors.RequestError):
            assert api_error.status == (501 if issubclass(kind, errors.Unsupported) else 400)
        elif issubclass(kind, errors.CapacityError):
            assert api_error.status in (429, 503)
            assert api_error.retry_after_s is not None
        elif not issubclass(kind, (errors.StateError, errors.Cancelled, errors.NoTokenAllowed)):
            assert api_error.status >= 500


def test_what_is_not_supported_is_the_requests_fault_for_openai_only() -> None:
    """llama-server says 501, OpenAI's API knows none."""
    api_error = api_error_of(errors.Unsupported("no"))
    assert (api_error.status, llama_error_body(api_error)["error"]["type"]) == (501, "not_supported_error")
    assert (openai_status(api_error), openai_error_body(api_error)["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    ("status", "expected", "kind"),
    [
        (400, 400, "invalid_request_error"),
        (401, 401, "authentication_error"),
        (403, 403, "permission_error"),
        (404, 404, "not_found_error"),
        (405, 405, "invalid_request_error"),
        (408, 408, "timeout_error"),
        (413, 413, "request_too_large"),
        (429, 529, "overloaded_error"),
        (500, 500, "api_error"),
        (501, 400, "invalid_request_error"),
        (503, 503, "overloaded_error"),
        (504, 504, "timeout_error"),
    ],
)
def test_errors_of_anthropics_routes_have_its_types(status: int, expected: int, kind: str) -> None:
    """As a response and as an event; no room is 529, since 429 is a caller's own limit."""
    api_error = ApiError(status, "any", "code", "words")
    body = {"type": "error", "error": {"type": kind, "message": "words"}}
    response = error_body_response(api_error, ANTHROPIC_FORM)
    assert (response.status_code, msgspec.json.decode(response.body)) == (expected, body)
    events = MessageEvents(MessageReply(id="msg_1", model="m", num_prompt=1, max_tokens=None))
    assert events.failure(api_error) == b"event: error\ndata: " + msgspec.json.encode(body) + b"\n\n"
    too_long = ANTHROPIC_FORM.body(api_error_of(errors.PromptTooLong("long", 10, 5)))
    assert too_long["error"]["message"] == "prompt is too long: 10 tokens > 5 maximum"


@pytest.mark.parametrize(
    ("status", "expected"), [(400, 400), (401, 401), (404, 404), (429, 503), (501, 400), (503, 503)]
)
def test_errors_of_ollamas_routes_are_a_text(status: int, expected: int) -> None:
    """As a response and as a line; a full queue is 503 there."""
    api_error = ApiError(status, "any", "code", "words")
    response = error_body_response(api_error, OLLAMA_FORM)
    assert (response.status_code, msgspec.json.decode(response.body)) == (expected, {"error": "words"})
    assert OllamaLines(OllamaReply(model="m", is_chat=True)).failure(api_error) == b'{"error":"words"}'


def test_a_prompt_that_is_too_long_has_the_error_of_either_api() -> None:
    """With the numbers that llama-server's clients look for."""
    api_error = api_error_of(errors.PromptTooLong("long", 10, 5))
    numbers = {"n_prompt_tokens": 10, "n_ctx": 5}
    assert llama_error_body(api_error)["error"] == {
        "code": 400, "message": "long", "type": "exceed_context_size_error", **numbers,
    }  # fmt: skip
    assert openai_error_body(api_error)["error"] == {
        "message": "long", "type": "invalid_request_error", "param": None, "code": "context_length_exceeded", **numbers,
    }  # fmt: skip


def test_an_unexpected_error_shows_no_details() -> None:
    """The body has neither its message nor its class."""
    body = str(llama_error_body(api_error_of(ZeroDivisionError("/srv/secret"))))
    assert "secret" not in body
    assert "ZeroDivision" not in body


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cannot read /srv/models/a b/m.gguf: gone", "cannot read m.gguf: gone"),
        ("'/home/me/llama.cpp/ggml.c:12: GGML_ASSERT(a/b) failed", "'ggml.c:12: GGML_ASSERT(a/b) failed"),
        ("C:\\models\\m.gguf is no model", "m.gguf is no model"),
        ("~/models/m.gguf", "m.gguf"),
        ("see https://example.org/a/b, 3/4 of it and /v1", "see https://example.org/a/b, 3/4 of it and /v1"),
        ("cannot read '/srv/our own/big models/m.gguf': gone", "cannot read 'm.gguf': gone"),
        ("/a/b.so and /c/d.so differ", "b.so and d.so differ"),
    ],
)
def test_folders_are_cut_from_internal_messages(text: str, expected: str) -> None:
    """Names of files stay, and texts that only look like a path."""
    assert strip_folders(text) == expected


def test_a_callers_own_words_are_shown_as_they_are() -> None:
    """A path in a prompt's parameter is no secret to the client that sent it."""
    assert "/a/b/c" in api_error_of(errors.InvalidParams("stop must be a text, not '/a/b/c'")).message


def test_messages_can_be_carried_and_end() -> None:
    """A lone surrogate is replaced, and a very long message is cut."""
    assert clean_message("a\ud800") == "a?"
    assert len(clean_message("x" * 100_000)) == 2000
    msgspec.json.encode(openai_error_body(api_error_of(errors.InvalidParams("\udfff" * 5000))))


def test_every_failed_finish_reason_is_an_error_code() -> None:
    """As the code, unless there is an error with more details."""
    for reason in FAILED_FINISH_REASONS - {FinishReason.ERROR}:
        assert api_error_of_finish(reason).code == reason.value
    assert api_error_of_finish(FinishReason.ERROR, errors.DecodeError("x")).code == "decode_error"


def test_statuses_of_the_framework_have_types_and_codes() -> None:
    """404 and 405 have the shape of their API."""
    for status, code in ((404, "not_found"), (405, "method_not_allowed")):
        response = error_body_response(api_error_of(HTTPException(status)), OPENAI_FORM)
        assert response.status_code == status
        assert msgspec.json.decode(response.body)["error"]["code"] == code


def test_a_failed_load_is_a_503_with_its_reason() -> None:
    """Whatever the error was: requests may find another server."""
    api_error = ModelLoadFailed(errors.ModelLoadError("/x/y.gguf is no GGUF model")).api_error
    assert (api_error.status, api_error.code, api_error.message) == (503, "model_load_error", "y.gguf is no GGUF model")
