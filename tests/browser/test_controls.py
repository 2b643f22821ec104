"""Keys and drafts of the built page."""

from __future__ import annotations

import re
import socket
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.browser.chat_page import ChatPage, conversation_file, wait_count, wait_holds
from tests.e2e.served import Served

if TYPE_CHECKING:
    from playwright.sync_api import FrameLocator, Route

pytestmark = [pytest.mark.browser, pytest.mark.native, pytest.mark.full]

Open = Callable[..., ChatPage]


def _imported(chat: ChatPage, tmp_path: Path, contents: list[str], title: str) -> None:
    chat.import_file(conversation_file(tmp_path / f"{title}.json", contents, title))
    chat.listed.filter(has_text=title).get_by_role("link").click()
    chat.messages.first.wait_for()


def test_formulas_and_long_code_are_shown_whole(served: Served, open_page: Open, tmp_path: Path) -> None:
    """A formula is MathML with all its characters under the page's policy, and long code is folded, and whole when asked."""
    chat = open_page(served.url)
    reply = (
        "$x_{i}^{*}$ and\n\n\\[\\frac{a*b}{c*d}\\]\n\n$\\color{red} \\cancel{x}$\n\n```python\n"
        + "x = 1\n" * 200
        + "```"
    )
    _imported(chat, tmp_path, ["Write.", reply], "Formulas")
    wait_count(chat.page.locator("math"), 3)
    assert chat.page.locator("math").first.text_content() == "xi∗"
    assert chat.page.locator("math mfrac").bounding_box()
    assert chat.page.locator(".code").bounding_box()["height"] < 500  # type: ignore[index]
    chat.page.get_by_role("button", name="Show all 200 lines").click()
    heights = chat.page.locator(".code pre").evaluate("pre => [pre.scrollHeight, pre.clientHeight]")
    assert heights[0] == heights[1]


def _preview(chat: ChatPage) -> FrameLocator:
    """The frame of a page without its scripts."""
    return chat.page.frame_locator("iframe[title=Preview]").frame_locator("iframe")


def test_preview_runs_no_script_and_reaches_no_network(served: Served, open_page: Open, tmp_path: Path) -> None:
    """Neither WebRTC nor the name of a link leaves it, and it takes no focus; with scripts WebRTC does leave it."""
    with socket.socket(type=socket.SOCK_DGRAM) as quiet, socket.socket(type=socket.SOCK_DGRAM) as called:
        for udp in (quiet, called):
            udp.bind(("127.0.0.1", 0))
        called.settimeout(60)
        quiet.setblocking(False)

        def code(udp: socket.socket) -> str:
            script = (
                f"const c = new RTCPeerConnection({{iceServers: [{{urls: 'stun:127.0.0.1:{udp.getsockname()[1]}'}}]}});"
                "c.createDataChannel('x'); c.createOffer().then(offer => c.setLocalDescription(offer));"
            )
            inner = f"<script>{script}</script>"
            nested = (
                f"const f = document.createElement('iframe'); f.srcdoc = atob('{b64encode(inner.encode()).decode()}');"
            )
            return (
                f"<style>p {{ color: rgb(1, 2, 3) }}"
                f"</style><p>waiting</p><input autofocus><script>document.querySelector('p').textContent = 'run';"
                f"{nested} document.body.append(f);</script>"
            )

        chat = open_page(served.url)
        link = "<link rel=dns-prefetch href='//name.invalid'>"
        blocks = f"```html\n{link}{code(quiet)}\n```\n```html\n{code(called)}\n```\n"
        _imported(chat, tmp_path, ["Write.", blocks], "Calls")
        chat.page.get_by_role("button", name="Preview", exact=True).first.click()
        shown = _preview(chat).locator("p")
        wait_holds(shown, "waiting")
        assert shown.evaluate("one => getComputedStyle(one).color") == "rgb(1, 2, 3)"
        wait_count(_preview(chat).locator("link"), 0)
        assert chat.page.evaluate("document.activeElement.tagName") != "IFRAME"
        chat.page.get_by_role("button", name="Code", exact=True).click()
        chat.page.get_by_role("button", name="Preview", exact=True).last.click()
        chat.page.get_by_role("button", name="Run scripts").click()
        wait_holds(chat.page.frame_locator("iframe[title=Preview]").locator("p"), "run")
        assert called.recv(2000)  # so packets of the first preview would have come before
        with pytest.raises(BlockingIOError):
            quiet.recv(2000)


def test_preview_with_scripts_has_neither_the_origin_nor_requests(
    served: Served, open_page: Open, tmp_path: Path
) -> None:
    """HTML of a reply runs in its frame alone: it reaches nothing of the page, and no request leaves it."""
    chat = open_page(served.url)
    script = """
        const told = [origin];
        try { told.push(parent.document.title); } catch (error) { told.push("no page"); }
        try { told.push(localStorage.length); } catch (error) { told.push("no storage"); }
        fetch("v1/models").then(() => told.push("a server"), () => told.push("no server")).then(() => {
            document.querySelector("p").textContent = told.join(", ");
        });
    """
    code = f"<style>p {{ color: rgb(1, 2, 3) }}</style><p>waiting</p><script>{script}</script>"
    _imported(chat, tmp_path, ["Write.", f"```html\n{code}\n```\n```svg\n<svg><circle r='9'/></svg>\n```"], "Pages")
    chat.page.get_by_role("button", name="Preview", exact=True).first.click()
    wait_holds(_preview(chat).locator("p"), "waiting")
    chat.page.get_by_role("button", name="Run scripts").click()
    shown = chat.page.frame_locator("iframe[title=Preview]").locator("p")
    wait_holds(shown, "null, no page, no storage, no server")
    assert shown.evaluate("one => getComputedStyle(one).color") == "rgb(1, 2, 3)"
    chat.page.get_by_role("button", name="Code", exact=True).click()
    wait_count(chat.page.locator("iframe"), 0)
    chat.page.get_by_role("button", name="Preview", exact=True).last.click()
    _preview(chat).locator("svg circle").wait_for()
    wait_count(chat.page.get_by_role("button", name="Run scripts"), 0)
    assert chat.failures  # of the policy, about the request to the server
    assert all("v1/models" in failure for failure in chat.failures)
    chat.failures.clear()


def test_empty_conversation_teaches(served: Served, open_page: Open) -> None:
    """It names the model, what it can do and how to use it from code; a prompt is sent by a click."""
    chat = open_page(served.url)
    page = chat.page
    page.get_by_text("Talk to paceline-demo").wait_for()
    wait_count(page.locator(".cards button"), 4)
    wait_holds(page.locator(".command"), "paceline serve -m hf:")
    page.get_by_text("Use it from code").click()
    wait_holds(page.locator(".from-code"), f"{served.url}/v1")
    wait_holds(page.locator(".from-code pre").first, 'model="paceline-demo"')
    assert page.get_by_role("link", name="All routes").get_attribute("href") == f"{served.url}/docs"
    page.get_by_role("button", name="A story Tell me").click()
    wait_holds(chat.messages.first, "Tell me a story about a fox.")
    chat.wait_done()
    wait_count(page.locator(".welcome"), 0)


def test_settings_are_shown_kept_and_used_for_new_conversations(served: Served, open_page: Open) -> None:
    """What a conversation sets stands above the composer; presets last, and one is used for new conversations."""
    chat = open_page(served.url)
    page = chat.page
    panel = chat.settings()
    panel.get_by_label("Temperature", exact=True).fill("0")
    panel.get_by_label("JSON schema", exact=True).fill('{"type": "object"}')
    used = page.get_by_role("list", name="Settings in use")
    wait_holds(used, "Temperature0")
    wait_holds(used, "JSON schema")
    panel.get_by_label("Name of a new preset").fill("Strict")
    panel.get_by_role("button", name="Save", exact=True).click()
    panel.get_by_label("Preset", exact=True).wait_for()
    assert panel.get_by_label("Preset", exact=True).input_value() == "Strict"
    used.get_by_role("button", name="Reset JSON schema").click()
    wait_count(used.get_by_role("listitem"), 1)
    panel.get_by_role("button", name="Use these settings for new conversations").click()
    page.reload()
    wait_holds(used, "Temperature0")
    panel = chat.settings()
    assert panel.get_by_label("Temperature", exact=True).input_value() == "0"
    panel.get_by_label("Preset", exact=True).select_option("Strict")
    wait_holds(used, "JSON schema")
    with page.expect_request("**/v1/chat/completions") as sent:
        chat.send("Hello.")
    body = sent.value.post_data_json
    assert (body["temperature"], body["response_format"]["type"]) == (0, "json_schema")
    wait_count(chat.replies, 1)


def test_palette_and_keys_find_and_do(served: Served, open_page: Open, tmp_path: Path) -> None:
    """Ctrl+K finds commands, titles and contents; other keys open, close and edit."""
    chat = open_page(served.url)
    page = chat.page
    _imported(chat, tmp_path, ["Write.", "A line.\nThe otter sleeps."], "First")
    _imported(chat, tmp_path, ["Write on.", "Nothing."], "Second")
    page.keyboard.press("Control+k")
    field = page.get_by_role("combobox", name="Find conversations and commands")
    field.fill("OTTER")
    page.get_by_role("option", name="The otter sleeps.").wait_for()
    field.press("Enter")
    wait_holds(chat.replies.first, "The otter sleeps.")
    wait_count(page.get_by_role("dialog"), 0)
    page.keyboard.press("Control+k")
    field.fill("second")
    page.get_by_role("option", name="Second").wait_for()
    field.press("Enter")
    wait_holds(chat.replies.first, "Nothing.")
    page.keyboard.press("Control+k")
    field.fill("engine")
    field.press("Enter")
    page.get_by_role("heading", name="Engine").wait_for()
    page.keyboard.press("?")
    page.get_by_role("dialog", name="Keys").get_by_role("button", name="Close").click()
    page.keyboard.press("Control+Shift+O")
    page.get_by_text("Talk to").wait_for()
    page.keyboard.press("Control+b")
    wait_count(page.get_by_role("navigation"), 0)
    page.keyboard.press("Control+b")
    chat.listed.filter(has_text="First").get_by_role("link").click()
    chat.composer.press("ArrowUp")
    editor = chat.messages.first.get_by_role("textbox", name="Message")
    editor.wait_for()
    assert editor.input_value() == "Write."
    editor.press("Escape")


def test_deletions_are_undone_and_pins_stand_first(served: Served, open_page: Open, tmp_path: Path) -> None:
    """Nothing asks before a deletion: a notice takes it back."""
    chat = open_page(served.url)
    page = chat.page
    _imported(chat, tmp_path, ["Write.", "A reply."], "First")
    _imported(chat, tmp_path, ["Write on.", "Another."], "Second")
    first = chat.listed.filter(has_text="First")
    first.hover()
    first.get_by_role("button", name="Pin First").click()
    wait_holds(page.get_by_role("region", name="Pinned"), "First")
    first.hover()
    first.get_by_role("button", name="Delete First").click()
    wait_count(chat.listed, 1)
    page.locator(".toast").get_by_role("button", name="Undo").click()
    wait_count(chat.listed, 2)
    first.get_by_role("link").click()
    wait_holds(chat.replies.first, "A reply.")
    chat.replies.first.get_by_role("button", name="Delete from here on").click()
    wait_count(chat.replies, 0)
    page.locator(".toast").get_by_role("button", name="Undo").click()
    wait_holds(chat.replies.first, "A reply.")
    page.reload()
    wait_holds(chat.replies.first, "A reply.")


def test_draft_is_kept_on_reload(served: Served, open_page: Open) -> None:
    """A message that was typed and not sent is in the composer after the page is loaded again, and gone once it is sent."""
    chat = open_page(served.url)
    chat.composer.fill("a draft")
    chat.page.reload()
    chat.composer.wait_for()
    assert chat.composer.input_value() == "a draft"
    chat.set_parameters(Max_tokens="5")
    chat.composer.press("Enter")
    chat.wait_done()
    chat.composer.fill("another")
    chat.page.reload()
    chat.messages.first.wait_for()
    assert chat.composer.input_value() == "another"
    chat.open()
    chat.composer.wait_for()
    assert chat.composer.input_value() == ""


def test_full_context_has_two_ways_out(open_page: Open, tmp_path: Path) -> None:
    """The tokens of a conversation stand under the composer; if it is too long, its oldest turns are dropped or summarised."""
    with Served("-np", "2", "-c", "512") as server:
        chat = open_page(server.url)
        page = chat.page
        context = page.get_by_role("button", name=re.compile("Context: "))
        wait_holds(context, "0 / 512 tokens")
        _imported(chat, tmp_path, [f"Number {number}: a fox and a dog. " * 6 for number in range(20)], "Long")
        wait_holds(context, "about ")
        assert "nearly-full" in (context.get_attribute("class") or "")
        chat.send("And now?")
        chat.wait_state("failed")
        chat.replies.last.get_by_role("button", name="Drop the oldest turns").click()
        chat.wait_done()
        wait_count(page.get_by_text("Earlier messages are not sent"), 1)
        assert len(page.get_by_role("article").all()) == 22  # they stay in the conversation
        context.click()
        panel = page.get_by_role("region", name="What the tokens are")
        wait_holds(panel, re.compile(r"Your messages[\d,]+Replies"))
        wait_holds(panel, "The oldest turns were dropped")

        def summarise(route: Route) -> None:
            body = route.request.post_data_json
            assert (body["stream"], "summar" in body["messages"][-1]["content"].lower()) == (False, True)
            route.fulfill(json={"choices": [{"message": {"content": "They spoke of a fox."}}]})

        page.route("**/v1/chat/completions", summarise)
        panel.get_by_role("button", name="Fork with a summary").click()
        wait_count(chat.listed, 2)
        wait_holds(chat.messages.first, "They spoke of a fox.")
        wait_count(page.get_by_role("article"), 2)


def test_stop_button_leaves_the_draft(endless: Served, open_page: Open) -> None:
    """A click on the stop button does not send the message that is being typed."""
    chat = open_page(endless.url)
    chat.send("Write.")
    chat.wait_text(20)
    chat.composer.fill("And more.")
    chat.page.get_by_role("button", name="Stop the reply").click()
    chat.wait_state("stopped")
    assert chat.composer.input_value() == "And more."
    wait_count(chat.messages, 1)
    endless.assert_idle()


def test_keys_work_while_a_reply_runs(endless: Served, open_page: Open) -> None:
    """Enter sends a message after the running reply, and Escape stops a reply wherever the focus is."""
    chat = open_page(endless.url)
    page = chat.page
    page.get_by_role("button", name="Attach files: text, PDF", exact=True).wait_for()
    chat.send("Write.")
    chat.wait_text(20)
    wait_holds(page.locator(".pace"), re.compile(r"[\d.]+ tok/s, [\d,]+ tokens, \d:\d\d"))
    chat.composer.fill("And more.")
    chat.composer.press("Enter")
    wait_holds(page.locator(".composer-hint"), "Sent after this reply")
    page.get_by_role("button", name="Stop the reply").click()
    wait_count(chat.messages, 2)
    wait_count(chat.replies, 2)
    chat.wait_text(20)
    page.get_by_role("region", name="Conversation").focus()
    page.keyboard.press("Escape")
    chat.wait_state("stopped")
    endless.assert_idle()
