"""The check of the built site finds URLs that a browser would load from another host."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.check_site import main

LOADS = [
    '<script src="https://cdn.example.org/a.js"></script>',
    '<link rel="stylesheet" href="//fonts.example.org/css">',
    '<img src="http://example.org/logo.png">',
    '<pre class="mermaid"><code>graph TD</code></pre>',
]
FINE = '<link rel="canonical" href="https://example.org/"><a href="https://example.org/">x</a><img src="../logo.png">'


@pytest.mark.parametrize("tag", LOADS)
def test_what_is_loaded_from_elsewhere_is_an_error(
    tag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page is named, and the exit status is 1."""
    (tmp_path / "page.html").write_text(f"<p>{FINE}{tag}</p>")
    assert main(tmp_path) == 1
    assert capsys.readouterr().out.startswith("page.html: ")


def test_links_and_own_files_are_fine(tmp_path: Path) -> None:
    """A link is followed by a click and not by itself."""
    (tmp_path / "page.html").write_text(FINE)
    assert main(tmp_path) == 0


def test_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    """A site that was not built is not a good one."""
    assert main(tmp_path) == 1
