"""Images from the web: the addresses that are connected to, and the limits of responses. No network."""

from __future__ import annotations

import asyncio
import gzip
import http.server
import ipaddress
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar

import httpx
import pytest
from tests.media_requests import FILE
from tests.polling import async_wait_until

from paceline.errors import InvalidParams, QueueFull
from paceline.server import request_media
from paceline.server.in_flight import ByteBudget, ByteReservation
from paceline.server.request_media import MediaFetcher, is_public

PUBLIC, OTHER = "93.184.215.14", "2606:4700::6810:85e5"
URL = "https://images.example/cat.png"


class Body(httpx.AsyncByteStream):
    """Bytes as they come from a connection."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._data


def served(data: bytes, headers: dict[str, str] | None = None) -> httpx.Response:
    return httpx.Response(200, stream=Body(data), headers=headers)


class Web:
    """Hosts by name, and the response of each URL."""

    def __init__(self, answers: dict[str, Callable[[httpx.Request], httpx.Response]] | None = None) -> None:
        self.addresses: dict[str, list[str]] = {"images.example": [PUBLIC], "b.deep.example": [OTHER]}
        self.answers = answers or {}
        self.resolved: list[str] = []
        self.requests: list[httpx.Request] = []
        self.num_open = self.most_open = self.num_begun = 0

    async def resolve(self, host: str, port: int) -> list[str]:
        self.resolved.append(f"{host}:{port}")
        if host not in self.addresses:
            raise OSError("no such host")
        return self.addresses[host]

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        found = self.answers.get(f"{request.headers['host']}{request.url.path}")
        return served(FILE) if found is None else found(request)

    def fetch(
        self, *urls: str, domains: tuple[str, ...] = ("images.example", "*.deep.example"), total: int = 1 << 20
    ) -> Any:
        """Return the result of each URL; a single URL's alone."""

        async def fetched() -> Any:
            fetcher = MediaFetcher(
                domains, max_total_bytes=total, resolve=self.resolve, transport=httpx.MockTransport(self.answer)
            )
            return await fetcher.fetch_all(urls)

        found = asyncio.run(fetched())
        assert list(found) == list(urls)
        return next(iter(found.values())) if len(urls) == 1 else found

    def why(self, url: str, **options: Any) -> str:
        """Why there is no image."""
        found = self.fetch(url, **options)
        assert isinstance(found, InvalidParams)
        return str(found)


def test_images_count_among_the_bytes_of_all_requests() -> None:
    """A small body with URLs may not have more than the free bytes, and its bytes are free again at its end."""
    web, budget = Web(), ByteBudget(len(FILE) + 10)

    async def fetched() -> None:
        fetcher = MediaFetcher(
            ["images.example"], max_total_bytes=1 << 20, resolve=web.resolve, transport=httpx.MockTransport(web.answer)
        )
        with budget.reserve() as reservation:
            assert ByteReservation.current.get() is reservation
            found = await fetcher.fetch_all([URL], reservation)
            assert found == {URL: FILE}
            assert budget.free_bytes == 10
            with budget.reserve() as other:
                refused = (await fetcher.fetch_all([URL], other))[URL]
                assert isinstance(refused, QueueFull)
                assert f"more than {budget.max_bytes} bytes" in str(refused)
        assert budget.free_bytes == budget.max_bytes
        assert ByteReservation.current.get() is None

    asyncio.run(fetched())


def redirect(location: str) -> Callable[[httpx.Request], httpx.Response]:
    return lambda _: httpx.Response(302, headers={"location": location})


def test_the_address_that_was_checked_is_connected_to() -> None:
    """With the name in the Host header and for the certificate, so that a name that changes its address changes nothing."""
    web = Web()
    assert web.fetch(URL) == FILE
    (request,) = web.requests
    assert web.resolved == ["images.example:443"]
    assert request.url.host == PUBLIC
    assert request.headers["host"] == "images.example"
    assert request.extensions["sni_hostname"] == "images.example"
    assert request.headers["accept-encoding"] == "identity"
    assert not {"cookie", "authorization"} & set(request.headers)
    assert web.fetch("http://B.deep.example:8080/x?y=1") == FILE
    assert (web.requests[1].url.host, web.requests[1].url.port) == (OTHER, 8080)
    assert web.requests[1].headers["host"] == "b.deep.example:8080"


@pytest.mark.parametrize(
    "url",
    [
        "https://other.example/",
        "https://images.example.evil.example/",
        "https://notimages.example/",
        "https://deep.example/",
        "http://127.0.0.1/",
        "http://[::1]/",
        "http://localhost/",
    ],
)
def test_other_hosts_are_not_even_resolved(url: str) -> None:
    """By their whole names."""
    web = Web()
    assert "does not fetch from (--media-domains)" in web.why(url)
    assert (web.resolved, web.requests) == ([], [])


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"], ["10.0.0.1"], ["172.16.5.4"], ["192.168.1.1"], ["169.254.169.254"], ["0.0.0.0"], ["100.64.0.1"],
        ["224.0.0.1"], ["255.255.255.255"], ["::1"], ["fe80::1"], ["fe80::1%eth0"], ["fc00::1"], ["ff02::1"], ["::"],
        ["::ffff:127.0.0.1"], ["::ffff:10.0.0.1"], ["64:ff9b::7f00:1"], ["fec0::1"],
        ["64:ff9b:1::7f00:1"], ["64:ff9b:1::808:808"], ["::127.0.0.1"], ["::8.8.8.8"], ["::ffff:0:127.0.0.1"], ["100::1"],
        ["2001:0:808:808::f7f7:f7f7"], ["4000::1"], ["2002:7f00:1::"], ["2002:c0a8:101::1"],
        [PUBLIC, "127.0.0.1"], [], ["no address"],
    ],
)  # fmt: skip
def test_addresses_that_are_not_public_are_never_connected_to(addresses: list[str]) -> None:
    """Nor if one of several is; the error does not have them."""
    web = Web()
    web.addresses["images.example"] = addresses
    message = web.why(URL)
    assert "has no public address" in message
    assert not any(address in message for address in addresses)
    assert web.requests == []


def test_public_addresses_are_known_also_within_others() -> None:
    """An IPv4 address within an IPv6 address counts as itself."""
    assert all(map(is_public, [PUBLIC, OTHER, f"::ffff:{PUBLIC}", "64:ff9b::808:808", "2002:808:808::1"]))


REGISTRIES = [
    "0.0.0.0/8", "0.0.0.0/32", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
    "192.0.0.0/29", "192.0.0.8/32", "192.0.0.9/32", "192.0.0.10/32", "192.0.0.170/32", "192.0.0.171/32", "192.0.2.0/24",
    "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24", "192.88.99.2/32", "192.168.0.0/16", "192.175.48.0/24",
    "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4", "255.255.255.255/32", "::1/128",
    "::/128", "::/96", "::ffff:0:0:0/96", "64:ff9b:1::/48", "100::/64", "100:0:0:1::/64", "2001::/23", "2001::/32",
    "2001:1::1/128", "2001:1::2/128", "2001:1::3/128", "2001:2::/48", "2001:3::/32", "2001:4:112::/48", "2001:10::/28",
    "2001:20::/28", "2001:30::/28", "2001:db8::/32", "2620:4f:8000::/48", "3fff::/20", "5f00::/16", "fc00::/7", "fe80::/10",
    "fec0::/10", "ff00::/8",
]  # fmt: skip
"""Blocks of IANA's registries of special-purpose and multicast addresses, and deprecated forms."""


@pytest.mark.parametrize("block", REGISTRIES)
def test_no_address_of_a_special_purpose_block_is_public(block: str) -> None:
    """Neither the first nor the last address, nor an embedded address in IPv6; neighbours are public unless special too."""
    network = ipaddress.ip_network(block)
    ends = (network[0], network[-1])
    assert not any(is_public(str(end)) for end in ends)
    if network.version == 4:
        for end in ends:
            assert not is_public(f"::ffff:{end}")
            assert not is_public(str(ipaddress.IPv6Address((0x64FF9B << 96) | int(end))))
            assert not is_public(str(ipaddress.IPv6Address((0x2002 << 112) | int(end) << 80 | 1)))
    others = [ipaddress.ip_network(other) for other in REGISTRIES]
    unicast = ipaddress.ip_network("2000::/3")
    for number in (int(ends[0]) - 1, int(ends[1]) + 1):
        if 0 <= number < 2**network.max_prefixlen:
            neighbour = type(ends[0])(number)
            is_special = any(neighbour in other for other in others)
            if network.version == 6:
                is_special = is_special or neighbour not in unicast
            assert is_public(str(neighbour)) is not is_special, neighbour


@pytest.mark.parametrize(
    "block", ["8.8.8.0/24", "192.0.1.0/24", "192.88.98.0/24", "2000::/16", "2606:4700::/32", "3ffe::/16"]
)
def test_addresses_of_other_blocks_are_public(block: str) -> None:
    """A list that refuses all addresses would be as wrong."""
    network = ipaddress.ip_network(block)
    assert is_public(str(network[0])) and is_public(str(network[-1]))


def test_every_redirect_is_resolved_and_checked_again() -> None:
    """A name that has changed to a private address since the first request is not connected to."""
    web = Web({"images.example/cat.png": redirect("/again")})
    answers = iter([[PUBLIC], ["192.88.99.1"]])

    async def rebound(host: str, port: int) -> list[str]:
        return next(answers)

    web.resolve = rebound  # type: ignore[method-assign]
    assert "has no public address" in web.why(URL)
    assert [request.url.host for request in web.requests] == [PUBLIC]


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("http://127.0.0.1:8080/admin", "does not fetch from"),
        ("https://rebound.deep.example/", "has no public address"),
        ("file:///etc/passwd", "must be http"),
        ("//other.example/x", "does not fetch from"),
        ("https://user:secret@images.example/x", "without a user"),
        ("https://images.example:port/", "could not be fetched"),
        ("https://images.example:99999/", "has the port 99999, and ports are 1 to 65535"),
        ("https://images.example:0/", "has the port 0"),
    ],
)
def test_every_redirect_is_checked(location: str, words: str) -> None:
    """As the first URL."""
    web = Web({"images.example/cat.png": redirect(location)})
    web.addresses["rebound.deep.example"] = ["192.168.0.1"]
    assert words in web.why(URL)
    assert len(web.requests) == 1


def test_redirects_are_followed_within_their_number() -> None:
    """Relative redirects, too."""
    hops = {f"images.example/{number}": redirect(f"/{number + 1}") for number in range(4)}
    there = {"images.example/cat.png": redirect("two"), "images.example/two": redirect("https://b.deep.example/x")}
    assert Web(there).fetch(URL) == FILE
    assert Web(hops).fetch("https://images.example/1") == FILE
    assert "redirected more than 3 times" in Web(hops).why("https://images.example/0")


class Slow(httpx.AsyncByteStream):
    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 1024
            await asyncio.sleep(0.001)


def test_what_comes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bytes of one and of all, in time, and independent of the claims of a compressed response."""
    web = Web({"images.example/slow": lambda _: httpx.Response(200, stream=Slow())})
    monkeypatch.setattr(request_media, "MAX_FILE_BYTES", 100_000)
    assert "has more than 100000 bytes" in web.why("https://images.example/slow")
    monkeypatch.setattr(request_media, "MAX_FILE_BYTES", 10**9)
    monkeypatch.setattr(request_media, "TIMEOUT_S", 0.05)
    assert "within 0.05 seconds" in web.why("https://images.example/slow", total=10**9)
    assert "left of the 5000 bytes" in web.why("https://images.example/slow", total=5000)
    found = Web().fetch(URL, "https://images.example/2", total=len(FILE) + 10)
    assert sorted(isinstance(item, InvalidParams) for item in found.values()) == [False, True]
    bomb = {"images.example/cat.png": lambda _: served(gzip.compress(FILE), {"content-encoding": "gzip"})}
    assert "is compressed" in Web(bomb).why(URL)


class Held(httpx.AsyncByteStream):
    """A body that does not come before all others have begun that are fetched at once."""

    def __init__(self, web: Web) -> None:
        self._web = web

    async def __aiter__(self) -> AsyncIterator[bytes]:
        self._web.num_open += 1
        self._web.most_open = max(self._web.most_open, self._web.num_open)
        self._web.num_begun += 1
        await async_wait_until(lambda: self._web.num_open == request_media._MAX_OF_REQUEST or self._web.num_begun == 10)
        self._web.num_open -= 1
        yield FILE


def test_one_request_leaves_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many images it has; images that wait too long for the others are not fetched, with a clear error."""
    web = Web()
    urls = [f"https://images.example/{number}" for number in range(10)]
    web.answers = {f"images.example/{number}": lambda _: httpx.Response(200, stream=Held(web)) for number in range(10)}
    assert list(web.fetch(*urls).values()) == [FILE] * 10
    assert web.most_open == request_media._MAX_OF_REQUEST < request_media._MAX_AT_ONCE
    monkeypatch.setattr(request_media, "REQUEST_TIMEOUT_S", 0.05)
    slow = {f"images.example/{number}": lambda _: httpx.Response(200, stream=Slow()) for number in range(10)}
    found = Web(slow).fetch(*urls, total=10**9)
    assert all("within 0.05 seconds, with what is fetched before it" in str(item) for item in found.values())


def test_a_request_does_not_wait_for_others_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """All concurrent fetches are of other requests, which hang; later images are fetched again."""
    monkeypatch.setattr(request_media, "REQUEST_TIMEOUT_S", 0.05)
    web = Web()

    async def fetched() -> Any:
        transport = httpx.MockTransport(web.answer)
        fetcher = MediaFetcher(["images.example"], max_total_bytes=1 << 20, resolve=web.resolve, transport=transport)
        for _ in range(request_media._MAX_AT_ONCE):
            await fetcher._at_once.acquire()
        waited = await fetcher.fetch_all([URL])
        fetcher._at_once.release()
        return [waited[URL], (await fetcher.fetch_all([URL]))[URL]]

    first, second = asyncio.run(fetched())
    assert "within 0.05 seconds" in str(first)
    assert second == FILE


def test_what_no_one_thought_of_is_an_error_of_the_part(caplog: pytest.LogCaptureFixture) -> None:
    """And logged; the other images are fetched."""

    def failing(_: httpx.Request) -> httpx.Response:
        raise ExceptionGroup("several", [OverflowError("port")])

    found = Web({"images.example/cat.png": failing}).fetch(URL, "https://b.deep.example/x")
    assert str(found[URL]) == "the URL could not be fetched: ExceptionGroup"
    assert found["https://b.deep.example/x"] == FILE
    assert "an image could not be fetched" in caplog.text


def test_failures_say_little() -> None:
    """No addresses, no bodies of other servers."""
    assert "status 404" in Web({"images.example/cat.png": lambda _: httpx.Response(404, text="secret")}).why(URL)

    def refused(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError(f"cannot connect to {PUBLIC}")

    message = Web({"images.example/cat.png": refused}).why(URL)
    assert message == "the URL could not be fetched: ConnectError"
    assert "could not be fetched" in Web().why("https://gone.deep.example/")


def test_one_failure_leaves_the_others() -> None:
    """Each URL has its own outcome."""
    found = Web().fetch(URL, "https://other.example/", "https://b.deep.example/x")
    assert [isinstance(item, bytes) for item in found.values()] == [True, False, True]


class Handler(http.server.BaseHTTPRequestHandler):
    """Sends the file, and keeps the headers of requests."""

    hosts: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.hosts.append(self.headers["host"])
        self.send_response(200)
        self.send_header("content-length", str(len(FILE)))
        self.end_headers()
        self.wfile.write(FILE)

    def log_message(self, *_: object) -> None:
        pass


def test_a_connection_goes_to_the_resolved_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a socket, to a server of this machine, with an address that counts as public here alone."""
    monkeypatch.setattr(request_media, "is_public", lambda _: True)
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.invalid:1")
    web = Web()
    web.addresses["images.example"] = ["127.0.0.1"]
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        url = f"http://images.example:{server.server_port}/cat.png"

        async def fetched() -> Any:
            return await MediaFetcher(["images.example"], max_total_bytes=1 << 20, resolve=web.resolve).fetch_all([url])

        assert asyncio.run(fetched()) == {url: FILE}
        thread.join()
    assert Handler.hosts == [f"images.example:{server.server_port}"]
