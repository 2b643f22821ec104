"""Finds the URLs of images in the body of a request, in the shapes of every API. Pure; any thread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def is_remote(url: str) -> bool:
    """Return whether a URL is of the web."""
    return url[:8].lower().startswith(("http://", "https://"))


def remote_urls(value: object, most: int) -> list[str]:
    """Return the URLs of the web that parts of a decoded JSON value have as their images; each once, at most so many."""
    found: dict[str, None] = {}
    for url in _urls(value) if most > 0 else ():
        found[url] = None
        if len(found) == most:
            break
    return list(found)


def _urls(value: object) -> Iterator[str]:
    """Go over all lists and objects, without recursion: a body is as deep as its sender likes."""
    rest = [value]
    while rest:
        one = rest.pop()
        if isinstance(one, Mapping):
            url = _url_of(one)
            if isinstance(url, str) and is_remote(url):
                yield url
            rest += reversed(list(one.values()))
        elif isinstance(one, (list, tuple)):
            rest += reversed(one)


def _url_of(part: Mapping[Any, Any]) -> object:
    """Return what a part has as its URL: of OpenAI's chats, of responses, or of Anthropic's messages."""
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
