"""The facts about the machine, from files made up for the test."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.runtime import available_memory, devices, physical_cores
from paceline.runtime import device as module

pytestmark = pytest.mark.native


@pytest.mark.parametrize(
    ("content", "cores"), [("max 100000", None), ("200000 100000", 2), ("150000 100000", 2), ("x", None)]
)
def test_a_cpu_quota_counts_whole_cores(tmp_path: Path, content: str, cores: int | None) -> None:
    """A container with one and a half CPUs computes with two threads; without a quota there is no limit."""
    path = tmp_path / "cpu.max"
    path.write_text(content)
    assert module._cpu_quota(path) == cores


def test_memory_of_a_container_counts_its_file_cache_as_free(tmp_path: Path) -> None:
    """Limit minus use plus reclaimable memory."""
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 150\nactive_file 50\n")
    assert module._cgroup_available(tmp_path) == 500
    (tmp_path / "memory.max").write_text("max\n")
    assert module._cgroup_available(tmp_path) is None
    assert module._cgroup_available(tmp_path / "absent") is None


def test_a_container_may_have_less_than_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its limit counts, unless it has none."""
    for content, limit in (("1000\n", 1000), ("max\n", None), ("x", None)):
        (tmp_path / "memory.max").write_text(content)
        assert module._cgroup_limit(tmp_path) == limit
    assert module._cgroup_limit(tmp_path / "absent") is None
    monkeypatch.setattr(module, "_cgroup_limit", lambda: 1000)
    assert module.usable_memory() == 1000
    monkeypatch.setattr(module, "_cgroup_limit", lambda: 1 << 62)
    assert module.usable_memory() == module.total_memory()


def test_this_machine_has_a_cpu_cores_and_memory() -> None:
    """The real device returns plausible values."""
    assert any(device.kind == "cpu" and device.total_bytes > 0 for device in devices())
    assert physical_cores() >= 1
    free = available_memory()
    assert free is None or free > 1 << 20
