"""Models by name: references, the files of a repository, downloads, and the caches of this machine.

Every loader of a model calls `local_model`. Libraries of the network are imported when they are needed.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from paceline.hub.caches import LocalModel
from paceline.hub.download import download_bar
from paceline.hub.file_choice import Fits, ModelFiles
from paceline.hub.locate import Locator, fits_into_memory
from paceline.hub.references import (
    HubReference,
    ModelReference,
    OllamaReference,
    UrlReference,
    check_file,
    check_is_path,
    hub_settings,
    is_reference,
    parse_hub_reference,
    parse_reference,
)

__all__ = [
    "HubReference",
    "LocalModel",
    "ModelFiles",
    "ModelReference",
    "OllamaReference",
    "UrlReference",
    "check_file",
    "check_is_path",
    "is_reference",
    "local_model",
    "parse_hub_reference",
    "parse_reference",
]

_log = logging.getLogger("paceline.hub")


def local_model(  # noqa: PLR0913 - the options of a download, all by keyword
    model: str | ModelReference,
    *,
    offline: bool = False,
    hf_token: str | None = None,
    with_projector: bool = False,
    target: Path | None = None,
    fits: Fits = fits_into_memory,
    cancel: threading.Event | None = None,
    stream: TextIO | None = None,
    note: Callable[[str], object] = _log.info,
) -> LocalModel:
    """Find the files of a model, and download those that are missing.

    Args:
        model: Its name, such as "hf:user/repo:Q4_K_M", "https://host/model.gguf" or "ollama:llama3.2".
        offline: Whether to search the caches alone; HF_HUB_OFFLINE=1 does the same.
        hf_token: A token of the Hugging Face Hub; None: HF_TOKEN, or the token of `hf auth login`.
        with_projector: Whether to download the projector for images, too.
        target: The path for the file of a URL; None: in paceline's cache.
        fits: Decides whether a model fits into memory, if no quantisation is named and the repository has no Q4_K_M.
        cancel: An event that ends the download; the bytes that arrived are kept.
        stream: The terminal that shows the progress; None: stderr.
        note: Receives a line about each choice; by default the log.

    Returns:
        The paths of the files.

    Raises:
        InvalidParams: The name is not valid.
        ModelNotFound: There is no such repository, file or quantisation.
        AccessDenied: The repository is gated or private, and the token may not read it.
        HubUnavailable: The hub cannot be reached.
        DiskFull: The disk has no space.
        DownloadError: The server sent another file than it announced.
        Aborted: `cancel` was set.
    """
    reference = parse_reference(model) if isinstance(model, str) else model
    settings = hub_settings(token=hf_token, offline=offline)
    with download_bar(sys.stderr if stream is None else stream, note) as observer:
        locator = Locator(
            settings=settings,
            observer=observer,
            cancel=threading.Event() if cancel is None else cancel,
            fits=fits,
            with_projector=with_projector,
        )
        return locator.locate(reference, target)
