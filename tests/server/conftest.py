"""A server over the demo model, which all modules share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from tests.exact import EXACT
from tests.server.program import Program
from tests.server.router_world import RouterWorld
from tests.server.running import RunningServer
from tests.server.world import World

from paceline.server.settings import ServerSettings

if TYPE_CHECKING:
    from tests.server.openai_world import OpenAIServer

DEMO_ENGINE: dict[str, Any] = {**EXACT, "isolation": "thread", "num_slots": 4, "n_ctx": 4096}


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """The demo model behind the default settings, four slots, the engine in a thread."""
    with RunningServer(ServerSettings(engine_options=DEMO_ENGINE, props=True)) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    """A client of `server`."""
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def world() -> Iterator[OpenAIServer]:
    """The demo model behind the default settings, for requests that a test watches."""
    from tests.server.openai_world import OpenAIServer  # which needs `DEMO_ENGINE`

    with OpenAIServer() as world:
        yield world


@pytest.fixture
def worlds() -> Iterator[Callable[..., World]]:
    """Make worlds, and close them."""
    made: list[World] = []

    def make(settings: dict[str, Any] | None = None, **engine: Any) -> World:
        made.append(World(settings, **engine))
        return made[-1]

    yield make
    for world in made:
        world.close()


@pytest.fixture
def routers() -> Iterator[Callable[..., RouterWorld]]:
    """Make routers, and close them."""
    made: list[RouterWorld] = []

    def make(*argv: str, **options: Any) -> RouterWorld:
        made.append(RouterWorld(*argv, **options))
        return made[-1]

    yield make
    for world in made:
        world.close()


@pytest.fixture
def programs() -> Iterator[Any]:
    """Start programs, and leave none running."""
    started: list[Program] = []

    def start(drain_s: float, host: str = "127.0.0.1", *inherited: int) -> Program:
        started.append(Program(drain_s, host, *inherited))
        return started[-1]

    yield start
    for program in started:
        program.kill()
