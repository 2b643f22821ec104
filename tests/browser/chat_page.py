"""The page as a person uses it: texts and actions, by roles and labels."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import ConsoleMessage, Locator, Page, Request

_POLICY = re.compile("Content.Security.Policy|Refused to", re.IGNORECASE)


def wait_count(found: Locator, count: int) -> None:
    """Wait until so many are there: the page shows a change some frames after its cause."""
    from playwright.sync_api import expect

    expect(found).to_have_count(count)


def wait_holds(found: Locator, text: str | re.Pattern[str]) -> None:
    """Wait until an element holds a text, in view or not: `inner_text` has nothing of a message outside the view."""
    from playwright.sync_api import expect

    expect(found).to_contain_text(text)


class ChatPage:
    """One tab. failures: scripts that failed, requests refused by the policy, requests to other servers."""

    def __init__(self, page: Page, url: str) -> None:
        self.page, self.url = page, url
        self.failures: list[str] = []
        page.on("pageerror", lambda error: self.failures.append(f"a script failed: {error}"))
        page.on("console", self._take_message)
        page.on("request", self._take_request)
        page.on("dialog", lambda dialog: self.failures.append(f"a dialog was opened: {dialog.message}"))

    def _take_message(self, message: ConsoleMessage) -> None:
        if _POLICY.search(message.text):
            self.failures.append(message.text)

    def _take_request(self, request: Request) -> None:
        if not request.url.startswith((f"{self.url}/", "data:", "blob:")):
            self.failures.append(f"it asked {request.url}")

    def open(self, view: str = "") -> None:
        self.page.goto(f"{self.url}/{view}")

    # ---- what is there

    @property
    def composer(self) -> Locator:
        return self.page.locator("form.composer").get_by_role("textbox", name="Message")

    @property
    def replies(self) -> Locator:
        return self.page.get_by_role("article", name="Reply")

    @property
    def messages(self) -> Locator:
        return self.page.get_by_role("article", name="Your message")

    @property
    def listed(self) -> Locator:
        return self.page.locator("nav li.entry")

    def text(self, number: int = -1) -> str:
        """Return the content of a reply so far, without thinking and notes."""
        return self.replies.nth(number).locator(".message-body > .markdown").all_text_contents()[0]

    def saved_messages(self) -> list[dict[str, Any]]:
        """All messages that the browser has saved, of every conversation."""
        found: list[dict[str, Any]] = self.page.evaluate(
            """() => new Promise((resolve, reject) => {
                const opening = indexedDB.open("paceline");
                opening.onerror = () => reject(opening.error);
                opening.onsuccess = () => {
                    const reading = opening.result.transaction("messages").objectStore("messages").getAll();
                    reading.onsuccess = () => { opening.result.close(); resolve(reading.result); };
                };
            })"""
        )
        return found

    def stored(self) -> str:
        """The content of the last reply of this conversation as it is saved, Markdown and all."""
        conversation = self.conversation().removeprefix("/chat/")
        replies = [
            message
            for message in self.saved_messages()
            if (message["conversation"], message["role"]) == (conversation, "assistant")
        ]
        return str(max(replies, key=lambda reply: reply["createdAt"])["content"])

    def wait_stored(self, at_least: int) -> str:
        """Wait until so many characters of the last reply are saved; return them."""
        self.wait_text(1)
        while len(content := self.stored()) < at_least:
            self.page.wait_for_timeout(50)
        return content

    def conversation(self) -> str:
        """The address of the conversation that is open."""
        return self.page.url.partition("#")[2]

    # ---- what is done

    def send(self, text: str) -> None:
        self.composer.fill(text)
        self.composer.press("Enter")

    def wait_done(self, number: int = -1) -> None:
        """Wait until a reply is whole."""
        self.wait_state("done", number)

    def wait_state(self, state: str, number: int = -1) -> None:
        from playwright.sync_api import expect

        expect(self.replies.nth(number)).to_have_attribute("data-state", state, timeout=100_000)

    def wait_text(self, at_least: int, number: int = -1) -> str:
        """Wait until a reply has so many characters of content; return them."""
        body = self.replies.nth(number).locator(".message-body > .markdown")
        body.wait_for()
        self.page.wait_for_function(
            "([element, length]) => element.textContent.length >= length",
            arg=[body.element_handle(), at_least],
            timeout=100_000,
        )
        return self.text(number)

    def set_parameters(self, **values: str) -> None:
        """Set parameters by their labels' words, with _ for spaces, and close the settings."""
        panel = self.settings()
        for label, value in values.items():
            field = panel.get_by_label(label.replace("_", " "), exact=True)
            if field.evaluate("element => element.tagName") == "SELECT":
                field.select_option(value)
            else:
                field.fill(value)
        self.page.get_by_role("button", name="Close the settings").click()

    def settings(self) -> Locator:
        """Open the settings with all their groups; return the panel."""
        self.page.get_by_role("button", name="Settings of this conversation").click()
        panel = self.page.get_by_role("complementary", name="Settings of this conversation")
        panel.get_by_label("Max tokens", exact=True).wait_for(state="attached")
        panel.evaluate("panel => panel.querySelectorAll('details').forEach(one => { one.open = true })")
        return panel

    def import_file(self, path: Path) -> None:
        self.page.get_by_label("File to import").set_input_files(path)


def conversation_file(path: Path, contents: list[str], title: str = "Imported") -> Path:
    """A file to import: one conversation in which user and assistant take turns."""
    messages: list[dict[str, Any]] = [
        {
            "id": str(number),
            "parent": str(number - 1) if number else None,
            "role": "assistant" if number % 2 else "user",
            "content": content,
            "createdAt": number,
            "state": "done",
        }
        for number, content in enumerate(contents)
    ]
    one = {"conversation": {"title": title, "chosen": {}}, "messages": messages}
    path.write_text(json.dumps({"format": "paceline-conversations", "version": 1, "conversations": [one]}))
    return path
