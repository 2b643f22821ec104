"""From settings to a running server: the slow work begins first, and the rest is imported beside it.

The worker's process is started before anything else, by `paceline.cli` already if the command line shows that it is needed.
Sockets are opened before the model is loaded; the web framework and the application are imported and built during the load.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from paceline.engine.spare_workers import SPARE_WORKERS
from paceline.server.listeners import CannotListen, Listeners, host_of, inherited_sockets, num_connections, tls_context
from paceline.server.operator_lines import STDERR, ServerSignals, say
from paceline.server.settings import ServerSettings

if TYPE_CHECKING:
    from fastapi import FastAPI

    from paceline.server.flags import ModelPresets, SettingsSource
    from paceline.server.model_front import ModelFront
    from paceline.server.serving import ServerConfig

FAILED: Final = 1
_THREADS: Final = 64  # a few long prompts being tokenised would occupy all of asyncio's default
_log = logging.getLogger("paceline.server")


def serve(settings: ServerSettings, presets: ModelPresets | None = None, source: SettingsSource | None = None) -> int:
    """Serve until a signal; return the exit code: 0, 1 if it cannot start, 70 if the engine gave up.

    presets: the models of a router; None for one model. source: of the settings, to read them again; None: they stay. Sockets
    of a service manager replace the settings' hosts and port. On the main thread. Raises `InvalidParams` for invalid engine
    options or presets, before any socket is opened.
    """
    if settings.engine_options.get("isolation", "process") == "process" and (presets is None or settings.spare_worker):
        SPARE_WORKERS.launch()
    else:
        SPARE_WORKERS.end()
    settings = _fitting_connections(settings)
    try:
        inherited = inherited_sockets()
        if inherited:
            settings = replace(settings, hosts=tuple(map(host_of, inherited)))
        if presets is None:
            return _serve_model(settings, inherited, source)
        return _serve_models(settings, presets, inherited, source)
    except CannotListen as error:
        say(str(error))
        return FAILED
    finally:
        SPARE_WORKERS.end()
        STDERR.flush()


def _fitting_connections(settings: ServerSettings) -> ServerSettings:
    number = num_connections(settings.max_connections)
    if number < settings.max_connections:
        say(
            f"at most {number} connections at once instead of {settings.max_connections}, for lack of file descriptors; "
            "raise their hard limit (ulimit -Hn), or lower --max-connections"
        )
    return replace(settings, max_connections=number)


def _serve_model(settings: ServerSettings, inherited: Sequence[socket.socket], source: SettingsSource | None) -> int:
    with uncollected():
        from paceline.server.model_front import ModelFront
    front = ModelFront(settings)
    tls, listeners = tls_context(settings), Listeners(settings, inherited)
    with listeners, event_loop() as runner:
        return runner.run(_run_model(front, listeners, settings, tls, source))


async def _run_model(
    front: ModelFront,
    listeners: Listeners,
    settings: ServerSettings,
    tls: ssl.SSLContext | None,
    source: SettingsSource | None,
) -> int:
    signals, began_s = prepare_loop(), time.monotonic()
    front.begin()
    try:
        app, config = await asyncio.to_thread(_application, front, settings, tls)
    except BaseException:
        await front.aclose()
        raise
    from paceline.server.serving import Serving, SettingsReload, say_cannot_load

    if front.failure is not None:  # before any client could have connected
        _log.error("the model could not be loaded: %s", front.failure)
        say_cannot_load(front.failure)
        return FAILED
    reload = None if source is None else SettingsReload(app.state.service, source, tls)
    return await Serving(app, config, listeners, signals, began_s, reload=reload).run()


def _application(
    front: ModelFront, settings: ServerSettings, tls: ssl.SSLContext | None
) -> tuple[FastAPI, ServerConfig]:
    """Import the web framework, and build the application. In a thread, for a second."""
    with uncollected():
        from paceline.server.application import build_app
        from paceline.server.serving import ServerConfig

        app = build_app(settings, front)
        config = ServerConfig(app, settings, tls)
        config.load()
        return app, config


def _serve_models(
    settings: ServerSettings, presets: ModelPresets, inherited: Sequence[socket.socket], source: SettingsSource | None
) -> int:
    with uncollected():
        from paceline.server.router.router_app import build_router_app
        from paceline.server.serving import ServerConfig, Serving, SettingsReload

        app = build_router_app(settings, presets)
    tls = tls_context(settings)
    config, listeners = ServerConfig(app, settings, tls), Listeners(settings, inherited)
    service = app.state.service
    reload = None if source is None else SettingsReload(service, source, tls, service.models)

    async def run() -> int:
        return await Serving(app, config, listeners, prepare_loop(), reload=reload).run()

    with listeners, event_loop() as runner:
        return runner.run(run())


@contextmanager
def uncollected() -> Iterator[None]:
    """Import and build without collecting garbage, of which there is none: that takes a sixth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def event_loop() -> asyncio.Runner:
    """Return a runner of the fastest event loop that there is for this system."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if sys.platform != "win32":
        import uvloop

        factory = uvloop.new_event_loop
    return asyncio.Runner(loop_factory=factory)


def prepare_loop() -> ServerSignals:
    """Give the running loop enough threads, and have it handle signals. On the main thread."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS, "paceline-server"))
    signals = ServerSignals()
    signals.install()
    return signals
