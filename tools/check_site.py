"""Check the built documentation site: its pages load nothing from another host, and llms.txt lists all of them.

python tools/check_site.py build/site
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

_LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
_NO_LOAD = {"canonical", "prev", "next", "edit"}  # of <link>: an address, not a file to load


class _Loads(HTMLParser):
    """Collect the URLs of other hosts that a page makes a browser load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        address = given.get(_LOADED.get(tag, "")) or ""
        if address.startswith(("http:", "https:", "//")) and given.get("rel") not in _NO_LOAD:
            self.found.append(f"<{tag}> {address}")
        if "mermaid" in (given.get("class") or "").split():
            self.found.append("a mermaid diagram, whose program the theme loads from a CDN")


def index_problems(folder: Path) -> list[str]:
    """Return the errors in llms.txt: Markdown files of pages that it leaves out, and links to files that are not there."""
    index = folder / "llms.txt"
    if not index.exists():
        return ["llms.txt is missing"]
    links: list[str] = re.findall(r"\]\(<([^>]+)>\)", index.read_text(encoding="utf-8"))
    root = links[0].removesuffix("index.md") if links else ""  # the first page is the site's own
    listed = {link.removeprefix(root) for link in links}
    pages = {page.relative_to(folder).as_posix() for page in folder.rglob("*.md")}
    left_out = [f"llms.txt leaves out {name}" for name in sorted(pages - listed)]
    return left_out + [f"llms.txt links {name}, which is not there" for name in sorted(listed - pages)]


def main(folder: Path) -> int:
    """Print the errors and return the exit status."""
    pages = sorted(folder.rglob("*.html"))
    if not pages:
        print(f"{folder} has no pages; build the site first")
        return 1
    problems = index_problems(folder)
    for page in pages:
        loads = _Loads()
        loads.feed(page.read_text(encoding="utf-8"))
        problems += [f"{page.relative_to(folder)}: {found}" for found in loads.found]
    print("\n".join(problems) or f"{len(pages)} pages, nothing loaded from elsewhere, all in llms.txt")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
