"""Help, as a terminal shows it."""

from __future__ import annotations

import pytest
from tests.e2e.commands import ESCAPE, Terminal

pytestmark = pytest.mark.native


def test_help_on_a_terminal_has_colours() -> None:
    """Headings group the options."""
    screen = Terminal("generate", "--help")
    assert screen.finish() == 0
    assert ESCAPE in screen.text and "How tokens are chosen" in screen.plain_text
