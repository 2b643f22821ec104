"""The managers' updates: entries, settings, or a file under their original arguments."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from tests.model_world import LoaderWorld

from paceline.errors import InvalidParams, InvalidType
from paceline.model_manager import AsyncModelManager, ManagerSettings, ModelEntry, ModelManager


def written(folder: Path, text: str) -> Path:
    path = folder / "models.toml"
    path.write_text(text, encoding="utf-8")
    return path


def updated(path: Path, second: str, *, is_async: bool) -> ManagerSettings:
    """The settings of a manager that was made with max_loaded=3 and a file, after the file was changed and read again."""
    loader = LoaderWorld()
    if not is_async:
        with ModelManager(path, max_loaded=3, loader=loader) as models:
            models.update(written(path.parent, second))
            return models.settings

    async def work() -> ManagerSettings:
        async with AsyncModelManager(path, max_loaded=3, loader=loader) as models:
            await models.update(str(written(path.parent, second)))
            return models.settings

    return asyncio.run(work())


@pytest.mark.parametrize("is_async", [False, True])
def test_a_file_that_is_read_again_stays_under_the_arguments(tmp_path: Path, is_async: bool) -> None:
    """Its models and its other limits are the new file's."""
    path = written(tmp_path, "max_loaded = 1\npatience_s = 1\n[models.a]\n")
    settings = updated(path, "max_loaded = 2\npatience_s = 7\n[models.b]\n", is_async=is_async)
    assert (settings.max_loaded, settings.patience_s) == (3, 7)
    assert [entry.name for entry in settings.entries] == ["b"]


def test_settings_hold_as_they_are_and_entries_leave_the_limits(tmp_path: Path) -> None:
    """So a limit that was an argument can be changed; an invalid value changes nothing."""
    with ModelManager([ModelEntry(name="a")], max_loaded=3, loader=LoaderWorld()) as models:
        models.update(replace(models.settings, max_loaded=2))
        models.update([ModelEntry(name="b")])
        with pytest.raises(InvalidType, match="not 5"):
            models.update(5)  # type: ignore[arg-type]
        with pytest.raises(InvalidParams, match="cannot be read"):
            models.update(tmp_path / "none.toml")
        assert (models.settings.max_loaded, models.names()) == (2, ["b"])
