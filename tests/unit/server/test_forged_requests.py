"""Which GET requests a web page of another origin may have made a browser send."""

from __future__ import annotations

import pytest

from paceline.server.middleware.access import may_be_forged

BROWSER = {"host": "127.0.0.1:8080", "user-agent": "Mozilla/5.0 (X11; Linux x86_64) Gecko/20100101 Firefox/140.0"}
FOREIGN = {"sec-fetch-site": "cross-site"}


def forged(headers: dict[str, str]) -> bool:
    return may_be_forged([(name.encode(), value.encode()) for name, value in headers.items()])


@pytest.mark.parametrize(
    "headers",
    [
        {**BROWSER, "sec-fetch-site": "cross-site"},
        {**BROWSER, "sec-fetch-site": "same-site"},  # of another port of this machine
        {**BROWSER, "sec-fetch-site": "none"},  # from the address bar
        {**BROWSER, "sec-fetch-site": "cross-site", "referer": "http://127.0.0.1:8080/"},
        {"host": "127.0.0.1:8080", "sec-fetch-site": "cross-site"},
        {**BROWSER, "host": "192.168.1.5:8080"},  # over plain HTTP browsers leave Sec-Fetch-Site out
        {**BROWSER, "referer": "http://page.example/?http://127.0.0.1:8080"},
        {**BROWSER, "origin": "null"},
        {**BROWSER, "origin": "http://127.0.0.1:3000"},
        {"host": "127.0.0.1:8080", "origin": "http://page.example"},
        {"host": "127.0.0.1:8080", "referer": "http://page.example/"},
        {**BROWSER, "origin": "http://127.0.0.1:8080", "referer": "http://page.example/"},
        {**BROWSER, **FOREIGN, "authorization": "Basic dTpw"},  # browsers add these by themselves
        {**BROWSER, **FOREIGN, "accept": "application/json", "content-type": "text/plain"},
    ],
)
def test_a_request_of_a_browser_may_be_forged(headers: dict[str, str]) -> None:
    """It is, unless it proves to come from the server's own page."""
    assert forged(headers)


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "127.0.0.1:8080", "user-agent": "curl/8.14.1"},
        {"host": "127.0.0.1:8080", "user-agent": "node", "sec-fetch-mode": "cors"},
        {"host": "127.0.0.1:8080"},
        {},
    ],
)
def test_programs_forge_nothing(headers: dict[str, str]) -> None:
    """They act for their own users."""
    assert not forged(headers)


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "same-origin"},
        {"referer": "http://127.0.0.1:8080/chat?x=http://page.example"},
        {"origin": "http://127.0.0.1:8080", "referer": "http://127.0.0.1:8080/"},
    ],
)
def test_a_page_of_the_server_itself_forges_nothing(headers: dict[str, str]) -> None:
    """Browsers set these headers, and no script can."""
    assert not forged({**BROWSER, **headers})


@pytest.mark.parametrize(
    "headers", [{"x-requested-with": "paceline"}, {"x-api-key": "k"}, {"authorization": "Bearer k"}]
)
def test_a_header_that_needs_a_preflight_proves_consent(headers: dict[str, str]) -> None:
    """A page of another origin may send it only after the server has allowed its origin."""
    assert not forged({**BROWSER, **FOREIGN, **headers})
