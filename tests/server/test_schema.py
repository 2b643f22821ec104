"""The OpenAPI document against its server: requests made up from it, valid and invalid.

PACELINE_SCHEMA_EXAMPLES: how many for each route; by default few.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tests.server.running import LONG_S, RunningServer
from tests.sweeps import sampled

from paceline.server.settings import ServerSettings

pytestmark = pytest.mark.native

EXAMPLES = int(os.environ.get("PACELINE_SCHEMA_EXAMPLES", "8"))
IS_SAME = "PACELINE_SCHEMA_EXAMPLES" not in os.environ  # the same requests in every run
SMALL: dict[str, Any] = {"isolation": "thread", "num_slots": 4, "n_ctx": 160, "n_threads": 1}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with short completions and every feature switched on. At the end nothing is open and every slot is free."""
    engine = {**SMALL, "state_folder": tmp_path_factory.mktemp("states")}
    options = ServerSettings(
        engine_options=engine,
        sampling={"max_tokens": 4},
        props=True,
        embeddings=True,
        reranking=True,
        lora_loading=True,
        responses_store=4,
        batch_folder=tmp_path_factory.mktemp("batches"),
    )
    with RunningServer(options) as running:
        yield running
        running.until(lambda: running.service.request_registry.count == 0 and running.engine.num_open == 0)
        assert not any(slot.is_processing for slot in running.engine.slots())


@pytest.fixture(scope="module")
def document(small: RunningServer) -> Any:
    """The OpenAPI document, as the server has it."""
    return schemathesis.openapi.from_url(small.url + "/openapi.json", wait_for_schema=LONG_S)


ROUTES = (
    "GET /health",
    "GET /v1/health",
    "GET /health/live",
    "GET /health/ready",
    "POST /v1/requests/{request_id}/cancel",
    "GET /v1/stream",
    "DELETE /v1/stream",
    "POST /v1/streams/lookup",
    "GET /metrics",
    "GET /v1/engine/page",
    "GET /v1/usage",
    "GET /v1/engine/model",
    "GET /v1/models",
    "GET /models",
    "GET /v1/models/{model_id}",
    "POST /v1/completions",
    "POST /v1/chat/completions",
    "POST /chat/completions",
    "POST /v1/chat/completions/input_tokens",
    "POST /chat/completions/input_tokens",
    "POST /v1/audio/transcriptions",
    "POST /audio/transcriptions",
    "POST /v1/embeddings",
    "POST /classify",
    "POST /score",
    "POST /v1/score_choices",
    "POST /v1/load_lora_adapter",
    "POST /v1/unload_lora_adapter",
    "POST /v1/responses",
    "POST /responses",
    "POST /v1/responses/input_tokens",
    "POST /responses/input_tokens",
    "POST /v1/files",
    "GET /v1/files",
    "GET /v1/files/{file_id}",
    "GET /v1/files/{file_id}/content",
    "DELETE /v1/files/{file_id}",
    "POST /v1/batches",
    "GET /v1/batches",
    "GET /v1/batches/{batch_id}",
    "POST /v1/batches/{batch_id}/cancel",
    "GET /v1/responses/{response_id}",
    "DELETE /v1/responses/{response_id}",
    "GET /v1/responses/{response_id}/input_items",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "POST /api/chat",
    "POST /api/generate",
    "POST /api/embed",
    "POST /api/embeddings",
    "POST /api/show",
    "POST /api/pull",
    "GET /api/tags",
    "GET /api/ps",
    "GET /api/version",
    "POST /completion",
    "POST /infill",
    "GET /slots",
    "POST /slots/{id_slot}",
    "GET /lora-adapters",
    "POST /lora-adapters",
    "POST /tokenize",
    "POST /detokenize",
    "POST /apply-template",
    "POST /embedding",
    "POST /rerank",
    "GET /tokenizer_info",
    "GET /props",
    "POST /props",
)
ENDLESS = (
    "GET /v1/engine/events",
)  # streams that go on until the client leaves; test_engine_events.py tries what they take
WITHOUT_BODY = (
    "POST /v1/requests/{request_id}/cancel",
    "POST /v1/batches/{batch_id}/cancel",
    "POST /lora-adapters",
    "POST /props",
)
SOUND = [(route, GenerationMode.POSITIVE) for route in ROUTES]
UNSOUND = [
    (route, GenerationMode.NEGATIVE) for route in ROUTES if route.startswith("POST ") and route not in WITHOUT_BODY
]
CASES = [*SOUND, *sampled(UNSOUND, every=4)]
BOUNDED = {"timeout_s": 15}  # hundreds of choices up to the end of the context are made up, too
NEEDED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Once upon", **BOUNDED},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello."}], **BOUNDED},
    "/v1/chat/completions/input_tokens": {"messages": [{"role": "user", "content": "Hello."}]},
    "/v1/embeddings": {"input": "Once upon"},
    "/v1/batches": {"input_file_id": "file-none", "endpoint": "/v1/completions"},
    "/classify": {"input": "Once upon"},
    "/score": {"text_1": "Once upon", "text_2": ["a time"]},
    "/v1/load_lora_adapter": {"lora_name": "x", "lora_path": "no-such-file.gguf"},
    "/v1/unload_lora_adapter": {"lora_name": "x"},
    "/v1/responses": {"input": "Hello.", **BOUNDED},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hello."}]},
    "/api/chat": {"messages": [{"role": "user", "content": "Hello."}], "stream": False},
    "/api/generate": {"prompt": "Hello.", "stream": False},
    "/api/embed": {"input": "Once upon"},
    "/api/embeddings": {"prompt": "Once upon"},
    "/api/show": {"model": "paceline-demo"},
    "/api/pull": {"model": "paceline-demo", "stream": False},
    "/completion": {"prompt": "Once upon", **BOUNDED},
    "/infill": {"input_prefix": "Once", "input_suffix": "time", **BOUNDED},
    "/tokenize": {"content": "Once upon"},
    "/detokenize": {"tokens": [5, 6]},
    "/apply-template": {"messages": [{"role": "user", "content": "Hello."}]},
    "/embedding": {"content": "Once upon"},
    "/v1/score_choices": {"prompt": "Once upon", "choices": [" a time", " the sea"]},
    "/rerank": {"query": "Once", "documents": ["upon", "a time"]},
}
"""What a route needs before it looks at the rest."""
NOT_FOUND = dict.fromkeys(("/api/show", "/v1/batches", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"), (404,))
"""Routes whose body names what may not be there."""
NUMBERS = [
    0,
    -0.0,
    1,
    -1,
    2,
    3,
    0.5,
    -2.5,
    1e-320,
    1e308,
    -1e308,
    2**31 - 1,
    2**31,
    2**32,
    -(2**31) - 1,
    2**63,
    2**64,
    10**30,
]
TEXTS = [
    "",
    " ",
    "a",
    "0",
    "\0",
    "\ufeff",
    "\U0001f98a" * 9,
    "e\u0301",
    "../../x",
    "\n",
    "none",
    "root ::= ",
    "{",
    "x" * 3000,
]
PLAIN = st.sampled_from([None, True, False, *NUMBERS, *TEXTS])
ODD = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "content", "text", "token", "id", "role", *TEXTS]), inner, max_size=3
        )
    ),
    max_leaves=5,
)
CONFORMS = [content_type_conformance, response_schema_conformance, status_code_conformance]
INSIDE = (b"Traceback", b"site-packages", b".py", b"/src/", str(Path.home()).encode())


def test_every_route_of_the_document_is_tried(document: Any) -> None:
    """The list above is all of them."""
    found = [result.ok() for result in document.get_all_operations()]
    assert {f"{ok.method.upper()} {ok.path}" for ok in found} == {*ROUTES, *ENDLESS}


@pytest.mark.parametrize(("route", "mode"), CASES, ids=lambda part: getattr(part, "name", part))
def test_made_up_requests_get_responses_as_documented(document: Any, route: str, mode: GenerationMode) -> None:
    """Never a failure of the server's own, nothing of its inside, and a shape that the document knows."""
    method, path = route.split()
    cases = document[path][method].as_strategy(generation_mode=mode)
    bounded = settings(
        max_examples=EXAMPLES, deadline=None, derandomize=IS_SAME, suppress_health_check=list(HealthCheck)
    )
    bounded(given(cases)(examined))()


def examined(case: schemathesis.Case) -> None:
    """One request and its response."""
    if isinstance(case.body, dict) and case.path in NEEDED:
        case.body = NEEDED[case.path] | case.body
    check_response(case, case.call(timeout=LONG_S))


def check_response(case: schemathesis.Case, response: schemathesis.Response) -> None:
    is_ours = response.status_code not in (501, 504)  # not supported; a time limit of its own
    checks = [*CONFORMS, not_a_server_error] if is_ours else CONFORMS
    case.validate_response(response, checks=checks)
    for word in INSIDE:
        assert word not in response.content


@pytest.mark.parametrize("path", sampled(NEEDED, every=4))
def test_odd_values_of_known_fields_are_taken_or_refused(document: Any, small: RunningServer, path: str) -> None:
    """Some fields at a time, with the required fields: a 200, or a 400 with the reason; never more."""
    fields = sorted(properties_of(document, path))
    bodies = st.dictionaries(st.sampled_from(fields), ODD, min_size=1, max_size=3)

    def tried(body: dict[str, Any]) -> None:
        response = client.post(path, json=NEEDED[path] | body)
        assert response.status_code in (200, 400, 501, 504, *NOT_FOUND.get(path, ())), response.text
        if response.status_code != 200:
            error = response.json()["error"]
            assert error if isinstance(error, str) else error["message"]
        for word in INSIDE:
            assert word not in response.content

    bounded = settings(
        max_examples=8 * EXAMPLES, deadline=None, derandomize=IS_SAME, suppress_health_check=list(HealthCheck)
    )
    with small.client() as client:
        bounded(given(bodies)(tried))()


def properties_of(document: Any, path: str) -> dict[str, Any]:
    """The fields of the route's body."""
    raw = document.raw_schema
    body = raw["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    found: dict[str, Any] = raw["components"]["schemas"][body["$ref"].rpartition("/")[2]]["properties"]
    return found
