"""All models of a router: llama-server's presets, folder and caches, and the models of a TOML file. Blocking; any thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from paceline.hub import is_reference, parse_reference
from paceline.model_manager import ManagerSettings, ModelEntry, read_models_file
from paceline.server.flags import ModelPreset, ModelPresets
from paceline.server.flags.presets import check_names
from paceline.server.settings import ServerSettings

_OF_THE_SERVER: Final = ("chat_template", "offline", "hf_token")  # options of an entry that are no engine's


@dataclass(frozen=True, slots=True)
class FoundPresets:
    """The models by their names, and the options of their manager, without entries."""

    presets: Mapping[str, ModelPreset]
    limits: ManagerSettings


class PresetSources:
    """Where models come from. settings: the server's, as resolved."""

    def __init__(self, settings: ServerSettings, presets: ModelPresets) -> None:
        self._settings, self._presets = settings, presets

    @property
    def _toml(self) -> Path | None:
        path = self._settings.models_preset
        return path if path is not None and path.suffix.lower() == ".toml" else None

    def read(self) -> FoundPresets:
        """Return all models, one of each name, and the limits; a TOML file's win over those that are found.

        Flags win over the limits of a TOML file. Raises `InvalidParams`.
        """
        of_file = ManagerSettings() if self._toml is None else read_models_file(self._toml)
        named = [self._of_entry(entry) for entry in of_file.entries]
        names = {preset.name for preset in named}
        found = self._presets.read(self._settings.models_preset, self._settings.models_dir)
        all_models = [*named, *(preset for preset in found if preset.name not in names)]
        check_names(all_models)
        return FoundPresets({preset.name: preset for preset in all_models}, self._limits(of_file))

    def _limits(self, of_file: ManagerSettings) -> ManagerSettings:
        memory, most = self._settings.models_memory, self._settings.models_max
        return replace(
            of_file,
            entries=(),
            memory_budget=of_file.memory_budget if memory is None else memory,
            max_loaded=most if self._toml is None or self._presets.sets("server.models_max") else of_file.max_loaded,
        )

    def _of_entry(self, entry: ModelEntry) -> ModelPreset:
        options = dict(entry.options)
        template, offline, token = (options.pop(name, None) for name in _OF_THE_SERVER)
        reference = parse_reference(str(entry.model)) if is_reference(entry.model) else None
        given = {name: value for name, value in self._settings.engine_options.items() if self._is_stronger(name)}
        settings = replace(
            self._settings,
            model=None if reference is not None or entry.model is None else Path(entry.model),
            aliases=(entry.name, *entry.aliases),
            tags=(),
            engine_options={**self._settings.engine_options, **options, **given},
            chat_template=self._settings.chat_template if template is None else template,
        )
        return ModelPreset(
            name=entry.name,
            settings=settings,
            source="preset",
            text=_as_text(entry),
            reference=reference,
            offline=self._presets.offline if offline is None else offline,
            hf_token=self._presets.hf_token if token is None else token,
            load_on_startup=entry.load_on_startup,
            pinned=entry.pinned,
            unload_idle_s=entry.unload_idle_s,
            stop_timeout_s=entry.stop_timeout_s,
        )

    def _is_stronger(self, option: str) -> bool:
        """Return whether an option of the command line is over the one of the file."""
        return self._presets.sets(f"engine.{option}")


def _as_text(entry: ModelEntry) -> str:
    """Return an entry as lines of a preset; secrets are left out."""
    shown = {"model": entry.model and Path(entry.model).name, **entry.options}
    lines = [f"{key} = {value}" for key, value in shown.items() if value is not None and key != "hf_token"]
    return "\n".join([f"[{entry.name}]", *lines]) + "\n\n"
