"""`paceline embed`: texts to vectors."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from paceline.cli import terminal
from paceline.cli.interrupt import StopSignal, run
from paceline.cli.options import (
    DeviceOption,
    GpuLayersOption,
    ModelChoice,
    ModelOption,
    ThreadsOption,
    VerboseOption,
    arguments_or_lines,
    load,
    making_vectors,
    showing,
)
from paceline.errors import InvalidParams

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from paceline.runtime import Embedder

    Vectors = list[npt.NDArray[np.float32]]

_PREVIEW_VALUES = 4
_PREVIEW_TEXT = 32


class PoolingName(StrEnum):
    """How the tokens' vectors become one."""

    MEAN = "mean"
    CLS = "cls"
    LAST = "last"
    RANK = "rank"
    NONE = "none"


class NormalizationName(StrEnum):
    """What is done to the length of a vector."""

    L2 = "l2"
    MAX_ABS = "max_abs"
    NONE = "none"


def embed(
    texts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TEXT", help='Texts; "-" stands for the lines of stdin, as no text does.', show_default=False
        ),
    ] = None,
    *,
    model: ModelOption = None,
    n_gpu_layers: GpuLayersOption = None,
    device: DeviceOption = None,
    pooling: Annotated[
        PoolingName | None,
        making_vectors(
            help="How the vectors of the tokens become one vector; none keeps a vector for each token.",
            show_default="what the model was made for, or mean",
        ),
    ] = None,
    normalize: Annotated[
        NormalizationName, making_vectors(help="Length 1 (l2), greatest component 1 (max_abs), or as they are.")
    ] = NormalizationName.L2,
    threads: ThreadsOption = None,
    verbose: VerboseOption = False,
    as_json: Annotated[bool, showing("--json", help="One JSON object a text, also on a terminal.")] = False,
    npy: Annotated[
        Path | None,
        showing(metavar="FILE", help="Write a NumPy array, float32 (texts, dimension), instead.", show_default=False),
    ] = None,
) -> None:
    """Turn texts into vectors. On a terminal a preview is shown, else a JSON object a text, one a line."""
    if npy is not None and as_json:
        raise InvalidParams("--json and --npy exclude each other; choose one")
    if npy is not None and pooling is PoolingName.NONE:
        raise InvalidParams("--npy needs one vector for each text, and --pooling none gives one for each token")
    given = arguments_or_lines("TEXT", texts)
    choice = ModelChoice(path=model, n_gpu_layers=n_gpu_layers, devices=device, verbose=verbose)

    def work(stop: StopSignal) -> Vectors:
        from paceline.runtime import Embedder

        loaded = load(choice, stop).model
        wanted: Any = None if pooling is None else pooling.value
        with Embedder(loaded, pooling=wanted, n_threads=threads) as embedder, stop.aborting(embedder.abort):
            return _embedded(embedder, given, normalize.value)

    vectors = run(work)
    if npy is not None:
        _save(npy, vectors)
    elif as_json or not terminal.is_terminal(sys.stdout):
        _write_json(given, vectors)
    else:
        _write_preview(given, vectors)


def _embedded(embedder: Embedder, texts: list[str], normalize: Any) -> Vectors:
    if embedder.pooling == "none":
        return embedder.embed_tokens(texts, normalize=normalize)
    return list(embedder.embed(texts, normalize=normalize))


def _save(path: Path, vectors: Vectors) -> None:
    import numpy as np

    with path.open("wb") as file:  # np.save would add .npy to a name that lacks it
        np.save(file, np.stack(vectors))


def _write_json(texts: list[str], vectors: Vectors) -> None:
    for index, (text, vector) in enumerate(zip(texts, vectors, strict=True)):
        line = {"index": index, "text": text, "embedding": _plain(vector)}
        terminal.write(json.dumps(line, ensure_ascii=False) + "\n")


def _plain(vector: npt.NDArray[np.float32]) -> list[Any]:
    """Convert to lists of numbers with the digits that single precision has."""
    if vector.ndim > 1:
        return [_plain(row) for row in vector]
    return [float(str(value)) for value in vector]


def _write_preview(texts: list[str], vectors: Vectors) -> None:
    for text, vector in zip(texts, vectors, strict=True):
        terminal.write(_shortened(text), style="cyan")
        terminal.write("".join(f"\n  {line}" for line in _preview(vector)) + "\n")


def _preview(vector: npt.NDArray[np.float32]) -> Iterator[str]:
    import numpy as np

    for row in np.atleast_2d(vector):
        values = " ".join(f"{value:+.4f}" for value in row[:_PREVIEW_VALUES])
        more = " ..." if len(row) > _PREVIEW_VALUES else ""
        yield f"{len(row)} numbers, norm {cast(float, np.linalg.norm(row)):.4f}: {values}{more}"


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _PREVIEW_TEXT else line[: _PREVIEW_TEXT - 3] + "..."
