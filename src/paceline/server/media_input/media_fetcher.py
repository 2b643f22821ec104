"""Fetches the images of requests from the web: from domains that the operator allows, and from public addresses alone.

A name is resolved here, its addresses are checked, and the one that was checked is connected to: a name that resolves to
another address a moment later (DNS rebinding) reaches nothing. Redirects are followed here, each hop checked likewise. On the
event loop.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection
from typing import Final, NoReturn

import httpx

from paceline.errors import InvalidParams, PacelineError, QueueFull
from paceline.server.in_flight import ByteReservation
from paceline.server.media_input.request_media import Fetched

MAX_FILE_BYTES: Final = 20 << 20
MAX_REDIRECTS: Final = 3
TIMEOUT_S: Final = 10.0
"""Of one image, with its redirects."""
REQUEST_TIMEOUT_S: Final = 30.0
"""Of all images of a request, with what they wait for others."""
_MAX_AT_ONCE: Final = 16  # of all requests of the server
_MAX_OF_REQUEST: Final = 4  # so that one request alone does not hold back the others
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
_UNICAST: Final = ipaddress.IPv6Network("2000::/3")  # all that was ever allocated (RFC 4291)
# IANA's registries of special-purpose addresses within unicast space, with the globally reachable blocks (relays, sinks of
# DNS, anycast services of the nearest router): no web site has an address there. Python's own list differs by version.
_SPECIAL: Final = tuple(
    map(
        ipaddress.ip_network,
        (
            "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
            "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24", "192.168.0.0/16", "192.175.48.0/24",
            "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/3",
            "2001::/23", "2001:db8::/32", "2620:4f:8000::/48", "3fff::/20",
        ),
    )
)  # fmt: skip
_PORTS: Final = {"http": 80, "https": 443}
_MAX_PORT: Final = 65_535

_log = logging.getLogger("paceline.server")

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Returns the addresses of a name. Raises `OSError`."""


class MediaFetcher:
    """Fetches images by URL, within limits of bytes, time and redirects."""

    def __init__(
        self,
        domains: Collection[str],
        *,
        max_total_bytes: int,
        resolve: Resolve | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Begin.

        Args:
            domains: Names of hosts; *.name stands for all below one.
            max_total_bytes: Of all images of a request.
            resolve: In place of the system's resolver.
            transport: In place of connections of its own.
        """
        self._domains = tuple(domain.lower().rstrip(".") for domain in domains)
        self._max_total_bytes = max_total_bytes
        self._resolve = _resolved if resolve is None else resolve
        self._transport = transport
        self._at_once = asyncio.Semaphore(_MAX_AT_ONCE)
        self._tls: ssl.SSLContext | None = None

    async def fetch_all(self, urls: Collection[str], reservation: ByteReservation | None = None) -> Fetched:
        """Return the file of each URL, or why there is none. Raises nothing of theirs.

        reservation: of the request's bytes among those of all requests, which grows by those of the files.
        """
        if not urls:
            return {}
        budget, at_once = _ByteCount(self._max_total_bytes, reservation), asyncio.Semaphore(_MAX_OF_REQUEST)
        async with await self._client() as client:
            found = await asyncio.gather(*(self._fetch(client, url, budget, at_once) for url in urls))
        return dict(zip(urls, found, strict=True))

    async def _client(self) -> httpx.AsyncClient:
        """Return a client that no setting of the environment changes, and that keeps no connection for another host."""
        transport = self._transport
        if transport is None:
            if self._tls is None:
                self._tls = await asyncio.to_thread(httpx.create_ssl_context, trust_env=False)
            transport = httpx.AsyncHTTPTransport(
                verify=self._tls, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0)
            )
        return httpx.AsyncClient(transport=transport, trust_env=False, follow_redirects=False, timeout=TIMEOUT_S)

    async def _fetch(
        self, client: httpx.AsyncClient, url: str, budget: _ByteCount, at_once: asyncio.Semaphore
    ) -> bytes | PacelineError:
        whole = asyncio.timeout(REQUEST_TIMEOUT_S)
        try:
            async with whole, at_once, self._at_once, asyncio.timeout(TIMEOUT_S):
                return await self._followed(client, url, budget)
        except TimeoutError:
            if whole.expired():
                return InvalidParams(
                    f"the URL could not be fetched within {REQUEST_TIMEOUT_S:g} seconds, with what is fetched before it; send "
                    "the data themselves"
                )
            return InvalidParams(f"the URL could not be fetched within {TIMEOUT_S:g} seconds")
        except PacelineError as error:
            return error
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            return InvalidParams(f"the URL could not be fetched: {type(error).__name__}")  # its text may have addresses
        except Exception as error:  # noqa: BLE001 - of a library; the request has its other images
            _log.exception("an image could not be fetched")
            return InvalidParams(f"the URL could not be fetched: {type(error).__name__}")

    async def _followed(self, client: httpx.AsyncClient, url: str, budget: _ByteCount) -> bytes:
        """Go from redirect to redirect."""
        target = httpx.URL(url)
        for _ in range(MAX_REDIRECTS + 1):
            found = await self._hop(client, target, budget)
            if isinstance(found, bytes):
                return found
            target = target.join(found)
        raise InvalidParams(f"the URL is redirected more than {MAX_REDIRECTS} times")

    async def _hop(self, client: httpx.AsyncClient, url: httpx.URL, budget: _ByteCount) -> bytes | str:
        """Return the file of a URL, or where it is redirected to."""
        address = await self._checked_address(url)
        request = client.build_request(
            "GET",
            url.copy_with(host=address),
            headers={"host": url.netloc.decode("ascii"), "accept": "image/*", "accept-encoding": "identity"},
            extensions={"sni_hostname": url.raw_host.decode("ascii")},
        )
        response = await client.send(request, stream=True)
        try:
            location = response.headers.get("location")
            if response.status_code in _REDIRECTS and location:
                return str(location)
            return await _body_of(response, budget)
        finally:
            await response.aclose()

    async def _checked_address(self, url: httpx.URL) -> str:
        """Return the address to connect to. Raises `InvalidParams` for a host that is not allowed, or not public."""
        host = url.raw_host.decode("ascii").lower().rstrip(".")
        if url.scheme not in _PORTS or url.userinfo:
            _refuse("must be http:// or https://, without a user")
        if url.port is not None and not 1 <= url.port <= _MAX_PORT:
            _refuse(f"has the port {url.port}, and ports are 1 to {_MAX_PORT}")
        if not any(_is_within(host, domain) for domain in self._domains):
            _refuse(f"is of {host[:80]!r}, which this server does not fetch from (--media-domains)")
        addresses = await self._resolve(host, url.port or _PORTS[url.scheme])
        if not addresses or not all(map(is_public, addresses)):
            _refuse(f"is of {host[:80]!r}, which has no public address")
        return addresses[0]


class _ByteCount:
    """Bytes that the images of one request may still have."""

    def __init__(self, most: int, reservation: ByteReservation | None = None) -> None:
        self._most, self._left, self._reservation = most, most, reservation

    def take(self, count: int) -> None:
        """Take bytes. Raises `InvalidParams` where there are too few, and `QueueFull` where all requests have too many."""
        self._left -= count
        if self._left < 0:
            _refuse(f"has more than is left of the {self._most} bytes that the images of a request may have")
        if self._reservation is not None and not self._reservation.grow(count):
            most = self._reservation.max_bytes
            raise QueueFull(
                f"with this image all requests in flight would have more than {most} bytes; try again later"
            )


async def _body_of(response: httpx.Response, budget: _ByteCount) -> bytes:
    if response.status_code != httpx.codes.OK:
        raise InvalidParams(f"the URL could not be fetched: status {response.status_code}")
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise InvalidParams("the URL could not be fetched: its response is compressed")
    body = bytearray()
    async for part in response.aiter_raw():
        body += part
        budget.take(len(part))
        if len(body) > MAX_FILE_BYTES:
            _refuse(f"has more than {MAX_FILE_BYTES} bytes")
    return bytes(body)


def is_public(address: str) -> bool:
    """Return whether an address belongs to the public internet. An IPv6 address that stands for an IPv4 address counts as that.

    No address of a special-purpose block is public. IPv6 addresses outside of 2000::/3 are not public either: site-local
    addresses, addresses of translators within a network, deprecated forms.
    """
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        within = _embedded(found)
        if within is not None:
            return is_public(str(within))
        if found not in _UNICAST:
            return False
    return found.is_global and not any(found in block for block in _SPECIAL)


def _embedded(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """Return the address of IPv4 that packets to an address of IPv6 end at."""
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour


def _is_within(host: str, domain: str) -> bool:
    return host.endswith(domain[1:]) if domain.startswith("*.") else host == domain


async def _resolved(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def _refuse(why: str) -> NoReturn:
    raise InvalidParams(f"the URL {why}; send the data themselves")
