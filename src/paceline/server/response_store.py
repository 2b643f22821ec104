"""Keeps responses with the conversations that led to them, in memory, within bounds for each tenant and all. Any thread."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

Item = dict[str, Any]


@dataclass(frozen=True, slots=True)
class EncodedItems:
    """Items as JSON, with the id of each and the sum of their bytes."""

    items: tuple[bytes, ...] = ()
    ids: tuple[str, ...] = ()
    num_bytes: int = 0

    @classmethod
    def of(cls, items: Sequence[Item]) -> EncodedItems:
        """Encode items. Takes time: of an input not for the event loop."""
        encoded = tuple(msgspec.json.encode(item) for item in items)
        return cls(encoded, tuple(item["id"] for item in items), sum(map(len, encoded)))

    def __add__(self, more: EncodedItems) -> EncodedItems:
        return EncodedItems(self.items + more.items, self.ids + more.ids, self.num_bytes + more.num_bytes)

    def decode(self) -> list[Item]:
        """Return the items. Takes time: not for the event loop."""
        return [msgspec.json.decode(item) for item in self.items]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response. body: its JSON. conversation: all items, the input's, then the output's."""

    id: str
    body: bytes
    conversation: EncodedItems
    num_output: int

    @property
    def num_bytes(self) -> int:
        """Bytes that it counts for. Items that several responses share count for each of them."""
        return len(self.body) + self.conversation.num_bytes

    def input_items(self) -> list[Item]:
        """Return the items that the response was made from. Takes time: not for the event loop."""
        return self.conversation.decode()[: len(self.conversation.items) - self.num_output]


class ResponseStore:
    """Responses by tenant and id, within bounds. The least recently used response is removed first."""

    def __init__(self, max_responses: int, max_bytes: int, max_total_bytes: int | None = None) -> None:
        """Begin without responses.

        max_responses, max_bytes: of a tenant; without responses nothing is ever stored. max_total_bytes: of all; None:
        four times as many as of one tenant.
        """
        self._max_total_bytes = 4 * max_bytes if max_total_bytes is None else max_total_bytes
        self._max_responses, self._max_bytes = max_responses, min(max_bytes, self._max_total_bytes)
        self._by_tenant: dict[str, OrderedDict[str, StoredResponse]] = {}
        self._by_use: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._num_bytes: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def is_on(self) -> bool:
        """Whether responses are stored."""
        return self._max_responses > 0

    def put(self, tenant: str, response: Item, *, before: EncodedItems, output: Sequence[Item]) -> str | None:
        """Store a response. Returns why it could not be stored, or None.

        before: the items of the conversation up to the end of the input, encoded already since this runs on the event loop.
        """
        conversation = before + EncodedItems.of(output)
        entry = StoredResponse(response["id"], msgspec.json.encode(response), conversation, len(output))
        if entry.num_bytes > self._max_bytes:
            return (
                f"store: the response and its conversation have {entry.num_bytes} bytes, more than the {self._max_bytes} that "
                "--responses-store-bytes and --responses-store-total-bytes leave; it was not stored"
            )
        with self._lock:
            self._remove(tenant, entry.id)
            entries = self._by_tenant.setdefault(tenant, OrderedDict())
            entries[entry.id] = entry
            self._by_use[tenant, entry.id] = None
            self._num_bytes[tenant] = self._num_bytes.get(tenant, 0) + entry.num_bytes
            while len(entries) > self._max_responses or self._num_bytes[tenant] > self._max_bytes:
                self._remove(tenant, next(iter(entries)))
            while sum(self._num_bytes.values()) > self._max_total_bytes:
                self._remove(*next(iter(self._by_use)))
        return None

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Return a response of the tenant, which counts as a use of it; None if there is no such response."""
        with self._lock:
            entries = self._by_tenant.get(tenant, OrderedDict())
            found = entries.get(response_id)
            if found is not None:
                entries.move_to_end(response_id)
                self._by_use.move_to_end((tenant, response_id))
            return found

    def delete(self, tenant: str, response_id: str) -> bool:
        """Delete a response; return whether there was one. Later responses of its conversation keep its items."""
        with self._lock:
            return self._remove(tenant, response_id)

    def find_items(self, tenant: str, wanted: Iterable[str]) -> dict[str, Item]:
        """Return the stored items with these ids, by id. Takes time: not for the event loop."""
        with self._lock:
            entries = list(self._by_tenant.get(tenant, OrderedDict()).values())
        missing, found = set(wanted), {}
        for entry in reversed(entries):
            if not missing:
                break
            for item_id, item in zip(entry.conversation.ids, entry.conversation.items, strict=True):
                if item_id in missing:
                    missing.discard(item_id)
                    found[item_id] = msgspec.json.decode(item)
        return found

    def _remove(self, tenant: str, response_id: str) -> bool:
        found = self._by_tenant.get(tenant, OrderedDict()).pop(response_id, None)
        if found is not None:
            del self._by_use[tenant, response_id]
            self._num_bytes[tenant] -= found.num_bytes
        return found is not None
