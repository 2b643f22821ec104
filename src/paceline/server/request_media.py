"""The images and audio of one HTTP request: read from the parts of any API within limits, or fetched from the web.

`RequestMedia` reads headers alone, for format and size: the model's process decodes pixels and samples. One thread at a time, not
on the event loop: base64 of many megabytes takes a while.

`MediaFetcher` fetches images on the event loop, from domains that the operator allows and from public addresses alone. It
resolves a name, checks the addresses and connects to a checked address, so that a name that resolves to another address a moment
later (DNS rebinding) reaches nothing. It checks each redirect likewise.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn

from paceline import validation
from paceline.chat.conversation import OmittedAttachment
from paceline.errors import InvalidParams, PacelineError, QueueFull, Unsupported
from paceline.media import MAX_SECONDS, Attachment, Audio, Image, audio_format, is_attachment
from paceline.media.source_bytes import decoded_base64, without_breaks
from paceline.server.api_errors import ApiException, invalid_request
from paceline.server.in_flight import ByteReservation

if TYPE_CHECKING:
    import httpx  # late: it takes a tenth of a server's imports, and most servers fetch nothing

_FORMATS: Final = {
    "image/png": "png",
    "image/jpeg": "jpeg",
    "image/jpg": "jpeg",
    "image/gif": "gif",
    "image/bmp": "bmp",
    "image/x-ms-bmp": "bmp",
}
_ANY_FORMAT: Final = ("", "application/octet-stream", "image/*")
_DETAILS: Final = ("auto", "low", "high", "original")
_MAX_SHOWN: Final = 80  # characters

Fetched = Mapping[str, bytes | PacelineError]
"""The results of fetches by URL: the bytes of a file, or the error."""


class RequestMedia:
    """Reads the images and audio of one request, and counts them.

    In a chat, the methods return an `OmittedAttachment` for an attachment that the model cannot take.

    Args:
        modalities: Returns the modalities of the model's input; called for the first attachment.
        max_images: Most images and audio of the request.
        fetched: The files of its URLs; None: this server fetches nothing.
        in_chat: Whether the attachments belong to a conversation. `ChatMedia` then decides about unknown members, and attachments
            that the model cannot take; otherwise both are errors.
    """

    def __init__(
        self,
        modalities: Callable[[], Collection[str]],
        *,
        max_images: int,
        fetched: Fetched | None = None,
        in_chat: bool = False,
    ) -> None:
        self._modalities, self._max_images, self._fetched = modalities, max_images, fetched
        self._in_chat = in_chat
        self._num_images, self._num_seconds = 0, 0.0

    def read_part(self, place: str, part: object) -> Attachment | OmittedAttachment | None:
        """Return the image or audio of a part of OpenAI's chats; None for other parts. A `PartReader`.

        Raises `InvalidParams`, and `ApiException` (400) if the server or its model takes no attachments of this kind.
        """
        if isinstance(part, Mapping) and part.get("type") == "input_audio":
            self._check_members(place, part, ("type", "input_audio"))
            return self.of_audio(f"{place}.input_audio", part.get("input_audio"))
        if not isinstance(part, Mapping) or part.get("type") != "image_url":
            return None
        self._check_members(place, part, ("type", "image_url"))
        place, value = f"{place}.image_url", part.get("image_url")
        if isinstance(value, Mapping):
            self._check_members(place, value, ("url", "detail"))
            check_detail(place, value.get("detail"))
            value = value.get("url")
        return self.of_url(place, value)

    def of_url(self, place: str, url: object) -> Image | OmittedAttachment:
        """Return the image of a data URL, of base64 alone, or of a URL that was fetched. Raises as `read_part`."""
        if (omitted := self._begin(place)) is not None:
            return omitted
        text = validation.text(place, url)
        if is_remote(text):
            return self._read(place, lambda: Image(self._fetched_bytes(place, text), name=place))
        if not text.startswith("data:"):
            return self._of_base64(place, text)
        image = self._read(place, lambda: Image.from_url(text, name=place))
        _check_label(place, text[len("data:") :].partition(",")[0].partition(";")[0], image)
        return image

    def of_audio(self, place: str, value: object) -> Audio | OmittedAttachment:
        """Return the audio of an object with data in base64 and their format. Raises as `read_part`."""
        if (omitted := self._begin(place, "audio")) is not None:
            return omitted
        try:
            audio = Audio.from_part(value, name=place)
        except PacelineError as error:
            raise type(error)(f"{place}: {error}") from None
        self._num_seconds += audio.seconds
        if self._num_seconds > MAX_SECONDS:
            raise InvalidParams(
                f"{place}: the audio of a request may last {MAX_SECONDS} s in all, and with this one it lasts "
                f"{self._num_seconds:.0f} s; leave some out, or send several requests"
            )
        return audio

    def of_data(self, place: str, data: object) -> Attachment | OmittedAttachment:
        """Return the image or audio of a file in base64, as it begins. Raises as `read_part`."""
        text = validation.text(place, data)
        begin = without_breaks(text[:_MAX_SHOWN])
        begin = begin[: len(begin) // 4 * 4]
        try:
            is_audio = audio_format(decoded_base64(place, begin)) is not None
        except PacelineError:
            is_audio = False  # `of_base64` reports the error
        return self.of_audio(place, {"data": text}) if is_audio else self.of_base64(place, text)

    def of_base64(self, place: str, data: object, media_type: str = "") -> Image | OmittedAttachment:
        """Return the image of a file in base64. media_type: its label; empty: it has none."""
        if (omitted := self._begin(place)) is not None:
            return omitted
        image = self._of_base64(place, validation.text(place, data))
        _check_label(place, media_type, image)
        return image

    def _of_base64(self, place: str, data: str) -> Image:
        if not data:
            raise InvalidParams(f"{place} is empty; give it an image")
        return self._read(place, lambda: Image.from_url(f"data:;base64,{data}", name=place))

    def _begin(self, place: str, modality: Literal["image", "audio"] = "image") -> OmittedAttachment | None:
        """Count an attachment. Returns an `OmittedAttachment`, outside of chats raises, if the model takes none of its kind."""
        if modality not in self._modalities():
            kind = "images" if modality == "image" else modality
            refusal = _refusal(
                f"{place}: this model takes no {kind}; start the server with its multimodal projector (--mmproj), or leave "
                f"{kind} out"
            )
            if self._in_chat:
                return OmittedAttachment(modality, place, refusal)
            raise refusal
        self._num_images += 1
        if self._num_images > self._max_images:
            raise InvalidParams(
                f"{place}: a request may have {self._max_images} images and audio (--max-images); leave some out"
            )
        return None

    def _check_members(self, place: str, value: Mapping[Any, Any], known: Collection[str]) -> None:
        for name, member in value.items():
            if not self._in_chat and name not in known and member is not None:
                raise InvalidParams(f"{place}.{str(name)[:_MAX_SHOWN]} is not known; there are {', '.join(known)}")

    def _fetched_bytes(self, place: str, url: str) -> bytes:
        if self._fetched is None:
            raise _refusal(
                f"{place}: this server fetches no images from the web, unless it is started with --media-domains; send the data "
                "themselves"
            )
        file = self._fetched.get(url)
        if file is None:
            raise InvalidParams("the URL was not fetched; send the data themselves")
        if isinstance(file, PacelineError):
            raise file
        return file

    @staticmethod
    def _read(place: str, read: Callable[[], Image]) -> Image:
        try:
            return read()
        except PacelineError as error:
            raise type(error)(f"{place}: {str(error).removeprefix('image_url ')}") from None


def known_attachment(_place: str, part: object) -> Attachment | OmittedAttachment | None:
    """Return a part that was read before: the `PartReader` of conversations that were converted from another API."""
    return part if is_attachment(part) or isinstance(part, OmittedAttachment) else None


def check_detail(place: str, detail: object) -> None:
    """Check the detail of an image, which has no effect here. Raises `InvalidParams`."""
    if detail is not None:
        validation.choice(f"{place}.detail", detail, _DETAILS)


def _check_label(place: str, label: str, image: Image) -> None:
    given = label.strip().lower()
    if given not in _ANY_FORMAT and _FORMATS.get(given) != image.format:
        raise InvalidParams(
            f"{place}: the data are a {image.format.upper()}, and are labelled as {given[:_MAX_SHOWN]!r}; label them as "
            f"image/{image.format}"
        )


def _refusal(message: str) -> ApiException:
    """Return a 400, also in APIs that have a 501: without the image the request would be served."""
    return invalid_request(message, message.partition("[")[0].partition(":")[0], Unsupported.code)


def is_remote(url: str) -> bool:
    """Return whether a URL begins with http:// or https://."""
    return url[:8].lower().startswith(("http://", "https://"))


def remote_urls(value: object, most: int) -> list[str]:
    """Return the URLs of the web in the image parts of a decoded JSON value: each once, at most `most`."""
    urls: dict[str, None] = {}
    for url in _urls(value) if most > 0 else ():
        urls[url] = None
        if len(urls) == most:
            break
    return list(urls)


def _urls(value: object) -> Iterator[str]:
    """Yield the URLs in all lists and objects, without recursion: a body may be nested deeply."""
    rest = [value]
    while rest:
        node = rest.pop()
        if isinstance(node, Mapping):
            url = _url_of(node)
            if isinstance(url, str) and is_remote(url):
                yield url
            rest += reversed(list(node.values()))
        elif isinstance(node, (list, tuple)):
            rest += reversed(node)


def _url_of(part: Mapping[Any, Any]) -> object:
    """Return the URL of a part of OpenAI's chats, of responses, or of Anthropic's messages."""
    match part:
        case {"type": "image_url", "image_url": {"url": url}} | {
            "type": "image_url" | "input_image" | "computer_screenshot",
            "image_url": url,
        }:
            return url
        case {"type": "input_file", "file_url": url} | {"type": "image", "source": {"type": "url", "url": url}}:
            return url
        case _:
            return None


MAX_FILE_BYTES: Final = 20 << 20
MAX_REDIRECTS: Final = 3
TIMEOUT_S: Final = 10.0
"""Of an image, with its redirects."""
REQUEST_TIMEOUT_S: Final = 30.0
"""Of all images of a request, with their waits for other images."""
_MAX_AT_ONCE: Final = 16  # of all requests of the server
_MAX_OF_REQUEST: Final = 4  # so that a single request does not delay other requests
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
    """Fetches images by URL, within limits of bytes, time and redirects.

    Args:
        domains: Names of hosts; *.name: all names below it.
        max_total_bytes: Of all images of a request.
        resolve: In place of the system's resolver.
        transport: In place of connections of its own.
    """

    def __init__(
        self,
        domains: Collection[str],
        *,
        max_total_bytes: int,
        resolve: Resolve | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._domains = tuple(domain.lower().rstrip(".") for domain in domains)
        self._max_total_bytes = max_total_bytes
        self._resolve = _resolved if resolve is None else resolve
        self._transport = transport
        self._at_once = asyncio.Semaphore(_MAX_AT_ONCE)
        self._tls: ssl.SSLContext | None = None
        if domains:  # not during the first request
            import httpx  # noqa: F401

    async def fetch_all(self, urls: Collection[str], reservation: ByteReservation | None = None) -> Fetched:
        """Return the file or the error of each URL. reservation: grows by the bytes of the files."""
        if not urls:
            return {}
        budget, at_once = _ByteCount(self._max_total_bytes, reservation), asyncio.Semaphore(_MAX_OF_REQUEST)
        async with await self._client() as client:
            files = await asyncio.gather(*(self._fetch(client, url, budget, at_once) for url in urls))
        return dict(zip(urls, files, strict=True))

    async def _client(self) -> httpx.AsyncClient:
        """Return a client that ignores settings of the environment and keeps no connection for another host."""
        import httpx

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
        import httpx

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

    async def _followed(self, client: httpx.AsyncClient, text: str, budget: _ByteCount) -> bytes:
        import httpx

        url = httpx.URL(text)
        for _ in range(MAX_REDIRECTS + 1):
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
                if response.status_code not in _REDIRECTS or not location:
                    return await _body_of(response, budget)
            finally:
                await response.aclose()
            url = url.join(location)
        raise InvalidParams(f"the URL is redirected more than {MAX_REDIRECTS} times")

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
    def __init__(self, most: int, reservation: ByteReservation | None = None) -> None:
        self._most, self._left, self._reservation = most, most, reservation

    def take(self, count: int) -> None:
        """Take bytes. Raises `InvalidParams` if there are too few, and `QueueFull` if all requests have too many."""
        self._left -= count
        if self._left < 0:
            _refuse(f"has more than is left of the {self._most} bytes that the images of a request may have")
        if self._reservation is not None and not self._reservation.grow(count):
            most = self._reservation.budget.max_bytes
            raise QueueFull(
                f"with this image all requests in flight would have more than {most} bytes; try again later"
            )


async def _body_of(response: httpx.Response, budget: _ByteCount) -> bytes:
    if response.status_code != HTTPStatus.OK:
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
    """Return whether an address belongs to the public internet. An IPv6 address with an IPv4 address in it counts as that.

    No address of a special-purpose block is public. IPv6 addresses outside of 2000::/3 are not public either: site-local
    addresses, addresses of translators within a network, deprecated forms.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv6Address):
        embedded = _embedded(parsed)
        if embedded is not None:
            return is_public(str(embedded))
        if parsed not in _UNICAST:
            return False
    return parsed.is_global and not any(parsed in block for block in _SPECIAL)


def _embedded(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address that receives the packets to an IPv6 address."""
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour


def _is_within(host: str, domain: str) -> bool:
    return host.endswith(domain[1:]) if domain.startswith("*.") else host == domain


async def _resolved(host: str, port: int) -> list[str]:
    addresses = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in addresses]


def _refuse(why: str) -> NoReturn:
    raise InvalidParams(f"the URL {why}; send the data themselves")
