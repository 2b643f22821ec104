"""Stored responses: bounds, tenants, and the conversations that they carry."""

from __future__ import annotations

from typing import Any

from paceline.server.dialects.responses.input_items import parse_items
from paceline.server.response_store import EncodedItems, ResponseStore


def put(
    store: ResponseStore, response_id: str, *, tenant: str = "", text: str = "Hello.", earlier: Any = ()
) -> str | None:
    output = [
        {"id": f"msg_{response_id}", "type": "message", "role": "assistant", "content": [], "status": "completed"}
    ]
    return store.put(tenant, {"id": response_id}, before=EncodedItems.of([*earlier, *parse_items(text)]), output=output)


def ids(store: ResponseStore, tenant: str = "", names: str = "abcdef") -> str:
    """Return the stored names."""
    return "".join(name for name in names if store.get(tenant, name) is not None)


def test_a_conversation_grows_with_its_responses() -> None:
    """Each has all items before it, and goes on without the earlier responses."""
    store = ResponseStore(4, 1 << 20)
    put(store, "a")
    first = store.get("", "a")
    assert first is not None
    assert len(first.conversation.decode()) == 2
    put(store, "b", earlier=first.conversation.decode())
    assert store.delete("", "a")
    second = store.get("", "b")
    assert second is not None
    assert [item["role"] for item in second.conversation.decode()] == ["user", "assistant", "user", "assistant"]
    assert second.input_items() == second.conversation.decode()[:3]
    assert second.conversation.decode()[:2] == first.conversation.decode()


def test_the_response_that_was_used_least_recently_goes() -> None:
    """Reading is a use."""
    store = ResponseStore(2, 1 << 20)
    put(store, "a")
    put(store, "b")
    assert store.get("", "a")
    put(store, "c")
    assert ids(store) == "ac"


def test_all_tenants_share_a_bound() -> None:
    """Beyond it the response goes that was used least recently, whosever it is; a tenant's own bound stays."""
    store = ResponseStore(10, 2000, 3000)
    for tenant in ("x", "y", "z"):
        for name in "ab":
            put(store, name, tenant=tenant, text="x" * 500)
            assert store.get("x", "a")
    assert [ids(store, tenant) for tenant in ("x", "y", "z")] == ["a", "b", "ab"]
    assert store.delete("z", "a")
    put(store, "c", tenant="y", text="x" * 500)
    assert [ids(store, tenant) for tenant in ("x", "y", "z")] == ["a", "bc", "b"]
    assert "--responses-store-total-bytes" in (put(ResponseStore(9, 2000, 500), "a", text="x" * 500) or "")


def test_bytes_are_bounded_too() -> None:
    """A response that is too large by itself is not stored, and takes no other away."""
    store = ResponseStore(10, 2000)
    for name in "abc":
        assert put(store, name, text="x" * 500) is None
    assert ids(store) == "bc"
    assert "--responses-store-bytes" in (put(store, "d", text="x" * 2000) or "")
    assert ids(store) == "bc"
    assert store.delete("", "b")
    assert put(store, "e", text="x" * 500) is None
    assert ids(store) == "ce"


def test_an_id_that_comes_again_replaces_what_it_had() -> None:
    """Its bytes count once."""
    store = ResponseStore(10, 2000)
    for _ in range(9):
        assert put(store, "a", text="x" * 700) is None
    assert put(store, "b", text="x" * 500) is None
    assert ids(store) == "ab"


def test_tenants_share_nothing() -> None:
    """Neither responses nor items nor bounds."""
    store = ResponseStore(1, 1 << 20)
    put(store, "a", tenant="one")
    put(store, "a", tenant="two")
    assert (ids(store, "one"), ids(store, "two"), ids(store)) == ("a", "a", "")
    assert store.delete("one", "a")
    assert not store.delete("one", "a")
    assert store.find_items("one", ["msg_a"]) == {}
    assert list(store.find_items("two", ["msg_a", "msg_b"])) == ["msg_a"]


def test_a_store_of_none_is_off() -> None:
    """The default."""
    assert not ResponseStore(0, 1).is_on
    assert ResponseStore(1, 1).is_on
