"""The built page beside its chats: keys, hostile text, long conversations, images, keyboard, colours, narrow screens."""

from __future__ import annotations

import base64
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.browser.chat_page import ChatPage, conversation_file, wait_count, wait_holds
from tests.e2e.served import Served
from tests.sounds import int16, tone, wav_file

from paceline.testing.models import (
    CHAT_TEMPLATE,
    LlamaSpec,
    Qwen2VlSpec,
    Qwen25VisionSpec,
    UltravoxAudioSpec,
    write_model,
)

pytestmark = [pytest.mark.browser, pytest.mark.native, pytest.mark.full]

Open = Callable[..., ChatPage]

WEB = Path(__file__).parents[2] / "web"
KEY = "a-key-of-a-test"
HOSTILE = """<script>document.title = "run"; alert(1)</script>
<img src=x onerror="document.title = 'run'; alert(1)">
<svg onload="alert(1)"><script>alert(1)</script></svg>
<iframe src="javascript:parent.alert(1)"></iframe>

![pixel](http://127.0.0.1:1/pixel.png) [link](javascript:alert(1)) [data](data:text/html,<script>alert(1)</script>)
<style>body { background: url(http://127.0.0.1:1/style) }</style>
<a href="javascript:alert(1)">HTML</a> <link rel=stylesheet href=http://127.0.0.1:1/x.css>

```html
</code></pre><img src=x onerror=alert(1)>
```

[good](https://example.org/page)
"""


def png(width: int = 24, height: int = 24) -> bytes:
    """A picture of one colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + b"\xe0\x60\x20" * width) * height
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a tiny model that takes images."""
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "mmproj-seeing.gguf", Qwen25VisionSpec())
    model = write_model(folder / "seeing.gguf", Qwen2VlSpec(), metadata={"tokenizer.chat_template": CHAT_TEMPLATE})
    with Served("-m", str(model), "-np", "2") as server:
        yield server


def drop(chat: ChatPage, name: str, kind: str, data: bytes, *, event: str = "drop") -> None:
    """Drop a file on the page, or paste it into the composer."""
    chat.page.evaluate(
        """([event, name, kind, data]) => {
            const bytes = Uint8Array.from(atob(data), one => one.charCodeAt(0));
            const carried = new DataTransfer();
            carried.items.add(new File([bytes], name, { type: kind }));
            const made = event === "drop"
                ? new DragEvent("drop", { dataTransfer: carried, bubbles: true, cancelable: true })
                : new ClipboardEvent("paste", { clipboardData: carried, bubbles: true, cancelable: true });
            document.querySelector("form.composer textarea").dispatchEvent(made);
        }""",
        [event, name, kind, base64.b64encode(data).decode()],
    )


# ---- images and sound


def test_model_without_eyes_says_so(served: Served, open_page: Open) -> None:
    """An image for a model that takes none is refused with a sentence that names the way out, and the text is kept."""
    chat = open_page(served.url)
    chat.page.get_by_text("slots").first.wait_for()  # the model is known
    chat.composer.fill("What is this?")
    drop(chat, "a.png", "image/png", png())
    alert = chat.page.locator("form.composer").get_by_role("alert")
    assert "takes no images" in alert.inner_text()
    assert "--mmproj" in alert.inner_text()
    assert chat.composer.input_value() == "What is this?"


@pytest.mark.parametrize("how", ["drop", "paste", "button"])
def test_image_is_sent_and_shown(seeing: Served, open_page: Open, how: str) -> None:
    """An image that is dropped, pasted or chosen goes to the model as data, and stays in the conversation."""
    chat = open_page(seeing.url)
    chat.set_parameters(Max_tokens="4")
    if how == "button":
        chat.page.get_by_label("Files", exact=True).set_input_files(
            {"name": "a.png", "mimeType": "image/png", "buffer": png()}
        )
    else:
        drop(chat, "a.png", "image/png", png(), event=how)
    chat.page.get_by_role("button", name="Remove a.png").wait_for()
    with chat.page.expect_request("**/v1/chat/completions") as sent:
        chat.send("What is this?")
    part = sent.value.post_data_json["messages"][0]["content"][0]
    assert part["image_url"]["url"] == "data:image/png;base64," + base64.b64encode(png()).decode()
    chat.wait_done()
    chat.page.reload()
    picture = chat.messages.first.get_by_role("img", name="a.png")
    picture.wait_for()
    assert picture.evaluate("image => image.decode().then(() => image.naturalWidth)") == 24


def test_sound_is_sent_and_can_be_heard(open_page: Open, tmp_path: Path) -> None:
    """A sound that is dropped goes to a model that hears as data, and stays in the conversation; an image is refused there."""
    write_model(tmp_path / "mmproj-hearing.gguf", UltravoxAudioSpec())
    spec = LlamaSpec(n_ctx_train=2048)
    model = write_model(tmp_path / "hearing.gguf", spec, metadata={"tokenizer.chat_template": CHAT_TEMPLATE})
    sound = wav_file(int16(tone(1.0)))
    with Served("-m", str(model), "-np", "2", "-c", "2048") as server:
        chat = open_page(server.url)
        chat.set_parameters(Max_tokens="4")
        drop(chat, "a.png", "image/png", png())
        chat.page.locator("form.composer").get_by_role("alert").filter(has_text="takes no images").wait_for()
        drop(chat, "a.wav", "audio/x-wav", sound)
        chat.page.get_by_role("button", name="Remove a.wav").wait_for()
        with chat.page.expect_request("**/v1/chat/completions") as sent:
            chat.send("What is said?")
        part = sent.value.post_data_json["messages"][0]["content"][0]
        assert part == {
            "type": "input_audio",
            "input_audio": {"data": base64.b64encode(sound).decode(), "format": "wav"},
        }
        chat.wait_done()
        chat.page.reload()
        player = chat.messages.first.locator("audio")
        player.wait_for()
        player.evaluate("player => { player.load(); }")
        chat.page.wait_for_function("player => player.duration > 0.9", arg=player.element_handle())


def test_file_that_is_no_image_is_refused(seeing: Served, open_page: Open) -> None:
    """A file that only calls itself an image or a PDF, or is of another kind, is refused by its name."""
    chat = open_page(seeing.url)
    chat.composer.wait_for()
    alert = chat.page.locator("form.composer").get_by_role("alert")
    drop(chat, "broken.png", "image/png", b"no picture")
    alert.filter(has_text="broken.png cannot be read as an image").wait_for()
    drop(chat, "letter.pdf", "application/pdf", b"%PDF")
    alert.filter(has_text="letter.pdf cannot be read as a PDF").wait_for()
    drop(chat, "letter.bin", "", b"\xff\x00\xfe")
    alert.filter(has_text="letter.bin is neither an image, audio, a PDF nor text").wait_for()


def pdf(text: str, num_pages: int = 1) -> bytes:
    """A PDF whose pages have the same line."""
    stream = f"BT /F1 24 Tf 72 720 Td ({text}) Tj ET".encode()
    kids = b" ".join(b"%d 0 R" % number for number in range(5, 5 + num_pages))
    page = b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents 3 0 R/Resources<</Font<</F1 4 0 R>>>>>>"
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[%s]/Count %d>>" % (kids, num_pages),
        b"<</Length %d>>stream\n%s\nendstream" % (len(stream), stream),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
        *[page] * num_pages,
    ]
    body, places = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(body))
        body += b"%d 0 obj%s endobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    size = len(objects) + 1
    return body + b"xref\n0 %d\n0000000000 65535 f \n%strailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % (
        size,
        table,
        size,
        len(body),
    )


def test_long_pdf_is_refused(served: Served, open_page: Open) -> None:
    """Its pages are counted before they are read."""
    chat = open_page(served.url)
    chat.composer.wait_for()
    drop(chat, "long.pdf", "application/pdf", pdf("x", 5001))
    alert = chat.page.locator("form.composer").get_by_role("alert")
    alert.filter(has_text="long.pdf has more than 4,000,000 characters or 5,000 pages").wait_for()


def test_text_code_and_pdf_are_sent_as_text(served: Served, open_page: Open) -> None:
    """Files are read in the page, shown with their tokens, and stand before the message; a long paste is a file, too."""
    chat = open_page(served.url)
    chat.set_parameters(Max_tokens="4")
    chips = chat.page.locator("form.composer .chips")
    drop(chat, "letter.pdf", "application/pdf", pdf("Dear fox, 17"))
    wait_holds(chips, re.compile(r"letter\.pdf\d+ tokens"))
    drop(chat, "a.py", "text/x-python", b"x = 1\n")
    wait_holds(chips, re.compile(r"a\.py\d+ tokens"))
    chat.composer.evaluate(
        """field => {
            const carried = new DataTransfer();
            carried.setData("text/plain", "word ".repeat(1500));
            field.dispatchEvent(new ClipboardEvent("paste", { clipboardData: carried, bubbles: true, cancelable: true }));
        }"""
    )
    wait_holds(chips, re.compile(r"pasted\.txt[\d,]+ tokens, more than the context"))
    chat.page.get_by_role("button", name="Put pasted.txt into the message").click()
    assert chat.composer.input_value() == "word " * 1500
    chat.composer.fill("What is this?")
    with chat.page.expect_request("**/v1/chat/completions") as sent:
        chat.composer.press("Enter")
    content = sent.value.post_data_json["messages"][0]["content"]
    assert content == (
        '<file name="letter.pdf">\nDear fox, 17\n</file>\n\n<file name="a.py">\nx = 1\n</file>\n\nWhat is this?'
    )
    chat.wait_done()
    chat.page.reload()
    file = chat.messages.first.locator("details.file").last
    file.locator("summary").click()
    wait_holds(file.locator("pre"), "x = 1")


# ---- keys


def test_key_is_asked_for_and_kept_in_the_session(open_page: Open) -> None:
    """Without a key nothing is shown; a wrong one is refused, the right one works, is kept for the tab, and can be forgotten."""
    with Served("--api-key", KEY) as server:
        chat = open_page(server.url)
        dialog = chat.page.get_by_role("dialog", name="API key")
        assert "asks for an API key" in dialog.inner_text()
        dialog.get_by_label("Key").fill("wrong")
        dialog.get_by_role("button", name="Use this key").click()
        chat.page.get_by_text("does not accept this API key").wait_for()
        dialog.get_by_label("Key").fill(KEY)
        dialog.get_by_label("Key").press("Enter")
        dialog.wait_for(state="detached")
        chat.set_parameters(Max_tokens="5")
        chat.send("Hello.")
        chat.wait_done()
        chat.page.reload()
        chat.wait_done()
        chat.page.get_by_text("paceline-demo").first.wait_for()
        wait_count(dialog, 0)
        stored = chat.page.evaluate("[JSON.stringify(localStorage), document.cookie]")
        assert not any(KEY in item for item in stored)
        chat.page.get_by_role("button", name="Forget the API key").click()
        dialog.wait_for()


# ---- hostile text


def test_hostile_text_neither_runs_nor_loads_anything(served: Served, open_page: Open, tmp_path: Path) -> None:
    """Markdown with scripts, drawings, images and links is shown as text; only links of the web are links."""
    chat = open_page(served.url)
    chat.import_file(conversation_file(tmp_path / "c.json", [HOSTILE, HOSTILE], title="<img src=x onerror=alert(1)>"))
    chat.listed.first.get_by_role("link").click()
    body = chat.replies.first.locator(".markdown")
    body.get_by_role("link", name="good").wait_for()
    chat.page.wait_for_timeout(500)
    assert chat.page.title() != "run"
    assert body.locator("script, img, svg:not(.icon), iframe, style, link, object, form").count() == 0
    hrefs = body.get_by_role("link").evaluate_all("links => links.map(link => link.getAttribute('href'))")
    assert sorted(hrefs) == ["http://127.0.0.1:1/pixel.png", "https://example.org/page"]
    wait_holds(body, "<script>")
    assert chat.failures == []


# ---- long conversations


def test_two_thousand_messages_do_not_freeze_the_page(served: Served, open_page: Open, tmp_path: Path) -> None:
    """A conversation of 2,000 messages is there at once, can be written in and scrolled, and no single task takes a second."""
    text = "Some **text** with `code` and a list:\n\n- one\n- two\n\n```python\ndef f(x):\n    return x + 1\n```\n"
    chat = open_page(served.url)
    chat.import_file(
        conversation_file(tmp_path / "c.json", [f"Number {number}: {text}" for number in range(2000)], "Long")
    )
    chat.page.evaluate(
        """() => {
            window.longest = 0;
            new PerformanceObserver(list => {
                for (const one of list.getEntries()) window.longest = Math.max(window.longest, one.duration);
            }).observe({ type: "longtask" });
        }"""
    )
    chat.listed.first.get_by_role("link").click()
    chat.page.get_by_text("Number 1999:").wait_for()
    chat.send("More.")
    chat.wait_state("failed")  # no model has so much context: it is said
    chat.page.wait_for_function("() => document.querySelectorAll('article').length === 2002", timeout=100_000)
    assert chat.page.evaluate("window.longest") < 1000
    chat.page.get_by_role("region", name="Conversation").evaluate("region => region.scrollTo(0, 0)")
    chat.page.get_by_text("Number 0:").first.wait_for()
    assert chat.messages.first.evaluate("one => one.getBoundingClientRect().top") < 200


# ---- keyboard, screen readers, colours, narrow screens


def test_everything_is_reached_by_the_keyboard(served: Served, open_page: Open) -> None:
    """The first stop skips to the view; a message is written, sent and followed without a pointer."""
    chat = open_page(served.url)
    page = chat.page
    chat.composer.wait_for()
    page.wait_for_timeout(300)  # the composer has taken the focus
    page.evaluate("document.body.tabIndex = -1; document.body.focus()")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the view"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    for _ in range(3):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.getAttribute('aria-label')") == "Settings of this conversation":
            break
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Settings").wait_for()
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Settings of this conversation"
    for _ in range(20):  # past the prompts of an empty conversation
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.getAttribute('aria-label')") == "Message":
            break
    page.keyboard.type("Hello.")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("Who are you?")
    page.keyboard.press("Enter")
    chat.wait_done()
    assert chat.messages.first.locator(".user-text").text_content() == "Hello.\nWho are you?"
    wait_count(page.locator("[role=status].off-screen", has_text="Reply: "), 1)


@pytest.mark.parametrize("view", ["", "#/engine"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessibility_rules_hold(served: Served, open_page: Open, view: str, scheme: str) -> None:
    """The checker axe finds no violation of WCAG 2 A and AA in a view, light or dark."""
    chat = open_page(served.url)
    chat.page.emulate_media(color_scheme=scheme)
    chat.set_parameters(Max_tokens="20")
    chat.send("Tell me a story about a fox.")
    chat.wait_done()
    chat.messages.first.hover()
    if view:
        chat.open(view)
        chat.page.get_by_text("live", exact=True).wait_for()
    else:
        chat.settings()
    assert _violations(chat) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessibility_rules_hold_for_what_is_opened(served: Served, open_page: Open, scheme: str) -> None:
    """Likewise for an empty conversation, files, code, other settings, the tokens of the context, keys and the palette."""
    chat = open_page(served.url)
    page = chat.page
    page.emulate_media(color_scheme=scheme)
    page.get_by_text("Use it from code").click()
    assert _violations(chat) == []
    chat.set_parameters(Max_tokens="5")
    drop(chat, "a.py", "text/x-python", b"x = 1\n")
    page.get_by_role("button", name="Remove a.py").wait_for()
    chat.send("What is this?")
    chat.wait_done()
    chat.messages.first.locator("details.file summary").click()
    chat.replies.first.get_by_role("button", name="Retry with other settings").click()
    page.get_by_role("button", name="Context: ").click()
    page.get_by_text("Your messages").wait_for()
    assert _violations(chat) == []
    page.get_by_role("button", name="Close", exact=True).click()
    for key in ("Control+k", "?"):
        page.get_by_role("region", name="Conversation").focus()
        page.keyboard.press(key)
        page.get_by_role("dialog").wait_for()
        assert _violations(chat) == []
        page.keyboard.press("Escape")
        wait_count(page.get_by_role("dialog"), 0)


def _violations(chat: ChatPage) -> list[tuple[str, list[str]]]:
    """Rules of WCAG 2 A and AA that the page breaks now, with elements; skips the test without the checker."""
    axe = WEB / "node_modules" / "axe-core" / "axe.min.js"
    if not axe.is_file():
        pytest.skip(f"needs {axe}: npm ci in web/")
    chat.page.evaluate(axe.read_text())
    result = chat.page.evaluate("axe.run({ runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa'] })")
    return [
        (violation["id"], [node["html"][:200] for node in violation["nodes"]]) for violation in result["violations"]
    ]


def test_colours_follow_the_system_or_the_switch(served: Served, open_page: Open) -> None:
    """The page is dark if the system is, and otherwise as chosen, also after it is loaded again."""
    chat = open_page(served.url)
    page = chat.page

    def background() -> int:
        page.wait_for_timeout(50)
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return int(colour.partition("(")[2].partition(",")[0])

    page.emulate_media(color_scheme="light")
    assert background() > 200
    page.emulate_media(color_scheme="dark")
    assert background() < 60
    page.get_by_role("button", name="Colours of the system").click()
    assert background() > 200
    page.reload()
    page.get_by_role("button", name="Light colours").wait_for()
    assert background() > 200


@pytest.mark.parametrize("view", ["", "#/engine"])
def test_narrow_screen_has_everything_in_reach(served: Served, open_page: Open, view: str) -> None:
    """At 360 pixels nothing is wider than the screen, and the conversations are behind a button."""
    chat = open_page(served.url, view, width=360, height=700)
    page = chat.page
    if not view:
        chat.set_parameters(Max_tokens="40")
        chat.send("Tell me a story about a fox.")
        chat.wait_done()
    assert page.evaluate("document.scrollingElement.scrollWidth") <= 360
    wide = page.evaluate(
        """[...document.querySelectorAll('main *')].filter(one => {
            const box = one.getBoundingClientRect();
            return box.width && box.right > 361 && !one.closest('.table');
        }).map(one => one.outerHTML.slice(0, 100))"""
    )
    assert wide == []
    menu = page.get_by_role("button", name="Conversations", exact=True)
    menu.click()
    page.get_by_role("link", name="New conversation").click()
    page.get_by_text("Talk to").wait_for()
    assert menu.get_attribute("aria-expanded") == "false"
