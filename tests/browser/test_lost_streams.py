"""Streams on the built page that lose their connection or server."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.browser.chat_page import ChatPage, wait_count, wait_holds
from tests.browser.relay import Relay
from tests.e2e.served import Served

pytestmark = [pytest.mark.browser, pytest.mark.native, pytest.mark.full]

Open = Callable[..., ChatPage]

STREAM_BYTES = 100_000  # more than the characters that a test waits for take, and less than a reply of 3,000 tokens


def test_lost_connection_is_said_and_the_stream_goes_on_without_a_gap(endless: Served, open_page: Open) -> None:
    """While the server cannot be reached the page says so; then the same stream is read on from its last byte."""
    with Relay(endless.url, stream_bytes=STREAM_BYTES) as relay:
        chat = open_page(relay.url)
        chat.set_parameters(Max_tokens="3000")
        chat.send("Write.")
        begun = chat.wait_stored(200)
        relay.block()
        chat.page.get_by_text("The connection is lost").wait_for()
        during = chat.stored()
        relay.unblock()
        chat.wait_done()
        chat.page.wait_for_timeout(200)
        assert chat.stored().startswith(during)
        assert during.startswith(begun)
        wait_holds(chat.replies.last, "without a gap")
        wait_holds(chat.replies.last, "3,000 tokens")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "ended"])
def test_restarted_server_continues_the_reply(how: signal.Signals, endless_model: Path, open_page: Open) -> None:
    """A restarted server has lost its stream: the page reports it, and the reply goes on at the same place."""
    flags = ("-m", str(endless_model), "-c", "32768", "-np", "4", "--drain-s", "0.2")
    with Served(*flags) as first, Relay(first.url, stream_bytes=STREAM_BYTES) as relay:
        chat = open_page(relay.url)
        chat.set_parameters(Max_tokens="3000")
        chat.send("Write.")
        chat.wait_stored(200)
        first.signal(how)
        first.code()
        relay.block()
        chat.page.get_by_text(re.compile("The connection is lost|Waiting:")).first.wait_for()
        before = chat.stored()
        with Served(*flags) as second:
            relay.unblock(second.url)
            chat.wait_done()
            wait_holds(chat.replies.last, "went on from where it was")
            assert "started again" not in (chat.replies.last.text_content() or "")
            second.assert_idle()
            assert chat.stored().startswith(before)
            assert len(chat.stored()) > len(before)
            wait_holds(chat.replies.last, "3,000 tokens")


def test_server_that_is_not_there_is_said_at_once(endless: Served, open_page: Open) -> None:
    """A message to a server that cannot be reached fails with a sentence, and can be sent again when it is back."""
    with Relay(endless.url) as relay:
        chat = open_page(relay.url)
        chat.set_parameters(Max_tokens="5")
        relay.block()
        chat.send("Write.")
        chat.wait_state("failed")
        wait_holds(chat.replies.last.get_by_role("alert"), "cannot be reached")
        relay.unblock()
        chat.replies.last.get_by_role("button", name="Try again").click()
        chat.wait_done()
        wait_count(chat.page.locator(".branches"), 0)


def test_stop_while_the_connection_is_lost_frees_the_slot_later(endless: Served, open_page: Open) -> None:
    """A reply without a server can be stopped: its text stays, and the request is ended once the server is back."""
    with Relay(endless.url) as relay:
        chat = open_page(relay.url)
        chat.send("Write.")
        chat.wait_text(100)
        relay.block()
        chat.page.get_by_text("The connection is lost").wait_for()
        before = chat.stored()
        chat.page.get_by_role("button", name="Stop the reply").click()
        chat.wait_state("stopped")
        assert chat.stored().startswith(before)
        relay.unblock()
        endless.assert_idle()
