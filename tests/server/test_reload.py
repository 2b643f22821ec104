"""SIGHUP: a running server reads its flags, config file and key files again."""

from __future__ import annotations

import asyncio
import logging
import os
import pty
import re
import shutil
import signal
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.router_world import FakeLoader
from tests.server.running import LONG_S
from tests.server.stand_in import StandInLLM
from tests.unit.server.flags.world import FakeFiles

from paceline.server.api_errors import ApiException
from paceline.server.flags import ModelPresets, SettingsSource, resolve
from paceline.server.flags.table import FLAGS, Store
from paceline.server.router.router_app import build_router_app
from paceline.server.service import Service
from paceline.server.serving import LIVE, SettingsReload
from paceline.server.settings import ApiKey, ServerSettings

CONFIG, KEYS, PRESETS = "/paceline/config.toml", "/paceline/keys", "/paceline/presets.ini"


class World:
    """A server of one model on a fake engine, whose files a test changes."""

    def __init__(self, config: str, **files: str) -> None:
        self.files = FakeFiles({CONFIG: config, **files})
        self.logged: list[ServerSettings] = []
        self.source = SettingsSource(
            self._read(), self._read, lambda found: ModelPresets(found, self.files), self.logged.append
        )
        self.service = Service(self.source.started.settings, StandInLLM())  # type: ignore[arg-type]
        self.reload = SettingsReload(self.service, self.source, None)

    def _read(self) -> Any:
        return resolve(["--config", CONFIG], {}, self.files, downloads=False)

    @property
    def settings(self) -> ServerSettings:
        return self.service.settings


class ReloadableRouter:
    """A router of the model "small" on fake engines, whose files a test changes. flags: of its config file, besides presets."""

    def __init__(self, flags: str = "") -> None:
        self.files = FakeFiles({PRESETS: "[small]\nmodel = small.gguf\n"})
        self.write_config(flags)
        self.source = SettingsSource(self._read(), self._read, self._models_of, lambda _: None)
        started = self.source.started
        app = build_router_app(started.settings, self._models_of(started), FakeLoader())  # type: ignore[arg-type]
        self.service = app.state.service
        self.reload = SettingsReload(self.service, self.source, None, self.service.models)

    def write_config(self, flags: str) -> None:
        self.files.contents[CONFIG] = f"[serve]\nmodels-preset = '{PRESETS}'\n{flags}"

    def names(self) -> list[str]:
        return [preset.name for preset in self.service.models.presets()]

    def _read(self) -> Any:
        return resolve(["--config", CONFIG], {}, self.files, downloads=False)  # type: ignore[arg-type]

    def _models_of(self, found: Any) -> ModelPresets:
        return ModelPresets(found, self.files)  # type: ignore[arg-type]


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """The lines since the last call."""
    found = [(record.levelname, record.getMessage()) for record in caplog.records]
    caplog.clear()
    return found


@pytest.fixture(autouse=True)
def every_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "paceline.server")


def test_settings_of_requests_change_and_others_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """One line has both, at the level of a warning; a second reload names what still needs a restart."""

    async def main() -> None:
        world = World("[serve]\ntemp = 0.5\nctx-size = 512\nport = 1\n")
        config = "[serve]\ntemp = 0.75\nctx-size = 1024\nlog-level = 'debug'\nrequest-timeout-s = 9\nhost = '::1'\nport = 1\n"
        world.files.contents[CONFIG] = config
        await world.reload.run()
        assert world.settings.sampling == {"temperature": 0.75}
        assert (world.settings.log_level, world.settings.timeout_s) == ("debug", 9.0)
        assert world.settings.hosts == ("127.0.0.1",)
        assert world.settings.engine_options["n_ctx"] == 512
        assert world.logged == [world.settings]
        (level, text) = lines(caplog)[0]
        changed, _, pending = text.partition("; a restart is needed for ")
        assert (level, sorted(pending.split(", "))) == ("WARNING", ["--ctx-size", "--host"])
        names = changed.removeprefix("the settings were read again: changed: ").split(", ")
        assert sorted(names) == ["--log-level", "--request-timeout-s", "--temp"]
        await world.reload.run()
        assert [text for _, text in lines(caplog)] == [
            f"the settings were read again: changed: nothing; a restart is needed for {pending}"
        ]
        world.files.contents[CONFIG] = "[serve]\nctx-size = 512\nport = 1\n"
        await world.reload.run()
        assert world.settings.sampling == {}
        assert lines(caplog)[0][0] == "INFO"

    asyncio.run(main())


def test_flags_without_effect_are_not_named(caplog: pytest.LogCaptureFixture) -> None:
    """Of flags that are accepted for llama-server's sake nothing has changed."""

    async def main() -> None:
        world = World("[serve]\n")
        world.files.contents[CONFIG] = "[serve]\nwarmup = false\nnuma = 'isolate'\n"
        await world.reload.run()
        assert lines(caplog) == [("INFO", "the settings were read again: changed: nothing")]

    asyncio.run(main())


def test_scales_of_adapters_that_a_request_sets_during_a_reload_stay() -> None:
    """A reload takes over its own settings alone."""

    async def main() -> None:
        world = World("[serve]\ntemp = 0.5\n")

        def set_scales(_: ServerSettings) -> None:
            world.service.set_lora_scales({"style": 0.5})

        world.reload = SettingsReload(world.service, replace(world.source, set_up_logging=set_scales), None)
        world.files.contents[CONFIG] = "[serve]\ntemp = 0.6\n"
        await world.reload.run()
        assert world.settings.sampling == {"temperature": 0.6}
        assert world.settings.lora_scales == {"style": 0.5}

    asyncio.run(main())


def test_a_broken_file_changes_nothing_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """No TOML, an unknown key, a value out of range, and a key file without keys: all settings stay, keys as well."""

    async def main() -> None:
        config = f"[serve]\ntemp = 0.5\napi-key-file = '{KEYS}'\n"
        world = World(config, **{KEYS: "one\n"})
        before = world.settings
        for broken, words in (
            ("[serve\n", "not valid TOML"),
            (config + "tempp = 1\n", "did you mean 'temp'"),
            (config + "port = 99999\n", "port"),
        ):
            world.files.contents[CONFIG] = broken
            await world.reload.run()
            ((level, text),) = lines(caplog)
            assert level == "ERROR" and words in text and "stay as they are" in text
        world.files.contents |= {CONFIG: config.replace("0.5", "0.6"), KEYS: "# none\n"}
        await world.reload.run()
        assert "has no key" in lines(caplog)[0][1]
        assert world.settings is before and world.logged == []

    asyncio.run(main())


def test_a_log_that_cannot_be_opened_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The former log has the line about it."""

    async def main() -> None:
        world = World("[serve]\ntemp = 0.5\n")

        def refuse(_: ServerSettings) -> None:
            raise PermissionError(13, "Permission denied", "/log")

        world.reload = SettingsReload(world.service, replace(world.source, set_up_logging=refuse), None)
        before = world.settings
        world.files.contents[CONFIG] = "[serve]\ntemp = 0.6\n"
        await world.reload.run()
        assert world.settings is before
        assert "Permission denied" in lines(caplog)[0][1]

    asyncio.run(main())


def test_keys_and_tenants_change_by_their_file(caplog: pytest.LogCaptureFixture) -> None:
    """The engine expects the new tenants, and their share holds from then on."""

    async def main() -> None:
        world = World(f"[serve]\ntenant-key-file = '{KEYS}'\n", **{KEYS: "library:one\n"})
        await world.service.start()
        await world.service.loaded.wait()
        assert not world.service.body_budget.is_shared
        world.files.contents[KEYS] = "library:two\nmuseum:three\n"
        await world.reload.run()
        assert world.settings.api_keys == (
            ApiKey(secret="two", tenant="library"),
            ApiKey(secret="three", tenant="museum"),
        )
        assert world.service.body_budget.is_shared
        assert world.service.kept.tenants == {"library", "museum"}
        assert lines(caplog) == [("INFO", "the settings were read again: changed: API keys (2 now)")]
        await world.service.aclose()

    asyncio.run(main())


def test_limits_of_keys_change_by_their_file_and_counts_stay() -> None:
    """A key of a TOML file gets new limits; its tokens of the day are those from before."""

    async def main() -> None:
        key = "[[keys]]\nkey = 'one'\ntenant = 'library'\n"
        world = World(f"[serve]\ntenant-key-file = '{KEYS}.toml'\n", **{f"{KEYS}.toml": f"{key}tokens_per_day = 10\n"})
        (account,) = world.service.kept.key_accounts
        account.charge(10)
        with pytest.raises(ApiException):
            account.check()
        world.files.contents[f"{KEYS}.toml"] = f"{key}tokens_per_day = 11\nweight = 2\n"
        await world.reload.run()
        (same,) = world.service.kept.key_accounts
        same.check()
        assert same is account
        assert (same.tokens_today, same.key.weight) == (10, 2)

    asyncio.run(main())


def test_a_server_is_not_opened_to_everyone_by_a_reload(caplog: pytest.LogCaptureFixture) -> None:
    """It keeps its keys if the file names none any more; the reverse, keys for a server without, takes effect."""

    async def main() -> None:
        world = World("[serve]\napi-key = 'one'\n")
        world.files.contents[CONFIG] = "[serve]\n"
        await world.reload.run()
        assert [key.secret for key in world.settings.api_keys] == ["one"]
        assert lines(caplog)[0][1].endswith("changed: nothing; a restart is needed for a server without keys")
        open_world = World("")
        open_world.files.contents[CONFIG] = "[serve]\napi-key = ['one', 'two']\n"
        await open_world.reload.run()
        assert [key.secret for key in open_world.settings.api_keys] == ["one", "two"]

    asyncio.run(main())


def test_new_connections_get_the_new_certificate(tmp_path: Path) -> None:
    """A certificate that does not fit its key leaves the former one in use."""
    folder = Path(__file__).parent / "tls"
    for file in ("certificate.pem", "key.pem"):
        shutil.copy(folder / file, tmp_path)
    loaded: list[str] = []

    class Counting(ssl.SSLContext):
        def load_cert_chain(self, certfile: Any, keyfile: Any = None, password: Any = None) -> None:
            super().load_cert_chain(certfile, keyfile, password)
            loaded.append(str(certfile))

    async def main() -> None:
        config = f"[serve]\nssl-cert-file = '{tmp_path}/certificate.pem'\nssl-key-file = '{tmp_path}/key.pem'\n"
        world = World(config, **{str(path): path.read_text() for path in tmp_path.iterdir()})
        reload = SettingsReload(world.service, world.source, Counting(ssl.PROTOCOL_TLS_SERVER))
        await reload.run()
        assert loaded == [f"{tmp_path}/certificate.pem"]
        (tmp_path / "certificate.pem").write_text("broken")
        await reload.run()
        assert len(loaded) == 1

    asyncio.run(main())


def test_a_router_reads_its_models_again(caplog: pytest.LogCaptureFixture) -> None:
    """Presets, limits and flags of models take effect; a broken file of presets changes neither models nor keys."""
    world = ReloadableRouter("models-max = 2\nport = 1\n")

    async def main() -> None:
        await world.service.start()
        world.write_config("models-max = 3\nport = 2\nctx-size = 1024\napi-key = 'one'\n")
        world.files.contents[PRESETS] += "[large]\nmodel = large.gguf\n"
        await world.reload.run()
        assert world.names() == ["small", "large"]
        manager = world.service.models.manager
        assert (manager.settings.max_loaded, manager.entry("small").options["n_ctx"]) == (3, 1024)
        (level, text) = lines(caplog)[0]
        assert level == "WARNING" and text.endswith("; a restart is needed for --port")
        assert all(name in text for name in ("--models-max", "--ctx-size", "API keys (1 now)"))
        world.write_config("models-max = 2\nport = 1\napi-key = 'two'\n")
        world.files.contents[PRESETS] = "broken"
        await world.reload.run()
        assert "neither [SECTION] nor KEY" in lines(caplog)[0][1]
        assert [key.secret for key in world.service.settings.api_keys] == ["one"]
        assert world.names() == ["small", "large"]
        await world.service.aclose()

    asyncio.run(main())


def test_a_router_with_a_log_that_cannot_be_opened_keeps_its_models(caplog: pytest.LogCaptureFixture) -> None:
    """Although their presets could be read."""
    world = ReloadableRouter()

    def refuse(_: ServerSettings) -> None:
        raise PermissionError(13, "Permission denied", "/log")

    async def main() -> None:
        source = replace(world.source, set_up_logging=refuse)
        await world.service.start()
        world.files.contents[PRESETS] += "[large]\nmodel = large.gguf\n"
        await SettingsReload(world.service, source, None, world.service.models).run()
        assert "Permission denied" in lines(caplog)[0][1]
        assert world.names() == ["small"]
        await world.service.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("named", ["", "model = 'one.gguf'\n"])
def test_a_router_keeps_its_models_if_the_flags_are_those_of_one_model(
    named: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Other settings are applied, and the flags of models need a restart."""
    world = ReloadableRouter()
    world.files.contents["one.gguf"] = ""

    async def main() -> None:
        await world.service.start()
        world.files.contents[CONFIG] = f"[serve]\n{named}api-key = 'one'\n"
        await world.reload.run()
        ((level, text),) = lines(caplog)
        changed, _, pending = text.partition("; a restart is needed for ")
        assert (level, set(pending.split(", "))) == ("WARNING", {"--models-preset", *(["--model"] if named else [])})
        assert changed.endswith("changed: --api-key, API keys (1 now)")
        assert world.names() == ["small"]
        await world.service.aclose()

    asyncio.run(main())


def test_live_settings_are_fields() -> None:
    """None of them was renamed."""
    assert {field.name for field in fields(ServerSettings)} >= LIVE


def test_the_guide_names_the_flags_that_change() -> None:
    """Flags of sampling are named as a section."""
    page = (Path(__file__).parents[2] / "docs/guide/server.md").read_text(encoding="utf-8")
    table = page.partition("with SIGHUP\n")[2].partition("| settings |")[2].partition("\nWith [several models]")[0]
    live = {f"server.{field}" for field in LIVE - {"sampling"}}
    stores = {flag.long_name: flag.action.targets for flag in FLAGS if isinstance(flag.action, Store)}
    assert set(re.findall(r"--[a-z][a-z-]*", table)) == {name for name, targets in stores.items() if {*targets} <= live}


class ServerProcess:
    """`paceline serve` on the demo model with a config file."""

    def __init__(self, folder: Path, config: str, *, terminal: int | None = None, is_ignored: bool = False) -> None:
        """terminal: a descriptor of its controlling terminal. is_ignored: whether it starts with SIGHUP ignored."""
        self.config = folder / "config.toml"
        self.config.write_text(config)

        steps = ["import fcntl, runpy, signal, sys, termios"]
        steps += ["fcntl.ioctl(0, termios.TIOCSCTTY, 0)"] if terminal is not None else []
        steps += [
            f"signal.signal(signal.SIGHUP, signal.{'SIG_IGN' if is_ignored else 'SIG_DFL'})"
        ]  # pytest may have it ignored
        steps += ["runpy.run_module('paceline', run_name='__main__')"]
        arguments = ["serve", "--config", str(self.config), "--port", "0", "-np", "1", "-c", "512"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", "; ".join(steps), *arguments],
            stdin=subprocess.DEVNULL if terminal is None else terminal,
            stderr=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,
        )
        self.url = re.findall(r"http://\S+", self.wait_for("listening on"))[0]
        self.wait_for("is ready")

    def wait_for(self, words: str) -> str:
        """The next line on stderr with them."""
        assert self.process.stderr is not None
        for line in iter(self.process.stderr.readline, b""):
            if words in line.decode():
                return line.decode()
        raise AssertionError(f"it never wrote {words!r}")

    def reload(self, config: str) -> str:
        """Write the config file, send SIGHUP, and return the line about it."""
        self.config.write_text(config)
        self.process.send_signal(signal.SIGHUP)
        return self.wait_for("the settings")

    def status(self, key: str) -> int:
        body = {"prompt": "Once", "max_tokens": 1}
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=LONG_S).status_code

    def close(self) -> None:
        self.process.kill()
        self.process.wait(LONG_S)
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Start servers, and leave none running."""
    started: list[ServerProcess] = []

    def make(config: str = "", **options: Any) -> ServerProcess:
        started.append(ServerProcess(tmp_path, config, **options))
        return started[-1]

    yield make
    for server in started:
        server.close()


@pytest.mark.native
def test_a_server_takes_new_keys_and_keeps_its_settings_if_the_file_is_broken(
    start: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    """With real signals: a key is replaced while the server runs, and a request with the former one is refused."""
    keys = tmp_path / "keys"
    keys.write_text("first\n")
    config = f"[serve]\napi-key-file = '{keys}'\n"
    server = start(config)
    assert (server.status("first"), server.status("second")) == (200, 401)
    keys.write_text("second\n")
    assert "changed: API keys (1 now)\n" in server.reload(config)
    assert (server.status("first"), server.status("second")) == (401, 200)
    line = server.reload(config + "drain-s = 1\nmax-queue = 7\n")
    assert "WARNING" in line and line.endswith("changed: --drain-s; a restart is needed for --max-queue\n")
    keys.write_text("third\n")
    assert "ERROR" in (line := server.reload("[serve\n")) and "not valid TOML" in line
    assert (server.status("second"), server.status("third")) == (200, 401)


@pytest.mark.native
def test_a_server_ends_with_its_terminal(start: Callable[..., ServerProcess]) -> None:
    """A hangup sends the same signal as a request to reload."""
    ours, terminal = pty.openpty()
    server = start(terminal=terminal)
    os.close(terminal)
    assert "changed: nothing" in server.reload("")
    os.close(ours)
    server.wait_for("the terminal was closed")
    assert server.process.wait(LONG_S) == 0


@pytest.mark.native
def test_a_server_that_nohup_started_outlives_its_terminal(start: Callable[..., ServerProcess]) -> None:
    """It was started with SIGHUP ignored, and reads its settings again."""
    ours, terminal = pty.openpty()
    server = start(terminal=terminal, is_ignored=True)
    os.close(terminal)
    os.close(ours)
    server.wait_for("the settings")
    assert server.status("any") == 200
