"""How many idle cells may stay on the device."""

from __future__ import annotations

import pytest

from paceline.kv_cache import KVCache


@pytest.fixture
def nothing_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no idle cell stay on the device once a tick runs."""
    monkeypatch.setattr(KVCache, "_idle_limit", lambda self: 0)


@pytest.fixture
def anything_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let as many idle cells stay on the device as there are."""
    monkeypatch.setattr(KVCache, "_idle_limit", lambda self: 10_000)
