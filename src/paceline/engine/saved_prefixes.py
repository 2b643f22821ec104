"""Prefixes saved to files and loaded from them: commands ask the KV cache, files are read and written on the caller's thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from paceline.engine.commands import Export, Import, Question
from paceline.engine.state_files import StateFiles
from paceline.errors import StateError
from paceline.kv_cache import pack_tokens
from paceline.request import RequestOptions
from paceline.scheduling.sequence import prefix_namespace


class SavedPrefixes:
    """ask: passes a command to the engine, whose result resolves the future; next_key: a number for each."""

    def __init__(
        self,
        files: StateFiles,
        ask: Callable[[Question], Future[list[Any]]],
        next_key: Callable[[], int],
    ) -> None:
        self._files, self._ask, self._next_key = files, ask, next_key

    def save(self, name: str, token_ids: list[int], options: RequestOptions) -> int:
        """Write what the KV cache has of these tokens and return how many of them that is. Raises `StateError`."""
        self._files.path(name)
        ranges = self._ask(Export(self._next_key(), prefix_namespace(options), pack_tokens(token_ids))).result()
        if not ranges:
            raise StateError(
                f"nothing of this prompt is in host memory; generate from it before saving it as {name!r}, with host_cache_bytes "
                "that it fits"
            )
        self._files.write(name, token_ids, ranges)
        return int(ranges[-1].end)

    def load(self, name: str, options: RequestOptions) -> list[int]:
        """Load a saved prefix into the host cache and return its token ids. Raises `StateError`."""
        token_ids, ranges = self._files.read(name)
        placed = tuple((one.start, one.end, one) for one in ranges)
        there = self._ask(Import(self._next_key(), prefix_namespace(options), pack_tokens(token_ids), placed)).result()
        if not there:
            raise StateError(f"host memory has no room for the saved prefix {name!r}; raise host_cache_bytes")
        return token_ids

    def erase(self, name: str) -> None:
        """Delete a saved prefix. Raises `StateError` where there is none."""
        self._files.erase(name)
