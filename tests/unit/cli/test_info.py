"""A model's facts from its file's metadata."""

from __future__ import annotations

import gguf
import pytest

from paceline.cli.model_commands import _number, _window
from paceline.runtime.quantisation import FILE_TYPES


def test_file_types_have_the_names_of_the_format() -> None:
    """Every name agrees with the gguf package's, as far as that knows it."""
    known = {entry.value: entry.name.removeprefix("ALL_").removeprefix("MOSTLY_") for entry in gguf.LlamaFileType}
    known.pop(gguf.LlamaFileType.GUESSED.value)
    assert {number: FILE_TYPES.get(number) for number in known} == known


@pytest.mark.parametrize(("text", "number"), [("12", 12), (None, None), ("[1, 2]", None)])
def test_invalid_count_is_left_out(text: str | None, number: int | None) -> None:
    """Some models have a list, one a layer."""
    assert _number(text) == number


@pytest.mark.parametrize(
    ("architecture", "declared", "window"),
    [("llama", None, 0), ("gemma3", 512, 512), ("gemma2", None, 4096), ("llama4", 0, 0), ("phi3", 2048, 0)],
)
def test_the_window_is_the_one_that_llama_cpp_uses(architecture: str, declared: int | None, window: int) -> None:
    """The file's, unless the architecture has its own way."""
    assert _window(architecture, declared) == window
