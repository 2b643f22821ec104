"""The disk, as a resolution sees it. Blocking; any thread."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import ModelLoadError


class Disk:
    """Real files. See `Files`."""

    def read(self, path: Path) -> bytes:
        """The bytes of a file, which may be a pipe. Raises `OSError`."""
        return path.read_bytes()

    def is_file(self, path: Path) -> bool:
        """Whether there is something to open."""
        return path.exists() and not path.is_dir()

    def is_folder(self, path: Path) -> bool:
        """Whether there is such a folder."""
        return path.is_dir()

    def trained_context(self, model: Path | None) -> int:
        """Tokens that a model was trained with, from its file. Raises `ModelLoadError` where that is no model or does not say."""
        from paceline.demo import demo_model_path
        from paceline.runtime.gguf_file import read_gguf

        path = demo_model_path() if model is None else model
        metadata = read_gguf(path).metadata
        try:
            architecture = metadata[b"general.architecture"].value
            found = metadata[architecture + b".context_length"].value
        except (KeyError, TypeError):
            found = None
        if not isinstance(found, int) or found < 1:
            raise ModelLoadError(f"{path} does not say with how many tokens it was trained; give -c a number")
        return found
