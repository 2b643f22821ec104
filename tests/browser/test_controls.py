"""Imported conversations on the built page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.browser.chat_page import ChatPage, conversation_file, wait_count
from tests.e2e.served import Served

pytestmark = [pytest.mark.browser, pytest.mark.native, pytest.mark.full]

Open = Callable[..., ChatPage]


def _imported(chat: ChatPage, tmp_path: Path, contents: list[str], title: str) -> None:
    chat.import_file(conversation_file(tmp_path / f"{title}.json", contents, title))
    chat.listed.filter(has_text=title).get_by_role("link").click()
    chat.messages.first.wait_for()


def test_formulas_and_long_code_are_shown_whole(served: Served, open_page: Open, tmp_path: Path) -> None:
    """A formula is MathML with all its characters under the page's policy, and code has no scroll area of its own height."""
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
    heights = chat.page.locator(".code pre").evaluate("pre => [pre.scrollHeight, pre.clientHeight]")
    assert heights[0] == heights[1]
