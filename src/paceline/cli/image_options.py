"""Options of `generate` and `chat` about images and audio: which files, which projector, how many tokens an image may take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.errors import InvalidParams, PacelineError

if TYPE_CHECKING:
    from paceline.media import Attachment, Audio, Image

_seeing = partial(typer.Option, rich_help_panel="Images and audio")

ImageFiles = Annotated[
    list[Path] | None,
    _seeing(
        "--image",
        metavar="FILE",
        help="An image before the text; may be repeated. If no model is named, a demo model for images is loaded.",
        show_default=False,
    ),
]
AudioFiles = Annotated[
    list[Path] | None,
    _seeing(
        "--audio",
        metavar="FILE",
        help="Audio before the text and after the images; may be repeated.",
        show_default=False,
    ),
]
Mmproj = Annotated[
    Path | None,
    _seeing("--mmproj", metavar="FILE", help="The model's projector.", show_default="the one beside the model"),
]
NoMmproj = Annotated[bool, _seeing("--no-mmproj", help="Load no projector: the model takes no images and no audio.")]
NoMmprojOffload = Annotated[bool, _seeing("--no-mmproj-offload", help="Keep the projector off the GPU.")]
ImageMinTokens = Annotated[
    int | None,
    _seeing("--image-min-tokens", metavar="N", help="Minimum of tokens for an image.", show_default="the projector's"),
]
ImageMaxTokens = Annotated[
    int | None,
    _seeing("--image-max-tokens", metavar="N", help="Maximum of tokens for an image.", show_default="the projector's"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions:
    """Images and audio of a run, and the projector that makes embeddings of them.

    Raises `InvalidParams` where options exclude each other.
    """

    files: Sequence[Path]
    audio_files: Sequence[Path] = ()
    mmproj: Path | None
    no_mmproj: bool
    no_mmproj_offload: bool
    min_tokens: int | None
    max_tokens: int | None

    def __post_init__(self) -> None:
        given = {"--image": self.files, "--audio": self.audio_files, "--mmproj": self.mmproj}
        other = next((name for name, value in given.items() if value), None)
        if self.no_mmproj and other is not None:
            raise InvalidParams(f"--no-mmproj and {other} exclude each other; leave one of them out")

    def attachments(self) -> list[tuple[Path, Attachment]]:
        """Return all files with their images and audio. Raises as `read_image` and `read_audio`."""
        images: list[tuple[Path, Attachment]] = [(path, read_image(path, "--image")) for path in self.files]
        return images + [(path, read_audio(path, "--audio")) for path in self.audio_files]

    def model_path(self, model: str | None) -> str | Path | None:
        """Return the model to load; where none is named and there are images, the demo model that sees."""
        if model is not None or not self.files or self.mmproj is not None:
            return model
        from paceline.demo import demo_vision_model_path

        return demo_vision_model_path()

    def engine_options(self, *, takes_images_later: bool) -> dict[str, Any]:
        """Return the keywords of `LLM`. takes_images_later: so that the projector beside the model is loaded in any case."""
        beside = (
            True if self.files or self.audio_files else None if takes_images_later and not self.no_mmproj else False
        )
        return {
            "mmproj": beside if self.mmproj is None else self.mmproj,
            "mmproj_offload": not self.no_mmproj_offload,
            "image_min_tokens": self.min_tokens,
            "image_max_tokens": self.max_tokens,
        }


def read_image(path: Path, name: str) -> Image:
    """Return the image of a file, which can be decoded. name: of what the file was given to.

    Raises `InvalidParams`, naming the file, where it is none, too large or damaged.
    """
    from paceline.media import Image
    from paceline.runtime import decoded_pixels

    with _naming(path, name):
        image = Image(path)
        decoded_pixels(image)
    return image


def read_audio(path: Path, name: str) -> Audio:
    """Return the audio of a file, which can be decoded. Raises as `read_image`."""
    from paceline.media import Audio
    from paceline.runtime import decoded_samples

    with _naming(path, name):
        audio = Audio(path)
        decoded_samples(audio, audio.rate)
    return audio


@contextmanager
def _naming(path: Path, name: str) -> Iterator[None]:
    """Name option and file in errors."""
    try:
        yield
    except PacelineError as error:
        words = str(error)
        raise InvalidParams(f"{name} {words}" if str(path) in words else f"{name} {path}: {words}") from error
