"""The server's front over the demo model: health, ids, the start page."""

from __future__ import annotations

import httpx
import pytest

pytestmark = pytest.mark.native


def test_a_loaded_server_is_healthy_live_and_ready(client: httpx.Client) -> None:
    """All three respond with ok, and /v1/health is /health."""
    for path in ("/health", "/v1/health", "/health/ready"):
        response = client.get(path)
        assert (response.status_code, response.json()) == (200, {"status": "ok"})
    assert client.get("/health/live").json()["status"] == "ok"
    for path in ("/health", "/v1/health", "/health/live", "/health/ready"):
        response = client.head(path)
        assert (response.status_code, response.content) == (200, b"")


def test_an_unknown_route_is_refused_in_the_shape_of_its_api(client: httpx.Client) -> None:
    """Under /v1 as OpenAI does, elsewhere as llama-server does."""
    ours, theirs = client.get("/nothing"), client.get("/v1/nothing")
    assert ours.status_code == theirs.status_code == 404
    assert ours.json()["error"]["type"] == "not_found_error"
    assert ours.json()["error"]["code"] == 404
    assert theirs.json()["error"]["code"] == "not_found"
