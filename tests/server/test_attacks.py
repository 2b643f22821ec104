"""The harness of `python -m tests.attack`, and its quick attacks."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from tests.attack import __main__ as command
from tests.attack import harness
from tests.attack.harness import Attack, NotHeldError, figure, find_attacks, run_attack

SAMPLE = {name: attack for name, attack in find_attacks().items() if attack.sample}


@pytest.mark.native
@pytest.mark.full
@pytest.mark.parametrize("name", SAMPLE)
def test_quick_attacks_are_held(name: str) -> None:
    """Each attack of the sample stays within its bound."""
    SAMPLE[name].run()


def _attacks() -> dict[str, Attack]:
    def fails() -> str:
        raise ValueError("[broken]")

    def hangs() -> str:
        time.sleep(30)
        return figure("ended", held=True)

    return {
        "one.held": Attack("held", "It holds.", "1 GB", lambda: figure("1 MB", held=True), sample=True),
        "one.lost": Attack("lost", "It holds.", "1 GB", lambda: figure("2 GB", held=False)),
        "two.broken": Attack("broken", "It runs.", "1 GB", fails),
        "two.hung": Attack("hung", "It ends.", "1 GB", hangs, limit_s=0.1),
    }


def test_results_tell_held_attacks_from_others(capsys: pytest.CaptureFixture[str]) -> None:
    """A figure beyond the bound, an error and a time-out are not held, each with its text."""
    results = {name: run_attack(name, attack) for name, attack in _attacks().items()}
    assert {name: (result.held, result.now) for name, result in results.items()} == {
        "one.held": (True, "1 MB"),
        "one.lost": (False, "2 GB"),
        "two.broken": (False, "ValueError: [broken]"),
        "two.hung": (False, "TimeoutError: it took longer than 0.1 s"),
    }
    with pytest.raises(NotHeldError, match="2 GB"):
        _attacks()["one.lost"].run()


@pytest.mark.parametrize(
    ("argv", "code", "names"),
    [
        (["--sample"], 0, ["one.held"]),
        (["one"], 1, ["one.held", "one.lost"]),
        (["one.held"], 0, ["one.held"]),
        (["one.held", "two.broken"], 1, ["one.held", "two.broken"]),
    ],
)
def test_the_command_selects_attacks_and_exits_with_1_if_one_was_not_held(
    argv: list[str], code: int, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules, attacks and the sample can be selected; the file has the results."""
    monkeypatch.setattr(command, "find_attacks", _attacks)
    path = tmp_path / "results.json"
    assert command.main([*argv, "--json", str(path)]) == code
    results = json.loads(path.read_text())
    assert [result["name"] for result in results] == names
    assert all(result["held"] for result in results) == (code == 0)


def test_unknown_attacks_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A name without an attack ends the command instead of running nothing."""
    monkeypatch.setattr(command, "find_attacks", _attacks)
    with pytest.raises(SystemExit):
        command.main(["three"])
    assert "no such attack: three" in capsys.readouterr().err


def test_a_cgroup_is_made_if_there_is_a_memory_controller(tmp_path: Path) -> None:
    """The parent must hand the controller on; groups of earlier runs are removed."""
    assert harness._child_group(tmp_path) is None
    (tmp_path / "cgroup.subtree_control").write_text("cpu pids\n")
    assert harness._child_group(tmp_path) is None
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory\n")
    (tmp_path / "paceline-attack-1-1").mkdir()
    group = harness._child_group(tmp_path)
    assert group is not None
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [group]
