"""Entries and files of models: valid files are read, errors are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InvalidParams, InvalidType
from paceline.model_manager import ModelEntry, read_models_file
from paceline.model_manager.model_settings import byte_count, manager_settings

GOOD = """
memory_budget = "12 GiB"
max_loaded = 2
wait_timeout_s = 60

[defaults]
num_slots = 4
stop_timeout_s = 3

[models.small]
model = "small.gguf"
aliases = ["s", "default"]
pinned = true
num_slots = 2

[models."user/big:Q4"]
model = "hf:user/big:Q4"
n_ctx = 16384
unload_idle_s = 60.5
isolation = "thread"
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "models.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_has_settings_defaults_and_models(tmp_path: Path) -> None:
    """A model's own keys are over the defaults; paths are relative to the file."""
    found = read_models_file(written(tmp_path, GOOD))
    assert (found.memory_budget, found.max_loaded, found.wait_timeout_s, found.patience_s) == (12 << 30, 2, 60, 5.0)
    small, big = found.entries
    assert small == ModelEntry(
        name="small",
        model=str(tmp_path / "small.gguf"),
        options={"num_slots": 2, "isolation": "process"},
        aliases=["s", "default"],
        pinned=True,
        stop_timeout_s=3,
    )
    assert (big.name, big.model, big.unload_idle_s) == ("user/big:Q4", "hf:user/big:Q4", 60.5)
    assert big.options == {"num_slots": 4, "n_ctx": 16384, "isolation": "thread"}


def test_arguments_are_over_the_file(tmp_path: Path) -> None:
    """The given values."""
    found = manager_settings(written(tmp_path, GOOD), memory_budget="1 GB", max_loaded=0, patience_s=None)
    assert (found.memory_budget, found.max_loaded, len(found.entries)) == (10**9, 0, 2)
    assert manager_settings(found, memory_budget=None) == found
    assert manager_settings(found, max_loaded=2).max_loaded == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[models", "is not a TOML file"),
        ("max_laoded = 3", "did you mean 'max_loaded'"),
        ("[model.a]", r"unknown table \[model\]"),
        ("max_loaded = -1", "max_loaded must be an integer >= 0, not -1"),
        ('memory_budget = "many"', "memory_budget must be a number of bytes"),
        ("memory_budget = 0", "memory_budget must be an integer >= 1, not 0"),
        ("models = 3", r"\[models\] must be a table"),
        ("[models]\na = 3", r"\[models.a\] must be a table"),
        ('[models.a]\npinned = "yes"', r"\[models.a\]: model 'a': pinned must be True or False, not 'yes'"),
        ("[models.a]\naliases = 'b'", r"\[models.a\]: model 'a': aliases must be a list"),
        ("[models.a]\npinned = true\nunload_idle_s = 5", "contradicts pinned"),
        ("[models.a]\nprogress = 1", "progress is set by the manager"),
        ("[defaults]\naliases = ['b']", r"\[defaults\]: aliases are of one model"),
    ],
)
def test_an_error_is_named_with_file_table_and_key(tmp_path: Path, text: str, words: str) -> None:
    """One line has the place of the error and the allowed values."""
    with pytest.raises(InvalidParams, match=words) as caught:
        read_models_file(written(tmp_path, text))
    assert "models.toml" in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """With the system's reason."""
    with pytest.raises(InvalidParams, match=r"none\.toml cannot be read: No such file"):
        read_models_file(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": ""}, "name of a model is empty"),
        ({"name": 3}, "name must be a str"),
        ({"name": "a", "model": 5}, "model 'a': model must be a path"),
        ({"name": "a", "options": [1]}, "options must be a mapping"),
        ({"name": "a", "aliases": [""]}, "an alias is empty"),
        ({"name": "a", "stop_timeout_s": -1}, "stop_timeout_s must be"),
        ({"name": "a", "unload_idle_s": 0}, "unload_idle_s must be"),
    ],
)
def test_an_entry_is_checked_when_it_is_made(fields: dict[str, Any], words: str) -> None:
    """The model's name is in the message."""
    with pytest.raises(InvalidParams, match=words):
        ModelEntry(**fields)


def test_models_must_be_entries() -> None:
    """Paths in a list are not entries."""
    with pytest.raises(InvalidType, match="ModelEntry"):
        manager_settings(["a.gguf"])  # type: ignore[list-item]
    with pytest.raises(InvalidType, match="entries or the path"):
        manager_settings(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "found"), [(5, 5), ("5", 5), ("1 KiB", 1024), ("1.5GiB", 3 << 29), ("2 mb", 2_000_000), (" 7 B ", 7)]
)
def test_bytes_may_have_a_unit(given: object, found: int) -> None:
    """Of two or of ten."""
    assert byte_count("budget", given) == found


def test_no_repr_shows_a_token() -> None:
    """The token of the hub is among the options of a model."""
    entry = ModelEntry(name="a", model="a.gguf", options={"hf_token": "hf_secret"})
    assert "a.gguf" in repr(entry) and "hf_secret" not in repr(entry)
