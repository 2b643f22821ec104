"""Run the application: uvicorn, messages for the operator, the shutdown. On the event loop.

A shutdown drains: new requests are rejected, running ones have `drain_s` to finish, then end with SHUTDOWN. SIGHUP makes the
server read flags, config file and keys again: settings that are looked up for each request or log line change at once, the log
names the others, and if anything cannot be read, all settings stay as they are.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import ssl
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import uvicorn
from fastapi import FastAPI
from uvicorn.config import STARTUP_FAILURE

from paceline.hub.references import visible
from paceline.server.api_errors import api_error_of
from paceline.server.batch_jobs import BatchJobs
from paceline.server.connection import Connection, OpenConnections
from paceline.server.flags.presets import SERVERS_OWN, SettingsSource, targets_of
from paceline.server.flags.resolution import GivenFlag, Resolved, strongest
from paceline.server.listeners import Acceptor, Listeners, load_certificate, registered, tls_context, url_of
from paceline.server.operator_lines import ServerSignals, say, tell_manager, watchdog_s
from paceline.server.service import Server
from paceline.server.settings import ServerSettings

if TYPE_CHECKING:
    from paceline.server.router.routed_models import RoutedModels

FAILED = 1
ENGINE_ENDED = 70
"""The exit code if the engine gave up by itself: EX_SOFTWARE of sysexits.h."""

_log = logging.getLogger("paceline.server")
_FLUSH_S = 5.0  # for ended streams to send their last chunk


class ServerConfig(uvicorn.Config):
    """uvicorn's configuration, with the settings and the connections of the server."""

    def __init__(self, app: FastAPI, settings: ServerSettings, tls: ssl.SSLContext | None) -> None:
        """tls: None for plain HTTP."""
        self.settings, self.all_open = settings, OpenConnections(settings.max_connections)
        protocol: Any = partial(Connection, settings, self.all_open)
        super().__init__(
            app,
            http=protocol,
            ws="none",
            loop="uvloop" if sys.platform != "win32" else "asyncio",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=round(_FLUSH_S),
            ssl_context_factory=None if tls is None else lambda *_: tls,
        )


class UvicornServer(uvicorn.Server):
    """uvicorn's server without signal handlers; `is_up` is set when it accepts connections."""

    def __init__(self, config: ServerConfig) -> None:
        super().__init__(config)
        self._config = config
        self.is_up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, accept connections of the sockets, and set `is_up`."""
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(STARTUP_FAILURE)
        settings, tls, all_open = self._config.settings, self._config.ssl, self._config.all_open
        timeouts = {
            "ssl_handshake_timeout": settings.body_timeout_s,
            "ssl_shutdown_timeout": min(_FLUSH_S, settings.body_timeout_s),
        }
        acceptors = [
            Acceptor(listener, self._connect, all_open, {} if tls is None else {"ssl": tls, **timeouts})
            for listener in sockets or ()
        ]

        def resume() -> None:
            for acceptor in acceptors:
                acceptor.resume()

        all_open.on_room = resume
        self.servers: list[Any] = [*acceptors]
        self.started = True
        self.is_up.set()

    def _connect(self) -> asyncio.Protocol:
        make: Any = self._config.http_protocol_class
        protocol: asyncio.Protocol = make(
            config=self._config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `Serving`."""
        yield


class Serving:
    """One run of a server, from its sockets to its shutdown."""

    def __init__(
        self,
        app: FastAPI,
        config: ServerConfig,
        listeners: Listeners,
        signals: ServerSignals,
        began_s: float | None = None,
        *,
        reload: SettingsReload | None = None,
    ) -> None:
        """Prepare to serve.

        Args:
            app: The application.
            config: uvicorn's configuration.
            listeners: The sockets.
            signals: Installed.
            began_s: When the server was started, by `time.monotonic`; None: now.
            reload: Reads the settings again. None: SIGHUP changes nothing.
        """
        self._began_s = time.monotonic() if began_s is None else began_s
        self._service: Server = app.state.service
        self._batches: BatchJobs = app.state.batches
        self._settings = self._service.settings
        self._server = UvicornServer(config)
        self._listeners = listeners
        self._signals = signals
        self._reload = reload
        self._code = 0
        self._registration = ExitStack()

    async def run(self) -> int:
        """Serve until a signal, a failure to load, or the engine gives up; return the exit code."""
        running = asyncio.create_task(self._server.serve(sockets=self._listeners.sockets))
        running.add_done_callback(lambda _: self.end())  # if uvicorn ends by itself
        watching, reporting = asyncio.create_task(self._watch()), asyncio.create_task(self._report_life())
        reloading = asyncio.create_task(self._reload_on_request())
        for task in (watching, reporting, reloading):
            task.add_done_callback(self._end_if_failed)
        await self._signals.requested.wait()
        tell_manager("STOPPING=1")
        watching.cancel()
        reloading.cancel()
        self._registration.close()
        await self._drain()
        self._server.should_exit = True
        await running
        reporting.cancel()
        return self._code

    def end(self) -> None:
        """Start the shutdown, as the first signal does."""
        self._signals.request()

    def _end_if_failed(self, task: asyncio.Task[None]) -> None:
        """End the server if a task of its own failed: it would not be watched, or not report its life, any more."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.critical("the server ends by an internal error", exc_info=error)
            self._code = FAILED
            self.end()

    async def _reload_on_request(self) -> None:
        while True:
            await self._signals.reload_requested.wait()
            self._signals.reload_requested.clear()
            if self._reload is not None:
                await self._reload.run()

    async def _watch(self) -> None:
        """Shut down if the model cannot be loaded or the engine gives up, for the service manager to act on."""
        await self._announce()
        if self._service.failure is None:
            reason = await self._service.ended()
            if reason is not None:
                say(f"ending: {reason}")
                self._code = ENGINE_ENDED
                self.end()

    async def _announce(self) -> None:
        await self._server.is_up.wait()
        urls = [url_of(listener, self._settings) for listener in self._listeners.sockets]
        model = self._service.names[0] if self._service.names else None
        self._registration.enter_context(registered(urls, model, time.time()))
        say(f"listening on {' and '.join(urls)}")
        if not self._settings.api_keys and not self._listeners.are_private:
            say("warning: every client that reaches this address may use the server; set an API key, or bind 127.0.0.1")
            if self._settings.checks_hosts and not self._settings.allowed_hosts:
                say("clients that ask for this machine by a name need --allowed-hosts NAME; IP addresses are fine")
        gc.collect()  # the model usually still loads; after the load it would delay the first requests, for little garbage
        await self._service.loaded.wait()
        if self._service.failure is None:
            gc.freeze()  # each full collection of what is present would block the loop for 50 ms
            line = self._service.ready_line(time.monotonic() - self._began_s)
            say(line)
            tell_manager(f"READY=1\nSTATUS={visible(line)}")
            return
        say_cannot_load(self._service.failure)
        self._code = FAILED
        self.end()

    async def _report_life(self) -> None:
        """Keep the service manager's watchdog quiet while the loop turns and the engine is alive, or the server ends."""
        timeout_s = watchdog_s()
        while timeout_s is not None:
            if self._service.is_draining or self._service.is_alive:
                tell_manager("WATCHDOG=1")
            await asyncio.sleep(timeout_s / 4)  # one report may be missing

    async def _drain(self) -> None:
        """Wait `drain_s` for running requests; then end them with SHUTDOWN, and wait for their last chunks."""
        await self._batches.stop()
        self._service.drain()
        wait_idle = self._service.in_flight.wait_idle
        if self._service.is_loaded:
            with suppress(TimeoutError):
                await asyncio.wait_for(wait_idle(), self._service.settings.drain_s)
        await self._service.aclose()
        with suppress(TimeoutError):
            await asyncio.wait_for(wait_idle(), _FLUSH_S)


def say_cannot_load(failure: BaseException) -> None:
    """Report to the operator why the server ends."""
    say(f"cannot load the model: {api_error_of(failure).message}")


# ---- reload

# fmt: off
LIVE: Final = frozenset((
    "api_keys", "chat_template_kwargs", "drain_s", "embd_normalize", "heartbeat_s", "log_file", "log_json", "log_level",
    "lora_loading", "max_images", "metrics", "model_changed", "prefill_assistant", "props", "reasoning_budget",
    "reasoning_budget_message", "reasoning_format", "sampling", "skip_chat_parsing", "slots", "special", "spm_infill",
    "ssl_certfile", "ssl_keyfile", "tags", "timeout_s", "untagged_calls",
))
# fmt: on
"""The fields of `ServerSettings` that change while the server runs."""

_LIVE_OF_MODELS: Final = frozenset(f"server.models_{name}" for name in ("preset", "dir", "max", "memory"))
_DOWNLOADS: Final = frozenset(("aside.offline", "aside.hf_token"))


class SettingsReload:
    """Applies the settings that have changed. tls: the context of the server's connections. models: of a router."""

    def __init__(
        self, server: Server, source: SettingsSource, tls: ssl.SSLContext | None, models: RoutedModels | None = None
    ) -> None:
        self._server, self._source, self._tls, self._models = server, source, tls, models
        self._started = self._applied = _texts(source.started)

    async def run(self) -> None:
        """Read the settings again, apply them, and log one line. Raises nothing."""
        try:
            changed, pending = await self._apply(await asyncio.to_thread(self._source.read))
        except Exception as error:  # noqa: BLE001 - a server does not end because a file is broken
            _log.error("the settings could not be read again and stay as they are: %s", error)
            return
        needs = f"; a restart is needed for {', '.join(pending)}" if pending else ""
        level = logging.WARNING if pending else logging.INFO
        _log.log(level, "the settings were read again: changed: %s%s", ", ".join(changed) or "nothing", needs)

    async def _apply(self, found: Resolved) -> tuple[list[str], list[str]]:
        """Apply the settings that may change. Return the names of these, and of flags that need a restart."""
        before, given = self._server.settings, _texts(found)
        live = {name: getattr(found.settings, name) for name in LIVE}
        has_models = self._models is not None and found.is_router
        pending = [name for name, flag in _different(self._started, given) if not _is_live(flag, has_models=has_models)]
        refused = set[str]()
        if before.api_keys and not live["api_keys"]:  # an edit does not open a running server to every client
            live["api_keys"] = before.api_keys
            refused.add("server.api_keys")
            pending.append("a server without keys")
        if (before.ssl_certfile is None) != (live["ssl_certfile"] is None):
            live |= {"ssl_certfile": before.ssl_certfile, "ssl_keyfile": before.ssl_keyfile}
            refused |= {"server.ssl_certfile", "server.ssl_keyfile"}
            pending.append("TLS")
        settings, replaced = replace(before, **live), None
        await asyncio.to_thread(tls_context, settings)  # raises if the certificate cannot be used
        open_log = partial(self._source.set_up_logging, settings)
        if self._models is not None and has_models:
            replaced = await self._models.begin_reload(found.settings, self._source.presets(found), open_log)
        else:
            open_log()
        if self._tls is not None:
            load_certificate(self._tls, settings)
        # A request may have set scales of adapters meanwhile.
        self._server.apply(replace(self._server.settings, **live))
        applied = [(name, flag) for name, flag in _different(self._applied, given) if not targets_of(flag) & refused]
        changed = [name for name, flag in applied if _is_live(flag, has_models=has_models)]
        if live["api_keys"] != before.api_keys:
            changed.append(f"API keys ({len(live['api_keys'])} now)")
        self._applied = given
        if replaced is not None:
            await replaced
        return changed, pending


def _is_live(flag: GivenFlag, *, has_models: bool) -> bool:
    """Return whether a flag takes effect without a restart. has_models: whether presets of models are read again."""
    targets = targets_of(flag)
    live = {f"server.{name}" for name in LIVE} | {target for target in targets if target.startswith("sampling.")}
    if has_models:  # settings of models, which are read with the presets
        live |= {*_LIVE_OF_MODELS, *(targets - SERVERS_OWN - _DOWNLOADS)}
    return targets <= live


def _texts(resolved: Resolved) -> Mapping[str, GivenFlag]:
    """Return the flags that set something, by their long names."""
    return {given.flag.long_name: given for given in strongest(resolved.sources)[0] if targets_of(given)}


def _different(before: Mapping[str, GivenFlag], now: Mapping[str, GivenFlag]) -> Iterator[tuple[str, GivenFlag]]:
    """Yield the flags that have other texts than before, or that are on one side alone."""
    for name, given in {**before, **now}.items():
        if name not in before or name not in now or before[name].texts != given.texts:
            yield name, given
