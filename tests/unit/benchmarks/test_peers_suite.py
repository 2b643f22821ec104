"""Steps of the suite on servers that are not there: which are started, how often, and with which prompts."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.peers import suite as suite_module
from benchmarks.peers.driver import PromptMaker
from benchmarks.peers.results import Results
from benchmarks.peers.servers import Launch, NotPossible, Programs
from benchmarks.peers.suite import Step, Suite
from benchmarks.peers.workloads import Segment

from paceline import demo_model_path


class Servers:
    """Counts starts; of each measurement it keeps server, round and the prompts' variation."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.stopped: list[str] = []
        self.measured: list[tuple[str, int, int]] = []

    @contextlib.contextmanager
    def serving(self, how: Launch, _log: Path) -> Iterator[Any]:
        name = how.command[0]
        self.started.append(name)
        try:
            yield SimpleNamespace(name=name)
        finally:
            self.stopped.append(name)

    def measure(self, step: Step, server: Any, variation: int) -> Any:
        assert server.name == step.server
        assert self.stopped.count(server.name) < self.started.count(server.name), "it is not running"
        self.measured.append((step.server, step.round, variation))
        return step


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    """Servers in place of processes; llama-cpp-python cannot do anything."""

    def launch(name: str, *_: Any) -> Launch:
        if name == "llama-cpp-python":
            raise NotPossible("it has nothing")
        return Launch(command=(name,), dialect=SimpleNamespace())

    found = Servers()
    monkeypatch.setattr(suite_module, "serving", found.serving)
    monkeypatch.setattr(suite_module, "launch", launch)
    monkeypatch.setattr(Suite, "_measure", lambda _, step, server, variation: found.measure(step, server, variation))
    return found


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(Programs(paceline=Path("python")), Results(tmp_path), {}, "half-billion", demo_model_path())


def test_kept_servers_start_once_and_have_other_prompts_each_round(servers: Servers, suite: Suite) -> None:
    list(suite.run_kept("steady-1", ["paceline", "llama-cpp-python", "llama-server"], 2))
    assert servers.started == ["paceline", "llama-server"]
    assert sorted(servers.stopped) == ["llama-server", "paceline"]
    assert servers.measured == [
        ("paceline", 1, 1), ("llama-server", 1, 1), ("llama-server", 2, 2), ("paceline", 2, 2),
    ]  # fmt: skip


def test_what_is_kept_is_stopped_where_the_rounds_are_cut_short(servers: Servers, suite: Suite) -> None:
    rounds = suite.run_kept("steady-1", ["paceline", "llama-server"], 2)
    next(rounds)
    rounds.close()
    assert sorted(servers.stopped) == ["llama-server", "paceline"]
    assert len(servers.measured) == 1


def test_else_each_step_has_a_server_and_the_same_prompts(servers: Servers, suite: Suite) -> None:
    for number in (1, 2):
        suite.run(Step("steady-1", "paceline", number))
    assert servers.stopped == ["paceline", "paceline"]
    assert servers.measured == [("paceline", 1, 0), ("paceline", 2, 0)]


def test_a_variation_has_other_tokens_in_the_same_pattern() -> None:
    prompts, segments = PromptMaker(demo_model_path()), (Segment(1, 8), Segment(2, 8), Segment(1, 8))
    first, second = prompts.token_ids(segments, 1), prompts.token_ids(segments, 2)
    assert first == prompts.token_ids(segments, 1) != second
    assert second[:8] == second[16:] != second[8:16]
