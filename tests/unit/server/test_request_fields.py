"""Options of the server and of a request together."""

from __future__ import annotations

from paceline.server.request_fields import merge_options


def test_no_request_outlives_the_servers_limit() -> None:
    """It may ask for less time and not for more; other options it sets as it likes."""
    assert merge_options({"timeout_s": 5.0, "priority": 1}, {"timeout_s": 9.0, "priority": 2}) == {
        "timeout_s": 5.0,
        "priority": 2,
    }
    assert merge_options({"timeout_s": 5.0}, {"timeout_s": 2.0})["timeout_s"] == 2.0
    assert merge_options({"timeout_s": None}, {"timeout_s": 2.0})["timeout_s"] == 2.0
