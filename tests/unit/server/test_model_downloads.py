"""Downloads of a router without a hub: two of one name, and the end of the server."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from paceline.errors import QueueFull
from paceline.server.api_errors import ApiException
from paceline.server.router import model_downloads
from paceline.server.router.model_downloads import ModelDownloads
from paceline.server.router.routed_models import EventFeed

NAME = "user/demo:Q8_0"
LONG_S = 30.0


class FakeLocator:
    """Looks up two at once, and downloads until it is cancelled."""

    both = threading.Barrier(2)
    downloads = 0

    def __init__(self, *, cancel: threading.Event, **_: Any) -> None:
        self._cancel = cancel

    def look_up(self, _: object) -> None:
        self.both.wait(LONG_S)

    def locate(self, _: object) -> None:
        FakeLocator.downloads += 1
        assert self._cancel.wait(LONG_S)


def test_two_requests_at_once_are_one_download(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other download is refused, though none ran when it came. None begins after the end, and no models are read then."""
    monkeypatch.setattr(model_downloads, "Locator", FakeLocator)
    monkeypatch.setattr(FakeLocator, "downloads", 0)
    read_again = []

    async def reload() -> None:
        read_again.append(True)

    async def check() -> None:
        downloads = ModelDownloads(EventFeed(), offline=False, hf_token=None)
        results = await asyncio.gather(*(downloads.start(NAME, reload) for _ in range(2)), return_exceptions=True)
        refused = [result for result in results if isinstance(result, ApiException)]
        assert len(refused) == 1 and refused[0].api_error.code == "model_exists"
        assert downloads.is_running(NAME)
        await downloads.aclose()
        assert not downloads.is_running(NAME)
        with pytest.raises(ApiException) as late:
            await downloads.start(NAME, reload)
        assert late.value.api_error.status == 503

    asyncio.run(check())
    assert (FakeLocator.downloads, read_again) == (1, [])


class FailingLocator(FakeLocator):
    """Fails in a way that is no error of ours."""

    def look_up(self, _: object) -> None:
        pass

    def locate(self, _: object) -> None:
        raise TypeError("'<' not supported between instances of 'str' and 'int'")


@pytest.mark.parametrize("is_reload_broken", [False, True])
def test_an_error_of_any_kind_ends_in_download_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_reload_broken: bool
) -> None:
    """It is logged, the model is no longer being downloaded, and no task is left with an exception."""
    monkeypatch.setattr(model_downloads, "Locator", FailingLocator)
    events: list[tuple[str, str]] = []
    monkeypatch.setattr(EventFeed, "publish", lambda _, event, name, data: events.append((event, name)))
    unhandled: list[Any] = []

    async def reload() -> None:
        if is_reload_broken:
            raise OSError("the folder has gone")

    async def check() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        downloads = ModelDownloads(EventFeed(), offline=False, hf_token=None)
        await downloads.start(NAME, reload)
        async with asyncio.timeout(LONG_S):
            while not events:
                await asyncio.sleep(0.01)
        assert not downloads.is_running(NAME)
        await downloads.aclose()

    asyncio.run(check())
    gc.collect()
    assert events == [("download_failed", NAME)]
    assert unhandled == []
    assert f"the download of {NAME} failed" in caplog.text and "TypeError" in caplog.text


class BusyLocator(FakeLocator):
    """Looks up at once, and downloads until it is cancelled."""

    def look_up(self, _: object) -> None:
        pass


def test_a_few_downloads_run_at_once_and_in_threads_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow hub holds none of the threads that other work of the server needs; another download is refused meanwhile."""
    monkeypatch.setattr(model_downloads, "Locator", BusyLocator)
    monkeypatch.setattr(EventFeed, "publish", lambda *_: None)

    async def reload() -> None:
        pass

    async def check() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        downloads = ModelDownloads(EventFeed(), offline=False, hf_token=None)
        for number in range(model_downloads.MAX_DOWNLOADS):
            await downloads.start(f"user/demo{number}:Q8_0", reload)
        with pytest.raises(QueueFull, match="4 models are being downloaded already"):
            await downloads.start(NAME, reload)
        async with asyncio.timeout(LONG_S):
            assert await asyncio.to_thread(lambda: 7) == 7
        downloads.cancel("user/demo0:Q8_0")
        async with asyncio.timeout(LONG_S):
            while downloads.is_running("user/demo0:Q8_0"):
                await asyncio.sleep(0.01)
        await downloads.start(NAME, reload)
        await downloads.aclose()

    asyncio.run(check())
