"""`paceline top` at a server: pictures of it, keys, and a connection that is lost and found again."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tests.polling import wait_until
from tests.server.running import LONG_S
from typer.testing import CliRunner

from paceline.cli.app import build_app
from paceline.cli.screen import TopState
from paceline.cli.watch import ServerEvents
from paceline.server.settings import ApiKey


def run(*arguments: str) -> Any:
    return CliRunner().invoke(build_app(), ["top", *arguments])


def test_one_picture_of_a_server_is_shown_where_there_is_no_terminal(worlds: Any) -> None:
    """With its model, slots and memory, behind a prefix as well."""
    world = worlds({"root_path": "/llm"})
    found = run(f"{world.server.url}/llm/")
    assert found.exit_code == 0, found.output
    for part in ("paceline top paceline-demo", "slots 0/2", "ticks", "cells 0 of 20,000"):
        assert part in found.output


def test_a_key_is_needed_where_the_server_has_some(worlds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the option or the environment; a wrong one is the server's own sentence."""
    world = worlds({"api_keys": (ApiKey(secret="right"),)})
    for arguments in ((), ("--api-key", "wrong")):
        found = run(world.server.url, *arguments)
        assert found.exit_code == 1
        assert "API key" in found.output
    assert run(world.server.url, "--api-key", "right").exit_code == 0
    monkeypatch.setenv("PACELINE_API_KEY", "right")
    assert run(world.server.url).exit_code == 0


def test_another_server_is_said_to_be_none_of_ours(worlds: Any) -> None:
    """A path without this stream."""
    found = run(f"{worlds().server.url}/other")
    assert found.exit_code == 1
    assert "Not Found" in found.output


@pytest.mark.parametrize("arguments", [("--demo", "http://127.0.0.1:1"), ("--demo", "--api-key", "k"), ("no-url",)])
def test_options_that_mean_nothing_together_are_refused(arguments: tuple[str, ...]) -> None:
    """With exit code 2, as all wrong usage."""
    assert run(*arguments).exit_code == 2


def test_a_lost_connection_is_tried_again(worlds: Any) -> None:
    """The stream of a server that ends is not the end of the picture: it says so, and goes on trying."""
    world, state, stop, again = worlds(), TopState(), threading.Event(), threading.Event()
    source = ServerEvents(world.server.url, interval_ms=100)

    def take(name: str, members: Any) -> None:
        state.take(name, members)
        if name == "snapshot":
            again.set()

    reading = threading.Thread(target=source.run, args=(take, stop), daemon=True)
    reading.start()
    assert again.wait(LONG_S)
    world.server.close()
    wait_until(lambda: "trying again" in source.status)
    assert reading.is_alive()
    assert source.failure is None
    stop.set()
    reading.join(LONG_S)
    assert not reading.is_alive()
