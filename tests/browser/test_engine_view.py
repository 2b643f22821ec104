"""The engine view of the built page: live while it is open, and nothing when it is not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from tests.browser.chat_page import ChatPage, wait_count
from tests.e2e.served import Served

pytestmark = [pytest.mark.browser, pytest.mark.native, pytest.mark.full]

Open = Callable[..., ChatPage]


def start(served: Served, number: int, max_tokens: int = 1500) -> list[threading.Thread]:
    """Start chats that share a beginning."""

    def run(one: int) -> None:
        messages = [{"role": "system", "content": "You write. " * 20}, {"role": "user", "content": f"Text {one}."}]
        body = {"messages": messages, "max_tokens": max_tokens}
        httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=100)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(number)]
    for thread in threads:
        thread.start()
    return threads


def test_slots_ticks_and_tree_are_shown_as_they_happen(endless: Served, open_page: Open) -> None:
    """Slots show running requests, the queue waiting requests; ticks are drawn, and the shared prefix is one block."""
    view = open_page(endless.url, "#/engine").page
    view.get_by_text("live", exact=True).wait_for()
    threads = start(endless, 6)
    slots = view.get_by_role("region", name="Slots in use")
    slots.get_by_text("decoding").nth(3).wait_for()
    view.get_by_text("2 waiting").wait_for()
    generated = view.locator(".figures div", has_text="Generated").locator("dd")
    assert float(generated.inner_text().split()[0].replace(",", "")) > 0
    view.locator(".tree-node.shared").first.wait_for()
    first = painted(view)
    view.wait_for_timeout(400)
    assert painted(view) != first
    view.get_by_role("button", name="Pause the timeline").click()
    view.wait_for_timeout(400)  # what was on its way when it was clicked
    still = painted(view)
    view.wait_for_timeout(400)
    assert painted(view) == still
    for thread in threads:
        thread.join()
    view.get_by_text("No slot is in use").wait_for()
    wait_count(view.get_by_role("img", name="Inter-token latency"), 1)
    endless.assert_idle()


def test_request_is_cancelled_from_the_slots(endless: Served, open_page: Open) -> None:
    """A running request can be ended from its row."""
    view = open_page(endless.url, "#/engine").page
    threads = start(endless, 1, max_tokens=30_000)
    view.get_by_role("button", name="Cancel request").first.click()
    view.get_by_text("No slot is in use").wait_for()
    for thread in threads:
        thread.join()
    endless.assert_idle()


def test_tenants_see_their_own_requests_and_sums_of_the_rest(
    endless_model: Path, open_page: Open, tmp_path: Path
) -> None:
    """A request of another tenant is a number, without its id; one's own is a row."""
    keys = tmp_path / "keys"
    keys.write_text("mine:key-of-mine\nother:key-of-other\n")
    with Served("-m", str(endless_model), "-c", "8192", "-np", "4", "--tenant-key-file", str(keys)) as server:
        threads = [
            threading.Thread(
                target=httpx.post,
                args=(f"{server.url}/v1/chat/completions",),
                kwargs={
                    "json": {"messages": [{"role": "user", "content": "Write."}], "max_tokens": 2000},
                    "headers": {"authorization": f"Bearer key-of-{tenant}", "x-request-id": f"request-of-{tenant}"},
                    "timeout": 100,
                },
            )
            for tenant in ("mine", "other", "other")
        ]
        view = open_page(server.url, "#/engine").page
        dialog = view.get_by_role("dialog", name="API key")
        dialog.get_by_label("Key").fill("key-of-mine")
        dialog.get_by_label("Key").press("Enter")
        view.get_by_text("live", exact=True).wait_for()
        for thread in threads:
            thread.start()
        view.get_by_text("Other tenants: 2 slots").wait_for()
        slots = view.get_by_role("region", name="Slots in use")
        slots.locator("td[title=request-of-mine]").wait_for()
        assert "request-of-other" not in view.content()
        for thread in threads:
            thread.join()


def test_events_are_read_only_while_the_view_is_open(endless: Served, open_page: Open) -> None:
    """The stream begins with the view and ends with it: a chat reads no events."""
    chat = open_page(endless.url)
    asked: list[str] = []
    ended: list[str] = []
    chat.page.on("request", lambda request: asked.append(request.url) if "/engine/events" in request.url else None)
    chat.page.on("requestfailed", lambda request: ended.append(request.url))
    chat.set_parameters(Max_tokens="5")
    chat.send("Write.")
    chat.wait_done()
    assert asked == []
    chat.page.get_by_role("link", name="Engine").click()
    chat.page.get_by_text("live", exact=True).wait_for()
    assert len(asked) == 1
    chat.page.get_by_role("link", name="New conversation").click()
    chat.page.get_by_text("Talk to").wait_for()
    chat.page.wait_for_timeout(300)
    assert ended == asked


def test_view_finds_a_server_again(open_page: Open, endless_model: str) -> None:
    """When the server ends the view says so, and it is live again with the next server at that address."""
    flags = ("-m", str(endless_model), "-c", "4096")
    with Served(*flags) as server:
        view = open_page(server.url, "#/engine").page
        view.get_by_text("live", exact=True).wait_for()
        server.signal(15)
        server.code()
        view.locator(".feed.waiting").wait_for()
    with Served(*flags, "--port", server.url.rpartition(":")[2].strip("/")):
        view.get_by_text("live", exact=True).wait_for()


def painted(view: object) -> int:
    """Return a number that changes with the picture of the timeline."""
    script = """() => {
        const canvas = document.querySelector("canvas");
        const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        let sum = 0;
        for (let at = 0; at < data.length; at += 4) sum = (sum * 31 + data[at] + 7 * data[at + 1]) % 1000003;
        return sum;
    }"""
    return int(view.evaluate(script))  # type: ignore[attr-defined]
