"""One file to download, where it goes, and who is shown how far it is. Standard library only."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from paceline.hub.references import visible

_log = logging.getLogger("paceline.hub")


class DownloadObserver(Protocol):
    """Shows the progress of downloads. Called on the thread that downloads."""

    def begin(self, name: str, total: int | None) -> None:
        """Begin a file; total: its bytes, where known."""

    def reached(self, num_bytes: int) -> None:
        """Set the bytes that have arrived so far, those of earlier attempts included."""

    def end(self) -> None:
        """End the file, whether it is complete or not."""

    def note(self, text: str) -> None:
        """Show a line about what was chosen or what is being waited for."""


class QuietObserver:
    """Shows nothing; notes go to the log."""

    def begin(self, name: str, total: int | None) -> None:
        """See `DownloadObserver`."""
        _log.info("downloading %s (%s bytes)", visible(name), "unknown" if total is None else total)

    def reached(self, num_bytes: int) -> None:
        """See `DownloadObserver`."""

    def end(self) -> None:
        """See `DownloadObserver`."""

    def note(self, text: str) -> None:
        """See `DownloadObserver`."""
        _log.info("%s", visible(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """A file to download.

    part: where arriving bytes are kept until the file is complete. lock: a file that other programs lock for this download
    too. size, sha256: as announced, None where not known. headers: for the first request, not for redirects to other hosts.
    keeps_tag: whether the server's ETag is kept beside the file, for a URL whose file may change. replaces: whether a target
    that is there is replaced.
    """

    url: str
    target: Path
    part: Path
    lock: Path
    name: str
    size: int | None = None
    sha256: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    keeps_tag: bool = False
    replaces: bool = False

    @property
    def part_tag(self) -> Path:
        """Where the ETag of the part is kept."""
        return tag_file(self.part)


def tag_file(path: Path) -> Path:
    """Return the file that keeps the ETag of a file."""
    return path.with_name(path.name + ".etag")
