"""Names, files and keys of adapters, without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.engine.adapters import AdapterRegistry, LoraAdapter, adapter_paths, name_of
from paceline.errors import AdapterNotFound, InvalidParams, InvalidType
from paceline.request import RequestOptions


def test_adapters_are_named_by_their_keys_or_by_their_files() -> None:
    """In the order in which they were given."""
    assert adapter_paths(()) == {}
    assert adapter_paths(["x/a.gguf", Path("b.gguf")]) == {"a": Path("x/a.gguf"), "b": Path("b.gguf")}
    assert list(adapter_paths({"n": "x/a.gguf", "a": "y"})) == ["n", "a"]


@pytest.mark.parametrize(
    "lora", ["a.gguf", b"a", 3, None, ["a/x.gguf", "b/x.gguf"], {3: "a.gguf"}, {"a\0": "a.gguf"}, ["a\n.gguf"]]
)
def test_what_names_no_adapters_is_refused(lora: Any) -> None:
    """A single path, a number, two files of one name, a name that is no text or has control characters."""
    with pytest.raises(InvalidParams, match="lora"):
        adapter_paths(lora)
    if not isinstance(lora, (list, dict)):
        with pytest.raises(InvalidType):
            adapter_paths(lora)


def test_options_get_the_keys_of_the_moment() -> None:
    """A name that was loaded again has another key; scales stay, and options without adapters are the same object."""
    registry = AdapterRegistry(["a", "b"], {"a": "x/a.gguf"})
    assert [entry.path for entry in registry.all()] == ["x/a.gguf", ""]
    plain, both = RequestOptions(tenant="t"), RequestOptions(lora={"b": 0.5, "a": 2.0}, tenant="t")
    assert registry.resolve(plain) is plain
    assert registry.resolve(both) == both
    key = registry.begin("a", in_place=True)
    assert registry.resolve(both) == both  # until it is loaded
    assert registry.add(LoraAdapter("a", "y", key)) == LoraAdapter("a", "x/a.gguf", "a")
    assert dict(registry.resolve(both).lora) == {key: 2.0, "b": 0.5}
    assert key != "a"
    with pytest.raises(InvalidParams, match="known are 'a', 'b'"):
        registry.resolve(RequestOptions(lora={key: 1.0}))


def test_keys_are_renewed_by_their_names() -> None:
    """Adapters that were replaced have other keys; a name without an adapter, or a key without one, is refused."""
    registry = AdapterRegistry(["a", "b"])
    key = registry.begin("a", in_place=True)
    assert registry.renew((("a", 2.0), ("b", 0.5))) == (("a", 2.0), ("b", 0.5))
    adapter = LoraAdapter("a", "y", key)
    registry.add(adapter)
    for before in ("a", key):
        assert registry.renew(((before, 2.0), ("b", 0.5))) == ((key, 2.0), ("b", 0.5))
    assert registry.renew(()) == ()
    registry.remove(adapter)
    for before in ("a", key):
        with pytest.raises(InvalidParams, match="no adapter 'a'; known are 'b'"):
            registry.renew(((before, 1.0),))
    with pytest.raises(InvalidParams, match="no adapter 'c'"):
        registry.renew((("c", 1.0),))


def test_a_name_is_reserved_while_it_is_loaded() -> None:
    """A load that fails releases it, and its key unless it may still be going on."""
    registry = AdapterRegistry()
    first = registry.begin("a", in_place=False)
    for in_place in (False, True):
        with pytest.raises(InvalidParams, match="being loaded"):
            registry.begin("a", in_place=in_place)
    registry.cancel("a", is_over=True)
    assert registry.begin("a", in_place=False) == first == "a"
    registry.cancel("a", is_over=False)
    second = registry.begin("a", in_place=False)
    assert second != first and name_of(second) == name_of(first) == "a"
    with pytest.raises(AdapterNotFound, match="known are none"):
        registry.find("a")


def test_an_adapter_is_removed_once() -> None:
    """Another adapter of its name stays."""
    registry = AdapterRegistry(["a"])
    (one,) = registry.all()
    assert registry.remove(one)
    assert not registry.remove(one)
    registry.add(LoraAdapter("a", "y", registry.begin("a", in_place=False)))
    assert not registry.remove(one)
    assert [each.path for each in registry.all()] == ["y"]


def test_a_name_is_there_at_any_moment_of_its_replacement() -> None:
    """Requests resolve names without a lock. The new adapter has the place of the old one, by which llama-server's ids go."""
    registry = AdapterRegistry(["a", "b"])
    options = RequestOptions(lora={"a": 1.0})

    class Watched(dict[str, LoraAdapter]):
        def __setitem__(self, name: str, adapter: LoraAdapter) -> None:
            assert dict(registry.resolve(options).lora) == {"a": 1.0}
            super().__setitem__(name, adapter)

    registry._adapters = Watched(registry._adapters)
    registry.add(LoraAdapter("a", "y", registry.begin("a", in_place=True)))
    ((key, _),) = registry.resolve(options).lora
    assert key != "a" and name_of(key) == "a"
    assert [entry.name for entry in registry.all()] == ["a", "b"]
