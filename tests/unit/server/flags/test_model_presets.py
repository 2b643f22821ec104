"""The models of a server with several: llama-server's presets, a folder, the caches, and their precedence."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.unit.server.flags.world import FakeFiles

from paceline.errors import InvalidParams
from paceline.server.flags import ModelPreset, ModelPresets, resolve
from paceline.server.flags.presets import canonical_name, read_presets

TWO = "[one]\nmodel = one.gguf\n[two]\nhf = user/repo:q8_0\n"


def read(
    text: str = TWO,
    *argv: str,
    env: Mapping[str, str] | None = None,
    files: Mapping[str, str] | None = None,
    cached: Mapping[str, str] | None = None,
    folders: tuple[str, ...] = (),
) -> dict[str, ModelPreset]:
    """The models by name, of a file p.ini with this text."""
    disk = FakeFiles({"p.ini": text, **(files or {})}, folders=folders)
    disk.cached = {name: Path(path) for name, path in (cached or {}).items()}
    found = resolve(["--models-preset", "p.ini", *argv], env or {}, disk)
    assert found.is_router
    presets = ModelPresets(found, disk).read(found.settings.models_preset, found.settings.models_dir)
    return {preset.name: preset for preset in presets}


def refusal(text: str) -> str:
    with pytest.raises(InvalidParams) as error:
        read(text)
    return str(error.value)


def engine(preset: ModelPreset) -> Any:
    return preset.settings.engine_options


def test_a_section_is_a_model_with_its_flags() -> None:
    """By long names, short names and variables, with the names that turn a switch off."""
    text = (
        "[one]\nmodel = one.gguf\nc = 512\nno-mmap = 1\nLLAMA_ARG_CACHE_RAM = 0\nalias = uno, eins\n"
        "chat_template_kwargs = {}\n"
    )
    (one,) = read(text).values()
    assert (one.source, one.reference, one.settings.model) == ("preset", None, Path("one.gguf"))
    assert engine(one) == {"n_ctx": 512, "load_mode": "none", "host_cache_bytes": 0, "isolation": "process"}
    assert one.settings.aliases == ("one", "uno", "eins")


def test_names_of_the_hub_are_kept_for_the_load() -> None:
    """Nothing is downloaded before; the tag in the section's name is written in capitals."""
    two = read("[user/repo:q8_0]\nhf-repo = user/repo:Q8_0\noffline = 1\n")["user/repo:Q8_0"]
    assert str(two.reference) == "user/repo:Q8_0" and two.offline and two.settings.model is None


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("a", "a"),
        ("u/r:q4_k_m", "u/r:Q4_K_M"),
        ("u/r:model-q8_0", "u/r:Q8_0"),
        ("u/r", "u/r"),
        ("http://x", "http://X"),
    ],
)
def test_tags_are_canonical(name: str, canonical: str) -> None:
    """As llama-server has them."""
    assert canonical_name(name).upper() == canonical.upper()


def test_the_command_line_is_stronger_than_a_section_and_that_than_all_models() -> None:
    """And all of them are stronger than variables."""
    text = "[*]\nctx-size = 1\nparallel = 2\nbatch-size = 64\n[one]\nmodel = one.gguf\nparallel = 3\nbatch-size = 128\n"
    one = read(text, "-b", "256", env={"LLAMA_ARG_CTX_SIZE": "9", "LLAMA_ARG_UBATCH": "32"})["one"]
    options = {"n_ctx": 1, "num_slots": 3, "n_batch": 256, "n_ubatch": 32}
    assert {name: engine(one)[name] for name in options} == options


def test_options_that_are_no_flags_are_rules_for_keeping_a_model() -> None:
    """llama-server's and two of paceline's own."""
    text = (
        "[*]\nstop-timeout = 3\n[one]\nmodel = one.gguf\nload-on-startup = on\npinned = true\n"
        "[two]\nmodel = b.gguf\nunload-idle-seconds = 60\nsleep-idle-seconds = 9\n"
    )
    models = read(text)
    assert (models["one"].load_on_startup, models["one"].pinned, models["one"].stop_timeout_s) == (True, True, 3)
    assert (models["two"].unload_idle_s, models["two"].pinned) == (60, False)
    assert engine(models["two"])["sleep_idle_s"] == 9


def test_what_is_of_the_whole_server_has_no_effect_in_a_section() -> None:
    """A note says so; drafts, which make nothing but speed, are passed over as well."""
    one = read("[one]\nmodel = one.gguf\nport = 1\napi-key = secret\nspec-synth-len = 3\n")["one"]
    assert len(one.notes) == 3 and "secret" not in str(one)
    assert one.settings.port == 8080 and one.settings.api_keys == ()
    assert "spec-synth-len has no effect" in one.notes[-1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("c = 1\n[one]\n", "p.ini, line 1: c stands before the first section"),
        ("[one]\nmodel one.gguf\n", "line 2: 'model one.gguf' is neither"),
        ("[one]\nmodel = a.gguf\nctx-sise = 1\n", "p.ini: [one]: unknown option 'ctx-sise'; did you mean 'ctx-size'"),
        ("[one]\nmodel = a.gguf\nctx-size = many\n", "p.ini: [one] ctx-size must be"),
        ("[one]\nmodel = a.gguf\nstop-timeout = x\n", "p.ini: [one] stop-timeout must be"),
        ("[one]\nctx-size = 1\n", "the preset [one] names no model"),
        ("[one]\nmodel = a.gguf\nhf-repo = u/r\n", "name two models"),
        ("[one]\nmodel = a.gguf\nhelp = 1\n", "of the command line alone"),
        ("[one]\nmodel = a.gguf\nalias = two\n[two]\nmodel = b.gguf\n", "are both called 'two'"),
        ("[one]\nmodel = a.gguf\nmmproj = x\n", "there is no file x"),
    ],
)
def test_mistakes_are_named_with_their_place(text: str, words: str) -> None:
    """File, section and key, or the line."""
    assert words in refusal(text)


def test_comments_blanks_and_a_version_are_passed_over() -> None:
    """A value ends at a comment; the last of two equal keys counts, and of two equal sections."""
    text = "\ufeffversion = 1\r\n; x\n# y\n\n [ one ] ; z\nmodel=a.gguf#c\n\tc = 1\nc = 2 ; d\n"
    (section,) = read_presets(Path("p.ini"), text.encode()).values()
    assert section.name == "one"
    assert [given.texts for given in section.flags] == [("a.gguf",), ("2",)]


def test_files_of_a_folder_are_models() -> None:
    """By their names, folders by theirs; projectors and drafts are none, of a split set the first part counts."""
    files = dict.fromkeys(
        [
            "d/a.gguf",
            "d/mmproj-a.gguf",
            "d/mtp-a.gguf",
            "d/read.me",
            "d/b/b-00001-of-00002.gguf",
            "d/b/b-00002-of-00002.gguf",
            "d/empty/x",
        ],
        "",
    )
    models = read("[*]\nc = 3\n[a]\nparallel = 2\n", "--models-dir", "d", files=files, folders=("d", "d/b", "d/empty"))
    assert {
        name: (model.source, model.settings.model.name) for name, model in models.items() if model.settings.model
    } == {"a": ("preset", "a.gguf"), "b": ("models_dir", "b-00001-of-00002.gguf")}
    assert [engine(model)["n_ctx"] for model in models.values()] == [3, 3] and engine(models["a"])["num_slots"] == 2


def test_models_of_the_caches_are_served_and_hidden_where_a_preset_has_them() -> None:
    """dedup-cache-models hides the model's file and that of its drafts; they stay there for requests."""
    cached = {name: f"cache/{name}/None/True/no token" for name in ("u/r:Q8_0", "u/d:Q8_0", "u/x:Q8_0")}
    text = "[one]\nhf-repo = u/r:Q8_0\nspec-draft-hf = u/d:Q8_0\n"
    assert not any(part.hidden for part in read(text, cached=cached).values())
    models = read(text + "dedup-cache-models = 1\n", cached=cached)
    assert {name for name, model in models.items() if model.hidden} == {"u/r:Q8_0", "u/d:Q8_0"}
    assert models["u/x:Q8_0"].source == "cache"


def test_several_models_are_served_where_no_model_is_named() -> None:
    """Any flag of the group does it; beside a model it has no effect, and without both it is the demo model."""
    files = FakeFiles()
    for argv in (["--models-max", "2"], ["--no-models-autoload"], ["--models-memory", "9"], ["--models-dir", "d"]):
        assert resolve(argv, {}, files).is_router
    assert not resolve([], {}, files).is_router
    one = resolve(["-m", "m.gguf", "--models-max", "2"], {}, files)
    assert not one.is_router and "--models-max has no effect" in one.notes[0]
    assert resolve(["-m", "m.gguf"], {"LLAMA_ARG_MODELS_DIR": "d"}, files).notes == ()
