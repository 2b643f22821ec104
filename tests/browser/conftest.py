"""The built page in a headless Chromium, against servers as a user starts them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.browser.chat_page import ChatPage
from tests.e2e.served import Served

import paceline
from paceline.testing.models import CHAT_TEMPLATE, KINDS, LlamaSpec, write_model

if TYPE_CHECKING:
    from playwright.sync_api import Browser

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
_BUILT = Path(paceline.__file__).parent / "webui" / "index.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for a module's tests: its event loop is gone before tests of other modules need a loop."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
    path = os.environ.get("PACELINE_CHROMIUM") or next(filter(None, map(shutil.which, _BROWSERS)), None)
    if path is None:
        pytest.skip("needs Chromium in PATH, or its path in PACELINE_CHROMIUM")
    if not _BUILT.is_file():
        pytest.skip(f"needs the built page at {_BUILT}: npm ci && npm run build in web/")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=_FLAGS)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A server with the demo model."""
    with Served("-np", "4") as server:
        yield server


@pytest.fixture(scope="session")
def endless_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that writes nonsense and hardly ever ends, in chats that may have 131,072 tokens."""
    spec = KINDS["llama"]
    assert isinstance(spec, LlamaSpec)
    path = tmp_path_factory.mktemp("models") / "endless.gguf"
    metadata = {"tokenizer.chat_template": CHAT_TEMPLATE}
    return write_model(path, replace(spec, n_ctx_train=2**17), metadata=metadata)


@pytest.fixture(scope="module")
def endless(endless_model: Path) -> Iterator[Served]:
    """A server with replies that go on until they are stopped."""
    with Served("-m", str(endless_model), "-c", "32768", "-np", "4") as server:
        yield server


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., ChatPage]]:
    """Opens a page of a server in a context of its own; at the end none of them may have failed or asked elsewhere."""
    opened: list[ChatPage] = []

    def open_(url: str, view: str = "", *, width: int = 1280, height: int = 800) -> ChatPage:
        context = browser.new_context(viewport={"width": width, "height": height}, reduced_motion="reduce")
        context.set_default_timeout(60_000)
        page = ChatPage(context.new_page(), url)
        opened.append(page)
        page.open(view)
        return page

    yield open_
    failures = [failure for page in opened for failure in page.failures]
    for page in opened:
        page.page.context.close()
    assert failures == []
